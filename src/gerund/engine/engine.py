"""``Engine``: one thread that runs a model for many callers."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Self, TypeVar

import torch

from gerund.attention.preemption import pausing
from gerund.attention.ragged_batch import whole_blocks
from gerund.checks import check_dimensions, flag_or_none, is_listing, whole_number
from gerund.engine.batching import Abandoned, EncodeJob, EncodingPart, Request, WriteJob, WritingPart, text_of
from gerund.engine.config import EngineConfig, EngineState, Ticket
from gerund.engine.scheduling import Admission, Job, WritingRatio
from gerund.errors import ClosedError, ConfigError, EngineError, TextError
from gerund.inference.encode.texts import template_tokens
from gerund.inference.generate.batch_decoder import BatchDecoder, PrefixCache
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import Prompt, check_prompts
from gerund.inference.generate.reproducibility import (
    LEAST_READ,
    Reproducibility,
    check_batching,
    check_compiled_batching,
)
from gerund.inference.generate.sequence import Emit
from gerund.inference.generate.slots import unsupported_reason
from gerund.inference.tokens import Empty, Overflow, context_length, rotary_limit
from gerund.language_model import LanguageModel
from gerund.seq2seq_model import Seq2SeqEncoder
from gerund.types import EncodeResult, Generation, Promise

_CONTEXT = 2048
_PREFIX_TOKENS = 4096


@dataclass(frozen=True)
class Prepared:
    """The parts of an engine that is ready.

    Attributes:
        writing: writes.
        encoding: encodes.
        promise: what holds for texts.
        why: how that was found out.
        context: room of a slot in tokens; None without slots.
    """

    writing: WritingPart
    encoding: EncodingPart
    promise: Promise
    why: str
    context: int | None


def prepare(lm: LanguageModel, config: EngineConfig, counts: "Counter[str]", *, verify: bool) -> Prepared:
    """Make a model ready.

    Args:
        lm: the model.
        config: the engine's settings.
        counts: where its parts count what they do.
        verify: prove what can be promised.
    """
    encoding = EncodingPart(lm, counts)
    if isinstance(lm, Seq2SeqEncoder):
        writing = WritingPart(lm, None, config.slots, counts)
        return Prepared(writing, encoding, "none", "this model does not write", None)
    room = _room(lm, config)
    found = _reproducibility(lm, config, room, verify=verify)
    if found.fits and not config.reproducible:
        why = "each step has as many rows as there are texts (reproducible is off)"
        found = Reproducibility(True, "none", why, recalls=found.recalls)
    if not found.fits:
        return Prepared(WritingPart(lm, None, config.slots, counts), encoding, found.promise, found.why, None)
    # Reading by blocks would take the bits of generate, which a compiled step has not got.
    costs_nothing = found.recalls and (found.promise != "bits of generate" or config.compile)
    tokens = config.prefix_tokens
    if tokens is None:
        tokens = _PREFIX_TOKENS if costs_nothing else 0
    by_blocks = costs_nothing or tokens > 0
    if by_blocks and not found.recalls:
        found = replace(
            found, promise="none", why="parts of prompts are kept, and on this machine that changes last bits"
        )
    elif by_blocks and found.promise == "bits of generate":
        why = f"{found.why}; parts of prompts are kept, for which prompts are read otherwise than generate reads them"
        found = replace(found, promise="same text under any load", why=why)
    if config.compile:
        slots, found = check_compiled_batching(found, lm.model, config.slots, room, by_blocks=by_blocks)
    else:
        slots = found.slots(lm.model, config.slots, room, by_blocks=by_blocks)
    # A pause between two layers lets others write on, and a layer takes the shorter the fewer tokens it gets.
    portion = whole_blocks(config.read_tokens) if by_blocks else None
    writers = BatchDecoder(slots, PrefixCache(tokens, LEAST_READ) if tokens else None, portion)
    return Prepared(WritingPart(lm, writers, config.slots, counts), encoding, found.promise, found.why, room)


def _room(lm: LanguageModel, config: EngineConfig) -> int:
    # What needs more room than the second one is written one at a time, and changes none of the others.
    limits = (context_length(lm.model.config, lm.tokenizer), rotary_limit(lm.model.config))
    return min([config.context or _CONTEXT, *(limit for limit in limits if limit is not None)])


def _reproducibility(lm: LanguageModel, config: EngineConfig, room: int, *, verify: bool) -> Reproducibility:
    if config.exact:
        return Reproducibility(False, "bits of generate", "each text is written alone, through transformers' own loop")
    if verify:
        return check_batching(lm.model, lm.tokenizer, config.slots, room)
    reason = unsupported_reason(lm.model)
    if reason is None:
        return Reproducibility(True, "none", "nothing was verified at the start")
    return Reproducibility(
        False, "bits of generate", f"{reason}; each text is written alone, through transformers' own loop"
    )


T = TypeVar("T")

# Seconds between two looks for requests that wait and whose time has passed.
_LOOKS = 0.05
# Steps of writing in a row while others wait.
_MOST_STEPS = 16


class _CallJob(Job):
    def __init__(self, function: Callable[[], Any], tokens: int, deadline: float | None) -> None:
        super().__init__(tokens, deadline)
        self.function = function


class Engine:
    """One model for many callers at once: texts are written side by side, texts are encoded between two steps.

    Every method may be called from any thread, and none of them waits for the model but ``start``, ``drain`` and
    ``close``. While an engine runs, its thread should be the only one that computes with the model: others would
    take the processor from it, though nothing would come out wrong.

    Args:
        lm: the model.
        config: how its time is divided, and how much may wait.
        verify: find out at the start what can be promised (a second or so for a small model); without, nothing is.
        on_turn: takes the seconds that each request waited for its turn, in the engine's thread; it must be quick, and
            raise nothing.

    >>> import gerund
    >>> with gerund.Engine(gerund.load()) as engine:
    ...     story = engine.write("The old man", gerund.GenerationConfig(max_new_tokens=4))
    ...     vectors = engine.encode(["a cat", "a dog"])
    ...     len(story.result()), len(vectors.result().vectors)
    (1, 2)
    """

    def __init__(
        self,
        lm: LanguageModel,
        config: EngineConfig | None = None,
        *,
        verify: bool = True,
        on_turn: Callable[[float], None] | None = None,
    ) -> None:
        if not isinstance(lm, LanguageModel):
            raise ConfigError(f"an engine takes a model, as gerund.load returns it, not {type(lm).__name__}")
        self.lm, self.config = lm, config or EngineConfig()
        self._verify, self._on_turn = verify, on_turn
        limit = context_length(lm.model.config, lm.tokenizer)
        self._desk = Admission(self.config.queue_tokens, limit or self.config.queue_tokens)
        self._ratio = WritingRatio(self.config.writing_ratio)
        self._prepared: Prepared | None = None
        self._inbox: list[Job] = []
        self._calls: list[_CallJob] = []
        self._call: _CallJob | None = None
        self._called = 0  # tokens of functions that were run
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._trouble: BaseException | None = None
        self._closes = False
        self._since = 0.0  # when the reading that goes on began, or went on after a step
        self._looked = 0.0

    # -------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Find out what can be promised, warm the model, and take work from then on.

        Raises:
            EngineError: it was started before.
            ResourceError: the slots do not fit the memory.
        """
        if self._thread is not None:
            raise EngineError("an engine is started once; make another one")
        self._thread = threading.Thread(target=self._run, name="gerund-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._trouble is not None:
            self._thread.join()
            raise self._trouble

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.drain(float("inf"))
        self.close()

    def drain(self, timeout: float) -> bool:
        """Take nothing new, and finish what is there.

        Args:
            timeout: seconds to wait; what is left then goes on.

        Returns:
            Whether everything was finished in time.
        """
        with self._desk.changed:
            self._desk.is_open = False
        return self._desk.wait_until_empty(min(timeout, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Stop within a token. What is not done ends with ``ClosedError``."""
        with self._desk.changed:
            self._desk.is_open = False
            self._closes = True
            self._desk.changed.notify_all()
        self._desk.end_all(lambda: ClosedError("the engine was closed before this was done"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -------------------------------------------------------------------------------------------------- requests

    def write(
        self, prompt: Prompt, settings: GenerationConfig, *, emit: Emit | None = None, deadline: float | None = None
    ) -> Ticket[list[Generation]]:
        """Continue a prompt; see ``LanguageModel.generate``.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            settings: what is asked for; ``settings.n`` texts are written, and the prompt is read once for all.
            emit: takes the texts as they come. The engine waits for it, so it must be quick. An exception that it
                raises ends this request and no other.
            deadline: seconds from now after which nobody waits any more, in the queue or at work.

        Raises:
            TextError: the prompt is none, or fills the model's context.
            ConfigError: the settings do not fit the model.
            ModelError: it is a conversation, and the model has no chat template.
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing.
        """
        if isinstance(self.lm, Seq2SeqEncoder):
            raise ConfigError(f"{self.lm.name} does not write")
        if not isinstance(settings, GenerationConfig):
            raise ConfigError(
                f"settings is a GenerationConfig, such as gerund.GenerationConfig(max_new_tokens=64), not {settings!r}"
            )
        if isinstance(prompt, Integral | Mapping):
            raise TextError(f"a prompt is a text, token ids or the messages of a conversation, not {prompt!r}")
        [checked] = check_prompts([prompt])
        return self._submit(WriteJob(Request.of(self.lm, checked, settings, emit), deadline))

    def encode(
        self,
        texts: Sequence[str | list[int]],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        deadline: float | None = None,
    ) -> Ticket[EncodeResult]:
        """Turn texts into vectors; see ``LanguageModel.encode_with_usage``.

        Args:
            texts: texts, or token ids that this model's own tokenizer gives for a text.
            prompt: as in ``encode``.
            prompt_name: as in ``encode``.
            dimensions: as in ``encode``.
            normalize: as in ``encode``.
            empty: as in ``encode``.
            overflow: as in ``encode``.
            deadline: seconds from now after which nobody waits any more.

        Raises:
            TextError: a text is empty or too long, or token ids are not this tokenizer's.
            ConfigError: an unknown prompt or impossible number.
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing.
        """
        check_dimensions(dimensions, self.lm.dimensions)
        flag_or_none("normalize", normalize)
        if isinstance(texts, str) or not is_listing(texts) or not len(texts):
            raise TextError("give a list of texts, such as ['a cat', 'a dog']")
        plain = [one if isinstance(one, str) else text_of(self.lm, index, one) for index, one in enumerate(texts)]
        tokens = template_tokens(self.lm.runtime, plain, prompt, empty, overflow, prompt_name=prompt_name)
        return self._submit(EncodeJob(self.lm, tokens, normalize, dimensions, deadline))

    def call(self, function: Callable[[], T], *, tokens: int, deadline: float | None = None) -> Ticket[T]:
        """Run a function in the engine's thread: for work that uses the model otherwise, such as filling gaps.

        It runs whole, one function at a time; texts are written on between the layers of the passes that it makes.

        Args:
            function: what to run.
            tokens: how much work it is about, in tokens.
            deadline: seconds from now after which nobody waits any more.

        Raises:
            ConfigError: ``tokens`` is no whole number, or negative.
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing.
        """
        if whole_number("tokens", tokens) < 0:
            raise ConfigError(f"tokens={tokens} is negative")
        return self._submit(_CallJob(function, int(tokens), deadline))

    def state(self) -> EngineState:
        """Return what the engine does and has done."""
        prepared = self._prepared
        with self._desk.changed:
            counts = dict(self._desk.counts)
            counts.pop("done", None)
            return EngineState(
                running=self._desk.is_open,
                promise="none" if prepared is None else prepared.promise,
                why="it was not started yet" if prepared is None else prepared.why,
                slots=self.config.slots,
                context=None if prepared is None else prepared.context,
                live_rows=0 if prepared is None else prepared.writing.live,
                queued=len(self._desk.jobs),
                queued_tokens=self._desk.tokens,
                tokens_per_second=self._desk.rate,
                **counts,
            )

    def _submit(self, job: Job) -> Ticket[Any]:
        job.on_turn = self._on_turn
        self._desk.admit(job, lambda: self._inbox.append(job))
        return Ticket(job.future, job.tokens)

    # -------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._prepared = prepare(self.lm, self.config, self._desk.counts, verify=self._verify)
        except BaseException as error:
            self._trouble = error
            self._ready.set()
            return
        with self._desk.changed:
            self._desk.is_open = not self._closes
        self._ready.set()
        end: EngineError = ClosedError("the engine was closed before this was done")
        try:
            self._work(self._prepared)
        except BaseException as trouble:
            end = EngineError(f"the engine stopped at an error: {trouble!r}")
            raise
        finally:
            with self._desk.changed:
                self._desk.is_open = False
            self._prepared.writing.close()
            self._desk.end_all(lambda: end)

    def _work(self, own: Prepared) -> None:
        while True:
            with self._desk.changed:
                self._desk.changed.wait_for(lambda: self._closes or self._inbox or not self._is_idle(own))
                if self._closes:
                    return
            self._take_new(own)
            before, began = self._progress(own), time.perf_counter()
            self._turn(own)
            self._desk.worked(self._progress(own) - before, time.perf_counter() - began)

    def _is_idle(self, own: Prepared) -> bool:
        return own.writing.is_idle and not own.encoding.waits and not self._calls

    def _progress(self, own: Prepared) -> int:
        return own.writing.progress + own.encoding.progress + self._called

    def _take_new(self, own: Prepared) -> None:
        with self._desk.changed:
            new, self._inbox = self._inbox, []
        for job in new:
            if isinstance(job, WriteJob):
                own.writing.add(job)
            elif isinstance(job, EncodeJob):
                own.encoding.add(job)
            elif isinstance(job, _CallJob):
                self._calls.append(job)

    def _turn(self, own: Prepared) -> None:
        """Write until writing has had its share, then read a little."""
        self._look(own)
        others = own.writing.waits or own.encoding.waits or bool(self._calls)
        for _ in range(_MOST_STEPS):
            if not own.writing.live:
                self._ratio.forget()
                break
            self._step(own)
            if not others or not self._ratio.is_due:
                break
        if not others:
            return
        budget = self.config.read_tokens if own.writing.live else self.config.idle_read_tokens
        self._since = time.perf_counter()
        with pausing(lambda: self._between(own)):
            spent = own.writing.read(budget // 2 if own.encoding.waits else budget)
            if own.encoding.waits:
                own.encoding.read(max(1, budget - spent))
            if self._calls:
                self._call_next()
        self._note_reading()

    def _look(self, own: Prepared) -> None:
        """End what waits and whose time has passed: it frees its room in the queue."""
        now = time.perf_counter()
        if now - self._looked > _LOOKS:
            self._looked = now
            for job in (*own.writing.pending(), *own.encoding.pending(), *self._calls):
                _ = job.is_over

    def _step(self, own: Prepared) -> None:
        began = time.perf_counter()
        own.writing.step()
        self._ratio.wrote(time.perf_counter() - began)

    def _note_reading(self) -> None:
        now = time.perf_counter()
        self._ratio.read(now - self._since)
        self._since = now

    def _between(self, own: Prepared) -> None:
        """Let texts be written on between two layers of a pass, and end a pass for which nobody waits any more.

        Raises:
            Abandoned: nobody does.
        """
        called = self._call is not None and self._call.is_over
        if self._closes or called or own.writing.is_abandoned or own.encoding.is_abandoned:
            raise Abandoned
        self._note_reading()
        # What a pass computes in is its own matter.
        with torch.autocast(self.lm.device.type, enabled=False):
            if own.writing.live and self._ratio.is_due:
                self._step(own)
            if self._call is not None and self._ratio.is_due:
                self._let_in(own)
        self._since = time.perf_counter()

    def _let_in(self, own: Prepared) -> None:
        """Read a little while a function runs, which may take long."""
        self._take_new(own)
        began = time.perf_counter()
        spent = own.writing.read(1) if own.writing.waits else 0
        if own.encoding.waits:
            own.encoding.read(max(1, self.config.read_tokens - spent))
        self._ratio.let_in(time.perf_counter() - began)

    def _call_next(self) -> None:
        self._call = job = self._calls.pop(0)
        try:
            if not job.is_over:
                job.begin()
                job.settle(job.function())
                self._called += job.tokens
                self._desk.counts["calls"] += 1
        except BaseException as error:  # whatever it is, it is the caller's
            job.fail(error)
        finally:
            self._call = None
