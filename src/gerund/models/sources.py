"""Find a model by folder, GGUF file, short name or hub id; imports no torch, so that typos are reported at once.

A PEFT folder stands for its base model and the task that each adapter was trained for. An adapter of a language model
(``task_type`` ``CAUSAL_LM``) becomes part of the weights. An adapter that was trained to embed is active while the
model encodes, and never while it generates. LLM2Vec publishes two adapters for a model, of which the second was trained
on top of the first; its folder names only the model.
"""

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gerund.checks import place, read_json
from gerund.errors import ConfigError, DataError, ModelError
from gerund.gguf_file import is_gguf
from gerund.models.catalog import NAMED, find_local, gguf_in
from gerund.models.folder_files import cached_folders, demand_readable_files, hub_name
from gerund.models.sentence_transformers_folder import refuse_modules
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import reranker_folder

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


DEFAULT_NAME = "the bundled model"

# How near to the name of the bundled model a slip in it is.
_SLIP = 0.75
# How long the hub has to say anything, and how long a name's look-up may take on top.
_SECONDS = 2.0
_LOOK_UP = 1.0


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a local ``folder``, a ``gguf`` file, or else the hub id ``name``.

    ``adapted`` says which adapters belong to the model in ``folder``, where a PEFT folder was given. For a hub id,
    ``revision`` is the version and ``token`` the access token; None for the hub's defaults.
    """

    name: str
    folder: Path | None
    gguf: Path | None = None
    adapted: AdaptedModel | None = None
    revision: str | None = None
    token: str | bool | None = field(default=None, repr=False)

    @property
    def where(self) -> str:
        """What loaders take: the folder, the file or the hub id."""
        return str(self.folder or self.gguf or self.name)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder or a file on this machine."""
        return self.folder is not None or self.gguf is not None

    @cached_property
    def local_only(self) -> bool:
        """Whether only local files are read: those of a folder, or the cache while the hub doesn't answer."""
        return self.is_local or not hub_answers()

    @property
    def hub_options(self) -> dict[str, Any]:
        """Keywords for the loaders of transformers and the hub."""
        given = {"revision": self.revision, "token": self.token}
        return {
            "local_files_only": self.local_only,
            **{name: value for name, value in given.items() if value is not None},
        }

    @property
    def unreadable(self) -> str:
        """The start of messages about a config that cannot be read."""
        if self.is_local:
            return f"cannot read the config of {self.name}"
        return (
            f"there is no folder, file or short name {self.name!r} (gerund models lists the names), and as a hub id it "
            "cannot be read"
        )

    def demand_reachable(self) -> None:
        """Refuse a hub id whose config is neither in the cache nor to be had."""
        if not self.local_only or self.is_local:
            return
        from huggingface_hub import constants, try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(self.name, "config.json", revision=self.revision), str):
            offline = " (HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else ""
            raise ModelError(f"{self.unreadable}: it is not in the local cache, and the hub cannot be reached{offline}")


SENTENCE_TRANSFORMERS = "st:"
"""Before a folder or a hub id: an encoder that sentence-transformers runs, in an index, a server or an evaluation."""


def find(model: str | Path | None, *, revision: str | None = None, token: str | bool | None = None) -> Source:
    """Tell a folder or a GGUF file from a hub id; None and ``default`` are the bundled model.

    ``ollama:NAME``, ``lmstudio:NAME``, ``llama.cpp:NAME`` and ``hf:NAME`` are GGUF files that those programs have on
    this machine.
    """
    source = _found(model)
    for name, value, kinds in (("revision", revision, (str,)), ("token", token, (str, bool))):
        if value is None:
            continue
        if not isinstance(value, kinds) or value == "":
            raise ConfigError(f"{name} must be a text, not {'an empty one' if value == '' else type(value).__name__}")
        if source.is_local:
            raise ConfigError(f"{name} is only for models on the hub, and {source.name} is on this machine; remove it")
    return replace(source, revision=revision, token=token)


def find_spec(spec: ModelSpec, token: str | bool | None = None) -> Source:
    """Return the source of a spec's model; see ``find``."""
    return find(spec.model, revision=spec.revision, token=token)


def _found(model: str | Path | None) -> Source:
    if model is not None and not isinstance(model, str | Path):
        raise ConfigError(f"a model is given by its name or its folder, not as {model!r}")
    # As a path it may be ./default, which Path writes the same way.
    if model is None or (str(model) == DEFAULT_MODEL and not (isinstance(model, Path) and model.is_dir())):
        folder = Path(str(resources.files("gerund") / "assets" / "default"))
        if not (folder / "config.json").is_file():
            raise ModelError("this installation has no bundled model; name a model")
        return Source(DEFAULT_NAME, folder)
    text = str(model)
    if text.startswith(SENTENCE_TRANSFORMERS):
        raise ModelError(
            f"{text} is an encoder that sentence-transformers runs, for gerund index, eval and serve --encoder; "
            f"without {SENTENCE_TRANSFORMERS} a model is opened here"
        )
    path = place("model", model).expanduser() if text else Path()
    if text and path.is_dir() and is_peft_folder(path):
        return _adapted(text, path)
    if text and path.is_dir():
        file = None if (path / "config.json").is_file() else gguf_in(path)
        return Source(text, None, file) if file is not None else Source(text, _check_folder(path))
    if text and path.exists():
        if not os.access(path, os.R_OK):
            raise ModelError(f"{path} cannot be read: permission denied")
        if not is_gguf(path):
            raise ModelError(f"{path} is not a GGUF file; give a model's folder, or a GGUF file")
        return Source(text, None, path)
    return _by_name(text, is_path=isinstance(model, Path))


def _adapted(name: str, folder: Path) -> Source:
    """Return the source of a PEFT folder, which is opened with the model that it names."""
    model = read_peft_folder(folder)
    return Source(name, _check_folder(model.base), adapted=model)


def _by_name(name: str, *, is_path: bool) -> Source:
    """Return the source of what is no path on this machine: a short name, another program's model or a hub id."""
    if (file := find_local(name)) is not None:
        return Source(name, None, file)
    if name in NAMED and not is_path:
        if not NAMED[name].is_here:
            raise ModelError(f"{name} is not on this machine yet; fetch it with: gerund models get {name}")
        file = gguf_in(NAMED[name].folder)
        return Source(name, None if file else NAMED[name].folder, file)
    if is_path or looks_local(name):
        raise ModelError(
            f"there is no folder or file {name!r}; give a model's folder, a GGUF file, a hub id, or a short name "
            "(gerund models lists them)"
        )
    # No hub model is called so, and without a network it takes long until that is clear.
    if "/" not in name and (near := get_close_matches(name.lower(), [DEFAULT_MODEL, *NAMED], cutoff=_SLIP)):
        raise ModelError(f"there is no model {name!r}; did you mean {near[0]}?")
    if (folder := next(iter(cached_folders(name)), None)) is not None and is_peft_folder(folder):
        return _adapted(name, folder)
    return Source(name, None)


def looks_local(name: str) -> bool:
    """Whether a name can only be a local path, not a hub id."""
    if name.startswith((".", "/", "~")) or not name:
        return True
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def hub_answers() -> bool:
    """Whether the hub answers within a few seconds.

    The hub's own calls retry for half a minute, too long for a cached model or without a network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return False
    heard = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        except Exception:  # whatever is wrong, the hub has not answered
            return
        heard.set()

    # Looking a name up knows no timeout, so it is waited for from outside.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS + _LOOK_UP)
    return heard.is_set()


def _check_folder(path: Path) -> Path:
    """Return a model's folder, or raise ``ModelError`` where it isn't one."""
    demand_readable_files(path)
    is_adapter = (path / PEFT_CONFIG).is_file()
    if not (path / "config.json").is_file():
        refuse_modules(path)
        hint = f"; did you mean {path / 'model'}?" if (path / "model" / "config.json").is_file() else ""
        raise ModelError(f"{path} holds no model: it has no config.json{hint}")
    if is_adapter:
        # transformers would switch it on for good, also while generating.
        raise ModelError(f"{path} holds a model and an adapter; move the adapter into a folder of its own")
    return path


def with_absolute_paths(spec: ModelSpec) -> ModelSpec:
    """Return a spec whose local folders and files have absolute paths."""
    fields = ("model", "adapter", "infill_adapter", "scorer", "sample")
    given = {name: value for name in fields if isinstance(value := getattr(spec, name), str)}
    absolute = {
        name: str(Path(value).absolute())
        for name, value in given.items()
        if value not in (DEFAULT_MODEL, NO_ADAPTER, AUTO_ADAPTER) and Path(value).exists()
    }
    if (reranker := reranker_folder(spec.reranker)) is not None:
        absolute["reranker"] = str(reranker.absolute())
    return spec.model_copy(update=absolute)


PEFT_CONFIG, PEFT_WEIGHTS = ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LLM2VEC_FILE = "llm2vec_config.json"
