"""PEFT adapters that are active only inside a ``with`` block, in one thread.

PEFT's own switches belong to the model: a thread that encodes would switch the adapter on for another that generates.
Here the switch is a context variable, which each thread has for itself; outside the block the results are bit-identical
to those of the model without adapters. ``Adapters`` has the adapter of each job (encoding, infilling, scoring).
"""

import copy
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.attention.layouts import is_one_graph
from gerund.errors import ConfigError, DataError, ModelError
from gerund.models.architectures import NoHead
from gerund.models.fast_lora import AdapterComputation, choose_computation, fast_forward
from gerund.models.fingerprint import adapter_hash
from gerund.models.folder_files import demand_readable
from gerund.models.peft_folders import ADAPTER_FILES, PEFT_WEIGHTS
from gerund.settings.encoder import JOBS, Job

# The folder of the first job's adapter in a model's folder; another job's is called after its job too.
_PLACE = "adapter"
_CHECK_LENGTH = 8
_MERGED = "merged"

_active: ContextVar[str | None] = ContextVar("gerund_adapter_active", default=None)
_gated: dict[type[nn.Module], type[nn.Module]] = {}


@contextmanager
def active_adapter(name: str | None) -> Iterator[None]:
    """Let the adapter of this name take part in this thread until the block ends; with None none does."""
    token = _active.set(name)
    try:
        yield
    finally:
        _active.reset(token)


def active_name() -> str | None:
    """Return the name of the adapter that takes part in this thread; None without one."""
    return _active.get()


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no PEFT adapter."""
    config, weights = ADAPTER_FILES
    if not (folder / config).is_file():
        inside = folder / "adapter"
        hint = f"; did you mean {inside}?" if (inside / config).is_file() else ""
        raise DataError(f"{folder} is not an adapter folder: it has no {config}{hint}")
    if not (folder / weights).is_file():
        raise DataError(f"{folder} has no {weights}")
    for file in ADAPTER_FILES:
        demand_readable(folder / file, folder)


def load_adapters(model: PreTrainedModel, folders: Mapping[str, Path]) -> None:
    """Put PEFT adapters into ``model``, each inactive outside of ``active_adapter`` with its name."""
    for path in folders.values():
        check_folder(path)
    if is_one_graph(model):
        return  # its network was opened with them
    if _gated_layers(model):
        raise ConfigError("this model carries an adapter already; load the model again for another one")
    before = _logits(model)
    training = model.training
    gradients = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    _inject(model, folders)
    model.train(training)
    for parameter in model.parameters():
        # PEFT freezes the model's weights, and torch's matmul of frozen weights rounds differently.
        parameter.requires_grad_(gradients.get(id(parameter), False))
    _gate_layers(model)
    if not torch.equal(before, _logits(model)):
        raise ModelError(
            f"the adapter in {' or '.join(map(str, folders.values()))} changes the model even while it is inactive (it "
            "replaces biases or initial weights), so generating would no longer be the base model's; merge it "
            "into the weights instead"
        )


def base_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the model's own weights by their names, without adapters."""
    return _state(model, {name: _own_part(layer) for name, layer in _gated_layers(model).items()})


def own_module(module: nn.Module) -> nn.Module:
    """Return a module without adapters."""
    return _own_part(module) if type(module) in _gated.values() else module


def count_parameters(model: PreTrainedModel) -> int:
    """Return the number of the model's parameters: tied ones once, without adapters.

    >>> count_parameters(gerund.load().model) == count_parameters(gerund.load(adapter="none").model)
    True
    """
    return sum({weight.data_ptr(): weight.numel() for weight in base_state(model).values()}.values())


@torch.no_grad()
def merged_state(model: PreTrainedModel, adapter: str | None) -> dict[str, Tensor]:
    """Return the weights with one adapter merged in, by the model's own names; the model is unchanged.

    A weight that the adapter changes is no longer shared with another that was tied to it.
    """
    return _state(model, {name: _merged(layer, adapter) for name, layer in _gated_layers(model).items()})


def merging_unties(model: PreTrainedModel, adapter: str | None) -> bool:
    """Whether merging changes only one of two tied weights, so that they are no longer tied."""
    if not getattr(model.config.get_text_config(decoder=True), "tie_word_embeddings", False):
        return False
    ends: tuple[Any, ...] = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(type(end) in _gated.values() and adapter in end.gerund_inside for end in ends)


def _inject(model: PreTrainedModel, folders: Mapping[str, Path]) -> None:
    from peft import PeftConfig, PeftModel

    wrapped: dict[nn.Module, PeftModel] = {}
    for name, path in folders.items():
        part = _adapted_part(model, path)
        where = str(path)
        try:
            # PEFT initializes the weights at random before it reads them.
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")  # what PEFT warns of is checked below
                if part not in wrapped:
                    config = PeftConfig.from_pretrained(where)
                    config.inference_mode = True
                    wrapped[part] = PeftModel(part, config, name)
                info = wrapped[part].load_adapter(where, name, torch_device="cpu")
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ModelError(f"the adapter in {path} does not fit this model: {reason}") from error
        if wrapped[part].peft_config[name].is_prompt_learning:
            raise ModelError(f"the adapter in {path} changes no layer (prompt tuning and the like are not supported)")
        for keys, what in ((info.unexpected_keys, "has weights for"), (info.missing_keys, "lacks weights for")):
            if keys:
                raise ModelError(f"the adapter in {path} is not for this model: it {what} {sorted(keys)[0]}")
    _move_to_base(model)


def _adapted_part(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the part of a model that an adapter was trained on: all of it, or the body that embedders are made of."""
    try:
        with safe_open(str(folder / PEFT_WEIGHTS), framework="pt") as file:
            keys = list(file.keys())
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise ModelError(f"the adapter in {folder} cannot be read: {' '.join(str(error).split())[:200]}") from error
    body: PreTrainedModel = model.base_model
    inside = {name for name, _ in body.named_modules()}
    layers = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in keys}
    return body if body is not model and keys and layers <= inside else model


def merge_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Make an adapter part of a model's weights for good.

    Raises:
        ModelError: it does not fit the model.
    """
    if _gated_layers(model):
        raise ConfigError("this model carries an adapter already; load the model again for another one")
    check_folder(folder)
    _inject(model, {_MERGED: folder})
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, AuxiliaryTrainingWrapper):
            raise ModelError(f"the adapter in {folder} trains {name} in full; merge it with PEFT, and open that")
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.eval()


def _move_to_base(model: PreTrainedModel) -> None:
    """Move an adapter's weights to the device of their layer, which PEFT does for some devices only."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            device = next(layer.get_base_layer().parameters()).device
            if any(weight.device != device for weight in layer.parameters()):
                layer.to(device)


def _gate_layers(model: PreTrainedModel) -> None:
    """Put the context variable's switch into every layer that an adapter changes."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    changed: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
            raise ModelError(f"the adapter trains single tokens of {name}, which is not supported")
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
            module.gerund_inside = frozenset(_names(module))  # used in every pass
            module.__class__ = _gate(type(module))
            changed.append(module)
    choose_computation(changed, {id(module): module.gerund_inside for module in changed})


def adapter_computation(model: PreTrainedModel) -> AdapterComputation | None:
    """Return how a model's adapters are computed; None without any."""
    changed = [module for module in model.modules() if type(module) in _gated.values()]
    return choose_computation(changed, {id(module): module.gerund_inside for module in changed}) if changed else None


def _gated_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the outermost modules that adapters put in, by name."""
    kinds = set(_gated.values())
    outermost: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if type(module) in kinds and not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost[name] = module
    return outermost


def _gate(kind: type[nn.Module]) -> type[nn.Module]:
    """Return ``kind`` with PEFT's switch replaced by the context variable."""
    if kind not in _gated:
        switches = {"disable_adapters": property(_all_inactive), "active_adapters": property(_those_active)}
        switches["active_adapter"] = switches["active_adapters"]

        def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
            """Compute quickly what PEFT would, where that is possible."""
            name = _active.get()
            if name is not None and layer.gerund_fast.get(name) and len(args) == 1 and not kwargs:
                output = fast_forward(layer, name, args[0])
                if output is not None:
                    return output
            return kind.forward(layer, *args, **kwargs)

        members = {**switches, "__module__": kind.__module__, "forward": forward}
        _gated[kind] = type(kind.__name__, (kind,), members)
    return _gated[kind]


def _all_inactive(layer: Any) -> bool:
    # A layer that only other adapters change counts as unmodified.
    name = _active.get()
    return name is None or name not in layer.gerund_inside


def _those_active(layer: Any) -> list[str]:
    name = _active.get()
    return [name] if name is not None and name in layer.gerund_inside else []


def _names(layer: Any) -> Iterable[str]:
    """Return the names of the adapters that change this layer."""
    if "modules_to_save" in layer._modules:
        return list(layer.modules_to_save)
    names: set[str] = layer._get_available_adapters()
    return names


def _own_part(layer: Any) -> nn.Module:
    """Return the module that stood where adapters put ``layer``."""
    part: nn.Module = layer.base_layer if "base_layer" in layer._modules else layer.original_module
    # Experts in several tensors are wrapped once for each.
    return _own_part(part) if type(part) in _gated.values() else part


def _merged(layer: Any, adapter: str | None) -> nn.Module:
    """Return a copy of the module that stood here, with the adapter in its weights."""
    if adapter is None or adapter not in layer.gerund_inside:
        return _own_part(layer)
    if "modules_to_save" in layer._modules:
        kept: nn.Module = layer.modules_to_save[adapter]
        return kept
    single = copy.deepcopy(layer)
    try:
        with active_adapter(adapter):
            wrapped = [part for part in single.modules() if type(part) in _gated.values()]
            for part in reversed(wrapped):  # the innermost first
                part.merge(safe_merge=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ModelError(f"this adapter cannot be merged into the weights: {reason}") from error
    return _own_part(single)


def _state(model: PreTrainedModel, parts: dict[str, nn.Module]) -> dict[str, Tensor]:
    """Return the state dict with the modules named in ``parts`` replaced."""
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        inside = next((prefix for prefix in parts if name.startswith(f"{prefix}.")), None)
        if inside is None:
            state[name] = tensor
        elif not any(key.startswith(f"{inside}.") for key in state):
            state.update({f"{inside}.{key}": value for key, value in parts[inside].state_dict().items()})
    return state


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    """Return the logits of a fixed short text, to check that the model is unchanged.

    Without an output head, return the last states.
    """
    embeddings = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, embeddings.shape[0], (1, _CHECK_LENGTH), generator=generator)
    training = model.training
    model.eval()
    ids = ids.to(embeddings.device)
    if isinstance(model.get_output_embeddings(), NoHead):
        logits: Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    else:
        logits = model(ids, use_cache=False).logits
    model.train(training)
    return logits


class Adapters:
    """A model's PEFT folders by job; a job without one uses the base model."""

    def __init__(self, folders: Mapping[Job, Path] | None = None) -> None:
        self.folders = dict(folders or {})
        for folder in set(self.folders.values()):
            check_folder(folder)
        # Hashed now, since the files may change later.
        self._hashes = {job: adapter_hash(folder) for job, folder in self.folders.items()}

    @classmethod
    def shared(cls, folder: Path) -> "Adapters":
        """Return one adapter that is active for every job."""
        return cls(dict.fromkeys(JOBS, folder))

    def name(self, job: Job) -> str | None:
        """Return the adapter's name in the model: that of its first job; None without one."""
        folder = self.folders.get(job)
        return None if folder is None else next(first for first in JOBS if self.folders.get(first) == folder)

    def hash(self, job: Job) -> str:
        """Return the hash of this job's adapter; the empty string without one."""
        return self._hashes.get(job, "")

    def without(self, job: Job) -> "Adapters":
        """Return the adapters of the other jobs."""
        return Adapters({other: folder for other, folder in self.folders.items() if other != job})

    @property
    def by_name(self) -> dict[str, Path]:
        """The folders by name; a shared one is listed once."""
        return {name: self.folders[job] for job in JOBS if (name := self.name(job)) == job}

    def copy_into(self, folder: Path) -> dict[Job, str | None]:
        """Copy them into a model's folder; return the subfolder of each job."""
        places: dict[str, str] = {}
        for name, source in self.by_name.items():
            places[name] = _PLACE if name == JOBS[0] else f"{_PLACE}-{name}"
            (folder / places[name]).mkdir()
            for file in ADAPTER_FILES:
                shutil.copyfile(source / file, folder / places[name] / file)
        return {job: places.get(self.name(job) or "") for job in JOBS}
