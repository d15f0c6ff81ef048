"""Whether training helped, in one sentence: means before and after, their intervals, and a paired test.

Knows: measurements, statistics. Does not know: models, pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gerund.adaptation.measuring import MAIN, MEASURES, MODE_NAMES, Measured
from gerund.errors import MissingDependencyError
from gerund.evaluation.statistics import Difference, Interval, difference_of, interval_of
from gerund.evaluation.task import Examples
from gerund.retrieval.searching import Mode

Outcome = Literal["helped", "hurt", "no matter", "unknown"]

SIGNIFICANT = 0.05
# Differences below this many points are nothing that anybody would see.
_POINT = 0.01


@dataclass(frozen=True)
class Compared:
    """One way to search by one measure, before and after.

    Attributes:
        mode: the way to search.
        measure: the measure.
        before: its mean before.
        before_interval: of that mean.
        after: its mean after.
        after_interval: of that mean.
        change: how much it rose, and whether by more than chance; None where nothing was trained, for words alone.
    """

    mode: Mode
    measure: str
    before: float
    before_interval: Interval
    after: float
    after_interval: Interval
    change: Difference | None

    @property
    def outcome(self) -> Outcome:
        """Whether it helped; ``no matter`` where it is sure that it changed less than a point."""
        if self.change is None:
            return "no matter"
        low, high = self.change.interval.low, self.change.interval.high
        if self.change.p < SIGNIFICANT and (low > 0 or high < 0):
            return "helped" if low > 0 else "hurt"
        return "no matter" if low > -_POINT and high < _POINT else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self) | {"outcome": self.outcome}


def require_statistics() -> None:
    """Check that a comparison can be made, before hours are spent on what is to be compared.

    Raises:
        MissingDependencyError: scipy is not installed.
    """
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("comparing before and after needs scipy: pip install 'gerund[eval]'") from error


def compare(before: Measured, after: Measured, seed: int = 0) -> list[Compared]:
    """Compare all ways to search by all measures; words alone are the same before and after."""
    found = []
    for mode in MODE_NAMES:
        for measure in MEASURES:
            one, other = (Examples.of_mean(own.values[mode][measure]) for own in (before, after))
            intervals = [interval_of(own, seed=seed) for own in (one, other)]
            assert intervals[0] is not None
            assert intervals[1] is not None
            change = None if mode == "words" else difference_of(other, one, seed=seed)
            means = before.mean(mode, measure), after.mean(mode, measure)
            found.append(Compared(mode, measure, means[0], intervals[0], means[1], intervals[1], change))
    return found


def main_of(compared: Sequence[Compared], mode: str) -> Compared:
    """Return the comparison by nDCG@10 of one way to search."""
    return next(one for one in compared if (one.mode, one.measure) == (mode, MAIN))


def verdict(compared: Sequence[Compared]) -> str:
    """Say in one sentence whether it helped."""
    vectors, both = main_of(compared, "vectors"), main_of(compared, "hybrid")
    told = {
        "helped": "It helped: searched by vectors alone, the documents put aside are found better",
        "hurt": "It did not help: searched by vectors alone, the documents put aside are found worse",
        "no matter": "It did not help: searched by vectors alone, the documents put aside are found as before",
        "unknown": "It cannot be told whether it helped: searched by vectors alone, the difference may be chance",
    }[vectors.outcome]
    too = " too" if vectors.outcome == "helped" else ""
    beside = {
        "helped": f"by words and vectors they are found better{too}",
        "hurt": "by words and vectors they are found worse",
        "no matter": "by words and vectors nothing changes",
        "unknown": "by words and vectors the difference may be chance",
    }[both.outcome]  # fmt: skip
    return f"{told} ({shown(vectors)}); {beside} ({shown(both)})."


def shown(one: Compared) -> str:
    """Return a comparison in figures, as percent."""
    figures = f"{one.measure} {100 * one.before:.1f} before, {100 * one.after:.1f} after"
    if one.change is None:
        return figures
    low, high = one.change.interval.low, one.change.interval.high
    p = "p < 0.001" if one.change.p < 0.001 else f"p = {one.change.p:.3f}"
    return f"{figures}, {_signed(one.change.value)} [{_signed(low)} to {_signed(high)}], {p}"


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


def advice(compared: Sequence[Compared], facts: Mapping[str, Any]) -> list[str]:
    """Return what to try next, a sentence each.

    Args:
        compared: before and after.
        facts: ``queries``, and ``verbatim`` ones of them; ``bound``, what decided the number of steps; ``minutes``.
    """
    vectors, both, words = (main_of(compared, mode) for mode in ("vectors", "hybrid", "words"))
    found = []
    if vectors.outcome == "unknown":
        found.append(
            f"{facts['queries']} queries cannot tell a change of this size: put more documents aside (--held-out), or "
            "give your own questions (--questions)."
        )
    if vectors.outcome != "helped":
        more = f"--minutes {2 * facts['minutes']:g}" if facts["bound"] == "minutes" else "more documents"
        found.append(
            f"Try {more}, or another recipe: --recipe unimae-default trains on the texts themselves, without pairs."
        )
        found.append("Keep the model that you had: its folder was not changed.")
    if 2 * facts["verbatim"] > facts["queries"]:
        found.append(
            f"{facts['verbatim']} of {facts['queries']} queries stand word for word in their documents, which flatters "
            "words: measure with --ask sentences, or with questions as people ask them (--questions)."
        )
    elif vectors.after < words.after and both.after <= words.after:
        found.append(
            "On these queries words alone do as well as words and vectors: `gerund search --mode words` needs no "
            "model, and `gerund tune --fusion` finds what the vectors should count."
        )
    return found
