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

# What was accepted before the end began has so long to say what it wants.
_LAST_WORDS = 0.3
# After the bound of the drain, what it takes to tell the clients.
_FAREWELL = 5
_LOADING = "gerund-load"
# Of uvicorn, in a second.
_TICKS = 10


def end_while_loading() -> None:
    """End this process at once, with status 0, where a model is still being loaded.

    Else Python would end the thread that loads it within torch's own code, and with it the process as a crash does.
    """
    if any(thread.name == _LOADING for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Server(uvicorn.Server):
    """uvicorn, around one service."""

    def __init__(
        self, config: uvicorn.Config, service: Service, load: Callable[[], None], ready: Callable[[Service], None]
    ) -> None:
        super().__init__(config)
        self.service, self._load, self._ready = service, load, ready
        self.failure: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and begin to load."""
        await super().startup(sockets)
        _ = self.service.over  # made in this loop
        threading.Thread(target=self._load_and_tell, name=_LOADING, daemon=True).start()

    def load_first(self) -> None:
        """Load now, before anybody can ask."""
        self._load()
        self._load = lambda: None

    async def on_tick(self, counter: int) -> bool:
        """Bring the counts up to date every second: of several workers only one is asked for them."""
        if counter % _TICKS == 0:
            self.service.observe()
        return await super().on_tick(counter)

    def _load_and_tell(self) -> None:
        try:
            self._load()
        except BaseException as error:  # the main thread raises it again
            self.failure, self.service.phase, self.should_exit = error, "failed", True
            return
        if not self.should_exit:
            self._ready(self.service)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, finish what runs within the bound, give up the rest and say so."""
        has_failed = self.service.phase == "failed"
        if not has_failed:
            self.service.phase = "ending"
            # What still runs is finished within that time; a second Ctrl-C ends at once.
            note("ending", requests=len(self.server_state.tasks), finish_within=f"{self.service.settings.drain:g}s")
        for server in self.servers:
            server.close()
        # A connection that has just been accepted is not idle: its request is on the way.
        await asyncio.sleep(_LAST_WORDS)
        timer = asyncio.get_running_loop().call_later(self.service.settings.drain, self.service.end)
        await super().shutdown(sockets)
        timer.cancel()
        self.service.observe()
        if not has_failed:
            note("ended")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; when asked twice, at once."""
        del sig, frame
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End on SIGTERM and SIGINT with status 0: it is the usual way for a server to end.

        One of several workers leaves SIGINT, which it ignores, to the process that started it.
        """
        with handle_ending_signals(self.handle_exit, ignored_too=self.service.settings.workers == 1):
            yield


def make_server(
    spec: ModelSpec, settings: ServerConfig, keys: Sequence[str], ready: Callable[[Service], None]
) -> Server:
    """Return a server that is not running yet; see ``serve``."""
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
        timeout_graceful_shutdown=int(settings.drain) + _FAREWELL,
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
    """Serve until a signal ends it."""
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
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    elif settings.workers > 1:
        torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // settings.workers)))
