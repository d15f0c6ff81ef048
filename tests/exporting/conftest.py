"""A model that is quick to export."""

from pathlib import Path

import pytest

from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model with two layers: what is exported takes its time for each."""
    return save_tiny(tmp_path_factory.mktemp("models") / "two-layers", num_hidden_layers=2)
