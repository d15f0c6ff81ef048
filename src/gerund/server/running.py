"""Run the server in one process: answer while the model loads, and finish running requests before it ends."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import uvicorn

from gerund.jobs.signals import handle_ending_signals
from gerund.server.app import make_app
from gerund.server.config import ServerConfig
from gerund.server.connections import KEEP_ALIVE, Protocol
from gerund.server.logs import note
from gerund.server.service import Service, name_of
from gerund.settings.model_spec import ModelSpec
from gerund.worker_model import use_threads, used_threads

# Seconds in which a connection that was just accepted may send its request.
_ACCEPTED_GRACE = 0.3
# Seconds after the drain for answers to cancelled requests.
_ANSWER_GRACE = 5
_LOADING = "gerund-load"
# uvicorn's ticks per second.
_TICKS = 10


def end_while_loading() -> None:
    """Exit immediately with status 0 if a model is still being loaded.

    Otherwise Python would stop the loading thread amid torch's code, and the process would crash.
    """
    if any(thread.name == _LOADING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Server(uvicorn.Server):
    """A uvicorn server that loads the model in a thread, and drains before it ends.

    ``ready`` is called in that thread when the model is loaded.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, load: Callable[[], None], ready: Callable[[Service], None]
    ) -> None:
        super().__init__(config)
        self.service, self._load, self._ready = service, load, ready
        self.failure: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and start to load the model."""
        await super().startup(sockets)
        _ = self.service.over  # creates its future in this event loop
        threading.Thread(target=self._load_in_thread, name=_LOADING, daemon=True).start()

    def load_first(self) -> None:
        """Load the model now, before requests are accepted."""
        self._load()
        self._load = lambda: None

    async def on_tick(self, counter: int) -> bool:
        """Update the metrics every second: of several workers only one is queried."""
        if counter % _TICKS == 0:
            self.service.observe()
        return await super().on_tick(counter)

    def _load_in_thread(self) -> None:
        try:
            self._load()
        except BaseException as error:  # the main thread raises it again
            self.failure, self.service.phase, self.should_exit = error, "failed", True
            return
        if not self.should_exit:
            self._ready(self.service)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, finish running requests within the drain, and cancel the rest."""
        has_failed = self.service.phase == "failed"
        if not has_failed:
            self.service.phase = "ending"
            note("ending", requests=len(self.server_state.tasks), finish_within=f"{self.service.settings.drain:g}s")
        for server in self.servers:
            server.close()
        await asyncio.sleep(_ACCEPTED_GRACE)
        timer = asyncio.get_running_loop().call_later(self.service.settings.drain, self.service.end)
        await super().shutdown(sockets)
        timer.cancel()
        self.service.observe()
        if not has_failed:
            note("ended")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; at the second signal, immediately."""
        del sig, frame
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on SIGTERM and SIGINT with status 0. One of several workers ignores SIGINT, which its parent handles."""
        with handle_ending_signals(self.handle_exit, ignored_too=self.service.settings.workers == 1):
            yield


def make_server(
    spec: ModelSpec, settings: ServerConfig, keys: Sequence[str], ready: Callable[[Service], None]
) -> Server:
    """Return a server that does not run yet; see ``serve``."""
    service = Service(settings, settings.name or (name_of(spec), spec.model))

    def load() -> None:
        set_threads(settings)
        service.load(spec)

    config = uvicorn.Config(
        make_app(service, keys),
        http=Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.drain) + _ANSWER_GRACE,
    )
    return Server(config, service, load, ready)


def serve(
    listening: socket.socket,
    spec: ModelSpec,
    settings: ServerConfig,
    keys: Sequence[str],
    ready: Callable[[Service], None],
    began: Callable[[Server], None] | None = None,
    *,
    listens_at_once: bool = True,
) -> None:
    """Serve until a signal ends it.

    ``began`` is called with the server before it runs. With ``listens_at_once``, requests get 503 while the model is
    loaded; without, none is accepted until then.
    """
    server = make_server(spec, settings, keys, ready)
    if began is not None:
        began(server)
    if not listens_at_once:
        server.load_first()
    server.run(sockets=[listening])
    server.service.close()
    if server.failure is not None:
        raise server.failure


def set_threads(settings: ServerConfig) -> None:
    """Let a process compute in as many threads as it was given; several divide the cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if settings.threads is not None:
        use_threads(settings.threads)
    elif settings.workers > 1:
        use_threads(max(1, min(used_threads(), cores // settings.workers)))
