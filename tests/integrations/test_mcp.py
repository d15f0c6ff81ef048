"""An index by the Model Context Protocol, with the SDK's own client: in memory, and as a program on standard input."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

pytest.importorskip("mcp", reason="needs gerund[mcp]")

from mcp import Client, MCPError, StdioServerParameters, stdio_client

from gerund.entry import load
from gerund.integrations.mcp import URI, LocalHost, _quotation, make_server
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.index import Index
from gerund.types import Hit
from tests.cli.helpers import ENVIRONMENT, run_cli
from tests.retrieval.helpers import NOTES, notes_index

CHUNK = 48  # tokens, which the tiny model has room for
OUTSIDE = ("/etc/passwd", "../rail", "file:///etc/passwd", "rail/", "RAIL")


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> Any:
    return load(tiny_folder)


@pytest.fixture
def index(lm: Any) -> Index:
    return notes_index(lm, tokens=CHUNK)


@pytest.fixture
def stored(lm: Any, tmp_path: Path) -> Path:
    """An index on the disk."""
    pytest.importorskip("lancedb", reason="needs gerund[index]")
    from gerund.retrieval.index import open_index

    documents = [Document(name, text) for name, text in NOTES.items()]
    open_index(tmp_path / "my.index", lm, chunking=Chunking(tokens=CHUNK)).add_documents(documents)
    return tmp_path / "my.index"


def with_client(index: Index, use: Callable[[Client], Awaitable[None]], mode: str = "auto", **how: Any) -> None:
    async def run() -> None:
        async with Client(make_server(LocalHost(index), "notes", **how), mode=mode) as client:
            await use(client)

    anyio.run(run)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_search_and_ask_quote_exactly(index: Index, mode: str) -> None:
    async def use(client: Client) -> None:
        tools = (await client.list_tools()).tools
        assert [tool.name for tool in tools] == ["search", "ask", "read"]
        assert [tool.input_schema["title"] for tool in tools] == ["search", "ask", "read"]
        found = await client.call_tool("search", {"query": "steam locomotives", "k": 2})
        assert found.structured_content["results"] == [hit.to_dict() for hit in index.search("steam locomotives", 2)]
        hit = found.structured_content["results"][0]
        assert (
            f"[1] rail, characters {hit['start']} to {hit['end']} (About rail):\n{hit['text']}" in found.content[0].text
        )
        read = await client.call_tool("read", {name: hit[name] for name in ("source", "start", "end")})
        assert read.structured_content["text"] == hit["text"]
        answered = (await client.call_tool("ask", {"question": "What is bread made of?"})).structured_content
        expected = index.ask("What is bread made of?")
        assert (answered["answer"], answered["found"]) == (expected.text, True)
        assert [source["source"] for source in answered["sources"]] == ["bread"]
        unknown = await client.call_tool("ask", {"question": "Who won the election in France?"})
        assert not unknown.structured_content["found"]

    with_client(index, use, mode)


@pytest.mark.parametrize(
    "title, heading, about",
    [
        ("Bread", "Bread > Dough", "Bread > Dough"),
        ("Bread", "Bread", "Bread"),
        ("Bread", "Breads > Dough", "Bread - Breads > Dough"),
        ("", "Dough", "Dough"),
    ],
)
def test_a_title_that_is_the_first_heading_is_shown_once(title: str, heading: str, about: str) -> None:
    hit = Hit("a", 0, 4, "Rise", 1.0, 1, title=title, heading=heading)
    assert _quotation(1, hit) == f"[1] a, characters 0 to 4 ({about}):\nRise"


def test_only_documents_of_the_index_can_be_read(index: Index) -> None:
    async def use(client: Client) -> None:
        listed = (await client.list_resources()).resources
        assert [resource.name for resource in listed] == sorted(NOTES)
        [content] = (await client.read_resource(listed[0].uri)).contents
        assert content.text.split() == NOTES[listed[0].name].split()
        for outside in OUTSIDE:
            refused = await client.call_tool("read", {"source": outside})
            assert refused.is_error
            assert f"the index has no document {outside!r}" in refused.content[0].text
            for uri in (outside, URI + outside):
                with pytest.raises(MCPError, match="document"):
                    await client.read_resource(uri)

    with_client(index, use)


def test_a_document_is_read_in_parts(lm: Any) -> None:
    index = notes_index(lm, tokens=CHUNK)
    index.add_documents([Document("long", "One more word. " * 1400)])

    async def use(client: Client) -> None:
        first = (await client.call_tool("read", {"source": "long"})).structured_content
        rest = (await client.call_tool("read", {"source": "long", "start": first["end"]})).structured_content
        document = index.document("long")
        assert document is not None
        assert (first["end"], rest["end"]) == (20000, first["length"])
        assert first["text"] + rest["text"] == document.text

    with_client(index, use)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "query: Field required"),
        ({"query": ""}, "query: String should have at least 1 character"),
        ({"query": "a", "k": 0}, "k: Input should be greater than or equal to 1"),
        ({"query": "a", "limit": 3}, "limit: Extra inputs are not permitted"),
        ({"query": "a", "filter": "DROP TABLE a"}, "filter"),
        ({"query": "\ud800"}, "query"),
    ],
)
def test_a_wrong_call_is_told_to_the_model(index: Index, arguments: dict[str, Any], message: str) -> None:
    async def use(client: Client) -> None:
        found = await client.call_tool("search", arguments)
        assert found.is_error
        assert message in found.content[0].text

    with_client(index, use)


def test_adding_is_off_unless_allowed(lm: Any) -> None:
    index = notes_index(lm, tokens=CHUNK)
    index.add_documents([Document("file.txt", "A file.", file="file.txt")])
    asked = {"source": "otters", "text": "Otters swim in rivers.", "title": "Otters"}

    async def refused(client: Client) -> None:
        with pytest.raises(MCPError, match="--allow-add"):
            await client.call_tool("add", asked)

    async def allowed(client: Client) -> None:
        found = await client.call_tool("add", asked)
        assert found.structured_content == {"source": "otters", "documents": 1, "chunks": 1}
        assert index.search("otters", 1)[0].text == asked["text"]
        again = await client.call_tool("add", asked)
        assert again.content[0].text == "otters is stored already."
        of_file = await client.call_tool("add", {**asked, "source": "file.txt"})
        assert of_file.is_error
        assert "comes from a file" in of_file.content[0].text

    with_client(index, refused)
    assert "otters" not in index.sources()
    with_client(index, allowed, allow_add=True)


def test_a_defect_is_no_end_of_the_server(
    index: Index, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(index, "search", lambda **how: 1 / 0)

    async def use(client: Client) -> None:
        found = await client.call_tool("search", {"query": "bread"})
        assert found.is_error
        assert found.content[0].text == "this failed by a defect of gerund, whatever was asked"
        assert not (await client.call_tool("read", {"source": "bread"})).is_error

    with_client(index, use)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_on_a_terminal_the_command_says_what_it_waits_for(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gerund.integrations.mcp.serve_stdio", lambda *_, **__: None)
    assert run_cli("mcp", stored).err == ""
    ran = run_cli("mcp", stored, typed=())
    assert (ran.out, ran.err.count("\n")) == ("", 1)
    assert "waiting for a program that speaks the Model Context Protocol" in ran.err
    assert "Ctrl-C ends it" in ran.err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_ctrl_c_ends_it_on_a_terminal(stored: Path) -> None:
    _, terminal = os.openpty()
    command = [sys.executable, "-m", "gerund", "mcp", str(stored)]
    with subprocess.Popen(command, stdin=terminal, stderr=subprocess.PIPE, env=ENVIRONMENT) as running:
        try:
            assert running.stderr is not None
            assert b"waiting for a program" in running.stderr.readline()
            time.sleep(0.5)
            running.send_signal(signal.SIGINT)
            assert running.wait(10) == -signal.SIGINT
        finally:
            running.kill()


@pytest.mark.slow
def test_a_program_starts_the_command(stored: Path) -> None:
    arguments = ["-m", "gerund", "mcp", str(stored), "--allow-add"]
    command = StdioServerParameters(command=sys.executable, args=arguments, env=ENVIRONMENT)

    async def run() -> None:
        async with Client(stdio_client(command)) as client:
            assert client.server_info is not None
            assert client.server_info.title == "Documents in my.index"
            found = await client.call_tool("search", {"query": "steam locomotives", "k": 1})
            assert found.structured_content["results"][0]["text"] in NOTES["rail"]
            added = await client.call_tool("add", {"source": "otters", "text": "Otters swim in rivers."})
            assert added.structured_content == {"source": "otters", "documents": 1, "chunks": 1}

    anyio.run(run)
