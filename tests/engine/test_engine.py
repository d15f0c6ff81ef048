"""The engine: the same text whatever else is served."""

import random
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

import gerund
from gerund import Engine, EngineConfig, Sampling, TextError
from gerund.attention.interface import cpu_has_bfloat16
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sequence import Piece
from gerund.inference.generate.slots import DecodeLayer, Slots
from gerund.language_model import LanguageModel
from gerund.packed import LEAST_READ
from tests.engine.common import LONG, PROMPTS, SEEDED, alone, held, requests, rows_of, tiny_lm
from tests.tiny import byte_tokenizer, long_rotary, tiny

# Real sizes in emulated bfloat16 take half a minute each; tiny models are tried in it everywhere.
needs_bfloat16 = pytest.mark.skipif(not cpu_has_bfloat16(), reason="this processor emulates bfloat16")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def lm(request):
    return tiny_lm(dtype=request.param)


@pytest.fixture(scope="module")
def wide(bundled):
    """The bundled model in float32; what an engine of ``SLOTS`` slots verifies with it is verified once."""
    return gerund.load(bundled.spec, dtype="float32")


SLOTS = 7


@pytest.mark.slow
def test_a_request_gives_the_same_alone_and_beside_others(lm) -> None:
    asked = requests()
    with Engine(lm) as engine:
        guarantee = engine.state().guarantee
        one_by_one = [engine.submit_generate(*request).result(30) for request in asked]
        first, second = [engine.submit_generate(*request) for request in asked], []
        for request in asked:  # join while others leave
            time.sleep(0.005)
            second.append(engine.submit_generate(*request))
        together = [[future.result(30) for future in futures] for futures in (first, second)]
    assert guarantee != "none", engine.state().why
    for found in together:
        assert list(map(rows_of, found)) == list(map(rows_of, one_by_one))
    if lm.model.dtype == torch.bfloat16 and guarantee != "bits of generate":
        return  # the likeliest tokens are often equally likely there, so that other bits are other texts
    library = [alone(lm, *request) for request in asked]
    assert [[own.text for own in found] for found in one_by_one] == [[own.text for own in found] for found in library]
    if guarantee == "bits of generate":
        # Several samples of a prompt are read together by `generate`, which is another product.
        pairs = [pair for pair in zip(one_by_one, library, strict=True) if len(pair[0]) == 1]
        assert all(rows_of(found) == rows_of(expected) for found, expected in pairs)


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2", "stablelm"])
def test_what_slots_cannot_hold_is_written_alone(kind) -> None:
    lm = tiny_lm(kind)
    asked = [
        ("the cat", GenerationConfig.of(5, None, {"logprobs": 1})),
        ("in", GenerationConfig.of(4, SEEDED, {"n": 2})),
    ]
    with Engine(lm) as engine:
        state = engine.state()
        futures = [engine.submit_generate(*request) for request in asked]
        for future, request in zip(futures, asked, strict=True):
            assert rows_of(future.result(30)) == rows_of(alone(lm, *request))
    assert state.guarantee == "bits of generate"
    assert "alone" in state.why


@pytest.mark.slow
def test_exact_engines_write_as_generate_does(plain) -> None:
    with Engine(plain, EngineConfig(exact=True)) as engine:
        futures = [engine.submit_generate(*request) for request in requests()]
        for future, request in zip(futures, requests(), strict=True):
            assert rows_of(future.result(30)) == rows_of(alone(plain, *request))


def test_a_text_that_no_slot_has_room_for_is_written_alone(plain) -> None:
    settings = GenerationConfig.of(30, None, {})
    with Engine(plain, EngineConfig(context=16)) as engine:
        short, long = (
            engine.submit_generate("in", GenerationConfig.of(4, None, {})),
            engine.submit_generate("the cat", settings),
        )
        assert rows_of(long.result(30)) == rows_of(alone(plain, "the cat", settings))
        assert len(short.result(30)[0].token_ids) <= 4
        assert engine.state().context == 16


def test_a_prompt_is_read_once_for_several_texts(engine, plain) -> None:
    [one, two] = engine.submit_generate("the cat", GenerationConfig.of(5, SEEDED, {"n": 2})).result(30)
    assert engine.state().tokens_read == len(plain.tokenizer("the cat")["input_ids"])
    assert one.text != two.text


def test_a_long_prompt_is_read_in_parts_while_texts_are_written(wide, monkeypatch) -> None:
    lm = wide
    prompt, settings = "the old man and the sea of the night " * 30, GenerationConfig.of(6, None, {"logprobs": 0})
    endless = GenerationConfig.of(40, None, {"regex": "[a-e]{90,}"})
    own, read = Slots.prefill, []

    def note(slots, ids, known=0):
        read.append((known, len(ids)))
        return own(slots, ids, known)

    monkeypatch.setattr(Slots, "prefill", note)
    found = []
    for others in (0, 1):
        with Engine(lm, EngineConfig(slots=SLOTS, prefill_tokens=64, prefix_tokens=0)) as engine:
            if engine.state().guarantee == "none":
                pytest.skip(engine.state().why)
            with held(engine):
                del read[:]
                beside = [engine.submit_generate("in", endless) for _ in range(others)]
                asked = engine.submit_generate(prompt, settings)
            found.append(rows_of(asked.result(60)))
            length = asked.result()[0].usage.prompt_tokens
            for one in beside:
                one.result(60)
        starts = range(0, length - LEAST_READ + 1, 64) if others else [0]
        assert read[others:] == [*((start, start + 64) for start in starts[:-1]), (starts[-1], length)]
    assert found[0] == found[1]


def test_prompts_that_wait_are_read_together_and_get_what_they_get_alone(wide, monkeypatch) -> None:
    lm = wide
    settings = GenerationConfig.of(5, None, {"logprobs": 0})
    prompts = [f"{'the old man and the sea of the night ' * count}and {count}" for count in (2, 5, 3, 8, 4, 2)]
    prompts.insert(3, "in")  # too short: few rows are computed another way
    own, together = Slots.prefill_together, []

    def note(slots, given, known):
        together.append([len(ids) for ids in given])
        return own(slots, given, known)

    with Engine(lm, EngineConfig(slots=SLOTS, prefix_tokens=0)) as engine:
        if engine.state().guarantee == "none":
            pytest.skip(engine.state().why)
        monkeypatch.setattr(Slots, "prefill_together", note)
        by_themselves = [rows_of(engine.submit_generate(prompt, settings).result(60)) for prompt in prompts]
        one_by_one = [lengths for [lengths] in together]
        del together[:]
        with held(engine):
            futures = [engine.submit_generate(prompt, settings) for prompt in prompts]
            away = engine.submit_generate("the old man and the sea of the night " * 9, settings)
            away.cancel()
        assert [rows_of(future.result(60)) for future in futures] == by_themselves
    # Four at a time at most, and the short one by itself.
    assert together == [one_by_one[:3], one_by_one[3:4], one_by_one[4:]]


def test_an_error_of_reading_ends_those_who_were_read_together_and_nobody_else(wide, monkeypatch) -> None:
    lm = wide
    settings, prompt = GenerationConfig.of(3, None, {}), "the old man and the sea of the night " * 3
    own, failed = Slots.prefill_together, []

    def fail_once(slots, given, known):
        if len(given) > 1 and not failed:
            failed.append(len(given))
            raise RuntimeError("no room")
        return own(slots, given, known)

    with Engine(lm, EngineConfig(slots=SLOTS, prefix_tokens=0)) as engine:
        if engine.state().guarantee == "none":
            pytest.skip(engine.state().why)
        monkeypatch.setattr(Slots, "prefill_together", fail_once)
        with held(engine):
            futures = [engine.submit_generate(prompt, settings) for _ in range(2)]
        for future in futures:
            with pytest.raises(RuntimeError, match="no room"):
                future.result(60)
        assert engine.submit_generate(prompt, settings).result(60)
    assert failed == [2]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bfloat16)])
def test_prefixes_that_are_asked_for_keep_the_promise_where_that_is_proved(wide, dtype) -> None:
    lm = wide if dtype == torch.float32 else gerund.load(wide.spec, dtype=dtype)
    system, settings = "the old man and the sea of the night " * 8, GenerationConfig.of(4, None, {"logprobs": 0})
    prompts = [f"{system}{end}" for end in ("and", "went home " * 5, "was what they saw of him " * 20)]
    found = []
    for tokens, order in ((0, prompts), (4096, prompts), (4096, prompts[::-1])):
        with Engine(lm, EngineConfig(slots=SLOTS, prefix_tokens=tokens)) as engine:
            if engine.state().guarantee == "none":
                pytest.skip(engine.state().why)
            assert engine.state().guarantee == "same text under any load"
            found.append({prompt: rows_of(engine.submit_generate(prompt, settings).result(60)) for prompt in order})
            assert engine.state().tokens_reused >= 64 if tokens else engine.state().tokens_reused == 0
    assert found[0] == found[1] == found[2]


def test_attention_that_is_no_kernel_keeps_prefixes_too() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 256
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    model.set_attn_implementation("eager")
    lm, settings = LanguageModel(model, tokenizer), GenerationConfig.of(4, None, {})
    with Engine(lm, EngineConfig(slots=3, prefix_tokens=128)) as engine:
        with held(engine):
            futures = [engine.submit_generate("the cat sat " * count, settings) for count in (8, 9, 10)]
        texts = [future.result(30)[0].text for future in futures]
        assert engine.state().tokens_reused > 0
    assert texts == [alone(lm, "the cat sat " * count, settings)[0].text for count in (8, 9, 10)]


def test_steps_without_empty_rows_promise_nothing_and_write_the_same_texts(monkeypatch) -> None:
    lm = tiny_lm(num_hidden_layers=2)
    asked, rows = requests(6), set()
    expect = DecodeLayer.expect

    def counted(self, row_B, *more):
        rows.add(len(row_B))
        expect(self, row_B, *more)

    monkeypatch.setattr(DecodeLayer, "expect", counted)
    with Engine(lm, EngineConfig(slots=4, reproducible=False)) as engine:
        rows.clear()
        engine.submit_generate("the cat", GenerationConfig(max_new_tokens=5)).result(60)
        assert rows == {1}
        futures = [engine.submit_generate(*request) for request in asked]
        found = [[one.text for one in future.result(60)] for future in futures]
    assert engine.state().guarantee == "none"
    assert found == [[one.text for one in alone(lm, *request)] for request in asked]


# -------------------------------------------------------------------------------------------- pieces, vectors, calls


def test_pieces_are_the_text(engine) -> None:
    pieces: list[Piece] = []
    [one, two] = engine.submit_generate(
        "the cat", GenerationConfig.of(9, SEEDED, {"n": 2}), on_text=pieces.append
    ).result(30)
    for number, whole in enumerate((one, two)):
        own = [piece for piece in pieces if piece.index == number]
        assert "".join(piece.text for piece in own) == whole.text
        assert own[-1].result == whole


def test_texts_of_many_requests_share_batches_and_keep_their_order(engine, plain) -> None:
    lists = [list(PROMPTS[:count]) for count in (1, 5, 2, 8)]
    with held(engine):
        futures = [engine.submit_encode(texts) for texts in lists]
    for future, texts in zip(futures, lists, strict=True):
        found, expected = future.result(30), plain.encode_with_usage(texts)
        np.testing.assert_allclose(found.vectors, expected.vectors, atol=1e-5)
        assert (found.token_counts, found.truncated) == (expected.token_counts, expected.truncated)
    assert engine.state().texts_encoded == sum(map(len, lists))


def test_token_ids_are_encoded_as_their_text(engine, plain) -> None:
    text = "the cat in a hat"
    with_specials = plain.tokenizer(text)["input_ids"]
    without = plain.tokenizer(text, add_special_tokens=False)["input_ids"]
    found = engine.submit_encode([text, with_specials, without], dimensions=8).result(30).vectors
    assert found.shape == (3, 8)
    np.testing.assert_allclose(found[1:], found[[0, 0]], atol=1e-5)
    for wrong in ([5, 100000], [-1], [3, 3, 2, 1]):
        with pytest.raises(TextError, match="text 1 is a list of token ids that are not this model's"):
            engine.submit_encode(["a", wrong])


def test_calls_run_whole_and_texts_are_written_on_meanwhile(engine, plain) -> None:
    pieces: list[Piece] = []
    before = []
    future = engine.submit_generate("the cat", LONG, on_text=pieces.append)

    def fill() -> str:
        before.append(len(pieces))
        text = plain.infill("the [blank] in the end", lengths=[1, 2, 3]).text
        before.append(len(pieces))
        return text

    assert (
        engine.submit_call(fill, tokens=20).result(30) == plain.infill("the [blank] in the end", lengths=[1, 2, 3]).text
    )
    future.result(30)
    assert before[1] > before[0], "nothing was written while the gap was filled"


def test_how_long_each_request_waited_for_its_turn_is_told_once() -> None:
    waits: list[float] = []
    with Engine(tiny_lm(), EngineConfig(slots=1), verify=False, on_turn=waits.append) as engine:
        with held(engine):
            engine.submit_encode(["a cat", "a dog " * 9])
            engine.submit_call(lambda: 1, tokens=1)
            engine.submit_generate("the", GenerationConfig(3, Sampling(temperature=1.0, seed=1), n=2))
            time.sleep(0.05)
        engine.drain(30)
    assert len(waits) == 4
    assert all(0.05 <= wait < 30 for wait in waits[1:])


def test_short_requests_do_not_wait_for_a_long_call(engine, plain) -> None:
    ends = threading.Event()

    def long() -> int:
        passes = 0
        while not ends.is_set():
            plain.encode(["the cat in the hat"])
            passes += 1
        return passes

    call = engine.submit_call(long, tokens=10)
    try:
        assert engine.submit_generate("the cat", GenerationConfig.of(3, None, {})).result(30)
        assert engine.submit_encode(["in"]).result(30).vectors.shape[0] == 1
    finally:
        ends.set()
    assert call.result(30) > 0


@pytest.mark.slow
def test_many_threads_at_once(wide) -> None:
    """A tenth is cancelled; of the others none is lost and none is wrong."""
    chance = random.Random(0)
    words = ["the", "old", "man", "looked", "at", "sea", "and", "first", "railway", "opened", "in", "year", "of"]

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 30)))

    samplings = [None, Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.9, seed=4),
                 Sampling(repetition_penalty=1.3)]  # fmt: skip
    jobs = []
    for number in range(32):
        if number % 3 == 2:
            jobs.append([text() for _ in range(chance.randint(1, 3))])
        else:
            options = chance.choice([{}, {}, {"stop": [" the", "."]}, {"logprobs": 1}, {"regex": "[a-z ]{4,12}"}])
            jobs.append((text(), GenerationConfig.of(chance.randint(1, 16), chance.choice(samplings), options)))
    expected = [alone(wide, *job) if isinstance(job, tuple) else wide.encode(job) for job in jobs]
    found: dict[int, object] = {}

    def client(number: int) -> None:
        own = random.Random(number)
        futures = {}
        for index in range(number, len(jobs), 4):
            job = jobs[index]
            futures[index] = engine.submit_generate(*job) if isinstance(job, tuple) else engine.submit_encode(job)
            if own.random() < 0.1:
                time.sleep(own.random() * 0.05)
                futures[index].cancel()
            elif own.random() < 0.3:
                time.sleep(own.random() * 0.02)
        for index, future in futures.items():
            try:
                found[index] = future.result(60)
            except CancelledError:
                found[index] = None

    with Engine(wide, EngineConfig(slots=SLOTS)) as engine:
        bits = engine.state().guarantee == "bits of generate"
        clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
        for one in clients:
            one.start()
        for one in clients:
            one.join(240)
    assert sorted(found) == list(range(len(jobs))), "some were lost"
    assert sum(one is None for one in found.values()) < 8
    for index, job in enumerate(jobs):
        got, wanted = found[index], expected[index]
        if got is None:
            continue
        if isinstance(job, list):
            np.testing.assert_allclose(got.vectors, wanted, atol=1e-4)
        elif bits:
            assert rows_of(got) == rows_of(wanted), job
        else:
            assert [one.text for one in got] == [one.text for one in wanted], job
    state = engine.state()
    assert (state.live_rows, state.queued, state.queued_tokens) == (0, 0, 0)
    assert not engine._prepared.generation._job_of


def test_texts_do_not_depend_on_longer_ones_beside_them() -> None:
    """Of a model whose keys are rotated differently beyond a limit, which one prompt passes and one would come to."""
    limit, settings = 52, GenerationConfig.of(7, None, {})
    lm = tiny_lm("phi3", **long_rotary(limit))
    prompts = ["rivers run down" + "w" * 40, "k" * 49, "fox jumps up", "cold river", "zebu", "quick"]
    with Engine(lm, EngineConfig(slots=8)) as engine:
        with held(engine):
            together = [engine.submit_generate(prompt, settings) for prompt in prompts]
        found = [future.result(30)[0].text for future in together]
        assert engine.state().context == limit
    assert found == [alone(lm, prompt, settings)[0].text for prompt in prompts]
