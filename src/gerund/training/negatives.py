"""Makes what a scorer of continuations learns from: passages of documents, with wrong continuations.

RankGen, section 2.2 and appendix C.1. What is made lies in parts of a few documents each; each is written whole, so
that an interrupted run goes on behind the last one and ends with the same files::

    OUT/negatives.json        the manifest: what the parts belong to
    OUT/part-00000.jsonl      passages, one JSON object a line

Knows: passages, generation, files of a run. Does not know: objectives, how a scorer is trained.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gerund.config import Sampling
from gerund.data.corpus import CLEANERS, clean_text, part_of, read_documents
from gerund.data.passages import Passage, Sentence, cut_to_words, other_stretches, sample_passages, split_sentences
from gerund.errors import ConfigError, DataError, OutputExistsError, unknown_name
from gerund.inference.generate.like_length import continuations_of_length
from gerund.jobs.files import write_whole
from gerund.jobs.locks import LOCK, hold
from gerund.jobs.manifest import InputFiles, Manifest
from gerund.jobs.working_folder import kept_work_told
from gerund.language_model import LanguageModel
from gerund.progress import progress
from gerund.scoring.dual import DualScorer
from gerund.scoring.hardest import Hardest
from gerund.types import Scorer

MANIFEST = "negatives.json"
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
    force: bool = False,
    show: bool | None = None,
) -> Made:
    """Write passages with negatives into ``folder``.

    Each line of its parts has ``document`` (its number), ``prefix``, ``continuation``, ``span`` (the prefix's first
    character in the cleaned document, the continuation's, and the one after its last), and, where they were made,
    ``generated`` and ``hard``, lists of texts; ``hard_spans`` has first character and the one after the last of each.

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        folder: where to; made.
        config: what is made.
        lm: writes continuations; not needed where none are.
        scorer: finds hard ones; not needed where there are none.
        text_column: column or field that holds the text.
        batch_size: prefixes that are continued in one pass.
        resume: go on with what is there, made by the same configuration from the same files.
        force: throw away what is there from an earlier run; files that are no such run's are never touched.
        show: whether to show progress; None only on a terminal.

    Raises:
        ConfigError: a configuration that needs a model or a scorer lacks it, or a resume with another.
        DataError: a file is malformed, or has changed since the run began, or no document is long enough.
        OutputExistsError: there is something already, and it is not to be resumed or replaced.
        InputError: another process writes into the folder.
        ResourceError: memory or disk ran out, or the folder cannot be written; finished parts are kept.
        KeyboardInterrupt: with a note that says what is kept.
    """
    if config.generate and lm is None:
        raise ConfigError("generated continuations need a model; name one, or set generate to 0")
    if config.hard and scorer is None:
        raise ConfigError("hard negatives need a scorer; name one, or set hard to 0")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    inputs = InputFiles(files)
    manifest = _manifest(inputs, config, lm, scorer, text_column)
    with hold(folder):
        output = _Output(folder)
        output.begin(manifest, resume=resume, force=force)
        maker = _Maker(config, lm, scorer, batch_size)
        try:
            with kept_work_told(output.how_to_go_on):
                made = _make_parts(inputs, output, maker, text_column, show)
            if not made.passages:
                output.clear()
                raise DataError(
                    f"no document is long enough for a prefix of {config.prefix_words // 2} to {config.prefix_words} "
                    f"words and a continuation of {config.fewest_words}; choose smaller ones"
                )
        finally:
            if not output.parts():
                output.clear()  # a mistake leaves nothing behind
    return made


def _make_parts(inputs: InputFiles, output: "_Output", maker: "_Maker", text_column: str, show: bool | None) -> Made:
    config = maker.config
    first, step = part_of(config.part)
    documents = islice(enumerate(read_documents(inputs.files, text_column=text_column)), first, None, step)
    made = Made(0, 0, 0, 0, 0)
    with progress(None, "making passages", show=show) as advance:
        for number, shard in enumerate(iter(lambda: list(islice(documents, config.part_documents)), [])):
            path = output.part(number)
            if path.is_file():
                rows = _rows_of(path)
            else:
                rows = list(maker.rows([(place, clean_text(one.text, config.clean)) for place, one in shard]))
                if inputs.changed():
                    raise DataError(
                        "the files of the corpus have changed since the run began; give --force to begin anew"
                    )
                write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            used = {row["document"] for row in rows}
            made = Made(
                made.documents + len(shard),
                made.short + len(shard) - len(used),
                made.passages + len(rows),
                made.generated + sum(len(row.get("generated", ())) for row in rows),
                made.hard + sum(len(row.get("hard", ())) for row in rows),
            )
            advance(len(shard))
    return made


def _rows_of(part: Path) -> list[dict[str, Any]]:
    # Only "\n" ends a line: texts may hold the other line ends of Unicode.
    with part.open(encoding="utf-8", newline="\n") as lines:
        return [json.loads(line) for line in lines]


class _Output:
    """The folder of a run, held by this process alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def part(self, number: int) -> Path:
        """Return the place of a part."""
        return self.folder / f"part-{number:05}.jsonl"

    def parts(self) -> list[Path]:
        """Return the finished parts."""
        return sorted(self.folder.glob(PARTS))

    def how_to_go_on(self) -> str:
        """Return what to tell whoever interrupted the run; "" where nothing is kept."""
        return f"finished parts are kept in {self.folder}: give --resume to go on from there" if self.parts() else ""

    def begin(self, manifest: Manifest, *, resume: bool, force: bool) -> None:
        """Note what is made, or check that it is what the folder was begun with.

        Raises:
            ConfigError: it is not.
            OutputExistsError: there is something already.
        """
        path = self.folder / MANIFEST
        torn = {f".{path.name}.part"}
        there = {one.name for one in self.folder.iterdir()} - {LOCK} - torn
        if path.is_file() and not force:
            if not resume:
                raise OutputExistsError(
                    f"{self.folder} exists already; resume it, replace it with --force, or choose another name"
                )
            earlier = Manifest.read(path)
            if earlier is None:
                raise ConfigError(f"{path} is of another version of gerund; give --force to begin anew")
            if differs := manifest.difference(earlier):
                raise ConfigError(
                    f"{self.folder} was begun otherwise: {differs}; go on as before, or give --force to begin anew"
                )
            return
        if path.is_file():
            self.clear()
        elif there:
            raise OutputExistsError(f"{self.folder} exists already and holds other files; choose another name")
        write_whole(path, manifest.to_json())

    def clear(self) -> None:
        """Remove everything that a run writes; the manifest last, so that what is left of it is known as its own."""
        for part in (*self.parts(), *self.folder.glob(f".{PARTS}.part")):
            part.unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)


class _Maker:
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


def _manifest(
    inputs: InputFiles, config: NegativesConfig, lm: LanguageModel | None, scorer: Scorer | None, text_column: str
) -> Manifest:
    """Return what determines the passages; how many prefixes go through one pass does not, but for rounding."""
    settings: dict[str, Any] = {**asdict(config), "text_column": text_column}
    names = {}
    if lm is not None and (config.generate or config.hard):
        settings["fingerprint"], settings["dtype"] = lm.fingerprint(), str(lm.model.dtype).removeprefix("torch.")
        names["model"] = lm.name
    if scorer is not None and config.hard:
        settings["scorer"] = scorer.name
        if isinstance(scorer, DualScorer):
            settings["scorer_fingerprint"] = f"{scorer.fingerprint}-{scorer.encoder.fingerprint()}"
    return Manifest("negatives", settings, inputs.digest, "the files of the corpus", names)
