"""Requests to the engine that do not end well, and the end of an engine."""

import threading
import time
from concurrent.futures import CancelledError

import pytest

from gerund import ConfigError, Engine, EngineConfig, Sampling, TextError
from gerund.engine.config import EngineFuture, EngineState
from gerund.errors import ClosedError, DeadlineError, EngineError, ModelError, QueueFullError, TooLargeError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.sequence import Piece
from tests.engine.common import LONG, PROMPTS, SEEDED, alone, held, rows_of


@pytest.mark.slow
def test_one_row_that_fails_ends_alone(engine, plain) -> None:
    def broken(piece: Piece) -> None:
        raise SystemExit(3)

    # No token of the model spells this letter.
    impossible = GenerationConfig.of(9, None, {"regex": "[a-c]{9}"})
    form = engine.submit_generate("in", impossible)
    bad = engine.submit_generate("the cat", LONG, on_text=broken)
    good = engine.submit_generate("the cat", LONG)
    with pytest.raises(EngineError, match="SystemExit"):
        bad.result(30)
    assert rows_of(good.result(30)) == rows_of(engine.submit_generate("the cat", LONG).result(30))
    assert form.result(30)
    assert engine.state().failed == 1
    assert not engine._prepared.generation._job_of


def test_a_form_that_allows_nothing_ends_its_request_alone(engine, monkeypatch) -> None:
    from gerund.inference.generate.constraints import ConstraintState

    def nothing(self, size):
        raise ModelError("no token fits")

    good = engine.submit_generate("the cat", LONG)
    monkeypatch.setattr(ConstraintState, "allowed", nothing)
    with pytest.raises(ModelError, match="no token fits"):
        engine.submit_generate("in", GenerationConfig.of(4, None, {"choice": ["a"]})).result(30)
    assert len(good.result(30)[0].token_ids) > 5


def test_a_step_that_fails_ends_those_who_took_part_and_no_others(engine, monkeypatch) -> None:
    from gerund.inference.generate.slots import Slots

    plain_step = Slots.step

    def failing(self, tokens):
        monkeypatch.setattr(Slots, "step", plain_step)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Slots, "step", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.submit_generate("the cat", LONG).result(30)
    assert engine.submit_generate("the cat", LONG).result(30)
    assert engine.state().live_rows == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_breaks_leaves_nobody_waiting(engine, monkeypatch) -> None:
    def broken(own) -> None:
        raise LookupError("a mistake of ours")

    monkeypatch.setattr(engine, "_check_deadlines", broken)
    with pytest.raises(EngineError, match="a mistake of ours"):
        engine.submit_generate("the cat", LONG).result(30)
    with pytest.raises(ClosedError):
        engine.submit_encode(["a"])
    assert not engine.state().running


def test_callbacks_that_fail_disturb_nobody(engine) -> None:
    future = engine.submit_generate("in", GenerationConfig.of(3, None, {}))
    future.future.add_done_callback(lambda _: 1 / 0)
    assert future.result(30)
    assert engine.submit_encode(["a"]).result(30)


def test_a_request_is_cancelled_in_the_queue_and_at_work(engine) -> None:
    with held(engine):
        waiting = engine.submit_generate("the cat", LONG)
        tokens = engine.state().queued_tokens
        assert waiting.cancel()
        assert engine.state().queued_tokens == tokens - waiting.tokens
    came = threading.Event()
    at_work = engine.submit_generate("the cat", LONG, on_text=lambda _: came.set())
    assert came.wait(20)
    at_work.cancel()
    for future in (waiting, at_work):
        with pytest.raises(CancelledError):
            future.result(30)
    engine.submit_encode(["a"]).result(30)
    engine.submit_encode(["a"]).result(30)
    assert engine.state().live_rows == 0
    assert engine.state().cancelled == 2
    assert not at_work.cancel() or at_work.future.cancelled()


def test_cancelling_ends_the_reading_of_a_prompt(plain, monkeypatch) -> None:
    from gerund.engine.batching import GenerationQueue

    futures: list[EngineFuture] = []
    passes = []
    abandoned = GenerationQueue.is_abandoned.fget

    def cancel_first(self):
        if self._prefills and self._prefills[0].logits_V is None and futures:
            passes.append(len(passes))
            futures[0].cancel()
        return abandoned(self)

    with Engine(plain) as engine:
        monkeypatch.setattr(GenerationQueue, "is_abandoned", property(cancel_first))
        with held(engine):
            futures.append(engine.submit_generate("the cat", LONG))
        other = engine.submit_generate("in", GenerationConfig.of(3, None, {}))
        assert other.result(30)
    assert passes
    with pytest.raises(CancelledError):
        futures[0].result(30)


def test_deadlines_hold_in_the_queue_and_at_work(engine) -> None:
    with held(engine):
        late = [engine.submit_generate("in", LONG, deadline=0.01), engine.submit_encode(["a"], deadline=0.01)]
        late.append(engine.submit_call(lambda: 1, tokens=1, deadline=0.01))
        time.sleep(0.05)
    slow = engine.submit_generate("the cat", LONG, on_text=lambda _: time.sleep(0.02), deadline=0.1)
    for future in (*late, slow):
        with pytest.raises(DeadlineError):
            future.result(30)
    assert engine.state().late == 4
    assert engine.submit_encode(["a"], deadline=30).result(30)


def test_a_full_queue_says_when_to_come_back(engine) -> None:
    with held(engine):
        futures = [engine.submit_generate("the cat", LONG)]  # a queue with room takes it
        futures += [
            engine.submit_generate("the cat", LONG) for _ in range((200 - futures[0].tokens) // futures[0].tokens)
        ]
        with pytest.raises(QueueFullError, match="tokens wait already") as refused:
            engine.submit_generate("the cat", LONG)
        assert 1 <= refused.value.retry_after <= 60
        with pytest.raises(QueueFullError):  # a list counts its sum
            engine.submit_encode(["the cat in the hat"] * 8)
        small = engine.submit_encode(["a"])
    assert small.result(30)
    assert all(future.result(30) for future in futures)
    assert engine.state().refused == 2


def test_what_never_fits_is_told_apart_from_what_does_not_fit_now(engine) -> None:
    with pytest.raises(TooLargeError, match="divide it"):
        engine.submit_encode(["the cat in the hat"] * 200)
    with pytest.raises(TooLargeError):
        engine.submit_generate("the cat", GenerationConfig.of(30, SEEDED, {"n": 20}))
    with pytest.raises(TextError, match="context ends at 64"):
        engine.submit_generate("the cat " * 40, LONG)


def test_bad_requests_fail_at_once_and_in_a_sentence(engine) -> None:
    for prompt, settings, error in (
        (3, LONG, TextError),
        ([], LONG, TextError),
        ("in", "long", ConfigError),
        ("in", GenerationConfig.of(3, Sampling(logit_bias={9999: 1.0}), {}), ConfigError),
        ("in", GenerationConfig.of(3, Sampling(temperature=1.0, seed=[1, 2]), {}), ConfigError),
        ("in", GenerationConfig.of(3, None, {"regex": "("}), ConfigError),
        ([{"role": "user", "content": "hello"}], LONG, ModelError),
    ):
        with pytest.raises(error):
            engine.submit_generate(prompt, settings)
    for texts, options in (("in", {}), ([], {}), ([""], {}), ([7], {}), (["a"], {"dimensions": 0})):
        with pytest.raises((TextError, ConfigError)):
            engine.submit_encode(texts, **options)
    with pytest.raises(ConfigError):
        engine.submit_call(lambda: 1, tokens=-1)
    assert engine.state().queued == 0


# ------------------------------------------------------------------------------------------------- start and end


def test_draining_finishes_what_is_there_and_takes_nothing_new(plain) -> None:
    engine = Engine(plain)
    engine.start()
    futures = [engine.submit_generate(prompt, LONG) for prompt in PROMPTS]
    assert not engine.drain(0.0)
    with pytest.raises(ClosedError):
        engine.submit_generate("in", LONG)
    assert engine.drain(30)
    assert all(future.future.done() for future in futures)
    engine.close()
    assert not engine.state().running


def test_closing_ends_what_waits_and_what_is_at_work(plain) -> None:
    for config in (EngineConfig(slots=2), EngineConfig(slots=2, exact=True)):
        engine = Engine(plain, config)
        engine.start()
        came = threading.Event()
        futures = [engine.submit_generate(prompt, LONG, on_text=lambda _, came=came: came.set()) for prompt in PROMPTS]
        futures.append(engine.submit_encode(["a"] * 9))
        assert came.wait(20)
        engine.close()
        ended = [future.future.exception(0) for future in futures if future.future.exception(0) is not None]
        assert ended
        assert all(isinstance(error, ClosedError) for error in ended)
        assert engine.state().live_rows == 0
        assert threading.active_count() < 20
        engine.close()


def test_an_engine_is_started_once_and_says_what_it_is(plain) -> None:
    engine = Engine(plain, verify=False)
    assert engine.state().guarantee == "none"
    with pytest.raises(ClosedError):
        engine.submit_encode(["a"])
    with engine:
        assert engine.state().why == "nothing was verified at the start"
        with pytest.raises(EngineError, match="started once"):
            engine.start()
        assert rows_of(engine.submit_generate("in", LONG).result(30))[0][1] == alone(plain, "in", LONG)[0].token_ids
    state = engine.state()
    assert EngineState(**state.to_dict()) == state
    with pytest.raises(ConfigError, match="an engine takes a model"):
        Engine("model")


@pytest.mark.parametrize(
    "settings",
    [{"slots": 0}, {"context": 0}, {"prefill_tokens": 1.5}, {"decode_ratio": 0}, {"decode_ratio": "x"},
     {"queue_tokens": True}, {"prefix_tokens": -1}, {"exact": "yes"},
     {"reproducible": "no"}, {"exact": True, "reproducible": False}],
)  # fmt: skip
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ConfigError):
        EngineConfig(**settings)
