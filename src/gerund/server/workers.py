"""Several processes behind one socket: each has the model for itself, and one that dies is replaced.

Knows: processes, signals, pipes. Does not know: HTTP, models.
"""

import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from gerund.errors import GerundError, InputError, ResourceError
from gerund.jobs.interruption import ending_signals_to
from gerund.server import logs
from gerund.server.config import ServerConfig
from gerund.spec import ModelSpec

_POLL = 0.2
# Seconds before a worker that died is replaced, and how much longer than the drain its end may take.
_PAUSE = 1.0
_FAREWELL = 10.0
# Read by prometheus-client when it is imported, which must not be before it is set.
_METRICS = "PROMETHEUS_MULTIPROC_DIR"


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    is_ready: bool = False


def serve_many(
    listening: socket.socket,
    spec: ModelSpec,
    settings: ServerConfig,
    keys: Sequence[str],
    ready: Callable[[dict[str, Any]], None],
) -> None:
    """Serve in ``settings.workers`` processes until a signal ends it.

    Args:
        listening: the socket that they share.
        spec: the model, which each of them loads.
        settings: how it is served.
        keys: who may ask.
        ready: called with what the last worker says of itself when all of them are ready.

    Raises:
        GerundError: a worker cannot load the model.
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
        self._workers: list[_Worker] = []
        self._ends = 0
        self._told = False

    def run(self) -> None:
        with ending_signals_to(self._asked_to_end, ignored_too=True):
            try:
                self._workers = [self._started() for _ in range(self._settings.workers)]
                # From now on the workers alone accept.
                while not self._ends:
                    self._look()
                    time.sleep(_POLL)
            finally:
                self._stop()

    def _asked_to_end(self, _number: int, _frame: FrameType | None) -> None:
        self._ends += 1

    def _started(self) -> _Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, *self._arguments), name="gerund-worker")
        process.start()
        there.close()
        return _Worker(process, here)

    def _look(self) -> None:
        """Take what workers say, and replace those that died."""
        for place, worker in enumerate(self._workers):
            said = _said(worker.pipe)
            if said is not None and "error" in said:
                raise (InputError if said["status"] == InputError.exit_code else ResourceError)(said["error"])
            if said is not None:
                worker.is_ready = True
                if not self._told and all(one.is_ready for one in self._workers):
                    self._told = True
                    self._ready(said)
            elif not worker.process.is_alive() and not self._ends:
                if not worker.is_ready:
                    raise ResourceError(
                        f"a worker ended with status {worker.process.exitcode} while it loaded the model: is there "
                        f"memory for {self._settings.workers} of it?"
                    )
                logs.note("worker lost", process=worker.process.pid, status=worker.process.exitcode)
                self._forget(worker)
                time.sleep(_PAUSE)
                self._workers[place] = self._started()

    @staticmethod
    def _forget(worker: _Worker) -> None:
        from gerund.server.metrics import forget_worker

        worker.pipe.close()
        forget_worker(int(worker.process.pid or 0))

    def _stop(self) -> None:
        # Nobody would accept what still came to this process's own share of the socket.
        self._listening.close()
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.terminate()
        ends = time.monotonic() + self._settings.drain + _FAREWELL
        while any(worker.process.is_alive() for worker in self._workers) and time.monotonic() < ends and self._ends < 2:
            time.sleep(_POLL)
        for worker in self._workers:
            if worker.process.is_alive():
                worker.process.kill()
            worker.process.join()
            worker.pipe.close()


def _said(pipe: Connection) -> dict[str, Any] | None:
    try:
        return pipe.recv() if pipe.poll() else None
    except (EOFError, OSError):
        return None


def _work(pipe: Connection, listening: socket.socket, spec: ModelSpec, settings: ServerConfig, keys: list[str]) -> None:
    """Serve in a process of its own."""
    from gerund.server.running import Server, end_while_loading, serve

    logs.set_up(settings.log)

    def watch(server: Server) -> None:
        """End when the process that started this one is gone: nobody else would."""

        def wait() -> None:
            try:
                pipe.recv()
            except (EOFError, OSError):
                server.should_exit = True

        threading.Thread(target=wait, name="gerund-watch", daemon=True).start()

    def ready(service: Any) -> None:
        pipe.send(service.card())

    try:
        serve(listening, spec, settings, keys, ready, watch)
        end_while_loading()
    except (GerundError, OSError, MemoryError) as error:
        status = error.exit_code if isinstance(error, GerundError) else ResourceError.exit_code
        pipe.send({"error": str(error), "status": status})
