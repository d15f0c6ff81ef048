"""``gerund search --server``: the hits of the local command from a server, and every mistake in a sentence."""

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from gerund.cli.remote import Remote
from gerund.errors import ConfigError
from tests.cli.helpers import ENVIRONMENT, no_loading, run_cli, run_python
from tests.server.conftest import DOCUMENTS, Running


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GERUND_API_KEY", "secret")


@pytest.mark.usefixtures("with_key")
def test_a_server_is_asked_and_no_model_is_loaded(indexed: Running) -> None:
    with no_loading():
        asked = run_cli("search", "flour for bread", "--server", indexed.url, "-k", 2, "--json")
        filtered = run_cli("search", "rails", "--filter", "source = 'rail'", "--server", indexed.url, "--json")
        shown = run_cli("search", "flour", "--mode", "words", "--server", f"{indexed.url}/v1/")
    index = indexed.service.index
    assert index is not None
    assert [json.loads(line) for line in asked.out.splitlines()] == [
        hit.to_dict() for hit in index.search("flour for bread", 2)
    ]
    assert [json.loads(line)["source"] for line in filtered.out.splitlines()] == ["rail"]
    assert DOCUMENTS["bread"] in shown.out
    assert (asked.code, asked.err) == (0, "")


_DIGITS = re.compile(r"(\d\.\d{5})\d+")


@pytest.mark.slow
@pytest.mark.usefixtures("with_key")
@pytest.mark.parametrize(
    "arguments",
    [
        ("rails",),
        ("rails", "wide sea", "-k", 2),
        ("rails", "wide sea", "--json"),
        ("wide sea", "--weight", 0.9, "--json"),
        ("wide sea", "--rerank", 3, "--rerank-by", "mixed", "--rerank-weight", 0.25, "--json"),
    ],
)
def test_it_prints_what_the_local_command_prints(indexed: Running, arguments: tuple[Any, ...]) -> None:
    where = indexed.service.settings.index
    local = run_cli("search", where, *arguments)
    assert local.code == 0
    served = run_cli("search", where, *arguments, "--server", indexed.url)
    assert (served.code, served.err) == (0, local.err)
    # Texts in batches of other sizes differ in the last digits on some processors.
    assert re.sub(_DIGITS, r"\1", served.out) == re.sub(_DIGITS, r"\1", local.out)


@pytest.mark.usefixtures("with_key")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("other.index", "rails"), "serves the index my.index, not other.index"),
        (("rails", "--expand", 5), "--expand can't be combined with --server"),
        (("rails", "--dtype", "float32"), "--dtype can't be combined with --server"),
        (("rails", "--mode", "both"), "mode"),
        (("rails", "-k", 0), "k"),
        (("rails", "--weight", 2), "weight"),
        (("rails", "--filter", "sauce = 'x'"), "filter"),
        (("",), "query"),
    ],
)
def test_mistakes(indexed: Running, arguments: tuple[Any, ...], message: str) -> None:
    assert message in run_cli("search", *arguments, "--server", indexed.url).mistake


def test_keys(indexed: Running, live: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GERUND_API_KEY", raising=False)

    def ask(*more: object) -> Any:
        return run_cli("search", "rails", "--server", indexed.url, "--json", *more)

    assert f"{indexed.url} needs an API key: put it into GERUND_API_KEY" in ask().mistake
    monkeypatch.setenv("GERUND_API_KEY", "wrong")
    assert "does not accept the API key" in ask().mistake
    assert "wrong" not in ask().err
    keys = tmp_path / "keys"
    keys.write_text("secret\nanother\n")
    assert ask("--api-key-file", keys).code == 0
    assert "nowhere cannot be read" in ask("--api-key-file", "nowhere").mistake
    assert "--api-key-file is for --server" in run_cli("search", "my.index", "x", "--api-key-file", keys).mistake
    monkeypatch.delenv("GERUND_API_KEY")
    assert "no index is served" in run_cli("search", "rails", "--server", live.url).mistake


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://localhost", "http://", "http://localhost:port", "x", ""])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="takes a URL such as"):
        Remote(url)


@pytest.fixture
def stranger() -> Iterator[Callable[..., str]]:
    """Start a server that always gives one answer."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes, **headers: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


NOT_GERUND = "is not a gerund server"


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"<html>hello</html>", NOT_GERUND),
        (200, b'{"object": "list"}', NOT_GERUND),
        (200, b'{"data": [{"source": "a"}]}', NOT_GERUND),
        (200, b"[]", NOT_GERUND),
        (200, b"\xff", NOT_GERUND),
        (404, b'{"detail": "Not Found"}', NOT_GERUND),
        (404, b'{"error": {"message": "Not Found", "code": "not_found"}}', NOT_GERUND),
        (302, b"", NOT_GERUND),
        (401, b"who are you", NOT_GERUND),
        (400, b'{"error": {"message": "filter: no", "code": null}}', "filter: no"),
    ],
)
def test_something_else_answers(stranger: Callable[..., str], status: int, body: bytes, message: str) -> None:
    url = stranger(status, body, Location="http://127.0.0.1:9/elsewhere")
    assert message in run_cli("search", "rails", "--server", url).mistake


def test_a_server_that_cannot_answer_now_is_no_mistake(stranger: Callable[..., str]) -> None:
    url = stranger(503, b'{"error": {"message": "the model is being loaded; try again", "code": "loading"}}')
    ran = run_cli("search", "rails", "--server", url)
    assert (ran.code, ran.err) == (1, f"gerund: error: {url}: the model is being loaded; try again\n")


def test_nothing_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # A proxy that is set for the network is not asked for this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    mistake = run_cli("search", "rails", "--server", f"http://127.0.0.1:{port}").mistake
    assert f"no server answers at http://127.0.0.1:{port}" in mistake
    assert "gerund serve --index" in mistake


def test_no_http_is_spoken_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            made, _ = listening.accept()
            with made:
                made.recv(1000)
                made.sendall(b"SSH-2.0-OpenSSH_9\r\n\r\n")

        threading.Thread(target=greet, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert NOT_GERUND in run_cli("search", "rails", "--server", url).mistake


CHECKED = """
import sys, time
from gerund.cli.main import main
sys.argv[1:] = ["search", "rails", "--server", sys.argv[1]]
try:
    main()
finally:
    loaded = [name for name in ("torch", "lancedb", "transformers", "pyarrow") if name in sys.modules]
    print(loaded, time.process_time(), file=sys.stderr)
"""


@pytest.mark.slow
def test_it_starts_without_torch(indexed: Running) -> None:
    done = run_python("-c", CHECKED, indexed.url, env={**ENVIRONMENT, "GERUND_API_KEY": "secret"})
    assert DOCUMENTS["rail"] in done.stdout
    loaded, seconds = done.stderr.rsplit(" ", 1)
    assert loaded == "[]"
    assert float(seconds) < 2  # 0.6 where nothing else runs


# ------------------------------------------------------------------------------------------- an index that goes away


@pytest.mark.usefixtures("with_key")
def test_an_index_that_was_removed_is_told_and_found_again(indexed: Running, tmp_path: Path) -> None:
    where = Path(str(indexed.service.settings.index))
    assert indexed.post("/v1/search", query="rails").status_code == 200
    where.rename(tmp_path / "elsewhere")
    try:
        for mode, condition in (("hybrid", None), ("words", None), ("words", "tokens > 1"), ("vectors", "tokens > 1")):
            answer = indexed.post("/v1/search", query="rails", mode=mode, filter=condition)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (503, "index_unavailable"), error
            assert f"the index {where} is no longer there" in error["message"]
        ran = run_cli("search", "rails", "--server", indexed.url)
        assert (ran.code, "is no longer there" in ran.err) == (1, True)
    finally:
        (tmp_path / "elsewhere").rename(where)
    assert indexed.ok("/v1/search", query="rails", k=1)["data"][0]["source"] == "rail"
    [data] = [path / "data" for path in where.iterdir() if path.match("chunks_*") and not path.match("*_files.lance")]
    data.rename(tmp_path / "data")
    try:
        error = indexed.post("/v1/search", query="rails").json()["error"]
        assert error["code"] == "index_unavailable"
        assert f"the index {where} is incomplete" in error["message"]
    finally:
        (tmp_path / "data").rename(data)
    assert indexed.ok("/v1/search", query="rails", k=1)["data"][0]["source"] == "rail"
    refused = indexed.post("/v1/search", query="rails", filter="text = 'not found: a.lance' AND sauce = 1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "filter")
