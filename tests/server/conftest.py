"""A tiny model behind a real server on loopback, in a thread of the tests' own process."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="needs gerund[serve]")
pytest.importorskip("uvicorn", reason="needs gerund[serve]")

import uvicorn

from gerund.entry import load
from gerund.server.app import make_app
from gerund.server.config import ServerConfig
from gerund.server.connections import Protocol, address_of, listen
from gerund.server.running import Server
from gerund.server.service import Service
from tests.tiny import byte_tokenizer, tiny

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if 'raise' in (message['role'], message['content']) %}{{ raise_exception('no such turn') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


TOOL_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

DOCUMENTS = {
    "bread": "Bread is made of flour, water and salt.",
    "rail": "Trains need rails.",
    "sea": "The sea is wide.",
}


def save_served(folder: Path, *, template: str | None = TEMPLATE, context: int = 512) -> Path:
    """Save a tiny Llama of two layers that chats, with room for a few hundred tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.model_max_length = context
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=context, num_hidden_layers=2)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def until(condition: Callable[[], object], seconds: float = 20) -> bool:
    """Wait until a condition holds; whether it came to hold."""
    ends = time.monotonic() + seconds
    while not (holds := bool(condition())) and time.monotonic() < ends:
        time.sleep(0.02)
    return holds


class Running:
    """A server in a thread, until the block ends.

    Attributes:
        url: its address.
        lm: its model.
        service: what is behind it.
    """

    def __init__(self, lm: Any, settings: ServerConfig, keys: list[str], encoder: Any = None) -> None:
        self.lm = lm
        self.service = Service(settings, settings.name or ("tiny",))
        listening = listen("127.0.0.1", 0)
        self.url = address_of(listening)
        ready = threading.Event()
        config = uvicorn.Config(
            make_app(self.service, keys), http=Protocol, ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=10,
        )  # fmt: skip
        self._server = Server(config, self.service, lambda: self.service.start(lm, encoder), lambda _: ready.set())
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        if not ready.wait(60):
            raise TimeoutError(f"the server is not ready: {self._server.failure}")
        self.client = httpx.Client(
            base_url=self.url, timeout=60, headers={"Authorization": f"Bearer {keys[0]}"} if keys else {}
        )

    def post(self, route: str, **body: Any) -> httpx.Response:
        """Send a JSON body."""
        return self.client.post(route, json=body)

    def ok(self, route: str, **body: Any) -> Any:
        """Send a JSON body that is to be answered, and return the answer."""
        found = self.post(route, **body)
        assert found.status_code == 200, found.text
        return found.json()

    def idle(self, seconds: float = 10) -> bool:
        """Whether the engine comes to have nothing to do."""

        def has_nothing() -> bool:
            state = self.service.engine.state()
            return not state.queued and not state.live_rows

        return until(has_nothing, seconds)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join(20)
        self.service.close()


def exchange(running: Running, *parts: bytes, pause: float = 0.02, most: float = 2) -> tuple[bytes, bool]:
    """Send bytes as they are, and return what came back, and whether the server closed the connection."""
    host, port = running.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=most) as made:
        with suppress(OSError):  # it may be closed while there is more to send
            for part in parts:
                made.sendall(part)
                time.sleep(pause if len(parts) > 1 else 0)
        received = b""
        try:
            while part := made.recv(65536):
                received += part
        except TimeoutError:
            return received, False
        return received, True


def events(running: Running, route: str, **body: Any) -> list[Any]:
    """Return the events of a stream, after making sure that it ends as one."""
    with running.client.stream("POST", route, json={**body, "stream": True}) as found:
        assert found.headers["content-type"].startswith("text/event-stream")
        sent = [line for line in found.iter_lines() if line]
    assert all(line.startswith("data: ") for line in sent)
    assert sent[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in sent[:-1]]


def lines(running: Running, route: str, **body: Any) -> list[Any]:
    """Return the lines of one of Ollama's streams."""
    with running.client.stream("POST", route, json=body) as found:
        assert found.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in found.iter_lines()]


def index_of(where: Path, lm: Any, documents: dict[str, str] = DOCUMENTS) -> str:
    """Make an index of documents, and return its place as a setting of a server."""
    pytest.importorskip("lancedb", reason="needs gerund[index]")
    from gerund.retrieval.documents import Document
    from gerund.retrieval.index import open_index

    open_index(where, lm).add_documents([Document(name, text) for name, text in documents.items()])
    return str(where)


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model that is served."""
    return save_served(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def served_lm(served_folder: Path) -> Any:
    """The tiny model itself, to compare with; nobody else computes with it."""
    return load(served_folder)


@pytest.fixture(scope="session")
def live(served_folder: Path) -> Iterator[Running]:
    """A server with a tiny model, for all tests that leave it as it is."""
    with Running(load(served_folder), ServerConfig(max_new_tokens=32), []) as running:
        yield running


@pytest.fixture(scope="session")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a tiny model whose template knows tools, with room for long prompts."""
    folder = save_served(tmp_path_factory.mktemp("with_tools") / "tiny", template=TOOL_TEMPLATE, context=8192)
    with Running(load(folder), ServerConfig(max_new_tokens=200, context=8192), []) as running:
        yield running


@pytest.fixture(scope="session")
def indexed(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a key, a tiny model that chats, and an index."""
    lm = load(served_folder)
    where = index_of(tmp_path_factory.mktemp("indexed") / "my.index", lm)
    with Running(lm, ServerConfig(max_new_tokens=8, index=where), ["secret"]) as running:
        yield running
