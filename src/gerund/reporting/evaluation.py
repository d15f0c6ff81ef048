"""Writes the report of an evaluation, together with what its folder holds from earlier ones.

Knows: the parts of a report, the folder of finished scores. Does not know: how anything is measured or drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gerund.jobs.files import write_whole
from gerund.evaluation.contender import BM25, Contender
from gerund.evaluation.results import Result, ResultStore
from gerund.evaluation.run import Evaluation
from gerund.reporting.comparison import Comparison, compare
from gerund.reporting.document import bare_name, results_json
from gerund.reporting.pages.evaluation import write_page
from gerund.reporting.pages.pictures import pictures_for
from gerund.reporting.pages.rendering import Gallery
from gerund.reporting.terminal import render

_PIPE_WIDTH = 120


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        comparison: the table.
        json: the file with all that was measured.
        page: the page to look at.
        left_out: how many scores of the folder are not shown, since they were measured with other settings.
    """

    comparison: Comparison
    json: Path
    page: Path
    left_out: int = 0

    def print(self) -> None:
        """Print the table on stdout; in a pipe plain and 120 characters wide."""
        from rich.console import Console

        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
        render(self.comparison, console)


def write_report(folder: str | Path, done: Evaluation, *, pictures: bool = True) -> Report:
    """Write ``results.json`` and ``report.html``.

    Finished scores that the folder holds from earlier evaluations stand beside the new ones where seed, limit, split
    and prompts are the same.

    Args:
        folder: of the report.
        done: what was measured, with the contenders and tasks that pictures are drawn of.
        pictures: whether to draw any.

    Raises:
        ResourceError: the disk is full or refuses.
        DataError: the folder holds a score that cannot be read.
    """
    folder = Path(folder)
    stored = ResultStore(folder).all()
    results = _named_by_model(joined(done, stored), done.contenders)
    comparison = compare(results)
    gallery = pictures_for(comparison, done.contenders, done.tasks, done.settings) if pictures else Gallery()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "results.json"
    write_whole(target, results_json(comparison, done.settings))
    files = {task.name: [path.name for path in task.files] for task in done.tasks}
    left_out = sum(not _told_alike(result.settings, done.settings.to_dict()) for result in stored)
    return Report(comparison, target, write_page(folder, comparison, gallery, files), left_out)


def joined(done: Evaluation, stored: Sequence[Result]) -> list[Result]:
    """Return the results of an evaluation and those of earlier ones that stand beside them.

    A contender is who it is by its fingerprint: an earlier result of a present one takes its present name, and
    another model that had the same name is told apart by its own. What depends only on the weights holds for every
    plan of a model.
    """
    names = {one.fingerprint: one.label for one in done.contenders}
    kept = []
    for result in stored:
        if not _told_alike(result.settings, done.settings.to_dict()):
            continue
        identity = _identity(result)
        if identity not in names:
            names[identity] = _free_name(result, set(names.values()))
        kept.append(replace(result, contender=names[identity]))
    here = {(result.task, result.contender) for result in done.results}
    results = [*done.results, *(result for result in kept if (result.task, result.contender) not in here)]
    return results + _of_the_same_weights(results)


def _of_the_same_weights(results: list[Result]) -> list[Result]:
    """Return what contenders of the same weights share and only one of them has."""
    there = {(result.task, result.contender) for result in results}
    readings = {result.contender: result.reading for result in results}
    shared = {(result.task, *_shared(result, result.reading)): result for result in results if not result.reads_plan}
    return [
        replace(result, contender=label, reading=reading)
        for label, reading in readings.items()
        for (task, *what), result in shared.items()
        if what[0] is not None and tuple(what) == _shared(result, reading) and (task, label) not in there
    ]


def _shared(result: Result, reading: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return what of a contender decides a score that does not depend on its plan."""
    adapter = reading.get("infill_adapter", "") if result.kind == "infilling" else ""
    return reading.get("weights"), adapter


def _named_by_model(results: list[Result], contenders: Sequence[Contender]) -> list[Result]:
    """Return the results with the model's name before the plan's, where there are several models."""
    models = {result.contender: bare_name(str(result.reading["model"])) for result in results}
    if len({model for model in models.values() if model != BM25}) < 2:
        return results
    names = {
        label: label if model in (BM25, label) or label.startswith(f"{model}: ") else f"{model}: {label}"
        for label, model in models.items()
    }
    for one in contenders:
        one.label = names.get(one.label, one.label)
    return [replace(result, contender=names[result.contender]) for result in results]


def _identity(result: Result) -> str:
    return str(result.reading.get("fingerprint", BM25))


def _free_name(result: Result, taken: set[str]) -> str:
    name = result.contender
    if name in taken:
        name = f"{bare_name(str(result.reading['model']))}: {name}"
    return name if name not in taken else f"{name} ({_identity(result)})"


def _told_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations were told the same; of prompts, those of the tasks that both name."""
    if any(one.get(name) != other.get(name) for name in ("seed", "limit", "split")):
        return False
    first, second = one.get("prompts", {}), other.get("prompts", {})
    return bool(first) == bool(second) and all(first[name] == second[name] for name in first.keys() & second.keys())
