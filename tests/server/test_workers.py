"""Workers that end: which end the server, and when others take their places."""

import inspect
import socket
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from gerund.errors import GerundError, InputError, ResourceError
from gerund.server import workers as workers_module
from gerund.server.config import ServerConfig
from gerund.server.workers import _Supervisor
from gerund.settings.model_spec import ModelSpec


class FakeProcess:
    """A process that has ended, or one that runs until it is told otherwise."""

    pid = 1

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        pass

    def kill(self) -> None:
        self.exitcode = -9


class FakePipe:
    """What a worker says, once each; and what it is told."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.said, self.told = list(said), []

    def poll(self) -> bool:
        return bool(self.said)

    def recv(self) -> dict[str, Any]:
        return self.said.pop(0)

    def send(self, state: dict[str, Any]) -> None:
        self.told.append(state)

    def close(self) -> None:
        pass


class Course:
    """A supervisor of fake workers, on a clock of its own.

    Attributes:
        starts: when which worker was started.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcomes: list[list[tuple[int | None, dict[str, Any] | None]]]):
        self.now = 0.0
        self.starts: list[tuple[float, int]] = []
        monkeypatch.setattr(workers_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        settings = ServerConfig(workers=len(outcomes), log="none")
        with socket.socket() as unused:
            self.supervisor = _Supervisor(unused, ModelSpec(), settings, [], lambda card: None)
        self.places = self.supervisor._workers

        def start(worker: Any) -> None:
            place = next(number for number, other in enumerate(self.places) if other is worker)
            self.starts.append((round(self.now, 1), place))
            # The last outcome is that of all further processes.
            exitcode, said = outcomes[place].pop(0) if len(outcomes[place]) > 1 else outcomes[place][0]
            worker.process = FakeProcess(exitcode)
            worker.pipe = FakePipe(*([] if said is None else [said]))

        monkeypatch.setattr(self.supervisor, "_start", start)
        for worker in self.places:
            start(worker)

    def run(self, seconds: float) -> None:
        ends = self.now + seconds
        while self.now < ends:
            for worker in self.places:
                self.supervisor._check(worker)
            self.supervisor._send_state()
            self.now += 0.1

    def pauses(self) -> list[float]:
        """Return how long it took from one replacement to the next."""
        return [after - before for (before, _), (after, _) in pairwise(self.starts[2:])]


READY: tuple[None, dict[str, Any]] = (None, {"id": "tiny"})
CANNOT = (0, {"error": "no such folder", "status": 2})


def test_a_replacement_that_cannot_load_is_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, [[READY], [READY, CANNOT]])
    course.run(100)
    healthy, other = course.places
    assert healthy.pipe.told == [{"expected": 2, "ready": 2, "last_error": None}]
    other.process.exitcode = -9  # after 100 s of service it is lost
    course.run(250)
    assert course.pauses() == pytest.approx([2, 4, 8, 16, 32, 60, 60, 60], abs=0.3)
    assert healthy.pipe.told[1:] == [
        {"expected": 2, "ready": 1, "last_error": "a worker ended with status -9"},
        {"expected": 2, "ready": 1, "last_error": "no such folder"},
    ]
    assert healthy.process.is_alive()


def test_one_that_loads_in_the_end_is_told_of_and_forgets_what_was(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, [[READY], [READY, CANNOT, (-9, None), READY]])
    course.run(100)
    course.places[1].process.exitcode = 1
    course.run(100)
    assert len(course.starts) == 2 + 3
    assert all(place.pipe.told[-1] == {"expected": 2, "ready": 2, "last_error": None} for place in course.places)
    course.places[1].process.exitcode = 1
    course.run(1.5)
    assert course.starts[-1][0] == pytest.approx(201.1, abs=0.3), "after a minute of service failures are forgotten"


def test_one_that_ends_as_soon_as_it_serves_waits_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    course = Course(monkeypatch, [[READY], [READY, (-9, {"id": "tiny"})]])
    course.run(1)
    course.places[1].process.exitcode = -9
    course.run(40)
    assert course.pauses() == pytest.approx([2, 4, 8, 16], abs=0.4)


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (CANNOT, InputError, "no such folder"),
        ((1, {"error": "no memory", "status": 1}), ResourceError, "no memory"),
        ((-9, None), ResourceError, "is there memory for 2 of it"),
    ],
)
def test_at_the_first_start_one_that_cannot_load_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, kind: type[GerundError], message: str
) -> None:
    course = Course(monkeypatch, [[READY], [outcome]])
    with pytest.raises(kind, match=message) as raised:
        course.run(1)
    assert raised.value.exit_code == kind.exit_code


def test_of_several_workers_one_prints_what_is_noted_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[bool] = []

    def process(target: Any, args: tuple[Any, ...], name: str) -> SimpleNamespace:
        started.append(inspect.signature(target).bind(*args).arguments["has_notes"])
        return SimpleNamespace(start=lambda: None)

    context = SimpleNamespace(Pipe=lambda: (FakePipe(), FakePipe()), Process=process)
    monkeypatch.setattr(workers_module.multiprocessing, "get_context", lambda _: context)
    with socket.socket() as listening:
        supervisor = _Supervisor(listening, ModelSpec(), ServerConfig(workers=3), [], lambda _: None)
    for worker in supervisor._workers:
        supervisor._start(worker)
    supervisor._workers[0].failures = 1
    supervisor._start(supervisor._workers[0])
    assert started == [True, False, False, False]
