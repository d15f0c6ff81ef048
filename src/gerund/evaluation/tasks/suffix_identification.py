"""Suffix identification: which continuation belongs to a prefix?

RankGen, section 2.1 and appendices C.1, C.2, C.5, C.6 (Tables 1, 11, 14, 15).

Knows: prefixes with candidates, from files and from documents. Does not know: how candidates are scored.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.data.passages import Passage, Sentence, cut_passages, inbook_negatives, other_stretches, split_sentences
from gerund.entry import load
from gerund.errors import ConfigError, DataError
from gerund.evaluation.scored_task import ScoredTask, files_of
from gerund.evaluation.sets.choices import FOLDER, Choice, choice_files, read_choices
from gerund.evaluation.sets.corpora import read_texts, test_files
from gerund.evaluation.systems.base import Generates, HasLikelihoods
from gerund.evaluation.systems.language_model import scorer_of
from gerund.evaluation.task import EvaluationConfig, Examples, Score, Side, Task
from gerund.scoring.hard_negatives import Hardest
from gerund.scoring.registry import fixed_scorer
from gerund.scoring.word_overlap import WORD_MEASURES

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
    data_folder: ClassVar[str] = FOLDER
    side: ClassVar[Side] = "generation"
    reads_plan: ClassVar[bool] = False

    samples: int = field(default=500, metadata={"help": "Prefixes at most."})
    likelihoods: bool = field(default=True, metadata={"help": "Also measure by the model's likelihoods."})

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"{self.kind}.samples={self.samples} leaves nothing to score")

    @property
    def capability(self) -> type:
        """A model that tells how probable a text is; where only a scorer is asked, any that generates."""
        return HasLikelihoods if self.likelihoods else Generates

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Score every candidate.

        Raises:
            DataError: the file is malformed, or no document is long enough.
            ConfigError: there is no such scorer.
        """
        scorer = scorer_of(system.lm, self.scorer, seed=config.seed)
        choices = self.choices(min(self.samples, config.limit or self.samples), config, system)
        scores, lost = self._by_likelihood(system, choices, config)
        if scorer is not None:
            found = scorer.score(
                [choice.prefix for choice in choices],
                [[f" {candidate}" for candidate in choice.candidates] for choice in choices],
            )
            scores = {_SCORER: [np.array(own) for own in found], **scores}
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
        from gerund.scoring.likelihood import MEASURES, Evidence

        evidence = Evidence(
            system.lm,
            [choice.prefix for choice in choices],
            [choice.candidates for choice in choices],
            seed=config.seed,
            show=config.show_progress,
        )
        chosen = MEASURES if self.likelihoods else {name: MEASURES[name] for name in _CHEAP}
        scores = {name: measure(evidence) for name, measure in chosen.items()}
        lost = sum(one.lost > 0 for own in evidence.conditional for one in own) if self.likelihoods else 0
        return scores, lost

    @abstractmethod
    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return up to ``count`` prefixes with their candidates."""

    def accuracies(self, scores: dict[str, list[np.ndarray]], gold: Sequence[int]) -> dict[str, float]:
        """Return the accuracy of every scorer."""
        return {name: accuracy(found, gold) for name, found in scores.items()}


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
        by_document = [found for text in read_texts(path) if (found := self._of(text, count, rng))]
        turns = range(max(map(len, by_document), default=0))
        sampled = [found[turn] for turn in turns for found in by_document if turn < len(found)][:count]
        if not sampled:
            raise DataError(
                f"{path}: no document is long enough for prefixes of {self.prefix_words} words and eleven continuations"
            )
        return self._hardened(sampled, rng) if self.hard_by else [one.choice for one in sampled]

    def accuracies(self, scores: dict[str, list[np.ndarray]], gold: Sequence[int]) -> dict[str, float]:
        """Return the accuracy of every scorer, of eleven and of two."""
        two = {
            f"{name}_2way": accuracy(
                [_gold_and_another(own, at) for own, at in zip(found, gold, strict=True)], [0] * len(gold)
            )
            for name, found in scores.items()
        }
        return {**super().accuracies(scores, gold), **two}

    def _of(self, text: str, count: int, rng: np.random.Generator) -> "list[_Sampled]":
        """Return up to ``count`` prefixes of a document, each with its continuation among ten other stretches."""
        sentences = split_sentences(text)
        lengths = (10, self.continuation_words)
        passages = cut_passages(text, sentences, prefix_words=self.prefix_words, continuation_words=lengths)
        found: list[_Sampled] = []
        for place in rng.permutation(len(passages)).tolist():
            if len(found) == count:
                break
            passage = passages[place]
            negatives = [one.text for one in inbook_negatives(text, sentences, passage, _WAYS - 1, rng)]
            if len(negatives) == _WAYS - 1:
                gold = int(rng.integers(_WAYS))
                candidates = (*negatives[:gold], passage.continuation, *negatives[gold:])
                found.append(_Sampled(Choice((passage.prefix,), candidates, gold), text, sentences, passage))
        return found

    def _hardened(self, sampled: "Sequence[_Sampled]", rng: np.random.Generator) -> list[Choice]:
        """Return the same prefixes with the ten stretches of the document that the scorer likes best, shuffled."""
        finder = Hardest(fixed_scorer(self.hard_by, load))
        found: dict[int, Choice] = {}
        # All prefixes of a document after each other: what was computed of its stretches is known then.
        for place, one in sorted(enumerate(sampled), key=lambda numbered: numbered[1].text):
            stretches = other_stretches(one.text, one.sentences, one.passage)
            hard = [stretch.text for stretch in finder.of(one.choice.prefix, stretches, _WAYS - 1)]
            negatives = [hard[which] for which in rng.permutation(len(hard)).tolist()]
            gold = one.choice.gold
            candidates = (*negatives[:gold], one.passage.continuation, *negatives[gold:])
            found[place] = Choice(one.choice.sentences, candidates, gold)
        return [found[place] for place in range(len(sampled))]


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
    """Return what each choice is worth."""
    return [
        1 / np.count_nonzero(own == own.max()) if own[right] == own.max() else 0.0
        for own, right in zip(scores, gold, strict=True)
    ]


def find(folder: Path) -> list[Task]:
    """Return a task for every file of candidates and every corpus of documents."""
    chosen: Sequence[Task] = [
        ChoiceTask(name=f"suffix-identification/{name}", files=(path,)) for name, path in choice_files(folder).items()
    ]
    inbook: Sequence[Task] = [
        InbookTask(name=f"suffix-identification/{name}", files=files) for name, files in test_files(folder).items()
    ]
    return sorted([*chosen, *inbook], key=lambda task: task.name)


def _gold_and_another(scores: np.ndarray, gold: int) -> np.ndarray:
    """Return the right candidate's score and the first other one's."""
    return np.array([scores[gold], scores[0 if gold else 1]])


def _half_width(fraction: float, count: int) -> float:
    """Return half the width of Wilson's 95% interval, which stays inside 0 and 1 for few examples."""
    z = 1.96
    return z * math.sqrt(fraction * (1 - fraction) / count + z * z / (4 * count * count)) / (1 + z * z / count)
