"""The slow, obvious way: what each layer of a plan sees, spelled out, and eager attention under explicit 4-D masks."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.layouts import decoder_layers
from gerund.settings.plan import AttentionPlan


def read(
    model: PreTrainedModel, plan: AttentionPlan, batch: dict[str, Tensor], span_BT: Tensor | None = None
) -> Tensor:
    """Return the last hidden states that a model, whose layers take plans, has under one."""
    bound = BoundPlan(plan.resolve(len(decoder_layers(model))), batch["attention_mask"], span_BT)
    states = model.base_model(**taken(model, batch), use_cache=False, attention_plan=bound).last_hidden_state
    bound.check_all_asked("tiny")
    return states  # type: ignore[no-any-return]


def taken(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a model takes of a batch: some tell positions by themselves."""
    parameters = inspect.signature(model.base_model.forward).parameters
    return {name: value for name, value in batch.items() if name != "position_ids" or name in parameters}


def assert_near(found: Tensor, expected: Tensor, label: Any, rounding: float = 1e-5) -> None:
    """Compare states, as a fraction of the largest one."""
    difference = (found - expected).abs().max().item()
    assert difference <= rounding * max(1.0, expected.abs().max().item()), (label, difference)


def assert_gradients_near(model: PreTrainedModel, states: Callable[[], Tensor], expected: dict[str, Tensor]) -> None:
    """Compare the gradient of a sum of states, with and without checkpointing, with one that was computed slowly.

    Args:
        model: what is trained.
        states: computes what is summed.
        expected: the slow gradient of each weight.
    """
    fast = gradients(model, states())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # renamed in newer transformers
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    checkpointed = gradients(model, states())
    assert expected.keys() == fast.keys() == checkpointed.keys()
    for key, own in expected.items():
        scale = max(1.0, own.abs().max().item())
        torch.testing.assert_close(fast[key], own, atol=2e-4 * scale, rtol=1e-3, msg=lambda m, k=key: f"{k}: {m}")
        torch.testing.assert_close(checkpointed[key], fast[key], atol=1e-5 * scale, rtol=1e-4)


def gradients(model: PreTrainedModel, states: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a sum for each weight that has one, and leave none behind."""
    states.sum().backward()
    found = {key: p.grad.clone() for key, p in model.base_model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


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
    """A model in eager attention whose every layer gets the mask that is written out for it, and runs once."""

    def __init__(self, model: PreTrainedModel, plan: AttentionPlan) -> None:
        self.model, self.plan = model, plan
        if model.config._attn_implementation != "eager":
            model.set_attn_implementation("eager")
        self.layers = decoder_layers(model)

    def hidden_states(self, batch: dict[str, Tensor], span_BT: Tensor | None = None) -> Tensor:
        real_BT = batch["attention_mask"]
        span_BT = torch.zeros_like(real_BT) if span_BT is None else span_BT
        handles = []
        for i, (kind, hidden) in enumerate(kinds(self.plan, len(self.layers))):
            mask = additive(kind, real_BT, hidden=hidden, window=window_of(self.model, i), span_BT=span_BT)
            handles.append(self.layers[i].register_forward_pre_hook(_with_mask(mask), with_kwargs=True))
        try:
            return self.model.base_model(**batch, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def logprobs(self, batch: dict[str, Tensor], span_BT: Tensor | None = None) -> Tensor:
        """Return what is predicted at each token ``(B, T, V)``, with what each architecture does behind its head."""
        logits, config = self.model.get_output_embeddings()(self.hidden_states(batch, span_BT)), self.model.config
        if getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        return logits.log_softmax(-1)


def _with_mask(mask: Tensor) -> Any:
    def hook(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        del layer
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": mask}
        # GPT-2's blocks take it by position.
        return (*args[:2], mask, *args[3:]), kwargs

    return hook
