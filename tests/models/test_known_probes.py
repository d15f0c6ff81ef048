"""A plan that was verified of files is not probed again, and nothing else is taken for it."""

from pathlib import Path

import pytest
import torch

import gerund
from gerund import language_model
from gerund.models import hash_cache
from tests.tiny import save_tiny


@pytest.fixture
def probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was probed; and small files count as large ones."""
    found: list[str] = []
    real = language_model.verify_once

    def counted(model, plan) -> None:
        found.append(repr(plan))
        real(model, plan)

    monkeypatch.setattr(language_model, "verify_once", counted)
    monkeypatch.setattr(hash_cache, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return found


def entries(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "caches" / "gerund" / "probes").iterdir())


def test_it_is_probed_once(tmp_path: Path, probed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny(tmp_path / "base")
    vectors = [gerund.load(base, attention="bidir").encode(["a cat"]) for _ in range(2)]
    assert (vectors[0] == vectors[1]).all()
    assert len(probed) == 1
    gerund.load(base, attention="causal")
    gerund.load(base, attention="bidir", dtype="bfloat16")
    assert len(probed) == 3
    # What is torn, or of something else, is no result.
    for entry in entries(tmp_path):
        entry.write_bytes(b"\xff")
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    monkeypatch.setattr(hash_cache, "__version__", "another")
    gerund.load(base, attention="bidir")
    assert len(probed) == 5


def test_changed_weights_and_configs_are_probed(tmp_path: Path, probed: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    lm = gerund.load(base, attention="bidir")
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] += 1
    lm.with_encoder(lm.encoder)
    assert len(probed) == 2
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"added": 1,', 1))
    gerund.load(base, attention="bidir")
    assert len(probed) == 3


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path, probed: list[str], monkeypatch) -> None:
    (tmp_path / "caches").write_text("a file")
    base = save_tiny(tmp_path / "base")
    for _ in range(2):
        gerund.load(base, attention="bidir")
    assert len(probed) == 2
    assert not hash_cache.probe_passed("0" * 32)
