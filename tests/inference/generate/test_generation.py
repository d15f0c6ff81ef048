"""Generation: the untouched model, repeatable samples, streams, and a real checkpoint's documented text."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, ConfigError, ModelError, Rerank, Sampling, TextError
from gerund.inference.generate.config import GenerationConfig
from gerund.language_model import LanguageModel
from tests.inference.generate.test_sequence import by_hand
from tests.tiny import byte_tokenizer, tiny, tiny_lm

PROMPTS = ["the cat", "x", "in another the thing", ""]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def build(model_type="llama"):
    return tiny_lm(model_type, attention=AttentionPlan(k=2))


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "opt"])
def test_greedy_batches_equal_one_token_at_a_time(model_type):
    lm = build(model_type=model_type)
    found = [one.token_ids for one in lm.generate(PROMPTS, 8, batch_size=3)]
    assert found == [by_hand(lm, prompt, 8, lambda logits_V, *_: logits_V) for prompt in PROMPTS]


@pytest.mark.parametrize("plan", ["bidir", "mask0-bidir", "inter-back", "extra-bidir", "extend-back"])
def test_logits_are_bit_equal_to_plain_transformers(tiny_folder, plan):
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    lm = gerund.load(tiny_folder, attention=plan)
    ids = torch.randint(3, 90, (2, 9))
    for _ in range(2):
        assert torch.equal(lm.model(ids).logits, plain(ids).logits)
        lm.encode(["the cat", "another"])


class TestSeeds:
    SAMPLING = Sampling(temperature=1.0, seed=7)

    def test_a_text_does_not_depend_on_its_place_or_on_the_other_prompts(self):
        lm = build()
        alone = {prompt: lm.generate(prompt, 8, self.SAMPLING)[0].token_ids for prompt in PROMPTS}
        for prompts in (PROMPTS, PROMPTS[::-1], [PROMPTS[1], PROMPTS[0], PROMPTS[1]]):
            found = lm.generate(prompts, 8, self.SAMPLING, batch_size=2)
            assert [one.token_ids for one in found] == [alone[prompt] for prompt in prompts]

    def test_a_sequence_gives_each_prompt_its_own(self):
        lm = build()
        seeds = [5, 6, 5]
        found = lm.generate(["the cat"] * 3, 8, Sampling(temperature=1.0, seed=np.array(seeds)))
        alone = [lm.generate("the cat", 8, Sampling(temperature=1.0, seed=seed))[0] for seed in seeds]
        assert [one.token_ids for one in found] == [one.token_ids for one in alone]
        assert found[0].token_ids == found[2].token_ids != found[1].token_ids

    def test_samples_stand_together_and_the_first_is_the_only_one(self):
        lm = build()
        many = lm.generate(PROMPTS, 8, self.SAMPLING, n=3, batch_size=4)
        assert len(many) == 3 * len(PROMPTS)
        singles = lm.generate(PROMPTS, 8, self.SAMPLING)
        assert [one.token_ids for one in many[::3]] == [one.token_ids for one in singles]
        last = PROMPTS[-1]
        again = lm.generate(last, 8, self.SAMPLING, n=3)
        assert [one.token_ids for one in many[-3:]] == [one.token_ids for one in again]
        assert len({tuple(one.token_ids) for one in again}) == 3

    def test_without_a_seed_equal_prompts_differ(self):
        lm = build()
        found = lm.generate(["the cat"] * 4, 12, Sampling(temperature=1.0))
        assert len({tuple(one.token_ids) for one in found}) > 1

    def test_a_sequence_serves_what_has_one_text(self):
        lm = build()
        one, listed = (Sampling(temperature=1.0, seed=seed) for seed in (3, [3]))
        assert list(lm.stream("the cat", 6, one)) == list(lm.stream("the cat", 6, listed))
        text = "the [blank] in"
        assert lm.infill(text, lengths=[2], sampling=one) == lm.infill(text, lengths=[2], sampling=listed)
        rerank = Rerank(2, scorer="overlap")
        assert lm.generate("the cat", 4, one, rerank=rerank) == lm.generate("the cat", 4, listed, rerank=rerank)

    @pytest.mark.parametrize(
        ("seed", "message"),
        [([1, 2], "`seed` has 2 seeds for 3 prompts"), ([1, "b", 2], "a seed is a whole number, not 'b'"),
         ("7", "seed is a whole number, not '7'"), (1.5, "seed is a whole number"), (True, "seed is a whole number")],
    )  # fmt: skip
    def test_impossible_ones_are_refused(self, seed, message):
        with pytest.raises(ConfigError, match=message):
            build().generate(["a", "b", "c"], 2, Sampling(temperature=1.0, seed=seed))


def test_an_error_in_a_stream_reaches_the_reader(monkeypatch):
    lm = build()
    monkeypatch.setattr(lm.model, "generate", lambda *a, **k: (_ for _ in ()).throw(ValueError("boom")))
    with pytest.raises(ValueError, match="boom"):
        list(lm.stream("the cat"))


def test_the_end_token_ends_the_text_and_is_not_in_it():
    lm = build()
    [first] = lm.generate("the cat", 1)
    lm.model.generation_config.eos_token_id = first.token_ids[0]
    [result] = lm.generate("the cat", 9)
    assert result.finished
    assert result.text == ""
    assert result.token_ids == []
    assert result.score == pytest.approx(first.score, abs=1e-5)


def test_the_context_ends_the_text():
    lm = build()
    [result] = lm.generate("x" * 59, 30)  # with <s> 60 of 64 tokens
    assert len(result.token_ids) == 4
    with pytest.raises(TextError, match="prompt 1 has 65 tokens and the model's context ends at 64"):
        lm.generate(["x", "x" * 64])


@pytest.mark.slow
def test_a_prompt_near_the_end_of_the_context_ends_no_other():
    lm = build()
    prompts = ["the cat", "x" * 59, "a dog", "y" * 59, "z" * 61]
    results = lm.generate(prompts, 30)
    assert [len(one.token_ids) for one in results] == [30, 4, 30, 4, 2]
    for one, prompt in zip(results, prompts, strict=True):
        [alone] = lm.generate(prompt, 30)
        assert one.token_ids == alone.token_ids


def test_bad_input():
    lm = build()
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        lm.generate("x", 0)
    for size, words in ((0, "`batch_size` must be at least 1, got 0"), (2.5, "batch_size is a whole number")):
        with pytest.raises(ConfigError, match=words):
            lm.generate("x", batch_size=size)
    with pytest.raises(TextError, match="text 0 is not a string"):
        lm.generate([3.5])
    with pytest.raises(TextError, match="prompt 0 is not valid Unicode"):
        lm.generate("a\udcff")
    no_bos = LanguageModel(tiny("llama", vocab_size=300), byte_tokenizer(bos=False))
    no_bos.tokenizer.bos_token = None
    with pytest.raises(TextError, match="prompt 0 is empty"):
        no_bos.generate("")


@pytest.mark.slow
def test_a_real_checkpoint_writes_its_documented_text_before_and_after_encoding(stories_folder):
    lm = gerund.load(stories_folder)
    for _ in range(2):
        assert lm.generate("", 40)[0].text.startswith(STORY)
        lm.encode(["a dog in the park", "Lily was happy"])


@pytest.mark.parametrize(
    "own",
    [
        {"suppress_tokens": "likeliest"}, {"bad_words_ids": [["likeliest"]]}, {"forced_eos_token_id": 2},
        {"max_time": 1e-9}, {"stop_strings": ["a", "e", " "]}, {"num_return_sequences": 2},
        {"repetition_penalty": 5.0}, {"do_sample": True, "temperature": 9.0}, {"max_length": 3},
    ],
)  # fmt: skip
def test_what_a_models_generation_config_asks_changes_nothing(own):
    lm = build()
    [expected] = lm.generate("the cat", 8)

    def filled(value):
        if isinstance(value, list):
            return [filled(one) for one in value]
        return expected.token_ids[0] if value == "likeliest" else value

    for name, value in own.items():
        found = filled(value)
        setattr(lm.model.generation_config, name, [found] if name == "suppress_tokens" else found)
    assert lm.generate("the cat", 8) == [expected]
    assert "".join(lm.stream("the cat", 8)) == expected.text
    assert all(getattr(lm.model.generation_config, name) is not None for name in own)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.0, seed=1), Sampling(temperature=1.0, top_p=0.9)])
def test_logits_that_are_no_numbers_are_an_error(sampling):
    lm = build()
    with torch.no_grad():
        lm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN or infinite in its dtype"):
        lm.generate("the cat", 4, sampling)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "n=0 is not between"), ({"n": 10**6}, "n=1000000"), ({"n": 2}, "are all the same"),
        ({"max_new_tokens": 0}, "at least 1"), ({"logprobs": -1}, "logprobs=-1"), ({"logprobs": True}, "logprobs"),
        ({"stop": [1]}, "stop is a text"), ({"stop": ("",)}, "empty"), ({"sampling": 3}, "sampling"),
        ({"constraint": "a|b"}, "constraint is a Constraint"),
    ],
)  # fmt: skip
def test_settings_are_checked_however_they_are_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        GenerationConfig(**settings)


def test_settings_take_what_generate_takes():
    assert GenerationConfig(stop="Lily").stop == ("Lily",)
    assert GenerationConfig(sampling=None).sampling == Sampling()
