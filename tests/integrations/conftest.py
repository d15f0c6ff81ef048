"""Keeps quick runs quick, since to import a framework takes seconds in each of pytest's processes; and an index."""

from pathlib import Path

import pytest

import gerund
from tests.integrations.common import TEXTS

FRAMEWORKS = ("test_agents.py", "test_langchain.py", "test_llama_index.py", "test_haystack.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the frameworks' tests, which are all slow, unread where slow ones are not asked for."""
    named = any(Path(argument.partition("::")[0]).name == collection_path.name for argument in config.args)
    quick = "not slow" in (config.option.markexpr or "")
    return True if quick and not named and collection_path.name in FRAMEWORKS else None


@pytest.fixture(scope="module")
def index(bundled: gerund.LanguageModel) -> gerund.Index:
    """An index of the texts in memory."""
    found = gerund.open_index(None, bundled)
    found.add_documents([gerund.Document(text.split()[0].lower(), text) for text in TEXTS])
    return found
