"""The objects and events of OpenAI's Responses API."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from gerund.inference.generate.tool_reading import Event
from gerund.server.errors import ApiError
from gerund.server.openai_format import AnswerForm, Wire
from gerund.types import Generation, TokenLogprob, ToolCall


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
        """Return the response."""
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
        """Yield the events that begin a stream."""
        del count
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response(None))

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        """Yield the events with the next characters of the text, or of the arguments of a call."""
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
        """Yield the events that end the last item."""
        del index
        self._is_complete = completion.finished
        if not self._output:
            yield from self._begin(_message(None, "in_progress"))
        yield from self._close("completed" if completion.finished else "incomplete")

    def end(self, usage: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the last event, with the whole response."""
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
