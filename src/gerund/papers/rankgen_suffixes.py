"""Suffix identification (RankGen): choose the true continuation among others, or over a generated one."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.data.passages import (
    Passage,
    Sentence,
    cut_passages,
    cut_to_words,
    inbook_negatives,
    other_stretches,
    split_sentences,
)
from gerund.entry import load
from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import (
    CHOICES_FOLDER,
    CORPORA_FOLDER,
    Choice,
    read_choices,
    read_texts,
    single_files,
    test_files,
)
from gerund.evaluation.systems.base import Generates, HasLikelihoods
from gerund.evaluation.systems.language_model import scorer_of
from gerund.evaluation.task import EvaluationConfig, Examples, FileTask, Score, Side, Task
from gerund.inference.generate.generation import continuations_of_length
from gerund.language_model import LanguageModel
from gerund.papers.rankgen_negatives import Hardest
from gerund.scoring.likelihood import MEASURES, Evidence
from gerund.scoring.names import MIXED, MODEL_NAMES
from gerund.scoring.registry import fixed_scorer
from gerund.scoring.word_overlap import WORD_MEASURES
from gerund.settings.sampling import Sampling

DEPTHS = (1, 3, 5, 10, 50)
"""How many of the first candidates a recall is about."""


@dataclass(frozen=True, kw_only=True)
class ScoredTask(FileTask):
    """A task whose option ``scorer`` names the scorer."""

    scorer: str = field(
        default="",
        metadata={
            "help": "Scores continuations: pmi, overlap, ..., a scorer's folder or hub id; left out, the model's own."
        },
    )

    @property
    def reads_scorer(self) -> bool:
        """Whether no other scorer was named."""
        return self.scorer in ("", MIXED, *MODEL_NAMES)

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorer."""
        return files_of(self.scorer)


def files_of(name: str) -> tuple[Path, ...]:
    """Return the files of a scorer's or model's folder; none for a name."""
    folder = Path(name).expanduser()
    return tuple(sorted(path for path in folder.iterdir() if path.is_file())) if name and folder.is_dir() else ()


def rank_of(scores: np.ndarray, right: int) -> int:
    """Return the place of the right candidate, from 1 on; others that score the same stand before it.

    >>> rank_of(np.array([0.5, 0.9, 0.5]), 0)
    3
    """
    return int(np.count_nonzero(scores >= scores[right]))


def recalls(ranks: Sequence[int]) -> dict[str, float]:
    """Return the fraction of queries whose right candidate is among the first, and the mean of one over its place.

    >>> recalls([1, 4])["recall_at_3"], recalls([1, 4])["mrr"]
    (0.5, 0.625)
    """
    ranks_of = np.array(ranks, dtype=np.float64)
    return {
        **{f"recall_at_{depth}": float(np.mean(ranks_of <= depth)) for depth in DEPTHS},
        "mrr": float(np.mean(1 / ranks_of)),
    }


_MAIN = "avg_cll"
_SCORER = "scorer"
_WAYS = 11
# Measures that need no model, and are taken even where likelihoods are not.
_CHEAP = (*WORD_MEASURES, "random")


@dataclass(frozen=True, kw_only=True)
class SuffixTask(ScoredTask):
    """Accuracy of choosing the candidate with the highest score, for every measure of ``scoring.likelihood``.

    The main metric is ``scorer`` where a scorer was given or the model was trained to be one, else the average
    conditional log-likelihood, ``avg_cll``. Candidates that score the same share the point. ``config.limit`` counts
    prefixes.
    """

    kind: ClassVar[str] = "suffix-identification"
    data_folder: ClassVar[str] = CHOICES_FOLDER
    side: ClassVar[Side] = "generation"
    reads_plan: ClassVar[bool] = False

    samples: int = field(default=500, metadata={"help": "Prefixes at most."})
    likelihoods: bool = field(default=True, metadata={"help": "Also measure by the model's likelihoods."})

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every file of candidates and every corpus of documents."""
        chosen = ChoiceTask.of(single_files(folder / CHOICES_FOLDER))
        inbook = InbookTask.of(test_files(folder / CORPORA_FOLDER))
        return sorted([*chosen, *inbook], key=lambda task: task.name)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"{self.kind}.samples={self.samples} leaves nothing to score")

    @property
    def capability(self) -> type:
        """A model that tells how probable a text is; where only a scorer is asked, any that generates."""
        return HasLikelihoods if self.likelihoods else Generates

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Score every candidate."""
        scorer = scorer_of(system.lm, self.scorer, seed=config.seed)
        choices = self.choices(min(self.samples, config.limit or self.samples), config, system)
        scores, lost = self._by_likelihood(system, choices, config)
        if scorer is not None:
            scores_of = scorer.score(
                [choice.prefix for choice in choices],
                [[f" {candidate}" for candidate in choice.candidates] for choice in choices],
            )
            scores = {_SCORER: [np.array(scores_C) for scores_C in scores_of], **scores}
        metrics = self.accuracies(scores, [choice.gold for choice in choices])
        main = next(name for name in (_SCORER, _MAIN, *_CHEAP) if name in scores)
        notes = [f"95% interval of {main}: within {100 * _half_width(metrics[main], len(choices)):.1f} points"]
        if lost:
            notes.append(f"{lost} continuations were cut at the end of the model's context")
        examples = Examples.of_mean(_points(scores[main], [choice.gold for choice in choices]))
        return Score(main, metrics, size=len(choices), notes=tuple(notes), examples=examples)

    def _by_likelihood(
        self, system: Generates, choices: Sequence[Choice], config: EvaluationConfig
    ) -> tuple[dict[str, list[np.ndarray]], int]:
        """Return the scores of every measure, and how many continuations had to be cut."""
        evidence = Evidence(
            system.lm,
            [choice.prefix for choice in choices],
            [choice.candidates for choice in choices],
            seed=config.seed,
            show=config.show_progress,
        )
        chosen = MEASURES if self.likelihoods else {name: MEASURES[name] for name in _CHEAP}
        scores = {name: measure(evidence) for name, measure in chosen.items()}
        lost = (
            sum(candidate.lost > 0 for candidates in evidence.conditional for candidate in candidates)
            if self.likelihoods
            else 0
        )
        return scores, lost

    @abstractmethod
    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return up to ``count`` prefixes with their candidates."""

    def accuracies(self, scores: dict[str, list[np.ndarray]], gold: Sequence[int]) -> dict[str, float]:
        """Return the accuracy of every scorer."""
        return {name: accuracy(values, gold) for name, values in scores.items()}


@dataclass(frozen=True, kw_only=True)
class ChoiceTask(SuffixTask):
    """Candidates from a file, such as HellaSwag's four and Story Cloze's two."""

    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return the first rows of the file."""
        del config, system
        return read_choices(self.files[0])[:count]


@dataclass(frozen=True, kw_only=True)
class InbookTask(SuffixTask):
    """The true continuation among ten other stretches of the same document (INBOOK negatives), all whole sentences.

    Metrics without ending are of all eleven candidates; ``_2way`` is against one negative, sampled at random.
    """

    samples: int = field(default=200, metadata={"help": "Prefixes at most, spread over the documents."})
    prefix_words: int = field(default=256, metadata={"help": "Words of a prefix, about."})
    continuation_words: int = field(default=128, metadata={"help": "Words of a continuation at most."})
    hard_by: str = field(
        default="",
        metadata={
            "help": "Who picks hard negatives (RankGen, C.1): a measure of shared words or a scorer's folder; left "
            "out, chance."
        },
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.prefix_words, self.continuation_words) < 10:
            raise ConfigError("suffix-identification needs prefixes and continuations of at least 10 words")

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of the scorers."""
        return (*super().also_read, *files_of(self.hard_by))

    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return prefixes from all documents in turn, each with its continuation and ten others."""
        del system
        path = self.scored_file(config)
        rng = np.random.default_rng(config.seed)
        by_document = [made for text in read_texts(path) if (made := self._of(text, count, rng))]
        turns = range(max(map(len, by_document), default=0))
        sampled = [made[turn] for turn in turns for made in by_document if turn < len(made)][:count]
        if not sampled:
            raise DataError(
                f"{path}: no document is long enough for prefixes of {self.prefix_words} words and eleven continuations"
            )
        return self._hardened(sampled, rng) if self.hard_by else [item.choice for item in sampled]

    def accuracies(self, scores: dict[str, list[np.ndarray]], gold: Sequence[int]) -> dict[str, float]:
        """Return the accuracy of every scorer, of eleven and of two."""
        two = {
            f"{name}_2way": accuracy(
                # The right one and the first other one.
                [scores_C[[at, 0 if at else 1]] for scores_C, at in zip(values, gold, strict=True)],
                [0] * len(gold),
            )
            for name, values in scores.items()
        }
        return {**super().accuracies(scores, gold), **two}

    def _of(self, text: str, count: int, rng: np.random.Generator) -> "list[_Sampled]":
        """Return up to ``count`` prefixes of a document, each with its continuation among ten other stretches."""
        sentences = split_sentences(text)
        lengths = (10, self.continuation_words)
        passages = cut_passages(text, sentences, prefix_words=self.prefix_words, continuation_words=lengths)
        sampled: list[_Sampled] = []
        for place in rng.permutation(len(passages)).tolist():
            if len(sampled) == count:
                break
            passage = passages[place]
            negatives = [negative.text for negative in inbook_negatives(text, sentences, passage, _WAYS - 1, rng)]
            if len(negatives) == _WAYS - 1:
                gold = int(rng.integers(_WAYS))
                candidates = (*negatives[:gold], passage.continuation, *negatives[gold:])
                sampled.append(_Sampled(Choice((passage.prefix,), candidates, gold), text, sentences, passage))
        return sampled

    def _hardened(self, sampled: "Sequence[_Sampled]", rng: np.random.Generator) -> list[Choice]:
        """Return the same prefixes with the ten stretches of the document that the scorer likes best, shuffled."""
        finder = Hardest(fixed_scorer(self.hard_by, load))
        hardened: dict[int, Choice] = {}
        # All prefixes of a document after each other: what was computed of its stretches is known then.
        for place, sample in sorted(enumerate(sampled), key=lambda numbered: numbered[1].text):
            stretches = other_stretches(sample.text, sample.sentences, sample.passage)
            hard = [stretch.text for stretch in finder.of(sample.choice.prefix, stretches, _WAYS - 1)]
            negatives = [hard[which] for which in rng.permutation(len(hard)).tolist()]
            gold = sample.choice.gold
            candidates = (*negatives[:gold], sample.passage.continuation, *negatives[gold:])
            hardened[place] = Choice(sample.choice.sentences, candidates, gold)
        return [hardened[place] for place in range(len(sampled))]


@dataclass(frozen=True)
class _Sampled:
    """A prefix with candidates, and where it is from."""

    choice: Choice
    text: str
    sentences: Sequence[Sentence]
    passage: Passage


def accuracy(scores: Sequence[np.ndarray], gold: Sequence[int]) -> float:
    """Return how often the right candidate has the highest score; equal ones share the point.

    >>> accuracy([np.array([1.0, 2.0]), np.array([3.0, 3.0])], [1, 0])
    0.75
    """
    return float(np.mean(_points(scores, gold)))


def _points(scores: Sequence[np.ndarray], gold: Sequence[int]) -> list[float]:
    return [
        1 / np.count_nonzero(scores_C == scores_C.max()) if scores_C[right] == scores_C.max() else 0.0
        for scores_C, right in zip(scores, gold, strict=True)
    ]


def _half_width(fraction: float, count: int) -> float:
    """Return half the width of Wilson's 95% interval, which stays inside 0 and 1 for few examples."""
    z = 1.96
    return z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count)) / (1 + z * z / count)


# Words of a continuation at least.
_FEWEST = 10
_OWN = "own"
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class HumanOrGenerated(SuffixTask):
    """Accuracy of scoring the continuation in the document above a generated one of about as many words.

    Both are whole sentences. Half of the points is chance; a model's likelihoods come to less, as they like what is
    generated. Metrics are those of ``suffix-identification``.
    """

    kind: ClassVar[str] = "human-or-generated"

    samples: int = field(default=200, metadata={"help": "Prefixes at most, spread over the documents."})
    writer: str = field(
        default="default",
        metadata={"help": "Writes what is told apart: default, own (the model that is measured), a folder or hub id."},
    )
    top_p: float = field(default=0.9, metadata={"help": "It samples from the likeliest tokens of this probability."})
    prefix_words: int = field(default=256, metadata={"help": "Words of a prefix, about."})
    continuation_words: int = field(default=128, metadata={"help": "Words of a continuation at most."})

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every corpus of documents with a test file."""
        return cls.of(test_files(folder / CORPORA_FOLDER))

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.prefix_words, self.continuation_words) < _FEWEST:
            raise ConfigError(f"{self.kind} needs prefixes and continuations of at least {_FEWEST} words")

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of scorer and writer."""
        return (*super().also_read, *files_of(self.writer))

    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return prefixes from all documents in turn, each with the true and the generated continuation."""
        path = self.scored_file(config)
        rng = np.random.default_rng(config.seed)
        passages = tuple(islice(self._passages(path, count, rng), count))
        if not passages:
            raise DataError(f"{path}: no document is long enough for prefixes of {self.prefix_words} words")
        sampling = Sampling(temperature=1.0, top_p=self.top_p)
        if self.writer == _OWN:
            texts = _written(system.lm, passages, sampling, config.seed)
        else:
            state = tuple((path, path.stat().st_mtime_ns) for path in files_of(self.writer))
            texts = _written_by(self.writer, state, passages, sampling, config.seed)
        questions = []
        for passage, text in zip(passages, texts, strict=True):
            # As long as true ones may be, or length alone would give it away; one that is too short is left out.
            generated = cut_to_words(text, passage.words, fewest=_FEWEST, most=self.continuation_words)
            if generated:
                gold = int(rng.integers(2))
                pair = (passage.continuation, generated)
                questions.append(Choice((passage.prefix,), pair if gold == 0 else pair[::-1], gold))
        if not questions:
            raise DataError(f"{path}: {self.writer} writes no {_FEWEST} words behind any of the prefixes")
        return questions

    def _passages(self, path: Path, count: int, rng: np.random.Generator) -> Iterator[Passage]:
        """Yield passages, one of every document before any gives another."""
        documents = []
        for text in read_texts(path):
            passages = cut_passages(
                text,
                split_sentences(text),
                prefix_words=self.prefix_words,
                continuation_words=(_FEWEST, self.continuation_words),
            )
            documents.append([passages[place] for place in rng.permutation(len(passages))[:count].tolist()])
        for turn in zip_longest(*documents):
            yield from (passage for passage in turn if passage is not None)


# One writer serves all systems of an evaluation.
@lru_cache(maxsize=4)
def _written_by(
    writer: str, state: tuple[tuple[Path, int], ...], passages: tuple[Passage, ...], sampling: Sampling, seed: int
) -> list[str]:
    del state  # of its files: a folder that was trained anew is another writer
    lm = load(None if writer == "default" else writer, attention="causal")
    return _written(lm, passages, sampling, seed)


def _written(lm: LanguageModel, passages: tuple[Passage, ...], sampling: Sampling, seed: int) -> list[str]:
    return continuations_of_length(
        lm.model,
        lm.tokenizer,
        [passage.prefix for passage in passages],
        [f" {passage.continuation}" for passage in passages],
        sampling,
        batch_size=_BATCH,
        key=(seed,),
    )
