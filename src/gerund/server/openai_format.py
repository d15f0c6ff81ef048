"""OpenAI's response objects: choices, stream chunks, log-probabilities, usage, and server-sent events."""

import codecs
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gerund.engine.config import RequestTimes
from gerund.inference.generate.tool_reading import CallDelta, Event
from gerund.server.errors import ApiError, ClientGoneError, api_error
from gerund.server.logs import note_defect
from gerund.types import Generation, TokenLogprob

# JSON has no minus infinity; OpenAI's API has this for tokens that are practically impossible.
_IMPOSSIBLE = -9999.0


@dataclass(frozen=True)
class Echo:
    """A prompt that precedes its completions; ``logprobs`` of its first token is NaN, since nothing precedes it."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class Wire:
    """How the chunks of a stream are sent; ``error`` is the last chunk of a stream that fails."""

    media_type: str
    encode: Callable[[Any], bytes]
    error: Callable[[ApiError], Any]
    done: bytes = b""


class AnswerForm(Protocol):
    """The form of one API: formats the completions of one request, whole or as the chunks of a stream."""

    wire: Wire
    echoes: Sequence[Echo] = ()
    details: Mapping[str, Any] = MappingProxyType({})
    """What a message says, besides its text, of an answer from the index; empty for others."""
    times: RequestTimes | None = None
    """When the engine generated the answer; None where it did not, as for a quoted answer."""

    def whole(self, completions: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with all completions."""

    def first(self, count: int) -> Iterable[Any]:
        """Return the chunks that start a stream of ``count`` completions."""

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterable[Any]:
        """Return the chunks with the next characters of a completion, and the log-probabilities of their tokens."""

    def last(self, index: int, completion: Generation) -> Iterable[Any]:
        """Return the chunks that end a completion."""

    def end(self, usage: dict[str, Any]) -> Iterable[Any]:
        """Return the chunks that end the stream."""


class Form(AnswerForm):
    """OpenAI's form of chats and completions.

    ``choices`` is the number of completions per prompt, ``echoes`` the prompts before them, and ``control`` spells
    a control token, which no text contains. With ``sends_usage`` a stream ends with its usage.
    """

    def __init__(
        self,
        kind: Literal["chat", "text"],
        model: str,
        *,
        choices: int = 1,
        sends_usage: bool = False,
        control: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.is_chat, self._choices, self._control = kind == "chat", choices, control
        self._sends_usage, self.wire = sends_usage, SERVER_SENT
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}
        # Several tokens may spell one character.
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def whole(self, completions: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        return {**self._head, "object": kind, "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Generation) -> dict[str, Any]:
        echo, logprobs = self._echo(index), completion.logprobs
        text = echo.text + completion.text
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **self.details}
            if completion.tool_calls:
                message["content"] = text or None
                message["tool_calls"] = [call.message for call in completion.tool_calls]
            content = {"message": message}
        return {
            "index": index,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop,
            **content,
            "logprobs": None if logprobs is None else self._logprobs(index, [*echo.logprobs, *logprobs]),
        }

    def _echo(self, index: int) -> Echo:
        return self.echoes[index // self._choices] if self.echoes else Echo("")

    def first(self, count: int) -> list[dict[str, Any]]:
        if self.is_chat:
            return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(count)]
        echoes = [(index, self._echo(index)) for index in range(count)]
        return [
            self._chunk(
                index, {"text": echo.text}, logprobs=self._logprobs(index, echo.logprobs) if echo.logprobs else None
            )
            for index, echo in echoes
            if echo.text or echo.logprobs
        ]

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        listed = self._logprobs(index, logprobs) if logprobs else None
        for part in parts or [""]:
            if not self.is_chat:
                yield self._chunk(index, {"text": part}, logprobs=listed)
                continue
            delta: dict[str, Any] = {"content": part}
            if isinstance(part, CallDelta):
                function = {"arguments": part.arguments}
                call: dict[str, Any] = {"index": part.index, "function": function}
                if part.name is not None:
                    function["name"] = part.name
                    call |= {"id": part.id, "type": "function"}
                delta = {"tool_calls": [call]}
            yield self._chunk(index, {"delta": delta}, logprobs=listed)
            listed = None

    def last(self, index: int, completion: Generation) -> list[dict[str, Any]]:
        content: dict[str, Any] = {"delta": {**self.details}} if self.is_chat else {"text": ""}
        return [self._chunk(index, content, completion.finish_reason, completion.stop)]

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return [{**self._head, "object": kind, "choices": [], "usage": usage}] if self._sends_usage else []

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None = None,
        stop: str | int | None = None,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        choice = {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}
        if stop is not None:
            choice["stop_reason"] = stop
        return {**self._head, "object": kind, "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.is_chat:
            listed = [{**_described(item), "top_logprobs": [_described(top) for top in item.top]} for item in tokens]
            return {"content": listed, "refusal": None}
        echo, offsets = self._echo(index), []
        # A prompt's tokens may spell one more space than its text has; the completion starts at the text's end.
        spelled = b"".join(item.utf8 for item in echo.logprobs).decode("utf-8", "replace")
        offset = self._offsets.get(index, len(echo.text) - len(spelled))
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for item in tokens:
            offsets.append(max(0, offset))
            offset += len(decoder.decode(bytes(item.utf8)))
        self._offsets[index] = offset
        return {
            "tokens": [self._spelled(item) for item in tokens],
            "token_logprobs": [None if math.isnan(item.logprob) else _finite(item.logprob) for item in tokens],
            "top_logprobs": [None if math.isnan(item.logprob) else self._alternatives(item) for item in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and of the chosen token."""
        alternatives: dict[str, float] = {}
        is_listed = any(top.token_id == token.token_id for top in token.top)
        for item in token.top if is_listed else (*token.top, token):
            key = self._spelled(item)
            # Of two tokens with the same spelling, the more likely one has it as its key.
            alternatives[key if key not in alternatives else f"token_id:{item.token_id}"] = _finite(item.logprob)
        return alternatives

    def _spelled(self, token: TokenLogprob) -> str:
        """Return a token as OpenAI's completions have it: its text, or its bytes if they are no complete characters."""
        if not token.utf8:
            return self._control(token.token_id) or ""
        try:
            return token.utf8.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(token.utf8)[2:-1]


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    """Return OpenAI's ``usage`` object; ``cached_tokens`` of the prompt were kept from an earlier one."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _described(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.utf8)}


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


class EventStream(Response):
    """A stream of chunks. An error amid them is a chunk too, since the status was sent already.

    ``close`` is called when the stream ends, however it ends.
    """

    def __init__(self, events: AsyncIterator[Any], close: Callable[[], None], wire: Wire) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=wire.media_type)
        del self.headers["content-length"]
        self._events, self._close, self._wire = events, close, wire

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all chunks, and what ends the stream."""
        del receive
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for content in self._events:
                await send({"type": "http.response.body", "body": self._wire.encode(content), "more_body": True})
            await send({"type": "http.response.body", "body": self._wire.done, "more_body": False})
        except ClientGoneError:
            return  # the connection closes after what was sent
        except Exception as error:
            failed = api_error(error)
            if failed.status >= 500 and failed.code == "server_error":
                note_defect(error, route=scope["path"])
            last = self._wire.encode(self._wire.error(failed))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._close()


def event(content: Any) -> bytes:
    r"""Return one server-sent event.

    >>> event({"text": "a\nb"})
    b'data: {"text": "a\\nb"}\n\n'
    """
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


SERVER_SENT = Wire("text/event-stream", event, lambda error: error.body, b"data: [DONE]\n\n")
