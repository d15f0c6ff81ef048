"""Built graphs are kept, and never used half-written, changed, or for another file."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest

from gerund.errors import ModelError
from gerund.jobs import disk_cache
from gerund.packed import graph, graph_cache
from gerund.packed.network import PackedNetwork
from tests.packed import reference

IDS = np.array([[3, 14, 15, 9]])


def logits(model: PackedNetwork) -> np.ndarray:
    return model.run(IDS, outputs=["logits"]).logits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return reference.write_llama(tmp_path / "model.gguf")


@pytest.fixture
def expected(path: Path, tmp_path: Path) -> np.ndarray:
    return logits(PackedNetwork.open(path, threads=1, cache=tmp_path / "elsewhere"))


def entries(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and entry.name != "known"]


def test_a_graph_is_built_once(path: Path, tmp_path: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
    body, head = entries(tmp_path / "cache")
    for entry in (body, head):
        assert {file.name for file in entry.iterdir()} >= {"model.onnx", "model.bin", "content.json"}
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(graph, "build", lambda *_, **__: pytest.fail("built again"))
    np.testing.assert_array_equal(logits(PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")), expected)
    np.testing.assert_array_equal(logits(PackedNetwork.open(copy, threads=1, cache=tmp_path / "cache")), expected)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is in memory")
def test_weights_take_memory_when_they_are_used(path: Path, tmp_path: Path, expected: np.ndarray):
    PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
    network = PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")

    def in_memory() -> int:
        sizes = re.findall(r"/model\.bin\n(?:.*\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
        return sum(map(int, sizes))

    assert in_memory() == 0
    np.testing.assert_array_equal(logits(network), expected)
    assert in_memory() > 0


def test_another_file_or_version_has_its_own(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache"
    first = logits(PackedNetwork.open(path, threads=1, cache=cache))
    reference.write_llama(path, seed=1)  # in place of the first, under its name
    second = logits(PackedNetwork.open(path, threads=1, cache=cache))
    assert np.abs(first - second).max() > 0.1
    monkeypatch.setattr(graph_cache.ort, "__version__", "0.0")
    np.testing.assert_array_equal(logits(PackedNetwork.open(path, threads=1, cache=cache)), second)
    assert len(entries(cache)) == 6  # a body and a head each


@pytest.mark.parametrize("name", ["model.bin", "model.onnx", "content.json"])
def test_a_changed_entry_is_built_again(path: Path, tmp_path: Path, expected: np.ndarray, name: str):
    cache = tmp_path / "cache"
    for _ in range(2):  # the second trusts what the first has seen
        PackedNetwork.open(path, threads=1, cache=cache)
    for entry in entries(cache):
        data = bytearray((entry / name).read_bytes())
        data[len(data) // 2] ^= 255
        (entry / name).write_bytes(data)
    np.testing.assert_array_equal(logits(PackedNetwork.open(path, threads=1, cache=cache)), expected)
    np.testing.assert_array_equal(logits(PackedNetwork.open(path, threads=1, cache=cache)), expected)


def test_stopped_while_building(path: Path, tmp_path: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patched:
        patched.setattr(graph_cache, "sha256_of", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        patched.setattr(disk_cache, "_digest", lambda *_: "0")
        patched.setattr(graph_cache, "_code", lambda: "0")
        with pytest.raises(KeyboardInterrupt):
            PackedNetwork.open(path, threads=1, cache=cache)
    assert entries(cache) == []
    np.testing.assert_array_equal(logits(PackedNetwork.open(path, threads=1, cache=cache)), expected)


def test_no_room(path: Path, tmp_path: Path, expected: np.ndarray):
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(UserWarning, match=r"could not cache the graph of model\.gguf, which stays in memory"):
        model = PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
    gc.collect()
    np.testing.assert_array_equal(logits(model), expected)


def test_weights_that_do_not_fit_together(path: Path, tmp_path: Path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.0.ffn_down", b"blk.0.xxx_xxxx").replace(b"blk.0.ffn_gate", b"blk.0.ffn_down"))
    with pytest.raises(ModelError, match="missing"):
        PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
    swapped = data.replace(b"blk.0.attn_k", b"blk.0.attn_?").replace(b"blk.0.attn_q", b"blk.0.attn_k")
    path.write_bytes(swapped.replace(b"blk.0.attn_?", b"blk.0.attn_q"))
    with pytest.raises(ModelError, match=r"attn_q\.weight is \(32, 64\), not \(64, 64\)"):
        PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
    path.write_bytes(
        data.replace(b"output_norm.weight", b"output_nor?.weight").replace(b"blk.0.ffn_norm", b"blk.0.ffn_nor?")
    )
    with pytest.raises(ModelError, match="the weights of feed_norm_0 are missing"):
        PackedNetwork.open(path, threads=1, cache=tmp_path / "cache")
