"""The hub is found within seconds or not at all; GGUF files in folders, in parts and in other programs' stores."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.gguf_file import MAGIC, is_gguf, parts_of
from gerund.models import sources
from gerund.models.catalog import find_local, gguf_in, local_models
from gerund.models.sources import Source, find, hub_answers
from tests.cli.helpers import run_python


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
    assert run_python("-c", script).stdout == "False\n"


HEX = "a" * 64


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MAGIC + bytes(20))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any model."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    model = put(tmp_path / "model.gguf")
    put(tmp_path / "mmproj-model.gguf")  # the image encoder beside it
    assert gguf_in(tmp_path) == find(tmp_path).gguf == model
    put(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF models; give the path of one: model.gguf, other.gguf"):
        find(tmp_path)


def test_a_model_in_parts(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    parts = [put(tmp_path / name) for name in names]
    assert gguf_in(tmp_path) == parts[0]
    assert parts_of(parts[0]) == parts
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"split into 3 files, and m-00002-of-00003.gguf is missing"):
        parts_of(parts[0])


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("not a model")
    assert not is_gguf(tmp_path / "notes.gguf")
    with pytest.raises(ModelError, match="is not a GGUF file; give a model's folder"):
        find(tmp_path / "notes.gguf")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "model.gguf")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ModelError, match=r"model.gguf cannot be read: permission denied"):
        find(path)


def test_the_folder_of_a_service_that_only_it_may_look_into(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path).startswith("/usr/share/ollama"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    assert local_models() == []
    with pytest.raises(ModelError, match="ollama has no models on this machine"):
        find("ollama:llama3.2")


def test_ollama(home: Path) -> None:
    models = home / ".ollama" / "models"
    blob = put(models / "blobs" / f"sha256-{HEX}")

    def manifest(place: str, digest: str, kind: str = "application/vnd.ollama.image.model") -> None:
        path = models / "manifests" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"layers": [{"mediaType": kind, "digest": digest, "size": 24}]}))

    manifest("registry.ollama.ai/library/llama3.2/latest", f"sha256:{HEX}")
    manifest("registry.ollama.ai/someone/mine/q4", f"sha256:{HEX}")
    manifest("hf.co/a/b/latest", f"sha256:{HEX}")
    manifest("registry.ollama.ai/library/tensors/latest", f"sha256:{HEX}", "application/vnd.ollama.image.tensor")
    manifest("registry.ollama.ai/library/evil/latest", "sha256:../../../etc/passwd")
    (models / "manifests/registry.ollama.ai/library/llama3.2/broken").write_text("{")
    names = [model.name for model in local_models()]
    assert names == ["ollama:hf.co/a/b:latest", "ollama:llama3.2:latest", "ollama:someone/mine:q4"]
    assert find_local("ollama:llama3.2") == find("ollama:llama3.2").gguf == blob
    with pytest.raises(ModelError, match=r"unknown model of ollama 'llama4'"):
        find("ollama:llama4")


def test_stores_of_other_programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="lmstudio has no models on this machine"):
        find("lmstudio:anything")
    studio = put(home / ".lmstudio" / "models" / "who" / "Tiny-GGUF" / "tiny-q8.gguf")
    hub = put(home / "hub" / "models--who--Tiny" / "snapshots" / "0123" / "tiny.gguf")
    flat = put(home / ".cache" / "llama.cpp" / "flat.gguf")
    assert [model.name for model in local_models()] == [
        "hf:who/Tiny/tiny.gguf",
        "llama.cpp:flat.gguf",
        "lmstudio:who/Tiny-GGUF/tiny-q8.gguf",
    ]
    assert find("lmstudio:tiny-q8").gguf == studio
    assert find("hf:who/Tiny").gguf == hub
    assert find("llama.cpp:flat.gguf").gguf == flat
    put(home / ".lmstudio" / "models" / "who" / "Tiny-GGUF" / "tiny-q4.gguf")
    with pytest.raises(ModelError, match="several models called 'tiny'"):
        find("lmstudio:tiny")
    (home / ".lmstudio-home-pointer").write_text(str(home / "elsewhere"))
    monkeypatch.setenv("LLAMA_CACHE", str(home / "cache"))
    assert find_local("hf:who") == hub
    assert find_local("who/Tiny") is None
