"""What came of an adaptation: as a value, as a page, and as JSON.

Knows: measurements, the parts of a report. Does not know: how anything was done.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.adaptation.choosing import Choice
from gerund.adaptation.config import MINUTES, AdaptConfig
from gerund.adaptation.documents import Collected
from gerund.adaptation.measuring import MODE_NAMES, Measured
from gerund.adaptation.pairs import Pairs
from gerund.adaptation.queries import Split
from gerund.adaptation.verdict import Compared, advice, verdict
from gerund.evaluation.statistics import Interval
from gerund.jobs.files import write_whole
from gerund.reporting.document import bare_name, versions
from gerund.reporting.pages.rendering import duration, write_html
from gerund.version import __version__

FORMAT = 1
_EXAMPLES = 8


@dataclass(frozen=True)
class Adapted:
    """What came of an adaptation.

    Attributes:
        model: what was adapted, as it was named.
        folder: where everything lies.
        collected: the documents.
        split: which of them were put aside, and the queries.
        pairs: what was trained on.
        choice: the recipe, and why.
        before: what the model found before.
        after: what it found afterwards.
        compared: both by every way to search and measure.
        options: what was asked for.
        parameters: of the model.
        seconds: how long this run took.
    """

    model: str
    folder: Path
    collected: Collected
    split: Split
    pairs: Pairs
    choice: Choice
    before: Measured
    after: Measured
    compared: tuple[Compared, ...]
    options: AdaptConfig
    parameters: int
    seconds: float

    @property
    def encoder(self) -> Path:
        """The folder of the adapted model."""
        return self.folder / "model"

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / "report.html"

    @property
    def verdict(self) -> str:
        """Whether it helped, in one sentence."""
        return verdict(self.compared)

    @property
    def advice(self) -> list[str]:
        """What to try next."""
        minutes = MINUTES if self.options.minutes is None else self.options.minutes
        asked = {"queries": len(self.split.queries), "verbatim": self.split.verbatim}
        facts = asked | {"bound": self.choice.bound, "minutes": minutes}
        return advice(self.compared, facts)

    def next_commands(self, texts: Sequence[str | Path]) -> list[str]:
        """Return the commands that use the adapted model.

        Args:
            texts: what it was adapted to.
        """
        index = f"{self.folder}.index"
        query = self.split.queries[0].text
        files = " ".join(shlex.quote(str(one)) for one in texts)
        return [
            f"gerund index {files} -o {shlex.quote(index)} -m {shlex.quote(str(self.encoder))}",
            f"gerund search {shlex.quote(index)} {shlex.quote(query[:60])}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the content of ``report.json``."""
        choice = self.choice
        return {
            "format": FORMAT,
            "gerund": __version__,
            "packages": versions(),
            "model": bare_name(self.model),
            "parameters": self.parameters,
            "verdict": self.verdict,
            "advice": self.advice,
            "compared": [one.to_dict() for one in self.compared],
            "documents": {
                "read": len(self.collected.documents),
                "files": self.collected.files,
                "not_read": len(self.collected.failed),
                "repeated": self.collected.repeated,
                "trained_on": len(self.split.training),
                "put_aside": len(self.split.held_out),
                "searched": self.after.documents,
                "chunks": self.after.chunks,
            },
            "queries": {"count": len(self.split.queries), "kinds": self.split.kinds, "verbatim": self.split.verbatim},
            "pairs": {"sentences": self.pairs.sentences, "titles": self.pairs.titles, "chunks": self.pairs.chunks,
                      "left_out": self.pairs.left_out},
            "training": {
                "recipe": choice.recipe.model_dump(mode="json", exclude={"output": True, "data": {"folder", "cache"}})
                | {"model": choice.recipe.model.model_dump(mode="json") | {"base": bare_name(self.model)}},
                "bound": choice.bound,
                "epochs": choice.epochs,
                "estimated_seconds": choice.seconds,
                "memory_mib": choice.memory_mib,
            },
            "weight_of_vectors": self.after.weight,
            "options": self.options.to_dict() | {
                name: None if value is None else bare_name(str(value))
                for name, value in (("questions", self.options.questions), ("recipe", self.options.recipe))
            },
            "seconds": round(self.seconds, 1),
        }  # fmt: skip


@dataclass(frozen=True)
class _Row:
    name: str
    measure: str
    before: str
    after: str
    change: str
    outcome: str


_OUTCOMES = {"helped": "better", "hurt": "worse", "no matter": "as before", "unknown": "cannot be told"}


def rows_of(compared: Sequence[Compared]) -> list[_Row]:
    """Return the comparison as a table: figures in percent, intervals in brackets."""
    return [
        _Row(
            MODE_NAMES[one.mode],
            one.measure,
            _figure(one.before, one.before_interval),
            "the same" if one.change is None else _figure(one.after, one.after_interval),
            "" if one.change is None else _change(one),
            "" if one.change is None else _OUTCOMES[one.outcome],
        )
        for one in compared
    ]


def write_report(done: Adapted) -> None:
    """Write ``report.html``, and then ``report.json``, which says that all is done.

    Raises:
        ResourceError: the disk is full or refuses.
    """
    write_html(
        done.page,
        "adaptation.html.jinja",
        title=f"{bare_name(done.model)}, adapted to {len(done.collected.documents):,} documents",
        verdict=done.verdict,
        advice=done.advice,
        rows=rows_of(done.compared),
        gained=_moved(done, better=True),
        lost=_moved(done, better=False),
        facts_told=_facts(done),
    )
    document = json.dumps(done.to_dict(), indent=1, ensure_ascii=False, default=str)
    write_whole(done.folder / "report.json", document + "\n")


def _figure(mean: float, interval: Interval) -> str:
    return f"{100 * mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _change(one: Compared) -> str:
    assert one.change is not None
    change, p = one.change, "p < 0.001" if one.change.p < 0.001 else f"p = {one.change.p:.3f}"
    return f"{100 * change.value:+.1f} [{100 * change.interval.low:+.1f}, {100 * change.interval.high:+.1f}], {p}"


def _moved(done: Adapted, *, better: bool) -> list[tuple[str, str, str]]:
    """Return the queries whose nDCG@10 by vectors rose or fell most, with both figures."""
    before, after = (own.values["vectors"]["nDCG@10"] for own in (done.before, done.after))
    sign = 1 if better else -1
    changed = sorted(range(len(before)), key=lambda place: sign * (before[place] - after[place]))
    return [
        (done.split.queries[place].text, f"{100 * before[place]:.0f}", f"{100 * after[place]:.0f}")
        for place in changed[:_EXAMPLES]
        if sign * (after[place] - before[place]) > 0
    ]


def _facts(done: Adapted) -> list[tuple[str, str]]:
    recipe, choice = done.choice.recipe, done.choice
    lora = recipe.model.lora
    why = {
        "minutes": "as many as there was time for",
        "pairs": "ten times through the pairs; more would be learning them by heart",
        "steps": "as was asked for",
        "recipe": "as the recipe says",
    }[choice.bound]
    return [
        ("Model", f"{bare_name(done.model)}, {done.parameters:,} parameters"),
        ("Documents", done.collected.summary),
        ("Put aside", f"{done.split.summary}; sampled by a hash of their text, and never trained on"),
        ("Pairs", done.pairs.summary),
        ("Pairs left out", f"{done.pairs.left_out:,}, which share a sentence with a document that was put aside"),
        ("Recipe", bare_name(str(done.options.recipe or "gur-adapt"))),
        ("Adapter", "the model's own, trained further" if lora is None else f"a new one of rank {lora.rank}"),
        ("Learning rate", f"{recipe.optimizer.learning_rate:g}"),
        ("Steps", f"{recipe.steps:,} of {recipe.objectives[0].batch_size}: {why}"),
        ("Times through the pairs", "not counted" if choice.epochs is None else f"{choice.epochs:.1f}"),
        (
            "Searched",
            f"{done.after.documents:,} documents in {done.after.chunks:,} chunks, cut as gerund index cuts them",
        ),
        ("A document's place", "that of its best chunk among the first 100"),
        ("Vectors count", f"{done.after.weight:g} where they are joined with words"),
        ("Intervals", "95%, by resampling queries (bootstrap); p by a paired randomisation test"),
        ("This run took", duration(done.seconds)),
        ("gerund", __version__),
        ("Packages", ", ".join(f"{name} {number}" for name, number in versions().items())),
    ]
