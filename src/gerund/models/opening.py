"""From a ``ModelSpec`` to a model in memory and how it is read.

Knows: which setting wins (the spec, then what the folder says, then the default). Does not know: how models are read
from the disk, or what is done with them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention import products
from gerund.checks import place, read_json
from gerund.errors import ConfigError, DataError, ModelError
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES, Adapters
from gerund.models.encoder_decoder import SEQ2SEQ, is_encoder_decoder
from gerund.models.heads import ProjectionHead
from gerund.models.int8_products import cpu_has_int8
from gerund.models.known_hashes import described, stamp
from gerund.models.library_calls import quiet
from gerund.models.settings_file import read_adapters
from gerund.models.sources import find, find_spec
from gerund.models.stored_reading import stored_reading
from gerund.models.vector_transforms import Transform, read_transform
from gerund.models.weights import weight_files
from gerund.notes import say_once
from gerund.settings.encoder import JOBS, EncoderConfig, Job, vectors_alike
from gerund.settings.model_spec import NO_ADAPTER, ModelSpec
from gerund.settings.templates import NO_TRANSFORM

# The objective that trains a model to fill gaps.
_FILLING = "msg"


@dataclass(frozen=True)
class Opened:
    """A model in memory, and how it is read.

    Attributes:
        model: the Hugging Face model, on its device.
        tokenizer: its tokenizer.
        encoder: how it is read as an encoder.
        name: what it was loaded from.
        settings: the folder of its settings, where there is one on this machine.
        adapters: PEFT adapters, each active for its jobs only.
        autocast: whether to encode in bfloat16 where that is quick and near enough.
        int8: whether to encode in 8 bits.
        head: what projects its pooled states; None without one.
        transform: what its folder has for the encoder's transform; None where that has to be fitted.
        spec: what it was asked for by.
        stamp: under what the hash of its weights is kept; None where it is not kept.
        fills_gaps: whether it or its adapter for filling gaps is known to be trained for that.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: EncoderConfig
    name: str
    settings: Path | None
    adapters: Adapters
    autocast: bool
    int8: bool
    head: ProjectionHead | None
    transform: Transform | None
    spec: ModelSpec
    stamp: str | None = None
    fills_gaps: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``TextEncoder``."""
        return {
            "name": self.name,
            "adapters": self.adapters,
            "autocast": self.autocast,
            "int8": self.int8,
            "head": self.head,
            "transform": self.transform,
            "spec": self.spec,
            "stamp": self.stamp,
        }

    @property
    def is_seq2seq(self) -> bool:
        """Whether it has an encoder of its own beside its decoder."""
        return is_encoder_decoder(self.model)


@quiet()  # once for all of it: whenever a logger's level changes, all loggers forget what they know
def open_model(spec: ModelSpec, token: str | bool | None = None) -> Opened:
    """Load a model with its settings; the hub is asked with ``token``, where it is.

    Raises:
        ModelError: no such model, or neither a decoder-only one nor a T5.
        ConfigError: an unknown name or impossible setting.
    """
    weights_type = loading.pick_dtype(spec.dtype)
    where = loading.pick_device(spec.device)
    if spec.dtype == "int8" and not (where.type == "cpu" and cpu_has_int8()):
        raise ConfigError(
            "dtype int8 is for processors with AVX-512 VNNI or AMX, on which encoding multiplies in 8 bits; "
            + ("this one has neither" if where.type == "cpu" else f"on {where.type} take auto")
        )
    source = find_spec(spec, token)
    settings = loading.settings_folder(source)
    own_adapters = {} if settings is None else read_adapters(settings)
    config = loading.read_config(source)
    seq2seq = config.model_type in SEQ2SEQ
    reading = stored_reading(settings, config, spec, source.gguf)
    stored, head = reading.encoder, reading.head
    encoder = spec.applied_to(stored)
    reading.tell(source.name, encoder)
    if seq2seq:
        given = [own_adapters.get("encode"), spec.adapter, spec.infill_adapter, spec.scorer]
        _check_seq2seq(encoder, source.name, given)
    adapters = _adapters(own_adapters, spec)
    if spec.adapter is not None and "encode" in own_adapters:
        # A head that was trained with the adapter means nothing without it.
        head = None
    if head is not None and not vectors_alike(encoder, stored):
        head = head.without_space()
    if weights_type is None and where.type == "cpu":
        weights_type = _computed_type(config, source.name)
    transform = None
    if settings is not None and encoder.transform != NO_TRANSFORM and spec.adapter is None:
        # Fitted to the vectors of one encoder config, it means nothing to those of another.
        transform = read_transform(settings, encoder.transform) if vectors_alike(encoder, stored) else None
    files = weight_files(source, getattr(config, "transformers_weights", None))
    before = described(files)
    loaded, tokenizer = loading.read(source, weights_type, config)
    width = loading.state_width(loaded.config) * encoder.poolings
    if head is not None and head.settings.width != width:
        raise DataError(f"the head in {settings} is for states of {head.settings.width} numbers, not {width}")
    return Opened(
        loaded.to(where),
        tokenizer,
        encoder,
        source.name,
        settings,
        adapters,
        autocast=spec.dtype in ("auto", "int8") and (where.type == "cuda" or products.cpu_has_bfloat16()),
        int8=spec.dtype == "int8",
        head=None if head is None else head.to(where),
        transform=transform,
        spec=spec,
        # Of an encoder-decoder only a part is hashed. And files that changed while they were read are of no use.
        stamp=None if seq2seq or described(files) != before else stamp(before, str(loaded.dtype), *_tensors_of(loaded)),
        fills_gaps=seq2seq or _is_trained_to_fill(settings, own_adapters, spec),
    )


def _tensors_of(model: PreTrainedModel) -> list[str]:
    """Return which tensors a model has: its config decides how many of those in its files are read."""
    return [f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]


def _computed_type(config: PreTrainedConfig, name: str) -> torch.dtype | None:
    """Return the type in which this processor takes a checkpoint's weights, and say so where it is another one."""
    stored = loading.dtype_of(config)
    if stored not in (torch.bfloat16, torch.float16) or products.cpu_has_bfloat16():
        return None
    # Half precision would be emulated, slowly; float32 holds the same values.
    called = str(stored).removeprefix("torch.")
    say_once(
        f"{name} is stored in {called} and computed in float32, which is faster on this processor; greedy texts may "
        f"differ from those that transformers writes in {called} (dtype {called} computes as it does)"
    )
    return torch.float32


def _adapters(own: Mapping[Job, Path], spec: ModelSpec) -> Adapters:
    """Return whose adapters take part: those given, and for the rest those of the model's folder."""
    folders: dict[Job, Path] = {}
    if spec.adapter is None:
        folders = dict(own)
    elif not spec.leaves_adapters:
        folders = dict.fromkeys(JOBS, place("adapter", spec.adapter))
    for job in JOBS[1:]:
        where = spec.adapter_of(job)
        if where is not None:
            folders.pop(job, None)
            if where != NO_ADAPTER:
                folders[job] = _adapter_in(where, job)
    return Adapters(folders)


def _is_trained_to_fill(settings: Path | None, own: Mapping[Job, Path], spec: ModelSpec) -> bool:
    """Whether somebody has chosen an adapter to fill gaps with, or the records of the training say what it was for."""
    if spec.infill_adapter is not None:
        return spec.infill_adapter != NO_ADAPTER
    records = []
    if spec.adapter is None:
        if own.get("infill") not in (None, own.get("encode")):
            return True
        if settings is not None:
            records.append(settings / "training.json")
    elif not spec.leaves_adapters:
        # Beside an adapter that was trained here lies its record, or one folder above it.
        records += [Path(spec.adapter) / "training.json", Path(spec.adapter).parent / "training.json"]
    return any(_FILLING in _trained_for(path) for path in records)


def _trained_for(record: Path) -> list[str]:
    """Return the kinds of the objectives that a model was trained for; none where there is no record."""
    try:
        return [str(one["kind"]) for one in read_json(record)["recipe"]["objectives"]]
    except (DataError, LookupError, TypeError):
        return []


def _adapter_in(where: str | Path, job: Job) -> Path:
    """Return the adapter of a job of another model; a PEFT folder is one itself."""
    folder = place("adapter", where)
    if (folder / ADAPTER_FILES[0]).is_file():
        return folder
    settings = loading.settings_folder(find(where))
    if settings is None:
        raise ModelError(f"there is no folder {where}, and the hub has no such model or cannot be reached")
    found = read_adapters(settings).get(job)
    if found is None:
        raise DataError(f"{where} has no adapter to {job} with; only an adapter can be taken from another model")
    return found


def _check_seq2seq(encoder: EncoderConfig, name: str, adapters: Sequence[str | Path | None]) -> None:
    """Refuse what belongs to decoder-only models."""
    if encoder.reads_beside:
        raise ConfigError(f"{name} has an encoder of its own; layers, prepend and reroute are for decoder-only models")
    if encoder.attention.name != "bidir":
        raise ConfigError(f"{name} has an encoder of its own, which looks both ways: attention is bidir, nothing else")
    if any(where not in (None, NO_ADAPTER) for where in adapters):
        raise ConfigError(f"{name} has an encoder of its own; an adapter for encoding is for decoder-only models")
