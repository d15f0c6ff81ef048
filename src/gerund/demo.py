"""``gerund demo``: one model searches, generates, ranks and infills, and a page shows the results."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gerund.entry import load
from gerund.errors import GerundError
from gerund.inference.infill import BLANK
from gerund.inference.inspection import EXAMPLE_TEXTS, AttentionInspection, inspect_attention
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import count_parameters
from gerund.models.architectures import demand_decoder_only
from gerund.models.sources import find
from gerund.reporting.plots.attention import attention_figure
from gerund.reporting.plots.embeddings import embedding_maps
from gerund.reporting.plots.style import INK, headline, new_figure, picture
from gerund.reporting.rendering import Gallery, Picture, drawn, write_html
from gerund.scoring.names import DEFAULT
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import AttentionPlan
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Ranked


@dataclass(frozen=True)
class Passage:
    """A document, with the topic that it is about."""

    id: str
    topic: str
    text: str


@dataclass(frozen=True)
class Search:
    """What is searched for: something that one document says in other words."""

    text: str
    answer: Passage


@dataclass(frozen=True)
class Beginning:
    """A text that is continued."""

    text: str
    right: str  # the sentence that follows it
    wrong: tuple[str, ...]  # sentences that do not


@dataclass(frozen=True)
class Gap:
    """A text with a ``[blank]``, and what might stand there."""

    text: str
    original: str


def read_documents() -> list[Passage]:
    """Read ``documents.jsonl``."""
    return [Passage(row["id"], row["topic"], row["text"]) for row in _rows("documents.jsonl")]


def read_searches() -> list[Search]:
    """Read ``queries.jsonl``."""
    documents = {document.id: document for document in read_documents()}
    return [Search(row["text"], documents[row["answer"]]) for row in _rows("queries.jsonl")]


def read_beginnings() -> list[Beginning]:
    """Read ``beginnings.jsonl``."""
    return [Beginning(row["text"], row["right"], tuple(row["wrong"])) for row in _rows("beginnings.jsonl")]


def read_gaps() -> list[Gap]:
    """Read ``gaps.jsonl``."""
    return [Gap(row["text"], row["original"]) for row in _rows("gaps.jsonl")]


def _rows(name: str) -> list[dict[str, Any]]:
    text = (resources.files("gerund") / "assets" / "demo" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


@dataclass(frozen=True)
class SearchResults:
    """What the searches found, under one attention plan."""

    plan: str  # name of the plan, and of the adapter where there is one; or what the baseline is called
    first: tuple[str, ...]  # for each search the document that came first
    ranks: tuple[int, ...]  # for each search the place of the document that answers it, from 1

    @property
    def right(self) -> int:
        """How many searches found their document first."""
        return self.ranks.count(1)

    @property
    def place(self) -> float:
        """The mean place of the document that answers."""
        return sum(self.ranks) / len(self.ranks)


@dataclass(frozen=True)
class Scored:
    """A continuation with its score; scores of one beginning can be compared."""

    text: str
    score: float


@dataclass(frozen=True)
class Written:
    """How one beginning was continued."""

    prompt: str
    plain: str  # one continuation, sampled without looking at any score
    ranked: tuple[Scored, ...]  # those that were sampled to choose from, best first; empty where the model cannot rank


@dataclass(frozen=True)
class Fitting:
    """Which of several sentences a scorer lets follow a beginning."""

    prompt: str
    candidates: tuple[Scored, ...]  # the sentences, best first
    right: str  # the one that follows it

    @property
    def is_right(self) -> bool:
        """Whether the right one came first."""
        return self.candidates[0].text == self.right


@dataclass(frozen=True)
class Filled:
    """A gap, filled in two ways."""

    before: str  # the text before the gap
    after: str  # the text behind it
    span: str  # the filling, seeing both sides
    left_only: str  # the filling by the untouched model, seeing the left side
    original: str  # what stood there


@dataclass(frozen=True)
class Verification:
    """What was compared with the model as plain transformers loads it, and what came out."""

    tokens: int  # how many positions were compared
    numbers: int  # how many logits that makes
    difference: float  # the largest difference between two logits
    same_text: bool  # whether greedy decoding wrote the same tokens

    @property
    def is_equal(self) -> bool:
        """Whether every logit is the same to the last bit, and so is the text."""
        return self.difference == 0 and self.same_text


@dataclass(frozen=True)
class DemoResults:
    """All that one run of the demo found."""

    searches: tuple[SearchResults, ...]  # with the untouched causal attention, then under the plan, then as it encodes
    written: tuple[Written, ...]  # the beginnings, continued
    scorer: str  # what ranked them
    fitting: tuple[Fitting, ...]  # the beginnings with sentences to choose from
    likely: int  # for how many of them the likelihood of a token chooses the right one
    filled: tuple[Filled, ...]  # the gaps; empty where the model cannot see both sides of one
    verification: Verification  # whether it is still the same language model


SMALL = 50_000_000
# Not the name of a plan: the model's own may be the causal one.
BASELINE = "untouched"
LIKELIHOOD = "avg_cll"
SAMPLES = 8
# Beginnings that are continued; all of them are ranked.
_CONTINUED = 3
NEW_TOKENS = 48
_SAMPLING = Sampling(temperature=0.8, top_p=0.9, seed=1)
# Lengths of a gap that are tried.
_LENGTHS = (1, 2, 3, 4, 6, 8, 12)
# Through which layers without the attention sink are looked at, where the model's own plan does not hide it.
_SINKLESS = AttentionPlan("mask0-bidir")


class Demo:
    """The steps of the demo, in the order of the methods; each is timed under its name.

    Attributes:
        documents: the collection.
        queries: what is searched for in it.
        beginnings: texts that are continued.
        gaps: texts with a gap.
        missing: a sentence for each thing that this model cannot show.
        seconds: how long each step took.
        vectors: the documents' vectors, by the name of the plan; those of the baseline first.
        lm: the model, once ``start`` has loaded it.
    """

    lm: LanguageModel

    def __init__(self, spec: ModelSpec) -> None:
        """Read the texts."""
        self.spec = spec
        self.documents = read_documents()
        self.queries = read_searches()
        self.beginnings = read_beginnings()
        self.gaps = read_gaps()
        self.missing: list[str] = []
        self.seconds: dict[str, float] = {}
        self.vectors: dict[str, np.ndarray] = {}

    @property
    def kind(self) -> str:
        """Architecture and size of the model in a few words."""
        parameters = count_parameters(self.lm.model)
        return (
            f"{self.lm.model.config.model_type}, {self.lm.n_layers} layers, {parameters / 1e6:.1f} million parameters"
        )

    @property
    def reads_as(self) -> str:
        """How the model's own encoder is called: its plan, and whether an adapter was trained for it."""
        plan = self.lm.encoder.attention.name
        return plan if self.lm.runtime.adapter is None else f"{plan} + adapter"

    @property
    def topics(self) -> list[str]:
        """The topic of each document."""
        return [item.topic for item in self.documents]

    def prompts(self, own: str | None) -> list[str]:
        """Return the texts that are continued: the user's own, and some beginnings."""
        return [*([own] if own else []), *(item.text for item in self.beginnings[:_CONTINUED])]

    @property
    def scorer(self) -> str:
        """Who ranks: the model itself where it was trained to, or a measure of its likelihoods."""
        return "the model's own scorer" if self.lm.scorer is not None else DEFAULT

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes under the name of a step."""
        start = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start

    def start(self) -> LanguageModel:
        """Load the model; loading verifies that the attention plan reaches every layer.

        A small model leaves the process with one thread: several would wait for each other longer than they
        compute, and much longer still where something else keeps a core busy.
        """
        with self.timed("load and verify the plan"):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self.lm = load(self.spec, runtime="torch")
            demand_decoder_only(self.lm.model, "show what the demo shows")
            if self.lm.model.num_parameters() > SMALL:
                torch.set_num_threads(threads)
        return self.lm

    def search(self) -> tuple[SearchResults, ...]:
        """Search as the model is untouched, under its plan alone where it has an adapter, and as it encodes."""
        texts = len(self.documents) + len(self.queries)
        with self.timed(f"embed {texts} texts, untouched"):
            # Causal attention, no adapter and the mean.
            lm = load(self.spec, runtime="torch", attention="causal", pooling="mean", adapter=NO_ADAPTER)
            searches = [self._found(lm, BASELINE)]
        if self.lm.runtime.adapter is not None:
            with self.timed(f"embed {texts} texts, plan alone"):
                lm = load(self.spec, runtime="torch", adapter=NO_ADAPTER)
                searches.append(self._found(lm, self.lm.encoder.attention.name))
        with self.timed(f"embed {texts} texts"):
            searches.append(self._found(self.lm, self.reads_as))
        self.vectors = {item.plan: self.vectors[item.plan] for item in (searches[0], searches[-1])}
        return tuple(searches)

    def write(self, prompts: list[str]) -> tuple[Written, ...]:
        """Continue each beginning once, then several times to keep what a scorer likes best, where the model can."""
        with self.timed(f"write {len(prompts)} texts"):
            plain = self.lm.generate(prompts, NEW_TOKENS, _SAMPLING)
        try:
            with self.timed(f"write {SAMPLES} continuations of each and rank them"):
                ranked = self.lm.generate(prompts, NEW_TOKENS, _SAMPLING, rerank=Rerank(samples=SAMPLES))
        except GerundError as error:
            self.missing.append(f"Nothing was ranked: {error}.")
            return tuple(Written(prompt, item.text, ()) for prompt, item in zip(prompts, plain, strict=True))
        written = []
        for prompt, generation, best in zip(prompts, plain, ranked, strict=True):
            assert isinstance(best, Ranked)
            rows = tuple(Scored(item.text, item.rank_score) for item in best.history[-1])
            written.append(Written(prompt, generation.text, rows))
        return tuple(written)

    def choose(self, scorer: str | None = None) -> tuple[Fitting, ...]:
        """Let a scorer, by default the model's best, choose the sentence that follows each beginning."""
        with self.timed("choose what fits"):
            candidates = [(item.right, *item.wrong) for item in self.beginnings]
            scores = self.lm.score([item.text for item in self.beginnings], candidates, scorer)
        chosen = []
        for item, texts, row in zip(self.beginnings, candidates, scores, strict=True):
            rows = sorted(map(Scored, texts, row), key=lambda candidate: -candidate.score)
            chosen.append(Fitting(item.text, tuple(rows), item.right))
        return tuple(chosen)

    def fill(self) -> tuple[Filled, ...]:
        """Fill each gap seeing both sides, and seeing the left side alone; nothing where the model cannot."""
        filled = []
        with self.timed(f"fill {len(self.gaps)} gaps"):
            for gap in self.gaps:
                before, after = gap.text.split(BLANK)
                try:
                    spans = [
                        self.lm.infill(gap.text, lengths=_LENGTHS, method=method).spans[0]
                        for method in ("infill", "left-only")
                    ]
                except GerundError as error:
                    self.missing.append(f"No span was infilled: {error}.")
                    return ()
                both, left = spans
                filled.append(Filled(before.rstrip(), after, both, left, gap.original))
        return tuple(filled)

    def inspect_attention(self) -> tuple[AttentionInspection, AttentionPlan] | None:
        """Record the attention of the layers, before and after the sink is hidden, and under which plan; or nothing."""
        with self.timed("inspect the attention"):
            attention = self.lm.encoder.attention
            plan, lm = attention, self.lm
            if not any(view.hidden for view in self.lm.runtime.plan.views):
                # An adapter is at home under its own plan: another one shows what the plan does on the weights alone.
                if lm.runtime.adapter is not None:
                    lm = load(self.spec, runtime="torch", attention="causal", adapter=NO_ADAPTER)
                try:
                    plan, lm = _SINKLESS, lm.with_encoder(replace(lm.encoder, attention=_SINKLESS))
                except GerundError as error:
                    self.missing.append(f"Attention is not shown without the sink: {error}.")
            try:
                return inspect_attention(lm.runtime, EXAMPLE_TEXTS), plan.with_defaults(self.lm.n_layers)
            except GerundError as error:
                self.missing.append(f"Attention is not shown: {error}.")
                return None

    def verify(self, prompt: str, max_new_tokens: int = 24) -> Verification:
        """Compare with the folder as plain transformers opens it: every logit, and a greedy continuation."""
        with self.timed("compare with plain transformers"):
            # AutoModelForCausalLM.from_pretrained: no plan, none of our attention functions.
            plain, _ = loading.read(find(self.spec.model), self.lm.model.dtype)
            texts = [prompt, *(item.text for item in self.queries)]
            return _compare(self.lm, plain.to(self.lm.device), texts, max_new_tokens)

    def _found(self, lm: LanguageModel, name: str) -> SearchResults:
        documents = lm.encode([item.text for item in self.documents], show_progress=False)
        queries = lm.encode([item.text for item in self.queries], show_progress=False)
        self.vectors[name] = documents
        scores = lm.similarity(queries, documents)
        answers = [self.documents.index(query.answer) for query in self.queries]
        ranks = [1 + int((row > row[answer]).sum()) for row, answer in zip(scores, answers, strict=True)]
        first = [self.documents[place].text for place in scores.argmax(axis=1)]
        return SearchResults(name, tuple(first), tuple(ranks))


@torch.no_grad()
def _compare(lm: LanguageModel, plain: Any, texts: list[str], max_new_tokens: int) -> Verification:
    tokens = numbers = 0
    difference = 0.0
    for text in texts:
        ids = lm.tokenizer(text, return_tensors="pt").input_ids.to(lm.device)
        ours, theirs = lm.model(ids).logits, plain(ids).logits
        tokens += ids.shape[1]
        numbers += ours.numel()
        difference = max(difference, float((ours.double() - theirs.double()).abs().max()))
    ids = lm.tokenizer(texts[0], return_tensors="pt").input_ids.to(lm.device)
    settings = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": lm.tokenizer.pad_token_id or 0}
    same = [model.generate(ids, attention_mask=torch.ones_like(ids), **settings) for model in (lm.model, plain)]
    return Verification(tokens, numbers, difference, torch.equal(*same))


PAGE = "demo.html"
REPORT = "demo.json"
SEARCHING, ATTENTION = "searching", "attention"

_PANEL_INCHES = 4.6


def report_of(demo: Demo, results: DemoResults) -> dict[str, Any]:
    """Put everything that the demo found into one JSON-ready dict."""
    lm = demo.lm
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "dimensions": lm.dimensions,
        "fingerprint": lm.fingerprint(),
        "searches": [
            {
                "query": query.text,
                "answer": query.answer.text,
                "ranks": {item.plan: item.ranks[number] for item in results.searches},
                "first": {item.plan: item.first[number] for item in results.searches},
            }
            for number, query in enumerate(demo.queries)
        ],
        "found_first": {item.plan: item.right for item in results.searches},
        "mean_place": {item.plan: round(item.place, 2) for item in results.searches},
        "written": [asdict(item) for item in results.written],
        "scorer": results.scorer,
        "likelihood_right": results.likely,
        "fitting": [{**asdict(item), "is_right": item.is_right} for item in results.fitting],
        "filled": [asdict(item) for item in results.filled],
        "missing": demo.missing,
        "verification": {**asdict(results.verification), "equal": results.verification.is_equal},
        "seconds": {step: round(value, 3) for step, value in demo.seconds.items()},
    }


def write_report(folder: Path, results: dict[str, Any]) -> Path:
    """Write what the demo found as JSON."""
    write_atomic(folder / REPORT, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return folder / REPORT


def write_page(folder: Path, demo: Demo, results: DemoResults, pictures: Gallery) -> Path:
    """Write the page that shows all of it."""
    lm = demo.lm
    groups = dict(pictures.groups())
    seconds = sum(demo.seconds.values())
    return write_html(
        folder / PAGE,
        "demo.html.jinja",
        title=f"{Path(lm.name).name}: one model, four models' work",
        kind=demo.kind,
        plan=demo.reads_as,
        queries=demo.queries,
        documents=len(demo.documents),
        results=results,
        fitting_right=sum(item.is_right for item in results.fitting),
        searching=groups.get(SEARCHING, []),
        attention=groups.get(ATTENTION, []),
        missing=[*demo.missing, *pictures.missing],
        seconds=[*((step, value, value / seconds) for step, value in demo.seconds.items()), ("together", seconds, 1.0)],
    )


def gallery(
    vectors: Mapping[str, np.ndarray],
    topics: Sequence[str],
    inspected: tuple[AttentionInspection, AttentionPlan] | None,
    plan_of_model: AttentionPlan,
) -> Gallery:
    """Draw everything; what cannot be drawn is a sentence."""
    # t-SNE is scikit-learn's, which the demo can do without.
    method = "tsne" if find_spec("sklearn") is not None else "pca"
    figures = [
        ("The map of the documents", lambda: _map(vectors, topics, method)),
        ("The picture of similarities", lambda: _similarities(vectors, topics)),
    ]
    if inspected is not None:
        figures.append(("The picture of attention", lambda: _attention(*inspected, plan_of_model)))
    return drawn(figures)


def _map(vectors: Mapping[str, np.ndarray], topics: Sequence[str], method: str) -> Picture:
    maps = {
        f"{when}: {plan}": vectors_ND
        for when, (plan, vectors_ND) in zip(("before", "after"), vectors.items(), strict=True)
    }
    figure = embedding_maps(maps, topics, title="The documents on a plane", method=method)
    return Picture(
        "A map of the documents",
        "Each point is a document, colored by a topic that the model never sees: encoded by the base model, and as "
        "the model encodes.",
        "Two scatter plots of the documents, coloured by topic, before and after the conversion.",
        picture(figure),
        SEARCHING,
    )


def _similarities(vectors: Mapping[str, np.ndarray], topics: Sequence[str]) -> Picture:
    figure = new_figure(_PANEL_INCHES * len(vectors), _PANEL_INCHES)
    headline(figure, "How alike every two documents are")
    for axes, (plan, vectors_ND) in zip(
        figure.subplots(1, len(vectors), squeeze=False)[0], vectors.items(), strict=True
    ):
        _draw_similarities(axes, plan, topics, vectors_ND)
    return Picture(
        "Similarities",
        "Cosines of every two documents, sorted by topic. Bright squares on the diagonal are topics that were told "
        "apart.",
        "Two matrices of cosines, before and after the conversion.",
        picture(figure),
        SEARCHING,
    )


def _draw_similarities(axes: Any, plan: str, topics: Sequence[str], vectors: np.ndarray) -> None:
    unit_ND = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine_NN = unit_ND @ unit_ND.T
    low, high = np.percentile(cosine_NN[~np.eye(len(cosine_NN), dtype=bool)], [2, 98])
    image = axes.imshow(cosine_NN, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
    starts = [place for place, topic in enumerate(topics) if place == 0 or topics[place - 1] != topic]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(topics)], strict=True)]
    names = [topics[start] for start in starts]
    axes.set_xticks(middles, names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(middles, names, fontsize=8)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=0.8)
        axes.axvline(start - 0.5, color="white", linewidth=0.8)
    axes.set_title(plan, fontsize=9, color=INK)
    axes.figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)


def _attention(inspected: AttentionInspection, plan: AttentionPlan, model_plan: AttentionPlan) -> Picture:
    title = f"Attention, base model and under {plan.name}; mean of {len(inspected.ids)} sentences"
    figure = attention_figure(inspected.before, inspected.after, title=title, even=inspected.even)
    return Picture(
        "Attention",
        f"Above, how much each token attends to each other one: in the base model, with the sink at the first token, "
        f"and under {plan.name}{_aside(plan, model_plan)}. Below, the fraction of attention that the first "
        "token takes in each layer.",
        "Attention maps of the layers before and after, and the fraction that the first token takes.",
        picture(figure),
        ATTENTION,
    )


def _aside(plan: AttentionPlan, model_plan: AttentionPlan) -> str:
    """Say what hides the sink, and whether this model is encoded so."""
    if not plan.name.startswith("mask0"):
        return ""
    if model_plan.name == plan.name:
        return ", which hides it"
    return f", which hides it; {model_plan.name}, the plan elsewhere on this page, leaves the sink where it is"
