"""What ``gerund demo`` does: one set of weights searches a small collection and goes on writing.

Knows: the verbs of ``LanguageModel``, the texts in ``assets/demo``. Does not know: the command line.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gerund.config import Sampling
from gerund.data.files import whole_file
from gerund.entry import load
from gerund.errors import OutputExistsError, ResourceError
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.halves import demand_decoder_only
from gerund.plotting.style import require_matplotlib
from gerund.types import Generation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HITS = 3
SMALL = 50_000_000
BASELINE = "causal"
PICTURE = "demo.png"
REPORT = "demo.json"


@dataclass(frozen=True)
class Passage:
    """A document or a search of the demo, with the topic that it is about."""

    topic: str
    text: str


@dataclass(frozen=True)
class Hit:
    """One answer to a search."""

    text: str
    score: float
    right: bool


@dataclass(frozen=True)
class Found:
    """What the searches found, under one attention plan.

    Attributes:
        plan: name of the plan.
        answers: for each search its best documents, best first.
        right: share of those answers whose topic is the search's.
        neighbours: share of the documents' own nearest ``HITS`` documents that have the same topic.
    """

    plan: str
    answers: tuple[tuple[Hit, ...], ...]
    right: float
    neighbours: float


@dataclass(frozen=True)
class Proof:
    """What was compared with the model as plain transformers loads it, and what came out.

    Attributes:
        tokens: how many positions were compared.
        numbers: how many logits that makes.
        difference: the largest difference between two logits.
        same_text: whether greedy decoding wrote the same tokens.
    """

    tokens: int
    numbers: int
    difference: float
    same_text: bool

    @property
    def is_equal(self) -> bool:
        """Whether every logit is the same to the last bit, and so is the text."""
        return self.difference == 0 and self.same_text


class Demo:
    """The steps of the demo, in the order of the methods; each is timed under its name.

    Attributes:
        documents: the collection.
        queries: what is searched for in it.
        seconds: how long each step took.
        vectors: the documents' vectors, by the name of the plan.
        lm: the model, once ``start`` has loaded it.
    """

    lm: LanguageModel

    def __init__(self, model: str | None = None, device: str = "auto") -> None:
        """Read the texts.

        Args:
            model: a folder or hub id; None for the embedded default.
            device: as in ``gerund.load``.
        """
        self.model = model
        self.device = device
        self.documents = read_passages("documents.jsonl")
        self.queries = read_passages("queries.jsonl")
        self.seconds: dict[str, float] = {}
        self.vectors: dict[str, np.ndarray] = {}

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Note how long the block takes under the name of a step."""
        start = time.perf_counter()
        yield
        self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start

    def start(self) -> LanguageModel:
        """Load the model; loading proves that the attention plan reaches every layer.

        A small model leaves the process with one thread: several would wait for each other longer than they
        compute, and much longer still where something else keeps a core busy.
        """
        with self.timed("load and prove the plan"):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            self.lm = load(self.model, device=self.device)
            demand_decoder_only(self.lm.model, "show what the demo shows")
            if self.lm.model.num_parameters() > SMALL:
                torch.set_num_threads(threads)
        return self.lm

    def search(self) -> Found:
        """Embed collection and searches, and answer them."""
        with self.timed(f"embed {len(self.documents) + len(self.queries)} texts"):
            return self._found(self.lm)

    def baseline(self) -> Found:
        """Do the same with the untouched causal attention: what the conversion is measured against."""
        with self.timed("the causal baseline"):
            return self._found(load(self.model, attention=BASELINE, device=self.device))

    def write(self, prompt: str, max_new_tokens: int = 40) -> Generation:
        """Continue a prompt with the same weights."""
        with self.timed(f"write {max_new_tokens} tokens"):
            sampling = Sampling(temperature=0.7, top_p=0.9, seed=1)
            return self.lm.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling)[0]

    def prove(self, prompt: str, max_new_tokens: int = 24) -> Proof:
        """Compare with the folder as plain transformers opens it: every logit, and a greedy continuation."""
        with self.timed("compare with plain transformers"):
            # AutoModelForCausalLM.from_pretrained: no plan, none of our attention functions.
            plain, _ = loading.read(loading.find(self.model), self.lm.model.dtype)
            texts = [prompt, *(item.text for item in self.queries)]
            return _compare(self.lm, plain.to(self.lm.device), texts, max_new_tokens)

    def draw(self, found: Found, baseline: Found, path: Path) -> None:
        """Draw both plans' documents side by side, as similarities and as a map.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        with self.timed("draw the picture"):
            topics = [item.topic for item in self.documents]
            _draw(topics, [(item.plan, self.vectors[item.plan]) for item in (baseline, found)], path)

    def _found(self, lm: LanguageModel) -> Found:
        documents = lm.encode([item.text for item in self.documents], show_progress=False)
        queries = lm.encode([item.text for item in self.queries], show_progress=False)
        name = lm.encoder.attention.name
        self.vectors[name] = documents
        answers = []
        for query, scores in zip(self.queries, lm.similarity(queries, documents), strict=True):
            best = np.argsort(-scores)[:HITS]
            hits = [(self.documents[place], float(scores[place])) for place in best]
            answers.append(tuple(Hit(item.text, score, item.topic == query.topic) for item, score in hits))
        right = np.mean([hit.right for hits in answers for hit in hits])
        return Found(name, tuple(answers), float(right), self._neighbours(lm, documents))

    def _neighbours(self, lm: LanguageModel, documents: np.ndarray) -> float:
        topics = np.array([item.topic for item in self.documents])
        scores = lm.similarity(documents, documents)
        np.fill_diagonal(scores, -np.inf)
        nearest = np.argsort(-scores, axis=1)[:, :HITS]
        return float((topics[nearest] == topics[:, None]).mean())


def read_passages(name: str) -> list[Passage]:
    """Read one of the files in ``assets/demo``."""
    text = (resources.files("gerund") / "assets" / "demo" / name).read_text(encoding="utf-8")
    rows = (json.loads(line) for line in text.splitlines())
    return [Passage(row["topic"], row["text"]) for row in rows]


def make_folder(folder: Path) -> None:
    """Make the output folder, which may be there already.

    Raises:
        OutputExistsError: there is a file of that name.
        ResourceError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} exists already and is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make {folder}: {error.strerror or error}") from error


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write what the demo found as JSON."""
    with whole_file(folder / REPORT) as file:
        file.write((json.dumps(report, indent=2, ensure_ascii=False) + "\n").encode())


def report(demo: Demo, found: Found, baseline: Found, written: Generation, proof: Proof) -> dict[str, Any]:
    """Put everything that the demo found into one JSON-ready dict."""
    lm = demo.lm
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "dimensions": lm.dimensions,
        "fingerprint": lm.fingerprint(),
        "searches": [
            {"query": query.text, "topic": query.topic, "answers": [asdict(hit) for hit in hits]}
            for query, hits in zip(demo.queries, found.answers, strict=True)
        ],
        "right": {item.plan: item.right for item in (baseline, found)},
        "right_neighbours": {item.plan: item.neighbours for item in (baseline, found)},
        "continuation": written.text,
        "proof": {**asdict(proof), "equal": proof.is_equal},
        "seconds": {step: round(value, 3) for step, value in demo.seconds.items()},
    }


@torch.no_grad()
def _compare(lm: LanguageModel, plain: Any, texts: list[str], max_new_tokens: int) -> Proof:
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
    return Proof(tokens, numbers, difference, torch.equal(*same))


def _draw(topics: list[str], plans: list[tuple[str, np.ndarray]], path: Path) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    # A figure of its own, not pyplot's: nothing is global, and no window system is looked for.
    figure = Figure(figsize=(11, 10), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, (plan, vectors) in enumerate(plans):
        _draw_similarities(axes[0][column], plan, topics, vectors)
        _draw_map(axes[1][column], topics, vectors)
    figure.legend(*axes[1][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(set(topics)))
    figure.suptitle(f"{len(topics)} documents on {len(set(topics))} topics, the same weights under two attention plans")
    with whole_file(path) as file:
        figure.savefig(file, dpi=110, format="png")


def _draw_similarities(axes: "Axes", plan: str, topics: list[str], vectors: np.ndarray) -> None:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine = unit @ unit.T
    others = cosine[~np.eye(len(cosine), dtype=bool)]
    low, high = np.percentile(others, [2, 98])
    image = axes.imshow(cosine, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
    starts = [place for place, topic in enumerate(topics) if place == 0 or topics[place - 1] != topic]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(topics)], strict=True)]
    names = [topics[start] for start in starts]
    axes.set_xticks(middles, names, rotation=40, ha="right")
    axes.set_yticks(middles, names)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=0.8)
        axes.axvline(start - 0.5, color="white", linewidth=0.8)
    axes.set_title(f"{plan}: cosine of every two documents")
    axes.figure.colorbar(image, ax=axes, shrink=0.8)


def _draw_map(axes: "Axes", topics: list[str], vectors: np.ndarray) -> None:
    centred = vectors - vectors.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    places = centred @ directions[:2].T  # (n, 2)
    share = (sizes[:2] ** 2).sum() / (sizes**2).sum()
    for number, topic in enumerate(dict.fromkeys(topics)):
        rows = [place for place, name in enumerate(topics) if name == topic]
        axes.scatter(places[rows, 0], places[rows, 1], s=36, color=f"C{number}", label=topic)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title(f"their two main directions ({share:.0%} of the variance)")
