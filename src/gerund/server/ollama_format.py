"""Ollama's response objects: one JSON object, or a line of JSON per piece of text."""

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from gerund.inference.generate.tool_reading import Event
from gerund.server.openai_format import AnswerForm, Wire
from gerund.types import Generation, TokenLogprob, ToolCall


def moment(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; None for now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def line(content: Any) -> bytes:
    r"""Return one line of JSON.

    >>> line({"done": True})
    b'{"done": true}\n'
    """
    return f"{json.dumps(content, ensure_ascii=False)}\n".encode("utf-8", "replace")


NDJSON = Wire("application/x-ndjson", line, lambda error: {"error": error.message})


class OllamaForm(AnswerForm):
    """Ollama's form of chats and of ``generate``; the tool calls of an answer come together."""

    wire = NDJSON

    def __init__(self, kind: Literal["chat", "generate"], model: str) -> None:
        self._is_chat, self._model = kind == "chat", model
        self._began = time.perf_counter_ns()
        self._reason = "stop"

    def whole(self, completions: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer."""
        [completion] = completions
        calls, text = _calls(completion)
        self._reason = _reason(completion)
        return {**self._with_details(self._piece(text, calls)), **self._end(usage)}

    def first(self, count: int) -> tuple[()]:
        """Return nothing: a stream begins with its text."""
        del count
        return ()

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        """Yield the lines with the next characters of the answer."""
        del index, logprobs
        for part in parts:
            if isinstance(part, str):
                yield {**self._piece(part), "done": False}

    def last(self, index: int, completion: Generation) -> Iterator[dict[str, Any]]:
        """Yield the line with the tool calls, if there are any."""
        del index
        calls, text = _calls(completion)
        self._reason = _reason(completion)
        unread = text[len(completion.text) :]
        if calls or unread:
            yield {**self._piece(unread, calls), "done": False}

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the last line, with the counts and times."""
        return [{**self._with_details(self._piece("")), **self._end(usage)}]

    def _with_details(self, piece: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {**piece, "message": {**piece["message"], **self.details}}
        return {**piece, **self.details}

    def _piece(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        content: dict[str, Any] = {"response": text}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = list(calls)
            content = {"message": message}
        return {"model": self._model, "created_at": moment(), **content}

    def _end(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": time.perf_counter_ns() - self._began,
            "load_duration": 0,  # the model was in memory
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            **self._durations(),
        }

    def _durations(self) -> dict[str, int]:
        """Return how long prompt and answer took, without the time in the queue; nothing where that isn't known."""
        times = self.times
        if times is None or times.began is None or times.first_token is None or times.ended is None:
            return {}
        return {
            "prompt_eval_duration": times.first_token - times.began,
            "eval_duration": times.ended - times.first_token,
        }


def _reason(completion: Generation) -> str:
    return "stop" if completion.finished else "length"


def _calls(completion: Generation) -> tuple[list[dict[str, Any]], str]:
    """Return the tool calls, whose arguments are objects in Ollama's form, and the text with those that are none."""
    text, calls = completion.text, []
    for call in completion.tool_calls:
        if call.is_valid:
            calls.append({"function": {"name": call.name, "arguments": json.loads(call.arguments)}})
        else:
            text += _as_text(call)
    return calls, text


def _as_text(call: ToolCall) -> str:
    return f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'
