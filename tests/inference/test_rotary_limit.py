"""Models that turn keys otherwise in long texts: a text does not depend on a longer one beside it."""

import numpy as np
import pytest
import torch

from gerund import AttentionPlan, Rerank, Sampling
from gerund.inference.encode.incremental import IncrementalEncoder
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.inference.generate.reproducibility import check_batching
from gerund.inference.generate.reranking import search
from gerund.inference.likelihood import causal_runtime, sequence_logprobs
from gerund.inference.tokens import Tokens, rotary_limit, token_batches
from gerund.language_model import LanguageModel
from tests.tiny import long_rotary, tiny, tiny_lm

LIMIT = 32
TEXTS = ["fox jumps up", "cold river", "b" * 20 + "rivers run down" + "w" * 24, "k" * 32, "quick zebu " + "g" * 20]


def lm_of(plan: str = "causal") -> LanguageModel:
    return tiny_lm("phi3", changes=long_rotary(LIMIT), attention=AttentionPlan(plan))


@pytest.fixture(scope="module")
def lm():
    return lm_of()


def ids_of(lm, texts=TEXTS):
    return [lm.tokenizer(text).input_ids for text in texts]


def test_the_limit_is_read_off_the_settings(lm) -> None:
    assert list(map(len, ids_of(lm))) == [13, 10, 59, LIMIT + 1, LIMIT]
    assert rotary_limit(lm.model.config) == LIMIT
    assert rotary_limit(tiny("phi3").config) is None
    assert rotary_limit(tiny("gpt2").config) is None
    # Some models have settings for each kind of layer.
    config = tiny("gemma3_text").config
    config.rope_parameters["full_attention"] |= lm.model.config.rope_parameters
    assert rotary_limit(config) == LIMIT


def test_batches_hold_texts_of_one_side() -> None:
    lengths = [31, 33, 32, 40, 5]
    assert token_batches(lengths, 1000) == [[3, 1, 2, 0, 4]]
    assert token_batches(lengths, 1000, limit=32) == [[3, 1], [2, 0, 4]]


@pytest.mark.parametrize("plan", ["bidir", "causal"])
def test_vectors_are_those_of_texts_alone(plan) -> None:
    lm = lm_of(plan)
    alone = np.concatenate([lm.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(lm.encode(TEXTS), alone, atol=1e-5)


def test_vectors_of_beginnings_that_were_read_before_are_those_of_texts_alone(lm) -> None:
    runtime = causal_runtime(lm.model, lm.tokenizer)
    whole = lm.tokenizer(TEXTS[2] + " and all the rest").input_ids
    # A text grows over the limit, on, and another takes its beginning back; what all have in common is read first.
    calls = [[20], [28, 30], [40], [45, 50, 60], [31], [22, 32, 33, 60]]
    incremental = IncrementalEncoder(runtime)
    for lengths in calls:
        texts = [Tokens(whole[:length], 0, 0) for length in lengths]
        found = incremental.encode(texts)
        alone = np.concatenate([IncrementalEncoder(runtime).encode([text]) for text in texts])
        np.testing.assert_allclose(found, alone, rtol=1e-3, atol=1e-4)


def test_log_probabilities_are_those_of_texts_alone(lm) -> None:
    sequences = [(ids, 1) for ids in ids_of(lm)]
    together = sequence_logprobs(lm.model, lm.tokenizer, sequences)
    for own, sequence in zip(together, sequences, strict=True):
        [alone] = sequence_logprobs(lm.model, lm.tokenizer, [sequence])
        np.testing.assert_allclose(own, alone, atol=1e-4)


def test_generated_texts_are_those_of_texts_alone(lm) -> None:
    # Some stay on one side, and some grow over the limit, each at its own time.
    settings = GenerationConfig.of(15, Sampling(temperature=1.0, seed=3), {"n": 2})
    prompts = [*TEXTS, "a" * 19, "q" * 24, "s" * 19]
    together = generate(lm.model, lm.tokenizer, prompts, settings)
    alone = [one for prompt in prompts for one in generate(lm.model, lm.tokenizer, [prompt], settings)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    # And each is what the model says of the text as it stands then.
    for prompt in prompts[:2]:
        ids = lm.tokenizer(prompt).input_ids
        [text] = generate(lm.model, lm.tokenizer, [prompt], GenerationConfig.of(24, None, {}))
        for _ in text.token_ids:
            with torch.no_grad():
                ids.append(int(lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert ids[-len(text.token_ids) :] == text.token_ids


def test_searched_texts_are_those_of_texts_alone(lm) -> None:
    def judge(numbers, texts):
        return [[float(len(text)) for text in own] for own in texts]

    prompts = ["a" * 19, TEXTS[2], TEXTS[0], "q" * 24]
    for rerank in (Rerank(samples=2, every=4), Rerank(samples=4)):
        settings = dict(max_new_tokens=15, sampling=Sampling(temperature=1.0, seed=3))
        together = search(lm.model, lm.tokenizer, prompts, judge, rerank, **settings)
        for own, prompt in zip(together, prompts, strict=True):
            [alone] = search(lm.model, lm.tokenizer, [prompt], judge, rerank, **settings)
            assert own.text == alone.text


@pytest.mark.parametrize("longest", [12, 15])
def test_texts_of_one_side_alone_are_written_in_slots(lm, longest, monkeypatch) -> None:
    monkeypatch.setattr(generation, "_WORTHWHILE", 1)
    rooms = []
    plain = generation.decode_all
    monkeypatch.setattr(
        generation, "decode_all", lambda decoder, *rest: (rooms.append(decoder.slots.room), plain(decoder, *rest))
    )
    prompts = ["a" * 19, "q" * 10, "s" * 7, "zebu"]
    settings = GenerationConfig.of(longest, None, {})
    together = generate(lm.model, lm.tokenizer, prompts, settings, batch_size=2)
    assert rooms == ([LIMIT] if longest == 12 else [])
    alone = [generate(lm.model, lm.tokenizer, [prompt], settings)[0] for prompt in prompts]
    assert [one.text for one in together] == [one.text for one in alone]


def test_slots_for_texts_of_both_sides_are_not_fit(lm) -> None:
    assert check_batching(lm.model, lm.tokenizer, 2, LIMIT, recalling=False).fits
    found = check_batching(lm.model, lm.tokenizer, 2, LIMIT + 1, recalling=False)
    assert not found.fits
    assert "more than 32 tokens" in found.why
