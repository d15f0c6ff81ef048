"""The writing of an engine: prompts that wait, rows in slots, and texts that transformers' own loop writes.

Knows: models, slots, rows. Does not know: admission, time, what else is done between two steps.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gerund.engine.admission import Job
from gerund.engine.stepwise import Stepwise
from gerund.errors import EngineError, ModelError
from gerund.generative_model import GenerativeModel
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.rows import Emit, Piece, Row
from gerund.inference.generate.sampling import request_seeds
from gerund.inference.generate.slot_writers import Writers
from gerund.inference.generate.transformers_loop import Asked
from gerund.inference.tokens import context_length
from gerund.models.encoder_decoder import is_encoder_decoder


class Abandoned(Exception):  # noqa: N818 - nothing went wrong
    """Nobody waits any more for what a pass of the model is for."""


@dataclass(frozen=True)
class Request:
    """A prompt with what is asked for, checked without the model having run.

    Attributes:
        ids: the prompt.
        settings: what is asked for.
        rows: the texts before anything is written.
        room: tokens that each of them may have.
    """

    ids: list[int]
    settings: GenerationConfig
    rows: list[Row]
    room: int

    @classmethod
    def of(cls, lm: GenerativeModel, prompt: Prompt, settings: GenerationConfig, emit: Emit | None) -> "Request":
        """Check a request.

        Raises:
            TextError: the prompt fills the model's context, or is none.
            ConfigError: the settings do not fit the model.
            ModelError: it is a conversation, and the model has no chat template.
        """
        ids = prompt_ids(lm.model, lm.tokenizer, prompt)
        writing = generation.writing_of(lm.model, lm.tokenizer, settings)
        limit = None if is_encoder_decoder(lm.model) else context_length(lm.model.config, lm.tokenizer)
        room = generation.room_after(len(ids), settings.max_new_tokens, limit)
        [seed] = request_seeds(settings.sampling, 1)
        given = None if emit is None else _contained(emit)
        return cls(ids, settings, generation.rows_of(lm.model, writing, ids, room, seed, emit=given), room)

    @property
    def tokens(self) -> int:
        """What it counts: its prompt, and all that it may become."""
        return len(self.ids) + len(self.rows) * self.room


def _contained(emit: Emit) -> Emit:
    """Return the same, with what would end a thread turned into an error of its request."""

    def give(piece: Piece) -> None:
        try:
            emit(piece)
        except Exception:
            raise
        except BaseException as error:
            raise EngineError(f"what takes the text ended with {error!r}") from error

    return give


class WriteJob(Job):
    """A request on its way."""

    def __init__(self, request: Request, deadline: float | None) -> None:
        super().__init__(request.tokens, deadline)
        self.request = request
        self.todo = deque(request.rows)
        self.left = len(request.rows)


@dataclass
class _Read:
    """A prompt in a slot behind the rows."""

    job: WriteJob
    reader: int
    logits_V: Tensor | None = field(default=None, repr=False)


class WritingPart:
    """Everything about writing.

    Args:
        lm: the model.
        writers: rows in slots; None where slots cannot hold what the model keeps.
        at_once: texts that transformers' own loop writes in turn.
        counts: what was done.
    """

    def __init__(self, lm: GenerativeModel, writers: Writers | None, at_once: int, counts: "Counter[str]") -> None:
        self._lm, self._writers, self._at_once, self._counts = lm, writers, at_once, counts
        self._waiting: deque[WriteJob] = deque()
        self._own_waiting: deque[WriteJob] = deque()
        self._own: list[tuple[WriteJob, Stepwise]] = []
        self._job_of: dict[int, WriteJob] = {}  # by the id of a row in a slot
        self._reads: deque[_Read] = deque()
        self.progress = 0  # tokens that were read and written

    def add(self, job: WriteJob) -> None:
        """Let a request wait for its turn."""
        (self._waiting if self._fits(job) else self._own_waiting).append(job)

    def _fits(self, job: WriteJob) -> bool:
        own = self._writers
        return own is not None and len(job.request.ids) + job.request.room <= own.slots.room

    @property
    def live(self) -> int:
        """How many texts are being written."""
        in_slots = 0 if self._writers is None else len(self._writers.rows)
        return in_slots + sum(len(job.request.rows) for job, _ in self._own)

    @property
    def waits(self) -> bool:
        """Whether a prompt could be read now."""
        can_join = self._writers is not None and self._writers.free > 0
        own = bool(self._own_waiting) and len(self._own) < self._at_once
        return own or (can_join and (bool(self._waiting) or bool(self._reads)))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.live or self._waiting or self._own_waiting or self._reads)

    def pending(self) -> Iterator[WriteJob]:
        """Yield the requests that wait."""
        yield from self._waiting
        yield from self._own_waiting

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody waits any more for the prompts that are being read."""
        return bool(self._reads) and all(one.logits_V is None and one.job.is_over for one in self._reads)

    # ------------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        """Write one token into every text."""
        self._sweep()
        if self._writers is not None and self._writers.rows:
            rows = list(self._writers.rows)
            try:
                done = self._writers.step(self._fail)
            except Exception as error:
                for row in rows:
                    self._fail(row, error)
                self._sweep()
                return
            self._count("tokens_written", len(rows))
            for row in done:
                self._finished(row)
            self._forget(rows)
            self._sweep()
        for job, work in list(self._own):
            if work.step():
                self._own.remove((job, work))
                self._settle_own(job, work)

    def _sweep(self) -> None:
        """Let those leave for whom nobody waits any more."""
        if self._writers is not None:
            for row in list(self._writers.rows):
                if self._job_of[id(row)].is_over:
                    self._writers.drop(row)
                    del self._job_of[id(row)]
        for job, work in list(self._own):
            if job.is_over:
                work.end()
                self._own.remove((job, work))

    def _forget(self, rows: Sequence[Row]) -> None:
        """Forget rows that failed, and have left."""
        assert self._writers is not None
        live = {id(row) for row in self._writers.rows}
        for row in rows:
            if id(row) not in live:
                self._job_of.pop(id(row), None)

    def _fail(self, row: Row, error: Exception) -> None:
        self._job_of[id(row)].fail(error)

    def _finished(self, row: Row) -> None:
        job = self._job_of.pop(id(row))
        job.left -= 1
        if not job.left:
            job.settle([own.result() for own in job.request.rows])

    def _count(self, name: str, tokens: int) -> None:
        self._counts[name] += tokens
        self.progress += tokens

    # ----------------------------------------------------------------------------------------------------- reading

    def read(self, budget: int) -> int:
        """Read prompts of about so many tokens, one at least, as long as there are slots; return how many it were."""
        spent = 0
        while self._own_waiting and len(self._own) < self._at_once:
            self._start_own(self._own_waiting.popleft())
        while self._writers is not None and self._writers.free and (self._reads or self._waiting):
            if not self._reads:
                if spent and spent + len(self._waiting[0].request.ids) > budget:
                    break
                spent += self._read_prompts(self._writers, budget - spent)
            self._begin_rows(self._writers)
        return spent

    def _read_prompts(self, writers: Writers, budget: int) -> int:
        """Read the prompt that waits next, and others with it; return how many tokens it were."""
        self._waiting = deque(job for job in self._waiting if not job.is_over)
        count = writers.together((len(job.request.ids) for job in self._waiting), budget)
        jobs = [self._waiting.popleft() for _ in range(count)]
        if not jobs:
            return 0
        for job in jobs:
            job.begin()
        self._reads.extend(_Read(job, reader) for reader, job in enumerate(jobs))
        spent = 0
        try:
            for read, (logits_V, known) in zip(
                self._reads, writers.read([job.request.ids for job in jobs]), strict=True
            ):
                read.logits_V = logits_V
                tokens = len(read.job.request.ids) - known
                self._count("tokens_read", tokens)
                self._counts["tokens_reused"] += known
                spent += tokens
        except Abandoned:
            self._reads.clear()
        except Exception as error:
            self._reads.clear()
            for job in jobs:
                job.fail(error)
        return spent

    def _begin_rows(self, writers: Writers) -> None:
        """Let the rows of the prompts that were read join, as long as there is room."""
        while self._reads:
            read = self._reads[0]
            job = read.job
            assert read.logits_V is not None
            while job.todo and writers.free and not job.is_over:
                row = job.todo.popleft()
                self._job_of[id(row)] = job
                try:
                    writers.begin(row, len(job.request.ids), read.logits_V, self._fail, reader=read.reader)
                except Exception as error:
                    job.fail(error)
                self._count("tokens_written", 1)
                if row.is_done:
                    self._finished(row)
                self._forget([row])
            if job.todo and not job.is_over:
                return
            self._reads.popleft()

    # ------------------------------------------------------------------------------------- transformers' own loop

    def _start_own(self, job: WriteJob) -> None:
        if job.is_over:
            return
        job.begin()
        request, lm = job.request, self._lm

        def work(asked: Asked) -> None:
            read = [(request.ids, request.room)] * len(request.rows)
            generation.write_rows(lm.model, lm.tokenizer, read, request.rows, cancelled=asked)

        self._own.append((job, Stepwise(work)))

    def _settle_own(self, job: WriteJob, work: Stepwise) -> None:
        work.end()
        if isinstance(work.error, Exception):
            job.fail(work.error)
        elif work.error is not None:
            job.fail(ModelError(f"writing ended: {work.error!r}"))
        else:
            found = [row.result() for row in job.request.rows]
            self._count("tokens_read", len(job.request.ids))
            self._count("tokens_written", sum(one.usage.completion_tokens for one in found))
            job.settle(found)

    def close(self) -> None:
        """End everything; those who wait are told by others."""
        for _, work in self._own:
            work.end()
        self._own.clear()
        self._waiting.clear()
        self._own_waiting.clear()
        self._reads.clear()
        if self._writers is not None:
            for row in list(self._writers.rows):
                self._writers.drop(row)
        self._job_of.clear()
