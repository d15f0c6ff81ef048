"""Tell from a model's ``training.json`` whether it was trained to infill or to embed; imports no torch."""

from collections.abc import Mapping
from pathlib import Path

from gerund.checks import read_json
from gerund.errors import DataError
from gerund.settings.encoder import Job
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.model_spec import ModelSpec

RECORD = "training.json"
"""The record of a training in a model's folder."""
# The training objectives for infilling, and for vectors.
_FILLING = "msg"
_EMBEDDING = frozenset({"contrastive", "cosent", "distill", "gen", "gur", "late", "simcse", "sscl", "unimae"})


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
