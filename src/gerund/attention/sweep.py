"""Run several plans on one batch, computing every layer that two plans share only once.

Plans that convert the top k layers differ only from layer n-k on: below it their states are those of the causal pass.
One causal pass records the inputs of every layer; after its last layer each plan continues from where it leaves a path
that was computed before. The last layer returns the states of all plans concatenated, so that the model's own final
norm is applied to all.

For one layout and k = 1 to n this runs n + n(n+1)/2 layers; encoding from scratch for each k runs n^2. ``extra`` and
``extend`` need 2n.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layouts import combine, hidden_of, input_of, run_again
from gerund.attention.recurrent import kind_of
from gerund.errors import ConfigError
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
        pairs = zip(self.steps, steps, strict=False)
        return next((place for place, (mine, other) in enumerate(pairs) if mine != other), len(self.steps))


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
