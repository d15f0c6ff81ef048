"""Texts that were written as OpenAI's objects: choices, chunks of streams, log-probabilities, usage.

Knows: OpenAI's shapes of chats and completions. Does not know: requests, the engine.
"""

import codecs
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from gerund.types import Generation, TokenLogprob

# JSON has no minus infinity; OpenAI's interface has this for what is as good as impossible.
_IMPOSSIBLE = -9999.0


class Form:
    """How the texts of one request are shown.

    Args:
        kind: of the interface.
        model: the model's name.
        echoes: what stands before each text, for completions that repeat their prompts; by the prompt's number.
        choices: how many texts a prompt has.
    """

    def __init__(
        self, kind: Literal["chat", "text"], model: str, *, echoes: Sequence[str] = (), choices: int = 1
    ) -> None:
        self.kind, self._echoes, self._choices = kind, echoes, choices
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
        text = self._echo(index) + one.text
        choice: dict[str, Any] = {"index": index, "finish_reason": one.finish_reason, "stop_reason": one.stop}
        if self.kind == "chat":
            choice |= {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            choice |= {"text": text}
        choice["logprobs"] = None if one.logprobs is None else self._logprobs(index, one.logprobs)
        return choice

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._choices] if self._echoes else ""

    def first(self, count: int) -> list[dict[str, Any]]:
        """Return the chunks that begin a stream of ``count`` texts."""
        if self.kind == "chat":
            return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in range(count)]
        return [self._chunk(index, {"text": self._echo(index)}) for index in range(count) if self._echo(index)]

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
        self, index: int, own: dict[str, Any], reason: str | None = None, stop: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, **own, "finish_reason": reason, "logprobs": logprobs}
        if stop is not None:
            choice["stop_reason"] = stop
        return {**self._stream_head(), "choices": [choice]}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        if self.kind == "chat":
            listed = [{**_described(one), "top_logprobs": [_described(top) for top in one.top]} for one in tokens]
            return {"content": listed, "refusal": None}
        offsets, at = [], self._offsets.get(index, len(self._echo(index)))
        decoder = self._decoders.setdefault(index, codecs.getincrementaldecoder("utf-8")("replace"))
        for one in tokens:
            offsets.append(at)
            at += len(decoder.decode(bytes(one.utf8)))
        self._offsets[index] = at
        return {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [_finite(one.logprob) for one in tokens],
            "top_logprobs": [{top.text: _finite(top.logprob) for top in one.top} for one in tokens],
            "text_offset": offsets,
        }


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
