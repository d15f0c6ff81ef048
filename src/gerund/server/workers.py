"""Run several worker processes on one socket, and replace a worker that dies."""

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from gerund.errors import GerundError, InputError, ResourceError
from gerund.jobs.signals import handle_ending_signals
from gerund.progress import printed_notes
from gerund.server import logs
from gerund.server.config import ServerConfig
from gerund.settings.model_spec import ModelSpec

_POLL = 0.2
# Seconds before a worker that ended is replaced: twice as many after each failure in a row, which a worker that has
# served for a while does not count as.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_HEALTHY = 60.0
# How much longer than the drain the end of a worker may take.
_FAREWELL = 10.0
# Read by prometheus-client when it is imported, which must not be before it is set.
_METRICS = "PROMETHEUS_MULTIPROC_DIR"


@dataclass
class _Worker:
    """A place for a worker, and the process that is in it.

    Attributes:
        process: None while the next one is waited for.
        pipe: to it.
        ready_since: when the model was loaded; None before.
        failures: processes in a row that ended soon.
        starts_at: when the next process is due, where there is none.
        told: what the process knows of the workers.
    """

    process: BaseProcess | None = None
    pipe: Connection | None = None
    ready_since: float | None = None
    failures: int = 0
    starts_at: float = 0.0
    told: dict[str, Any] | None = None


def serve_many(
    listening: socket.socket,
    spec: ModelSpec,
    settings: ServerConfig,
    keys: Sequence[str],
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve in ``settings.workers`` processes until a signal ends it."""
    with tempfile.TemporaryDirectory(prefix="gerund-metrics-") as folder:
        os.environ[_METRICS] = folder
        try:
            _Supervisor(listening, spec, settings, keys, ready).run()
        finally:
            os.environ.pop(_METRICS, None)


class _Supervisor:
    def __init__(
        self,
        listening: socket.socket,
        spec: ModelSpec,
        settings: ServerConfig,
        keys: Sequence[str],
        ready: Callable[[dict[str, Any]], None],
    ) -> None:
        self._listening = listening
        self._arguments = (listening, spec, settings, list(keys))
        self._settings, self._ready = settings, ready
        self._workers = [_Worker() for _ in range(settings.workers)]
        self._ends = 0
        # Until all are ready for the first time a worker that fails ends the server: what it lacks, all of them lack.
        self._has_started = False
        self._last_error: str | None = None

    def run(self) -> None:
        with handle_ending_signals(self._asked_to_end, ignored_too=True):
            try:
                for worker in self._workers:
                    self._start(worker)
                # From now on the workers alone accept.
                while not self._ends:
                    for worker in self._workers:
                        self._look(worker)
                    self._tell()
                    time.sleep(_POLL)
            finally:
                self._stop()

    def _asked_to_end(self, _number: int, _frame: FrameType | None) -> None:
        self._ends += 1

    def _start(self, worker: _Worker) -> None:
        context = multiprocessing.get_context("spawn")
        worker.pipe, there = context.Pipe()
        # While others serve, requests to a worker that still loads would only be told so: it listens later.
        listens_at_once = all(other.ready_since is None for other in self._workers)
        # All load the same model, of which one says what there is to say.
        has_notes = worker is self._workers[0] and not worker.failures
        arguments = (there, *self._arguments, listens_at_once, has_notes)
        worker.process = context.Process(target=_work, args=arguments, name="gerund-worker")
        worker.process.start()
        there.close()

    def _look(self, worker: _Worker) -> None:
        """Take what a worker says, and replace one that died."""
        if worker.process is None or worker.pipe is None:
            if time.monotonic() >= worker.starts_at:
                self._start(worker)
            return
        said = _said(worker.pipe)
        if said is not None and "error" in said:
            self._failed(worker, said["error"], said["status"])
        elif said is not None:
            worker.ready_since = time.monotonic()
            if all(other.ready_since is not None for other in self._workers):
                self._last_error = None
                if not self._has_started:
                    self._has_started = True
                    self._ready(said)
        elif not worker.process.is_alive() and not self._ends:
            status = worker.process.exitcode
            if worker.ready_since is not None:
                self._failed(worker, f"a worker ended with status {status}")
            else:
                self._failed(
                    worker,
                    f"a worker ended with status {status} while it loaded the model: is there memory for "
                    f"{self._settings.workers} of it?",
                )

    def _failed(self, worker: _Worker, error: str, status: int = ResourceError.exit_code) -> None:
        """Note that a worker ended, and when the next one starts in its place."""
        from gerund.server.metrics import forget_worker

        process, pipe = worker.process, worker.pipe
        assert process is not None
        assert pipe is not None
        if not self._has_started and worker.ready_since is None and not worker.failures:
            raise (InputError if status == InputError.exit_code else ResourceError)(error)
        pipe.close()
        process.join(_POLL)
        if process.is_alive():  # it has said why, and has nothing else to do
            process.kill()
            process.join()
        if worker.ready_since is not None and time.monotonic() - worker.ready_since >= _HEALTHY:
            worker.failures = 0
        pause = min(_LONGEST_PAUSE, _PAUSE * 2**worker.failures)
        event = "worker lost" if worker.ready_since is not None else "worker cannot load"
        logs.note(
            event, logging.ERROR, process=process.pid, status=process.exitcode,
            again_in=f"{pause:g}s", error=error,
        )  # fmt: skip
        self._last_error = error
        forget_worker(int(process.pid or 0))
        worker.process = worker.pipe = worker.ready_since = worker.told = None
        worker.failures = min(worker.failures + 1, 10)
        worker.starts_at = time.monotonic() + pause

    def _tell(self) -> None:
        """Let the workers know how many of them serve: any of them may be asked."""
        ready = [worker for worker in self._workers if worker.ready_since is not None]
        state = {"expected": len(self._workers), "ready": len(ready), "last_error": self._last_error}
        for worker in ready:
            if worker.told != state and worker.pipe is not None:
                worker.told = state
                with suppress(OSError):  # it has just ended, and is replaced
                    worker.pipe.send(state)

    def _stop(self) -> None:
        # Nobody would accept what still came to this process's own share of the socket.
        self._listening.close()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            if process.is_alive():
                process.terminate()
        ends = time.monotonic() + self._settings.drain + _FAREWELL
        while any(process.is_alive() for process in processes) and time.monotonic() < ends and self._ends < 2:
            time.sleep(_POLL)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for worker in self._workers:
            if worker.pipe is not None:
                worker.pipe.close()


def _said(pipe: Connection) -> dict[str, Any] | None:
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def _work(
    pipe: Connection,
    listening: socket.socket,
    spec: ModelSpec,
    settings: ServerConfig,
    keys: list[str],
    listens_at_once: bool,
    has_notes: bool,
) -> None:
    """Serve in a process of its own."""
    from gerund.server.running import Server, end_while_loading, serve

    logs.set_up(settings.log)
    # Ctrl-C goes to all processes of a terminal, and the one that started this one sends SIGTERM. The second of two
    # signals would give up what runs.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch(server: Server) -> None:
        """Take what is told of the workers, and end when the process that started this one is gone."""

        def wait() -> None:
            try:
                while True:
                    server.service.workers = pipe.recv()
            except (EOFError, OSError):
                server.should_exit = True

        threading.Thread(target=wait, name="gerund-watch", daemon=True).start()

    def ready(service: Any) -> None:
        pipe.send(service.card())

    try:
        with printed_notes() if has_notes else nullcontext():
            serve(listening, spec, settings, keys, ready, watch, listens_at_once=listens_at_once)
            end_while_loading()
    except (GerundError, OSError, MemoryError) as error:
        status = error.exit_code if isinstance(error, GerundError) else ResourceError.exit_code
        pipe.send({"error": str(error) or "there is not enough memory", "status": status})
