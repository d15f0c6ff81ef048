"""What was read at one place stands at another as if it had been read there; what cannot be moved is refused."""

import pytest
import torch
from transformers import DynamicCache

from gerund import ConfigError, EncoderConfig
from gerund.attention.cache_names import CACHE
from gerund.inference.generate.rotated_keys import turns_of
from gerund.language_model import LanguageModel
from tests.tiny import byte_tokenizer, tiny

PREFIX, ONE, OTHER, REST = (
    [7 + 11 * row + 3 * place for place in range(size)] for row, size in enumerate((5, 9, 6, 4))
)


def reader(kind, **changes):
    return LanguageModel(tiny(kind, **changes), byte_tokenizer(), EncoderConfig(max_length=64))


@torch.no_grad()
def read_there(model, ids, start, cache=None):
    """Read tokens at a place, the slow and obvious way."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    known = cache.get_seq_length()
    places = torch.arange(start, start + len(ids))[None]
    mask = torch.ones((1, known + len(ids)), dtype=torch.long)
    found = model(
        torch.tensor([ids]), position_ids=places, attention_mask=mask, use_cache=True, **{CACHE: cache}
    )  # fmt: skip
    return cache, found.logits[:, -1]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt_neox", "cohere", "phi"])
def test_a_tail_is_what_reading_it_at_its_new_place_gives(kind):
    lm = reader(kind)
    begun = lm.read(PREFIX)
    tails = [begun.read(ids).tail(len(PREFIX)) for ids in (ONE, OTHER)]
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
    torch.testing.assert_close(joined.read(REST)._logits_BV, wanted, atol=2e-5, rtol=1e-4)
    # It is an approximation, and behind the prefix itself it is none.
    exact = lm.read([*joined.token_ids, *REST])._logits_BV
    assert (joined.read(REST)._logits_BV - exact).abs().max() > 1e-4
    alone = begun.with_tail(tails[0], len(PREFIX)).read(REST)._logits_BV
    torch.testing.assert_close(alone, lm.read([*PREFIX, *ONE, *REST])._logits_BV, atol=2e-5, rtol=1e-4)


def test_each_layer_turns_as_it_does():
    assert {turn.is_interleaved for turn in turns_of(reader("cohere").model)} == {True}
    assert {turn.is_interleaved for turn in turns_of(reader("llama").model)} == {False}
    model = tiny("smollm3", no_rope_layers=[1, 0, 1, 1])  # the second layer knows no places
    assert [turn.frequency_F is None for turn in turns_of(model)] == [False, True, False, False]


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "mamba"])
def test_what_cannot_be_moved_is_refused(kind):
    with pytest.raises(ConfigError, match="cannot be moved"):
        turns_of(tiny(kind))


def test_what_turns_by_the_length_of_the_text_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match="depends on the text's length"):
        turns_of(tiny("llama", rope_parameters=rope))
