"""A cache with room holds what transformers' own holds, whatever is done with its rows."""

import pytest
import torch
from transformers import DynamicCache

from gerund import ConfigError
from gerund.attention.layer_state import CACHE
from gerund.inference.generate import kv_cache as module
from gerund.inference.generate.kv_cache import cache_for, copy_on_write, key_rotations, preallocated_cache
from tests.tiny import CONFIGS, GIVEN, LATENT, ODD, RECURRENT, VOCAB, tiny, tiny_lm


def both(rows=3):
    caches, draw = (preallocated_cache(), DynamicCache()), torch.Generator().manual_seed(0)

    def append(tokens, rows=rows):
        new = [torch.randn(rows, 2, tokens, 4, generator=draw) for _ in range(2)]
        for layer in range(2):
            found, expected = (cache.update(new[0] + layer, new[1], layer) for cache in caches)
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    return caches, append


def same(caches):
    for one, other in zip(*(cache.layers for cache in caches), strict=True):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert one.get_seq_length() == other.get_seq_length()


@pytest.mark.parametrize("room", [1, 3, 64])
def test_holds_what_transformers_own_holds(monkeypatch, room):
    monkeypatch.setattr(module, "_ROOM", room)
    caches, append = both()
    for tokens in (5, 1, 1, 4, 1, 1, 1):
        append(tokens)
    same(caches)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([2, 0, 0])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 2, 0])),
        lambda cache: cache.crop(-2),
    ],
)
def test_rows_that_are_chosen_go_on_apart(change):
    caches, append = both()
    append(5)
    append(1)
    for cache in caches:
        change(cache)
    same(caches)
    append(1)
    append(1)
    same(caches)


def test_more_rows_and_none():
    caches, append = both()
    append(4)
    for cache in caches:
        cache.batch_repeat_interleave(2)
    append(1, rows=6)
    same(caches)
    for cache in caches:
        cache.reset()
    append(2)
    same(caches)


def test_nothing_is_copied_for_a_token():
    cache = preallocated_cache()
    new = torch.zeros(2, 2, 1, 4)
    places = set()
    for _ in range(module._ROOM):
        keys, _ = cache.update(new, new, 0)
        places.add(keys.data_ptr())
    assert len(places) == 1


@pytest.mark.sweep(quick=6, check=9)
@pytest.mark.parametrize("name", [*CONFIGS, *RECURRENT, *GIVEN, *LATENT, *ODD])
def test_transformers_loop_writes_the_same_with_it(name):
    model, written = tiny(name), []
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = torch.tensor([[5, 6, 7, 8], [0, 8, 7, 6]])
    for cache in (cache_for(model), None):
        own = {} if cache is None else {CACHE: cache}
        written.append(model.generate(ids, attention_mask=(ids > 0).long(), **settings, **own))
    assert torch.equal(*written)


def test_models_that_keep_something_else_get_none():
    assert all(cache_for(tiny(name)) is not None for name in ("llama", "gpt2", "qwen3", "deepseek_v3"))
    assert all(cache_for(tiny(name)) is None for name in ("gemma2", "lfm2", "mamba", "falcon_h1"))


def test_a_folder_that_chooses_its_cache_keeps_it():
    model = tiny("llama")
    model.generation_config.cache_implementation = "static"
    assert cache_for(model) is None


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_what_is_written_on_leaves_the_first_as_it_was(name):
    model = tiny(name)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        kept = model(ids, use_cache=True)[CACHE]
        before = [layer.keys.clone() for layer in kept.layers]
        found = [model(ids[:, :1], use_cache=True, **{CACHE: copy_on_write(kept)}).logits for _ in range(2)]
    assert torch.equal(*found)
    assert all(map(torch.equal, before, (layer.keys for layer in kept.layers)))


PREFIX, ONE, OTHER, REST = (
    [7 + 11 * row + 3 * place for place in range(size)] for row, size in enumerate((5, 9, 6, 4))
)


def reader(kind, **changes):
    return tiny_lm(kind, changes={"vocab_size": VOCAB, **changes}, max_length=64)


@torch.no_grad()
def read_there(model, ids, start, cache=None):
    """Read tokens at a place, the slow and obvious way."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    known = cache.get_seq_length()
    places = torch.arange(start, start + len(ids))[None]
    mask = torch.ones((1, known + len(ids)), dtype=torch.long)
    found = model(torch.tensor([ids]), position_ids=places, attention_mask=mask, use_cache=True, **{CACHE: cache})
    return cache, found.logits[:, -1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "cohere", "phi"])
def test_a_tail_is_what_reading_it_at_its_new_place_gives(kind):
    lm = reader(kind)
    begun = lm.prefill(PREFIX)
    tails = [begun.prefill(ids).tail(len(PREFIX)) for ids in (ONE, OTHER)]
    assert [one.token_ids for one in tails] == [ONE, OTHER]
    joined = begun
    for tail in tails:
        joined = joined.with_tail(tail, len(PREFIX))
    assert joined.token_ids == [*PREFIX, *ONE, *OTHER]
    # The other chunk behind a prefix that stands as far back as it did: distances are all that attention knows.
    cache, _ = read_there(lm.model, [*PREFIX, *ONE], 0)
    shifted, _ = read_there(lm.model, [*PREFIX, *OTHER], len(ONE))
    for layer, own in zip(cache.layers, shifted.layers, strict=True):
        layer.update(own.keys[:, :, len(PREFIX) :], own.values[:, :, len(PREFIX) :])
    _, wanted = read_there(lm.model, REST, len(joined.token_ids), cache)
    torch.testing.assert_close(joined.prefill(REST)._logits_BV, wanted, atol=2e-5, rtol=1e-4)
    # It is an approximation, and behind the prefix itself it is none.
    exact = lm.prefill([*joined.token_ids, *REST])._logits_BV
    assert (joined.prefill(REST)._logits_BV - exact).abs().max() > 1e-4
    alone = begun.with_tail(tails[0], len(PREFIX)).prefill(REST)._logits_BV
    torch.testing.assert_close(alone, lm.prefill([*PREFIX, *ONE, *REST])._logits_BV, atol=2e-5, rtol=1e-4)


def test_each_layer_turns_as_it_does():
    assert {turn.is_interleaved for turn in key_rotations(reader("cohere").model)} == {True}
    assert {turn.is_interleaved for turn in key_rotations(reader("llama").model)} == {False}
    model = tiny("smollm3", no_rope_layers=[1, 0, 1, 1])  # the second layer knows no places
    assert [turn.frequency_F is None for turn in key_rotations(model)] == [False, True, False, False]


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mamba"])
def test_what_cannot_be_moved_is_refused(kind):
    with pytest.raises(ConfigError, match="can't be moved"):
        key_rotations(tiny(kind))


def test_what_turns_by_the_length_of_the_text_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="depends on the length of the text"):
        key_rotations(tiny("llama", rope_parameters=rope))
