"""Names, parts of speech and phrases of CoNLL-2003, by a linear classifier of frozen word vectors.

LBW section 3.2 (names), MAGNET section 4.1 (all three, Table 1).

Names and phrases are counted as the CoNLL shared tasks count them (conlleval; Tjong Kim Sang and De Meulder,
"Introduction to the CoNLL-2003 shared task", 2003, section 3).

Knows: tagged sentences, IOB tags, what is scored and how. Does not know: models, how classifiers are trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np

from gerund.errors import ConfigError, DataError, unknown_name
from gerund.evaluation.classifiers import RELEASED_TAGGER, LinearTagger, accuracy, macro_f1, train_taggers
from gerund.evaluation.sets.conll import COLUMNS, Column, TaggedSentences, conll_splits, read_conll
from gerund.evaluation.systems.base import EncodesWords, EncodesWordTokens
from gerund.evaluation.systems.embeddings import word_states
from gerund.evaluation.task import EvaluationConfig, Score, Side, Task

FOLDER = "tokens"

Tags = Mapping[Column, list[list[str]]]

_CHOICES = ("lbw", "magnet", "released")
_POOLINGS = ("mean", "first")
# By system the scores of the last run: all three tasks train on the same vectors, and those are dear.
_finished: "WeakKeyDictionary[EncodesWords, tuple[tuple[Any, ...], dict[Column, Score]]]" = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class TokenTask(Task):
    """A tag for every word, from a linear classifier that is trained on frozen word vectors.

    All words are encoded once; then three classifiers, one a column of the files, are trained side by side as
    MAGNET does (appendix A; LBW says nothing of the training). What one task measures for a system the other
    two take over.

    Main metrics are the shared task's: F1 of whole names or phrases (begin, end and type right), and for parts of
    speech accuracy. ``accuracy`` is the fraction of words with the right tag. It is what Table 1 of MAGNET shows for
    all three: its other rows come from LLM2Vec, whose code takes the micro-averaged precision over words.

    ``config.limit`` is at most so many sentences of each split, the first ones.
    """

    side: ClassVar[Side] = "tokens"
    requires: ClassVar[type] = EncodesWords
    data_folder: ClassVar[str] = FOLDER
    column: ClassVar[Column]

    setting: Literal["lbw", "magnet", "released"] = field(
        default="lbw",
        metadata={
            "help": "lbw: a word is the mean over its tokens; magnet: the mean over the outputs before its tokens; "
            "released: every token is labelled and scored, trained as in LBW's released code (learning rate 5e-3, 3 "
            "epochs, 32 sentences a step)"
        },
    )
    pooling: Literal["mean", "first"] = field(
        default="mean", metadata={"help": "how a word's tokens become its vector, but for setting=released"}
    )

    def __post_init__(self) -> None:
        if self.setting not in _CHOICES:
            raise unknown_name("setting", self.setting, _CHOICES)
        if self.pooling not in _POOLINGS:
            raise unknown_name("pooling of words", self.pooling, _POOLINGS)
        if self.setting == "released" and self.pooling != "mean":
            raise ConfigError(f"{self.kind}: setting=released labels tokens, so no pooling makes words of them")

    @property
    def has_validation(self) -> bool:
        """Whether there is a validation split (testa)."""
        return "validation" in self._splits

    @property
    def capability(self) -> type:
        """Words' vectors, or their tokens' under the released setting."""
        return EncodesWordTokens if self.setting == "released" else self.requires

    @property
    def word_pooling(self) -> Literal["mean", "first"]:
        """How a word's tokens become its vector."""
        return self.pooling

    @property
    def shifts_words(self) -> bool:
        """Whether word vectors are made of the outputs before each token."""
        return self.setting == "magnet"

    def learnt_and_scored(self, config: EvaluationConfig) -> tuple[TaggedSentences, TaggedSentences]:
        """Return the training sentences and those that are scored.

        Raises:
            DataError: a file is malformed.
        """
        train, test = (read_conll(self._split_file(split)) for split in ("train", config.split))
        return train.first(config.limit), test.first(config.limit)

    def sentences(self, config: EvaluationConfig) -> list[list[str]]:
        """Return the words of the training sentences and, behind them, of those that are scored.

        None under the released setting, which labels tokens and no words.
        """
        if self.setting == "released":
            return []
        train, test = self.learnt_and_scored(config)
        return train.words + test.words

    def run(self, system: EncodesWords, config: EvaluationConfig) -> Score:
        """Encode, train, score.

        Raises:
            DataError: a file is missing or malformed.
            ResourceError: the vectors fit neither memory nor disk.
        """
        if not self.is_measured(system, config):
            _finished[system] = (self._key(config), self._scores(system, config))
        return _finished[system][1][self.column]

    def is_measured(self, system: EncodesWords, config: EvaluationConfig) -> bool:
        """Whether one of the other two tasks has measured this one as well."""
        known = _finished.get(system)
        return known is not None and known[0] == self._key(config)

    def _key(self, config: EvaluationConfig) -> tuple[Any, ...]:
        """Return what the scores of all three tasks depend on."""
        files = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in self._splits.values())
        return files, self.setting, self.pooling, self.prompt(config), config.seed, config.limit, config.split

    @property
    def _splits(self) -> dict[str, Path]:
        return conll_splits(self.files[0].parent)

    def _split_file(self, split: str) -> Path:
        path = self._splits.get(split)
        if path is None:
            raise DataError(f"{self.files[0].parent}: there is no file of the {split} split")
        return path

    def _scores(self, system: EncodesWords, config: EvaluationConfig) -> dict[Column, Score]:
        train, test = self.learnt_and_scored(config)
        if isinstance(system, EncodesWordTokens) and self.setting == "released":
            return _score_tokens(system, train, test, self.prompt(config), config)
        n_train = sum(map(len, train.words))
        with word_states(
            system,
            train.words + test.words,
            prompt=self.prompt(config),
            pooling=self.pooling,
            shift=self.shifts_words,
            show=config.show_progress,
        ) as vectors_ND:
            return score_words(
                vectors_ND[:n_train],
                train.tags,
                vectors_ND[n_train:],
                test.tags,
                seed=config.seed,
                show=config.show_progress,
            )


@dataclass(frozen=True, kw_only=True)
class NamedEntities(TokenTask):
    """Names of persons, organizations, locations and others; main metric F1."""

    kind: ClassVar[str] = "ner"
    column: ClassVar[Column] = "ner"


@dataclass(frozen=True, kw_only=True)
class PartsOfSpeech(TokenTask):
    """Parts of speech; main metric accuracy."""

    kind: ClassVar[str] = "pos"
    column: ClassVar[Column] = "pos"


@dataclass(frozen=True, kw_only=True)
class Chunking(TokenTask):
    """Phrases; main metric F1."""

    kind: ClassVar[str] = "chunking"
    column: ClassVar[Column] = "chunk"


def find(folder: Path) -> list[TokenTask]:
    """Return three tasks for every folder in ``tokens`` that has a training and a test set."""
    found: list[TokenTask] = []
    for place in sorted(path for path in (folder / FOLDER).glob("*") if path.is_dir()):
        splits = conll_splits(place)
        if {"train", "test"} <= splits.keys():
            files = tuple(splits.values())
            found += [
                task(name=f"{task.kind}/{place.name}", files=files) for task in (Chunking, NamedEntities, PartsOfSpeech)
            ]
    return sorted(found, key=lambda task: task.name)


def score_words(
    train_vectors: np.ndarray,
    train_tags: Tags,
    test_vectors: np.ndarray,
    test_tags: Tags,
    *,
    seed: int,
    show: bool | None = None,
) -> dict[Column, Score]:
    """Train a linear classifier for every column and score it, on word vectors that are there already.

    Args:
        train_vectors: ``(n_words, D)`` float32, sentence after sentence.
        train_tags: by column the tags of each training sentence.
        test_vectors: as ``train_vectors``, of the sentences that are scored.
        test_tags: their tags.
        seed: of first weights, batches and dropout.
        show: whether to show progress; None only on a terminal.

    Raises:
        ValueError: vectors and tags are not equally many.
    """
    for vectors, tags in ((train_vectors, train_tags), (test_vectors, test_tags)):
        if {len(vectors)} != {sum(map(len, tags[column])) for column in COLUMNS}:
            raise ValueError(f"{len(vectors)} word vectors for another number of tags")
    taggers = train_taggers(train_vectors, [train_tags[column] for column in COLUMNS], seed=seed, show=show)
    return _tagged(taggers, train_vectors, test_vectors, test_tags)


def _score_tokens(
    system: EncodesWordTokens,
    train: TaggedSentences,
    test: TaggedSentences,
    prompt: str | None,
    config: EvaluationConfig,
) -> dict[Column, Score]:
    """Label every token, as LBW's released code does (``experiments/run_ner.py`` with ``label_all_tokens``).

    A word's first token has the word's tag and the others that tag as a continuation. Tags are IOB2 there, as in the
    copy of the data that it reads, and chunks are counted over tokens. It cuts sentences at 32 tokens; nothing is cut
    here, so that all words are scored.
    """
    sides = []
    for one in (train, test):
        states = system.encode_word_tokens(one.words, prompt=prompt, show=config.show_progress)
        counts = [[len(word) for word in own] for own in states]
        tags = {column: token_tags(counts, one.tags[column]) for column in COLUMNS}
        sides.append((np.concatenate([word for own in states for word in own]), tags))
    (learnt_ND, train_tags), (scored_ND, test_tags) = sides
    taggers = train_taggers(
        learnt_ND,
        [train_tags[column] for column in COLUMNS],
        seed=config.seed,
        training=RELEASED_TAGGER,
        show=config.show_progress,
    )
    return _tagged(taggers, learnt_ND, scored_ND, test_tags)


def token_tags(counts: Sequence[Sequence[int]], tags: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the tags of tokens, given those of words and how many tokens each has.

    >>> token_tags([[2, 1, 3]], [["I-PER", "O", "I-LOC"]])
    [['B-PER', 'I-PER', 'O', 'B-LOC', 'I-LOC', 'I-LOC']]
    """
    found = []
    for numbers, own in zip(counts, tags, strict=True):
        begins = {begin for begin, _, _ in chunks(own)}
        sentence: list[str] = []
        for place, (number, tag) in enumerate(zip(numbers, own, strict=True)):
            mark, _, kind = tag.partition("-")
            if kind and mark in ("B", "I"):
                first = f"{'B' if place in begins else 'I'}-{kind}"
                sentence += [first, *[f"I-{kind}"] * (number - 1)][:number]
            else:
                sentence += [tag] * number
        found.append(sentence)
    return found


def _tagged(
    taggers: Sequence[LinearTagger], train_vectors: np.ndarray, test_vectors: np.ndarray, test_tags: Tags
) -> dict[Column, Score]:
    """Score what classifiers say of the vectors."""
    lost = sum(int((~vectors.any(axis=1)).sum()) for vectors in (train_vectors, test_vectors))
    notes = (f"{lost} words lie beyond the model's longest text and were read as zeros",) if lost else ()
    scores = {}
    for column, tagger in zip(COLUMNS, taggers, strict=True):
        gold, flat = test_tags[column], iter(tagger.predict(test_vectors))
        predicted = [[next(flat) for _ in sentence] for sentence in gold]
        main, metrics = _metrics(column, gold, predicted)
        scores[column] = Score(main, metrics, size=len(gold), notes=notes)
    return scores


@dataclass(frozen=True)
class ChunkScores:
    """What fraction of the chunks was found; a prediction counts where begin, end and type are all right.

    Attributes:
        precision: fraction of the predicted chunks that are right; 0 where none is predicted.
        recall: fraction of the true chunks that were found; 0 where there are none.
        f1: harmonic mean of both; 0 where both are 0.
    """

    precision: float
    recall: float
    f1: float


def chunks(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the chunks of one sentence as (first word, word after the last, type).

    Reads IOB1 (B- only where a chunk follows one of its own type) and IOB2 (B- at every beginning) alike, and
    what a classifier may put together that is neither: a chunk begins at B-, after O, and where the type
    changes.

    Args:
        tags: ``O``, or ``B-`` or ``I-`` with a type.

    >>> sorted(chunks(["I-ORG", "O", "I-PER", "B-PER", "I-LOC"]))
    [(0, 1, 'ORG'), (2, 3, 'PER'), (3, 4, 'PER'), (4, 5, 'LOC')]
    """
    found = set()
    begin, current = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if current and (mark == "B" or kind != current):
            found.add((begin, place, current))
            current = ""
        if kind and not current:
            begin, current = place, kind
    return found


def chunk_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> ChunkScores:
    """Compare the chunks of all sentences together (micro-averaged over types).

    Args:
        gold: the true tags of each sentence.
        predicted: as many tags for as many sentences.

    >>> chunk_scores([["I-PER", "I-PER", "O"]], [["I-PER", "I-PER", "I-LOC"]])
    ChunkScores(precision=0.5, recall=1.0, f1=0.6666666666666666)
    """
    right = n_gold = n_predicted = 0
    for true_tags, tags in zip(gold, predicted, strict=True):
        true_chunks, found = chunks(true_tags), chunks(tags)
        right += len(true_chunks & found)
        n_gold += len(true_chunks)
        n_predicted += len(found)
    # 2 PR / (P + R), without a division by 0 where nothing is right.
    f1 = 2 * right / max(1, n_gold + n_predicted)
    return ChunkScores(right / max(1, n_predicted), right / max(1, n_gold), f1)


def _metrics(column: Column, gold: list[list[str]], predicted: list[list[str]]) -> tuple[str, dict[str, float]]:
    """Return the name of the main metric and all metrics."""
    flat_gold, flat = ([tag for sentence in tags for tag in sentence] for tags in (gold, predicted))
    correct = accuracy(flat_gold, flat)
    if column == "pos":
        return "accuracy", {"accuracy": correct, "macro_f1": macro_f1(flat_gold, flat)}
    found = chunk_scores(gold, predicted)
    return "f1", {"f1": found.f1, "precision": found.precision, "recall": found.recall, "accuracy": correct}
