"""Batch texts by length, run an encoder and pool its states, with torch or a packed network; imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.arrays import Array, as_float32, as_like, as_numpy, library_of
from gerund.checks import whole_number
from gerund.errors import ConfigError, ResourceError
from gerund.inference.tokens import Tokens, context_length, placed_ids, rotary_limit, token_batches
from gerund.jobs.checkpoints import EncodingPass
from gerund.poolings import pool, pooling_parts
from gerund.progress import progress
from gerund.settings.encoder import LLM2VEC_CONVENTIONS, EncoderConfig

if TYPE_CHECKING:
    from gerund.settings.plan import ResolvedPlan


# State values per batch. On a CPU more brings no speed, since the caches are full already, and costs memory.
_CPU_BATCH_NUMBERS = 1024 * 384
_GPU_BATCH_TOKENS = 16384
# What torch, ONNX Runtime and C++ say, in lower case.
_OUT_OF_MEMORY = (
    "not enough memory",
    "out of memory",
    "can't allocate memory",
    "failed to allocate memory",
    "bad_alloc",
    "bad allocation",
)


class ReadsTexts:
    """A model that is ready to encode, whatever computes it."""

    if TYPE_CHECKING:  # of the subclasses, which are dataclasses
        model: Any  # its config says the length of the context
        tokenizer: Any
        config: EncoderConfig
        plan: ResolvedPlan
        head: Any  # projects pooled states; None without one
        transform: Any  # what is applied to vectors after that; None without one
        why_no_vectors: str  # why the model encodes no texts; empty where it does

        @property
        def state_width(self) -> int:
            """Size of a hidden state."""

        @property
        def device_type(self) -> str:
            """The kind of device that computes, such as ``cpu``."""

    @property
    def width(self) -> int:
        """Size of a vector."""
        if self.transform is not None:
            return int(self.transform.dimensions)
        return self.state_width * self.config.poolings if self.head is None else int(self.head.settings.dimensions)

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens, prompt and special tokens included."""
        configured = self.config.max_length
        # sentence-transformers sets the tokenizer's limit to that of the folder.
        counts_tokenizer = configured is None or not self.config.follows_sentence_transformers
        limits = (configured, context_length(self.model.config, self.tokenizer if counts_tokenizer else None))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def read_behind(self) -> int:
        """How many tokens behind a text are pooled in the place of its own; 0 for none."""
        return self.config.generated

    @property
    def room_behind(self) -> int:
        """How many tokens the model reads behind a text."""
        return self.config.generated

    def pool_from(self, tokens: Tokens) -> int:
        """Return the first pooled token: without a prompt that is BOS, unless ``pool_bos`` or the plan excludes it."""
        if self.config.pool_prompt or self.read_behind:
            return 0
        if tokens.text_from > tokens.specials_before or self.config.pool_bos == "never":
            return tokens.text_from
        hides = any(view.hidden for view in self.plan.views)
        return tokens.text_from if hides and self.config.pool_bos == "auto" else 0

    def pool_to(self, tokens: Tokens) -> int:
        """Return the end of the pooled tokens: the end of a template is used for the last token's state only."""
        if self.read_behind:
            return self.read_behind
        reads_end = any(part.reads_end for part in pooling_parts(self.config.pooling))
        reads_end = reads_end or self.config.conventions == LLM2VEC_CONVENTIONS
        if tokens.behind is None or self.config.pool_prompt or reads_end:
            return len(tokens)
        return tokens.behind[0]

    def pooled(self, batch: Sequence[Tokens], hidden_BTD: Array, begin: Array) -> np.ndarray:
        """Return the vectors ``(B, E)`` of a batch, float32; text b begins at ``begin[b]`` in its states."""
        first = begin + as_like(np.array([self.pool_from(text) for text in batch]), begin)
        end = begin + as_like(np.array([self.pool_to(text) for text in batch]), begin)
        place_T = as_like(np.arange(hidden_BTD.shape[1]), begin)
        pooled_BT = (place_T >= first[:, None]) & (place_T < end[:, None])
        before_B = first - begin if self.config.follows_sentence_transformers else None
        vectors_BD = pool(hidden_BTD, pooled_BT, self.config.pooling, before_B)
        if (head := self.head) is not None:
            if self.read_behind:  # tokens of no text
                vectors_BD = head(vectors_BD)
            else:
                ids_BT = as_like(np.array(placed_ids(batch, begin.tolist(), hidden_BTD.shape[1])), begin)
                vectors_BD = head(vectors_BD, ids_BT, pooled_BT)
        array_BE = as_numpy(vectors_BD)
        return array_BE if self.transform is None else self.transform(array_BE)


def default_batch_tokens(device: str, width: int) -> int:
    """Return the default number of tokens per batch, padding included.

    >>> [default_batch_tokens("cpu", width) for width in (64, 384, 4096)], default_batch_tokens("cuda", 4096)
    ([2048, 1024, 512], 16384)
    """
    if device != "cpu":
        return _GPU_BATCH_TOKENS
    return max(512, min(2048, _CPU_BATCH_NUMBERS // width))


class Encodes(ReadsTexts):
    """A model that is ready to encode, and computes."""

    def states(self, texts: Sequence[Tokens]) -> tuple[Array, Array]:
        """Run one batch: last hidden states ``(B, T, D)``, and the position at which each text begins ``(B,)``."""
        raise NotImplementedError


def encode(
    runtime: Encodes,
    texts: Sequence[Tokens | None],
    *,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    show: bool | None = None,
    resume_from: EncodingPass | None = None,
) -> np.ndarray:
    """Encode texts into vectors ``(n, D)`` float32, not normalized; None gives a zero vector.

    ``batch_tokens`` counts padding. Finished batches are saved to ``resume_from``, and not run again.
    """
    vectors = np.zeros((len(texts), runtime.width), dtype=np.float32)
    done = frozenset() if resume_from is None else resume_from.restore(vectors)

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Array, begin: Array) -> None:
        vectors[rows] = runtime.pooled(batch, hidden_BTD, begin)
        if resume_from is not None:
            resume_from.save(rows, vectors[rows])

    states = runtime.states
    in_batches(runtime, texts, states, keep, batch_tokens=batch_tokens, batch_size=batch_size, show=show, done=done)
    return vectors


def encode_tokens(
    runtime: Encodes,
    texts: Sequence[Tokens | None],
    *,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    show: bool | None = None,
) -> list[np.ndarray]:
    """Return the states ``(n_tokens, D)`` float32 of each text, special tokens included, without prompt and padding."""
    demand_own_states(runtime)
    states = [np.zeros((0, runtime.state_width), dtype=np.float32) for _ in texts]

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Array, begin: Array) -> None:
        for row, states_TD in zip(rows, token_states(batch, hidden_BTD, begin), strict=True):
            states[row] = states_TD

    in_batches(runtime, texts, runtime.states, keep, batch_tokens=batch_tokens, batch_size=batch_size, show=show)
    return states


def demand_own_states(runtime: ReadsTexts) -> None:
    """Raise ``ConfigError`` where what is pooled are not the states of a text's own tokens."""
    if runtime.read_behind:
        what = "generated" if runtime.config.generated else "an adapter of answer tokens"
        raise ConfigError(f"{what} is for vectors of whole texts: the tokens pooled are not the text's")


def token_states(batch: Sequence[Tokens], hidden_BTD: Array, begin: Array) -> Iterator[np.ndarray]:
    """Yield the states ``(n_tokens, D)`` float32 of each text of a batch, without prompt and padding."""
    for text, hidden_TD, start in zip(batch, hidden_BTD, begin.tolist(), strict=True):
        own_TD = hidden_TD[start : start + len(text)]
        behind = text.behind or (len(text), len(text))
        kept = [own_TD[: text.specials_before], own_TD[text.text_from : behind[0]], own_TD[behind[1] :]]
        yield as_numpy(as_float32(library_of(hidden_TD).concatenate(kept)))


# Runs a batch: last hidden states, and the position at which each text begins.
States = Callable[[Sequence[Tokens]], tuple[Array, Array]]


def in_batches(
    runtime: ReadsTexts,
    texts: Sequence[Tokens | None],
    states: States,
    keep: Callable[[list[int], list[Tokens], Array, Array], None],
    *,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
    show: bool | None = None,
    label: str = "encoding",
    done: frozenset[int] = frozenset(),
) -> None:
    """Run texts in batches of similar length, dividing those that do not fit into memory.

    ``keep`` gets the batch's indices in ``texts``, its texts, and the result of ``states``. A batch whose indices are
    all ``done`` is skipped; batches are those of all texts, so the others are unchanged.
    """
    if batch_tokens is not None and whole_number("batch_tokens", batch_tokens) < 1:
        raise ConfigError(f"`batch_tokens` must be at least 1, got {batch_tokens}.")
    if batch_size is not None and whole_number("batch_size", batch_size) < 1:
        raise ConfigError(f"`batch_size` must be at least 1, got {batch_size}.")
    present = [(index, text) for index, text in enumerate(texts) if text is not None]
    budget = batch_tokens or default_batch_tokens(runtime.device_type, runtime.state_width)
    limit, lengths = rotary_limit(runtime.model.config), [len(text) for _, text in present]
    batches = token_batches(lengths, budget, limit=limit, most=batch_size)
    with progress(len(present), label, show=show) as advance:
        for batch in batches:
            items = [present[place] for place in batch]
            if done and all(row in done for row, _ in items):
                advance(len(batch))
                continue
            for rows, texts_, hidden_BTD, begin in _in_parts(states, items):
                keep(rows, texts_, hidden_BTD, begin)
            advance(len(batch))


def _in_parts(
    states: States, items: list[tuple[int, Tokens]]
) -> Iterator[tuple[list[int], list[Tokens], Array, Array]]:
    """Run a batch, in two parts if memory runs out."""
    rows, texts = [index for index, _ in items], [text for _, text in items]
    try:
        hidden_BTD, begin = states(texts)
    except (MemoryError, RuntimeError) as error:  # of torch a RuntimeError
        if not _is_out_of_memory(error):
            raise
        if len(items) == 1:
            raise ResourceError(
                f"out of memory on a single text of {len(texts[0])} tokens; set a smaller max_length"
            ) from error
    else:
        yield rows, texts, hidden_BTD, begin
        return
    # Outside the except block: the error's traceback holds the tensors of the failed pass.
    if "torch.cuda" in sys.modules and (cuda := sys.modules["torch"].cuda).is_available():
        cuda.empty_cache()
    middle = len(items) // 2
    yield from _in_parts(states, items[:middle])
    yield from _in_parts(states, items[middle:])


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    message = str(error).lower()
    return any(words in message for words in _OUT_OF_MEMORY)
