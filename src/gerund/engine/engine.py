"""``Engine``: one thread that owns a model, and does what many others ask of it.

Knows: requests, the model's verbs. Does not know: the network.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from gerund.engine.work import EngineConfig, EngineState, Ticket
from gerund.errors import ClosedError, DeadlineError, QueueFullError, TextError, TooLargeError
from gerund.generative_model import GenerativeModel
from gerund.inference.generate import generation
from gerund.inference.generate.prompts import Prompt, check_prompts, prompt_ids
from gerund.inference.generate.rows import Emit
from gerund.inference.generate.settings import Settings
from gerund.inference.tokens import context_length
from gerund.types import EncodeResult, Generation

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    run: Callable[["_Job"], Any]
    future: "Future[Any]"
    tokens: int
    ends: float | None

    @property
    def is_late(self) -> bool:
        return self.ends is not None and time.monotonic() > self.ends

    def is_set(self) -> bool:
        """Whether nobody waits any more, in the words of ``threading.Event``."""
        return self.future.done() or self.is_late


class Engine:
    """One model for many callers at once.

    Args:
        lm: the model. While the engine runs, nobody else should compute with it.
        config: how the model is divided.
        verify: prove at the start what can be promised; without, nothing is.

    >>> import gerund
    >>> from gerund.inference.generate.settings import Settings
    >>> with Engine(gerund.load()) as engine:
    ...     story = engine.write("The old man", Settings(max_new_tokens=4))
    ...     vectors = engine.encode(["a cat", "a dog"])
    ...     len(story.result()), len(vectors.result().vectors)
    (1, 2)
    """

    def __init__(self, lm: GenerativeModel, config: EngineConfig | None = None, *, verify: bool = True) -> None:
        self.lm, self.config, self._verify = lm, config or EngineConfig(), verify
        self._jobs: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._counts: Counter[str] = Counter()
        self._tokens = 0
        self._queued = 0
        self._rate = 1000.0
        self._accepts = False
        self._closes = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; after this work is taken."""
        self._accepts = True
        self._thread = threading.Thread(target=self._run, name="gerund-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.drain(60)
        self.close()

    def write(
        self, prompt: Prompt, settings: Settings, *, emit: Emit | None = None, deadline: float | None = None
    ) -> Ticket[list[Generation]]:
        """Continue a prompt; see ``LanguageModel.generate``.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            settings: what is asked for; ``settings.n`` texts are written.
            emit: takes the texts as they come, in the engine's thread; must be quick. An exception that it raises ends
                the request.
            deadline: seconds from now after which nobody waits any more.

        Raises:
            TextError: the prompt is none, or fills the model's context.
            ConfigError: the settings do not fit the model.
            ModelError: it is a conversation, and the model has no chat template.
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing any more.
        """
        model, tokenizer = self.lm.model, self.lm.tokenizer
        [checked] = check_prompts([prompt])
        ids = prompt_ids(model, tokenizer, checked)
        generation.writing_of(model, tokenizer, settings)

        def run(job: _Job) -> list[Generation]:
            found = generation.generate(model, tokenizer, [ids], settings, emit=emit, cancelled=job)  # type: ignore[arg-type]
            self._counts["tokens_read"] += len(ids)
            self._counts["tokens_written"] += sum(one.usage.completion_tokens for one in found)
            return found

        return self._submit(run, len(ids) + settings.max_new_tokens * settings.n, deadline)

    def encode(
        self,
        texts: Sequence[str | list[int]],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        deadline: float | None = None,
    ) -> Ticket[EncodeResult]:
        """Turn texts into vectors; see ``LanguageModel.encode_with_usage``.

        Args:
            texts: texts, or token ids of this model's own tokenizer without special tokens.
            prompt: as in ``encode``.
            dimensions: as in ``encode``.
            deadline: seconds from now after which nobody waits any more.

        Raises:
            TextError: a text is empty, or token ids are not this tokenizer's.
            ConfigError: an unknown prompt or impossible number.
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing any more.
        """
        plain = [one if isinstance(one, str) else self._decoded(index, one) for index, one in enumerate(texts)]
        tokens = sum(map(len, self.lm.tokenizer(plain)["input_ids"]))

        def run(_: _Job) -> EncodeResult:
            found = self.lm.encode_with_usage(plain, prompt, dimensions=dimensions, show_progress=False)
            self._counts["texts_encoded"] += len(plain)
            return found

        return self._submit(run, tokens, deadline)

    def _decoded(self, index: int, ids: list[int]) -> str:
        tokenizer = self.lm.tokenizer
        text: str = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != list(ids):
            raise TextError.about("text", index, "is a list of token ids that this model's tokenizer would not give")
        return text

    def call(self, function: Callable[[], T], *, tokens: int, deadline: float | None = None) -> Ticket[T]:
        """Run a function in the engine's thread, whole, between two steps: for work that uses the model otherwise.

        Args:
            function: what to run.
            tokens: how much work it is about, in tokens.
            deadline: seconds from now after which nobody waits any more; it is not interrupted once it runs.

        Raises:
            QueueFullError: too much waits already.
            TooLargeError: the request is larger than the whole queue.
            ClosedError: the engine takes nothing any more.
        """
        return self._submit(lambda _: function(), tokens, deadline)

    def state(self) -> EngineState:
        """Return what the engine does and has done."""
        with self._changed:
            return EngineState(
                running=self._accepts,
                promise="bits of generate",
                why="every text is written alone",
                slots=self.config.slots,
                context=context_length(self.lm.model.config, self.lm.tokenizer),
                queued=self._queued,
                queued_tokens=self._tokens,
                tokens_per_second=self._rate,
                **self._counts,
            )

    def drain(self, timeout: float) -> bool:
        """Take nothing new, and finish what is there.

        Args:
            timeout: seconds to wait.

        Returns:
            Whether everything was finished in time.
        """
        with self._changed:
            self._accepts = False
            return self._changed.wait_for(lambda: not self._queued, timeout)

    def close(self) -> None:
        """Stop within a token; what is not done ends with ``ClosedError``."""
        with self._changed:
            self._accepts, self._closes = False, True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _submit(self, run: Callable[[_Job], Any], tokens: int, deadline: float | None) -> Ticket[Any]:
        with self._changed:
            if not self._accepts:
                raise ClosedError("the engine takes nothing any more")
            most = max(self.config.queue_tokens, context_length(self.lm.model.config, self.lm.tokenizer) or 0)
            if tokens > most:
                self._counts["refused"] += 1
                raise TooLargeError(f"the request has {tokens} tokens and the queue takes {most}; divide it")
            if self._queued and self._tokens + tokens > self.config.queue_tokens:
                self._counts["refused"] += 1
                wait = max(1, min(60, round(self._tokens / self._rate)))
                raise QueueFullError(f"{self._tokens} tokens wait already; try again in {wait} s", wait)
            ends = None if deadline is None else time.monotonic() + deadline
            job = _Job(run, Future(), tokens, ends)
            self._jobs.append(job)
            self._tokens += tokens
            self._queued += 1
            self._changed.notify_all()
        return Ticket(job.future, tokens)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs) or self._closes)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            began = time.monotonic()
            self._do(job)
            with self._changed:
                self._tokens -= job.tokens
                self._queued -= 1
                self._rate = 0.8 * self._rate + 0.2 * job.tokens / max(time.monotonic() - began, 1e-6)
                self._changed.notify_all()

    def _do(self, job: _Job) -> None:
        error: BaseException | None = None
        result = None
        if self._closes:
            error = ClosedError("the engine was closed before this was done")
        elif not job.is_set():
            try:
                result = job.run(job)
            except BaseException as failed:  # whatever it is, it is its caller's
                error = failed
        if job.is_late:
            error = DeadlineError("this was not done by its deadline")
        if job.future.cancelled():
            self._counts["cancelled"] += 1
            return
        try:
            if error is not None:
                self._counts["late" if isinstance(error, DeadlineError) else "failed"] += 1
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
        except InvalidStateError:
            self._counts["cancelled"] += 1
