"""The Responses API, with the openai client where it is installed."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tests.server.conftest import Running
from tests.server.test_tools import TOOLS, scripted  # noqa: F401 - a fixture

ROUTE = "/v1/responses"
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 6}
WEATHER = {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Bonn"}'}
RAIN = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}


@pytest.fixture(scope="module")
def client(with_tools: Running) -> Iterator[Any]:
    module = pytest.importorskip("openai", reason="needs gerund[clients]")
    found = module.OpenAI(base_url=f"{with_tools.url}/v1", api_key="none", max_retries=0)
    yield found
    found.close()


def stream(running: Running, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, after making sure that they are numbered and named."""
    with running.client.stream("POST", ROUTE, json={**body, "stream": True}) as found:
        assert found.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in found.iter_lines() if line]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def test_a_text_is_the_librarys(live: Running, served_lm: Any) -> None:
    found = live.ok(ROUTE, model="tiny", input="Hello", instructions="Be brief.", **GREEDY, metadata={"a": "b"})
    [expected] = served_lm.chat([{"role": "system", "content": "Be brief."}, *HELLO], 6)
    [message] = found["output"]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", expected.text)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["input_tokens"] == expected.usage.prompt_tokens
    assert found["usage"]["output_tokens"] == expected.usage.completion_tokens
    assert (found["store"], found["metadata"], found["temperature"]) == (False, {"a": "b"}, 0)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    same = live.ok(ROUTE, input=parts, instructions="Be brief.", **GREEDY)
    assert same["output"][0]["content"] == message["content"]


def test_a_stream_of_text(live: Running, served_lm: Any) -> None:
    events = stream(live, input="Hello", **GREEDY)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4 + len(deltas) :] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert (
        "".join(deltas) == served_lm.chat(HELLO, 6)[0].text == events[-1]["response"]["output"][0]["content"][0]["text"]
    )
    assert events[0]["response"]["output"] == events[2]["item"]["content"] == []


def test_arguments_that_are_no_json_are_an_incomplete_call(with_tools: Running, scripted: Any) -> None:  # noqa: F811
    pytest.importorskip("llguidance")
    scripted('<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>')
    found = with_tools.ok(ROUTE, input="Hello", tools=FLAT, temperature=0)
    [call] = found["output"]
    assert (call["arguments"], call["status"], found["status"]) == ('{"a": }', "incomplete", "completed")


def test_calls(with_tools: Running, scripted: Any) -> None:  # noqa: F811
    pytest.importorskip("llguidance")
    scripted(
        'Well.<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    found = with_tools.ok(ROUTE, input=HELLO, tools=FLAT, temperature=0)
    events = stream(with_tools, input=HELLO, tools=FLAT, temperature=0)
    for output in (found["output"], events[-1]["response"]["output"]):
        message, *calls = output
        assert message["content"][0]["text"] == "Well."
        assert [(call["name"], call["arguments"]) for call in calls] == [("weather", '{"city": "Bonn"}'), ("now", "{}")]
        assert [call["status"] for call in calls] == ["completed"] * 2
        assert len({call["call_id"] for call in calls}) == 2
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas if event["output_index"] == 1) == '{"city": "Bonn"}'


def test_calls_and_results_are_taken_back(with_tools: Running) -> None:
    talk = [*HELLO, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
            WEATHER, {**WEATHER, "call_id": "call_2"}, RAIN, {**RAIN, "call_id": "call_2"}]  # fmt: skip
    found = with_tools.ok(ROUTE, input=talk, tools=FLAT, **GREEDY)
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
    chat = [*HELLO, {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
            *[{"role": "tool", "content": "rain"}] * 2]  # fmt: skip
    same = with_tools.ok("/v1/chat/completions", messages=chat, tools=TOOLS, temperature=0, max_tokens=6)
    assert found["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert found["output"][0]["content"][0]["text"] == same["choices"][0]["message"]["content"]


def test_the_client_of_openai(client: Any, live: Running) -> None:
    pytest.importorskip("llguidance")
    first = client.responses.create(
        model="tiny", input="Hello", tools=FLAT, tool_choice={"type": "function", "name": "weather"}, temperature=0,
        store=False, max_output_tokens=200,
    )  # fmt: skip
    [call] = first.output
    assert json.loads(call.arguments)["city"] in ("Bonn", "Rome")
    talk = [*HELLO, *first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    with client.responses.stream(model="tiny", input=talk, tools=FLAT, temperature=0, max_output_tokens=4) as events:
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == client.responses.create(model="tiny", input=talk, tools=FLAT, **GREEDY).output_text[: len(text)]

    class Answer(BaseModel):
        yes: bool

    other = client.with_options(base_url=f"{live.url}/v1")
    parsed = other.responses.parse(model="tiny", input="Hello", text_format=Answer, temperature=0)
    assert isinstance(parsed.output_parsed, Answer)


REFUSED: list[tuple[dict[str, Any], str | None, str | None]] = [
    ({}, "input", None), ({"input": []}, "input", None),
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not_supported"),
    ({"input": "a", "conversation": "conv_1"}, "conversation", "not_supported"),
    ({"input": "a", "background": True}, "background", "not_supported"),
    ({"input": "a", "truncation": "auto"}, "truncation", "not_supported"),
    ({"input": "a", "tools": [{"type": "web_search", "filters": {}}]}, "tools.0.type", "not_supported"),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools.0.name", None),
    ({"input": "a", "tools": FLAT}, "tools", "not_with_this_model"),
    ({"input": [WEATHER, RAIN]}, "input", "not_with_this_model"),
    ({"input": [{"type": "function_call"}]}, "input.0.name", None),
    ({"input": [{"content": "a"}]}, "input.0.role", None), ({"input": [{"role": "user"}]}, "input.0.content", None),
    ({"input": [{"type": "reasoning", "id": "rs_1"}]}, "input.0.type", "not_supported"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "input.0.content.0",
     "not_supported"),
    ({"input": "a " * 600}, "input", "context_length_exceeded"),
    ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "response_format", None),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_mistakes(live: Running, body: dict[str, Any], param: str | None, code: str | None) -> None:
    found = live.post(ROUTE, **body)
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, param, code), error
