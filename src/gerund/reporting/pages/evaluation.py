"""``report.html``: the comparison as one page that stands alone.

Knows: comparisons, pictures as bytes. Does not know: models, how pictures are drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.reporting.comparison import Comparison, Group, Mean, Row, plan_text
from gerund.reporting.document import shareable, versions
from gerund.reporting.pages.rendering import Gallery, write_html
from gerund.reporting.significance import NOTHING, Significance, legend, telling_examples
from gerund.version import __version__

SUMMARY = "Summary"
"""The group whose first picture stands beside the summary."""

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


@dataclass(frozen=True)
class _SummaryLine:
    title: str
    detail: str
    mean: Mean


@dataclass(frozen=True)
class _TaskFacts:
    name: str
    size: str
    runs: str
    options: str
    files: str


def write_page(
    folder: Path,
    comparison: Comparison,
    gallery: Gallery | None = None,
    files: Mapping[str, Sequence[str]] | None = None,
    significance: Significance = NOTHING,
) -> Path:
    """Write ``report.html`` and return where it lies.

    Args:
        folder: of the report; made where it is missing.
        comparison: what was measured.
        gallery: pictures, and why others are missing.
        files: names of the data files by task, as far as they are known.
        significance: how sure scores and differences are.

    Raises:
        ResourceError: the disk is full or refuses; nothing is left behind.
    """
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
        mean_rule=_mean_rule(comparison),
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
    counts = f"{_count(len(comparison.columns), 'system')}, {_count(len(comparison.rows), 'task')}"
    if not dates:
        return counts
    return f"{counts}, measured on {dates[0]}" + (f" to {dates[-1]}" if dates[-1] != dates[0] else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _summary(comparison: Comparison) -> list[_SummaryLine]:
    """Return one line a side where its tasks have a mean, otherwise one a kind."""
    lines = []
    for section in comparison.sections:
        if section.mean is not None:
            only = section.groups[0] if len(section.groups) == 1 else None
            detail = section.mean.label if only is None else f"{only.kind}: {_group_detail(only, section.mean)}"
            lines.append(_SummaryLine(section.side.capitalize(), detail, section.mean))
            continue
        lines += [
            _SummaryLine(group.kind.capitalize(), _group_detail(group, group.mean), group.mean)
            for group in section.groups
            if group.mean is not None
        ]
    return lines


def _group_detail(group: Group, mean: Mean) -> str:
    metric = f"{group.metric}, " if group.metric is not None else ""
    return metric + (group.rows[0].title if len(group.rows) == 1 else mean.label)


def _mean_rule(comparison: Comparison) -> str:
    if len(comparison.columns) < 2:
        return ""
    return "Means are over the tasks that every system finished."


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
    found = [result.config for result in comparison.results]
    packages = ", ".join(f"{name} {number}" for name, number in versions().items())
    return [
        ("Seed", _distinct(config.get("seed") for config in found)),
        ("Limit", _distinct(_limit(config.get("limit")) for config in found)),
        ("Split", _distinct(config.get("split") for config in found)),
        ("Prompts", _prompts(found)),
        ("gerund", __version__),
        ("Packages", packages),
    ]


def _limit(limit: int | None) -> str:
    return "none, all examples" if limit is None else f"at most {limit} examples a task"


def _distinct(values: Any) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _prompts(found: Sequence[Mapping[str, Any]]) -> str:
    prompts = {name: text for config in found for name, text in config.get("prompts", {}).items()}
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


def _tasks(comparison: Comparison, files: Mapping[str, Sequence[str]]) -> list[_TaskFacts]:
    facts = []
    for row in comparison.rows:
        results = [cell.result for cell in row.present]
        facts.append(
            _TaskFacts(
                row.task,
                _distinct(result.score.size for result in results if result.score.size is not None) or "–",
                _distinct(result.score.runs for result in results),
                _distinct(_options(result.options) for result in results),
                ", ".join(files.get(row.task, ())) or "–",
            )
        )
    return facts


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "–"
