"""Evaluate keyword, vector and hybrid search on the held-out documents before and after training, and report it.

Shapes: Q queries.
"""

import json
import math
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from gerund.adaptation.config import MINUTES, AdaptConfig, Choice, recipe_of
from gerund.adaptation.data import Collected, Pairs, Query, Split, chunking_for
from gerund.errors import MissingDependencyError
from gerund.evaluation.statistics import Difference, Interval, difference_of, interval_of
from gerund.evaluation.task import Examples
from gerund.jobs.files import write_atomic
from gerund.progress import progress
from gerund.reporting.rendering import bare_name, duration, versions, write_html
from gerund.retrieval.hybrid_search import DEPTH, MODES, Mode
from gerund.retrieval.index import open_index
from gerund.settings.ranking import RelevanceMeasure
from gerund.version import __version__

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.types import Hit


MEASURES = ("nDCG@10", "recall@10", "MRR@10")
MAIN = MEASURES[0]

SECOND_STAGES: Mapping[RelevanceMeasure, str] = {
    "model": "the trained reranker",
    "lift": "lift, which needs no training",
}
"""Measures that re-rank the first hits where a reranker was trained, by what reports call them."""
RERANKED = 20
"""Hits that they re-rank."""

_CUT = 10
_DOCUMENTS_AT_ONCE = 64
_QUERIES_AT_ONCE = 64
# Documents by which it is found out how long measuring takes.
_SAMPLE = 48


@dataclass(frozen=True)
class Measured:
    """What a model finds."""

    values: Mapping[str, Mapping[str, tuple[float, ...]]]
    """For each way to search (``words``, ``vectors``, ``hybrid``) and measure one number a query, from 0 to 1."""
    documents: int  # how many documents were searched
    chunks: int  # how many chunks they were cut into
    weight: float  # what the vectors count in ``hybrid``
    second_seconds: Mapping[str, float] = field(default_factory=dict)
    """For each second stage, whose values are those of ``rerank MEASURE``, how long it took per query."""

    def mean(self, mode: str, measure: str = MAIN) -> float:
        """Return the mean over all queries."""
        values = self.values[mode][measure]
        return sum(values) / len(values)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what ``to_dict`` described."""
        result = {mode: {name: tuple(item) for name, item in by.items()} for mode, by in values["values"].items()}
        return cls(result, values["documents"], values["chunks"], values["weight"], values.get("second_seconds", {}))


def measure(
    lm: "LanguageModel",
    split: Split,
    language: str = "en",
    label: str = "measuring",
    *,
    second: Iterable[RelevanceMeasure] = (),
    show: bool | None = None,
) -> Measured:
    """Index all documents as ``gerund index`` would, in memory, and search them for every query.

    A document's place is that of its best chunk among the first 100. Each measure of ``second`` re-ranks the first 20
    chunks of a search by words and vectors.
    """
    index = open_index(None, lm, chunking=chunking_for(lm, language))
    corpus, chunks = split.corpus, 0
    with progress(len(corpus) + len(split.queries), label, show=show) as advance:
        for first in range(0, len(corpus), _DOCUMENTS_AT_ONCE):
            documents = corpus[first : first + _DOCUMENTS_AT_ONCE]
            chunks += index.add_documents(documents).chunks
            advance(len(documents))
        stages = {f"rerank {by}": by for by in second}
        scores: dict[str, dict[str, list[float]]] = {
            mode: {name: [] for name in MEASURES} for mode in (*MODES, *stages)
        }
        seconds = dict.fromkeys(stages.values(), 0.0)
        for first in range(0, len(split.queries), _QUERIES_AT_ONCE):
            queries = split.queries[first : first + _QUERIES_AT_ONCE]
            texts = [query.text for query in queries]
            for mode in MODES:
                _score(queries, index.search_all(texts, DEPTH, mode=mode), scores[mode])
            for name, by in stages.items():
                results = index.search_all(texts, DEPTH, rerank=RERANKED, rerank_by=by)
                _score(queries, results, scores[name])
                seconds[by] += sum(hits.rerank.seconds for hits in results if hits.rerank is not None)
            advance(len(queries))
    values = {mode: {name: tuple(scores) for name, scores in by.items()} for mode, by in scores.items()}
    each: dict[str, float] = {by: total / len(split.queries) for by, total in seconds.items()}
    return Measured(values, len(corpus), chunks, lm.fusion_weight, each)


def evaluation_seconds(lm: "LanguageModel", split: Split, language: str = "en") -> float:
    """Return about how long ``measure`` will take, by indexing some of the documents."""
    step = max(1, len(split.corpus) // _SAMPLE)
    sample = split.corpus[::step][:_SAMPLE]
    index = open_index(None, lm, chunking=chunking_for(lm, language))
    begin = time.perf_counter()
    index.add_documents(sample)
    characters = [sum(len(item.text) for item in some) for some in (split.corpus, sample)]
    return (time.perf_counter() - begin) * characters[0] / max(1, characters[1])


def _score(queries: Sequence[Query], rankings: "Sequence[Sequence[Hit]]", scores: dict[str, list[float]]) -> None:
    for query, hits in zip(queries, rankings, strict=True):
        ranked = list(dict.fromkeys(hit.source for hit in hits))
        for name, value in zip(MEASURES, scores_of(ranked, query.sources), strict=True):
            scores[name].append(value)


def scores_of(ranked: Sequence[str], relevant: Sequence[str]) -> tuple[float, float, float]:
    """Return nDCG@10, recall@10 and MRR@10 of a ranking, all relevant documents counting the same.

    >>> scores_of(["b", "a"], ["a"])
    (0.6309297535714575, 1.0, 0.5)
    >>> scores_of(["b"], ["a"])
    (0.0, 0.0, 0.0)
    """
    ranks = [rank for rank, source in enumerate(ranked[:_CUT], start=1) if source in relevant]
    best = sum(1 / math.log2(rank + 1) for rank in range(1, min(len(relevant), _CUT) + 1))
    gain = sum(1 / math.log2(rank + 1) for rank in ranks)
    return gain / best, len(ranks) / len(relevant), 1 / ranks[0] if ranks else 0.0


MODE_NAMES: Mapping[Mode, str] = {"words": "words (BM25)", "vectors": "vectors", "hybrid": "words and vectors"}
"""Names of the search modes, as reports print them."""

Outcome = Literal["helped", "hurt", "no matter", "unknown"]

SIGNIFICANT = 0.05
# Differences below this many points are nothing that anybody would see.
_POINT = 0.01


@dataclass(frozen=True)
class Compared:
    """One way to search by one measure, before and after."""

    mode: Mode
    measure: str
    before: float  # its mean before
    before_interval: Interval  # of that mean
    after: float  # its mean after
    after_interval: Interval  # of that mean
    change: Difference | None
    """How much it rose, and whether by more than chance; None where nothing was trained, for words alone."""

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
    """Check that a comparison can be made, before hours are spent on what is to be compared."""
    try:
        import scipy.stats  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("comparing before and after needs scipy: pip install 'gerund[eval]'") from error


def compare(before: Measured, after: Measured, seed: int = 0) -> list[Compared]:
    """Compare all ways to search by all measures; words alone are the same before and after."""
    result = []
    for mode in MODE_NAMES:
        for measure in MEASURES:
            old, new = (Examples.of_mean(measured.values[mode][measure]) for measured in (before, after))
            old_interval, new_interval = interval_of(old, seed=seed), interval_of(new, seed=seed)
            assert old_interval is not None
            assert new_interval is not None
            change = None if mode == "words" else difference_of(new, old, seed=seed)
            means = before.mean(mode, measure), after.mean(mode, measure)
            result.append(Compared(mode, measure, means[0], old_interval, means[1], new_interval, change))
    return result


def main_of(compared: Sequence[Compared], mode: str) -> Compared:
    """Return the comparison by nDCG@10 of one way to search."""
    return next(item for item in compared if (item.mode, item.measure) == (mode, MAIN))


def verdict(compared: Sequence[Compared]) -> str:
    """Say in one sentence whether it helped."""
    vectors, both = main_of(compared, "vectors"), main_of(compared, "hybrid")
    text = {
        "helped": "It helped: searched by vectors alone, the held-out documents are found better",
        "hurt": "It did not help: searched by vectors alone, the held-out documents are found worse",
        "no matter": "It did not help: searched by vectors alone, the held-out documents are found as before",
        "unknown": "It cannot be told whether it helped: searched by vectors alone, the difference may be chance",
    }[vectors.outcome]
    too = " too" if vectors.outcome == "helped" else ""
    hybrid = {
        "helped": f"by words and vectors they are found better{too}",
        "hurt": "by words and vectors they are found worse",
        "no matter": "by words and vectors nothing changes",
        "unknown": "by words and vectors the difference may be chance",
    }[both.outcome]  # fmt: skip
    return f"{text} ({shown(vectors)}); {hybrid} ({shown(both)})."


def beside_words(after: Measured, seed: int = 0) -> str:
    """Say whether the trained model finds the held-out documents better than BM25 alone, in one sentence."""
    texts = []
    for mode, name in (("hybrid", "words and vectors together"), ("vectors", "vectors alone")):
        outcome, figures = _beside(after, mode, "words", seed)
        texts.append(f"{name} {'may be' if outcome == 'as good' else 'are'} {outcome} ({figures})")
    return f"Beside BM25 ({MAIN} {100 * after.mean('words'):.1f}), after the training {' and '.join(texts)}."


def second_stage(after: Measured, seed: int = 0) -> list[str]:
    """Say what re-ranking adds to a search by words and vectors and to BM25, and what it costs, for each measure."""
    result = []
    for by, name in SECOND_STAGES.items():
        if (mode := f"rerank {by}") not in after.values:
            continue
        parts = []
        for other, called in (("hybrid", "the search alone"), ("words", "BM25 alone")):
            outcome, figures = _beside(after, mode, other, seed)
            verdict = "may be as good as" if outcome == "as good" else f"is {outcome} than"
            parts.append(f"{verdict} {called} ({figures})")
        figures = f"{MAIN} {100 * after.mean(mode):.1f}, {after.second_seconds[by]:.2f} s per query"
        what = f"Re-ranking the first {RERANKED} hits of words and vectors by {name}"
        result.append(f"{what} ({figures}) {' and '.join(parts)}.")
    return result


def _beside(measured: Measured, mode: str, other: str, seed: int) -> tuple[str, str]:
    """Return whether a way to search is surely ``better`` or ``worse`` than another, else ``as good``; and by what."""
    new, old = (Examples.of_mean(measured.values[each][MAIN]) for each in (mode, other))
    difference = difference_of(new, old, seed=seed)
    assert difference is not None
    low, high = difference.interval.low, difference.interval.high
    surely = difference.p < SIGNIFICANT and (low > 0 or high < 0)
    outcome = "as good" if not surely else "better" if low > 0 else "worse"
    return outcome, f"{_signed(difference.value)} [{_signed(low)} to {_signed(high)}]"


def second_stage_advice(after: Measured, seed: int = 0) -> list[str]:
    """Return what to do with a trained reranker, a sentence; nothing where none was measured."""
    if "rerank model" not in after.values:
        return []
    if _beside(after, "rerank model", "hybrid", seed)[0] != "better":
        return ["The reranker is not surely better than the search alone: leave --rerank out, or train for longer."]
    if "rerank lift" in after.values and _beside(after, "rerank model", "rerank lift", seed)[0] == "worse":
        return ["Use --rerank-by lift, which ranks better than the trained reranker."]
    return ["Search with --rerank 20, which now takes the trained reranker."]


def shown(compared: Compared) -> str:
    """Return a comparison in figures, as percent."""
    figures = f"{compared.measure} {100 * compared.before:.1f} before, {100 * compared.after:.1f} after"
    if compared.change is None:
        return figures
    low, high = compared.change.interval.low, compared.change.interval.high
    return (
        f"{figures}, {_signed(compared.change.value)} [{_signed(low)} to {_signed(high)}], {_chance(compared.change)}"
    )


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f}"


def _chance(change: Difference) -> str:
    return "p < 0.001" if change.p < 0.001 else f"p = {change.p:.3f}"


def advice(compared: Sequence[Compared], facts: Mapping[str, Any]) -> list[str]:
    """Return what to try next, a sentence each.

    ``facts`` has the number of ``queries``, of ``verbatim`` ones, what decided the number of steps (``bound``), and
    ``minutes``.
    """
    vectors, both, words = (main_of(compared, mode) for mode in ("vectors", "hybrid", "words"))
    result = []
    if vectors.outcome == "unknown":
        result.append(
            f"{facts['queries']} queries cannot tell a change of this size: hold out more documents (--held-out), or "
            "give your own questions (--questions)."
        )
    if vectors.outcome != "helped":
        more = f"--minutes {2 * facts['minutes']:g}" if facts["bound"] == "minutes" else "more documents"
        result.append(
            f"Try {more}, or another recipe: --recipe unimae-default trains on the texts themselves, without pairs."
        )
        result.append("Keep the model that you had: its folder was not changed.")
    if 2 * facts["verbatim"] > facts["queries"]:
        result.append(
            f"{facts['verbatim']} of {facts['queries']} queries stand word for word in their documents, which flatters "
            "words: measure with --ask sentences, or with questions as people ask them (--questions)."
        )
    elif vectors.after < words.after and both.after <= words.after:
        result.append(
            "On these queries words alone do as well as words and vectors: `gerund search --mode words` needs no "
            "model, and `gerund tune --fusion` finds what the vectors should count."
        )
    return result


FORMAT = 1
_EXAMPLES = 8


@dataclass(frozen=True)
class Adapted:
    """What came of an adaptation."""

    model: str
    """What was adapted, as it was named."""
    folder: Path
    """Where everything lies."""
    collected: Collected
    """The documents."""
    split: Split
    """Which of them were held out, and the queries."""
    pairs: Pairs
    """What was trained on."""
    choice: Choice
    """The recipe, and why."""
    before: Measured
    """What the model found before."""
    after: Measured
    """What it found afterwards."""
    compared: tuple[Compared, ...]
    """Both by every way to search and measure."""
    options: AdaptConfig
    """What was asked for."""
    parameters: int
    """Of the model."""
    seconds: float
    """How long this run took."""

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
    def beside_words(self) -> str:
        """Whether the trained model does better than BM25 alone, in one sentence."""
        return beside_words(self.after, self.options.seed)

    @property
    def second_stage(self) -> list[str]:
        """What re-ranking adds and costs, a sentence a measure; nothing where no reranker was trained."""
        return second_stage(self.after, self.options.seed)

    @property
    def advice(self) -> list[str]:
        """What to try next."""
        minutes = MINUTES if self.options.minutes is None else self.options.minutes
        counts = {"queries": len(self.split.queries), "verbatim": self.split.verbatim}
        facts = counts | {"bound": self.choice.bound, "minutes": minutes}
        return [*advice(self.compared, facts), *second_stage_advice(self.after, self.options.seed)]

    def next_commands(self, texts: Sequence[str | Path]) -> list[str]:
        """Return the commands that use the adapted model."""
        index = f"{self.folder}.index"
        query = self.split.queries[0].text
        files = " ".join(shlex.quote(str(text)) for text in texts)
        return [
            f"gerund index {files} -o {shlex.quote(index)} -m {shlex.quote(str(self.encoder))}",
            f"gerund search {shlex.quote(index)} {shlex.quote(query[:60])}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: the content of ``report.json``."""
        choice = self.choice
        published = choice.recipe.published()
        return {
            "format": FORMAT,
            "gerund": __version__,
            "packages": versions(),
            "model": bare_name(self.model),
            "parameters": self.parameters,
            "verdict": self.verdict,
            "beside_words": self.beside_words,
            "second_stage": self.second_stage,
            "advice": self.advice,
            "compared": [item.to_dict() for item in self.compared],
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
                      "questions": self.pairs.questions, "written": self.pairs.written,
                      "left_out": self.pairs.left_out},
            "training": {
                "recipe": published | {"model": published["model"] | {"base": bare_name(self.model)}},
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
            MODE_NAMES[item.mode],
            item.measure,
            _figure(item.before, item.before_interval),
            "the same" if item.change is None else _figure(item.after, item.after_interval),
            "" if item.change is None else _change(item.change),
            "" if item.change is None else _OUTCOMES[item.outcome],
        )
        for item in compared
    ]


def write_report(done: Adapted) -> None:
    """Write ``report.html``, and then ``report.json``, which says that all is done."""
    write_html(
        done.page,
        "adaptation.html.jinja",
        title=f"{bare_name(done.model)}, adapted to {len(done.collected.documents):,} documents",
        verdict=done.verdict,
        beside_words=done.beside_words,
        second_stage=done.second_stage,
        advice=done.advice,
        rows=rows_of(done.compared),
        gained=_moved(done, better=True),
        lost=_moved(done, better=False),
        facts_told=_facts(done),
    )
    document = json.dumps(done.to_dict(), indent=1, ensure_ascii=False, default=str)
    write_atomic(done.folder / "report.json", document + "\n")


def _figure(mean: float, interval: Interval) -> str:
    return f"{100 * mean:.1f} [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def _change(change: Difference) -> str:
    low, high = change.interval.low, change.interval.high
    return f"{_signed(change.value)} [{_signed(low)}, {_signed(high)}], {_chance(change)}"


def _moved(done: Adapted, *, better: bool) -> list[tuple[str, str, str]]:
    """Return the queries whose nDCG@10 by vectors rose or fell most, with both figures."""
    before, after = (item.values["vectors"]["nDCG@10"] for item in (done.before, done.after))
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
        ("Held out", f"{done.split.summary}; sampled by a hash of their text, and never trained on"),
        ("Pairs", done.pairs.summary),
        ("Pairs left out", f"{done.pairs.left_out:,}, which share a sentence with a held-out document"),
        ("Recipe", bare_name(str(recipe_of(done.options)))),
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
