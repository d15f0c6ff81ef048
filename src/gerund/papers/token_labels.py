"""CoNLL-2003 tagging (names, parts of speech, chunks) by a linear classifier on frozen word vectors."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gerund.data.files import decode, opened
from gerund.errors import ConfigError, DataError, ResourceError, unknown_name
from gerund.evaluation.data_files import first_there
from gerund.evaluation.systems.base import EncodesWords, EncodesWordTokens
from gerund.evaluation.task import EvaluationConfig, FolderTask, Score, Side
from gerund.inference.encode.spans import WordPooling
from gerund.papers.linear_probes import accuracy, macro_f1
from gerund.progress import progress

MOST_BYTES = 1 << 30
"""Word vectors that take more than this are in a file."""

_SENTENCES_AT_ONCE = 2048
STEPS = 4000
BATCH_SENTENCES = 8
LEARNING_RATE = 5e-4
DROPOUT = 0.1
"""How linear taggers are trained: MAGNET, appendix A."""

_PREDICTED_AT_ONCE = 1 << 16
_PROGRESS_STEPS = 100

Column = Literal["pos", "chunk", "ner"]

# The order of the columns after the word.
COLUMNS: tuple[Column, ...] = ("pos", "chunk", "ner")
# As the shared task named them, and as most copies do.
_SPLITS = {
    "train": ("eng.train", "train.txt"),
    "validation": ("eng.testa", "valid.txt"),
    "test": ("eng.testb", "test.txt"),
}
_DOCUMENT = "-DOCSTART-"
# Not all white space, as str.split() does: a word may hold a no-break space.
_BETWEEN = re.compile(r"[ \t]+")
_CHUNK_TAG = re.compile(r"O|[BI]-\S+")


@dataclass(frozen=True)
class TaggedSentences:
    """Sentences that are split into words, with three tags a word."""

    words: list[list[str]]  # the words of each sentence
    tags: Mapping[Column, list[list[str]]]  # for each of ``COLUMNS`` the tags of each sentence

    def first(self, limit: int | None) -> "TaggedSentences":
        """Return the first ``limit`` sentences; all for None."""
        return TaggedSentences(self.words[:limit], {name: tags[:limit] for name, tags in self.tags.items()})


def conll_splits(folder: Path) -> dict[str, Path]:
    """Return which of ``train``, ``validation`` and ``test`` a folder has, and their files."""
    return first_there(folder, _SPLITS)


def read_conll(path: Path) -> TaggedSentences:
    """Return the sentences of a file, without the lines that begin a document."""
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    sentences: list[list[list[str]]] = [[]]
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            fields = _fields(raw, f"{path}, line {number}")
            if fields:
                sentences[-1].append(fields)
            elif sentences[-1]:
                sentences.append([])
    if not sentences[-1]:
        sentences.pop()
    if not sentences:
        raise DataError(f"{path}: there is no sentence in this file")
    words, *tags = ([[row[place] for row in rows] for rows in sentences] for place in range(1 + len(COLUMNS)))
    return TaggedSentences(words, dict(zip(COLUMNS, tags, strict=True)))


def _fields(raw: bytes, where: str) -> list[str]:
    """Return the columns of a word's line; none for a line between sentences."""
    line = decode(raw, where).removeprefix("\ufeff").strip(" \t\r\n")
    if not line or line.startswith(_DOCUMENT):
        return []
    fields = _BETWEEN.split(line)
    if len(fields) != 1 + len(COLUMNS):
        raise DataError(f"{where}: expected a word and {len(COLUMNS)} tags ({', '.join(COLUMNS)}), found {len(fields)}")
    if not fields[0].strip():
        raise DataError(f"{where}: the word is white space")
    for name, tag in zip(COLUMNS[1:], fields[2:], strict=True):
        if not _CHUNK_TAG.fullmatch(tag):
            raise DataError(f"{where}: the {name} tag {tag!r} is none of O, B-TYPE and I-TYPE")
    return fields


@contextmanager
def word_states(
    system: EncodesWords,
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None = None,
    pooling: WordPooling = "mean",
    shift: bool = False,
    show: bool | None = None,
    most_bytes: int = MOST_BYTES,
) -> Iterator[np.ndarray]:
    """Yield one ``(n_words, D)`` float32 array, sentence after sentence."""
    n_words = sum(map(len, sentences))

    def blocks() -> Iterator[np.ndarray]:
        with progress(len(sentences), "encoding words", show=show) as advance:
            for start in range(0, len(sentences), _SENTENCES_AT_ONCE):
                batch = sentences[start : start + _SENTENCES_AT_ONCE]
                yield np.concatenate(
                    system.encode_words(batch, prompt=prompt, pooling=pooling, shift=shift, show=False)
                )
                advance(len(batch))

    size = 4 * n_words * system.dimensions
    if size <= most_bytes:
        yield np.concatenate(list(blocks()))
        return
    with TemporaryDirectory(prefix="gerund-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "states"
        _write(path, blocks(), size)
        yield np.memmap(path, dtype=np.float32, mode="r").reshape(n_words, -1)


def _write(path: Path, blocks: Iterator[np.ndarray], size: int) -> None:
    # Written, not filled through the map: a full disk is then an error and not a killed process.
    with path.open("wb") as file:
        for block in blocks:
            try:
                file.write(block.tobytes())
            except OSError as error:
                needed = f"{math.ceil(size / 1e9)} GB in {path.parent.parent}"
                raise ResourceError(f"the words' vectors need {needed}: {error.strerror or error}") from error


@dataclass(frozen=True)
class TaggerTraining:
    """How linear taggers are trained."""

    batch: int = BATCH_SENTENCES  # sentences a step
    learning_rate: float = LEARNING_RATE  # AdamW's
    steps: int | None = STEPS  # number of steps; None for ``epochs`` passes
    epochs: int = 0  # passes over the sentences, each in an order of its own
    decays: bool = False  # whether the rate falls to 0 in a straight line
    longest_gradient: float | None = None  # what the gradient is cut to; None for no limit

    def count(self, sentences: int) -> int:
        """Return how many steps that is for so many sentences."""
        return self.epochs * -(-sentences // self.batch) if self.steps is None else self.steps


RELEASED_TAGGER = TaggerTraining(32, 5e-3, steps=None, epochs=3, decays=True, longest_gradient=1.0)
"""LBW's released code, ``scripts/run_ner.sh`` with frozen weights, and what transformers' Trainer does by itself."""


@dataclass(frozen=True)
class LinearTagger:
    """A linear classifier of word vectors."""

    tags: list[str]  # the classes
    weight_CD: np.ndarray  # one row a class
    bias_C: np.ndarray  # one number a class

    def predict(self, vectors_ND: np.ndarray) -> list[str]:
        """Return the tag of each vector; of equals the first."""
        predicted: list[str] = []
        for start in range(0, len(vectors_ND), _PREDICTED_AT_ONCE):
            scores_NC = vectors_ND[start : start + _PREDICTED_AT_ONCE] @ self.weight_CD.T + self.bias_C
            predicted += [self.tags[place] for place in scores_NC.argmax(axis=1)]
        return predicted


def train_taggers(
    vectors_ND: np.ndarray,
    tags: Sequence[Sequence[Sequence[str]]],
    *,
    seed: int,
    steps: int | None = None,
    training: TaggerTraining = TaggerTraining(),
    show: bool | None = None,
) -> list[LinearTagger]:
    """Train linear classifiers of frozen word vectors as MAGNET does (appendix A), several at once.

    4000 steps of AdamW at 5e-4 on 8 sentences each, sampled without repetition until all were seen, with dropout
    0.1 on the vectors and the mean cross-entropy over the words. Weight decay is 0 and the rate constant, of
    which the paper says nothing. Classifiers that are trained together read the same batches and have nothing
    else in common, so each comes out as if it were alone but for its first weights.
    """
    generator = torch.Generator().manual_seed(seed)
    classes = [sorted({tag for sentence in targets_N for tag in sentence}) for targets_N in tags]
    targets = [torch.from_numpy(_targets(targets_N, names)) for targets_N, names in zip(tags, classes, strict=True)]
    bounds = np.cumsum([0, *map(len, tags[0])])  # where each sentence begins, and the end
    width = vectors_ND.shape[1]
    # The first weights of torch.nn.Linear.
    reach = width**-0.5
    parameters = [
        (
            torch.empty(len(names), width).uniform_(-reach, reach, generator=generator).requires_grad_(),
            torch.empty(len(names)).uniform_(-reach, reach, generator=generator).requires_grad_(),
        )
        for names in classes
    ]
    trained = [weights for pair in parameters for weights in pair]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=0.0)
    steps = training.count(len(bounds) - 1) if steps is None else steps
    order: list[int] = []
    with progress(steps, "training linear classifiers", show=show) as advance, torch.enable_grad():
        for step in range(1, steps + 1):
            order = order or torch.randperm(len(bounds) - 1, generator=generator).tolist()
            batch, order = order[: training.batch], order[training.batch :]
            rows = np.concatenate([np.arange(bounds[place], bounds[place + 1]) for place in batch])
            words_ND = torch.from_numpy(vectors_ND[rows])
            kept_ND = torch.rand(words_ND.shape, generator=generator) >= DROPOUT
            words_ND = words_ND * kept_ND / (1 - DROPOUT)
            losses = [
                functional.cross_entropy(functional.linear(words_ND, weight_CD, bias_C), targets_N[rows])
                for (weight_CD, bias_C), targets_N in zip(parameters, targets, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            if training.longest_gradient is not None:
                for pair in parameters:  # each classifier is trained as if it were alone
                    nn.utils.clip_grad_norm_(pair, training.longest_gradient)
            if training.decays:
                optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - (step - 1) / steps)
            optimizer.step()
            if step % _PROGRESS_STEPS == 0:
                advance(_PROGRESS_STEPS)
    return [
        LinearTagger(names, weight_CD.detach().numpy(), bias_C.detach().numpy())
        for names, (weight_CD, bias_C) in zip(classes, parameters, strict=True)
    ]


def _targets(tags: Sequence[Sequence[str]], names: list[str]) -> np.ndarray:
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[tag] for sentence in tags for tag in sentence])


Tags = Mapping[Column, list[list[str]]]

_CHOICES = ("lbw", "magnet", "released")
_POOLINGS = ("mean", "first")
# By system the scores of the last run: all three tasks train on the same vectors, and those are dear.
_finished: "WeakKeyDictionary[EncodesWords, tuple[tuple[Any, ...], dict[Column, Score]]]" = WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class TokenTask(FolderTask):
    """A tag for every word, from a linear classifier that is trained on frozen word vectors.

    All words are encoded once; then three classifiers, one per column of the files, are trained together as
    MAGNET does (appendix A; LBW says nothing of the training). What one task measures for a system the other
    two take over.

    Main metrics are the shared task's: F1 of whole names or phrases (begin, end and type right), and for parts of
    speech accuracy. ``accuracy`` is the fraction of words with the right tag. It is what Table 1 of MAGNET shows for
    all three: its other rows come from LLM2Vec, whose code takes the micro-averaged precision over words.

    ``config.limit`` is at most so many sentences of each split, the first ones.
    """

    side: ClassVar[Side] = "tokens"
    requires: ClassVar[type] = EncodesWords
    data_folder: ClassVar[str] = "tokens"
    splits_of: ClassVar[Callable[[Path], dict[str, Path]]] = conll_splits
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
        """Return the training sentences and those that are scored."""
        train, test = (read_conll(self.split_file(split)) for split in ("train", config.split))
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
        """Encode, train, score."""
        if not self.is_measured(system, config):
            _finished[system] = (self._key(config), self._scores(system, config))
        return _finished[system][1][self.column]

    def is_measured(self, system: EncodesWords, config: EvaluationConfig) -> bool:
        """Whether one of the other two tasks has measured this one as well."""
        known = _finished.get(system)
        return known is not None and known[0] == self._key(config)

    def _key(self, config: EvaluationConfig) -> tuple[Any, ...]:
        """Return what the scores of all three tasks depend on."""
        files = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in self.splits.values())
        return files, self.setting, self.pooling, self.prompt(config), config.seed, config.limit, config.split

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


def score_words(
    train_vectors: np.ndarray,
    train_tags: Tags,
    test_vectors: np.ndarray,
    test_tags: Tags,
    *,
    seed: int,
    show: bool | None = None,
) -> dict[Column, Score]:
    """Train a linear classifier for every column and score it, on word vectors that are there already."""
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
    for sentences in (train, test):
        states = system.encode_word_tokens(sentences.words, prompt=prompt, show=config.show_progress)
        counts = [[len(word) for word in words] for words in states]
        tags = {column: token_tags(counts, sentences.tags[column]) for column in COLUMNS}
        sides.append((np.concatenate([word for words in states for word in words]), tags))
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
    labels = []
    for numbers, word_tags in zip(counts, tags, strict=True):
        begins = {begin for begin, _, _ in chunks(word_tags)}
        sentence: list[str] = []
        for place, (number, tag) in enumerate(zip(numbers, word_tags, strict=True)):
            mark, _, kind = tag.partition("-")
            if kind and mark in ("B", "I"):
                first = f"{'B' if place in begins else 'I'}-{kind}"
                sentence += [first, *[f"I-{kind}"] * (number - 1)][:number]
            else:
                sentence += [tag] * number
        labels.append(sentence)
    return labels


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
    """What fraction of the chunks was found; a prediction counts where begin, end and type are all right."""

    precision: float  # fraction of the predicted chunks that are right; 0 where none is predicted
    recall: float  # fraction of the true chunks that were found; 0 where there are none
    f1: float  # harmonic mean of both; 0 where both are 0


def chunks(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the chunks of one sentence as (first word, word after the last, type).

    Reads IOB1 (B- only where a chunk follows one of its own type) and IOB2 (B- at every beginning) alike, and
    what a classifier may put together that is neither: a chunk begins at B-, after O, and where the type
    changes.

    >>> sorted(chunks(["I-ORG", "O", "I-PER", "B-PER", "I-LOC"]))
    [(0, 1, 'ORG'), (2, 3, 'PER'), (3, 4, 'PER'), (4, 5, 'LOC')]
    """
    spans = set()
    begin, current = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if current and (mark == "B" or kind != current):
            spans.add((begin, place, current))
            current = ""
        if kind and not current:
            begin, current = place, kind
    return spans


def chunk_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> ChunkScores:
    """Compare the chunks of all sentences together (micro-averaged over types).

    >>> chunk_scores([["I-PER", "I-PER", "O"]], [["I-PER", "I-PER", "I-LOC"]])
    ChunkScores(precision=0.5, recall=1.0, f1=0.6666666666666666)
    """
    right = n_gold = n_predicted = 0
    for true_tags, tags in zip(gold, predicted, strict=True):
        true_chunks, predicted_chunks = chunks(true_tags), chunks(tags)
        right += len(true_chunks & predicted_chunks)
        n_gold += len(true_chunks)
        n_predicted += len(predicted_chunks)
    # 2 PR / (P + R), without a division by 0 where nothing is right.
    f1 = 2 * right / max(1, n_gold + n_predicted)
    return ChunkScores(right / max(1, n_predicted), right / max(1, n_gold), f1)


def _metrics(column: Column, gold: list[list[str]], predicted: list[list[str]]) -> tuple[str, dict[str, float]]:
    flat_gold, flat = ([tag for sentence in tags for tag in sentence] for tags in (gold, predicted))
    correct = accuracy(flat_gold, flat)
    if column == "pos":
        return "accuracy", {"accuracy": correct, "macro_f1": macro_f1(flat_gold, flat)}
    scores = chunk_scores(gold, predicted)
    return "f1", {"f1": scores.f1, "precision": scores.precision, "recall": scores.recall, "accuracy": correct}
