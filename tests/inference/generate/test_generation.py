"""Generation: the untouched model, repeatable draws, streams, and a real checkpoint's documented text."""

import threading

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, ConfigError, EncoderConfig, Sampling, TextError
from gerund.inference.generate.generation import _Draw
from gerund.language_model import LanguageModel
from tests.tiny import byte_tokenizer, tiny

PROMPTS = ["the cat", "x", "in another the thing", ""]
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def build(plan=None, model_type="llama", **changes):
    tokenizer = byte_tokenizer()
    model = tiny(model_type, vocab_size=len(tokenizer), **changes)
    return LanguageModel(model, tokenizer, EncoderConfig(attention=plan or AttentionPlan(k=2)))


def greedy_by_hand(model, ids, steps, end=2):
    ids, scores = list(ids), []
    for _ in range(steps):
        with torch.no_grad():
            logprobs = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        token = int(logprobs.argmax())
        scores.append(float(logprobs[token]))
        if token == end:
            break
        ids.append(token)
    return ids, scores


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "opt"])
def test_greedy_batches_equal_one_token_at_a_time(model_type):
    lm = build(model_type=model_type)
    results = lm.generate(PROMPTS, 8, batch_size=3)
    for prompt, result in zip(PROMPTS, results, strict=True):
        start = lm.tokenizer(prompt).input_ids
        ids, scores = greedy_by_hand(lm.model, start, 8)
        assert result.token_ids == ids[len(start) :]
        assert result.score == pytest.approx(np.mean(scores), abs=1e-4)


@pytest.mark.parametrize("plan", ["bidir", "mask0-bidir", "inter-back", "extra-bidir", "extend-back"])
def test_logits_are_bit_equal_to_plain_transformers(tiny_folder, plan):
    plain = AutoModelForCausalLM.from_pretrained(tiny_folder)
    lm = gerund.load(tiny_folder, attention=plan)
    ids = torch.randint(3, 90, (2, 9))
    for _ in range(2):
        assert torch.equal(lm.model(ids).logits, plain(ids).logits)
        lm.encode(["the cat", "another"])


def test_draws_are_repeatable_and_do_not_depend_on_the_batch():
    lm = build()
    sampling = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=7)
    together = lm.generate(PROMPTS, 8, sampling)
    assert together == lm.generate(PROMPTS, 8, sampling)
    assert [r.token_ids for r in together] == [r.token_ids for r in lm.generate(PROMPTS, 8, sampling, batch_size=1)]
    assert together != lm.generate(PROMPTS, 8, Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=8))
    assert lm.generate(["the cat"] * 2, 8, sampling)[0] != lm.generate(["the cat"] * 2, 8, sampling)[1]


def test_the_global_random_state_is_left_alone():
    lm = build()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    lm.generate(PROMPTS, 4, Sampling(temperature=1.0, seed=1))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.7), Sampling(temperature=1, top_k=3), Sampling(temperature=1, top_p=0.6),
     Sampling(temperature=1.3, typical_p=0.5)],
)  # fmt: skip
def test_draws_follow_the_filtered_distribution(sampling):
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.0, -1.0, -3.0]])
    n = 6000
    draw = _Draw(sampling, list(range(n)))
    scores = logits
    for filter_ in draw.filters:
        scores = filter_(None, scores)
    expected = scores.softmax(-1)[0].numpy()
    drawn = draw(None, logits.expand(n, -1)).argmax(-1).numpy()
    share = np.bincount(drawn, minlength=6) / n
    assert np.abs(share - expected).max() < 4 * np.sqrt(0.25 / n)
    assert (share[expected == 0] == 0).all()


def test_a_stream_is_the_text_in_pieces():
    lm = build()
    for prompt in PROMPTS:
        [whole] = lm.generate(prompt, 12)
        assert "".join(lm.stream(prompt, 12)) == whole.text


def test_a_stream_that_is_dropped_stops_the_model():
    lm = build()
    pieces = lm.stream("the cat", 50, Sampling(temperature=1, seed=1))
    next(pieces)
    assert "gerund-stream" in {thread.name for thread in threading.enumerate()}
    pieces.close()
    assert "gerund-stream" not in {thread.name for thread in threading.enumerate()}


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
    with pytest.raises(ConfigError, match="writes nothing"):
        lm.generate("x", 0)
    for size, words in ((0, "batch_size=0 leaves no room for a prompt"), (2.5, "batch_size is a whole number")):
        with pytest.raises(ConfigError, match=words):
            lm.generate("x", batch_size=size)
    with pytest.raises(TextError, match="text 0 is not a string"):
        lm.generate([3])
    with pytest.raises(TextError, match="prompt 0 is not valid Unicode"):
        lm.generate("a\udcff")
    for settings, words in [
        ({"temperature": -1.0}, "negative"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"typical_p": 1.5}, "typical_p=1.5"),
        ({"top_k": 0}, "top_k=0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            Sampling(**settings)
    no_bos = LanguageModel(tiny("llama", vocab_size=300), byte_tokenizer(bos=False))
    no_bos.tokenizer.bos_token = None
    with pytest.raises(TextError, match="prompt 0 is empty"):
        no_bos.generate("")


def test_a_real_checkpoint_writes_its_documented_text_before_during_and_after_encoding(stories_folder):
    lm = gerund.load(stories_folder)
    texts = ["a dog in the park", "Lily was happy"] * 20
    assert lm.generate("", 40)[0].text.startswith(STORY)
    stop, vectors = threading.Event(), []

    def encode():
        while not stop.is_set():
            vectors.append(lm.encode(texts))

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert lm.generate("", 40)[0].text.startswith(STORY)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert len(vectors) > 1
    assert max(np.abs(v - vectors[0]).max() for v in vectors) < 1e-5
    assert lm.generate("", 40)[0].text.startswith(STORY)
