"""Without its library, an integration says how to install it."""

import importlib
import sys

import pytest

from gerund.errors import MissingDependencyError


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("haystack", "haystack", "haystack"),
        ("langchain", "langchain_core.callbacks", "langchain"),
        ("llama_index", "llama_index.core.base.llms.types", "llama-index"),
        ("mteb", "mteb.models", "eval"),
        ("sentence_transformers", "sentence_transformers", "st"),
    ],
)
def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, module: str, missing: str, extra: str) -> None:
    name = f"gerund.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(MissingDependencyError, match=rf"pip install 'gerund\[{extra}\]'"):
        importlib.import_module(name)
