"""Sessions in folders: keys and values as safetensors in the model's own type, and beside them what they belong to.

::

    FOLDER/
        session.json           format, weights, type, text, token ids, a hash of the other file
        session.safetensors    keys and values of each layer, logits of what comes next

Nothing is taken on trust: another model's folder, one of another type and one with a single wrong bit are refused.

Knows: files, caches of attention layers. Does not know: how a text is read or continued.
"""

import hashlib
import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from gerund.checks import place
from gerund.errors import ConfigError, DataError, FingerprintError, ResourceError

SETTINGS, TENSORS = "session.json", "session.safetensors"
FORMAT = 1
_LOGITS = "logits"


class ReadingModel(Protocol):
    """A model that reads a text once; a ``LanguageModel``."""

    @property
    def model(self) -> PreTrainedModel:
        """The language model."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Its tokenizer."""

    @property
    def weights_hash(self) -> str:
        """Hash of its weights."""

    @property
    def name(self) -> str:
        """What messages call it."""


@dataclass(frozen=True)
class Kept:
    """What is kept of a text that was read.

    Attributes:
        text: the text.
        token_ids: its token ids.
        cache: keys and values.
        logits_BV: logits ``(1, V)`` of what comes next.
        weights: returns the hash of the weights that read it.
        model: the model.
    """

    text: str
    token_ids: list[int]
    cache: Cache
    logits_BV: Tensor
    weights: Callable[[], str]
    model: PreTrainedModel

    @property
    def n_bytes(self) -> int:
        """What its tensors take."""
        return sum(one.numel() * one.element_size() for one in _tensors(self.cache, self.logits_BV).values())


def written_by(weights: str, model: PreTrainedModel) -> str:
    """Return what keys and values depend on beside the token ids: the weights, the type and how attention is computed.

    Args:
        weights: the weights' hash.
        model: the model.
    """
    parts = [weights, str(model.dtype), str(model.config._attn_implementation), type(model).__name__]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def cache_key(lm: ReadingModel, *ids: list[int]) -> str:
    """Return the key under which a cache has what a model read of these token ids.

    Args:
        lm: the model.
        ids: what stands before what is kept, where something does, and what is kept.
    """
    whole = " ".join([written_by(lm.weights_hash, lm.model), *map(str, ids)])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def save_kept(kept: Kept, folder: Path) -> None:
    """Write a session's files into a folder that is there; see ``Session.save``."""
    from safetensors.torch import save_file

    tensors = {name: one.detach().cpu().contiguous() for name, one in _tensors(kept.cache, kept.logits_BV).items()}
    save_file(tensors, folder / TENSORS)
    said = {
        "format": FORMAT,
        "written_by": written_by(kept.weights(), kept.model),
        "model": type(kept.model).__name__,
        "dtype": str(kept.model.dtype).removeprefix("torch."),
        "digest": _digest(folder / TENSORS),
        "lengths": [int(layer.get_seq_length()) for layer in kept.cache.layers],
        "text": kept.text,
        "token_ids": kept.token_ids,
    }
    (folder / SETTINGS).write_text(json.dumps({**said, "check": _check(said)}), encoding="utf-8")


def load_kept(folder: str | Path, lm: ReadingModel) -> Kept:
    """Read a session's folder; see ``Session.load``.

    Raises:
        FingerprintError: it was written by other weights, or in another type.
        DataError: it is damaged, or something else.
    """
    where = place("the folder of a session", folder)
    said = _settings(where)
    model = lm.model
    if said["written_by"] != written_by(lm.weights_hash, model):
        raise FingerprintError(
            f"{where} was written by another model ({said['model']}, {said['dtype']}) than {lm.name} "
            f"({type(model).__name__}, {str(model.dtype).removeprefix('torch.')}); read the text anew"
        )
    try:
        if _digest(where / TENSORS) != said["digest"]:
            raise DataError(f"{where} is damaged: {TENSORS} is not what was written; read the text anew")
        from safetensors.torch import load_file

        tensors = load_file(where / TENSORS, device=str(model.device))
        cache = _cache(model, tensors, said["lengths"])
    except OSError as error:
        raise DataError(f"{where} cannot be read ({error.strerror or error}); read the text anew") from error
    except (KeyError, ValueError, RuntimeError, IndexError) as error:
        raise DataError(f"{where} is damaged ({error}); read the text anew") from error
    return Kept(said["text"], list(said["token_ids"]), cache, tensors[_LOGITS], lambda: lm.weights_hash, model)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        check = said.pop("check")
        kinds: dict[str, type] = dict.fromkeys(("written_by", "model", "dtype", "digest", "text"), str)
        kinds |= {"token_ids": list, "lengths": list}
        if said["format"] != FORMAT or not all(isinstance(said[name], kind) for name, kind in kinds.items()):
            raise DataError(f"{folder} is no session of this version of gerund; read the text anew")
        if check != _check(said):
            raise ValueError("it is not what was written")
    except OSError as error:
        raise DataError(f"{folder} holds no session ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{folder} is damaged: {SETTINGS} cannot be read; read the text anew") from error
    return dict(said)


def _tensors(cache: Cache, logits_BV: Tensor) -> dict[str, Tensor]:
    """Return keys and values by layer, and the logits.

    Raises:
        ConfigError: a layer keeps something else.
    """
    refuse_other_states(cache)
    found = {_LOGITS: logits_BV}
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:  # layers that share another one's keys have none
            found |= {f"{number}.keys": layer.keys, f"{number}.values": layer.values}
    return found


def refuse_other_states(cache: Cache) -> None:
    """Refuse what keeps more than keys and values, such as the states of recurrent layers.

    Those of some architectures are read on from by one token alone, and a longer text would be read as if nothing stood
    before it.

    Raises:
        ConfigError: a layer does.
    """
    for layer in getattr(cache, "layers", [None]):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ConfigError(
                f"this architecture keeps more than keys and values ({type(layer).__name__}): its sessions are "
                "continued, but neither saved nor read on from"
            )


def _cache(model: PreTrainedModel, tensors: Mapping[str, Tensor], lengths: list[int]) -> Cache:
    """Return the cache that was written."""
    cache = DynamicCache(config=model.config)
    if len(cache.layers) != len(lengths):
        raise ValueError(f"it has {len(lengths)} layers and the model {len(cache.layers)}")
    for number, (layer, length) in enumerate(zip(cache.layers, lengths, strict=True)):
        if f"{number}.keys" not in tensors:
            continue
        keys, values = tensors[f"{number}.keys"], tensors[f"{number}.values"]
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = int(length)
    return cache


def _check(said: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(dict(said), sort_keys=True).encode(), digest_size=16).hexdigest()


def _digest(path: Path) -> str:
    whole = hashlib.sha256()  # for which processors have instructions
    try:
        with path.open("rb") as file:
            if path.stat().st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    whole.update(content)
    except MemoryError as error:
        raise ResourceError(f"{path} does not fit into memory") from error
    return whole.hexdigest()
