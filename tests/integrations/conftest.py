"""Keeps quick runs quick: to import a framework takes seconds, in each of pytest's processes."""

from pathlib import Path

import pytest

FRAMEWORKS = ("test_agents.py", "test_langchain.py", "test_llama_index.py", "test_haystack.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the frameworks' tests, which are all slow, unread where slow ones are not asked for."""
    named = any(Path(argument.partition("::")[0]).name == collection_path.name for argument in config.args)
    quick = "not slow" in (config.option.markexpr or "")
    return True if quick and not named and collection_path.name in FRAMEWORKS else None
