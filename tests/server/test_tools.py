"""Tools in chats over HTTP: required, streamed, parallel, taken back; and what clients do wrong."""

import json
from dataclasses import replace
from typing import Any, Literal

import pytest

from gerund.inference.generate.config import Constraint
from gerund.inference.generate.tools import ToolUse, function_tool
from tests.server.conftest import Running, events

CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0}


def weather(city: Literal["Bonn", "Rome"], days: Literal[1, 2] = 1) -> None:
    """Forecast the weather."""
    del city, days


def now() -> None:
    """Tell the time."""


TOOLS = [function_tool(weather), function_tool(now)]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


@pytest.fixture(autouse=True)
def _needs_grammars() -> None:
    pytest.importorskip("llguidance")


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the tiny model write a given text, where it may decide whether to call a tool."""
    settings = ToolUse.settings
    script: list[str] = []

    def scripted_settings(self: ToolUse, given: Any) -> Any:
        return replace(settings(self, given), constraint=Constraint("choice", json.dumps(script)))

    monkeypatch.setattr(ToolUse, "settings", scripted_settings)
    return script.append


def joined(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Return the text, the calls (id, name, arguments) and the finish reason of a stream."""
    text, calls, reason = "", [], ""
    for chunk in chunks:
        [choice] = chunk["choices"]
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append([call["id"], call["function"]["name"], ""])
            calls[call["index"]][2] += call["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return text, calls, reason


def test_a_required_call(with_tools: Running) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, **GREEDY}
    [answer] = with_tools.ok(CHAT, **body)["choices"]
    [call] = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Rome")
    text, [[_, name, arguments]], reason = joined(events(with_tools, CHAT, **body))
    assert (text, name, arguments, reason) == ("", "weather", call["function"]["arguments"], "tool_calls")
    found = with_tools.ok(CHAT, **{**body, "tool_choice": "required", "parallel_tool_calls": False})
    assert len(found["choices"][0]["message"]["tool_calls"]) == 1


def test_parallel_calls_that_the_model_decides_on(with_tools: Running, scripted: Any) -> None:
    written = '{"name": "weather", "arguments": {"city": "Bonn"}}'
    scripted(f'Well. <tool_call>{written}</tool_call><tool_call>{{"name": "now", "arguments": {{}}}}</tool_call>')
    body = {"messages": HELLO, "tools": TOOLS, "logprobs": True, **GREEDY}
    [answer] = with_tools.ok(CHAT, **body)["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in answer["message"]["tool_calls"]]
    assert (answer["message"]["content"], answer["finish_reason"]) == ("Well.", "tool_calls")
    assert calls == [("weather", '{"city": "Bonn"}'), ("now", "{}")]
    chunks = events(with_tools, CHAT, **body)
    text, streamed, reason = joined(chunks)
    assert (text, [(name, arguments) for _, name, arguments in streamed], reason) == ("Well.", calls, "tool_calls")
    assert len({call_id for call_id, _, _ in streamed}) == 2
    pieces = [chunk for chunk in chunks if chunk["choices"][0]["delta"].get("tool_calls")]
    assert len(pieces) > 10, "the arguments come as they are written"
    tokens = sum(len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks if chunk["choices"][0]["logprobs"])
    assert tokens == len(answer["logprobs"]["content"])


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>', {"name": "now", "arguments": '{"a": }'}),
        ("No.", "No."),
    ],
)
def test_arguments_that_are_no_json_and_plain_answers(
    with_tools: Running, scripted: Any, written: str, said: Any
) -> None:
    scripted(written)
    [answer] = with_tools.ok(CHAT, messages=HELLO, tools=TOOLS, **GREEDY)["choices"]
    message = answer["message"]
    assert said == (message["content"] or message["tool_calls"][0]["function"])
    assert answer["finish_reason"] == "stop"


def test_calls_and_results_are_taken_back(with_tools: Running) -> None:
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    found = with_tools.ok(CHAT, messages=talk, tools=TOOLS, max_tokens=2, **GREEDY)
    prompt = with_tools.lm.tokenizer.apply_chat_template(
        [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {
            "city": "Bonn"}}}]}, {"role": "tool", "content": "rain"}],
        tools=TOOLS, add_generation_prompt=True, return_dict=False,
    )  # fmt: skip
    assert found["usage"]["prompt_tokens"] == len(prompt)
    parts = {**RESULT, "content": [{"type": "text", "text": "rain"}]}
    same = with_tools.ok(CHAT, messages=[*talk[:-1], parts], tools=TOOLS, max_tokens=2, **GREEDY)
    assert same["choices"] == found["choices"]


def test_a_choice_of_none_and_no_tools_are_a_plain_chat(with_tools: Running) -> None:
    plain = with_tools.ok(CHAT, messages=HELLO, max_tokens=4, **GREEDY)
    for more in (
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": []},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
    ):
        assert with_tools.ok(CHAT, messages=HELLO, max_tokens=4, **more, **GREEDY)["choices"] == plain["choices"]


ENDLESS = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
MANY = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1000)]
REFUSED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools.0.function.name", None),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", None),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", None),
    ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type", None),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", None),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", None),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", None),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", None),
    ({"tools": [ENDLESS], "tool_choice": "required"}, "tools", None),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format", None),
    ({"tools": TOOLS, "best_of": 2}, "best_of", None),
    ({"tools": MANY}, "messages", "context_length_exceeded"),
    ({"tools": [*MANY, *MANY]}, "tools", None),
    ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages.1.tool_calls.0.function",
     None),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages.0.tool_calls", None),
    ({"messages": [{**RESULT, "content": None}]}, "messages.0.content", None),
    ({"messages": [{**RESULT, "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0",
     "not_supported"),
    ({"messages": [{**RESULT, "content": "a " * 10_000}]}, "messages", "context_length_exceeded"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "weather"}, 'tool_choice is none, auto, required, or {"type": "function", '),
        ({"tools": [{"type": "function", "name": "f"}]}, 'name belongs in "function", as in {"type": "function", '),
    ],
)
def test_what_is_right_instead(with_tools: Running, body: dict[str, Any], words: str) -> None:
    found = with_tools.post(CHAT, messages=HELLO, **body)
    assert found.status_code == 400
    assert words in found.json()["error"]["message"]


@pytest.mark.parametrize(("body", "param", "code"), REFUSED)
def test_mistakes(with_tools: Running, body: dict[str, Any], param: str, code: str | None) -> None:
    found = with_tools.post(CHAT, **{"messages": HELLO, **body})
    error = found.json()["error"]
    assert (found.status_code, error["param"], error["code"]) == (400, param, code), error


def test_deep_json_is_no_server_error(with_tools: Running) -> None:
    deep: Any = {}
    for _ in range(900):
        deep = {"a": deep}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": deep}}}
    for choice in ("auto", "required"):
        assert with_tools.post(CHAT, messages=HELLO, tools=[tool], tool_choice=choice).status_code == 400


# ------------------------------------------------------------------------------------------- as a coding agent asks

AGENT = [
    {"type": "function", "function": {"name": name, "description": f"{name} it.", "strict": False, "parameters": {
        "type": "object", "properties": {"path": {"type": "string", "enum": ["a.py", "b.py"]}}, "required": ["path"],
        "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}}}
    for name in ("read_file", "write_file", "list_files", "search", "run", "ask", "done", "plan", "fetch", "diff")
]  # fmt: skip


def test_a_coding_agent(with_tools: Running) -> None:
    """A long system prompt, ten tools, cached parts, an earlier call and its result."""
    system = [{"type": "text", "text": "You edit code. " * 20, "cache_control": {"type": "ephemeral"}}]
    function = {"name": "read_file", "arguments": '{"path":"a.py"}'}
    call = {"index": 0, "id": "toolu_01", "type": "function", "function": function}
    talk = [{"role": "system", "content": system}, *HELLO, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_01", "content": "def f(): pass\n" * 20}]  # fmt: skip
    settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 120, **GREEDY}
    asked = {"messages": talk, "tools": AGENT, "stream_options": {"include_usage": True}, **settings}
    *chunks, usage = events(with_tools, CHAT, **asked)
    _, [[_, name, arguments]], reason = joined(chunks)
    assert (name in [tool["function"]["name"] for tool in AGENT], reason) == (True, "tool_calls")
    assert json.loads(arguments)["path"] in ("a.py", "b.py")
    assert usage["usage"]["prompt_tokens"] > 2000
