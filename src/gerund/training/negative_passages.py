"""Passages with wrong continuations out of a few documents: what runs in the workers of a job.

Knows: passages, generation, scorers. Does not know: files of documents, which parts there are.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gerund.data.cleaning import CLEANERS, clean_text
from gerund.data.corpus import part_of
from gerund.data.passages import Passage, Sentence, cut_to_words, other_stretches, sample_passages, split_sentences
from gerund.errors import ConfigError, unknown_name
from gerund.inference.generate.length_matching import continuations_of_length
from gerund.jobs.engine import JobEngine, StatefulWork
from gerund.jobs.files import whole_file
from gerund.language_model import LanguageModel
from gerund.scoring.hard_negatives import Hardest
from gerund.settings.sampling import Sampling
from gerund.types import Scorer


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """What is made."""

    clean: str = "none"
    """Quirks to remove from the documents first: a style of ``gerund.data.cleaning.clean_text``. Hard-wrapped lines,
    which no model writes, would tell true continuations from generated ones."""
    prefix_words: int = 256
    """Words of a prefix at most."""
    fewest_words: int = 10
    """Words of a continuation at least."""
    most_words: int = 128
    """Words of a continuation at most."""
    part: str = "1/1"
    """Which documents: ``2/2`` takes every second one, where those of ``1/2`` trained the generator (section 3)."""
    per_document: int | None = None
    """Passages of a document at most; None for one from every sentence on."""
    generate: float = 0.5
    """Fraction of the passages that get a generated continuation; the paper's other half trained its generator."""
    hard: int = 0
    """Stretches of the same document that a scorer takes for continuations most (appendix C.1)."""
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, top_p=0.9))
    """How continuations are sampled."""
    seed: int = 0
    """Determines passages and samples."""
    part_documents: int = 16
    """Documents of a part."""

    def __post_init__(self) -> None:
        if self.clean not in CLEANERS:
            raise unknown_name("text cleaning", self.clean, list(CLEANERS))
        part_of(self.part)
        if not 1 <= self.fewest_words <= self.most_words:
            raise ConfigError(f"continuations of {self.fewest_words} to {self.most_words} words: none are so long")
        if self.prefix_words < 1:
            raise ConfigError(f"prefix_words={self.prefix_words} leaves no prefix")
        if not 0 <= self.generate <= 1:
            raise ConfigError(f"generate={self.generate} is no fraction between 0 and 1")
        for name, least in (("per_document", 1), ("hard", 0), ("part_documents", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value} is below {least}")


@dataclass(frozen=True)
class Made:
    """What was made.

    Attributes:
        documents: documents that were read.
        short: documents that were too short for a passage, which were passed over.
        passages: passages.
        generated: generated continuations.
        hard: hard stretches of documents.
        errors: documents that could not be used.
    """

    documents: int
    short: int
    passages: int
    generated: int
    hard: int
    errors: int = 0


@dataclass(frozen=True)
class Elsewhere:
    """Who makes passages, where it is not this process.

    Attributes:
        engine: gives out the parts.
        load: loads the model and the scorer in each worker; can be sent there.
        gpus: GPUs that a worker needs for itself.
        threads: cores that it needs.
    """

    engine: JobEngine
    load: Callable[[], tuple[LanguageModel | None, Scorer | None]]
    gpus: float = 0.0
    threads: int = 1

    def work(self, config: NegativesConfig, batch_size: int) -> StatefulWork["DocumentPart", Made]:
        """Return what a worker does."""
        return StatefulWork(partial(_opened, config, self.load, batch_size), gpus=self.gpus, threads=self.threads)


@dataclass(frozen=True)
class DocumentPart:
    """Some documents, and where what is made of them goes.

    Attributes:
        path: the part.
        documents: their numbers in the corpus, and their texts as they were read.
    """

    path: Path
    documents: list[tuple[int, str]]


class PassageMaker:
    """Makes the rows of a few documents."""

    def __init__(
        self, config: NegativesConfig, lm: LanguageModel | None, scorer: Scorer | None, batch_size: int
    ) -> None:
        self.config, self.lm, self.batch_size = config, lm, batch_size
        self.hardest = None if scorer is None else Hardest(scorer)

    def rows(self, documents: Sequence[tuple[int, str]]) -> Iterator[dict[str, object]]:
        """Yield a row for each passage, in order."""
        own = self.config
        rows: list[dict[str, object]] = []
        continued: list[tuple[int, Passage]] = []
        for number, text in documents:
            rng = np.random.default_rng([own.seed, number])
            sentences = split_sentences(text)
            passages = sample_passages(
                text,
                sentences,
                rng,
                count=own.per_document,
                prefix_words=own.prefix_words,
                continuation_words=(own.fewest_words, own.most_words),
            )
            for passage in passages:
                row: dict[str, object] = {"document": number, "prefix": passage.prefix}
                row["continuation"] = passage.continuation
                row["span"] = [passage.start, passage.middle, passage.end]
                if own.hard:
                    row |= self._hard(text, sentences, passage)
                if rng.random() < own.generate:
                    continued.append((len(rows), passage))
                rows.append(row)
        if continued and self.lm is not None:
            texts = self._generated([passage for _, passage in continued], documents[0][0])
            for (place, _), text in zip(continued, texts, strict=True):
                rows[place]["generated"] = [text] if text else []
        yield from rows

    def _hard(self, text: str, sentences: Sequence[Sentence], passage: Passage) -> dict[str, object]:
        """Return the stretches of the document that the scorer likes best, best first."""
        assert self.hardest is not None
        found = self.hardest.of(passage.prefix, other_stretches(text, sentences, passage), self.config.hard)
        return {"hard": [one.text for one in found], "hard_spans": [[one.start, one.end] for one in found]}

    def _generated(self, passages: Sequence[Passage], number: int) -> list[str]:
        """Return a continuation of each prefix, of about as many words as the true one; blank where none came.

        None is longer or shorter than true ones are.
        """
        assert self.lm is not None
        raw = continuations_of_length(
            self.lm.model,
            self.lm.tokenizer,
            [one.prefix for one in passages],
            [" " + one.continuation for one in passages],
            self.config.sampling,
            batch_size=self.batch_size,
            key=(self.config.seed, number),
        )
        limits = {"fewest": self.config.fewest_words, "most": self.config.most_words}
        return [cut_to_words(text, one.words, **limits) for text, one in zip(raw, passages, strict=True)]


def _opened(
    config: NegativesConfig, load: Callable[[], tuple[LanguageModel | None, Scorer | None]], batch_size: int
) -> Callable[[DocumentPart], Made]:
    return partial(make_part, PassageMaker(config, *load(), batch_size))


def make_part(maker: PassageMaker, part: DocumentPart) -> Made:
    """Write the passages of a few documents, whole or not at all.

    Raises:
        ResourceError: the disk is full.
    """
    rows = list(maker.rows([(number, clean_text(text, maker.config.clean)) for number, text in part.documents]))
    with whole_file(part.path, apart=True) as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return made_of(len(part.documents), rows)


def made_of(documents: int, rows: Sequence[dict[str, Any]]) -> Made:
    """Return what the rows of a part are."""
    return Made(
        documents,
        documents - len({row["document"] for row in rows}),
        len(rows),
        sum(len(row.get("generated", ())) for row in rows),
        sum(len(row.get("hard", ())) for row in rows),
    )
