"""Runs an evaluation: every task for every system that can take part, each score kept as soon as it is there.

Knows: tasks, systems, where scores are kept. Does not know: how a task measures, or what a report looks like.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from gerund.errors import ConfigError, MissingDependencyError
from gerund.evaluation.results import Result, ResultStore, key_of
from gerund.evaluation.systems.base import System, why_nobody
from gerund.evaluation.systems.embeddings import EmbeddingCache
from gerund.evaluation.systems.precomputed import precompute, precomputed_words, word_groups
from gerund.evaluation.task import EvaluationConfig, Task

EMBEDDINGS = "embeddings"

# Called with the task, the system, and the result or None before it is measured.
ProgressReporter = Callable[[Task, System, Result | None], None]


@dataclass
class Cost:
    """What something took: seconds on the clock, and of all processors, child processes that ended included."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Add what the block takes."""
        before = os.times()
        try:
            yield
        finally:
            after = os.times()
            self.seconds += after.elapsed - before.elapsed
            self.cpu_seconds += sum(after[:4]) - sum(before[:4])


@dataclass
class Evaluation:
    """What was measured, and the systems and tasks, which are still at hand for pictures.

    Attributes:
        results: one a task and system, in the order of tasks.
        systems: what was measured.
        tasks: on which tasks.
        config: of the evaluation.
        reused: how many results were there before.
        costs: what was spent on each system alone, by its label, apart from what several share.
        shared: what was spent on the layers that plans of one model share, which run once for all of them.
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
        folder: where finished scores are kept and looked for, so that an interrupted evaluation goes on;
            None keeps nothing.
        reporter: called before and after each measurement, and once for each score that was there already.

    Raises:
        ConfigError: no system, no task, two systems of one name, or no system that can take part in any task.
        DataError: a task's data are malformed.
        KeyboardInterrupt: with a note that says what is kept.
    """
    if not systems or not tasks:
        raise ConfigError("an evaluation needs at least one model and one task")
    if len({one.label for one in systems}) < len(systems):
        raise ConfigError("two systems have the same name")
    if not any(isinstance(one, task.capability) for one in systems for task in tasks):
        raise ConfigError(why_nobody(systems, [task.capability for task in tasks]))
    done = Evaluation([], list(systems), list(tasks), config or EvaluationConfig())
    store = None if folder is None else ResultStore(folder)
    try:
        for task in tasks:
            _measure(task, done, store, reporter or (lambda *_: None))
    except KeyboardInterrupt as stop:
        if folder is not None and store is not None and (store.count() or (folder / EMBEDDINGS).is_dir()):
            stop.add_note(
                f"{store.count()} finished scores, and the vectors of texts that were encoded for others, are kept in "
                f"{folder}: run the same command again to go on from there"
            )
        raise
    return done


def cache_in(folder: Path) -> EmbeddingCache:
    """Return the cache that lies in a report's folder."""
    return EmbeddingCache(folder / EMBEDDINGS)


def _measure(task: Task, done: Evaluation, store: ResultStore | None, reporter: ProgressReporter) -> None:
    able = [one for one in done.systems if isinstance(one, task.capability)]
    results: dict[str, Result] = {}
    for one in able:
        if store is not None and (found := store.find(task, one, done.config)) is not None:
            results[one.label] = found
            done.reused += 1
            reporter(task, one, found)
    for group, ready in _prepared([one for one in able if one.label not in results], task, done):
        with ExitStack() as block:
            with done.shared.counted():
                block.enter_context(ready)
            for one in group:
                with done.costs.setdefault(one.label, Cost()).counted():
                    results[one.label] = _result(task, one, done.config, store, list(results.values()), reporter)
                reporter(task, one, results[one.label])
    done.results += [results[one.label] for one in able]


def _prepared(
    systems: list[System], task: Task, done: Evaluation
) -> Iterator[tuple[list[System], AbstractContextManager[None]]]:
    """Yield systems in groups, each with a block in which what the group shares is at hand."""
    if not systems:
        return
    config = done.config
    sentences = task.sentences(config)
    if not sentences:
        with done.shared.counted():
            precompute(systems, task, config)
        yield systems, nullcontext()
        return
    measured = [one for one in systems if task.is_measured(one, config)]
    yield measured, nullcontext()
    for group in word_groups([one for one in systems if one not in measured], sentences):
        prompt, shift = task.prompt(config), task.shifts_words
        yield (
            group,
            precomputed_words(group, sentences, prompt=prompt, pooling=task.word_pooling, shift=shift, config=config),
        )


def _result(
    task: Task,
    one: System,
    config: EvaluationConfig,
    store: ResultStore | None,
    others: list[Result],
    reporter: ProgressReporter,
) -> Result:
    if not task.reads_plan:
        for other in others:
            # The same weights write the same under every plan.
            if other.key == key_of(task, one, config):
                return replace(other, system=one.label, description=one.describe(), seconds=0.0)
    reporter(task, one, None)
    return _score(task, one, config, store)


def _score(task: Task, system: System, config: EvaluationConfig, store: ResultStore | None) -> Result:
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
