"""Cached hashes and probes are used while files and tensors are unchanged, and never otherwise."""

import json
import os
from pathlib import Path

import pytest
import torch

import gerund
from gerund import language_model
from gerund.models import fingerprint, hash_cache
from tests.tiny import save_tiny


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of their own, for small files too."""
    monkeypatch.setattr(fingerprint, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def counting(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    """Return the results of a function, call by call."""
    real, results = getattr(module, name), []

    def counted(*arguments: object) -> object:
        results.append(real(*arguments))
        return results[-1]

    monkeypatch.setattr(module, name, counted)
    return results


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counting(monkeypatch, hash_cache, "weights_hash")


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    return counting(monkeypatch, language_model, "verify_once")


@pytest.mark.slow
def test_weights_are_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    hashes = {gerund.load(base, attention=plan).weights_hash for plan in ("causal", "bidir")}
    assert hashes == set(hashed)
    assert len(hashed) == 1
    # Held in another type, values are others.
    assert gerund.load(base, dtype="bfloat16").weights_hash not in hashes
    assert len(hashed) == 2
    [one, _] = sorted((tmp_path / "caches" / "gerund" / "weights").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    one.write_text("no hash")
    assert gerund.load(base).weights_hash in hashes
    assert len(hashed) == 3


def test_tensors_that_changed_are_not_those_of_the_files(tmp_path: Path, hashed: list[str]) -> None:
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


def test_files_that_changed_are_others(tmp_path: Path, hashed: list[str]) -> None:
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
    tmp_path: Path, hashed: list[str], values: dict[str, object]
) -> None:
    """Fewer layers, or no head: the files are the same, and the model is another."""
    base = save_tiny(tmp_path / "base", "qwen3")
    before, config = gerund.load(base).weights_hash, json.loads((base / "config.json").read_text())
    if "num_hidden_layers" in values:
        values = {**values, "layer_types": config["layer_types"][:2]}
    (base / "config.json").write_text(json.dumps({**config, **values}))
    assert gerund.load(base, attention="causal").weights_hash == hashed[-1] != before


def test_a_cache_that_cannot_be_written(tmp_path: Path, hashed: list[str], probed: list[None]) -> None:
    (tmp_path / "caches").write_text("a file")
    base = save_tiny(tmp_path / "base")
    assert gerund.load(base, attention="bidir").weights_hash == gerund.load(base, attention="bidir").weights_hash
    assert len(hashed) == len(probed) == 2
    assert not fingerprint.probe_passed("0" * 32)


def test_small_files_are_hashed_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "LEAST_BYTES", 1 << 22)
    assert gerund.load(save_tiny(tmp_path / "base")).weights_hash
    assert not (tmp_path / "caches").exists()


def test_it_is_probed_once(tmp_path: Path, probed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny(tmp_path / "base")
    vectors = [gerund.load(base, attention="bidir").encode(["a cat"]) for _ in range(2)]
    assert (vectors[0] == vectors[1]).all()
    assert len(probed) == 1
    gerund.load(base, attention="causal")
    gerund.load(base, attention="bidir", dtype="bfloat16")
    assert len(probed) == 3
    # A damaged entry is ignored.
    for entry in (tmp_path / "caches" / "gerund" / "probes").iterdir():
        entry.write_bytes(b"\xff")
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    monkeypatch.setattr(fingerprint, "__version__", "another")
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
