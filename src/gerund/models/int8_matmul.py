"""Int8 matmul for linear layers on a CPU, in half the time of bfloat16.

W8A8: each row of a weight has one scale, and each token of an input its own, computed dynamically. Sums are of integers
and exact, so a token's result doesn't depend on the rest of the batch. The matmuls are oneDNN's, through torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from gerund.models.fingerprint import times_written

# With fewer rows or columns rounding takes as long as the matmul; with more columns 32-bit sums might overflow.
_SMALLEST, _LARGEST = 128, 2**16
# Inputs are rounded to -127..127 and stored unsigned, since processors multiply unsigned by signed.
_LEVELS, _ZERO = 127, 128


class _Packed(NamedTuple):
    """A weight in 8 bits, packed for the processor."""

    version: int
    weight: Tensor
    scale_O: Tensor
    zero_O: Tensor


# They live as long as the weights themselves.
_packed: Any = WeakTensorKeyDictionary()


@cache
def cpu_has_int8() -> bool:
    """Whether this processor has int8 instructions (VNNI or AMX) that this torch uses."""
    supported = getattr(torch.cpu, "_is_vnni_supported", None)
    if supported is None or not supported() or not torch.backends.mkldnn.is_available():
        return False
    identity, other = torch.eye(_SMALLEST), torch.arange(float(_SMALLEST)).repeat(_SMALLEST, 1)
    try:
        product = _product(*_rounded(identity, torch.float32), _pack(other), torch.float32)
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.allclose(product, other.T, atol=0.5)


class Int8Linear(nn.Linear):
    """A linear layer that multiplies in 8 bits inside ``int8_matmul``, and as torch does outside it.

    Example:
        >>> if cpu_has_int8():
        ...     layer, input_ND = Int8Linear(256, 256), torch.randn(8, 256)
        ...     with torch.no_grad(), int8_matmul():
        ...         out_ND = layer(input_ND)
        ...     assert 1e-6 < (out_ND - layer(input_ND)).abs().max() < 0.05
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product plus the bias."""
        return linear(input, self.weight, self.bias)


def make_ready(model: nn.Module) -> None:
    """Let a model's linear layers multiply in 8 bits inside ``int8_matmul``."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Int8Linear


@contextmanager
def int8_matmul() -> Iterator[None]:
    """Let this thread's linear layers without gradients multiply in 8 bits until the block ends."""
    token = _inputs.set(_Inputs())
    try:
        yield
    finally:
        _inputs.reset(token)


def linear(input_: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute ``torch.nn.functional.linear``; inside ``int8_matmul`` in 8 bits, where that is faster."""
    inputs = _inputs.get()
    if inputs is None or not _fits(input_, weight_OI):
        return functional.linear(input_, weight_OI, bias_O)
    out_dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else input_.dtype
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    out_NO = _product(*inputs.rounded(input_, dtype), _kept(weight_OI), dtype)
    if bias_O is not None:
        out_NO += bias_O
    return out_NO.to(out_dtype).view(*input_.shape[:-1], len(weight_OI))


class _Inputs:
    """Caches the last rounded input, which queries, keys and values share."""

    def __init__(self) -> None:
        self._last: Tensor | None = None
        self._state: tuple[int, torch.dtype] = (0, torch.float32)
        self._rounded: Any = None

    def rounded(self, input_: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what ``_rounded`` does."""
        state = (times_written(input_), dtype)
        if self._last is not input_ or self._state != state:
            self._last, self._state = input_, state
            self._rounded = _rounded(input_.reshape(-1, input_.shape[-1]), dtype)
        rounded: tuple[Tensor, Tensor] = self._rounded
        return rounded


_inputs: ContextVar[_Inputs | None] = ContextVar("gerund_int8_inputs", default=None)


def _fits(input_: Tensor, weight_OI: Tensor) -> bool:
    return (
        weight_OI.device.type == "cpu"
        and weight_OI.is_floating_point()
        and input_.is_floating_point()
        and min(weight_OI.shape) >= _SMALLEST
        and weight_OI.shape[1] < _LARGEST
        and input_.numel() > 0
        and not torch.is_grad_enabled()
    )


def _rounded(input_NI: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return an input in 8 bits, and the scales ``(N, 1)`` of its rows in ``dtype``."""
    # A copy, since it is modified. float32 to 16 bits to 8 is torch's fastest conversion.
    wide_NI = input_NI.to(torch.float32, copy=True)
    largest_N1 = torch.maximum(wide_NI.amax(1, keepdim=True), -wide_NI.amin(1, keepdim=True))
    scale_N1 = (largest_N1.clamp_min_(1e-30) / _LEVELS).to(dtype)
    wide_NI.mul_(1 / scale_N1.float()).add_(_ZERO + 0.5)
    return wide_NI.to(torch.int16).to(torch.uint8), scale_N1


def _product(rounded_NI: Tensor, scale_N1: Tensor, packed: _Packed, dtype: torch.dtype) -> Tensor:
    out_NO: Tensor = torch.ops.onednn.qlinear_pointwise(
        rounded_NI, 1.0, _ZERO, packed.weight, packed.scale_O, packed.zero_O, None, 1.0, 0, dtype, "none", [], ""
    )
    return out_NO.mul_(scale_N1)


def _kept(weight_OI: Tensor) -> _Packed:
    """Return a weight in 8 bits, packed again after a change."""
    version = times_written(weight_OI)
    packed: _Packed | None = _packed.get(weight_OI)
    if packed is None or packed.version != version:
        # Two threads may both pack it; either result is right, and the last one stays.
        packed = _packed[weight_OI] = _pack(weight_OI.detach(), version)
    return packed


def _pack(weight_OI: Tensor, version: int = 0) -> _Packed:
    wide_OI = weight_OI.float()
    scale_O = wide_OI.abs().amax(1).clamp_min_(1e-30) / _LEVELS
    rounded_OI = (wide_OI / scale_O[:, None]).round_().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(rounded_OI, None)
    return _Packed(version, packed, scale_O, torch.zeros(len(scale_O), dtype=torch.int64))
