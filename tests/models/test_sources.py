"""Whether the hub is there is known within seconds, and a name that is none is said without torch."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.models import sources
from gerund.models.sources import Source, find, hub_answers


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket of this machine that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def ask(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Let the hub be at a port of this machine."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")


def test_a_hub_that_nobody_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ask(monkeypatch, port)
    start = time.monotonic()
    with pytest.raises(ModelError) as caught:
        gerund.load("some/model")
    assert time.monotonic() - start < 5
    assert str(caught.value) == (
        "there is no folder, file or short name 'some/model' (gerund models lists the names), and as a hub id it "
        "cannot be read: it is not in the local cache, and the hub cannot be reached"
    )


@pytest.mark.slow
def test_a_hub_that_never_answers(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    ask(monkeypatch, listener.getsockname()[1])
    start = time.monotonic()
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        find("some/model").demand_reachable()
    assert time.monotonic() - start < 5


def test_a_hub_whose_name_is_not_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, 1)
    monkeypatch.setattr(sources, "_SECONDS", 0.1)
    monkeypatch.setattr(sources, "_LOOK_UP", 0.1)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: time.sleep(5))
    start = time.monotonic()
    assert not hub_answers()
    assert time.monotonic() - start < 2


def test_whatever_the_hub_answers_it_is_there(monkeypatch: pytest.MonkeyPatch, listener: socket.socket) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.close()

    threading.Thread(target=answer, daemon=True).start()
    ask(monkeypatch, listener.getsockname()[1])
    source = find("some/model")
    assert not source.local_only
    source.demand_reachable()


def test_offline_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: pytest.fail("the hub was asked"))
    assert not hub_answers()
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        find("some/model").demand_reachable()


def test_a_folder_asks_no_hub(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "hub_answers", lambda: pytest.fail("the hub was asked"))
    assert Source("x", tiny_folder).local_only


@pytest.mark.parametrize("path", ["x" * 256, "a/" + "é" * 200, Path("/" + "x/" * 3000), "a\0b", "/tmp/\ud800"])
def test_what_is_no_path(path: str | Path) -> None:
    with pytest.raises(ConfigError, match="model is no path: ") as caught:
        find(path)
    assert len(str(caught.value)) <= 300


def test_finding_needs_no_torch() -> None:
    script = "import sys; from gerund.models.sources import find; find(None); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
