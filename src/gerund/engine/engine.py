"""``Engine``: one thread that runs a model for many callers."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gerund.attention import whole_blocks
from gerund.attention.preemption import pausing
from gerund.checks import check_dimensions, check_unicode, flag_or_none, is_listing, whole_number
from gerund.engine.batching import (
    Abandoned,
    EncodeJob,
    EncodingQueue,
    GenerateJob,
    GenerationQueue,
    Request,
    writing_of,
)
from gerund.engine.config import EngineConfig, EngineFuture, EngineState
from gerund.engine.scheduling import Admission, DecodeRatio, Job
from gerund.errors import ClosedError, ConfigError, EngineError, TextError
from gerund.inference.encode.embeds import Embeds
from gerund.inference.encode.texts import template_tokens
from gerund.inference.generate.batch_decoder import BatchDecoder, PrefixCache
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.decoding import Decoding, Reproducibility
from gerund.inference.generate.prompts import Prompt, check_prompts
from gerund.inference.generate.sequence import Emit
from gerund.inference.generate.writing import Writes
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import Empty, Overflow, context_length, rotary_limit
from gerund.packed import LEAST_READ
from gerund.types import EncodeResult, Generation, Guarantee

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gerund.engine.batching import ServedModel

T = TypeVar("T")

_CONTEXT = 2048
_PREFIX_TOKENS = 4096
# Seconds between two checks for queued requests that have missed their deadline.
_DEADLINE_CHECKS = 0.05
# Decode steps in a row while other requests wait.
_MOST_STEPS = 16


@dataclass(frozen=True)
class _Prepared:
    """The parts of an engine that is ready; ``context`` is the capacity of a slot in tokens, None without slots."""

    generation: GenerationQueue
    encoding: EncodingQueue
    guarantee: Guarantee
    why: str
    context: int | None


def _prepare(lm: "ServedModel", config: EngineConfig, counts: "Counter[str]", *, verify: bool) -> _Prepared:
    """Establish what the engine can guarantee, and allocate its slots."""
    encoding, decoding = EncodingQueue(lm, counts), lm.decoding
    if decoding is None:
        queue = GenerationQueue(lm, None, config.slots, counts)
        return _Prepared(queue, encoding, "none", "this model does not generate", None)
    # A request that needs more than the rotary limit is decoded on its own, so that it changes none of the others.
    limits = (context_length(lm.model.config, lm.tokenizer), rotary_limit(lm.model.config))
    room = min([config.context or _CONTEXT, *(limit for limit in limits if limit is not None)])
    batching = _reproducibility(decoding, config, room, verify=verify)
    if not batching.fits:
        return _Prepared(
            GenerationQueue(lm, None, config.slots, counts), encoding, batching.guarantee, batching.why, None
        )
    if not config.reproducible:
        why = "each step has as many rows as there are texts (reproducible is off)"
        batching = Reproducibility(True, "none", why, recalls=batching.recalls)
    # Reading in blocks may lose the bits of generate.
    alike = decoding.reads_alike
    costs_nothing = batching.recalls and (batching.guarantee != "bits of generate" or alike)
    tokens = config.prefix_tokens
    if tokens is None:
        tokens = max(_PREFIX_TOKENS, room) if costs_nothing else 0
    by_blocks = costs_nothing or tokens > 0
    if by_blocks and not batching.recalls:
        why = "parts of prompts are kept, and on this machine that changes last bits"
        batching = replace(batching, guarantee="none", why=why)
    elif by_blocks and batching.guarantee == "bits of generate" and not alike:
        why = (
            f"{batching.why}; parts of prompts are kept, for which prompts are read otherwise than generate reads them"
        )
        batching = replace(batching, guarantee="same text under any load", why=why)
    slots = decoding.slots(batching, config.slots, room, by_blocks=by_blocks)
    # Decode steps run between two layers of a prefill, and a layer takes less time for fewer tokens.
    portion = whole_blocks(config.prefill_tokens) if by_blocks else None
    writers = BatchDecoder(slots, PrefixCache(tokens, LEAST_READ, slots.block) if tokens else None, portion)
    queue = GenerationQueue(lm, writers, config.slots, counts)
    return _Prepared(queue, encoding, batching.guarantee, batching.why, room)


def _reproducibility(decoding: Decoding, config: EngineConfig, room: int, *, verify: bool) -> Reproducibility:
    alone = "each text is written alone, as generate writes it"
    if config.exact:
        return Reproducibility(False, "bits of generate", alone)
    if verify:
        return decoding.check(config.slots, room)
    reason = decoding.why_no_slots
    if reason is None:
        return Reproducibility(True, "none", "nothing was verified at the start")
    return Reproducibility(False, "bits of generate", f"{reason}; {alone}")


def text_of_ids(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str | None:
    """Return the text that token ids stand for; None if this tokenizer gives them for no text.

    Ids of another tokenizer are valid numbers as well, and would give meaningless vectors; this detects most of them.
    """
    listed = [int(token) for token in ids]
    if not all(0 <= token < len(tokenizer) for token in listed):
        return None
    [letter] = encode_texts(tokenizer, ["a"])
    before, after = letter.ids[: letter.before], letter.ids[len(letter.ids) - letter.after :]
    if before and listed[: len(before)] == before:
        listed = listed[len(before) :]
    if after and listed[len(listed) - len(after) :] == after:
        listed = listed[: len(listed) - len(after)]
    text: str = tokenizer.decode(listed, clean_up_tokenization_spaces=False)
    check_unicode("text", text)
    [again] = encode_texts(tokenizer, [text], specials=False)
    return text if again.ids == listed else None


class _CallJob(Job):
    def __init__(self, function: Callable[[], Any], tokens: int, deadline: float | None) -> None:
        super().__init__(tokens, deadline)
        self.function = function


class Engine:
    """One model for many callers: continuous batching of generation, with encoding between two decode steps.

    Every method may be called from any thread, and only ``start``, ``drain`` and ``close`` wait for the model. While an
    engine runs, its thread should be the only one that computes with the model: others would slow it down, though every
    result would be right.

    Args:
        lm: the model.
        config: how its time is divided, and how much may wait.
        verify: check at the start what can be guaranteed (a second or so for a small model); without, nothing is.
        on_turn: takes the queue time of each request in seconds, in the engine's thread; it must be quick, and raise
            nothing.

    >>> import gerund
    >>> with gerund.Engine(gerund.load()) as engine:
    ...     story = engine.submit_generate("The old man", gerund.GenerationConfig(max_new_tokens=4))
    ...     vectors = engine.submit_encode(["a cat", "a dog"])
    ...     len(story.result()), len(vectors.result().vectors)
    (1, 2)
    """

    def __init__(
        self,
        lm: "ServedModel",
        config: EngineConfig | None = None,
        *,
        verify: bool = True,
        on_turn: Callable[[float], None] | None = None,
    ) -> None:
        if not isinstance(lm, Writes) or not isinstance(lm, Embeds):
            raise ConfigError(f"an engine takes a model, as gerund.load returns it, not {type(lm).__name__}")
        if config is not None and not isinstance(config, EngineConfig):
            raise ConfigError(f"an engine's settings are an EngineConfig, not {type(config).__name__}")
        self.lm, self.config = lm, config or EngineConfig()
        self._verify, self._on_turn = verify, on_turn
        limit = context_length(lm.model.config, lm.tokenizer)
        self._admission = Admission(self.config.queue_tokens, limit or self.config.queue_tokens)
        self._ratio = DecodeRatio(self.config.decode_ratio)
        self._prepared: _Prepared | None = None
        self._inbox: list[Job] = []
        self._calls: list[_CallJob] = []
        self._call: _CallJob | None = None
        self._called = 0  # tokens of functions that were run
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._start_error: BaseException | None = None
        self._closes = False
        self._since = 0.0  # when the running prefill or encoding began, or resumed after a step
        self._checked = 0.0

    def start(self) -> None:
        """Establish what can be guaranteed, warm the model up, and take requests from then on.

        Raises:
            EngineError: it was started before.
            ResourceError: the slots do not fit the memory.
        """
        if self._thread is not None:
            raise EngineError("an engine is started once; make another one")
        self._thread = threading.Thread(target=self._run, name="gerund-engine", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.drain(float("inf"))
        self.close()

    def drain(self, timeout: float) -> bool:
        """Take nothing new, finish what is there, and return whether that was done within ``timeout`` seconds.

        What is left after that time continues.
        """
        with self._admission.changed:
            self._admission.is_open = False
        return self._admission.wait_until_empty(min(timeout, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Stop within a token. What is not done ends with ``ClosedError``."""
        with self._admission.changed:
            self._admission.is_open = False
            self._closes = True
            self._admission.changed.notify_all()
        self._admission.end_all(lambda: ClosedError("the engine was closed before this was done"))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def submit_generate(
        self, prompt: Prompt, settings: GenerationConfig, *, on_text: Emit | None = None, deadline: float | None = None
    ) -> EngineFuture[list[Generation]]:
        """Continue a prompt; see ``LanguageModel.generate``.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            settings: as in ``generate``; for ``settings.n`` completions the prompt is read once.
            on_text: takes the text as it comes. The engine waits for it, so it must be quick. An exception that it
                raises ends only this request.
            deadline: seconds from now after which the request ends with ``DeadlineError``, queued or running.

        Raises:
            TextError: the prompt is not a valid prompt, or fills the model's context.
            ConfigError: the settings do not fit the model.
            ModelError: the prompt is a conversation, and the model has no chat template.
            QueueFullError: too many tokens wait already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes no requests.
        """
        writing_of(self.lm)
        if not isinstance(settings, GenerationConfig):
            raise ConfigError(
                f"settings is a GenerationConfig, such as gerund.GenerationConfig(max_new_tokens=64), not {settings!r}"
            )
        if isinstance(prompt, Integral | Mapping):
            raise TextError(f"a prompt is a text, token ids or the messages of a conversation, not {prompt!r}")
        [checked] = check_prompts([prompt])
        return self._submit(GenerateJob(Request.of(self.lm, checked, settings, on_text), deadline))

    def submit_encode(
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
    ) -> EngineFuture[EncodeResult]:
        """Encode texts, or lists of token ids that this model's tokenizer gives for a text.

        The other arguments are those of ``LanguageModel.encode``; ``deadline`` is as in ``submit_generate``.

        Raises:
            TextError: a text is empty or too long, or token ids are not this tokenizer's.
            ConfigError: an unknown prompt or impossible number.
            QueueFullError: too many tokens wait already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes no requests.
        """
        check_dimensions(dimensions, self.lm.dimensions)
        flag_or_none("normalize", normalize)
        if isinstance(texts, str) or not is_listing(texts) or not len(texts):
            raise TextError("give a list of texts, such as ['a cat', 'a dog']")
        plain = [text if isinstance(text, str) else self._text_of(index, text) for index, text in enumerate(texts)]
        tokens = template_tokens(self.lm.runtime, plain, prompt, empty, overflow, prompt_name=prompt_name)
        return self._submit(EncodeJob(self.lm, tokens, normalize, dimensions, deadline))

    def _text_of(self, index: int, ids: Sequence[int]) -> str:
        if not is_listing(ids) or not all(isinstance(token, Integral) for token in ids):
            raise TextError.about("text", index, f"is neither a text nor a list of token ids but {str(ids)[:40]!r}")
        text = text_of_ids(self.lm.tokenizer, ids)
        if text is None:
            raise TextError.about(
                "text",
                index,
                "is a list of token ids that are not this model's; send the text itself (in LangChain: "
                "check_embedding_ctx_length=False)",
            )
        return text

    def submit_call(self, function: Callable[[], T], *, tokens: int, deadline: float | None = None) -> EngineFuture[T]:
        """Run a function in the engine's thread: for other work that uses the model, such as infilling.

        One function runs at a time. Between the layers of its passes, sequences are decoded.

        Args:
            function: what to run.
            tokens: its approximate work, in tokens.
            deadline: as in ``submit_generate``.

        Raises:
            ConfigError: ``tokens`` is not a whole number, or negative.
            QueueFullError: too many tokens wait already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes no requests.
        """
        if whole_number("tokens", tokens) < 0:
            raise ConfigError(f"tokens={tokens} is negative")
        return self._submit(_CallJob(function, int(tokens), deadline))

    def write(
        self, prompt: Prompt, settings: GenerationConfig, *, emit: Emit | None = None, deadline: float | None = None
    ) -> EngineFuture[list[Generation]]:
        """Call ``submit_generate`` by its earlier name."""
        return self.submit_generate(prompt, settings, on_text=emit, deadline=deadline)

    encode, call = submit_encode, submit_call  # earlier names

    def state(self) -> EngineState:
        """Return the engine's load and counts."""
        prepared = self._prepared
        with self._admission.changed:
            counts = {name: count for name, count in self._admission.counts.items() if name != "done"}
            return EngineState(
                running=self._admission.is_open,
                guarantee="none" if prepared is None else prepared.guarantee,
                why="it was not started yet" if prepared is None else prepared.why,
                slots=self.config.slots,
                context=None if prepared is None else prepared.context,
                live_rows=0 if prepared is None else prepared.generation.live,
                queued=len(self._admission.jobs),
                queued_tokens=self._admission.tokens,
                tokens_per_second=self._admission.rate,
                **counts,
            )

    def _submit(self, job: Job) -> EngineFuture[Any]:
        job.on_turn = self._on_turn
        self._admission.admit(job, lambda: self._inbox.append(job))
        return EngineFuture(job.future, job.tokens, job.times)

    # ------------------------------------------------------------------------------------------ the engine's thread

    def _run(self) -> None:
        try:
            parts = self._prepared = _prepare(self.lm, self.config, self._admission.counts, verify=self._verify)
        except BaseException as error:
            self._start_error = error
            self._ready.set()
            return
        with self._admission.changed:
            self._admission.is_open = not self._closes
        self._ready.set()
        end: EngineError = ClosedError("the engine was closed before this was done")
        try:
            while self._wait_for_work(parts):
                self._take_new(parts)
                before, began = self._progress(parts), time.perf_counter()
                self._turn(parts)
                self._admission.worked(self._progress(parts) - before, time.perf_counter() - began)
        except BaseException as error:
            end = EngineError(f"the engine stopped at an error: {error!r}")
            raise
        finally:
            with self._admission.changed:
                self._admission.is_open = False
            parts.generation.close()
            self._admission.end_all(lambda: end)

    def _wait_for_work(self, parts: _Prepared) -> bool:
        """Wait until there is work, and return whether the engine continues."""
        with self._admission.changed:
            self._admission.changed.wait_for(
                lambda: (
                    self._closes or self._inbox or self._calls or parts.encoding.jobs or not parts.generation.is_idle
                )
            )
            return not self._closes

    def _progress(self, parts: _Prepared) -> int:
        return parts.generation.progress + parts.encoding.progress + self._called

    def _take_new(self, parts: _Prepared) -> None:
        with self._admission.changed:
            new, self._inbox = self._inbox, []
        for job in new:
            if isinstance(job, GenerateJob):
                parts.generation.add(job)
            elif isinstance(job, EncodeJob):
                parts.encoding.add(job)
            elif isinstance(job, _CallJob):
                self._calls.append(job)

    def _turn(self, parts: _Prepared) -> None:
        """Decode until decoding has had its share, then read a little."""
        self._check_deadlines(parts)
        generation, encoding = parts.generation, parts.encoding
        others_wait = generation.can_read or bool(encoding.jobs) or bool(self._calls)
        for _ in range(_MOST_STEPS):
            if not generation.live:
                self._ratio.forget()
                break
            self._step(parts)
            if not others_wait or not self._ratio.is_due:
                break
        if not others_wait:
            return
        budget = self.config.prefill_tokens if generation.live else self.config.idle_prefill_tokens
        self._since = time.perf_counter()
        with pausing(lambda: self._between_layers(parts)):
            spent = generation.read(budget // 2 if encoding.jobs else budget)
            if encoding.jobs:
                encoding.read(max(1, budget - spent))
            if self._calls:
                self._run_call(self._calls.pop(0))
        self._count_reading()

    def _check_deadlines(self, parts: _Prepared) -> None:
        """End queued requests that missed their deadline, which frees their tokens in the queue."""
        now = time.perf_counter()
        if now - self._checked > _DEADLINE_CHECKS:
            self._checked = now
            for job in (*parts.generation.pending(), *parts.encoding.jobs, *self._calls):
                _ = job.is_over

    def _step(self, parts: _Prepared) -> None:
        began = time.perf_counter()
        parts.generation.step()
        self._ratio.decoded(time.perf_counter() - began)

    def _count_reading(self) -> None:
        now = time.perf_counter()
        self._ratio.read(now - self._since)
        self._since = now

    def _between_layers(self, parts: _Prepared) -> None:
        """Decode between two layers of another pass, and end a pass (``Abandoned``) whose requests are all over."""
        is_call_over = self._call is not None and self._call.is_over
        if self._closes or is_call_over or parts.generation.is_abandoned or parts.encoding.is_abandoned:
            raise Abandoned
        self._count_reading()
        if parts.generation.live and self._ratio.is_due:
            self._step(parts)
        if self._call is not None and self._ratio.is_due:
            # Read a little while a function runs, which may take long.
            self._take_new(parts)
            began = time.perf_counter()
            spent = parts.generation.read(1) if parts.generation.can_read else 0
            if parts.encoding.jobs:
                parts.encoding.read(max(1, self.config.prefill_tokens - spent))
            self._ratio.let_in(time.perf_counter() - began)
        self._since = time.perf_counter()

    def _run_call(self, job: _CallJob) -> None:
        self._call = job
        try:
            if not job.is_over:
                job.begin()
                job.settle(job.function())
                self._called += job.tokens
                self._admission.counts["calls"] += 1
        except BaseException as error:  # any error is the caller's
            job.fail(error)
        finally:
            self._call = None
