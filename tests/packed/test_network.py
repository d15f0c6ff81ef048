"""A packed network computes what transformers computes from the file's blocks, however the work is divided."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gerund.errors import ConfigError, ModelError, ResourceError
from gerund.gguf_file import read_file
from gerund.packed import graph, graph_cache
from gerund.packed import network as packed_network
from gerund.packed.network import MASKED, KeyValues, PackedNetwork, parts_of
from gerund.packed.shape import read_shape
from gerund.packed.weights import GgufWeights
from tests.packed import reference

IDS = np.array([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])
CAUSAL = np.tril(np.ones((6, 6), bool))
CLOSE = {"atol": 2e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> PackedNetwork:
    path = reference.write_llama(tmp_path_factory.mktemp("packed") / "model.gguf")
    return PackedNetwork.open(path, threads=1, accuracy=0)


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.F32])
def test_logits_are_those_of_the_blocks(tmp_path: Path, kind: Type):
    path = reference.write_llama(tmp_path / "model.gguf", kind, output=True)
    expected = reference.logits(path, IDS[0])
    run = PackedNetwork.open(path, threads=1, accuracy=0).run(IDS[:1], outputs=["logits"])
    np.testing.assert_allclose(run.logits[0], expected, atol=1e-4)
    rounded = PackedNetwork.open(path, threads=1).run(IDS[:1], outputs=["logits"])
    assert np.corrcoef(rounded.logits.ravel(), expected.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("kind", [Type.Q5_1, Type.Q8_0])
def test_a_large_head_is_multiplied_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Type):
    file = read_file(reference.write_llama(tmp_path / "model.gguf", kind, output=True))
    whole = PackedNetwork.open(file.path, threads=1, cache=tmp_path / "whole").run(IDS, outputs=["logits"]).logits
    head = GgufWeights(file, read_shape(file)).matrix("head")
    monkeypatch.setattr(graph, "PIECE", head.codes_NGb.nbytes // 2)
    made = graph.build_head(read_shape(file), GgufWeights(file, read_shape(file)))
    assert [node.op_type for node in made.nodes].count("MatMulNBits") == 2
    pieces = PackedNetwork.open(file.path, threads=1, cache=tmp_path / "pieces").run(IDS, outputs=["logits"]).logits
    np.testing.assert_allclose(pieces, whole, **CLOSE)


def test_each_layer_takes_its_mask(network: PackedNetwork):
    both = np.where(np.stack([CAUSAL, np.ones_like(CAUSAL)]), np.float32(0), MASKED)
    masks = np.broadcast_to(both[:, None, None], (2, 2, 1, 6, 6))
    upper, lower, all_layers = (
        network.run(IDS, masks_PB1TS=masks, mask_of_layer_L=choice, outputs=["hidden_states"]).hidden_states
        for choice in ([0, 1], [1, 0], [1, 1])
    )
    causal = network.run(IDS, outputs=["hidden_states"]).hidden_states
    np.testing.assert_array_equal(upper[1], causal[1])
    np.testing.assert_array_equal(lower[1], all_layers[1])
    assert all(np.abs(one[2] - causal[2]).max() > 0.01 for one in (upper, lower, all_layers))
    expected = reference.logits(network.sources[0], IDS[1], both_ways=True)
    logits = network.run(IDS, masks_PB1TS=masks[1:], outputs=["logits"]).logits
    np.testing.assert_allclose(logits[1], expected, atol=1e-4)


def test_a_written_cache_continues_texts_of_different_lengths(network: PackedNetwork):
    expected = network.run(IDS, outputs=["states"]).states
    cache = KeyValues(network.shape, 2, 8)
    network.run(IDS[:, :4], cache=cache)
    # Each text continues from a length of its own, and overwrites what follows there.
    write = np.array([4, 2])
    more = np.stack([IDS[0, 4:6], IDS[1, 2:4]])
    run = network.run(more, cache=cache, write_B=write)
    np.testing.assert_allclose(run.states[0], expected[0, 4:], **CLOSE)
    np.testing.assert_allclose(run.states[1], expected[1, 2:4], **CLOSE)
    grown = cache.grown(16)
    run = network.run(IDS[:, 4:], cache=grown, write_B=np.array([4, 4]))
    np.testing.assert_allclose(run.states, expected[:, 4:], **CLOSE)
    assert np.abs(grown.keys[1][:, :, :6]).min() > 0
    assert np.abs(grown.keys[1][:, :, 6:]).max() == 0


def test_a_long_prompt_is_read_in_parts(network: PackedNetwork, monkeypatch: pytest.MonkeyPatch):
    caches = [KeyValues(network.shape, 2, 8) for _ in range(2)]
    run = network._run
    lengths: list[int] = []
    monkeypatch.setattr(network, "_run", lambda inputs, *rest, **more: (
        lengths.append(inputs["embedded"].shape[1]), run(inputs, *rest, **more))[1])  # fmt: skip
    found = []
    for cache, most in zip(caches, (256, 2), strict=True):
        monkeypatch.setattr(packed_network, "_MOST_AT_ONCE", most)
        monkeypatch.setattr(packed_network, "LEAST_READ", 1)
        network.run(IDS[:, :1], cache=cache)
        at = np.array([[0, 4], [2, 3]])
        found.append(
            network.run(IDS[:, 1:], cache=cache, write_B=np.array([1, 1]), logits_at=at, outputs=["logits", "states"])
        )
    assert lengths == [1, 5, 1, 2, 2, 1]
    np.testing.assert_allclose(found[1].states, found[0].states, **CLOSE)
    np.testing.assert_allclose(found[1].logits, found[0].logits, **CLOSE)
    for keys, other in zip(caches[1].keys, caches[0].keys, strict=True):
        np.testing.assert_allclose(keys, other, **CLOSE)


def test_logits_only_where_they_are_wanted(network: PackedNetwork):
    every = network.run(IDS, outputs=["logits"]).logits
    some = network.run(IDS, logits_at=np.array([[5], [2]]), outputs=["logits", "states"])
    assert some.logits.shape == (2, 1, reference.VOCABULARY)
    np.testing.assert_allclose(some.logits[:, 0], every[[0, 1], [5, 2]], **CLOSE)
    assert network.run(IDS).logits is None
    # An arena would keep the memory of the largest logits.
    assert not network._head.get_session_options().enable_cpu_mem_arena


def test_embeddings_may_be_given(network: PackedNetwork):
    expected = network.run(IDS)
    given = network.run(None, embedded_BTD=network.embed(IDS))
    np.testing.assert_array_equal(given.states, expected.states)


def test_no_part_of_a_prompt_is_so_short_that_it_takes_other_kernels():
    for first in (0, 8, 104):
        for end in range(first + 1, first + 700):
            parts = list(parts_of(first, end, 128))
            assert [begin for begin, _ in parts] == [first, *(stop for _, stop in parts[:-1])]
            assert parts[-1][1] == end
            sizes = [stop - begin for begin, stop in parts]
            assert max(sizes) <= 128
            assert len(sizes) == 1 or min(sizes) >= 16


def outputs_of(section) -> set[str]:
    return {value.name for value in section.session.get_outputs()}


def test_attention_probabilities(network: PackedNetwork):
    run = network.run(IDS, outputs=["attention", "states"])
    assert [one.shape for one in run.attention] == [(2, 4, 6, 6)] * 2
    np.testing.assert_allclose(run.attention[1].sum(-1), 1, rtol=1e-5)
    assert np.abs(run.attention[0][:, :, ~CAUSAL]).max() == 0
    np.testing.assert_allclose(run.states, network.run(IDS).states, **CLOSE)


def test_a_cut_network_opens_where_the_cache_can_only_be_read(
    network: PackedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {"threads": 1, "accuracy": 0, "cache": tmp_path / "cache"}
    PackedNetwork.open(network.sources[0], **options)
    parts = set((tmp_path / "cache").rglob("part-*"))

    def refuse(*_: object, **__: object):
        raise ResourceError("cannot write")

    monkeypatch.setattr(graph_cache, "atomic_file", refuse)
    cut = PackedNetwork.open(network.sources[0], cut=1, **options)
    np.testing.assert_array_equal(cut.run(IDS).states, network.run(IDS).states)
    assert set((tmp_path / "cache").rglob("part-*")) == parts


@pytest.mark.parametrize("caches", [True, False])
def test_a_cut_network_computes_the_same_in_one_copy_of_its_layers(
    network: PackedNetwork, tmp_path: Path, caches: bool
):
    (tmp_path / "no").write_text("")  # where nothing can be cached, graphs are cut in memory
    with nullcontext() if caches else pytest.warns(UserWarning, match="could not cache"):
        folder = tmp_path / "cache" if caches else tmp_path / "no" / "cache"
        # A graph of the same layers that hands nothing on is another one.
        PackedNetwork.open(network.sources[0], threads=1, accuracy=0, cache=folder).run(IDS, depth=1)
        cut = PackedNetwork.open(network.sources[0], threads=1, accuracy=0, cut=1, cache=folder)
        kinds = ["logits", "states"]
        wanted, found = (
            [
                one.run(IDS[:, :4], cache=cache, outputs=kinds),
                one.run(IDS[:, 4:], cache=cache, write_B=np.array([4, 4]), outputs=kinds),
                one.run(IDS, depth=1),
            ]
            for one, cache in ((one, KeyValues(one.shape, 2, 8)) for one in (network, cut))
        )
        # The lower layers' graph is part of the whole network's.
        assert not cut._more_sections
        assert [section.layers for section in cut._sections] == [range(1), range(1, 2)]
        assert all("hidden_0" not in outputs_of(section) for section in network._sections)
        for depth in (1, None):
            runs = (one.run(IDS, depth=depth, outputs=["states", "hidden_states"]) for one in (network, cut))
            for runs_of, run in zip((wanted, found), runs, strict=True):
                runs_of.append(run)
        attention = cut.run(IDS, outputs=["attention"]).attention
    exact = {"atol": 0, "rtol": 0} if caches else CLOSE
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.states, other.states, **exact)
        for state, same in zip(one.hidden_states or (), other.hidden_states or (), strict=True):
            np.testing.assert_allclose(state, same, **exact)
    assert [len(run.hidden_states) for run in found[3:]] == [2, 3]
    np.testing.assert_allclose(found[1].logits, wanted[1].logits, **exact)
    np.testing.assert_allclose(attention[1], network.run(IDS, outputs=["attention"]).attention[1], **CLOSE)


def test_what_does_not_fit_is_refused(network: PackedNetwork, tmp_path: Path):
    cache = KeyValues(network.shape, 2, 8)
    with pytest.raises(ConfigError, match="8 slots, too few for 6 tokens from 3 on"):
        network.run(IDS, cache=cache, write_B=np.array([0, 3]))
    with pytest.raises(ConfigError, match="of 2 texts, not 1"):
        network.run(IDS[:1], cache=cache)
    with pytest.raises(ConfigError, match="masks are"):
        network.run(IDS, masks_PB1TS=np.zeros((1, 2, 1, 6, 7), np.float32))
    with pytest.raises(ConfigError, match="not words"):
        network.run(IDS, outputs=["words"])
    path = reference.write_llama(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_gate", b"blk.1.ffn_gaze"))
    with pytest.raises(ModelError, match=r"ffn_gate\.weight is missing"):
        PackedNetwork.open(path)
