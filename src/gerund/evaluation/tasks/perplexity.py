"""Perplexity and bits per byte of whole texts, and perplexity of hidden spans (infilling)."""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.data_files import (
    AUTO,
    CHOICES_FOLDER,
    CORPORA_FOLDER,
    corpus_files,
    read_choices,
    read_texts,
    story_files,
    test_files,
)
from gerund.evaluation.systems.base import HasLikelihoods
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Side, Task, Unit
from gerund.inference.likelihood import SpanMode, SpannedText, causal_runtime, sequence_logprobs, span_logprobs
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel

_LONGEST_WINDOW = 1024
# More than in any text; what follows isn't tokenized.
_CHARACTERS_OF_A_TOKEN = 40
_LARGEST_EXPONENT = 700.0
_FORMAT = InputFormat(empty="zeros")


@dataclass(frozen=True)
class Stretch:
    """The beginning of a document, as far as it is scored."""

    ids: list[int]  # its tokens, without special ones
    offsets: Sequence[tuple[int, int]]  # (start, end) characters of each token
    text: str

    def spelled(self, first: int) -> str:
        """Return the text that the tokens from ``first`` on spell."""
        return self.text[self.offsets[first - 1][1] if first else 0 : self.offsets[-1][1]]


@dataclass(frozen=True, kw_only=True)
class PerplexityTask(FileTask):
    """Bits per byte of whole documents, each from its beginning, in overlapping windows.

    Every token is scored once, after all of its window that precedes it. Each window begins with the special tokens
    that begin a text (a tokenizer that knows a beginning token without putting it there gets it too), which are
    never scored. ``bits_per_byte`` can be compared between models of different tokenizers, and so can
    ``word_perplexity`` (words at white space, as lm-evaluation-harness counts WikiText's); ``perplexity`` is by token
    and cannot. ``config.limit`` counts documents.
    """

    kind: ClassVar[str] = "perplexity"
    data_folder: ClassVar[str] = CORPORA_FOLDER
    layout = corpus_files
    side: ClassVar[Side] = "generation"
    unit: ClassVar[Unit] = "bits"
    higher_is_better: ClassVar[bool] = False
    reads_plan: ClassVar[bool] = False
    requires: ClassVar[type] = HasLikelihoods

    window: int | None = field(
        default=None,
        metadata={"help": f"Tokens read at once; left out, the model's context, at most {_LONGEST_WINDOW}."},
    )
    stride: int | None = field(
        default=None, metadata={"help": "Tokens from one window to the next; left out, half a window."}
    )
    max_tokens: int = field(default=100_000, metadata={"help": "Tokens that are scored at most."})
    document_tokens: int = field(default=10_000, metadata={"help": "Tokens of one document that are scored at most."})
    joined: bool = field(
        default=False, metadata={"help": "Read the documents as one text, with the end token between them."}
    )
    clean: str = field(
        default=AUTO,
        metadata={"help": "Quirks to remove: none, gutenberg, wikipedia; auto goes by the name of the file."},
    )

    def __post_init__(self) -> None:
        for name in ("window", "stride", "max_tokens", "document_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"perplexity.{name}={value} leaves nothing to score")

    def run(self, system: HasLikelihoods, config: EvaluationConfig) -> Score:
        """Score every token."""
        lm = system.causal_lm
        head = beginning(lm)
        window, stride = self._windows(lm, len(head))
        path = self.scored_file(config)
        stretches = list(self._stretches(lm, path, config.limit))
        # Without a beginning token nothing precedes the first token of a text.
        first = 0 if head else 1
        texts = [([*stretch.ids], [place >= first for place in range(len(stretch.ids))]) for stretch in stretches]
        if self.joined:
            texts = [_join(texts, lm.tokenizer.eos_token_id, head)]
        if not any(any(scored) for _, scored in texts):
            raise DataError(f"{path}: no text that could be scored")
        cuts = [(row, *cut) for row, (ids, _) in enumerate(texts) for cut in windows(len(ids), window, stride, first)]
        sequences = [
            ([*head, *texts[row][0][begin:end]], len(head) + scored - begin) for row, begin, scored, end in cuts
        ]
        logprobs = sequence_logprobs(lm.model, lm.tokenizer, sequences, show=config.show_progress)
        counted = [np.array(texts[row][1][scored:end]) for row, _, scored, end in cuts]
        total = -sum(float(values[mask].sum(dtype=np.float64)) for values, mask in zip(logprobs, counted, strict=True))
        tokens = sum(int(mask.sum()) for mask in counted)
        spelled = [stretch.spelled(first) for stretch in stretches]
        how = f"in windows of {window + len(head)} that move by {stride}"
        return _score(total, tokens, spelled, f"{tokens} tokens of {len(stretches)} documents {how}")

    def _windows(self, lm: LanguageModel, head: int) -> tuple[int, int]:
        """Return the size of a window without the special tokens, and how far it moves."""
        context = causal_runtime(lm.model, lm.tokenizer).max_length
        window = self.window or min(context or _LONGEST_WINDOW, _LONGEST_WINDOW)
        if context is not None and window > context:
            raise ConfigError(f"perplexity.window={window} is longer than the model's context of {context} tokens")
        stride = self.stride or max(1, window // 2)
        if stride >= window - head:
            raise ConfigError(f"perplexity.stride={stride} leaves no context in a window of {window} tokens")
        return window - head, stride

    def _stretches(self, lm: LanguageModel, path: Path, limit: int | None) -> Iterator[Stretch]:
        left = self.max_tokens
        for number, text in enumerate(read_texts(path, self.clean)):
            if left < 1 or (limit is not None and number == limit):
                return
            most = min(left, self.document_tokens)
            [tokens] = tokenize(lm.tokenizer, [text[: _CHARACTERS_OF_A_TOKEN * most]], _FORMAT, offsets=True)
            if tokens is None:
                continue
            offsets = tokens.offsets[:most]
            before = tokens.specials_before
            left -= len(offsets)
            yield Stretch(tokens.ids[before : before + len(offsets)], offsets, text)


def beginning(lm: LanguageModel) -> list[int]:
    """Return the special tokens that a text begins with; the tokenizer's own, or its beginning token."""
    [tokens] = tokenize(lm.tokenizer, ["a"], InputFormat())
    before = [] if tokens is None else tokens.ids[: tokens.specials_before]
    begin = lm.tokenizer.bos_token_id
    return before or ([] if begin is None else [begin])


def windows(n_tokens: int, window: int, stride: int, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield windows over a text in which every token is scored once.

    >>> list(windows(10, window=6, stride=3, first=0))
    [(0, 0, 6), (3, 6, 9), (6, 9, 10)]
    """
    begin, scored = 0, first
    while scored < n_tokens:
        end = min(begin + window, n_tokens)
        yield begin, scored, end
        begin, scored = begin + stride, end


def _join(
    texts: Sequence[tuple[list[int], list[bool]]], end: int | None, head: list[int]
) -> tuple[list[int], list[bool]]:
    """Return one text, with the tokens between documents that training puts there; these are not scored."""
    between = [*([] if end is None else [end]), *head]
    ids: list[int] = []
    scored: list[bool] = []
    for text_ids, flags in texts:
        if ids:
            ids += between
            scored += [False] * len(between)
        ids += text_ids
        scored += flags
    return ids, scored


def _score(total: float, tokens: int, spelled: Sequence[str], note: str) -> Score:
    """Turn the text's information, in nats, into a score."""
    size = sum(len(text.encode()) for text in spelled)
    words = sum(len(text.split()) for text in spelled)
    metrics = {"bits_per_byte": total / math.log(2) / size, "perplexity": math.exp(total / tokens)}
    notes = [note]
    if total / max(1, words) < _LARGEST_EXPONENT:
        metrics["word_perplexity"] = math.exp(total / max(1, words))
    else:
        notes.append("no perplexity by word: this text has hardly any white space")
    return Score("bits_per_byte", metrics, size=len(spelled), notes=tuple(notes))


_MOST_SPANS = 3
_SPAN_TOKENS = (8, 32)


@dataclass(frozen=True, kw_only=True)
class InfillingTask(FileTask):
    """Perplexity of hidden tokens alone (Donahue et al., 2020), in two modes of the same model.

    ``infill`` sees both sides under MAGNET's hybrid mask, with the adapter for it where there is one;
    ``left_only`` reads causally, without it. A model that was not trained
    for it does worse with the mask than without. ``config.limit`` counts texts.
    """

    side: ClassVar[Side] = "generation"
    unit: ClassVar[Unit] = "perplexity"
    higher_is_better: ClassVar[bool] = False
    reads_plan: ClassVar[bool] = False
    requires: ClassVar[type] = HasLikelihoods
    reads_adapter: ClassVar[bool] = True
    kind: ClassVar[str] = "infilling"

    samples: int = field(default=200, metadata={"help": "Texts, the first of the file."})

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every file of stories and every corpus of documents."""
        stories = StoryInfilling.of(story_files(folder / CHOICES_FOLDER))
        documents = DocumentInfilling.of(test_files(folder / CORPORA_FOLDER))
        return sorted([*stories, *documents], key=lambda task: task.name)

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"infilling.samples={self.samples} leaves nothing to score")

    def run(self, system: HasLikelihoods, config: EvaluationConfig) -> Score:
        """Measure both modes."""
        lm = system.causal_lm
        path = self.scored_file(config)
        count = min(self.samples, config.limit or self.samples)
        texts = self.hidden(lm, path, count, np.random.default_rng(config.seed))
        if not texts:
            raise DataError(f"{path}: no text is long enough to hide something in it")
        modes: dict[str, SpanMode] = {"infill": "infill", "left_only": "causal"}
        values = {}
        for name, mode in modes.items():
            adapter = lm.adapters.name("infill")
            logprobs = span_logprobs(lm.model, lm.tokenizer, texts, mode, show=config.show_progress, adapter=adapter)
            flat = np.concatenate([values for spans in logprobs for values in spans])
            values[name] = math.exp(-float(flat.mean(dtype=np.float64)))
        spans = sum(len(item.spans) for item in texts)
        notes = (f"{flat.size} hidden tokens in {spans} spans; comparable between models of one tokenizer only",)
        metrics = {**values, "infill_over_left_only": values["infill"] / values["left_only"]}
        return Score("infill", metrics, size=len(texts), notes=notes)

    @abstractmethod
    def hidden(self, lm: LanguageModel, path: Path, count: int, rng: np.random.Generator) -> list[SpannedText]:
        """Return texts with the spans that are hidden in them."""


@dataclass(frozen=True, kw_only=True)
class StoryInfilling(InfillingTask):
    """One sentence of each five-sentence story is hidden, any but the first, which nothing precedes."""

    def hidden(self, lm: LanguageModel, path: Path, count: int, rng: np.random.Generator) -> list[SpannedText]:
        """Return stories with a sentence to be filled in."""
        del lm
        return [_story(choice.story, int(rng.integers(1, len(choice.story)))) for choice in read_choices(path)[:count]]


@dataclass(frozen=True, kw_only=True)
class DocumentInfilling(InfillingTask):
    """Up to three spans of 8 to 32 tokens are hidden in the first tokens of each document."""

    length: int = field(default=256, metadata={"help": "Tokens of a document that are read."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 4 * _SPAN_TOKENS[0]:
            raise ConfigError(f"infilling.length={self.length} leaves no room for a span and its context")

    def hidden(self, lm: LanguageModel, path: Path, count: int, rng: np.random.Generator) -> list[SpannedText]:
        """Return the beginnings of documents with spans to be filled in."""
        # The model's context, not the encoder's longest text.
        length = min(self.length, causal_runtime(lm.model, lm.tokenizer).max_length or self.length)
        spanned: list[SpannedText] = []
        for text in read_texts(path):
            if len(spanned) == count:
                break
            # Cutting a text may change its last tokens, so that what is left is tokenized once more.
            [whole] = tokenize(lm.tokenizer, [text[: 40 * length]], InputFormat(), offsets=True)
            assert whole is not None
            if len(whole) < length:
                continue
            piece = text[: whole.offsets[length - whole.specials_before - 2][1]]
            [read] = tokenize(lm.tokenizer, [piece], InputFormat(), offsets=True)
            assert read is not None
            if spans := _apart(sample_spans(len(read.offsets), rng), read.offsets):
                spanned.append(SpannedText(piece, spans))
        return spanned


def sample_spans(n_tokens: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Sample one to three spans of 8 to 32 tokens, with context before, between and behind them."""
    count = int(rng.integers(1, _MOST_SPANS + 1))
    room = n_tokens // count
    spans = []
    for part in range(count):
        # A span in each part of the text, and in it at any place that leaves a token of context on both sides.
        longest = min(_SPAN_TOKENS[1], room - 2)
        size = int(rng.integers(min(_SPAN_TOKENS[0], longest), longest + 1))
        start = part * room + 1 + int(rng.integers(0, room - size - 1))
        spans.append((start, start + size))
    return spans


def _apart(spans: Sequence[tuple[int, int]], offsets: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the characters of spans of tokens, without those that no whole token divides from what precedes them.

    A letter may be several tokens, of which a span then takes all.
    """
    places: list[tuple[int, int]] = []
    for first, after in spans:
        start, end = offsets[first][0], offsets[after - 1][1]
        before = places[-1][1] if places else 0
        if any(before <= a < b <= start for a, b in offsets[:first]):
            places.append((start, end))
    return tuple(places)


def _story(sentences: Sequence[str], place: int) -> SpannedText:
    before = " ".join(sentences[:place])
    after = " ".join(sentences[place + 1 :])
    # The space before the sentence is the span's, as it is part of its first token.
    span = f" {sentences[place]}"
    text = f"{before}{span}" + (f" {after}" if after else "")
    return SpannedText(text, ((len(before), len(before) + len(span)),))
