"""OpenAI's response objects: choices, stream chunks, log-probabilities, usage, and server-sent events."""

import codecs
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gerund.server.errors import ClientGoneError, api_error
from gerund.server.logs import note_defect
from gerund.types import Generation, TokenLogprob


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before each of its texts.

    Attributes:
        text: its text.
        logprobs: those of its tokens, where they were asked for; that of the first is no number, since nothing
            precedes it.
    """

    text: str
    logprobs: Sequence[TokenLogprob] = ()


# JSON has no minus infinity; OpenAI's interface has this for what is as good as impossible.
_IMPOSSIBLE = -9999.0


class Form:
    """How the texts of one request are shown.

    Args:
        kind: of the interface.
        model: the model's name.
        choices: how many texts a prompt has.
        control: returns how a control token is spelled, which no text has in it.

    Attributes:
        echoes: what stands before each text, for completions that repeat their prompts; by the prompt's number.
    """

    def __init__(
        self,
        kind: Literal["chat", "text"],
        model: str,
        *,
        choices: int = 1,
        control: Callable[[int], str | None] = lambda _: None,
    ) -> None:
        self.kind, self._choices, self._control = kind, choices, control
        self.echoes: Sequence[Echo] = ()
        self._head = {
            "id": f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}
        # A character may be spelled by several tokens.
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}

    def whole(self, written: Sequence[Generation], usage: dict[str, Any], **more: Any) -> dict[str, Any]:
        """Return the answer with all its texts."""
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        choices = [self._choice(index, one) for index, one in enumerate(written)]
        return {**self._head, "object": kind, "choices": choices, "usage": usage, **more}

    def _choice(self, index: int, one: Generation) -> dict[str, Any]:
        echo = self._echo(index)
        text = echo.text + one.text
        choice: dict[str, Any] = {"index": index, "finish_reason": one.finish_reason, "stop_reason": one.stop}
        if self.kind == "chat":
            choice |= {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            choice |= {"text": text}
        own = None if one.logprobs is None else self._logprobs(index, [*echo.logprobs, *one.logprobs])
        choice["logprobs"] = own
        return choice

    def _echo(self, index: int) -> Echo:
        return self.echoes[index // self._choices] if self.echoes else Echo("")

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks that begin a stream of ``count`` texts."""
        if self.kind == "chat":
            return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(count)]
        found = []
        for index in range(count):
            echo = self._echo(index)
            if echo.text or echo.logprobs:
                own = self._logprobs(index, echo.logprobs) if echo.logprobs else None
                found.append(self._chunk(index, {"text": echo.text}, logprobs=own))
        return found

    def piece(self, index: int, text: str, logprobs: Sequence[TokenLogprob], *, wants: bool) -> dict[str, Any]:
        """Return a chunk with the next characters of a text.

        Args:
            index: the text's number.
            text: its new characters.
            logprobs: those of the tokens that came with them.
            wants: whether they were asked for.
        """
        own = {"delta": {"content": text}} if self.kind == "chat" else {"text": text}
        return self._chunk(index, own, logprobs=self._logprobs(index, logprobs) if wants else None)

    def last(self, index: int, one: Generation) -> dict[str, Any]:
        """Return the chunk that ends a text."""
        own: dict[str, Any] = {"delta": {}} if self.kind == "chat" else {"text": ""}
        return self._chunk(index, own, one.finish_reason, one.stop)

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the chunk that says how many tokens there were."""
        return {**self._stream_head(), "choices": [], "usage": usage}

    def _stream_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk" if self.kind == "chat" else "text_completion"}

    def _chunk(
        self,
        index: int,
        own: dict[str, Any],
        reason: str | None = None,
        stop: str | int | None = None,
        logprobs: Any = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **own, "finish_reason": reason, "logprobs": logprobs}
        if stop is not None:
            choice["stop_reason"] = stop
        return {**self._stream_head(), "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.kind == "chat":
            listed = [{**_described(one), "top_logprobs": [_described(top) for top in one.top]} for one in tokens]
            return {"content": listed, "refusal": None}
        echo, offsets = self._echo(index), []
        # The tokens of a prompt may spell a space more than its text has; what follows it starts at its end.
        spelled = b"".join(one.utf8 for one in echo.logprobs).decode("utf-8", "replace")
        at = self._offsets.get(index, len(echo.text) - len(spelled))
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for one in tokens:
            offsets.append(max(0, at))
            at += len(decoder.decode(bytes(one.utf8)))
        self._offsets[index] = at
        return {
            "tokens": [self._spelled(one) for one in tokens],
            "token_logprobs": [None if math.isnan(one.logprob) else _finite(one.logprob) for one in tokens],
            "top_logprobs": [None if math.isnan(one.logprob) else self._alternatives(one) for one in tokens],
            "text_offset": offsets,
        }

    def _alternatives(self, token: TokenLogprob) -> dict[str, float]:
        """Return the log-probabilities of the most likely tokens and of the chosen one, each under a key of its own."""
        found: dict[str, float] = {}
        is_listed = any(top.token_id == token.token_id for top in token.top)
        for one in token.top if is_listed else (*token.top, token):
            key = self._spelled(one)
            # Two tokens may spell the same: the more likely one keeps the text.
            found[key if key not in found else f"token_id:{one.token_id}"] = _finite(one.logprob)
        return found

    def _spelled(self, token: TokenLogprob) -> str:
        """Return a token as OpenAI's completions write it: its text, or its bytes if they are not whole characters."""
        if not token.utf8:
            return self._control(token.token_id) or ""
        try:
            return token.utf8.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(token.utf8)[2:-1]


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Return how many tokens were read and written, in OpenAI's words."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _described(one: TokenLogprob) -> dict[str, Any]:
    return {"token": one.text, "logprob": _finite(one.logprob), "bytes": list(one.utf8)}


def _finite(logprob: float) -> float:
    return max(logprob, _IMPOSSIBLE)


DONE = b"data: [DONE]\n\n"


def event(content: Any) -> bytes:
    r"""Return one event.

    >>> event({"text": "a\nb"})
    b'data: {"text": "a\\nb"}\n\n'
    """
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode("utf-8", "replace")


class EventStream(Response):
    """Events as they come. An error in the midst of them is an event too, since the status was sent long ago.

    Args:
        events: what is sent, without ``[DONE]``.
        close: called when nothing is sent any more, however it ended.
        headers: further headers.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Any], close: Callable[[], None], headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        del receive
        started: dict[str, Any] = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(started)
            async for content in self._events:
                await send({"type": "http.response.body", "body": event(content), "more_body": True})
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        except ClientGoneError:
            return  # nobody reads the end; the connection is closed behind what was sent
        except Exception as error:
            failed = api_error(error)
            if failed.status >= 500 and failed.code == "server_error":
                note_defect(error, route=scope["path"])
            await send({"type": "http.response.body", "body": event(failed.body), "more_body": False})
        finally:
            self._close()
