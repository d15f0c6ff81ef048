"""OpenAI's Responses API: a conversation in, text and tool calls out. Nothing is stored."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field, model_validator

from gerund.inference.generate.tool_reading import Event
from gerund.inference.generate.tools import MOST_TOOLS
from gerund.server.bodies import ANY, Accepted, Body, Count, not_supported
from gerund.server.errors import STREAMS, ApiError, unsupported
from gerund.server.generation_bodies import (
    MOST_CALLS,
    ChatRequest,
    Choice,
    ResponseFormat,
    Sampled,
    StreamOptions,
    ToolFunction,
    ToolName,
    text_parts,
    translated,
)
from gerund.server.openai_format import AnswerForm, Wire
from gerund.server.service import Served
from gerund.server.work import any_chat_work
from gerund.types import Generation, TokenLogprob, ToolCall

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesTool(ToolFunction):
    """A function that may be called: OpenAI's form without an object around it."""

    without_effect: ClassVar[Accepted | None] = {"strict": ANY, "defer_loading": (False,), "async": (False,)}
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, body: Any) -> Any:
        """Raise an error for tools that OpenAI runs itself."""
        kind = body.get("type") if isinstance(body, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise not_supported(
                "type", f"tools of type {kind[:60]!r} are not supported; only those of type 'function' are"
            )
        return body


class ResponsesToolChoice(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    name: ToolName


class InputPart(Body):
    """A part of a message or of a tool's result."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(("annotations", "logprobs", "cache_control"), ANY)
    type: str
    text: str | None = None
    # Declared, so that the error names the part's type and not this field.
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


Parts = str | Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(Body):
    """A message, a call of a tool, or its result."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(("id", "status", "phase"), ANY)
    type: Annotated[str, Field(max_length=64)] | None = None
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    content: Parts | None = None
    call_id: Annotated[str, Field(max_length=200)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    arguments: str | None = None
    output: Parts | None = None


class TextConfig(Body):
    """The form of the text."""

    without_effect: ClassVar[Accepted | None] = {"verbosity": ("medium",)}
    format: ResponseFormat | None = None


class ResponsesRequest(Sampled):
    """A conversation to be answered, in the form of OpenAI's Responses API."""

    without_effect: ClassVar[Accepted | None] = {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),  # of models that reason
        "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}, {"effort": "none"}),
    }
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a chat."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise unsupported(
                    name, f"{name} is not supported: nothing is stored; send the whole conversation as input"
                )
        form = None if self.text is None or self.text.format is None else self.text.format.model_dump(by_alias=True)
        if form is not None and form["type"] == "json_schema" and form["json_schema"] is None:
            form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()]
        fields = {
            **{name: getattr(self, name) for name in Sampled.model_fields if name != "model"},
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
        }
        return translated(ChatRequest, {"model": self.model, **fields})

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            where = f"input.{number}"
            if item.type == "function_call":
                _add_call(messages, item, where)
            elif item.type == "function_call_output":
                output = _text(item.output, f"{where}.output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            elif item.type in (None, "message"):
                if item.role is None:
                    raise ApiError(f"{where}.role: a message needs a role, such as user", param=f"{where}.role")
                messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
            else:
                raise unsupported(
                    f"{where}.type",
                    f"{where} is of type {item.type!r}; supported are message, function_call, function_call_output",
                )
        return messages


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Append a call; those that follow each other, and the text before them, are one message."""
    if not item.name:
        raise ApiError(f"{where}.name: a call needs the name of a tool", param=f"{where}.name")
    call = {
        "type": "function",
        "id": item.call_id,
        "function": {"name": item.name, "arguments": item.arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    if len(calls) >= MOST_CALLS:
        raise ApiError(f"{where}: at most {MOST_CALLS} calls may follow each other", param=where)
    calls.append({name: value for name, value in call.items() if value is not None})


def _text(content: Parts | None, where: str) -> str | list[dict[str, str]]:
    if content is None:
        raise ApiError(f"{where} is missing; give a text", param=where)
    return content if isinstance(content, str) else text_parts(content, where, _TEXT_PARTS)


class ResponsesForm(AnswerForm):
    """The form of one response; ``about`` has what the request asked for, which the response repeats."""

    def __init__(self, model: str, about: Mapping[str, Any]) -> None:
        self.wire = Wire("text/event-stream", named_event, self._error)
        self._head = {"id": _new_id("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._about = about
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._is_complete = True
        self._sequence = -1

    def whole(self, completions: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        [completion] = completions
        self._is_complete = completion.finished
        status = "completed" if completion.finished else "incomplete"
        if completion.text or not completion.tool_calls:
            self._output.append(_message(completion.text, status))
            if completion.text:
                self._output[-1]["content"][0]["annotations"] = _citations(self.details, completion.text)
        self._output += [_call(call, "completed" if call.is_valid else "incomplete") for call in completion.tool_calls]
        return self._response(usage)

    def first(self, count: int) -> Iterator[dict[str, Any]]:
        del count
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        del index, logprobs
        for part in parts:
            if isinstance(part, str):
                if self._open is None:
                    yield from self._begin(_message(None, "in_progress"))
                yield from self._text(part)
                continue
            if part.name is not None:
                yield from self._close("completed")
                yield from self._begin(_call(ToolCall(part.name, "", part.id or ""), "in_progress"))
            if part.arguments and self._open is not None:
                self._open["arguments"] += part.arguments
                yield self._in_item("response.function_call_arguments.delta", delta=part.arguments)

    def last(self, index: int, completion: Generation) -> Iterator[dict[str, Any]]:
        del index
        self._is_complete = completion.finished
        if not self._output:
            yield from self._begin(_message(None, "in_progress"))
        yield from self._close("completed" if completion.finished else "incomplete")

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        name = "completed" if self._is_complete else "incomplete"
        yield self._event(f"response.{name}", response=self._response(usage))

    def _begin(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._output.append(item)
        self._open = item
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item))
        if item["type"] == "message":
            item["content"].append(_part(""))
            yield self._in_item("response.content_part.added", content_index=0, part=_part(""))

    def _text(self, text: str) -> Iterator[dict[str, Any]]:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        yield self._in_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        item = self._open
        if item is None:
            return
        if item["type"] == "message":
            [part] = item["content"]
            for number, annotation in enumerate(_citations(self.details, part["text"])):
                part["annotations"].append(annotation)
                where = {"content_index": 0, "annotation_index": number}
                yield self._in_item("response.output_text.annotation.added", **where, annotation=annotation)
            yield self._in_item("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._in_item("response.content_part.done", content_index=0, part=dict(part))
        else:
            is_valid = ToolCall(item["name"], item["arguments"], item["call_id"]).is_valid
            status = status if is_valid else "incomplete"
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._in_item("response.function_call_arguments.done", **done)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=_copy(item))
        self._open = None

    def _in_item(self, kind: str, **content: Any) -> dict[str, Any]:
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self._output) - 1, **content)

    def _event(self, kind: str, **content: Any) -> dict[str, Any]:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence, **content}

    def _error(self, error: ApiError) -> dict[str, Any]:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _response(self, usage: dict[str, Any] | None) -> dict[str, Any]:
        status = "in_progress" if usage is None else "completed" if self._is_complete else "incomplete"
        return {
            **self._head,
            **self._about,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [_copy(item) for item in self._output],
            "usage": None if usage is None else _usage(usage),
        }


def named_event(content: dict[str, Any]) -> bytes:
    r"""Return one server-sent event with its name.

    >>> named_event({"type": "error", "code": "timeout"})
    b'event: error\ndata: {"type": "error", "code": "timeout"}\n\n'
    """
    data = json.dumps(content, ensure_ascii=False)
    return f"event: {content['type']}\ndata: {data}\n\n".encode("utf-8", "replace")


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _citations(details: Mapping[str, Any], text: str) -> list[dict[str, Any]]:
    """Return the cited sources in OpenAI's form; ``index`` is where the text first has the source's number."""
    return [
        {
            "type": "file_citation",
            "file_id": source["source"],
            "filename": PurePath(source["source"]).name or source["source"],
            "index": max(0, text.find(f"[{source['number']}]")),
        }
        for source in details.get("sources", ())
    ]


def _message(text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_part(text)]
    return {"id": _new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}


def _call(call: ToolCall, status: str) -> dict[str, Any]:
    return {
        "id": _new_id("fc"),
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item that later changes do not reach."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


router = APIRouter()


@router.post("/v1/responses", tags=["writing"], responses=STREAMS, response_model=None)
async def responses(body: ResponsesRequest, request: Request, service: Served) -> Any:
    """Generate the next message of a conversation, and tool calls, in the form of the model's own chat template."""
    work = any_chat_work(service, body.chat(), "input")
    sampling = work.sampling
    text = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    about = {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.model_dump(include={"tool_choice"})["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": "disabled",
    }
    name = str(body.model) if service.asks_index(body.model) else service.names[0]
    return await work.answer(request, ResponsesForm(name, about))
