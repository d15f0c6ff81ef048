"""The served index at /mcp, with the SDK's own client over HTTP: the same keys and limits as on every other route."""

from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

pytest.importorskip("mcp", reason="needs gerund[mcp]")
pytest.importorskip("lancedb", reason="needs gerund[index]")

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from gerund.entry import load
from gerund.errors import ConfigError
from gerund.retrieval import question_answering
from gerund.server.config import ServerConfig, settings_of
from tests.server.conftest import DOCUMENTS, Running, index_of, save_served
from tests.server.test_fuzz import any_json

CALL = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "tools/call",
    "params": {"name": "search", "arguments": {"query": "bread"}},
}
ACCEPT = {"Accept": "application/json, text/event-stream"}


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that offers its index at /mcp, with a key, and room for an answer's instructions."""
    folder = tmp_path_factory.mktemp("offered")
    lm = load(save_served(folder / "tiny", context=2048))
    where = index_of(folder / "my.index", lm)
    with Running(lm, ServerConfig(index=where, mcp=True, allow_add=True, body_limit=100_000), ["secret"]) as running:
        yield running


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_client_of_the_sdk(offered: Running, mode: str) -> None:
    async def run() -> None:
        headers = {"Authorization": "Bearer secret"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=30) as with_key,
            Client(streamable_http_client(f"{offered.url}/mcp", http_client=with_key), mode=mode) as client,
        ):
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "ask", "read", "add"]
            found = await client.call_tool("search", {"query": "flour for bread", "k": 1})
            assert found.structured_content["results"][0]["text"] == DOCUMENTS["bread"]
            assert len((await client.list_resources()).resources) >= len(DOCUMENTS)
            assert (await client.call_tool("read", {"source": "/etc/passwd"})).is_error
            added = await client.call_tool("add", {"source": mode, "text": f"Otters of {mode} swim."})
            assert added.structured_content["documents"] == 1

    anyio.run(run)
    answer = offered.client.post("/v1/search", json={"query": f"otters of {mode}", "k": 1}).json()
    assert answer["data"][0]["source"] == mode


@pytest.mark.slow
def test_an_answer_is_generated_by_the_engine(offered: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_answering, "ANSWERS_FROM", 0)
    question = "What is bread made of?"
    body = {**CALL, "params": {"name": "ask", "arguments": {"question": question}}}
    found = offered.client.post("/mcp", json=body, headers=ACCEPT).json()["result"]["structuredContent"]
    index = offered.service.index
    assert index is not None
    expected = offered.service.engine.submit_call(lambda: index.ask(question), tokens=1).result()
    assert (found["answer"], found["method"]) == (expected.text, expected.method)
    assert [check["support"] for check in found["checks"]] == [check.support for check in expected.checks]
    assert expected.checks


def test_keys_and_limits_are_those_of_the_server(offered: Running) -> None:
    assert httpx.post(f"{offered.url}/mcp", json=CALL, headers=ACCEPT).status_code == 401
    assert offered.client.get("/mcp").status_code == 405
    assert offered.client.post("/mcp", content=b'{"a": "' + b"a" * 200_000).status_code == 415
    large = {"headers": {**ACCEPT, "Content-Type": "application/json"}}
    assert offered.client.post("/mcp", content=b'{"a": "' + b"a" * 200_000, **large).status_code == 413
    host: dict[str, Any] = {"headers": {**ACCEPT, "Host": "evil.example"}}
    assert offered.client.post("/mcp", json=CALL, **host).status_code == 403
    for body in ({}, [], {"jsonrpc": "2.0", "id": 1, "method": "no/such"}, {**CALL, "params": {"name": 3}}):
        assert offered.client.post("/mcp", json=body, headers=ACCEPT).status_code < 500


def test_there_is_no_route_unless_it_is_asked_for(live: Running) -> None:
    assert live.post("/mcp", **CALL).status_code == 404
    for given, message in (({"mcp": True}, "--index"), ({"allow_add": True, "index": "a"}, "--mcp")):
        with pytest.raises(ConfigError, match=message):
            settings_of(given)


@pytest.mark.slow
def test_no_message_is_a_server_error(offered: Running) -> None:
    """Calls with any arguments, and messages of any form."""
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as any_

    values = any_json()
    names = any_.sampled_from(["search", "ask", "read", "add", "other"])
    known = any_.sampled_from(["query", "question", "k", "filter", "source", "start", "end", "text", "title"])
    texts = any_.sampled_from(["bread", "../rail", "file:///etc/passwd", "", "a" * 2000, "x = 1 --", "gerund://a"])
    arguments = any_.dictionaries(known, any_.one_of(texts, any_.integers(), values), max_size=4)
    calls = any_.fixed_dictionaries({"name": names, "arguments": any_.one_of(arguments, values)})
    methods = any_.sampled_from(
        ["initialize", "ping", "tools/list", "tools/call", "resources/list", "resources/read", "prompts/get"]
    )
    fields = {"id": any_.integers(0, 9), "method": methods, "params": any_.one_of(calls, values)}
    message = any_.fixed_dictionaries({"jsonrpc": any_.just("2.0"), **fields})

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(any_.one_of(message, values))
    def check(body: Any) -> None:
        found = offered.client.post("/mcp", json=body, headers=ACCEPT)
        assert found.status_code < 500, found.text
        assert "defect" not in found.text, found.text

    check()
    assert offered.idle(20)
