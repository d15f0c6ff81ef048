"""PEFT adapters that are active only inside a ``with`` block, in one thread.

PEFT's own switches belong to the model: a thread that encodes would switch the adapter on for another that generates.
Here the switch is a context variable, which each thread has for itself; outside the block the results are bit-identical
to those of the model without adapters. ``Adapters`` has the adapter of each job (encoding, infilling, scoring), and
``stacked`` combines several LoRA adapters into one, whose rank is the sum of theirs.

PEFT adds two matmuls, two conversions and a dropout to every layer in which an adapter is active: in a small model, or
at a high rank, as much work again. Here a layer without gradients uses one of two ways, chosen by size:

- ``merged``: one matmul with a copy of the weight that includes the adapter. The copy is made when it is first needed;
  the weight itself stays unchanged for threads that generate. The copies take as much memory as the weights they
  replace.
- ``low-rank``: the weight's matmul, plus the two small ones in the layer's dtype. No extra memory; at the usual rank of
  16 and 2048 dimensions per state it costs 2% more.

With gradients, and for other kinds of adapters, PEFT computes.
"""

import copy
import hashlib
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from gerund.attention.layouts import is_one_graph
from gerund.checks import read_json, write_json
from gerund.errors import ConfigError, DataError, ModelError
from gerund.jobs.disk_cache import DiskCache, user_cache
from gerund.models.architectures import NoHead
from gerund.models.fingerprint import adapter_hash, times_written
from gerund.models.folder_files import demand_readable
from gerund.models.heads import read_tensors
from gerund.models.sources import ADAPTER_FILES, PEFT_CONFIG, PEFT_WEIGHTS
from gerund.settings.encoder import JOBS, Job

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
        return functional.linear(input_, _cached(layer, name, _merged_weight), base.bias)
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


def _merged_weight(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Return the weight with the adapter in it, added up in float32."""
    change_OI = up_OR.float() @ down_RI.float()
    return torch.add(weight_OI.float(), change_OI, alpha=scale).to(weight_OI.dtype)


def _factors(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return both small matrices in the type that the layer computes in, the scale in the second."""
    return down_RI.to(weight_OI.dtype), (up_OR.float() * scale).to(weight_OI.dtype)


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


_PREFIX, _FULL = "base_model.model.", "base_model.model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
# Settings under which an adapter is more than a product of two matrices.
_MORE = ("use_dora", "modules_to_save", "trainable_token_indices", "layer_replication", "lora_bias", "fan_in_fan_out")


def stacked(folders: Sequence[Path]) -> Path:
    """Return a PEFT folder that does what several LoRA adapters do together; it is kept in the user's cache.

    Raises:
        ModelError: one of them is no plain LoRA adapter.
    """
    if len(folders) == 1:
        return folders[0]
    key = hashlib.blake2b("".join(map(adapter_hash, folders)).encode(), digest_size=16).hexdigest()
    cache = DiskCache(user_cache("adapters"))
    cached = cache.get(key)
    if cached is None:
        cache.put(key, lambda folder: _write(folders, folder))
        cached = cache.get(key)
    if cached is None:
        raise ModelError(f"the adapters {' and '.join(map(str, folders))} are too large for the cache {cache.folder}")
    return cached


def _write(folders: Sequence[Path], target: Path) -> None:
    """Put the matrices of all adapters side by side, with the factor of each in its second one."""
    parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for folder in folders:
        config = read_json(folder / PEFT_CONFIG)
        _demand_plain(folder, config)
        weights = {key.replace(_FULL, _PREFIX, 1): value for key, value in read_tensors(folder / PEFT_WEIGHTS).items()}
        modules = sorted(key.removesuffix(_DOWN) for key in weights if key.endswith(_DOWN))
        if len(weights) != 2 * len(modules) or any(f"{name}{_UP}" not in weights for name in modules):
            raise ModelError(f"{folder} has weights that are not those of a plain LoRA adapter")
        for name in modules:
            down, up = weights[f"{name}{_DOWN}"].float(), weights[f"{name}{_UP}"].float()
            parts.setdefault(name, []).append((down, up * _factor(config, name, len(down))))
    tensors = {}
    for name, pairs in parts.items():
        tensors[f"{name}{_DOWN}"] = torch.cat([down for down, _ in pairs]).contiguous()
        tensors[f"{name}{_UP}"] = torch.cat([up for _, up in pairs], dim=1).contiguous()
    names = [name.removeprefix(_PREFIX) for name in parts]
    ranks = {name: len(tensors[f"{_PREFIX}{name}{_DOWN}"]) for name in names}
    rank = max(ranks.values())
    others = {name: other_rank for name, other_rank in ranks.items() if other_rank != rank}
    settings = {"peft_type": "LORA", "task_type": "FEATURE_EXTRACTION", "r": rank, "lora_alpha": rank}
    settings |= {"target_modules": names, "rank_pattern": others, "alpha_pattern": others, "bias": "none"}
    write_json(target / PEFT_CONFIG, settings)
    save_file(tensors, target / PEFT_WEIGHTS)


def _demand_plain(folder: Path, config: Any) -> None:
    plain = isinstance(config, dict) and config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    if not plain or any(config.get(name) for name in _MORE) or config.get("megatron_config"):
        raise ModelError(
            f"{folder} is no plain LoRA adapter, and only those are used several at a time; merge it first"
        )


def _factor(config: dict[str, Any], name: str, rank: int) -> float:
    """Return by what PEFT multiplies the product of the matrices of a module."""
    patterns = (config.get("alpha_pattern") or {}).items()
    # As PEFT tells which pattern a module's name ends in.
    alpha = next((value for key, value in patterns if name == key or name.endswith(f".{key}")), config["lora_alpha"])
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)
