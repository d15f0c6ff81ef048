"""The slow, obvious way: eager attention under explicit 4-D masks, second streams from real copies of layers."""

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.layouts import decoder_layers
from gerund.settings.plan import AttentionPlan


def sees(kind: str, query: int, key: int, real: list[int], *, hidden: int, window: int | None, span: list[int]) -> bool:
    """Say whether ``query`` sees ``key``: one decision at a time, straight from the papers' words."""
    if query == key:
        return True
    if not real[key]:
        return False
    if window is not None and abs(query - key) >= window:
        return False
    if hidden and key < query and sum(real[: key + 1]) <= hidden:
        return False
    if kind == "forward":
        return key < query
    if kind == "back":
        return key > query
    if kind == "both":
        return True
    assert kind == "hybrid"
    return span[key] == 0 or (span[key] == span[query] and key < query)


def additive(kind: str, real_BT: Tensor, *, hidden: int = 0, window: int | None = None, span_BT: Tensor) -> Tensor:
    rows = [
        _text_mask(kind, tuple(real), hidden, window, tuple(span))
        for real, span in zip(real_BT.tolist(), span_BT.tolist(), strict=True)
    ]
    return torch.stack(rows)[:, None]


@functools.cache
def _text_mask(kind: str, real: tuple[int, ...], hidden: int, window: int | None, span: tuple[int, ...]) -> Tensor:
    n = len(real)
    mask = torch.full((n, n), torch.finfo(torch.float32).min)
    for query in range(n):
        for key in range(n):
            if sees(kind, query, key, list(real), hidden=hidden, window=window, span=list(span)):
                mask[query, key] = 0.0
    return mask


def kinds(plan: AttentionPlan, n: int) -> list[tuple[str, int]]:
    """Spell each layer of a plan out by hand: (kind, hidden tokens), bottom first."""
    k, k0, m = plan.k or 0, plan.k0 or 0, plan.sink_tokens
    low = n - k
    return {
        "causal": [("forward", 0)] * n,
        "echo": [("forward", 0)] * n,
        "bidir": [("both", 0)] * n,
        "hybrid": [("hybrid", 0)] * n,
        "inplace-back": [("forward", 0)] * low + [("back", 0)] * k,
        "inplace-bidir": [("forward", 0)] * low + [("both", 0)] * k,
        "mask0-for": [("forward", 0)] * low + [("forward", m)] * k,
        "mask0-bidir": [("forward", 0)] * low + [("both", m)] * k,
        "mask0-all": [("forward", m)] * low + [("both", m)] * k,
        "mask0+bidir": [("forward", 0)] * low + [("both", 0)] * (k - k0) + [("both", m)] * k0,
    }.get(plan.name, [("forward", 0)] * n)


def skip_layers(plan: AttentionPlan, n: int) -> list[int]:
    """Spell out before which layers states are added up: every so many, from the first converted one on."""
    if plan.skips is None:
        return []
    first = n - plan.k if plan.k is not None else 0
    if plan.variant == "released":
        first = plan.k0 if plan.k0 is not None else plan.k or 0
    return [i for i in range(n) if i >= first and (i - first) % plan.skips == 0]


def window_of(model: PreTrainedModel, layer: int) -> int | None:
    config = model.config
    types = getattr(config, "layer_types", None)
    if types is not None:
        return config.sliding_window if types[layer] == "sliding_attention" else None
    return config.sliding_window if config.model_type in ("mistral", "phi3", "starcoder2") else None


def skip_hooks(layers: nn.ModuleList, plan: AttentionPlan) -> list[Any]:
    """As released: ``hidden += saved; saved = hidden`` before those layers, ``hidden += saved`` at the end."""
    wanted = skip_layers(plan, len(layers))
    saved: list[Tensor] = []

    def before(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        del layer
        hidden = args[0] if args else kwargs["hidden_states"]
        if saved:
            hidden = hidden + saved.pop()
        saved.append(hidden)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def last(layer: nn.Module, args: Any, output: Any) -> Any:
        del layer, args
        if not saved:
            return None
        out = (output[0] if isinstance(output, tuple) else output) + saved.pop()
        return (out, *output[1:]) if isinstance(output, tuple) else out

    handles: list[Any] = [layers[i].register_forward_pre_hook(before, with_kwargs=True) for i in wanted]
    return [*handles, layers[-1].register_forward_hook(last)]


class ReferenceModel:
    """A model in eager attention whose every layer gets the mask that is written out for it."""

    def __init__(self, model: PreTrainedModel, plan: AttentionPlan) -> None:
        self.model = model
        if self.model.config._attn_implementation != "eager":
            self.model.set_attn_implementation("eager")
        self.layers = decoder_layers(model)
        self.plan = plan
        streams = plan.name.startswith(("inter", "extra"))
        self.copies = {i: self._copy(layer) for i, layer in enumerate(self.layers)} if streams else {}
        if plan.name.startswith("extend"):
            self.tops = [self._copy(self.layers[-1]) for _ in range(plan.k or 0)]

    def _copy(self, layer: nn.Module) -> nn.Module:
        # Weights of its own; the configuration, which every module holds, takes longer to copy than they do.
        return copy.deepcopy(layer, {id(self.model.config): self.model.config})

    def hidden_states(self, batch: dict[str, Tensor], span_BT: Tensor | None = None) -> Tensor:
        real_BT = batch["attention_mask"]
        span_BT = torch.zeros_like(real_BT) if span_BT is None else span_BT
        n = len(self.layers)
        masks = [
            additive(kind, real_BT, hidden=hidden, window=window_of(self.model, i), span_BT=span_BT)
            for i, (kind, hidden) in enumerate(kinds(self.plan, n))
        ]
        way = "back" if self.plan.name.endswith("back") else "both"
        second_masks = [additive(way, real_BT, window=window_of(self.model, i), span_BT=span_BT) for i in range(n)]
        tower: dict[str, Tensor] = {}
        handles = []
        for i, layer in enumerate(self.layers):
            handles.append(layer.register_forward_pre_hook(_with_mask(masks[i]), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._streams(i, n, second_masks, tower), with_kwargs=True))
        handles += skip_hooks(self.layers, self.plan)
        try:
            return self.model.base_model(**batch, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()

    def _streams(self, i: int, n: int, second_masks: list[Tensor], tower: dict[str, Tensor]) -> Any:
        family = self.plan.name.split("-")[0]
        k = self.plan.k or 0

        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            del layer
            out = output[0] if isinstance(output, tuple) else output
            given = args[0] if args else kwargs["hidden_states"]
            if family == "inter" and self.plan.variant == "paper" and i >= n - k:
                out = self._join(out, _call(self.copies[i], given, args, kwargs, second_masks[i]))
            elif family in ("inter", "extra") and (family == "extra" or self.plan.variant == "released"):
                first = 0 if family == "extra" else n - k
                if i == first:
                    tower["state"] = given
                if first <= i < first + k:
                    tower["state"] = _call(self.copies[i], tower["state"], args, kwargs, second_masks[i])
                if i == n - 1:
                    out = self._join(out, tower["state"])
            elif family == "extend" and i == n - 1:
                for top in self.tops:
                    out = _call(top, out, args, kwargs, second_masks[i])
            return (out, *output[1:]) if isinstance(output, tuple) else out

        return hook

    def _join(self, left: Tensor, right: Tensor) -> Tensor:
        return (left + right) / 2 if self.plan.combine == "mean" else left + right


def _with_mask(mask: Tensor) -> Any:
    def hook(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        del layer
        return _replace_mask(args, kwargs, mask)

    return hook


def _replace_mask(args: Any, kwargs: Any, mask: Tensor) -> Any:
    if "attention_mask" in kwargs:
        return args, {**kwargs, "attention_mask": mask}
    # GPT-2's blocks take it by position.
    where = next(i for i, arg in enumerate(args) if i and (arg is None or (isinstance(arg, Tensor) and arg.ndim == 4)))
    where = 2 if len(args) > 2 else where
    return (*args[:where], mask, *args[where + 1 :]), kwargs


def _call(layer: nn.Module, hidden: Tensor, args: Any, kwargs: Any, mask: Tensor) -> Tensor:
    args, kwargs = _replace_mask(args, kwargs, mask)
    output = layer(hidden, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": hidden})
    return output[0] if isinstance(output, tuple) else output
