"""Adapters that are active only while encoding.

PEFT's own switches belong to the model: one thread that encodes would switch the adapter on under another
that generates. Here the switch is a context variable, which every thread has for itself; outside the block
the model's results are those of the model without the adapter, bit for bit.

Knows: PEFT. Does not know: plans, texts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from gerund.errors import DataError, ModelError

_active: ContextVar[bool] = ContextVar("gerund_adapter_active", default=False)
_gated: dict[type, type] = {}


@contextmanager
def adapter_on() -> Iterator[None]:
    """Let the adapter take part in this thread until the block ends."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> None:
    """Put the PEFT adapter in ``folder`` into ``model``, asleep outside ``adapter_on()``.

    Raises:
        DataError: the folder holds no adapter.
        ModelError: it is not for this model, or of a kind that changes more than single layers.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    path = Path(folder)
    if not (path / "adapter_config.json").is_file():
        raise DataError(f"{path} is not an adapter folder: it has no adapter_config.json")
    if not (path / "adapter_model.safetensors").is_file():
        raise DataError(f"{path} has no adapter_model.safetensors")
    training = model.training
    try:
        PeftModel.from_pretrained(model, str(path), is_trainable=False)
    except (ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"the adapter in {path} does not fit this model: {str(error).splitlines()[0]}") from error
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ModelError(f"the adapter in {path} changes no layer (prompt tuning and the like are not supported)")
    for layer in layers:
        layer.__class__ = _gate(type(layer))
    model.train(training)


def _gate(kind: type) -> type:
    """Return ``kind`` with PEFT's switch replaced by the context variable."""
    if kind not in _gated:
        off: Callable[[Any], bool] = lambda self: not _active.get()  # noqa: ARG005, E731
        _gated[kind] = type(kind.__name__, (kind,), {"disable_adapters": property(off), "__module__": kind.__module__})
    return _gated[kind]


def base_state(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's own weights under their own names, whether or not an adapter was put in."""
    tuned = [name for name, module in model.named_modules() if type(module) in _gated.values()]
    state = {}
    for name, tensor in model.state_dict().items():
        layer = next((prefix for prefix in tuned if name.startswith(prefix + ".")), None)
        if layer is None:
            state[name] = tensor
        elif name.startswith(f"{layer}.base_layer."):
            state[f"{layer}.{name[len(layer) + len('.base_layer.') :]}"] = tensor
    return state
