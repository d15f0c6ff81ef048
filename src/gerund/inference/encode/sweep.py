"""Encode the same texts under several attention plans, running shared layers once."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from gerund.attention.layouts import decoder_layers
from gerund.attention.shared_layer_state import hands_on
from gerund.attention.sweep import Sweep
from gerund.errors import ConfigError
from gerund.inference.encode.batches import default_batch_tokens, in_batches, token_states
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.tokens import Tokens
from gerund.jobs.checkpoints import ShardCheckpoint

# State values per batch, of all plans: 256 MB in float32 on a CPU, 2 GB on a GPU.
_CPU_VALUES = 1 << 26
_GPU_VALUES = 1 << 29


def encode_each(
    runtimes: Sequence[EncoderRuntime],
    texts: Sequence[Tokens | None],
    *,
    show: bool | None = None,
    resume_from: ShardCheckpoint | None = None,
) -> np.ndarray:
    """Encode texts under every runtime's plan and pooling: ``(len(runtimes), n, D)`` float32, not normalized.

    The runtimes share model, tokenizer, prompt and length. Finished batches are saved to ``resume_from``.
    """
    vectors = np.zeros((len(runtimes), len(texts), runtimes[0].width), dtype=np.float32)
    count = len(runtimes)
    passes = [] if resume_from is None else [resume_from.encoding_pass(number, count) for number in range(count)]
    done = [saved.restore(array) for saved, array in zip(passes, vectors, strict=False)]

    def keep(place: int, rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
        vectors[place, rows] = runtimes[place].pooled(batch, hidden_BTD, begin)
        if passes:
            passes[place].save(rows, vectors[place, rows])

    _sweep(runtimes, texts, keep, show, done)
    return vectors


def encode_tokens_each(
    runtimes: Sequence[EncoderRuntime],
    texts: Sequence[Tokens | None],
    keep: Callable[[int, int, np.ndarray], None],
    *,
    show: bool | None = None,
) -> None:
    """Call ``keep`` with the indices of runtime and text, and the token states ``(n_tokens, D)`` float32."""

    def keep_batch(place: int, rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
        for row, states in zip(rows, token_states(batch, hidden_BTD, begin), strict=True):
            keep(place, row, states)

    _sweep(runtimes, texts, keep_batch, show)


def _sweep(
    runtimes: Sequence[EncoderRuntime],
    texts: Sequence[Tokens | None],
    keep: Callable[[int, list[int], list[Tokens], Tensor, Tensor], None],
    show: bool | None,
    done: Sequence[frozenset[int]] = (),
) -> None:
    first = runtimes[0]
    own_done = done or [frozenset[int]()] * len(runtimes)
    if any(runtime.model is not first.model for runtime in runtimes):
        raise ConfigError("A sweep compares plans of one model, not several models.")
    if hands_on(decoder_layers(first.model)) or len({len(runtime.plan.views) for runtime in runtimes}) > 1:
        # The state that layers share belongs to one plan; and a pass has one number of layers.
        for place, runtime in enumerate(runtimes):
            in_batches(runtime, texts, runtime.states, partial(keep, place), show=show, done=own_done[place])
        return
    plans = [runtime.plan for runtime in runtimes]

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        inputs = first.batch(batch)
        return first.run(inputs, Sweep(plans, inputs.real_BT).bound), inputs.begin

    def keep_each(rows: list[int], batch: list[Tokens], hidden_PBTD: Tensor, begin: Tensor) -> None:
        for place, hidden_BTD in enumerate(hidden_PBTD.split(len(batch))):
            keep(place, rows, batch, hidden_BTD, begin)

    on_cpu = first.device.type == "cpu"
    room = (_CPU_VALUES if on_cpu else _GPU_VALUES) // (len(plans) * first.width)
    budget = max(128, min(default_batch_tokens(first.device.type, first.width), room))
    # One pass runs all plans.
    whole = frozenset.intersection(*own_done)
    in_batches(first, texts, states, keep_each, batch_tokens=budget, show=show, done=whole)
