"""Infilling: how well does a model predict what was hidden, seeing both sides?

MAGNET, section 4.3 and Table 4.

Knows: stories and documents, which of their spans are hidden. Does not know: masks, how a model computes.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.sets.choices import choice_files, read_choices, tells_stories
from gerund.evaluation.sets.corpora import corpora_in, read_texts
from gerund.evaluation.systems.base import HasLikelihoods
from gerund.evaluation.task import EvaluationConfig, FileTask, Score, Side, Task, Unit
from gerund.inference.likelihood import SpanMode, SpannedText, causal_runtime, span_logprobs
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel

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

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"infilling.samples={self.samples} leaves nothing to score")

    def run(self, system: HasLikelihoods, config: EvaluationConfig) -> Score:
        """Measure both modes.

        Raises:
            DataError: the file is malformed, or no text is long enough.
            UnsupportedModelError: the hybrid mask does not reach every layer of the model.
        """
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
            flat = np.concatenate([own for spans in logprobs for own in spans])
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
        found: list[SpannedText] = []
        for text in read_texts(path):
            if len(found) == count:
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
                found.append(SpannedText(piece, spans))
        return found


def sample_spans(n_tokens: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Sample one to three spans of 8 to 32 tokens, with context before, between and behind them.

    Returns:
        (start, end) of each span, from left to right; fewer or shorter ones where there is no room.
    """
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


def find(folder: Path) -> list[Task]:
    """Return a task for every file of stories and every corpus of documents."""
    stories: Sequence[Task] = [
        StoryInfilling(name=f"infilling/{name}", files=(path,))
        for name, path in choice_files(folder).items()
        if tells_stories(path)
    ]
    documents: Sequence[Task] = [
        DocumentInfilling(
            name=f"infilling/{name}",
            files=tuple(files[split] for split in ("test", "validation") if split in files),
        )
        for name, files in corpora_in(folder).items()
        if "test" in files
    ]
    return sorted([*stories, *documents], key=lambda task: task.name)


def _story(sentences: Sequence[str], place: int) -> SpannedText:
    before = " ".join(sentences[:place])
    after = " ".join(sentences[place + 1 :])
    # The space before the sentence is the span's, as it is part of its first token.
    span = f" {sentences[place]}"
    text = f"{before}{span}" + (f" {after}" if after else "")
    return SpannedText(text, ((len(before), len(before) + len(span)),))
