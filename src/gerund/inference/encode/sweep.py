"""Encode the same texts in several ways, and run what they share once.

Readings of one pass differ in layers, values, poolings and transforms. Plans that convert the top k layers differ only
from layer n-k on: below it their states are those of the causal pass. One causal pass records the inputs of every
layer; after its last layer each plan continues from where it leaves a path that was computed before. The last layer
returns the states of all plans concatenated, so that the model's own final norm is applied to all.

For one layout and k = 1 to n this runs n + n(n+1)/2 layers; encoding from scratch for each k runs n^2. ``extra`` and
``extend`` need 2n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layer_state import hands_on
from gerund.attention.layouts import combine, decoder_layers, hidden_of, input_of, run_again
from gerund.attention.recurrent import kind_of
from gerund.errors import ConfigError
from gerund.inference.encode.batches import default_batch_tokens, in_batches, token_states
from gerund.inference.encode.runtime import EncoderRuntime, shares_pass, states_each
from gerund.inference.text_ids import common_prefix_length
from gerund.inference.tokens import Tokens
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.settings.plan import Direction, ResolvedPlan, Stream, View

_CAUSAL = View(Direction.CAUSAL)


@dataclass(frozen=True)
class _Step:
    """What a plan does in one layer: its view, that of a second pass, and whose input is added after it."""

    view: View
    stream: Stream | None = None
    added: int | None = None


@dataclass
class _Call:
    """How the model called a layer."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class _Path:
    """States along one plan: ``states[i]`` goes into layer i, the last one comes out of the last layer."""

    steps: list[_Step] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)

    def shared(self, steps: Sequence[_Step]) -> int:
        """Return how many layers from the bottom do the same."""
        return common_prefix_length(self.steps, steps)


class Sweep:
    """Runs plans side by side on one batch.

    ``bound`` goes into ``model(..., attention_plan=...)``; the last hidden states then have
    ``len(plans) * B`` rows: those of the first plan, then those of the second, and so on.
    """

    def __init__(self, plans: Sequence[ResolvedPlan], real_BT: Tensor | None = None) -> None:
        if any(plan.repeats_text for plan in plans):
            raise ConfigError("the echo layout reads another text, so it shares no layer with other plans")
        if any(view.direction is Direction.HYBRID for plan in plans for view in plan.views):
            raise ConfigError("the plan 'hybrid' fills spans and is no way to encode")
        self.plans = plans
        n_layers = len(plans[0].views)
        self.bound = BoundPlan(ResolvedPlan((_CAUSAL,) * n_layers), real_BT, after_layer=self._after_layer)
        self.layers_run = 0
        self._n_layers = n_layers
        self._calls: list[_Call] = []
        self._chains: dict[tuple[int, View], list[Tensor]] = {}

    def _after_layer(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        self._calls.append(_Call(layer, args, kwargs))
        self.layers_run += 1
        if index < self._n_layers - 1:
            return None
        hidden_PBTD = self._all_plans(hidden_of(output))
        return (hidden_PBTD, *output[1:]) if isinstance(output, tuple) else hidden_PBTD

    def _all_plans(self, causal_BTD: Tensor) -> Tensor:
        """Run every plan; return their states before the final norm, one below the other."""
        inputs = [input_of(call.args, call.kwargs) for call in self._calls]
        causal = _Path([_Step(_CAUSAL)] * self._n_layers, [*inputs, causal_BTD])
        path = causal
        states: dict[int, Tensor] = {}
        # Plans that share their lower layers come one after the other, so that one path is kept at a time.
        steps = [_steps(plan) for plan in self.plans]
        for place in sorted(range(len(steps)), key=lambda place: str(steps[place])):
            near = max(path, causal, key=lambda known: known.shared(steps[place]))
            path = self._walk(near, steps[place])
            states[place] = self._with_stream(path.states[-1], causal, self.plans[place].stream)
        self._calls, self._chains = [], {}
        return torch.cat([states[place] for place in range(len(self.plans))])

    def _walk(self, near: _Path, steps: list[_Step]) -> _Path:
        """Return the path of ``steps``, taking from ``near`` what both share."""
        shared = near.shared(steps)
        path = _Path(steps, near.states[: shared + 1])
        for index in range(shared, self._n_layers):
            step, hidden_BTD = steps[index], path.states[-1]
            after_BTD = self._run(index, hidden_BTD, step.view)
            if step.stream is not None and kind_of(self._calls[index].layer).changes(step.stream.view):
                after_BTD = combine(after_BTD, self._run(index, hidden_BTD, step.stream.view), step.stream)
            if step.added is not None:
                after_BTD = after_BTD + path.states[step.added]
            path.states.append(after_BTD)
        return path

    def _with_stream(self, hidden_BTD: Tensor, causal: _Path, stream: Stream | None) -> Tensor:
        """Add what runs beside or above the layers."""
        if stream is None or stream.kind == "parallel":
            return hidden_BTD
        if stream.kind == "extend":
            last = self._n_layers - 1
            return self._chain(hidden_BTD, (self._n_layers, stream.view), [last] * stream.repeats)
        start = stream.layers[0]
        second_BTD = self._chain(causal.states[start], (start, stream.view), list(stream.layers))
        return combine(hidden_BTD, second_BTD, stream)

    def _chain(self, first_BTD: Tensor, key: tuple[int, View], layers: list[int]) -> Tensor:
        """Run layers one after the other under one view, going on from where a shorter chain ended."""
        states = self._chains.setdefault(key, [first_BTD])
        for index in layers[len(states) - 1 :]:
            states.append(self._run(index, states[-1], key[1]))
        return states[len(layers)]

    def _run(self, index: int, hidden_BTD: Tensor, view: View) -> Tensor:
        call = self._calls[index]
        self.layers_run += 1
        return run_again(
            call.layer, hidden_BTD, call.args, {**call.kwargs, "attention_plan": self.bound.seen_through(view)}
        )


def _steps(plan: ResolvedPlan) -> list[_Step]:
    parallel = plan.stream if plan.stream is not None and plan.stream.kind == "parallel" else None
    second = parallel.layers if parallel is not None else ()
    # The range is left out of the step: two plans with other k do the same in the layers that both convert.
    shared = Stream("parallel", parallel.view, range(0), combine=parallel.combine) if parallel is not None else None
    return [
        _Step(view, shared if index in second else None, plan.added_after(index))
        for index, view in enumerate(plan.views)
    ]


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


Item = TypeVar("Item")


def encode_readings(
    runtimes: Sequence[EncoderRuntime], texts: Sequence[Tokens | None], *, show: bool | None = None
) -> list[np.ndarray]:
    """Encode texts once and return the vectors of each runtime ``(n, D)`` float32, not normalized.

    Args:
        runtimes: encoders that share a pass (see ``runtime.shares_pass``).
        texts: as the encoders read them; None gives a zero vector.
        show: whether to show progress; None does on a terminal.

    Raises:
        ConfigError: the encoders need several passes.
    """
    if not all(shares_pass(runtimes[0], other) for other in runtimes[1:]):
        raise ConfigError("these encoders read texts in different passes")
    vectors = [np.zeros((len(texts), runtime.width), dtype=np.float32) for runtime in runtimes]
    latest: list[Tensor] = []

    def states(batch: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
        latest[:], begin = states_each(runtimes, batch)
        return latest[0], begin

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Tensor, begin: Tensor) -> None:
        del hidden_BTD  # that of the first
        for vectors_ND, runtime, states_BTD in zip(vectors, runtimes, latest, strict=True):
            vectors_ND[rows] = runtime.pooled(batch, states_BTD, begin)

    in_batches(runtimes[0], texts, states, keep, show=show)
    return vectors


def by_pass(items: Sequence[Item], runtimes: Sequence[EncoderRuntime]) -> list[list[Item]]:
    """Return items, each of which has a runtime, in groups that share a pass; a group of one shares with no other."""
    groups: list[tuple[EncoderRuntime, list[Item]]] = []
    for item, runtime in zip(items, runtimes, strict=True):
        group = next((members for first, members in groups if shares_pass(first, runtime)), None)
        if group is None:
            groups.append((runtime, [item]))
        else:
            group.append(item)
    return [members for _, members in groups]
