"""A second device on a machine that has one: tensors with numbers that say they lie elsewhere, and mind it.

Without a GPU nothing tells a tensor that was made on the wrong device. Here ``meta`` plays the GPU. In the block of
:class:`SecondDevice`, what is made on ``meta`` or moved there has its numbers, kept out of sight; an operation that
meets tensors of both devices raises, as CUDA does, and so does one that takes a random generator of the other. What
CUDA allows is allowed: to copy, single numbers from the CPU, and indices from there.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_aten = torch.ops.aten
# Moves from one device to the other, which is their purpose.
_MOVES = {_aten._to_copy.default, _aten.copy_.default, _aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_INDEXES = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}


class WrongDeviceError(RuntimeError):
    """Tensors of both devices met in one operation."""


class Elsewhere(torch.Tensor):
    """A tensor that says it lies on the second device; its numbers lie in ``inner``."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return f"Elsewhere({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Lets tensors of Python's numbers be made on the CPU and moved: on ``meta`` torch itself would forget them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            found = tuple(_place(place) for place in places)
            return func(args[0], found, *args[2:])
        if func is torch.Tensor.tolist and isinstance(args[0], Elsewhere):
            return args[0].cpu().tolist()
        if func is torch.Tensor.new_tensor:
            like = {"dtype": args[0].dtype, **kwargs, "device": "cpu"}
            return torch.tensor(*args[1:], **like).to(kwargs.get("device", args[0].device))
        return func(*args, **kwargs)


class SecondDevice(TorchDispatchMode):
    """The block in which there is a second device."""

    def __init__(self):
        super().__init__()
        self.operations = 0
        self._numbers = _Numbers()

    def __enter__(self):
        # There is no autocast for it.
        self._autocast = torch.autocast
        torch.autocast = lambda device, *args, **kwargs: self._autocast(
            "cpu" if device == DEVICE.type else device, *args, **kwargs
        )
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *stop):
        super().__exit__(*stop)
        self._numbers.__exit__(*stop)
        torch.autocast = self._autocast

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = run(func, args, kwargs or {})
        self.operations += any(isinstance(one, Elsewhere) for one in tree_flatten(found)[0])
        return found


def run(func, args, kwargs):
    """Compute on the CPU, and return what is to lie elsewhere as such."""
    given = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
    elsewhere = any(isinstance(one, Elsewhere) for one in given)
    asked = kwargs.get("device")
    target = elsewhere if asked is None else torch.device(asked).type == DEVICE.type
    _demand_one_device(func, args, given, elsewhere)
    generator = kwargs.get("generator")
    if generator is not None and target:
        raise WrongDeviceError(f"{func} takes a generator of the CPU for a tensor of the second device")
    if func is _aten.copy_.default:
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    own = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    found = func(*tree_map(_inner, args), **tree_map(_inner, own))
    if not target:
        return found
    if func in (_aten.lift_fresh.default,) and not elsewhere:
        return found
    wrapped = tree_map(lambda one: Elsewhere(one) if isinstance(one, torch.Tensor) else one, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped) if elsewhere and asked is None else wrapped


def _demand_one_device(func, args, given, elsewhere):
    if not elsewhere or func in _MOVES:
        return
    here = [one for one in given if not isinstance(one, Elsewhere) and one.dim() > 0]
    if func in _INDEXES and isinstance(args[0], Elsewhere):
        values = args[2] if len(args) > 2 else args[0]
        here = [] if isinstance(values, Elsewhere) or values.dim() == 0 else [values]
    if here:
        raise WrongDeviceError(f"{func} meets tensors of two devices: {[tuple(one.shape) for one in given]}")


def _place(place):
    """Return an index by a list as a tensor, without numbers too."""
    return torch.tensor(place, dtype=None if place else torch.long) if isinstance(place, list) else place


def _inner(one):
    return one.inner if isinstance(one, Elsewhere) else one
