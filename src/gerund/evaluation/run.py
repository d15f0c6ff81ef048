"""Run an evaluation: each task for each system that supports it; finished scores are saved and reused."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.evaluation.systems.base import EmbeddingCache, Encoder, System, unsupported_message
from gerund.evaluation.systems.language_model import precompute, precomputed_words, word_groups
from gerund.evaluation.task import EvaluationConfig, Score, Task, options_of
from gerund.jobs.files import write_atomic
from gerund.text_analysis import VERSION
from gerund.version import __version__

FORMAT = 3
_FOLDER = "scores"
EMBEDDINGS = "embeddings"


@dataclass(frozen=True)
class Result:
    """One score and everything that it depends on; ``key`` is the hash of that, ``date`` is UTC (ISO 8601)."""

    task: str
    kind: str
    side: str
    unit: str
    higher_is_better: bool
    reads_plan: bool
    system: str
    description: Mapping[str, Any]
    score: Score
    options: Mapping[str, Any]
    config: Mapping[str, Any]
    key: str
    seconds: float
    date: str
    version: str

    @classmethod
    def of(cls, task: Task, system: System, config: EvaluationConfig, score: Score, seconds: float) -> "Result":
        """Return a new result."""
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


def key_of(task: Task, system: System, config: EvaluationConfig) -> str:
    """Return the hash of everything that a score depends on: 16 hexadecimal digits."""
    system_key = system.cache_key if task.reads_plan else system.weights_key
    if task.reads_adapter and system.infill_adapter:
        system_key += f"-{system.infill_adapter}"
    if task.reads_fusion:
        weight = f"{system.fusion_weight:g}" if isinstance(system, Encoder) else ""
        system_key += f"-{weight}-words{VERSION}"
    if task.reads_scorer and system.scorer is not None:
        system_key += f"-{system.cache_key}-{system.scorer.fingerprint}"
    relevant = {**config.to_dict(), "prompts": task.prompt(config) if task.reads_plan else None}
    if relevant.pop("document_prompts", None) and task.name in config.document_prompts:
        relevant["document_prompts"] = config.document_prompts[task.name]
    parts = [task.name, json.dumps(options_of(task), sort_keys=True, default=str)]
    parts += [json.dumps(relevant, sort_keys=True), system_key, data_digest(task)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


class ResultStore:
    """The finished scores of a report folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _FOLDER

    def find(self, task: Task, system: System, config: EvaluationConfig) -> Result | None:
        """Return the finished score under the system's current name; None if it is not measured yet."""
        path = self._path(task.name, key_of(task, system, config))
        if not path.is_file():
            return None
        return replace(_read(path), system=system.label, description=system.describe())

    def add(self, task: Task, system: System, config: EvaluationConfig, score: Score, seconds: float) -> Result:
        """Save a score."""
        result = Result.of(task, system, config, score, seconds)
        path = self._path(task.name, result.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(
            path, json.dumps({"format": FORMAT, **result.to_dict()}, indent=1, ensure_ascii=False, default=str)
        )
        return result

    def all(self) -> list[Result]:
        """Return every finished score, oldest first."""
        results = [_read(path) for path in sorted(self.folder.glob("*.json"))]
        return sorted(results, key=lambda result: result.date)

    def count(self) -> int:
        """Return how many finished scores there are."""
        return sum(1 for _ in self.folder.glob("*.json"))

    def _path(self, task: str, key: str) -> Path:
        return self.folder / f"{task.replace('/', '.')}-{key}.json"


def _read(path: Path) -> Result:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != FORMAT:
            raise DataError(f"{path} was written by another version of gerund; choose another output folder")
        return Result.from_dict(data)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a score that gerund wrote ({error}); delete it") from error


def data_digest(task: Task) -> str:
    """Return a hash of the bytes of a task's data and of the other files that it reads."""
    digest = hashlib.blake2b(digest_size=16)
    for path in (*task.files, *task.also_read):
        try:
            state = path.stat()
            digest.update(_file_digest(path, state.st_mtime_ns, state.st_size))
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return digest.hexdigest()


@lru_cache(maxsize=256)
def _file_digest(path: Path, changed: int, size: int) -> bytes:
    """Return a hash of a file, which is read once for all systems unless it changes."""
    del changed, size
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


# Called with the task, the system, and the result or None before it is measured.
ProgressReporter = Callable[[Task, System, Result | None], None]


@dataclass
class Cost:
    """Wall-clock seconds, and CPU seconds including those of child processes that ended."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add the time that the block takes."""
        before = os.times()
        try:
            yield
        finally:
            after = os.times()
            self.seconds += after.elapsed - before.elapsed
            self.cpu_seconds += sum(after[:4]) - sum(before[:4])


@dataclass
class Evaluation:
    """Results in the order of tasks, with the systems and tasks in memory for figures.

    Attributes:
        reused: number of results that were measured before.
        costs: what each system took alone, by its label.
        shared: what the layers took that plans of one model share, which run once for all of them.
    """

    results: list[Result]
    systems: list[System]
    tasks: list[Task]
    config: EvaluationConfig
    reused: int = field(default=0)
    costs: dict[str, Cost] = field(default_factory=dict)
    shared: Cost = field(default_factory=Cost)


def evaluate(
    systems: Sequence[System],
    tasks: Sequence[Task],
    config: EvaluationConfig | None = None,
    *,
    folder: Path | None = None,
    reporter: ProgressReporter | None = None,
) -> Evaluation:
    """Measure every task for every system.

    Args:
        systems: what is measured; systems of one model share the layers that their plans share.
        tasks: on which tasks.
        config: of the evaluation.
        folder: where finished scores are saved and looked up, so that an interrupted evaluation continues;
            None saves nothing.
        reporter: called before and after each measurement, and once for each score that was reused.

    Raises:
        ConfigError: no system, no task, two systems of one name, or no system that supports any task.
        DataError: a task's data are malformed.
        KeyboardInterrupt: with a note that says what is saved.
    """
    if not systems or not tasks:
        raise ConfigError("an evaluation needs at least one model and one task")
    if len({system.label for system in systems}) < len(systems):
        raise ConfigError("two systems have the same name")
    if not any(isinstance(system, task.capability) for system in systems for task in tasks):
        raise ConfigError(unsupported_message(systems, [task.capability for task in tasks]))
    done = Evaluation([], list(systems), list(tasks), config or EvaluationConfig())
    store = None if folder is None else ResultStore(folder)
    try:
        for task in tasks:
            _measure(task, done, store, reporter or (lambda *_: None))
    except KeyboardInterrupt as interrupt:
        if folder is not None and store is not None and (store.count() or (folder / EMBEDDINGS).is_dir()):
            interrupt.add_note(
                f"{store.count()} finished scores and the embeddings so far are saved in {folder}: run the same "
                "command again to continue"
            )
        raise
    return done


def cache_in(folder: Path) -> EmbeddingCache:
    """Return the embedding cache of a report's folder."""
    return EmbeddingCache(folder / EMBEDDINGS)


def _measure(task: Task, done: Evaluation, store: ResultStore | None, reporter: ProgressReporter) -> None:
    able = [system for system in done.systems if isinstance(system, task.capability)]
    results: dict[str, Result] = {}
    for system in able:
        if store is not None and (result := store.find(task, system, done.config)) is not None:
            results[system.label] = result
            done.reused += 1
            reporter(task, system, result)
    for group, shared in _groups([system for system in able if system.label not in results], task, done):
        with ExitStack() as block:
            with done.shared.counted():
                block.enter_context(shared)
            for system in group:
                with done.costs.setdefault(system.label, Cost()).counted():
                    results[system.label] = _result(task, system, done.config, store, results, reporter)
                reporter(task, system, results[system.label])
    done.results += [results[system.label] for system in able]


def _groups(
    systems: list[System], task: Task, done: Evaluation
) -> Iterator[tuple[list[System], AbstractContextManager[None]]]:
    """Yield systems in groups, each with a block during which the vectors that the group shares are in memory."""
    if not systems:
        return
    config = done.config
    prompt, show, sentences = task.prompt(config), config.show_progress, task.sentences(config)
    if not sentences:
        with done.shared.counted():
            precompute(systems, task.texts(config), prompt=prompt, show=show)
        yield systems, nullcontext()
        return
    measured = [system for system in systems if task.is_measured(system, config)]
    yield measured, nullcontext()
    how: dict[str, Any] = {"prompt": prompt, "pooling": task.word_pooling, "shift": task.shifts_words, "show": show}
    for group in word_groups([system for system in systems if system not in measured], sentences):
        yield group, precomputed_words(group, sentences, **how)


def _result(
    task: Task,
    system: System,
    config: EvaluationConfig,
    store: ResultStore | None,
    others: Mapping[str, Result],
    reporter: ProgressReporter,
) -> Result:
    if not task.reads_plan:
        for other in others.values():
            # The same weights generate the same under every plan.
            if other.key == key_of(task, system, config):
                return replace(other, system=system.label, description=system.describe(), seconds=0.0)
    reporter(task, system, None)
    start = time.perf_counter()
    try:
        score = task.run(system, config)
    except ImportError as error:
        raise MissingDependencyError(
            f"{task.name} needs {error.name or 'more packages'}: pip install 'gerund[eval]'"
        ) from error
    seconds = time.perf_counter() - start
    if store is not None:
        return store.add(task, system, config, score, seconds)
    return Result.of(task, system, config, score, seconds)
