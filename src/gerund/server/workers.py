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
# Seconds before a worker that ended is replaced; they double after each failure in a row. A worker that served for
# longer than _HEALTHY did not fail.
_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_HEALTHY = 60.0
# Seconds after the drain in which a worker has to end.
_END_GRACE = 10.0
# prometheus-client reads it on import, so it must be set before.
_METRICS = "PROMETHEUS_MULTIPROC_DIR"


@dataclass
class _Worker:
    """A worker process, or the pause before the next one."""

    process: BaseProcess | None = None
    pipe: Connection | None = None
    ready_since: float | None = None  # when its model was loaded
    failures: int = 0  # processes in a row that ended soon
    starts_at: float = 0.0  # when the next process is due, if there is none
    known: dict[str, Any] | None = None  # the last state of all workers that was sent to it


def serve_many(
    listening: socket.socket,
    spec: ModelSpec,
    settings: ServerConfig,
    keys: Sequence[str],
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve in ``settings.workers`` processes until a signal ends it.

    ``ready`` is called with the model's card when all workers are ready.
    """
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
        # Until all have been ready, a worker that fails ends the server: the others would fail as well.
        self._has_started = False
        self._last_error: str | None = None

    def run(self) -> None:
        with handle_ending_signals(self._on_signal, ignored_too=True):
            try:
                for worker in self._workers:
                    self._start(worker)
                while not self._ends:
                    for worker in self._workers:
                        self._check(worker)
                    self._send_state()
                    time.sleep(_POLL)
            finally:
                self._stop()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ends += 1

    def _start(self, worker: _Worker) -> None:
        context = multiprocessing.get_context("spawn")
        worker.pipe, there = context.Pipe()
        # While others serve, a worker listens only after its model was loaded; else it would answer 503.
        listens_at_once = all(other.ready_since is None for other in self._workers)
        # All load the same model, so that one of them prints the notes.
        has_notes = worker is self._workers[0] and not worker.failures
        arguments = (there, *self._arguments, listens_at_once, has_notes)
        worker.process = context.Process(target=_work, args=arguments, name="gerund-worker")
        worker.process.start()
        there.close()

    def _check(self, worker: _Worker) -> None:
        """Receive a worker's message, and replace a worker that died."""
        if worker.process is None or worker.pipe is None:
            if time.monotonic() >= worker.starts_at:
                self._start(worker)
            return
        message = _received(worker.pipe)
        if message is not None and "error" in message:
            self._failed(worker, message["error"], message["status"])
        elif message is not None:
            worker.ready_since = time.monotonic()
            if all(other.ready_since is not None for other in self._workers):
                self._last_error = None
                if not self._has_started:
                    self._has_started = True
                    self._ready(message)
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
        """Schedule the replacement of a worker that ended."""
        from prometheus_client.multiprocess import mark_process_dead

        process, pipe = worker.process, worker.pipe
        assert process is not None
        assert pipe is not None
        if not self._has_started and worker.ready_since is None and not worker.failures:
            raise (InputError if status == InputError.exit_code else ResourceError)(error)
        pipe.close()
        process.join(_POLL)
        if process.is_alive():  # it has sent its error, and has nothing else to do
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
        if folder := os.environ.get(_METRICS):
            mark_process_dead(process.pid, folder)  # its gauges
        worker.process = worker.pipe = worker.ready_since = worker.known = None
        worker.failures = min(worker.failures + 1, 10)
        worker.starts_at = time.monotonic() + pause

    def _send_state(self) -> None:
        """Send the number of ready workers to all of them: any may get ``/health``."""
        ready = [worker for worker in self._workers if worker.ready_since is not None]
        state = {"expected": len(self._workers), "ready": len(ready), "last_error": self._last_error}
        for worker in ready:
            if worker.known != state and worker.pipe is not None:
                worker.known = state
                with suppress(OSError):  # it has just ended, and is replaced
                    worker.pipe.send(state)

    def _stop(self) -> None:
        # This process does not accept connections, so it must not hold the socket.
        self._listening.close()
        processes = [worker.process for worker in self._workers if worker.process is not None]
        for process in processes:
            if process.is_alive():
                process.terminate()
        ends = time.monotonic() + self._settings.drain + _END_GRACE
        while any(process.is_alive() for process in processes) and time.monotonic() < ends and self._ends < 2:
            time.sleep(_POLL)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for worker in self._workers:
            if worker.pipe is not None:
                worker.pipe.close()


def _received(pipe: Connection) -> dict[str, Any] | None:
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
    from gerund.server.running import Server, end_while_loading, serve

    logs.set_up(settings.log)
    # Ctrl-C goes to all processes of a terminal, and the supervisor sends SIGTERM as well. A second signal would cancel
    # running requests.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def watch(server: Server) -> None:
        """Receive the state of the workers, and end when the supervisor is gone."""

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
