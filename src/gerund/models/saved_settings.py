"""Read and write encoder settings in ``gerund.json`` and GGUF files, and tell from ``training.json`` what was trained.

Imports neither torch nor transformers.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gerund import checks
from gerund.checks import read_json
from gerund.errors import ConfigError, DataError, ModelError, unknown_name
from gerund.gguf_file import GgufFile
from gerund.settings.encoder import CONFIG_FILE, FORMAT, JOBS, METHODS, RANKING, READING, Job, read_settings
from gerund.settings.fields import NO_ADAPTER, plainly
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.plan import AttentionPlan

SCORER_FILE = "scorer.json"
"""Settings of a trained scorer of continuations, in a model's folder."""

_FIELDS = ("attention", "pooling", "prompt", "prompts", "pool_prompt", "append_eos", "normalize", "max_length")
_ADAPTER = "adapter"


def read_saved(folder: Path) -> EncoderSpec | None:
    """Read the encoder settings in ``gerund.json``; None without that file."""
    path = folder / CONFIG_FILE
    return settings_from(read_settings(path, "encoder")["encoder"]) if path.is_file() else None


def read_adapters(folder: Path) -> dict[Job, Path]:
    """Return the PEFT folder of each job that has one, from ``gerund.json`` in a model's folder.

    The encoder's is active for the other jobs as well, unless the file's ``adapters`` names another for one of them,
    or null for none.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    data = read_settings(path, "encoder")
    settings_from(data["encoder"])
    shared = data["encoder"].get(_ADAPTER)
    given = data.get("adapters", {})
    if not isinstance(given, dict):
        raise DataError(f"{path}: adapters are folders by job, not {given!r}")
    for job, place in given.items():
        if job not in JOBS[1:]:
            raise unknown_name(f"job among the adapters in {CONFIG_FILE}", job, JOBS[1:])
        if place is not None and not isinstance(place, str):
            raise DataError(f"{path}: the adapter for {job} is a folder or null, not {place!r}")
    places = {job: given.get(job, shared) for job in JOBS}
    for place in places.values():
        if place is None:
            continue
        checks.place(f"the adapter in {path}", place)
        if not (folder / place).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{path} names an adapter outside its folder: {place}")
    return {job: folder / place for job, place in places.items() if place is not None}


def settings_text(settings: EncoderSpec, fingerprint: str, places: Mapping[Job, str | None] | None = None) -> str:
    """Return the text of ``gerund.json``; ``places`` are the adapters, relative to the folder."""
    shared = dict(places or {}).get(JOBS[0])
    data: dict[str, Any] = {"format": FORMAT, "encoder": saved_fields(settings, shared)}
    if others := {job: place for job, place in (places or {}).items() if place != shared}:
        data["adapters"] = others
    data["fingerprint"] = fingerprint
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def saved_fields(settings: EncoderSpec, adapter: str | None = None) -> dict[str, Any]:
    """Return resolved settings as files store them, with the plan as one entry.

    >>> saved = saved_fields(EncoderSpec(attention="bidir", pooling="last", max_length="auto"))
    >>> saved["attention"]["name"], saved["pooling"], saved["max_length"]
    ('bidir', 'last', None)
    """
    fields = {name: getattr(settings, name) for name in _FIELDS}
    fields["attention"] = settings.plan(AttentionPlan()).to_dict()
    if settings.max_length == "auto":
        fields["max_length"] = None
    # Defaults of settings that were added later are not stored, as before these settings existed.
    unwritten = {**METHODS, **READING}
    values = ((name, getattr(settings, name), usual) for name, usual in unwritten.items())
    others = {name: value for name, value, usual in values if value not in (None, "auto", usual)}
    others |= {name: value for name in RANKING if (value := getattr(settings, name)) not in (None, "auto")}
    return {**fields, **others, _ADAPTER: adapter}


def settings_from(fields: Mapping[str, Any]) -> EncoderSpec:
    """Return the settings from a file, its plan as one entry or as ``EncoderSpec`` has it.

    >>> settings_from({"attention": {"name": "mask0-bidir", "k": 3}, "adapter": "adapter"}).k
    3
    """
    valid = (*EncoderSpec.model_fields, _ADAPTER)
    for name in fields:
        if name not in valid:
            raise unknown_name(f"field in {CONFIG_FILE}", name, valid)
    if not isinstance(fields.get(_ADAPTER), str | None):
        raise ConfigError(f"{_ADAPTER} is a text or nothing, not {fields[_ADAPTER]!r}")
    # In a spec None means "not given"; in a file only max_length may be null.
    for name in _FIELDS:
        if name != "max_length" and name in fields and fields[name] is None:
            raise ConfigError(f"{name} in {CONFIG_FILE} is null")
    with plainly(EncoderSpec):
        return EncoderSpec.model_validate({name: value for name, value in fields.items() if name != _ADAPTER})


POOLING_TYPES = {1: "mean", 2: "first", 3: "last"}
"""Poolings by llama.cpp's numbers."""
_NO_POOLING, _RANK = 0, 4


def encoder_settings(file: GgufFile) -> EncoderSpec | None:
    """Return the encoder settings of an embedding model; None for other files."""
    pooling = file.value("pooling_type")
    causal = file.value("attention.causal", True)
    if pooling in (None, _NO_POOLING):
        return None if causal else EncoderSpec(attention="bidir", pooling="mean", append_eos=False)
    if type(pooling) is not int or pooling not in POOLING_TYPES:
        what = f"it pools in a way that is not known ({pooling!r})"
        if pooling == _RANK:
            what = "it is a reranker, which is not read from GGUF; give the folder of the model in safetensors"
        raise ModelError(f"cannot load {file.path}: {what}")
    # The tokenizer adds an end token where the file asks for one.
    return EncoderSpec(attention="causal" if causal else "bidir", pooling=POOLING_TYPES[pooling], append_eos=False)


RECORD = "training.json"
"""The record of a training in a model's folder."""
# The training objectives for infilling, and for vectors.
_FILLING = "msg"
_EMBEDDING = frozenset({"contrastive", "cosent", "distill", "gen", "gur", "late", "simcse", "sscl", "unimae"})


def has_scorer(folder: Path) -> bool:
    """Whether a model's folder has a trained scorer of continuations."""
    return (folder / SCORER_FILE).is_file()


def is_trained_to_infill(settings: Path | None, folders: Mapping[Job, Path], spec: ModelSpec) -> bool:
    """Whether the spec names an adapter for infilling, or the training record shows that objective."""
    if spec.infill_adapter is not None:
        return spec.infill_adapter != NO_ADAPTER
    records = []
    if spec.adapter is None:
        if folders.get("infill") not in (None, folders.get("encode")):
            return True
        if settings is not None:
            records.append(settings / RECORD)
    elif not spec.leaves_adapters:
        # The record of a trained adapter is in its folder, or in the one above.
        records += [Path(spec.adapter) / RECORD, Path(spec.adapter).parent / RECORD]
    return any(_FILLING in _trained_for(path) for path in records)


def is_trained_to_embed(settings: Path | None, folders: Mapping[Job, Path]) -> bool:
    """Whether the training record shows an objective for vectors; what an adapter was trained for goes with it."""
    return (
        settings is not None and "encode" not in folders and not _EMBEDDING.isdisjoint(_trained_for(settings / RECORD))
    )


def _trained_for(record: Path) -> list[str]:
    """Return the objectives that a model was trained for; empty without a record."""
    try:
        return [str(objective["kind"]) for objective in read_json(record)["recipe"]["objectives"]]
    except (DataError, LookupError, TypeError):
        return []
