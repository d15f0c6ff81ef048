"""Batch texts by length, run an encoder and pool its states, with torch or a packed network; imports no torch."""

import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gerund.arrays import Array, as_float32, as_numpy, library_of
from gerund.checks import whole_number
from gerund.errors import ConfigError, ResourceError
from gerund.inference.encode.reading import ReadsTexts
from gerund.inference.tokens import Tokens, rotary_limit, token_batches
from gerund.jobs.checkpoints import EncodingPass
from gerund.progress import progress

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
