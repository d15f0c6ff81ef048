"""``gerund.json``: the settings and adapters of a model, in a file beside its weights.

It is never inside transformers' ``config.json``, so that the folder still opens as a plain language model.

Knows: the file's fields, adapters' places. Does not know: torch, how an adapter is put into a model.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gerund import checks
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.settings.encoder import CONFIG_FILE, FORMAT, JOBS, METHODS, READING, Job, read_settings
from gerund.settings.model_spec import EncoderSpec, plainly
from gerund.settings.plan import AttentionPlan

_FIELDS = ("attention", "pooling", "prompt", "prompts", "pool_prompt", "append_eos", "normalize", "max_length")
_ADAPTER = "adapter"


def read_saved(folder: Path) -> EncoderSpec | None:
    """Read how the model in a folder is read as an encoder; None where nothing says so.

    Raises:
        DataError: the file is not valid JSON.
        ConfigError: it was written by a newer version, or holds unknown fields.
    """
    path = folder / CONFIG_FILE
    return settings_from(read_settings(path, "encoder")["encoder"]) if path.is_file() else None


def read_adapters(folder: Path) -> dict[Job, Path]:
    """Return the PEFT folder of each job that has one, as ``gerund.json`` in a model's folder says.

    The encoder's is active for the other jobs as well, unless the file's ``adapters`` names another for one of them,
    or null for none.

    Raises:
        DataError: the file is not valid JSON.
        ConfigError: it names an adapter outside the folder or for an unknown job, or was written by a newer version.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return {}
    data = read_settings(path, "encoder")
    settings_from(data["encoder"])
    own = data["encoder"].get(_ADAPTER)
    given = data.get("adapters", {})
    if not isinstance(given, dict):
        raise DataError(f"{path}: adapters are folders by job, not {given!r}")
    for job, place in given.items():
        if job not in JOBS[1:]:
            raise unknown_name(f"job among the adapters in {CONFIG_FILE}", job, JOBS[1:])
        if place is not None and not isinstance(place, str):
            raise DataError(f"{path}: the adapter for {job} is a folder or null, not {place!r}")
    places = {job: given.get(job, own) for job in JOBS}
    for place in places.values():
        if place is None:
            continue
        checks.place(f"the adapter in {path}", place)
        if not (folder / place).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{path} names an adapter outside its folder: {place}")
    return {job: folder / place for job, place in places.items() if place is not None}


def settings_text(settings: EncoderSpec, fingerprint: str, places: Mapping[Job, str | None] | None = None) -> str:
    """Return the text of ``gerund.json``.

    Args:
        settings: how the model is read, with every setting worked out.
        fingerprint: of the encoder.
        places: the adapter of each job, relative to the model's folder.
    """
    own = dict(places or {}).get(JOBS[0])
    data: dict[str, Any] = {"format": FORMAT, "encoder": saved_fields(settings, own)}
    if others := {job: place for job, place in (places or {}).items() if place != own}:
        data["adapters"] = others
    data["fingerprint"] = fingerprint
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def saved_fields(settings: EncoderSpec, adapter: str | None = None) -> dict[str, Any]:
    """Return settings, with every one of them worked out, as files hold them: the plan as one entry.

    >>> own = saved_fields(EncoderSpec(attention="bidir", pooling="last", max_length="auto"))
    >>> own["attention"]["name"], own["pooling"], own["max_length"]
    ('bidir', 'last', None)
    """
    fields = {name: getattr(settings, name) for name in _FIELDS}
    fields["attention"] = settings.plan(AttentionPlan()).to_dict()
    if settings.max_length == "auto":
        fields["max_length"] = None
    # What is left as it usually is stands in no file, as before there were any.
    unwritten = {**METHODS, **READING}
    others = {name: own for name, usual in unwritten.items() if (own := getattr(settings, name)) not in (None, usual)}
    if settings.fusion not in (None, "auto"):
        others["fusion"] = settings.fusion
    return {**fields, **others, _ADAPTER: adapter}


def settings_from(fields: Mapping[str, Any]) -> EncoderSpec:
    """Return the settings that a file holds, its plan as one entry or as ``EncoderSpec`` has it.

    Raises:
        ConfigError: an unknown field, or a value that is not valid.

    >>> settings_from({"attention": {"name": "mask0-bidir", "k": 3}, "adapter": "adapter"}).k
    3
    """
    valid = (*EncoderSpec.model_fields, _ADAPTER)
    for name in fields:
        if name not in valid:
            raise unknown_name(f"field in {CONFIG_FILE}", name, valid)
    if not isinstance(fields.get(_ADAPTER), str | None):
        raise ConfigError(f"{_ADAPTER} is a text or nothing, not {fields[_ADAPTER]!r}")
    # Elsewhere nothing means that nothing is said; a file says everything, and knows one setting that may be nothing.
    for name in _FIELDS:
        if name != "max_length" and name in fields and fields[name] is None:
            raise ConfigError(f"{name} in {CONFIG_FILE} is null")
    with plainly():
        return EncoderSpec.model_validate({name: value for name, value in fields.items() if name != _ADAPTER})
