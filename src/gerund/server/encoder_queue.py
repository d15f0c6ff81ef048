"""Encode requests for a separate encoder run by sentence-transformers, one at a time in a thread of their own."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gerund.engine.config import EngineFuture
from gerund.errors import QueueFullError
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.types import EncodeResult

# Characters of a token at least, so that what waits can be counted without tokenizing.
_CHARACTERS = 4


class EncoderQueue:
    """Takes encode requests as the engine does; ``limit`` is how many tokens may wait, estimated."""

    def __init__(self, encoder: SentenceEncoder, limit: int) -> None:
        self._encoder, self._limit = encoder, limit
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gerund-encoder")
        self._waiting = 0

    def submit_encode(
        self, texts: Sequence[str], *, deadline: float | None = None, normalize: bool | None = None, **options: Any
    ) -> EngineFuture[EncodeResult]:
        """Encode texts; see ``SentenceEncoder.encode_counted``.

        Raises:
            QueueFullError: too many tokens wait already.
        """
        del deadline, normalize  # the request's own timer cancels it; vectors always have length 1
        tokens = sum(len(text) // _CHARACTERS + 1 for text in texts)
        if self._waiting and self._waiting + tokens > self._limit:
            raise QueueFullError(f"about {self._waiting} tokens wait to be encoded already; try again", 2)
        self._waiting += tokens
        future: Future[EncodeResult] = self._thread.submit(self._encoder.encode_counted, texts, **options)
        future.add_done_callback(lambda _: self._done(tokens))
        return EngineFuture(future, tokens)

    def _done(self, tokens: int) -> None:
        self._waiting -= tokens

    def close(self) -> None:
        """Cancel what waits, and end after what runs."""
        self._thread.shutdown(cancel_futures=True)
