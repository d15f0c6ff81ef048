"""How sure a table's scores are, and which of its differences are more than chance.

Every score that is made of single examples has an interval. In each row the best of these is compared with every other
one on the same examples; the p values of a row allow for how many comparisons it has (Holm).

Knows: comparisons, statistics. Does not know: where either is printed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gerund.evaluation.results import Result
from gerund.evaluation.statistics import LEVEL, Difference, Interval, difference_of, holm, interval_of
from gerund.reporting.comparison import PERCENTS, Comparison, Row, shown

DOUBTFUL = 0.05
"""From this p value on a difference may well be chance."""
_MOST_EXAMPLES = 10


@dataclass(frozen=True)
class Lead:
    """The best system of a task compared with another one.

    Attributes:
        task: ``kind/name``.
        unit: of the scores.
        best: the system that is ahead.
        other: the system that it is compared with.
        difference: by how much, with the p value of this comparison alone.
        p: what that becomes with all comparisons of the row.
    """

    task: str
    unit: str
    best: str
    other: str
    difference: Difference
    p: float

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
        low, high = (shown(one, self.unit) for one in (self.difference.interval.low, self.difference.interval.high))
        chance = f"p = {self.p:.3f}" if self.p >= 0.001 else "p < 0.001"
        return f"{self.difference.value * _factor(self.unit):+.2f} ({low} to {high}), {chance}"


@dataclass(frozen=True)
class TellingExample:
    """An example on which systems are far apart.

    Attributes:
        id: of the example.
        values: what it contributes to each system's score, in the order of the table's columns; None without.
    """

    id: str
    values: tuple[float | None, ...]


@dataclass(frozen=True)
class Significance:
    """What is known of a table's scores and differences.

    Attributes:
        intervals: by task and system.
        leads: of each task with at least two systems, in the order of the table.
    """

    intervals: dict[tuple[str, str], Interval]
    leads: tuple[Lead, ...] = ()

    def interval_text(self, result: Result) -> str:
        """Return an interval as tables print it; empty without one."""
        found = self.intervals.get((result.task, result.system))
        return "" if found is None else f"{shown(found.low, result.unit)}–{shown(found.high, result.unit)}"

    def leads_of(self, task: str) -> list[Lead]:
        """Return the comparisons of one task."""
        return [lead for lead in self.leads if lead.task == task]

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
        return [{"task": task, "system": system, "interval": _rounded(found)} for (task, system), found in known]


NOTHING = Significance({})


def significance_of(comparison: Comparison) -> Significance:
    """Compute all intervals and differences of a table."""
    intervals = {}
    leads: list[Lead] = []
    for row in comparison.rows:
        for cell in row.present:
            examples = cell.result.score.examples
            if examples is not None and (found := interval_of(examples)) is not None:
                intervals[row.task, cell.result.system] = found
        if row.comparable:
            leads += _leads(row)
    return Significance(intervals, tuple(leads))


def telling_examples(row: Row) -> list[TellingExample]:
    """Return the examples of a mean on which the systems of a task are farthest apart, those first."""
    tables: list[dict[str, float] | None] = []
    for cell in row.cells:
        own = None if cell is None else cell.result.score.examples
        tables.append(dict(zip(own.ids, own.values, strict=True)) if own is not None and own.targets is None else None)
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
    found = [_lead(best, other) for other in able if other is not best]
    leads = [lead for lead in found if lead is not None]
    allowed = holm([lead.p for lead in leads])
    return [replace(lead, p=p) for lead, p in zip(leads, allowed, strict=True)]


def _lead(best: Result, other: Result) -> Lead | None:
    one, two = best.score.examples, other.score.examples
    found = None if one is None or two is None else difference_of(one, two)
    return None if found is None else Lead(best.task, best.unit, best.system, other.system, found, found.p)


def _factor(unit: str) -> float:
    return 100.0 if unit in PERCENTS else 1.0


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
