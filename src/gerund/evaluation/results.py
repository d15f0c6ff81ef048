"""Finished scores, one file each, so that an interrupted evaluation goes on and a later one can join it.

A score counts as finished when task, options, config, data and system are the same; what differs is
measured again and supersedes it in the report.

Knows: JSON, files. Does not know: how anything is measured.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from gerund.errors import DataError
from gerund.evaluation.systems.base import System
from gerund.evaluation.task import EvaluationConfig, Score, Task
from gerund.jobs.files import write_atomic
from gerund.version import __version__

# The second format has no examples in its scores, and is read all the same.
FORMAT = 3
_READ = (2, FORMAT)
# Names of the first format, and what they are called now.
_RENAMED = {"contender": "system", "reading": "description", "settings": "config"}
_FOLDER = "scores"


@dataclass(frozen=True)
class Result:
    """One score and all that it depends on."""

    task: str
    """``kind/name``."""
    kind: str
    """The kind of task."""
    side: str
    """``representation``, ``tokens`` or ``generation``."""
    unit: str
    """``percent`` (of fractions of 1), ``perplexity``, ``bits`` or ``fraction``."""
    higher_is_better: bool
    """Which way is up."""
    reads_plan: bool
    """Whether it depends on the encoder config, or only on the weights."""
    system: str
    """What tables call the system."""
    description: Mapping[str, Any]
    """Model, plan, pooling, fingerprint."""
    score: Score
    """What was measured."""
    options: Mapping[str, Any]
    """The task's options."""
    config: Mapping[str, Any]
    """Seed, limit, split and prompts."""
    key: str
    """Hash of everything that the score depends on."""
    seconds: float
    """How long it took."""
    date: str
    """When, in UTC (ISO 8601)."""
    version: str
    """gerund's version."""

    @classmethod
    def of(cls, task: Task, system: System, config: EvaluationConfig, score: Score, seconds: float) -> "Result":
        """Return a fresh score with all that it depends on."""
        return cls(
            task=task.name,
            kind=task.kind,
            side=task.side,
            unit=task.unit,
            higher_is_better=task.higher_is_better,
            reads_plan=task.reads_plan,
            system=system.label,
            description=system.describe(),
            score=score,
            options=options_of(task),
            config=config.to_dict(),
            key=key_of(task, system, config),
            seconds=round(seconds, 3),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            version=__version__,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return {**asdict(self), "score": self.score.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Result":
        """Read a result back."""
        return cls(**{**data, "score": Score.from_dict(data["score"])})


def options_of(task: Task) -> dict[str, Any]:
    """Return a task's options by name.

    Options are the fields that a subclass adds with a ``help`` text in their metadata.
    """
    return {item.name: getattr(task, item.name) for item in fields(task) if "help" in item.metadata}


def key_of(task: Task, system: System, config: EvaluationConfig) -> str:
    """Return the hash of everything that a score depends on: 16 hexadecimal digits."""
    system_key = system.cache_key if task.reads_plan else system.weights_key
    if task.reads_adapter and system.infill_adapter:
        system_key += f"-{system.infill_adapter}"
    if task.reads_scorer and system.scorer is not None:
        system_key += f"-{system.cache_key}-{system.scorer.fingerprint}"
    relevant = {**config.to_dict(), "prompts": task.prompt(config) if task.reads_plan else None}
    if relevant.pop("document_prompts", None) and task.name in config.document_prompts:
        relevant["document_prompts"] = config.document_prompts[task.name]
    parts = [task.name, json.dumps(options_of(task), sort_keys=True, default=str)]
    parts += [json.dumps(relevant, sort_keys=True), system_key, _digest((*task.files, *task.also_read))]
    parts += task.key_parts(config)
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


class ResultStore:
    """The finished scores of a report folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _FOLDER

    def find(self, task: Task, system: System, config: EvaluationConfig) -> Result | None:
        """Return the finished score, under the system's present name; None when it is still to be measured."""
        path = self._path(task.name, key_of(task, system, config))
        if not path.is_file():
            return None
        found = _read(path)
        return Result(**{**_shallow(found), "system": system.label, "description": system.describe()})

    def add(self, task: Task, system: System, config: EvaluationConfig, score: Score, seconds: float) -> Result:
        """Keep a score; written whole or not at all.

        Raises:
            ResourceError: the disk is full.
        """
        result = Result.of(task, system, config, score, seconds)
        path = self._path(task.name, result.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, json.dumps({"format": FORMAT, **result.to_dict()}, indent=1, ensure_ascii=False, default=str)
        )
        return result

    def all(self) -> list[Result]:
        """Return every finished score, oldest first."""
        found = [_read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(found, key=lambda result: result.date)

    def count(self) -> int:
        """Return how many finished scores there are."""
        return sum(1 for _ in self.folder.glob("*.json"))

    def _path(self, task: str, key: str) -> Path:
        return self.folder / f"{task.replace('/', '.')}-{key}.json"


def _shallow(result: Result) -> dict[str, Any]:
    return {item.name: getattr(result, item.name) for item in fields(result)}


def _read(path: Path) -> Result:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        written = data.pop("format")
        if written == 1:
            data = {_RENAMED.get(name, name): value for name, value in data.items()}
            data["unit"] = "fraction" if data["unit"] == "share" else data["unit"]
        elif written not in _READ:
            raise DataError(f"{path} was written by another version of gerund; choose another output folder")
        return Result.from_dict(data)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a score that gerund wrote ({error}); delete it") from error


def _digest(files: tuple[Path, ...]) -> str:
    """Return a hash of the data's bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        try:
            state = path.stat()
            digest.update(_file_digest(path, state.st_mtime_ns, state.st_size))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> bytes:
    """Return a hash of a file, read once for all systems as long as it stays as it is."""
    del changed, size
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()
