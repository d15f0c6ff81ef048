"""Fast LoRA layers, which cost little more than the layers they change.

PEFT adds two matmuls, two conversions and a dropout to every layer in which an adapter is active: in a small model, or
at a high rank, as much work again. Here a layer without gradients uses one of two ways, chosen by size:

- ``merged``: one matmul with a copy of the weight that includes the adapter. The copy is made when it is first needed;
the
  weight itself stays unchanged for threads that generate. The copies take as much memory as the weights they replace.
- ``low-rank``: the weight's matmul, plus the two small ones in the layer's dtype. No extra memory; at the usual rank of
16
  and 2048 dimensions per state it costs 2% more.

With gradients, and for other kinds of adapters, PEFT computes.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.models.fingerprint import times_written

Way = Literal["merged", "low-rank"]

LARGEST_COPIES = 2**29
"""Maximum bytes of the merged copies of all adapters of a model; above it, all matmuls are low-rank."""


@dataclass(frozen=True)
class AdapterComputation:
    """How a model's adapters are computed."""

    way: Way | None  # ``merged`` or ``low-rank``; None where no layer has a plain LoRA
    layers: int  # how many layers are read so
    others: int  # how many layers PEFT computes itself
    copies: int  # bytes of the merged copies that there may be, of all adapters

    def summary(self) -> str:
        """Return it as a sentence for people.

        >>> AdapterComputation("merged", 56, 0, 11_796_480).summary().partition(", as quickly")[0]
        'its adapters are read through merged copies of 56 weights (11.2 MiB for all adapters)'
        """
        if self.way is None:
            return "its adapters are computed by PEFT, layer by layer"
        if self.way == "merged":
            how = (
                f"are read through merged copies of {self.layers} weights ({self.copies / 2**20:.1f} MiB for all "
                "adapters), as quickly as the model without them"
            )
        else:
            limit = LARGEST_COPIES // 2**20
            how = (
                f"are read by low-rank products in {self.layers} layers, since merged copies would take "
                f"{self.copies / 2**20:.0f} MiB (at most {limit} are taken)"
            )
        return f"its adapters {how}" + (f"; {self.others} layers are computed by PEFT" if self.others else "")


def choose_computation(layers: Iterable[Any], names: Mapping[int, Iterable[str]]) -> AdapterComputation:
    """Choose how LoRA layers are computed, and store it in each; ``names`` are the adapters in each, by ``id``."""
    listed = list(layers)
    plain = {id(layer): [name for name in names[id(layer)] if _is_plain(layer, name)] for layer in listed}
    copies = sum(
        layer.base_layer.weight.numel() * layer.base_layer.weight.element_size() * len(plain[id(layer)])
        for layer in listed
        if plain[id(layer)]
    )
    way: Way = "merged" if copies <= LARGEST_COPIES else "low-rank"
    for layer in listed:
        layer.gerund_fast = dict.fromkeys(plain[id(layer)], way)
        layer.gerund_cached = {}
    fast = sum(map(bool, plain.values()))
    return AdapterComputation(way if fast else None, fast, len(listed) - fast, copies)


def fast_forward(layer: Any, name: str, input_: Tensor) -> Tensor | None:
    """Return what a layer makes of its input with an adapter active; None where PEFT has to compute it."""
    way = layer.gerund_fast.get(name)
    if way is None or torch.is_grad_enabled() or layer.merged_adapters:
        return None
    base = layer.base_layer
    if way == "merged":
        return functional.linear(input_, _cached(layer, name, _merged), base.bias)
    down_RI, up_OR = _cached(layer, name, _factors)
    out: Tensor = base(input_)
    small_NR = functional.linear(input_, down_RI).reshape(-1, down_RI.shape[0])
    return torch.addmm(out.reshape(-1, out.shape[-1]), small_NR, up_OR.T).view(out.shape)


def _is_plain(layer: Any, name: str) -> bool:
    """Tell whether an adapter adds nothing but two small products to a plain linear layer."""
    from peft.tuners.lora import Linear

    if not isinstance(layer, Linear) or type(layer.base_layer) is not nn.Linear or layer.fan_in_fan_out:
        return False
    if name not in layer.lora_A or not layer.base_layer.weight.is_floating_point():
        return False
    if layer.lora_variant.get(name) is not None or layer.lora_bias.get(name):
        return False
    return type(layer.lora_A[name]) is nn.Linear and type(layer.lora_B[name]) is nn.Linear


def _cached(layer: Any, name: str, make: Any) -> Any:
    """Return what ``make`` computes from a layer's weights, computed again after a change of one of them."""
    weights = (layer.base_layer.weight, layer.lora_A[name].weight, layer.lora_B[name].weight)
    # torch counts in-place changes of a tensor; a scale is set by PEFT's own methods.
    state = (
        layer.scaling[name],
        *((id(weight), weight.dtype, weight.device, times_written(weight)) for weight in weights),
    )
    cached = layer.gerund_cached.get(name)
    if cached is None or cached[0] != state:
        # Two threads may both compute it; either result is right, and the last one stays.
        with torch.no_grad(), torch.autocast(weights[0].device.type, enabled=False):
            cached = (state, make(*weights, layer.scaling[name]))
        layer.gerund_cached[name] = cached
    return cached[1]


def _merged(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Return the weight with the adapter in it, added up in float32."""
    change_OI = up_OR.float() @ down_RI.float()
    return torch.add(weight_OI.float(), change_OI, alpha=scale).to(weight_OI.dtype)


def _factors(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return both small matrices in the type that the layer computes in, the scale in the second."""
    return down_RI.to(weight_OI.dtype), (up_OR.float() * scale).to(weight_OI.dtype)
