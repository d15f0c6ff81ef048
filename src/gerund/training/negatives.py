"""Makes what a scorer of continuations learns from: passages of documents, with wrong continuations.

RankGen, section 2.2 and appendix C.1. What is made lies in parts of a few documents each; each is written whole, so
that an interrupted run goes on behind the last one and ends with the same files.

Knows: passages, generation, files of a run. Does not know: objectives, how a scorer is trained.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from gerund.config import Sampling
from gerund.data.corpus import CLEANERS, clean_text, read_documents
from gerund.data.files import write_whole
from gerund.data.passages import Passage, Sentence, cut_to_words, draw_passages, inbook_negatives, split_sentences
from gerund.errors import ConfigError, DataError, OutputExistsError, unknown_name
from gerund.inference.generate.like_length import continuations_of_length
from gerund.language_model import LanguageModel
from gerund.progress import progress
from gerund.scoring.hardest import POOL, hardest
from gerund.types import Scorer

SETTINGS_FILE = "negatives.json"
PARTS = "part-*.jsonl"


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """What is made."""

    clean: str = "none"
    """Quirks to remove from the documents first: a style of ``gerund.data.corpus.clean_text``. Hard-wrapped lines,
    which no model writes, would tell true continuations from generated ones."""
    prefix_words: int = 256
    """Words of a prefix at most."""
    fewest_words: int = 10
    """Words of a continuation at least."""
    most_words: int = 128
    """Words of a continuation at most."""
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
    """

    documents: int
    short: int
    passages: int
    generated: int
    hard: int


def make_negatives(
    files: Sequence[Path],
    folder: Path,
    config: NegativesConfig,
    *,
    lm: LanguageModel | None = None,
    scorer: Scorer | None = None,
    text_column: str = "text",
    batch_size: int = 32,
    resume: bool = False,
    show: bool | None = None,
) -> Made:
    """Write passages with negatives into ``folder``.

    Each line of its parts has ``document`` (its number), ``prefix``, ``continuation``, and, where they were made,
    ``generated`` and ``hard``, lists of texts.

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        folder: where to; made.
        config: what is made.
        lm: writes continuations; not needed where none are.
        scorer: finds hard ones; not needed where there are none.
        text_column: column or field that holds the text.
        batch_size: prefixes that are continued in one pass.
        resume: go on with what is there, made by the same settings from the same files.
        show: whether to show progress; None only on a terminal.

    Raises:
        ConfigError: settings that need a model or a scorer lack it, or a resume with others.
        DataError: a file is malformed, or no document is long enough.
        OutputExistsError: there is something already, and it is not to be resumed.
    """
    if config.generate and lm is None:
        raise ConfigError("generated continuations need a model; name one, or set generate to 0")
    if config.hard and scorer is None:
        raise ConfigError("hard negatives need a scorer; name one, or set hard to 0")
    _prepare(files, folder, config, lm, scorer, resume=resume)
    documents = read_documents(files, text_column=text_column)
    made = Made(0, 0, 0, 0, 0)
    with progress(None, "making passages", show=show) as advance:
        for number, part in enumerate(iter(lambda: list(islice(documents, config.part_documents)), [])):
            path = folder / f"part-{number:05}.jsonl"
            if path.is_file():
                rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            else:
                first = number * config.part_documents
                maker = _Maker(config, lm, scorer, batch_size)
                texts = [clean_text(one.text, config.clean) for one in part]
                rows = list(maker.rows([(first + place, text) for place, text in enumerate(texts)]))
                write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            used = {row["document"] for row in rows}
            made = Made(
                made.documents + len(part),
                made.short + len(part) - len(used),
                made.passages + len(rows),
                made.generated + sum(len(row.get("generated", ())) for row in rows),
                made.hard + sum(len(row.get("hard", ())) for row in rows),
            )
            advance(len(part))
    if not made.passages:
        raise DataError(
            f"no document is long enough for a prefix of {config.prefix_words // 2} to {config.prefix_words} words "
            f"and a continuation of {config.fewest_words}; choose smaller ones"
        )
    return made


class _Maker:
    """Makes the rows of a few documents."""

    def __init__(
        self, config: NegativesConfig, lm: LanguageModel | None, scorer: Scorer | None, batch_size: int
    ) -> None:
        self.config, self.lm, self.scorer, self.batch_size = config, lm, scorer, batch_size

    def rows(self, documents: Sequence[tuple[int, str]]) -> Iterator[dict[str, object]]:
        """Yield a row for each passage, in order."""
        own = self.config
        rows: list[dict[str, object]] = []
        continued: list[tuple[int, Passage]] = []
        for number, text in documents:
            rng = np.random.default_rng([own.seed, number])
            sentences = split_sentences(text)
            passages = draw_passages(
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
                if own.hard:
                    row["hard"] = self._hard(text, sentences, passage, rng)
                if rng.random() < own.generate:
                    continued.append((len(rows), passage))
                rows.append(row)
        if continued and self.lm is not None:
            texts = self._generated([passage for _, passage in continued], documents[0][0])
            for (place, _), text in zip(continued, texts, strict=True):
                rows[place]["generated"] = [text] if text else []
        yield from rows

    def _hard(self, text: str, sentences: Sequence[Sentence], passage: Passage, rng: np.random.Generator) -> list[str]:
        """Return the stretches of the document that the scorer likes best."""
        assert self.scorer is not None
        pool = inbook_negatives(text, sentences, passage, POOL, rng)
        return hardest(self.scorer, passage.prefix, pool, self.config.hard)

    def _generated(self, passages: Sequence[Passage], number: int) -> list[str]:
        """Return a continuation of each prefix, of about as many words as the true one; blank where none came."""
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
        return [cut_to_words(text, one.words) for text, one in zip(raw, passages, strict=True)]


def _prepare(
    files: Sequence[Path],
    folder: Path,
    config: NegativesConfig,
    lm: LanguageModel | None,
    scorer: Scorer | None,
    *,
    resume: bool,
) -> None:
    """Note what is made in the folder, or check that it is what the folder was begun with."""
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    content = asdict(config) | {
        "files": [[path.name, _digest(path)] for path in files],
        "model": lm.fingerprint() if lm is not None and config.generate else None,
        "scorer": scorer.name if scorer is not None and config.hard else None,
    }
    content = json.loads(json.dumps(content))
    path = folder / SETTINGS_FILE
    if path.is_file() and resume:
        before = json.loads(path.read_text("utf-8"))
        changed = [name for name in content if before.get(name) != content[name]]
        if changed:
            told = ", ".join(f"{name} was {before.get(name)!r} and is {content[name]!r}" for name in changed)
            raise ConfigError(f"{folder} was begun otherwise: {told}"[:600])
        return
    if folder.exists() and any(folder.iterdir()):
        raise OutputExistsError(f"{folder} exists already; resume it, or choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
