"""The encoding of an engine: texts of many requests in common batches, each request in its turn.

Knows: encoders, tokens. Does not know: admission, time, what else is done between two batches.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import NamedTuple

import numpy as np

from gerund.checks import is_listing
from gerund.engine.admission import Job
from gerund.errors import TextError
from gerund.inference.encode import runtime as encoding
from gerund.inference.tokens import Tokens
from gerund.text_encoder import TextEncoder


class EncodeJob(Job):
    """Texts of one request on their way.

    Args:
        lm: the encoder.
        tokens: the texts' tokens, once for each template that they are read in.
        normalize: as in ``encode``.
        dimensions: as in ``encode``.
        deadline: seconds from now.
    """

    def __init__(
        self,
        lm: TextEncoder,
        tokens: Sequence[Sequence[Tokens | None]],
        normalize: bool | None,
        dimensions: int | None,
        deadline: float | None,
    ) -> None:
        super().__init__(max(1, sum(len(one) for same in tokens for one in same if one is not None)), deadline)
        self._lm, self._tokens, self._normalize, self._dimensions = lm, tokens, normalize, dimensions
        self.texts = len(tokens[0])
        self.found = [np.zeros((self.texts, lm.runtime.width), dtype=np.float32) for _ in tokens]
        self.todo = deque(
            _Text(self, template, row, one)
            for template, same in enumerate(tokens)
            for row, one in enumerate(same)
            if one is not None
        )
        self.left = len(self.todo)

    def finish(self) -> None:
        """Hand over the vectors."""
        vectors = self._lm.vectors(self.found, self._normalize, self._dimensions)
        self.settle(self._lm.with_usage(vectors, self._tokens))


class _Text(NamedTuple):
    job: EncodeJob
    template: int
    row: int
    tokens: Tokens


class EncodingPart:
    """Everything about encoding.

    Args:
        lm: the encoder.
        counts: what was done.
    """

    def __init__(self, lm: TextEncoder, counts: "Counter[str]") -> None:
        self._lm, self._counts = lm, counts
        self._jobs: deque[EncodeJob] = deque()
        self._batch: list[_Text] = []
        self.progress = 0  # tokens that were encoded

    def add(self, job: EncodeJob) -> None:
        """Let a request wait for its turn."""
        if job.left:
            self._jobs.append(job)
        else:
            job.finish()  # empty texts alone

    @property
    def waits(self) -> bool:
        """Whether there is something to encode."""
        return bool(self._jobs)

    def pending(self) -> Iterator[EncodeJob]:
        """Yield the requests that wait."""
        yield from self._jobs

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits any more for any text of the batch that is being encoded."""
        return bool(self._batch) and all(text.job.is_over for text in self._batch)

    def read(self, budget: int) -> int:
        """Encode texts of about so many tokens, one at least; return how many tokens it were."""
        self._batch = batch = self._taken(budget)
        try:
            if batch:
                self._encode(batch)
        finally:
            self._batch = []
        return sum(len(text.tokens) for text in batch)

    def _taken(self, budget: int) -> list[_Text]:
        """Take the next texts, one of each request in turn, so that long lists do not stop short ones."""
        taken: list[_Text] = []
        left = budget
        while self._jobs:
            job = self._jobs[0]
            if job.is_over:
                self._jobs.popleft()
                continue
            if taken and len(job.todo[0].tokens) > left:
                break
            job.begin()
            taken.append(job.todo.popleft())
            left -= len(taken[-1].tokens)
            if job.todo:
                self._jobs.rotate(-1)
            else:
                self._jobs.popleft()
        return taken

    def _encode(self, batch: Sequence[_Text]) -> None:
        """Encode texts together; where that fails, those of each request by themselves."""
        try:
            vectors = encoding.encode(self._lm.runtime, [text.tokens for text in batch], show=False)
        except Exception as error:
            if self.is_abandoned:
                return
            jobs = {id(text.job): text.job for text in batch}
            if len(jobs) == 1:
                batch[0].job.fail(error)
                return
            for job in jobs.values():
                self._encode([text for text in batch if text.job is job])
            return
        tokens = sum(len(text.tokens) for text in batch)
        self.progress += tokens
        self._counts["tokens_encoded"] += tokens
        for text, vector in zip(batch, vectors, strict=True):
            self._give(text, vector)

    def _give(self, text: _Text, vector: np.ndarray) -> None:
        job = text.job
        job.found[text.template][text.row] = vector
        job.left -= 1
        if not job.left:
            self._counts["texts_encoded"] += job.texts
            try:
                job.finish()
            except Exception as error:
                job.fail(error)


def text_of(lm: TextEncoder, index: int, ids: Sequence[int]) -> str:
    """Return the text that token ids stand for.

    Ids of another tokenizer are valid numbers too, and would give vectors of no meaning; most of them are found out,
    since this model's tokenizer would not give them for any text.

    Raises:
        TextError: they are not what this model's tokenizer gives for a text.
    """
    if not is_listing(ids) or not all(isinstance(token, Integral) for token in ids):
        raise TextError.about("text", index, f"is neither a text nor a list of token ids but {str(ids)[:40]!r}")
    tokenizer, listed = lm.tokenizer, [int(token) for token in ids]
    size = len(tokenizer)
    if all(0 <= token < size for token in listed):
        text: str = tokenizer.decode(listed, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for with_specials in (False, True):
            if tokenizer(text, add_special_tokens=with_specials, verbose=False)["input_ids"] == listed:
                return text
    raise TextError.about(
        "text",
        index,
        "is a list of token ids that are not this model's; send the text itself (in LangChain: "
        "check_embedding_ctx_length=False)",
    )
