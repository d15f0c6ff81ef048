"""A model that is quick to export, and its export to ONNX."""

from dataclasses import replace
from pathlib import Path

import pytest

import gerund
from gerund import LanguageModel
from gerund.exporting.shared import Export
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with two layers: what is exported takes its time for each."""
    return save_tiny(tmp_path_factory.mktemp("models") / "two-layers", num_hidden_layers=2)


@pytest.fixture(scope="session")
def prompted(two_layers: Path) -> LanguageModel:
    """An encoder that reads a prompt, under a plan with masks of its own."""
    lm = gerund.load(two_layers, attention="inter-bidir", k=1, dtype="float32")
    return LanguageModel(lm.model, lm.tokenizer, replace(lm.encoder, prompts={"query": "Q:"}))


@pytest.fixture(scope="session")
def onnx_export(prompted: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Its export to ONNX, which takes torch many seconds; no test changes it."""
    return prompted.export(tmp_path_factory.mktemp("onnx") / "out", "onnx")
