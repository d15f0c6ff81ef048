"""The comparison table: scores by task and system, means, confidence intervals, significance; as data and as text."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, geometric_mean
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gerund.evaluation.run import Result
from gerund.evaluation.statistics import LEVEL, Difference, Interval, difference_of, holm, interval_of
from gerund.evaluation.systems.search import BM25
from gerund.evaluation.task import Side
from gerund.settings.plan import AttentionPlan
from gerund.types import UNITS

SIDES: tuple[Side, ...] = ("representation", "tokens", "generation")

PERCENTS = tuple(unit for unit, (factor, _) in UNITS.items() if factor == 100)
"""Units that are printed as percent."""
# From here on a perplexity is a number of digits rather than a number.
_TOO_LONG = 1e5


@dataclass(frozen=True)
class Cell:
    """One score in its place."""

    result: Result  # the score and all that it depends on
    shown: str  # the main metric as it is printed
    spread: str | None  # its standard deviation as it is printed; None for a single run
    best: bool  # whether no other system is better, and some other is worse; ties are all best
    notes: tuple[int, ...]  # numbers of the notes that are about this score alone, from 1

    @property
    def value(self) -> float:
        """The main metric as it was measured."""
        return self.result.score.value

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.result.seconds


@dataclass(frozen=True)
class Row:
    """One task."""

    task: str  # its whole name, ``kind/name``
    metric: str  # the name of the main metric
    unit: str  # what its numbers are
    higher_is_better: bool  # which way is up
    cells: tuple[Cell | None, ...]  # one a system, None where it has no score
    # Whether all scores were measured under the same limit, split and options. Otherwise none is marked as best, and
    # the task counts in no mean.
    comparable: bool
    notes: tuple[int, ...]  # numbers of the notes that hold for every score of the row

    @property
    def title(self) -> str:
        """The second half of the name."""
        return self.task.partition("/")[2] or self.task

    @property
    def present(self) -> list[Cell]:
        """The scores that are there."""
        return [cell for cell in self.cells if cell is not None]


@dataclass(frozen=True)
class Mean:
    """The mean over the tasks that every system finished."""

    label: str  # over how many tasks it is
    values: tuple[float | None, ...]  # one a system; None where it did not finish them all
    shown: tuple[str, ...]  # the values as they are printed; empty where there is none
    best: tuple[bool, ...]  # which of them are best
    higher_is_better: bool  # which way is up


@dataclass(frozen=True)
class Group:
    """The tasks of one kind."""

    kind: str
    rows: tuple[Row, ...]  # one a task
    mean: Mean | None  # None where the tasks' numbers are of different units

    @property
    def metric(self) -> str | None:
        """The main metric when all tasks share it and its direction."""
        metrics = {(row.metric, row.higher_is_better) for row in self.rows}
        return self.rows[0].metric if len(metrics) == 1 else None


@dataclass(frozen=True)
class Section:
    """One side: the tasks that read whole texts, single words, or that write."""

    side: Side  # which
    groups: tuple[Group, ...]  # one a kind
    mean: Mean | None  # over all tasks of the side; None where their numbers are not of one unit

    @property
    def rows(self) -> list[Row]:
        """All its tasks."""
        return [row for group in self.groups for row in group.rows]


@dataclass(frozen=True)
class Column:
    """One system."""

    label: str
    description: Mapping[str, Any]  # model, plan, pooling and so on
    seconds: float  # how long all its scores together took

    @property
    def only_ranks(self) -> bool:
        """Whether this is BM25, alone or with a model: it ranks documents and does nothing else."""
        return BM25 in (self.description.get("model"), self.description.get("with"))


@dataclass(frozen=True)
class Comparison:
    """The whole table."""

    columns: tuple[Column, ...]  # the systems, in the order in which they were first seen
    sections: tuple[Section, ...]  # the sides that were measured
    notes: tuple[str, ...]  # sentences that cells and rows point to; the first has number 1
    remarks: tuple[str, ...]  # sentences that hold for every score

    @property
    def rows(self) -> list[Row]:
        """All tasks."""
        return [row for section in self.sections for row in section.rows]

    @property
    def results(self) -> list[Result]:
        """The results that count."""
        return [cell.result for row in self.rows for cell in row.present]


@dataclass
class _Notes:
    """Numbers for sentences, in the order in which a reader meets them; those that hold for all scores have none."""

    remarks: tuple[str, ...]
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, sentences: Iterable[str]) -> tuple[int, ...]:
        texts = [text for text in dict.fromkeys(sentences) if text not in self.remarks]
        return tuple(self.numbers.setdefault(text, len(self.numbers) + 1) for text in texts)


def compare(results: Sequence[Result]) -> Comparison:
    """Compare results in a table.

    Of two results of one task and system the newer counts. Two numbers that are printed alike are equally good;
    where all are, as on the generation side of one model under several plans, none is marked.

    Means are over the tasks that every system finished and that were measured alike; BM25, alone or with a model,
    only ranks: it keeps no task out of a mean and has one where it finished all that is in it. A mean of perplexities
    is the geometric one.
    """
    newest: dict[tuple[str, str], Result] = {}
    for result in results:
        place = (result.task, result.system)
        if place not in newest or result.date >= newest[place].date:
            newest[place] = result
    columns = _columns(results, list(newest.values()))
    notes = _Notes(_common([_sentences(result) for result in newest.values()]))
    by_side: dict[str, dict[str, dict[str, list[Result]]]] = {}
    for result in newest.values():
        by_side.setdefault(result.side, {}).setdefault(result.kind, {}).setdefault(result.task, []).append(result)
    sections = []
    for side in SIDES:
        groups = []
        for kind, tasks in by_side.get(side, {}).items():
            rows = tuple(_row(results, columns, notes) for results in tasks.values())
            groups.append(Group(kind, rows, _mean(rows, columns)))
        if groups:
            all_rows = [row for group in groups for row in group.rows]
            sections.append(Section(side, tuple(groups), _mean(all_rows, columns)))
    return Comparison(columns, tuple(sections), tuple(notes.numbers), notes.remarks)


def shown(value: float, unit: str) -> str:
    """Return a number as tables print it.

    >>> shown(0.71324, "percent"), shown(12.3456, "perplexity"), shown(1.23456, "bits"), shown(-0.00001, "fraction")
    ('71.32', '12.35', '1.235', '0.00')
    """
    factor, decimals = UNITS[unit]
    if unit == "perplexity" and abs(value) >= _TOO_LONG:
        return f"{value:.2e}"
    # Adding zero turns -0.00 into 0.00.
    return f"{round(factor * value, decimals) + 0.0:.{decimals}f}"


def _columns(results: Sequence[Result], newest: list[Result]) -> tuple[Column, ...]:
    columns = []
    for label in dict.fromkeys(result.system for result in results):
        results_of_label = [result for result in newest if result.system == label]
        latest = max(results_of_label, key=lambda result: result.date)
        columns.append(Column(label, latest.description, sum(result.seconds for result in results_of_label)))
    return tuple(columns)


def _row(results: list[Result], columns: Sequence[Column], notes: _Notes) -> Row:
    by_label = {result.system: result for result in results}
    ordered = [by_label[column.label] for column in columns if column.label in by_label]
    first = ordered[0]
    comparable = len({_conditions(result) for result in ordered}) == 1
    sentences = {result.system: _sentences(result) + _otherwise(result, comparable) for result in ordered}
    common = _common(list(sentences.values()))
    row_notes = notes.number(common)
    numbers = [shown(result.score.value, result.unit) for result in ordered]
    best = _best(numbers, first.higher_is_better) if comparable else set()
    cells = {
        result.system: Cell(
            result,
            number,
            None if result.score.spread is None else shown(result.score.spread, result.unit),
            number in best,
            notes.number(text for text in sentences[result.system] if text not in common),
        )
        for result, number in zip(ordered, numbers, strict=True)
    }
    return Row(
        first.task,
        first.score.main,
        first.unit,
        first.higher_is_better,
        tuple(cells.get(column.label) for column in columns),
        comparable,
        row_notes,
    )


def _conditions(result: Result) -> str:
    """Return what two scores have to have in common to be compared."""
    conditions = [result.config.get("limit"), result.config.get("split"), dict(result.options), result.score.main]
    return json.dumps(conditions, sort_keys=True, default=str)


def _sentences(result: Result) -> list[str]:
    """Return what a reader of the number has to know."""
    sentences = [note if note.endswith((".", "!", "?")) else f"{note}." for note in result.score.notes]
    if (limit := result.config.get("limit")) is not None:
        sentences.append(f"Scored on at most {limit} examples.")
    if result.config.get("split") == "validation":
        sentences.append("Scored on the validation split.")
    trained, read = (result.description.get(name) for name in ("adapter_plan", "attention"))
    if result.reads_plan and trained is not None and trained != read:
        sentences.append(f"{trained_under(result.description)}, and is read under another plan.")
    return sentences


def trained_under(facts: Mapping[str, Any]) -> str:
    """Return the beginning of a sentence: which plan an adapter was trained under.

    >>> trained_under({"adapter_name": "mine", "adapter_plan": {"name": "bidir"}})
    'The adapter mine was trained under bidir'
    """
    return f"The adapter {facts.get('adapter_name')} was trained under {plan_text(facts['adapter_plan'])}"


def plan_text(plan: Mapping[str, Any]) -> str:
    """Return a plan's name, and whatever is not as usual.

    >>> plan_text({"name": "mask0-bidir", "k": 3, "k0": None})
    'mask0-bidir k=3'
    """
    usual = AttentionPlan("causal").to_dict()
    others = [f"{key}={item}" for key, item in plan.items() if key != "name" and item != usual.get(key)]
    return " ".join([str(plan.get("name", "")), *others])


def _otherwise(result: Result, comparable: bool) -> list[str]:
    """Return what a reader of scores that cannot be compared has to know."""
    if comparable:
        return []
    sentences = ["Scores of this row were measured under different settings; none is marked as best."]
    if result.options:
        sentences.append(f"Options: {', '.join(f'{name}={value}' for name, value in result.options.items())}.")
    return sentences


def _common(sentences: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the sentences that are in all lists, in the order of the first."""
    first = sentences[0] if sentences else ()
    return tuple(text for text in dict.fromkeys(first) if all(text in others for others in sentences))


def _best(numbers: Sequence[str], higher_is_better: bool) -> set[str]:
    """Return what the best of several printed numbers looks like; nothing where none is better than another."""
    if len(set(numbers)) < 2:
        return set()
    return {max(numbers, key=float) if higher_is_better else min(numbers, key=float)}


def _mean(rows: Sequence[Row], columns: Sequence[Column]) -> Mean | None:
    if len({(row.unit, row.higher_is_better) for row in rows}) != 1:
        return None
    first = rows[0]
    # Who has no score at all among these tasks keeps none of them out.
    needed = [
        place
        for place, column in enumerate(columns)
        if not column.only_ranks and any(row.cells[place] is not None for row in rows)
    ]
    shared = [row for row in rows if row.comparable and all(row.cells[place] is not None for place in needed)]
    values = [_mean_of([row.cells[place] for row in shared], first.unit) for place in range(len(columns))]
    texts = ["" if value is None else shown(value, first.unit) for value in values]
    best = _best([text for text in texts if text], first.higher_is_better)
    return Mean(
        _mean_label(len(shared), len(rows), first.unit),
        tuple(values),
        tuple(texts),
        tuple(bool(text) and text in best for text in texts),
        first.higher_is_better,
    )


def _mean_of(cells: Sequence[Cell | None], unit: str) -> float | None:
    values = [cell.value for cell in cells if cell is not None]
    if not values or len(values) < len(cells):
        return None
    if unit == "perplexity" and all(value > 0 for value in values):
        return geometric_mean(values)
    mean = fmean(values)
    return mean if math.isfinite(mean) else None


def _mean_label(shared: int, total: int, unit: str) -> str:
    kind = "geometric mean" if unit == "perplexity" else "mean"
    if not shared:
        return f"{kind}: no task was finished by all alike"
    of = f"{shared} of {total}" if shared < total else str(total)
    return f"{kind} of {of} task{'s' if total > 1 else ''}"


DOUBTFUL = 0.05
"""From this p value on a difference may well be chance."""
_MOST_EXAMPLES = 10


@dataclass(frozen=True)
class Lead:
    """The best system of a task compared with another one."""

    task: str  # ``kind/name``
    unit: str  # of the scores
    best: str  # the system that is ahead
    other: str  # the system that it is compared with
    difference: Difference  # by how much, with the p value of this comparison alone
    p: float  # what that becomes with all comparisons of the row

    @property
    def is_sure(self) -> bool:
        """Whether chance is an unlikely explanation."""
        return self.p < DOUBTFUL

    @property
    def verdict(self) -> str:
        """Whether the best is better by more than chance, in a word: ``yes``, ``unsure`` or ``equal``."""
        if self.difference.value == 0:
            return "equal"
        return "yes" if self.is_sure else "unsure"

    @property
    def text(self) -> str:
        """The difference in a line, without the names.

        >>> found = Difference(0.0123, Interval(0.001, 0.02), 0.004, 50)
        >>> Lead("sts/a", "percent", "one", "other", found, 0.008).text
        '+1.23 (0.10 to 2.00), p = 0.008'
        """
        low, high = (shown(bound, self.unit) for bound in (self.difference.interval.low, self.difference.interval.high))
        chance = f"p = {self.p:.3f}" if self.p >= 0.001 else "p < 0.001"
        return f"{self.difference.value * UNITS[self.unit][0]:+.2f} ({low} to {high}), {chance}"


@dataclass(frozen=True)
class TellingExample:
    """An example on which systems are far apart."""

    id: str  # of the example
    # What it contributes to each system's score, in the order of the table's columns; None without.
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Significance:
    """What is known of a table's scores and differences."""

    intervals: dict[tuple[str, str], Interval]  # by task and system
    leads: tuple[Lead, ...] = ()  # of each task with at least two systems, in the order of the table

    def interval_text(self, result: Result) -> str:
        """Return an interval as tables print it; empty without one."""
        interval = self.intervals.get((result.task, result.system))
        return "" if interval is None else f"{shown(interval.low, result.unit)}–{shown(interval.high, result.unit)}"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the comparisons, ready for JSON."""
        return [
            {
                "task": lead.task,
                "better": lead.best,
                "other": lead.other,
                "difference": round(lead.difference.value, 6),
                "interval": _rounded(lead.difference.interval),
                "p": round(lead.difference.p, 6),
                "p_holm": round(lead.p, 6),
                "examples": lead.difference.examples,
            }
            for lead in self.leads
        ]

    def intervals_of(self, results: Sequence[Result]) -> list[dict[str, Any]]:
        """Return the intervals of those results that have one, ready for JSON."""
        places = [(result.task, result.system) for result in results]
        known = [(place, self.intervals[place]) for place in places if place in self.intervals]
        return [{"task": task, "system": system, "interval": _rounded(interval)} for (task, system), interval in known]


NOTHING = Significance({})


def significance_of(comparison: Comparison) -> Significance:
    """Compute all intervals and differences of a table."""
    intervals = {}
    leads: list[Lead] = []
    for row in comparison.rows:
        for cell in row.present:
            examples = cell.result.score.examples
            if examples is not None and (interval := interval_of(examples)) is not None:
                intervals[row.task, cell.result.system] = interval
        if row.comparable:
            leads += _leads(row)
    return Significance(intervals, tuple(leads))


def telling_examples(row: Row) -> list[TellingExample]:
    """Return the examples of a mean on which the systems of a task are farthest apart, those first."""
    tables: list[dict[str, float] | None] = []
    for cell in row.cells:
        examples = None if cell is None else cell.result.score.examples
        tables.append(
            dict(zip(examples.ids, examples.values, strict=True))
            if examples is not None and examples.targets is None
            else None
        )
    present = [table for table in tables if table is not None]
    if len(present) < 2:
        return []
    shared = [name for name in present[0] if all(name in table for table in present)]

    def apart(name: str) -> float:
        values = [table[name] for table in present]
        return max(values) - min(values)

    widest = sorted((name for name in shared if apart(name) > 0), key=lambda name: -apart(name))
    return [
        TellingExample(name, tuple(None if table is None else table[name] for table in tables))
        for name in widest[:_MOST_EXAMPLES]
    ]


def _leads(row: Row) -> list[Lead]:
    able = [cell.result for cell in row.present if cell.result.score.examples is not None]
    if len(able) < 2:
        return []
    sign = 1 if row.higher_is_better else -1
    best = max(able, key=lambda result: sign * result.score.value)
    compared = [_lead(best, other) for other in able if other is not best]
    leads = [lead for lead in compared if lead is not None]
    allowed = holm([lead.p for lead in leads])
    return [replace(lead, p=p) for lead, p in zip(leads, allowed, strict=True)]


def _lead(best: Result, other: Result) -> Lead | None:
    first, second = best.score.examples, other.score.examples
    gap = None if first is None or second is None else difference_of(first, second)
    return None if gap is None else Lead(best.task, best.unit, best.system, other.system, gap, gap.p)


def _rounded(interval: Interval) -> list[float]:
    return [round(interval.low, 6), round(interval.high, 6)]


def legend(leads: Sequence[Lead]) -> str:
    """Say what intervals and p values are."""
    if not leads:
        return ""
    return (
        f"Intervals hold {LEVEL:.0%} of what other examples would give (bootstrap). p is the chance of a difference as "
        "large where the systems are equally good (randomisation test over the same examples, for correlations the "
        "bootstrap; Holm's correction for all comparisons of a row)."
    )


_GAP = 2
# Differences that are printed; a page has room for all.
_MOST_LEADS = 12
# Names of systems wrap beyond this, names of tasks beyond this fraction of the console.
_WIDEST_LABEL = 20
_FRACTION_OF_NAMES = 0.4


def render(comparison: Comparison, console: Console, significance: Significance = NOTHING) -> None:
    """Print the table; in several blocks of systems where the console is too narrow for all, and notes below.

    The best of a row has a star. In a pipe there are no colours and no spaces at the ends of lines.
    """
    layout = _Layout(comparison, console)
    with console.capture() as captured:
        for places in layout.blocks():
            console.print(_block(comparison, places, layout))
            console.print()
        _print_legend(comparison, console, layout)
        _print_leads(significance, console)
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    # Names may hold anything, and the other end may know ASCII alone.
    console.file.write(text.encode(console.encoding, "replace").decode(console.encoding))


class _Layout:
    """Widths of the columns, and the characters that arrive at the other end."""

    def __init__(self, comparison: Comparison, console: Console) -> None:
        utf = "utf" in console.encoding
        self.up, self.down, self.plus_minus = ("↑", "↓", "±") if utf else ("(up)", "(down)", "+-")
        cells = [cell for row in comparison.rows for cell in row.present]
        groups = [group for section in comparison.sections for group in section.groups]
        owners = [*[section.mean for section in comparison.sections], *[group.mean for group in groups]]
        means = [mean for mean in owners if mean is not None]
        numbers = [cell.shown for cell in cells] + [text for mean in means for text in mean.shown]
        self.number = max((len(text) for text in numbers), default=1)
        self.spread = max((len(self.spread_of(cell.spread)) for cell in cells), default=0)
        notes = max((len(notes_text(cell.notes)) for cell in cells), default=0)
        self._labels = [cell_len(column.label) for column in comparison.columns]
        widest = min(_WIDEST_LABEL, max(self._labels, default=1))
        self.column = max(self.number + 1 + self.spread + notes, widest)
        names = [cell_len(self.group_name(group)) for group in groups]
        names += [cell_len(self.row_name(row, group)) for group in groups for row in group.rows]
        names += [len(mean.label) + 2 for mean in means]
        self.names = min(max(names, default=1), int(_FRACTION_OF_NAMES * console.width))
        self._width = console.width

    def blocks(self) -> list[range]:
        """Return the columns of each block of the table; blocks have about equal size."""
        count = len(self._labels)
        fitting = max(1, (self._width - self.names) // (self.column + _GAP))
        blocks = max(1, -(-count // fitting))
        size = max(1, -(-count // blocks))
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def way(self, higher_is_better: bool) -> str:
        """Return the arrow that shows which way is up."""
        return self.up if higher_is_better else self.down

    def spread_of(self, spread: str | None) -> str:
        """Return a spread as it follows a number."""
        return f" {self.plus_minus}{spread}" if spread is not None else ""

    def group_name(self, group: Group) -> str:
        """Return the kind, with the metric where all its tasks share it."""
        if group.metric is None:
            return group.kind
        return f"{group.kind}: {group.metric} {self.way(group.rows[0].higher_is_better)}"

    def row_name(self, row: Row, group: Group) -> str:
        """Return the task, with its metric where it is not the whole kind's."""
        metric = "" if group.metric is not None else f": {row.metric} {self.way(row.higher_is_better)}"
        return f"  {row.title}{metric}{notes_text(row.notes)}"


def notes_text(notes: tuple[int, ...]) -> str:
    """Return numbers of notes as they stand behind a number.

    >>> notes_text((1, 3))
    ' [1,3]'
    """
    return f" [{','.join(map(str, notes))}]" if notes else ""


def _block(comparison: Comparison, places: range, layout: _Layout) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("", width=layout.names, overflow="fold")
    for place in places:
        table.add_column(Text(comparison.columns[place].label), width=layout.column, overflow="fold")
    for number, section in enumerate(comparison.sections):
        if number:
            table.add_row()
        _add_section(table, section, places, layout)
    return table


def _add_section(table: Table, section: Section, places: range, layout: _Layout) -> None:
    table.add_row(Text(section.side.upper(), style="bold cyan"))
    for group in section.groups:
        table.add_row(Text(layout.group_name(group), style="bold"))
        for row in group.rows:
            table.add_row(Text(layout.row_name(row, group)), *(_cell(row, place, layout) for place in places))
        if group.mean is not None and len(group.rows) > 1:
            _add_mean(table, f"  {group.mean.label}", group.mean, places, layout)
    if section.mean is not None and len(section.groups) > 1:
        _add_mean(table, section.mean.label, section.mean, places, layout)


def _add_mean(table: Table, label: str, mean: Mean, places: range, layout: _Layout) -> None:
    cells = [_number(mean.shown[place], mean.best[place], layout) for place in places]
    table.add_row(Text(label), *cells, style="italic")


def _cell(row: Row, place: int, layout: _Layout) -> Text:
    cell = row.cells[place]
    if cell is None:
        return Text("-".rjust(layout.number), style="dim")
    text = _number(cell.shown, cell.best, layout)
    text.append(layout.spread_of(cell.spread).ljust(layout.spread), style="dim")
    return text.append(notes_text(cell.notes), style="dim")


def _number(shown: str, best: bool, layout: _Layout) -> Text:
    return Text(shown.rjust(layout.number) + ("*" if best else " "), style="bold green" if best else "")


def _print_leads(significance: Significance, console: Console) -> None:
    """Print how sure the differences to the best are, the least sure first: these a reader has to know."""
    apart = [lead for lead in significance.leads if lead.verdict != "equal"]
    leads = sorted(apart, key=lambda lead: -lead.p)
    if not leads:
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", title_justify="left")
    for name in ("difference to the best", "better", "than", "by (95% interval), chance"):
        table.add_column(Text(name), overflow="fold")
    for lead in leads[:_MOST_LEADS]:
        words = (lead.task, lead.best, lead.other, lead.text)
        table.add_row(*map(Text, words), style="" if lead.is_sure else "yellow")
    console.print()
    console.print(table)
    if len(leads) > _MOST_LEADS:
        console.print(Text(f"{len(leads) - _MOST_LEADS} more, all of them surer, in report.html", style="dim"))


def _print_legend(comparison: Comparison, console: Console, layout: _Layout) -> None:
    words = [f"{layout.up} higher is better, {layout.down} lower is better"]
    if any(cell.best for row in comparison.rows for cell in row.present):
        words.append("* best of its row")
    if layout.spread:
        words.append(f"{layout.plus_minus} standard deviation over runs")
    console.print(Text("; ".join(words), style="dim"))
    for remark in comparison.remarks:
        console.print(Text(remark))
    if comparison.notes:
        notes = Table.grid(padding=(0, 1, 0, 0))
        for number, note in enumerate(comparison.notes, start=1):
            notes.add_row(Text(f"[{number}]"), Text(note))
        console.print(notes)
