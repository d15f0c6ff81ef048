"""Writes the report of an evaluation, together with what its folder holds from earlier ones.

Knows: the parts of a report, the folder of finished scores. Does not know: how anything is measured or drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gerund.evaluation.registry import task_classes
from gerund.evaluation.results import Result, ResultStore
from gerund.evaluation.run import Evaluation
from gerund.evaluation.systems.base import System
from gerund.evaluation.systems.bm25 import BM25
from gerund.jobs.files import write_atomic
from gerund.reporting.comparison import Comparison, compare
from gerund.reporting.document import bare_name, results_json
from gerund.reporting.pages.evaluation import write_page
from gerund.reporting.pages.pictures import pictures_for
from gerund.reporting.pages.rendering import Gallery
from gerund.reporting.significance import NOTHING, Significance, significance_of
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
        significance: how sure the table's scores and differences are.
    """

    comparison: Comparison
    json: Path
    page: Path
    left_out: int = 0
    significance: Significance = NOTHING

    def print(self) -> None:
        """Print the table on stdout; in a pipe plain and 120 characters wide."""
        from rich.console import Console

        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, emoji=False, width=_PIPE_WIDTH)
        render(self.comparison, console, self.significance)


def write_report(folder: str | Path, done: Evaluation, *, pictures: bool = True) -> Report:
    """Write ``results.json`` and ``report.html``.

    Finished scores that the folder holds from earlier evaluations stand beside the new ones where seed, limit, split
    and prompts are the same.

    Args:
        folder: of the report.
        done: what was measured, with the systems and tasks that pictures are drawn of.
        pictures: whether to draw any.

    Raises:
        ResourceError: the disk is full or refuses.
        DataError: the folder holds a score that cannot be read.
    """
    folder = Path(folder)
    stored = ResultStore(folder).all()
    results = _named_by_model(joined(done, stored), done.systems)
    comparison = compare(results)
    significance = significance_of(comparison)
    gallery = pictures_for(comparison, done.systems, done.tasks, done.config) if pictures else Gallery()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "results.json"
    write_atomic(target, results_json(comparison, done.config, significance))
    files = {task.name: [path.name for path in task.files] for task in done.tasks}
    left_out = sum(not _same_config(result.config, done.config.to_dict()) for result in stored)
    page = write_page(folder, comparison, gallery, files, significance)
    return Report(comparison, target, page, left_out, significance)


def joined(done: Evaluation, stored: Sequence[Result]) -> list[Result]:
    """Return the results of an evaluation and those of earlier ones that stand beside them.

    A system is identified by its fingerprint: an earlier result of a present one takes its present name, and
    another model that had the same name is told apart by its own. What depends only on the weights holds for every
    plan of a model.
    """
    names = {one.fingerprint: one.label for one in done.systems}
    kept = []
    for result in stored:
        if not _same_config(result.config, done.config.to_dict()):
            continue
        identity = _identity(result)
        if identity not in names:
            names[identity] = _free_name(result, set(names.values()))
        kept.append(replace(result, system=names[identity]))
    here = {(result.task, result.system) for result in done.results}
    results = [*done.results, *(result for result in kept if (result.task, result.system) not in here)]
    return results + _of_the_same_weights(results)


def _of_the_same_weights(results: list[Result]) -> list[Result]:
    """Return what systems of the same weights share and only one of them has."""
    there = {(result.task, result.system) for result in results}
    descriptions = {result.system: result.description for result in results}
    fixed = [result for result in results if not result.reads_plan]
    shared = {(result.task, *_shared(result, result.description)): result for result in fixed}
    return [
        replace(result, system=label, description=description)
        for label, description in descriptions.items()
        for (task, *what), result in shared.items()
        if what[0] is not None and tuple(what) == _shared(result, description) and (task, label) not in there
    ]


def _shared(result: Result, description: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return what of a system a score depends on that does not depend on its plan."""
    reads_adapter = any(one.reads_adapter for one in task_classes() if one.kind == result.kind)
    adapter = description.get("infill_adapter", "") if reads_adapter else ""
    return description.get("weights"), adapter


def _named_by_model(results: list[Result], systems: Sequence[System]) -> list[Result]:
    """Return the results with the model's name before the plan's, where there are several models."""
    models = {result.system: bare_name(str(result.description["model"])) for result in results}
    if len({model for model in models.values() if model != BM25}) < 2:
        return results
    names = {
        label: label if model in (BM25, label) or label.startswith(f"{model}: ") else f"{model}: {label}"
        for label, model in models.items()
    }
    for one in systems:
        one.label = names.get(one.label, one.label)
    return [replace(result, system=names[result.system]) for result in results]


def _identity(result: Result) -> str:
    return str(result.description.get("fingerprint", BM25))


def _free_name(result: Result, taken: set[str]) -> str:
    name = result.system
    if name in taken:
        name = f"{bare_name(str(result.description['model']))}: {name}"
    return name if name not in taken else f"{name} ({_identity(result)})"


def _same_config(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations had the same config; of prompts, those of the tasks that both name."""
    if any(one.get(name) != other.get(name) for name in ("seed", "limit", "split")):
        return False
    first, second = one.get("prompts", {}), other.get("prompts", {})
    return bool(first) == bool(second) and all(first[name] == second[name] for name in first.keys() & second.keys())
