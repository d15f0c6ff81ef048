"""The slow, obvious way for any architecture: one text at a time, in eager attention, each layer's mask written out.

How far a layer looks (windows, chunks) is read off the mask that the untouched model itself gives it, and holds to both
sides alike. Recurrent modules are called as they are, and on the text reversed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.layouts import decoder_layers
from gerund.settings.plan import AttentionPlan
from tests.attention.reference import kinds, sees, skip_hooks

# By the ends of their classes' names; spelled out here, so that the library is not asked about itself.
RECURRENT = ("GatedDeltaNet", "DeltaAttention", "LightningAttention", "ShortConv", "MambaMixer", "Mamba2Mixer",
             "BambaMixer", "FalconH1Mixer", "MambaLayer")  # fmt: skip
_MASKS = ("causal_mask", "attention_mask")


class SlowModel:
    """An untouched model in eager attention, read under a plan.

    Args:
        model: built with ``attn_implementation="eager"``, and nobody else's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.body = getattr(model, "model", model) if model.base_model is model else model.base_model
        self.layers = decoder_layers(model)

    def states(self, ids: Sequence[int], plan: AttentionPlan | None, span: Sequence[int] = ()) -> Tensor:
        """Return the last hidden states ``(T, D)`` of one text; without a plan those of the untouched model."""
        return self._run(self.body, ids, plan, span).last_hidden_state[0]  # type: ignore[no-any-return]

    def logprobs(self, ids: Sequence[int], span: Sequence[int]) -> Tensor:
        """Return what is predicted at each token ``(T, V)`` under MAGNET's hybrid mask.

        Args:
            ids: the text.
            span: 1 for the tokens of a span, 0 for its context.
        """
        found: Tensor = self._run(self.model, ids, AttentionPlan("hybrid"), span).logits[0].log_softmax(-1)
        return found

    def _run(self, part: Any, ids: Sequence[int], plan: AttentionPlan | None, span: Sequence[int] = ()) -> Any:
        run = _Run(self, len(ids), plan, span)
        handles: list[Any] = []
        try:
            if plan is not None:
                run.note(handles)
                self.body(_batch(ids), use_cache=False)
                handles = _removed(handles)
                run.hook(handles)
            return part(_batch(ids), use_cache=False)
        finally:
            _removed(handles)
            for module in self.model.modules():
                vars(module).pop("forward", None)


class _Run:
    """One text under one plan."""

    def __init__(self, slow: SlowModel, length: int, plan: AttentionPlan | None, span: Sequence[int] = ()) -> None:
        self.slow, self.length, self.plan = slow, length, plan
        self.span = list(span) or [0] * length
        self.near: dict[int, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def note(self, handles: list[Any]) -> None:
        """Hang hooks that note the model's own masks."""

        def note(layer: nn.Module, args: Any, kwargs: Any, index: int) -> None:
            mask = next((mask for mask in _masks_in(args, kwargs)), None)
            if mask is not None:
                hidden = mask if mask.dtype == torch.bool else mask < -1
                self.near[index] = ~hidden[0, 0]

        for index, layer in enumerate(self.slow.layers):
            handles.append(layer.register_forward_pre_hook(partial(note, index=index), with_kwargs=True))

    def hook(self, handles: list[Any]) -> None:
        """Hang hooks that give each layer its mask, run recurrent modules both ways, and run layers again."""
        assert self.plan is not None
        n = len(self.slow.layers)
        first = kinds(self.plan, n)
        for index, layer in enumerate(self.slow.layers):
            self._turn(layer, first[index][0])
            handles.append(
                layer.register_forward_pre_hook(partial(self._before, index=index, view=first[index]), with_kwargs=True)
            )
            handles.append(layer.register_forward_hook(partial(self._after, index=index, n=n), with_kwargs=True))
        handles += skip_hooks(self.slow.layers, self.plan)

    def _turn(self, layer: nn.Module, kind: str) -> None:
        way = kind if self.plan is not None and self.plan.recurrent == "both" else "forward"
        for module in layer.modules():
            if type(module).__name__.endswith(RECURRENT):
                module.forward = partial(_both_ways, partial(type(module).forward, module), way)  # type: ignore[method-assign]

    def _before(self, layer: nn.Module, args: Any, kwargs: Any, index: int, view: tuple[str, int]) -> Any:
        del layer
        return self._with_mask(args, kwargs, index, *view)

    def _with_mask(self, args: Any, kwargs: Any, index: int, kind: str, hidden: int) -> Any:
        """Put the written-out mask in the place of every one that the layer is called with."""
        near, real = self.near.get(index), [1] * self.length
        mask = torch.zeros(self.length, self.length, dtype=torch.bool)
        for query in range(self.length):
            for key in range(self.length):
                sees_key = sees(kind, query, key, real, hidden=hidden, window=None, span=self.span)
                later, earlier = max(query, key), min(query, key)
                mask[query, key] = sees_key and (near is None or bool(near[later, earlier]))
        return _replaced(args, kwargs, mask)

    def _after(self, layer: nn.Module, args: Any, kwargs: Any, output: Any, index: int, n: int) -> Any:
        assert self.plan is not None
        k, family = self.plan.k or 0, self.plan.name.split("-")[0]
        way = "back" if self.plan.name.endswith("back") else "both"
        own = out = output[0] if isinstance(output, tuple) else output
        if family == "inter" and self.plan.variant == "paper":
            if index >= n - k and self._converts(layer):
                out = self._joined(out, self._again(layer, _input(args, kwargs), args, kwargs, index, way))
        elif family in ("inter", "extra"):
            first = 0 if family == "extra" else n - k
            if index == first:
                self.second["state"] = _input(args, kwargs)
            if first <= index < first + k:
                self.second["state"] = self._again(layer, self.second["state"], args, kwargs, index, way)
            if index == n - 1:
                out = self._joined(out, self.second["state"])
        elif family == "extend" and index == n - 1:
            for _ in range(k):
                out = self._again(layer, out, args, kwargs, index, way)
        if out is own:
            return None
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def _joined(self, left: Tensor, right: Tensor) -> Tensor:
        assert self.plan is not None
        return (left + right) / 2 if self.plan.combine == "mean" else left + right

    def _converts(self, layer: nn.Module) -> bool:
        """Whether a second pass of a layer would differ from the first: recurrent layers that stay causal run once."""
        assert self.plan is not None
        recurrent = [m for m in layer.modules() if type(m).__name__.endswith(RECURRENT)]
        names = [type(m).__name__ for m in layer.modules() if m not in recurrent]
        attends = not recurrent or any(name.endswith("Attention") for name in names)
        if getattr(layer, "block_type", None) in ("mlp", "moe"):
            return False
        return attends or self.plan.recurrent == "both"

    def _again(self, layer: nn.Module, hidden: Tensor, args: Any, kwargs: Any, index: int, way: str) -> Tensor:
        self._turn(layer, way)
        args, kwargs = self._with_mask(args, kwargs, index, way, 0)
        if args:
            output = layer.forward(hidden, *args[1:], **kwargs)
        else:
            output = layer.forward(**{**kwargs, next(n for n in _INPUTS if n in kwargs): hidden})
        self._turn(layer, "forward")
        return output[0] if isinstance(output, tuple) else output


_INPUTS = ("hidden_states", "activations", "hidden", "x")


def _batch(ids: Sequence[int]) -> Tensor:
    return torch.tensor([list(ids)])


def _removed(handles: list[Any]) -> list[Any]:
    for handle in handles:
        handle.remove()
    return []


def _input(args: Any, kwargs: Any) -> Tensor:
    return args[0] if args else kwargs[next(name for name in _INPUTS if name in kwargs)]


def _both_ways(forward: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
    """Call a recurrent module on a text of its own, on the text reversed, or on both."""
    name = next((name for name in _INPUTS if name in kwargs), None)

    def call(text: Tensor) -> tuple[Tensor, Any]:
        output = forward(text, *args[1:], **kwargs) if name is None else forward(*args, **{**kwargs, name: text})
        return (output[0], output) if isinstance(output, tuple) else (output, None)

    text = args[0] if name is None else kwargs[name]
    total, rest = 0, None
    if kind in ("forward", "both"):
        found, rest = call(text)
        total = total + found
    if kind in ("back", "both"):
        found, rest = call(text.flip(1))
        total = total + found.flip(1)
    return total if rest is None else (total, *rest[1:])


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 4 and value.shape[-1] == value.shape[-2]


def _masks_in(args: Any, kwargs: Any) -> list[Tensor]:
    values = [*args[1:], *(kwargs[name] for name in _MASKS if name in kwargs)]
    values += [inner for value in values if isinstance(value, dict) for inner in value.values()]
    return [value for value in values if _is_mask(value)]


def _replaced(args: Any, kwargs: Any, mask: Tensor) -> Any:
    def change(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: change(inner) for name, inner in value.items()}
        if not _is_mask(value):
            return value
        if value.dtype == torch.bool:
            return ~mask.expand_as(value)
        # What the model has put into its mask beside (falcon: the bias of positions) is the same for every query.
        beside = value[..., -1:, :] if value.shape[1] > 1 else torch.zeros_like(value)
        return torch.where(mask, beside.expand_as(value), torch.finfo(value.dtype).min)

    args = (args[0], *map(change, args[1:])) if args else args
    return args, {name: change(value) if name in _MASKS else value for name, value in kwargs.items()}
