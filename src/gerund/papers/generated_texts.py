"""MAUVE and repetition of generated text: the task `writing` (MAGNET, RankGen)."""

import re
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from gerund.data.passages import cut_to_sentence
from gerund.entry import load
from gerund.errors import ConfigError, DataError, MissingDependencyError, unknown_name
from gerund.evaluation.data_files import (
    CHOICES_FOLDER,
    CORPORA_FOLDER,
    corpus_files,
    read_choices,
    read_texts,
    story_files,
)
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Task
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel
from gerund.models.vectors import unit
from gerund.papers.rankgen_suffixes import files_of
from gerund.progress import progress
from gerund.scoring.names import MIXED, MODEL_NAMES
from gerund.scoring.registry import find_scorer
from gerund.scoring.word_overlap import content_overlap, overlap, words_of
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.sampling import Rerank, Sampling
from gerund.text_analysis import segments
from gerund.types import Generation

LEAST = 100
ADVISED = 500
SCALING = 5.0
CURVE_POINTS = 25
WINDOW = 20

_TEXTS_A_BUCKET = 10
_VARIANCE = 0.9
_STARTS = 5
_ITERATIONS = 500
_RESAMPLES = 100


@dataclass(frozen=True)
class MauveResult:
    """What two sets of vectors came to."""

    value: float  # mean over the k-means seeds, from 0 to 1
    spread: float  # standard deviation over the seeds; the spread over other samples is larger
    error: float  # standard error by resampling the texts, with replacement, in the buckets of the median seed
    curve: np.ndarray  # ``(points, 2)`` divergence curve of the seed with the median value, from (0, 1) to (1, 0)
    buckets: int  # number of clusters
    n: int  # vectors of either set
    notes: tuple[str, ...] = ()  # sentences that a reader of the number has to know


def require_scikit_learn() -> None:
    """Check that MAUVE can be computed."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("MAUVE needs scikit-learn: pip install 'gerund[eval]'") from error


def mauve(
    p_features: np.ndarray, q_features: np.ndarray, *, seeds: int = 5, first_seed: int = 0, scaling: float = SCALING
) -> MauveResult:
    """Compare two sets of vectors.

    The vectors are given length 1, projected on the main directions that together hold 90% of the variance,
    given length 1 again, and clustered by k-means with a bucket for every ten vectors of a set and five starts.
    """
    p, q = (np.asarray(side, dtype=np.float64) for side in (p_features, q_features))
    n = _checked_size(p, q)
    require_scikit_learn()
    points = _reduced(np.concatenate([p[:n], q[:n]]))
    buckets = max(2, round(n / _TEXTS_A_BUCKET))
    curves, labelled = [], []
    for seed in range(first_seed, first_seed + seeds):
        labels = _clusters(points, buckets, seed)
        labelled.append((labels[:n], labels[n:]))
        curves.append(_curve(*labelled[-1], buckets, scaling))
    values = [curve_area(curve) for curve in curves]
    median = int(np.argsort(values)[len(values) // 2])
    notes = []
    if n < ADVISED:
        notes.append(
            f"MAUVE of {n} texts a side is rough: below {ADVISED} it moves by several points from sample to sample"
        )
    return MauveResult(
        value=float(np.mean(values)),
        spread=float(np.std(values)),
        error=_resampled(*labelled[median], buckets, scaling, first_seed),
        curve=curves[median],
        buckets=buckets,
        n=n,
        notes=tuple(notes),
    )


def _curve(p_labels: np.ndarray, q_labels: np.ndarray, buckets: int, scaling: float) -> np.ndarray:
    p, q = (np.bincount(side, minlength=buckets) / len(side) for side in (p_labels, q_labels))
    return divergence_curve(p, q, scaling=scaling)


def _resampled(p_labels: np.ndarray, q_labels: np.ndarray, buckets: int, scaling: float, seed: int) -> float:
    """Return the standard deviation of the area over samples of the texts."""
    rng = np.random.default_rng(seed)
    areas = [
        curve_area(_curve(rng.choice(p_labels, len(p_labels)), rng.choice(q_labels, len(q_labels)), buckets, scaling))
        for _ in range(_RESAMPLES)
    ]
    return float(np.std(areas))


def divergence_curve(
    p: np.ndarray, q: np.ndarray, *, scaling: float = SCALING, points: int = CURVE_POINTS
) -> np.ndarray:
    """Return the divergence curve of two histograms (Pillutla et al., equation 1).

    For mixtures ``r = w p + (1 - w) q`` the points are ``(exp(-c KL(q|r)), exp(-c KL(p|r)))``, between the ends
    (0, 1) and (1, 0). As in the authors' library the weights w stand at even distances in the open interval
    (0, 1), and buckets are not smoothed: one that is empty on one side leaves every divergence finite.
    """
    weights = np.linspace(1 - 1e-6, 1e-6, points)
    inner = []
    for weight in weights:
        mixture = weight * p + (1 - weight) * q
        inner.append((np.exp(-scaling * _kl(q, mixture)), np.exp(-scaling * _kl(p, mixture))))
    return np.array([(0.0, 1.0), *inner, (1.0, 0.0)])


def curve_area(curve: np.ndarray) -> float:
    """Return the area under a curve of ``(x, y)`` with rising x, by trapezoids.

    >>> curve_area(np.array([(0.0, 1.0), (1.0, 0.0)]))
    0.5
    """
    x, y = curve.T
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


def sentences_of(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences without the white space around them; what follows the last full stop is one too.

    >>> sentences_of("Mr. Smith left.  He left. He")
    ['Mr. Smith left.', 'He left.', 'He']
    """
    return [stripped for sentence in segments(text, language) if (stripped := sentence.strip())]


def rep_n(tokens: Sequence[Hashable], n: int) -> float:
    """Return 1 - unique n-grams / n-grams (MAGNET, equation 6).

    >>> rep_n("a b c a b d".split(), 2)
    0.2
    """
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    unique = {tuple(tokens[start : start + n]) for start in range(total)}
    return (total - len(unique)) / total


def rep_sentences(sentences: Sequence[str]) -> float:
    """Return 1 - unique sentences / sentences (MAGNET, equation 6).

    >>> rep_sentences(["He left.", "He left.", "He left.", "She"])
    0.5
    """
    if not sentences:
        return 0.0
    return (len(sentences) - len(set(sentences))) / len(sentences)


def rep_window(tokens: Sequence[Hashable], prefix: Sequence[Hashable] = (), *, window: int = WINDOW) -> float:
    """Return the fraction of tokens that stand among the ``window`` tokens before them (RankGen, Table 16: ``rep``).

    >>> rep_window("the cat saw the dog".split())
    0.2
    >>> rep_window("the cat saw the dog".split(), "a dog and the".split())
    0.6
    """
    if not tokens:
        return 0.0
    everything = [*prefix, *tokens]
    places = range(len(prefix), len(everything))
    copied = sum(everything[place] in everything[max(0, place - window) : place] for place in places)
    return copied / len(tokens)


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence in nats; ``q`` is nowhere zero where ``p`` is not."""
    used = p > 0
    return float((p[used] * np.log(p[used] / q[used])).sum())


def _checked_size(p: np.ndarray, q: np.ndarray) -> int:
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1]:
        raise ConfigError(f"MAUVE compares vectors of one size, not arrays of shapes {p.shape} and {q.shape}")
    n = min(len(p), len(q))
    if n < LEAST:
        raise DataError(
            f"MAUVE of {len(p)} and {len(q)} texts says nothing; give at least {LEAST} of each, better {ADVISED}"
        )
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise DataError("MAUVE was given vectors with numbers that are not finite")
    return n


def _reduced(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors on their main directions; directions hold 90% of the variance together."""
    from sklearn.decomposition import PCA

    vectors = unit(vectors)
    if (vectors == vectors[0]).all():  # no variance to take a fraction of
        return vectors
    reduced: np.ndarray = PCA(n_components=_VARIANCE, svd_solver="full").fit_transform(vectors)
    return unit(reduced)


def _clusters(points: np.ndarray, buckets: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    clustering: Any = KMeans(buckets, n_init=_STARTS, max_iter=_ITERATIONS, random_state=seed)
    with warnings.catch_warnings():
        # Many equal texts leave buckets empty, which is as it should be.
        warnings.filterwarnings("ignore", "Number of distinct clusters", ConvergenceWarning)
        labels: np.ndarray = clustering.fit_predict(points)
    return labels


# How each decoding samples, as RankGen's Table 3 sets them.
DECODINGS: Mapping[str, Mapping[str, Any]] = {
    "nucleus": {"temperature": 1.0, "top_p": 0.9},
    "greedy": {},
    "ancestral": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "typical": {"temperature": 1.0, "typical_p": 0.9},
}
# What MAUVE compares: the mean state of the continuation by itself, or, as its paper does, the state of the last
# token of prefix and continuation. In a small model the last token says more of itself than of the text, and a
# prefix that both sides share hides what differs: with the bundled model on Wikipedia greedy texts come to 0.81
# so, and to 0.32 by the mean, while people's texts come to 0.96 and 0.97.
STATES = ("mean", "last")
# Where the texts of both sides end: after so many tokens, or at the last end of a sentence before (RankGen, D.1).
ENDS = ("token", "sentence")
_WORD = re.compile(r"\S+")
_BATCH = 32
_GRAMS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Passage:
    """A piece of a document, cut in two."""

    prefix: str  # its first words
    rest: str  # what follows, white space first


@dataclass(frozen=True)
class Comparison:
    """What continuations came to."""

    metrics: dict[str, float]  # by name
    notes: tuple[str, ...]  # sentences that a reader of them has to know
    curve: np.ndarray | None  # MAUVE's divergence curve ``(points, 2)``; None for too few texts


@dataclass(frozen=True, kw_only=True)
class Writing(FileTask):
    """Continuations of the beginnings of documents. ``config.limit`` counts continuations.

    Metrics, each a mean over the continuations: ``rep_1`` to ``rep_4`` and ``rep_sen`` (MAGNET, equation 6),
    ``rep`` and ``overlap`` (RankGen, Tables 16 and 17; over words), ``content_overlap`` (without stop words, as
    RankGen's released code counts), ``length`` in the model's tokens, ``ended`` (the fraction that the model ended
    itself). With ``human_`` in front: the same of the documents' own continuations, each cut to as many tokens as the
    model wrote. With ``ends=sentence`` both are then cut behind their last whole sentence, as MAUVE varies less so
    (RankGen, appendix D.1). From 100 continuations on also ``mauve``
    between the two, ``mauve_spread`` over k-means seeds and ``mauve_error`` over samples of the texts; with text to
    spare ``mauve_ceiling``, between the documents' continuations and as many others from the same documents.
    """

    kind: ClassVar = "writing"
    side: ClassVar = "generation"
    requires: ClassVar[type] = Generates
    higher_is_better: ClassVar = False
    reads_plan: ClassVar = False
    has_mauve: ClassVar = True
    """Whether people's continuations are as long as the model's, so that MAUVE can compare them."""

    samples: int = field(default=200, metadata={"help": "Continuations; at least 100 for MAUVE, better 500."})
    prefix_words: int = field(default=32, metadata={"help": "Words that the model is given."})
    max_new_tokens: int = field(default=128, metadata={"help": "Tokens that it writes at most."})
    decoding: str = field(default="nucleus", metadata={"help": f"How it samples: {', '.join(DECODINGS)}."})
    rerank: str = field(
        default="",
        metadata={
            "help": "Keep what a scorer likes best: pmi, overlap, ..., a scorer's folder, or own, the model's; left "
            "out, nothing is ranked."
        },
    )
    rerank_samples: int = field(default=20, metadata={"help": "Continuations that are sampled and ranked."})
    rerank_beams: int = field(default=1, metadata={"help": "How many are kept each time (beam search)."})
    rerank_every: int = field(default=0, metadata={"help": "Tokens between two rankings; 0 ranks whole texts."})
    ends: str = field(
        default="token",
        metadata={"help": "Where both sides' texts end: token, or sentence, the last whole one (RankGen, D.1)."},
    )
    mauve_features: str = field(
        default="",
        metadata={"help": "Whose states MAUVE compares: empty for the model's own, a folder, or 'default'."},
    )
    mauve_states: str = field(
        default="mean",
        metadata={"help": "Which: mean of the continuation, or last token of prefix and continuation (the paper)."},
    )

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every corpus and every file of stories."""
        documents = cls.of(corpus_files(folder / CORPORA_FOLDER))
        stories = StoryWriting.of(story_files(folder / CHOICES_FOLDER))
        return sorted([*documents, *stories], key=lambda task: task.name)

    def __post_init__(self) -> None:
        if self.decoding not in DECODINGS:
            raise unknown_name("decoding", self.decoding, list(DECODINGS))
        if self.ends not in ENDS:
            raise unknown_name("ends", self.ends, ENDS)
        if self.mauve_states not in STATES:
            raise unknown_name("mauve_states", self.mauve_states, STATES)
        for name in ("samples", "prefix_words", "max_new_tokens", "rerank_samples", "rerank_beams"):
            if getattr(self, name) < 1:
                raise ConfigError(f"writing.{name}={getattr(self, name)} leaves nothing to score")
        if self.rerank and self.decoding == "greedy":
            raise ConfigError("writing.decoding=greedy writes the same text each time, so there is nothing to rank")

    @property
    def reads_scorer(self) -> bool:
        """Whether the model's own scorer ranks."""
        return self.rerank in (MIXED, *MODEL_NAMES)

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorer, and of the model whose states are compared."""
        return (*files_of(self.rerank), *files_of(self.mauve_features))

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Write and measure."""
        n = min(self.samples, config.limit or self.samples)
        if self.has_mauve and n >= LEAST:
            require_scikit_learn()
        passages, others = self.passages(n, config)
        lm = system.lm
        written = self.write(lm, [passage.prefix for passage in passages], config)
        score = self.compare(lm, passages, written, others)
        kept = f", {self.rerank_beams} kept every {self.rerank_every} tokens" if self.rerank_every else ""
        ranking = f", {self.rerank_samples} ranked by {self.rerank}{kept}" if self.rerank else ""
        notes = [
            f"{len(passages)} continuations of at most {self.max_new_tokens} tokens by {self.decoding} decoding"
            f"{ranking}; scores of another number, length, prefix or decoding cannot be compared with these"
        ]
        if len(passages) < n:
            notes.append(f"the corpus has no more than {len(passages)} passages of this length")
        return Score("rep_4", score.metrics, size=len(passages), notes=(*notes, *score.notes))

    def compare(
        self,
        lm: LanguageModel,
        passages: Sequence[Passage],
        written: Sequence["Generation"],
        others: Sequence[Passage] = (),
    ) -> "Comparison":
        """Measure generated continuations, and compare them with those in the documents."""
        # One token of the document's own where the model wrote none: silence is not what people write.
        lengths = [max(1, len(item.token_ids)) for item in written]
        human = self._ended(_cut(lm, [passage.rest for passage in passages], lengths))
        texts = self._ended([item.text for item in written])
        metrics = {
            **_means(passages, texts),
            "length": float(np.mean([len(item.token_ids) for item in written])),
            "ended": float(np.mean([item.finished for item in written])),
            **{f"human_{name}": value for name, value in _means(passages, human).items()},
        }
        if not self.has_mauve:
            return Comparison(metrics, ("MAUVE was left out: the stories end before the model does",), None)
        if len(passages) < LEAST:
            left_out = f"MAUVE was left out: it needs at least {LEAST} continuations"
            return Comparison(metrics, (left_out,), None)
        runtime = self._features(lm)
        peoples = self._states(runtime, passages, human)
        result = mauve(self._states(runtime, passages, texts), peoples)
        metrics |= {"mauve": result.value, "mauve_spread": result.spread, "mauve_error": result.error}
        notes = [
            f"MAUVE by the {self.mauve_states} states of {runtime.name}, {result.buckets} buckets, texts that end at a "
            f"{self.ends}; by other states or with another number of texts it cannot be compared",
            *result.notes,
        ]
        if others:
            cut = self._ended(_cut(lm, [passage.rest for passage in others], lengths))
            metrics["mauve_ceiling"] = mauve(self._states(runtime, others, cut), peoples).value
        else:
            notes.append("no ceiling for MAUVE: the corpus is too small to compare people with people")
        return Comparison(metrics, tuple(notes), result.curve)

    def _ended(self, texts: Sequence[str]) -> list[str]:
        """Return texts up to where they are to end; one without a whole sentence stays as it is."""
        return [cut_to_sentence(text) or text for text in texts] if self.ends == "sentence" else list(texts)

    def passages(self, n: int, config: EvaluationConfig) -> tuple[list[Passage], list[Passage]]:
        """Return passages to continue, and as many more to compare people with people; none if there are not enough.

        Every document gives its beginning before any gives another passage. Both lists are sampled from one pool,
        so that they differ by chance alone.
        """
        path = self.scored_file(config)
        generator = np.random.default_rng(config.seed)
        pool = _pool(path, self.prefix_words, self.max_new_tokens, 2 * n, generator)
        if not pool:
            raise DataError(
                f"{path}: no document has {self.prefix_words} words and {self.max_new_tokens} more; "
                "choose a smaller prefix_words or max_new_tokens"
            )
        order = generator.permutation(len(pool))
        sampled = [pool[place] for place in order]
        return sampled[:n], sampled[n:] if len(sampled) == 2 * n else []

    def write(self, lm: LanguageModel, prefixes: Sequence[str], config: EvaluationConfig) -> list["Generation"]:
        """Return a continuation of each prefix."""
        sampling = Sampling(**DECODINGS[self.decoding])
        rerank = None
        if self.rerank:
            # Loaded once: a folder would be read again for every batch.
            scorer = find_scorer(self.rerank, lm, seed=config.seed)
            rerank = Rerank(self.rerank_samples, self.rerank_beams, self.rerank_every or None, scorer)
        written: list[Generation] = []
        with progress(len(prefixes), self.name, show=config.show_progress) as advance:
            for start in range(0, len(prefixes), _BATCH):
                batch = prefixes[start : start + _BATCH]
                # A seed for every text: with one for all they would share their random numbers.
                first = config.seed * 1_000_003 + start
                seeded = replace(sampling, seed=range(first, first + len(batch)))
                written += lm.generate(batch, self.max_new_tokens, seeded, rerank=rerank, batch_size=_BATCH)
                advance(len(batch))
        return written

    def _features(self, lm: LanguageModel) -> LanguageModel:
        """Return the model whose states are compared: read causally, without an adapter."""
        if self.mauve_features:
            lm = load(None if self.mauve_features == "default" else self.mauve_features)
        # The states are of the very texts that were generated, whatever characters these have.
        config = EncoderConfig(
            attention=AttentionPlan("causal"), pooling=self.mauve_states, normalize=False, text_normalization="none"
        )
        return LanguageModel(lm.model, lm.tokenizer, config, name=lm.name)

    def _states(self, runtime: LanguageModel, passages: Sequence[Passage], texts: Sequence[str]) -> np.ndarray:
        """Return one state per text, ``(n, D)``; a zero vector where nothing was generated."""
        if self.mauve_states == "last":
            texts = [passage.prefix + text for passage, text in zip(passages, texts, strict=True)]
        vectors: np.ndarray = runtime.encode(texts, empty="zeros", show_progress=False)
        return vectors


@dataclass(frozen=True, kw_only=True)
class StoryWriting(Writing):
    """Continuations of the first sentence of each story (MAGNET, section 4.4: a prefix is a single sentence).

    ``prefix_words`` has no meaning here. The metrics with ``human_`` in front are those of the stories as they go on.
    """

    has_mauve: ClassVar = False

    def passages(self, n: int, config: EvaluationConfig) -> tuple[list[Passage], list[Passage]]:
        """Return ``n`` stories sampled from the file, cut behind their first sentence."""
        stories = [choice.story for choice in read_choices(self.scored_file(config))]
        order = np.random.default_rng(config.seed).permutation(len(stories))[:n]
        return [Passage(stories[place][0], " " + " ".join(stories[place][1:])) for place in order], []


def _pool(path: Path, prefix_words: int, room: int, wanted: int, generator: np.random.Generator) -> list[Passage]:
    """Return up to ``wanted`` passages, spread evenly over the documents in their random order."""
    documents = []
    for text in read_texts(path):
        passages = list(_cut_up(text, prefix_words, room))
        # After the beginning any place of a long document is as good as another.
        order = [0, *(1 + generator.permutation(len(passages) - 1))] if passages else []
        documents.append([passages[place] for place in order])
    shuffled = [documents[place] for place in generator.permutation(len(documents))]
    rounds = range(max(map(len, shuffled), default=0))
    one_by_one = [passages[turn] for turn in rounds for passages in shuffled if turn < len(passages)]
    return one_by_one[:wanted]


def _cut_up(text: str, prefix_words: int, room: int) -> Iterator[Passage]:
    r"""Yield pieces of ``prefix_words`` and ``room`` words that do not overlap, each from the start of a paragraph.

    A token is at most a word, so ``room`` words hold as many tokens. A paragraph that is longer than a piece is
    cut where the last piece ends.

    >>> list(_cut_up("a b c d\ne f g\nh i", 1, 2))
    [Passage(prefix='a', rest=' b c'), Passage(prefix='e', rest=' f g')]
    """
    words = list(_WORD.finditer(text))
    size = prefix_words + room
    start = 0
    while start + size <= len(words):
        middle, end = words[start + prefix_words - 1].end(), words[start + size - 1].end()
        yield Passage(text[words[start].start() : middle], text[middle:end])
        start += size
        near = range(start, min(start + size, len(words)))
        start = next((place for place in near if "\n" in text[words[place - 1].end() : words[place].start()]), start)


def _cut(lm: LanguageModel, texts: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Return each text up to the end of its token number ``length``, counted by the model's tokenizer."""
    tokens = tokenize(lm.tokenizer, texts, InputFormat(), offsets=True)
    result = []
    for text, ids, length in zip(texts, tokens, lengths, strict=True):
        assert ids is not None
        ends = [end for _, end in ids.offsets[:length]]
        result.append(text[: ends[-1]])
    return result


def _means(passages: Sequence[Passage], texts: Sequence[str]) -> dict[str, float]:
    """Return the mean of every measure of one text."""
    rows = []
    for passage, text in zip(passages, texts, strict=True):
        before, words = words_of(passage.prefix), words_of(text)
        row = {f"rep_{n}": rep_n(words, n) for n in _GRAMS}
        row |= {"rep_sen": rep_sentences(sentences_of(text)), "rep": rep_window(words, before)}
        row |= {"overlap": overlap(words, before), "content_overlap": content_overlap(text, passage.prefix)}
        rows.append(row)
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
