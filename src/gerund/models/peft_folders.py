"""PEFT folders opened as models: find the base model, and the task that each adapter was trained for.

An adapter of a language model (``task_type`` ``CAUSAL_LM``) becomes part of the weights. An adapter that was trained to
embed is active while the model encodes, and never while it generates. LLM2Vec publishes two adapters for a model, of
which the second was trained on top of the first; its folder names only the model. Imports no torch.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gerund.checks import read_json
from gerund.errors import DataError, ModelError
from gerund.models.catalog import NAMED
from gerund.models.folder_files import cached_folders, demand_readable_files, hub_name

PEFT_CONFIG, PEFT_WEIGHTS = ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LLM2VEC_FILE = "llm2vec_config.json"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_BASE = "base_model_name_or_path"
_GENERATES, _EMBEDS = "CAUSAL_LM", "FEATURE_EXTRACTION"
# The adapter of LLM2Vec's second training was trained on the one whose name lacks this.
_SECOND = re.compile(r"-(supervised|unsup-simcse)$")
_MOST_NESTED = 4
# The names of weights of an adapter that was trained on a model with its head.
_IN_MODEL = re.compile(r"base_model\.model\.(model|transformer|gpt_neox|lm_head)\b")


@dataclass(frozen=True)
class AdaptedModel:
    """A model with adapters.

    Attributes:
        base: the folder of the model that they were trained on.
        base_name: what the innermost adapter calls it.
        merged: adapters that become part of the weights, in this order.
        encoding: adapters that are active together while the model encodes.
    """

    base: Path
    base_name: str
    merged: tuple[Path, ...] = ()
    encoding: tuple[Path, ...] = ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """All adapters, the outermost first."""
        return (*reversed(self.encoding), *reversed(self.merged))

    def holding(self, *names: str) -> Path:
        """Return the outermost folder with one of these files; the model's where no adapter has any."""
        holders = (folder for folder in self.folders if any((folder / name).is_file() for name in names))
        return next(holders, self.base)


def is_peft_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no weights of a model."""
    return (folder / PEFT_CONFIG).is_file() and not any((folder / name).is_file() for name in _WEIGHTS)


def is_llm2vec(folder: Path) -> bool:
    """Whether a folder is one of LLM2Vec, by its settings file or its name."""
    return (folder / LLM2VEC_FILE).is_file() or "llm2vec" in hub_name(folder).lower()


def read_peft_folder(folder: Path, depth: int = 0) -> AdaptedModel:
    """Return the model with the adapters that a PEFT folder stands for.

    Raises:
        ModelError: its base is not on this machine, or it is for something else than a language model.
        DataError: its files are broken.
    """
    demand_readable_files(folder)
    config = read_json(folder / PEFT_CONFIG)
    name = config.get(_BASE) if isinstance(config, dict) else None
    if not isinstance(name, str) or not name:
        raise ModelError(
            f"{folder} holds an adapter, and its {PEFT_CONFIG} names no model; give its base model, and this folder as "
            "the adapter"
        )
    if not (folder / PEFT_WEIGHTS).is_file():
        raise DataError(f"{folder} has no {PEFT_WEIGHTS}")
    if is_llm2vec(folder) and (first := _SECOND.sub("", hub_name(folder))) != hub_name(folder):
        name = first
    base = at_hand(name, folder)
    if base is None:
        raise ModelError(
            f"{folder} is an adapter for {name}, which is not on this machine; fetch it (hf download {name}), or give "
            "its folder as the model and this one as the adapter"
        )
    encodes = _is_for_encoding(folder, config)
    if not is_peft_folder(base):
        model = AdaptedModel(base, name)
    elif depth < _MOST_NESTED:
        model = read_peft_folder(base, depth + 1)
    else:
        raise ModelError(f"{folder} is an adapter for an adapter, more than {_MOST_NESTED} deep")
    if encodes:
        return replace(model, encoding=(*model.encoding, folder))
    if model.encoding:
        raise ModelError(
            f"{folder} is an adapter to generate with, for {base}, an adapter to encode with; merge one of them into "
            "the weights first"
        )
    return replace(model, merged=(*model.merged, folder))


def at_hand(name: str, folder: Path) -> Path | None:
    """Return the folder of a model that an adapter names: a path, next to the adapter, or in a cache; None without."""
    for path in _candidates(name, folder):
        if (path / "config.json").is_file() or is_peft_folder(path):
            return path
    return None


def _candidates(name: str, folder: Path) -> Iterator[Path]:
    if "\0" in name:
        return
    yield Path(name).expanduser()
    yield folder / name
    yield folder.resolve().parent / Path(name).name
    yield from (model.folder for model in NAMED.values() if model.hub is not None and model.hub.repository == name)
    yield from cached_folders(name)


def _is_for_encoding(folder: Path, config: dict[str, Any]) -> bool:
    """Whether an adapter was trained to embed, rather than to generate."""
    task = config.get("task_type")
    if task not in (_GENERATES, _EMBEDS, None):
        raise ModelError(
            f"{folder / PEFT_CONFIG} says task_type {task}, which is not to generate or to embed; merge the adapter "
            "into its model with PEFT (merge_and_unload), and open that"
        )
    return task == _EMBEDS or (task is None and _is_of_body(folder))


def _is_of_body(folder: Path) -> bool:
    """Whether an adapter was trained on a model without its head, which embedders are."""
    try:
        with safe_open(str(folder / PEFT_WEIGHTS), framework="numpy") as file:
            keys = list(file.keys())
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise DataError(f"{folder / PEFT_WEIGHTS} cannot be read: {' '.join(str(error).split())}") from error
    return bool(keys) and not any(map(_IN_MODEL.match, keys))
