"""A cache with room holds what transformers' own holds, whatever is done with its rows."""

import pytest
import torch
from transformers import DynamicCache

from gerund.attention.cache_names import CACHE
from gerund.inference.generate import preallocated_cache as module
from gerund.inference.generate.preallocated_cache import cache_for, preallocated_cache, to_write_on
from tests.tiny import CONFIGS, GIVEN, LATENT, ODD, RECURRENT, tiny


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_writes_with_it(name):
    model = tiny(name)
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 7, 6]])
    cache = preallocated_cache()
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        parts = [model(ids[:, at : at + 1], use_cache=True, **{CACHE: cache}).logits for at in range(3)]
    assert torch.allclose(torch.cat(parts, dim=1), whole[:, :3], atol=1e-5)


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
        found = [model(ids[:, :1], use_cache=True, **{CACHE: to_write_on(kept)}).logits for _ in range(2)]
    assert torch.equal(*found)
    assert all(map(torch.equal, before, (layer.keys for layer in kept.layers)))
