"""A hash that is known of files is taken while both files and tensors are what they were, and never otherwise."""

import json
import os
from pathlib import Path

import pytest
import torch

import gerund
from gerund.models import hash_cache
from tests.tiny import save_tiny


@pytest.fixture
def worked_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was hashed; and small files count as large ones."""
    found: list[str] = []
    real = hash_cache.weights_hash

    def counted(state: dict) -> str:
        found.append(real(state))
        return found[-1]

    monkeypatch.setattr(hash_cache, "weights_hash", counted)
    monkeypatch.setattr(hash_cache, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return found


@pytest.mark.slow
def test_it_is_worked_out_once(tmp_path: Path, worked_out: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    hashes = {gerund.load(base, attention=plan).weights_hash for plan in ("causal", "bidir")}
    assert hashes == set(worked_out)
    assert len(worked_out) == 1
    # Held in another type, values are others.
    assert gerund.load(base, dtype="bfloat16").weights_hash not in hashes
    assert len(worked_out) == 2
    [one, _] = sorted((tmp_path / "caches" / "gerund" / "weights").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    one.write_text("no hash")
    assert gerund.load(base).weights_hash in hashes
    assert len(worked_out) == 3


def test_tensors_that_changed_are_not_those_of_the_files(tmp_path: Path, worked_out: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    lm = gerund.load(base)
    before = lm.weights_hash
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] += 1
    assert lm.weights_hash != before
    assert gerund.load(base).weights_hash == before
    changed = gerund.load(base)
    with torch.no_grad():
        changed.model.lm_head.weight[0, 0] += 1
    assert changed.weights_hash == lm.weights_hash


def test_files_that_changed_are_others(tmp_path: Path, worked_out: list[str]) -> None:
    """Also one of the same size, and with its old date."""
    base = save_tiny(tmp_path / "base")
    before, file = gerund.load(base).weights_hash, base / "model.safetensors"
    said = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (said.st_size, said.st_mtime_ns)
    assert gerund.load(base).weights_hash != before


@pytest.mark.parametrize("values", [{"num_hidden_layers": 2}, {"is_causal": False}])
def test_a_config_that_takes_other_tensors_of_the_same_files(
    tmp_path: Path, worked_out: list[str], values: dict[str, object]
) -> None:
    """Fewer layers, or no head: the files are the same, and the model is another."""
    base = save_tiny(tmp_path / "base", "qwen3")
    before, config = gerund.load(base).weights_hash, json.loads((base / "config.json").read_text())
    if "num_hidden_layers" in values:
        values = {**values, "layer_types": config["layer_types"][:2]}
    (base / "config.json").write_text(json.dumps({**config, **values}))
    assert gerund.load(base, attention="causal").weights_hash == worked_out[-1] != before


def test_without_a_place_to_keep_it(tmp_path: Path, worked_out: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    base = save_tiny(tmp_path / "base")
    assert gerund.load(base).weights_hash == gerund.load(base).weights_hash
    assert len(worked_out) == 2


def test_small_files_are_hashed_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert gerund.load(save_tiny(tmp_path / "base")).weights_hash
    assert not (tmp_path / "caches").exists()
