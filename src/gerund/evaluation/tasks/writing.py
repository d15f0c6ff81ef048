"""What a model writes: how much it repeats itself, and how far its texts are from people's.

Documents are cut after a few words; the model goes on, and both its continuation and the one that stands in the
document are measured (MAGNET, section 4.4; RankGen, section 3.2 and appendix D).

Knows: corpora, generation, ``text_metrics``. Does not know: plans: a
model writes the same under all of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from gerund.data.passages import cut_to_sentence
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.evaluation import text_metrics
from gerund.evaluation.scored_task import files_of
from gerund.evaluation.sets.choices import choice_files, read_choices, tells_stories
from gerund.evaluation.sets.corpora import corpora_in, read_texts
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Task
from gerund.evaluation.text_metrics import rep_n, rep_sentences, rep_window, sentences_of
from gerund.progress import progress
from gerund.scoring.names import MODEL_NAMES
from gerund.scoring.registry import find_scorer
from gerund.scoring.word_overlap import content_overlap, overlap, words_of

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.types import Generation

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
    """A piece of a document, cut in two.

    Attributes:
        prefix: its first words.
        rest: what follows, white space first.
    """

    prefix: str
    rest: str


@dataclass(frozen=True)
class Comparison:
    """What continuations came to.

    Attributes:
        metrics: by name.
        notes: sentences that a reader of them has to know.
        curve: MAUVE's divergence curve ``(points, 2)``; None for too few texts.
    """

    metrics: dict[str, float]
    notes: tuple[str, ...]
    curve: np.ndarray | None


def find(folder: Path) -> list[Task]:
    """Return a task for every corpus and every file of stories; with a validation file only it is ``NAME.valid``."""
    tasks: list[Task] = []
    for name, files in corpora_in(folder).items():
        paths = tuple(files[split] for split in ("test", "validation") if split in files)
        tasks.append(Writing(name=f"writing/{name}{'' if 'test' in files else '.valid'}", files=paths))
    stories = {name: path for name, path in choice_files(folder).items() if tells_stories(path)}
    tasks += [StoryWriting(name=f"writing/{name}", files=(path,)) for name, path in stories.items()]
    return sorted(tasks, key=lambda task: task.name)


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
        return self.rerank in MODEL_NAMES

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorer, and of the model whose states are compared."""
        return (*files_of(self.rerank), *files_of(self.mauve_features))

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Write and measure.

        Raises:
            DataError: the corpus is malformed, or no document is long enough.
            TextError: a prefix fills the model's context.
            MissingDependencyError: MAUVE is due and scikit-learn is not installed.
        """
        n = min(self.samples, config.limit or self.samples)
        if self.has_mauve and n >= text_metrics.LEAST:
            text_metrics.require_scikit_learn()
        passages, others = self.passages(n, config)
        lm = system.lm
        written = self.write(lm, [passage.prefix for passage in passages], config)
        found = self.compare(lm, passages, written, others)
        notes = [
            f"{len(passages)} continuations of at most {self.max_new_tokens} tokens by {self.decoding} decoding"
            f"{self._ranking}; scores of another number, length, prefix or decoding cannot be compared with these"
        ]
        if len(passages) < n:
            notes.append(f"the corpus has no more than {len(passages)} passages of this length")
        return Score("rep_4", found.metrics, size=len(passages), notes=(*notes, *found.notes))

    @property
    def _ranking(self) -> str:
        if not self.rerank:
            return ""
        kept = f", {self.rerank_beams} kept every {self.rerank_every} tokens" if self.rerank_every else ""
        return f", {self.rerank_samples} ranked by {self.rerank}{kept}"

    def compare(
        self,
        lm: "LanguageModel",
        passages: Sequence[Passage],
        written: Sequence["Generation"],
        others: Sequence[Passage] = (),
    ) -> "Comparison":
        """Measure what was written, and compare it with what stands in the documents.

        Args:
            lm: counts tokens, and gives the states that MAUVE compares.
            passages: what was continued.
            written: a continuation of each.
            others: as many more passages, to compare people with people.
        """
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
        if len(passages) < text_metrics.LEAST:
            left_out = f"MAUVE was left out: it needs at least {text_metrics.LEAST} continuations"
            return Comparison(metrics, (left_out,), None)
        runtime = self._features(lm)
        peoples = self._states(runtime, passages, human)
        result = text_metrics.mauve(self._states(runtime, passages, texts), peoples)
        metrics |= {"mauve": result.value, "mauve_spread": result.spread, "mauve_error": result.error}
        notes = [
            f"MAUVE by the {self.mauve_states} states of {runtime.name}, {result.buckets} buckets, texts that end at a "
            f"{self.ends}; by other states or with another number of texts it cannot be compared",
            *result.notes,
        ]
        if others:
            cut = self._ended(_cut(lm, [passage.rest for passage in others], lengths))
            metrics["mauve_ceiling"] = text_metrics.mauve(self._states(runtime, others, cut), peoples).value
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

    def write(self, lm: "LanguageModel", prefixes: Sequence[str], config: EvaluationConfig) -> list["Generation"]:
        """Return a continuation of each prefix."""
        from gerund.settings.sampling import Rerank, Sampling

        sampling = Sampling(**DECODINGS[self.decoding])
        rerank = None
        if self.rerank:
            # Loaded once: a folder would be read anew for every batch.
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

    def _features(self, lm: "LanguageModel") -> "LanguageModel":
        """Return the model whose states are compared: read causally, without an adapter."""
        from gerund.entry import load
        from gerund.language_model import LanguageModel
        from gerund.settings.encoder import EncoderConfig
        from gerund.settings.plan import AttentionPlan

        if self.mauve_features:
            lm = load(None if self.mauve_features == "default" else self.mauve_features)
        # The states are of the very texts that were generated, whatever characters these have.
        config = EncoderConfig(
            attention=AttentionPlan("causal"), pooling=self.mauve_states, normalize=False, text_normalization="none"
        )
        return LanguageModel(lm.model, lm.tokenizer, config, name=lm.name)

    def _states(self, runtime: "LanguageModel", passages: Sequence[Passage], texts: Sequence[str]) -> np.ndarray:
        """Return one state a text, ``(n, D)``; a zero vector where nothing was written."""
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


def _cut(lm: "LanguageModel", texts: Sequence[str], lengths: Sequence[int]) -> list[str]:
    """Return each text up to the end of its token number ``length``, counted by the model's tokenizer."""
    from gerund.inference.tokens import InputFormat, tokenize

    tokens = tokenize(lm.tokenizer, texts, InputFormat(), offsets=True)
    result = []
    for text, own, length in zip(texts, tokens, lengths, strict=True):
        assert own is not None
        ends = [end for _, end in own.offsets[:length]]
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
