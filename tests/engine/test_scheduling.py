"""Admission, the decode ratio, and work that runs step by step in another thread."""

import threading
import time
from functools import partial

import pytest

from gerund.engine.batching import Stepwise
from gerund.engine.scheduling import Admission, DecodeRatio, Job
from gerund.errors import ClosedError, ConfigError, DeadlineError, QueueFullError, TooLargeError


def opened(most: int = 100, largest: int = 50) -> Admission:
    desk = Admission(most, largest)
    desk.is_open = True
    return desk


def put(desk: Admission, tokens: int, deadline: float | None = None) -> Job:
    job = Job(tokens, deadline)
    desk.admit(job, lambda: None)
    return job


def test_the_queue_counts_tokens_until_jobs_end_however_they_end() -> None:
    desk = opened()
    done, cancelled, failed, late = (put(desk, 20, 0.0 if number == 3 else None) for number in range(4))
    assert desk.tokens == 80
    with pytest.raises(QueueFullError):
        put(desk, 30)
    done.settle("result")
    cancelled.future.cancel()
    failed.fail(ValueError("no"))
    time.sleep(0.001)
    assert late.is_over
    assert desk.tokens == 0
    assert isinstance(late.future.exception(), DeadlineError)
    assert {name: desk.counts[name] for name in ("done", "cancelled", "failed", "late", "refused")} == dict.fromkeys(
        ("done", "cancelled", "failed", "late", "refused"), 1
    )
    for job in (done, cancelled, failed):  # whoever comes second is not heard
        job.settle("other")
        job.fail(ValueError("late"))
    assert done.future.result() == "result"
    assert desk.tokens == 0


def test_an_empty_queue_takes_more_than_it_holds_but_not_more_than_ever_fits() -> None:
    desk = opened(most=10, largest=50)
    put(desk, 50)
    with pytest.raises(QueueFullError):
        put(desk, 1)
    with pytest.raises(TooLargeError):
        put(desk, 51)
    with pytest.raises(ClosedError):
        put(Admission(10, 10), 1)


@pytest.mark.parametrize(("tokens", "seconds", "expected"), [(100, 1, 1), (1_000, 100, 5), (1, 10_000, 60)])
def test_who_is_refused_is_told_a_time_by_the_measured_rate(tokens, seconds, expected) -> None:
    desk = opened(most=100, largest=100)
    put(desk, 100)
    desk.worked(tokens, seconds)
    # What was guessed before anything was measured still counts a little.
    assert abs(desk.retry_after - expected) <= max(1, 0.1 * expected)
    assert 1 <= desk.retry_after <= 60


def test_waiting_until_the_queue_is_empty() -> None:
    desk = opened()
    job = put(desk, 5)
    assert not desk.wait_until_empty(0.01)
    threading.Timer(0.02, job.settle, [None]).start()
    assert desk.wait_until_empty(10)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
def test_writing_gets_so_many_times_the_time_of_reading(ratio) -> None:
    due = DecodeRatio(ratio)
    due.decoded(1.0)
    steps, reading = 0, 0.0
    while reading < 100:
        reading += 0.25
        due.read(0.25)
        while due.is_due:
            due.decoded(1.0)
            steps += 1
    assert steps == pytest.approx(ratio * reading, rel=0.05)


def test_writing_does_not_catch_up_for_ever() -> None:
    due = DecodeRatio(1.0)
    due.decoded(1.0)
    due.read(1000.0)
    steps = 0
    while due.is_due:
        due.decoded(1.0)
        steps += 1
    assert steps == 16
    due.read(5.0)
    due.forget()
    assert not due.is_due


def test_work_goes_on_only_while_it_is_let() -> None:
    done: list[int] = []

    def work(asked) -> None:
        for number in range(3):
            done.append(number)
            if asked.is_set():
                return

    steps = Stepwise(work)
    time.sleep(0.01)
    assert done == []
    assert not steps.step()
    assert done == [0]
    assert not steps.step()
    assert done == [0, 1]
    while not steps.step():
        pass
    assert (done, steps.step()) == ([0, 1, 2], True)


def test_work_is_ended_before_it_began_within_a_step_and_after_an_error() -> None:
    begun: list[str] = []

    def endless(asked, name) -> None:
        begun.append(name)
        while not asked.is_set():
            pass

    first, second = (Stepwise(partial(endless, name=name)) for name in ("first", "second"))
    second.step()
    for steps in (first, second):
        steps.end()
        assert steps.is_over
    assert begun == ["second"]

    def broken(asked) -> None:
        raise ValueError("broken")

    steps = Stepwise(broken)
    assert steps.step()
    assert isinstance(steps.error, ValueError)
    steps.end()


def test_long_steps_are_interrupted_between_two_layers(monkeypatch) -> None:
    from gerund.attention.preemption import pause
    from gerund.engine import batching

    monkeypatch.setattr(batching, "_PATIENCE", 0.0)
    done: list[int] = []

    def work(asked) -> None:
        for layer in range(9):
            done.append(layer)
            pause()

    steps = Stepwise(work)
    assert not steps.step()
    assert done == [0]
    assert not steps.step()
    assert done == [0, 1]
    steps.end()
    assert done == [0, 1]
    assert isinstance(steps.error, batching.Cancelled)


@pytest.mark.parametrize("deadline", ["3", float("nan"), True])
def test_a_deadline_is_a_number(deadline: object) -> None:
    with pytest.raises(ConfigError, match="deadline"):
        Job(1, deadline)  # type: ignore[arg-type]
