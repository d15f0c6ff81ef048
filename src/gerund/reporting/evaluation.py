"""Write the report of an evaluation: `results.json`, and `report.html` with its figures."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from gerund.errors import DataError
from gerund.evaluation.data_files import LabelledTexts, RatedPairs
from gerund.evaluation.registry import task_classes
from gerund.evaluation.run import Evaluation, Result, ResultStore
from gerund.evaluation.systems.base import Encoder, System
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.evaluation.systems.search import BM25
from gerund.evaluation.systems.selection import label_of
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.inference.inspection import EXAMPLE_TEXTS, inspect_attention, sink_fraction
from gerund.jobs.files import write_atomic
from gerund.models.vectors import compared_in_pairs
from gerund.progress import counted
from gerund.reporting.comparison import (
    NOTHING,
    PERCENTS,
    Column,
    Comparison,
    Group,
    Mean,
    Row,
    Section,
    Significance,
    compare,
    legend,
    plan_text,
    render,
    significance_of,
    telling_examples,
)
from gerund.reporting.plots import attention, embeddings, scores, style
from gerund.reporting.plots.scores import ScorePanel, TradePoint
from gerund.reporting.rendering import Gallery, Picture, Wanted, bare_name, drawn, shareable, versions, write_html
from gerund.version import __version__

# The metric of generation that can be compared across tokenizers.
_BITS = "bits_per_byte"
# Panels of one picture, and pictures of one kind.
_MOST_PANELS = 4
_MOST_MAPS, _MOST_HISTOGRAMS, _MOST_PLANS = 3, 4, 6
# t-SNE of more takes longer than many a task.
_MOST_POINTS = 1000

SUMMARY = "Summary"
"""The group whose first figure is next to the summary."""

AnyData = TypeVar("AnyData", LabelledTexts, RatedPairs)


def pictures_for(
    comparison: Comparison, systems: Sequence[System], tasks: Sequence[Task], config: EvaluationConfig
) -> Gallery:
    """Draw what shows more than the table does.

    A picture that cannot be drawn is missing with a sentence that says why: what was measured must not be lost to it.
    """
    models = [system for system in systems if isinstance(system, Encoder)]
    return drawn(_wanted(comparison, models, tasks, config))


def _wanted(
    comparison: Comparison, models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig
) -> Iterator[Wanted]:
    yield from _trade(comparison)
    for section in comparison.sections:
        yield f"The bars of {section.side}", partial(_bars_of, section, comparison)
    if models:
        shown = models[:_MOST_PANELS]
        yield from _maps(shown, tasks, config)
        yield from _histograms(shown, tasks, config)
        yield from _attention([system for system in models if isinstance(system, LanguageModelSystem)])


def _trade(comparison: Comparison) -> Iterator[Wanted]:
    """Yield one side against the other where at least two systems were measured on both."""
    sides = {section.side: section for section in comparison.sections}
    if "representation" not in sides or "generation" not in sides:
        return
    group = next((group for group in sides["generation"].groups if group.metric == _BITS), None)
    reads, writes = sides["representation"].mean, None if group is None else group.mean
    if reads is None or writes is None:
        return
    places = zip(comparison.columns, reads.values, writes.values, strict=True)
    points = [(column, read, write) for column, read, write in places if read is not None and write is not None]
    if len(points) > 1:
        yield "The trade-off", partial(_trade_of, points, reads.label, writes.label)


def _trade_of(placed: Sequence[tuple[Column, float, float]], reads: str, writes: str) -> Picture:
    points = [
        TradePoint(column.label, read, write, bare_name(str(column.description["model"])))
        for column, read, write in placed
    ]
    figure = scores.trade_off(points, title="Both sides of the trade", ylabel=f"representation, {reads}")
    return Picture(
        "Both sides of the trade",
        f"Upwards: representation, {reads}. To the left: generation, bits per byte, {writes}. Plans of one model "
        "generate the same text and are above each other.",
        "Scatter of representation against bits per byte: "
        + "; ".join(f"{column.label} {100 * read:.2f} and {write:.3f}" for column, read, write in placed),
        style.picture(figure),
        SUMMARY,
    )


def _bars_of(section: Section, comparison: Comparison) -> Picture:
    panels = [_panel(group.kind, row, comparison) for group in section.groups for row in group.rows]
    return Picture(
        section.side.capitalize(),
        "One panel a task, each on a scale of its own; one bar a system, whiskers one standard deviation over runs.",
        f"Bars of every score of the side {section.side}; the same numbers stand in the table.",
        style.picture(scores.score_bars(panels, title=section.side.capitalize())),
        "Scores task by task",
    )


def _panel(kind: str, row: Row, comparison: Comparison) -> ScorePanel:
    by_system = {
        column.label: (cell.value, cell.result.score.spread)
        for column, cell in zip(comparison.columns, row.cells, strict=True)
        if cell is not None
    }
    return ScorePanel(
        f"{row.title}, {kind}",
        by_system,
        percent=row.unit in PERCENTS,
        higher_is_better=row.higher_is_better,
        marks_best=row.comparable,
    )


def _maps(models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig) -> Iterator[Wanted]:
    """Yield a map of a few sets of labelled texts, clustering first: those texts are not learnt from."""
    first = sorted(tasks, key=lambda task: task.kind != "clustering")
    for task, data in _with_data(first, config, LabelledTexts, _MOST_MAPS):
        yield f"A map of {task.title}", partial(_map_of, task, data, models, config)


def _histograms(models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig) -> Iterator[Wanted]:
    for task, data in _with_data(tasks, config, RatedPairs, _MOST_HISTOGRAMS):
        yield f"The cosines of {task.title}", partial(_histogram_of, task, data, models, config)


def _with_data(
    tasks: Iterable[Task], config: EvaluationConfig, kind: type[AnyData], most: int
) -> Iterator[tuple[Task, AnyData]]:
    """Yield up to ``most`` tasks with data of a kind for a figure; of tasks on the same files only the first."""
    seen: set[object] = set()
    for task in tasks:
        source = frozenset(task.files) or task.name
        if len(seen) == most or source in seen or task.side != "representation":
            continue
        # The files were read when the task ran; where they have changed since then there is no picture.
        with suppress(DataError):
            data = task.picture_data(config)
            if isinstance(data, kind):
                seen.add(source)
                yield task, data


def _map_of(task: Task, data: LabelledTexts, models: Sequence[Encoder], config: EvaluationConfig) -> Picture:
    prompt = task.prompt(config)
    vectors = {system.label: system.encode(data.texts, prompt=prompt, show=config.show_progress) for system in models}
    figure = embeddings.embedding_maps(
        vectors, data.labels, title=task.title, seed=config.seed, most_points=_MOST_POINTS
    )
    return Picture(
        task.title,
        "The same texts as each system embeds them, by t-SNE: what is near on the map is near in the encoder's "
        "eyes; colours are classes. Distances between far groups mean little.",
        f"Maps of the texts of {task.title} by class, one for each of {', '.join(vectors)}.",
        style.picture(figure),
        "Where the classes lie",
    )


def _histogram_of(task: Task, data: RatedPairs, models: Sequence[Encoder], config: EvaluationConfig) -> Picture:
    prompt, show = task.prompt(config), config.show_progress
    cosines = {}
    for system in models:
        left_ND, right_ND = (system.encode(side, prompt=prompt, show=show) for side in (data.left, data.right))
        cosines[system.label] = compared_in_pairs(left_ND, right_ND, "cosine")
    figure = embeddings.similarity_histograms(cosines, data.ratings, title=task.title)
    separations = {name: embeddings.separation(values, data.ratings) for name, values in cosines.items()}
    effects = ", ".join(
        f"{name} {separation.effect:.1f} standard deviations apart" for name, separation in separations.items()
    )
    return Picture(
        task.title,
        "Cosines of pairs by how alike people found them. An encoder of use sets the colours apart; where all pairs "
        "are near 1, everything looks alike to it.",
        f"Histograms of cosines of {task.title}; lowest and highest rated pairs: {effects}.",
        style.picture(figure),
        "How alike pairs are",
    )


def _attention(models: Sequence[LanguageModelSystem]) -> Iterator[Wanted]:
    """Yield a figure of every plan of every model; of the unmodified model only where there is no other."""
    by_plan = {(system.lm.weights_hash, system.lm.runtime.plan): system for system in models}
    converted = {weights for weights, plan in by_plan if not plan.is_causal}
    chosen = [system for (weights, plan), system in by_plan.items() if not plan.is_causal or weights not in converted]
    for system in chosen[:_MOST_PLANS]:
        name = label_of(system.lm.encoder, system.lm.n_layers)
        yield f"The attention of {system.label}", partial(_attention_of, system, name)


def _attention_of(system: LanguageModelSystem, name: str) -> Picture:
    maps = inspect_attention(system.lm.runtime, EXAMPLE_TEXTS)
    figure = attention.attention_figure(
        maps.before, maps.after, title=f"{name}, {system.lm.n_layers} layers", even=maps.even
    )
    single = [item for item in maps.after if item.run == 0]
    before, after = fmean(sink_fraction(maps.before)), fmean(sink_fraction(single))
    return Picture(
        system.label,
        f"Mean attention over {len(maps.ids)} English sentences and all heads, before and after the conversion. "
        f"The first token takes {before:.0%} of the attention before and {after:.0%} after, on average over layers.",
        f"Attention maps of {system.label}, layer by layer, before and after, and the fraction of the first token.",
        style.picture(figure),
        "Attention before and after",
    )


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

    Finished scores of earlier evaluations in the folder are shown with the new ones where seed, limit, split
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
    """Return the results of an evaluation and those of earlier ones that are shown with them.

    A system is identified by its fingerprint: an earlier result of a present one takes its present name, and
    another model that had the same name is told apart by its own. What depends only on the weights holds for every
    plan of a model.
    """
    names = {system.fingerprint: system.label for system in done.systems}
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
    reads_adapter = any(task.reads_adapter for task in task_classes() if task.kind == result.kind)
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
    for system in systems:
        system.label = names.get(system.label, system.label)
    return [replace(result, system=names[result.system]) for result in results]


def _identity(result: Result) -> str:
    return str(result.description.get("fingerprint", BM25))


def _free_name(result: Result, taken: set[str]) -> str:
    name = result.system
    if name in taken:
        name = f"{bare_name(str(result.description['model']))}: {name}"
    return name if name not in taken else f"{name} ({_identity(result)})"


def _same_config(config: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two evaluations had the same config; of prompts, those of the tasks that both name."""
    if any(config.get(name) != other.get(name) for name in ("seed", "limit", "split")):
        return False
    return all(_same_prompts(config.get(kind, {}), other.get(kind, {})) for kind in ("prompts", "document_prompts"))


def _same_prompts(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    return bool(first) == bool(second) and all(first[name] == second[name] for name in first.keys() & second.keys())


FORMAT = 3
# What no two runs have in common, at the end of the document.
_FLEETING = ("seconds", "date")


def results_json(comparison: Comparison, config: EvaluationConfig, significance: Significance = NOTHING) -> str:
    """Return the document as text.

    ``scores`` are sorted by side, kind, task and system; how long each took and when is in ``runs``, so that
    all else is the same when the same is measured again.
    """
    ordered = sorted(comparison.results, key=lambda result: (result.side, result.kind, result.task, result.system))
    document = {
        "format": FORMAT,
        "gerund": __version__,
        "packages": versions(),
        "config": config.to_dict(),
        "systems": [
            {"label": column.label, "description": shareable(column.description)} for column in comparison.columns
        ],
        "scores": [
            {name: value for name, value in result.to_dict().items() if name not in (*_FLEETING, "description")}
            for result in ordered
        ],
        "intervals": significance.intervals_of(ordered),
        "differences": significance.to_dict(),
        "runs": [
            {"task": result.task, "system": result.system, **{name: getattr(result, name) for name in _FLEETING}}
            for result in ordered
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True, default=str) + "\n"


_DESCRIPTIONS = {
    "model": "Model",
    "with": "Joined with",
    "attention": "Attention plan",
    "pooling": "Pooling",
    "prompt": "Prompt",
    "adapter_name": "Adapter",
    "adapter_plan": "Adapter trained under",
    "max_length": "Longest text (tokens)",
    "dimensions": "Dimensions",
    "n_layers": "Layers",
    "compute_dtype": "Computed in",
    "fingerprint": "Fingerprint",
    "weights": "Hash of the weights",
}


def write_page(
    folder: Path,
    comparison: Comparison,
    gallery: Gallery | None = None,
    files: Mapping[str, Sequence[str]] | None = None,
    significance: Significance = NOTHING,
) -> Path:
    """Write ``report.html`` and return its path."""
    gallery = gallery or Gallery()
    trade_off = next((picture for picture in gallery.pictures if picture.group == SUMMARY), None)
    others = Gallery(tuple(picture for picture in gallery.pictures if picture is not trade_off), gallery.missing)
    return write_html(
        folder / "report.html",
        "evaluation.html.jinja",
        title="Evaluation",
        subtitle=_subtitle(comparison),
        comparison=comparison,
        summary=_summary(comparison),
        mean_rule="Means are over the tasks that every system finished." if len(comparison.columns) > 1 else "",
        trade_off=trade_off,
        anchors={row.task: f"task-{number}" for number, row in enumerate(comparison.rows, start=1)},
        metrics=_metrics,
        significance=significance,
        significance_legend=legend(significance.leads),
        telling=telling_examples,
        raw=_raw,
        groups=others.groups(),
        missing=others.missing,
        config=_config(comparison),
        descriptions=_descriptions(comparison),
        tasks=_tasks(comparison, files or {}),
    )


def _subtitle(comparison: Comparison) -> str:
    dates = sorted(result.date[:10] for result in comparison.results)
    counts = f"{counted(len(comparison.columns), 'system')}, {counted(len(comparison.rows), 'task')}"
    if not dates:
        return counts
    return f"{counts}, measured on {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")


def _summary(comparison: Comparison) -> list[dict[str, Any]]:
    """Return one line a side where its tasks have a mean, otherwise one a kind."""
    lines = []
    for section in comparison.sections:
        if section.mean is not None:
            only = section.groups[0] if len(section.groups) == 1 else None
            detail = section.mean.label if only is None else f"{only.kind}: {_group_detail(only, section.mean)}"
            lines.append({"title": section.side.capitalize(), "detail": detail, "mean": section.mean})
            continue
        lines += [
            {"title": group.kind.capitalize(), "detail": _group_detail(group, group.mean), "mean": group.mean}
            for group in section.groups
            if group.mean is not None
        ]
    return lines


def _group_detail(group: Group, mean: Mean) -> str:
    metric = f"{group.metric}, " if group.metric is not None else ""
    return metric + (group.rows[0].title if len(group.rows) == 1 else mean.label)


def _metrics(row: Row) -> list[tuple[str, list[str]]]:
    """Return every metric of a task, the main one first, then how it was measured."""
    scores = [None if cell is None else cell.result.score for cell in row.cells]
    names = dict.fromkeys([row.metric, *(name for score in scores if score for name in score.metrics)])
    lines = [
        (name, ["–" if score is None or name not in score.metrics else _raw(score.metrics[name]) for score in scores])
        for name in names
    ]
    if any(cell.spread for cell in row.present):
        spreads = ["–" if score is None or score.spread is None else _raw(score.spread) for score in scores]
        lines.append((f"standard deviation of {row.metric}", spreads))
    lines.append(("seconds", ["–" if cell is None else f"{cell.seconds:.1f}" for cell in row.cells]))
    return lines


def _raw(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.6g}"


def _config(comparison: Comparison) -> list[tuple[str, str]]:
    configs = [result.config for result in comparison.results]
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    return [
        ("Seed", _distinct(config.get("seed") for config in configs)),
        ("Limit", _distinct(_limit(config.get("limit")) for config in configs)),
        ("Split", _distinct(config.get("split") for config in configs)),
        ("Prompts", _prompts(configs)),
        ("gerund", __version__),
        ("Packages", packages),
    ]


def _limit(limit: int | None) -> str:
    return "none, all examples" if limit is None else f"at most {limit} examples a task"


def _distinct(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _prompts(by_task: Sequence[Mapping[str, Any]]) -> str:
    prompts = {name: text for config in by_task for name, text in config.get("prompts", {}).items()}
    return "; ".join(f"{name}: {text!r}" for name, text in prompts.items()) or "none by task"


def _descriptions(comparison: Comparison) -> list[tuple[str, list[str]]]:
    descriptions = [shareable(column.description) for column in comparison.columns]
    return [
        (title, [_shown(description.get(name)) for description in descriptions])
        for name, title in _DESCRIPTIONS.items()
        if any(name in description for description in descriptions)
    ]


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return plan_text(value)
    return str(value) if value != "" else "none"


def _tasks(comparison: Comparison, files: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    facts = []
    for row in comparison.rows:
        results = [cell.result for cell in row.present]
        sizes = (result.score.size for result in results if result.score.size is not None)
        facts.append(
            {
                "name": row.task,
                "size": _distinct(sizes) or "–",
                "runs": _distinct(result.score.runs for result in results),
                "options": _distinct(_options(result.options) for result in results),
                "files": ", ".join(files.get(row.task, ())) or "–",
            }
        )
    return facts


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "–"
