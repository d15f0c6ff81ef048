"""The model that a folder is made from: its hub id and its license, and the metadata of model cards.

They are read from what is on this machine: the model's card, the metadata of a GGUF file, or gerund's table of short
names. Nothing is downloaded.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gerund.errors import GerundError
from gerund.gguf_file import read_file
from gerund.models.catalog import NAMED
from gerund.models.library_calls import quiet
from gerund.models.sources import Source

CARD = "README.md"
GENERATED = "gerund"
"""The tag of the cards that gerund writes."""
_LICENSE_FIELDS = ("license", "license_name", "license_link", "language")
_LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
# Licenses in gerund's table by the hub's names.
_HUB_LICENSES = {"Apache-2.0": "apache-2.0", "MIT": "mit"}
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)")


@dataclass(frozen=True)
class Origin:
    """Where a model comes from.

    Attributes:
        name: what it is called, without its place on this machine.
        base_model: its hub id; None where that isn't known.
        terms: the fields of a model card about its license and languages.
        files: its license files.
    """

    name: str
    base_model: str | None = None
    terms: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def origin_of(source: Source) -> Origin:
    """Return where a model comes from, as far as this machine knows."""
    if source.name in NAMED and not Path(source.name).exists():
        return _of_short_name(source)
    if source.gguf is not None:
        return _of_gguf(source.gguf)
    folder = source.folder if source.folder is not None else _cached(source)
    if folder is None:
        return Origin(source.name.rpartition("/")[2], source.name)
    fields = card_fields(folder / CARD)
    files = tuple(path for pattern in _LICENSE_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    base = source.name if source.folder is None else _hub_id(folder)
    if base is None and is_generated(fields):
        base = fields.get("base_model")
    terms = {name: fields[name] for name in _LICENSE_FIELDS if fields.get(name)}
    name = base.rpartition("/")[2] if isinstance(base, str) else folder.resolve().name
    return Origin(name, base if isinstance(base, str) else None, terms, files)


def card_fields(path: Path) -> dict[str, Any]:
    """Return the metadata of a model card; empty without a card, or where it can't be read."""
    from huggingface_hub import ModelCard

    if not path.is_file():
        return {}
    try:
        with quiet():
            fields: dict[str, Any] = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # of several libraries; a card is not needed
        return {}
    return fields


def front_matter(fields: Mapping[str, Any]) -> str:
    """Return the metadata at the start of a card."""
    from huggingface_hub import ModelCardData

    return f"---\n{ModelCardData(**fields).to_yaml()}\n---\n"


def with_fields(text: str, fields: Mapping[str, Any], *, scores: Sequence[tuple[str, str, float]] = ()) -> str:
    """Return a card with these fields in its metadata, and scores, each of a task and a metric."""
    from huggingface_hub import EvalResult, ModelCard

    with quiet():
        card = ModelCard(text, ignore_metadata_errors=True)
    results = [
        EvalResult("feature-extraction", f"gerund/{task}", task, metric, value) for task, metric, value in scores
    ]
    # The hub shows the repository's name.
    measured = {"model_name": "model", "eval_results": results} if results else {}
    for name, value in {**fields, **measured}.items():
        setattr(card.data, name, value)
    return str(card)


def is_generated(fields: Mapping[str, Any]) -> bool:
    """Whether a card's metadata is that of a card that gerund wrote."""
    return GENERATED in (fields.get("tags") or ())


def _of_short_name(source: Source) -> Origin:
    model = NAMED[source.name]
    base = None if model.hub is None else model.hub.repository
    license_id = _HUB_LICENSES.get(model.license)
    terms = {"license": license_id} if license_id else {"license": "other", "license_name": model.license}
    return Origin(source.name if base is None else base.rpartition("/")[2], base, terms)


def _of_gguf(path: Path) -> Origin:
    """Return what the metadata of a GGUF file says."""
    try:
        metadata = read_file(path).metadata
    except GerundError:
        metadata = {}
    keys = {"license": "license", "license_name": "license.name", "license_link": "license.link"}
    terms = {name: value for name, key in keys.items() if isinstance(value := metadata.get(f"general.{key}"), str)}
    repository = metadata.get("general.source.huggingface.repository")
    name = metadata.get("general.name")
    return Origin(
        name if isinstance(name, str) else path.name, repository if isinstance(repository, str) else None, terms
    )


def _cached(source: Source) -> Path | None:
    """Return the folder of a hub model in the cache."""
    from huggingface_hub import try_to_load_from_cache

    for name in (CARD, "config.json"):
        path = try_to_load_from_cache(source.name, name, revision=source.revision)
        if isinstance(path, str):
            return Path(path).parent
    return None


def _hub_id(folder: Path) -> str | None:
    """Return the hub id of a folder in the hub's cache."""
    match = next((match for part in folder.absolute().parts if (match := _SNAPSHOT.fullmatch(part))), None)
    return f"{match['owner']}/{match['name']}" if match else None
