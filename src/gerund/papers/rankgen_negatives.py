"""RankGen's training data: passages of documents with generated and hard wrong continuations (2.2, appendix C.1).

Parts of a few documents each are written whole, so that an interrupted run resumes after the last one and ends with
the same files::

    OUT/negatives.json        the manifest: what the parts belong to
    OUT/part-00000.jsonl      passages, one JSON object per line
    OUT/errors.jsonl          documents that could not be used, where there are any
"""

import heapq
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gerund.data.corpus import CLEANERS, BadDocument, clean_text, part_of, read_documents
from gerund.data.passages import (
    Passage,
    Sentence,
    Stretch,
    cut_to_words,
    other_stretches,
    sample_passages,
    split_sentences,
)
from gerund.errors import ConfigError, DataError, OutputExistsError, unknown_name
from gerund.inference.generate.generation import continuations_of_length
from gerund.jobs.checkpoints import InputFiles, Manifest, resume_hint
from gerund.jobs.engine import SHARED_FILE as SHARED
from gerund.jobs.engine import JobEngine, LocalEngine, StatefulWork, Work, WorkerPool
from gerund.jobs.files import LOCK, atomic_file, lock_folder, write_atomic, write_json_lines
from gerund.language_model import LanguageModel
from gerund.progress import progress
from gerund.scoring.dual_encoder import DualScorer, VectorScorer
from gerund.settings.sampling import Sampling
from gerund.types import Scorer

# Passages that are scored per batch.
CHUNK = 256
# Bytes of cached vectors.
ROOM = 2**28


class Hardest:
    """Finds the passages that a scorer ranks highest, ``chunk`` per batch, without holding them all.

    Prefixes of one document need the same passages again and again, so ``room`` bytes of the latest float32 vectors are
    cached.
    """

    def __init__(self, scorer: Scorer, *, chunk: int = CHUNK, room: int = ROOM) -> None:
        self.scorer, self.chunk, self.room = scorer, chunk, room
        self._cache: OrderedDict[str, np.ndarray] = OrderedDict()

    def of(self, prefix: str, passages: Iterable[Stretch], count: int) -> list[Stretch]:
        """Return the ``count`` passages with the highest scores after a prefix, best first; ties keep their order."""
        rest = iter(passages)
        scores_of = self._scorer_after(prefix)
        best: list[tuple[float, int, Stretch]] = []
        seen = 0
        while chunk := list(islice(rest, self.chunk)):
            scores = scores_of([f" {passage.text}" for passage in chunk])
            ranked = [
                (score, -number, text) for number, (score, text) in enumerate(zip(scores, chunk, strict=True), seen)
            ]
            best = heapq.nlargest(count, [*best, *ranked], key=lambda entry: entry[:2])
            seen += len(chunk)
        return [passage for _, _, passage in best]

    def _scorer_after(self, prefix: str) -> Callable[[Sequence[str]], list[float]]:
        """Return what scores continuations of a prefix, which is encoded once."""
        scorer = self.scorer
        if not isinstance(scorer, VectorScorer):
            return lambda texts: scorer.score([prefix], [texts])[0]
        prefix_D = scorer.prefix_vectors([prefix])[0]
        return lambda texts: (self._vectors(scorer, texts) @ prefix_D).tolist()

    def _vectors(self, scorer: VectorScorer, texts: Sequence[str]) -> np.ndarray:
        cache = self._cache
        missing = [text for text in dict.fromkeys(texts) if text not in cache]
        if missing:
            cache.update(zip(missing, scorer.continuation_vectors(missing).astype(np.float32), strict=True))
        for text in texts:
            cache.move_to_end(text)
        vectors_ND = np.stack([cache[text] for text in texts])
        while len(cache) * vectors_ND[0].nbytes > self.room:
            cache.popitem(last=False)
        return vectors_ND


@dataclass(frozen=True, kw_only=True)
class NegativesConfig:
    """What is made."""

    clean: str = "none"
    """Quirks to remove from the documents first: a style of ``gerund.data.corpus.clean_text``. Hard-wrapped lines,
    which no model writes, would tell true continuations from generated ones."""
    prefix_words: int = 256  # words of a prefix at most
    fewest_words: int = 10  # words of a continuation at least
    most_words: int = 128  # words of a continuation at most
    part: str = "1/1"
    """Which documents: ``2/2`` takes every second one, where those of ``1/2`` trained the generator (section 3)."""
    per_document: int | None = None  # passages of a document at most; None for one from every sentence on
    generate: float = 0.5
    """Fraction of the passages that get a generated continuation; the paper's other half trained its generator."""
    hard: int = 0  # stretches of the same document that a scorer takes for continuations most (appendix C.1)
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, top_p=0.9))
    """How continuations are sampled."""
    seed: int = 0  # determines passages and samples
    part_documents: int = 16  # documents of a part

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
    """What was made."""

    documents: int  # documents that were read
    short: int  # documents that were too short for a passage, which were passed over
    passages: int  # passages
    generated: int  # generated continuations
    hard: int  # hard stretches of documents
    errors: int = 0  # documents that could not be used


@dataclass(frozen=True)
class Elsewhere:
    """Who makes passages, where it is not this process."""

    engine: JobEngine  # gives out the parts
    load: Callable[[], tuple[LanguageModel | None, Scorer | None]]
    """Loads the model and the scorer in each worker; can be sent there."""
    gpus: float = 0.0  # GPUs that a worker needs for itself
    threads: int = 1  # cores that it needs

    def work(self, config: NegativesConfig, batch_size: int) -> StatefulWork["DocumentPart", Made]:
        """Return what a worker does."""
        return StatefulWork(partial(_opened, config, self.load, batch_size), gpus=self.gpus, threads=self.threads)


@dataclass(frozen=True)
class DocumentPart:
    """Some documents, and where what is made of them goes."""

    path: Path
    documents: list[tuple[int, str]]  # their numbers in the corpus, and their texts as they were read


class PassageMaker:
    """Makes the rows of a few documents."""

    def __init__(
        self, config: NegativesConfig, lm: LanguageModel | None, scorer: Scorer | None, batch_size: int
    ) -> None:
        self.config, self.lm, self.batch_size = config, lm, batch_size
        self.hardest = None if scorer is None else Hardest(scorer)

    def rows(self, documents: Sequence[tuple[int, str]]) -> Iterator[dict[str, object]]:
        """Yield a row for each passage, in order."""
        config = self.config
        rows: list[dict[str, object]] = []
        continued: list[tuple[int, Passage]] = []
        for number, text in documents:
            rng = np.random.default_rng([config.seed, number])
            sentences = split_sentences(text)
            passages = sample_passages(
                text,
                sentences,
                rng,
                count=config.per_document,
                prefix_words=config.prefix_words,
                continuation_words=(config.fewest_words, config.most_words),
            )
            for passage in passages:
                row: dict[str, object] = {"document": number, "prefix": passage.prefix}
                row["continuation"] = passage.continuation
                row["span"] = [passage.start, passage.middle, passage.end]
                if config.hard:
                    row |= self._hard(text, sentences, passage)
                if rng.random() < config.generate:
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
        result = self.hardest.of(passage.prefix, other_stretches(text, sentences, passage), self.config.hard)
        return {"hard": [item.text for item in result], "hard_spans": [[item.start, item.end] for item in result]}

    def _generated(self, passages: Sequence[Passage], number: int) -> list[str]:
        """Return a continuation of each prefix, of about as many words as the true one; blank where none came.

        None is longer or shorter than true ones are.
        """
        assert self.lm is not None
        raw = continuations_of_length(
            self.lm.model,
            self.lm.tokenizer,
            [passage.prefix for passage in passages],
            [" " + passage.continuation for passage in passages],
            self.config.sampling,
            batch_size=self.batch_size,
            key=(self.config.seed, number),
        )
        limits = {"fewest": self.config.fewest_words, "most": self.config.most_words}
        return [cut_to_words(text, item.words, **limits) for text, item in zip(raw, passages, strict=True)]


def _opened(
    config: NegativesConfig, load: Callable[[], tuple[LanguageModel | None, Scorer | None]], batch_size: int
) -> Callable[[DocumentPart], Made]:
    return partial(make_part, PassageMaker(config, *load(), batch_size))


def make_part(maker: PassageMaker, part: DocumentPart) -> Made:
    """Write the passages of a few documents, whole or not at all."""
    rows = list(maker.rows([(number, clean_text(text, maker.config.clean)) for number, text in part.documents]))
    with atomic_file(part.path, apart=True) as file:
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


MANIFEST = "negatives.json"
PARTS = "part-*.jsonl"


def make_negatives(
    files: Sequence[Path],
    folder: Path,
    config: NegativesConfig,
    *,
    lm: LanguageModel | None = None,
    scorer: Scorer | None = None,
    text_column: str = "text",
    batch_size: int = 32,
    elsewhere: Elsewhere | None = None,
    resume: bool = False,
    force: bool = False,
    show: bool | None = None,
) -> Made:
    """Write passages with negatives into ``folder``.

    Each line of its parts has ``document`` (its number), ``prefix``, ``continuation``, ``span`` (the prefix's first
    character in the cleaned document, the continuation's, and the one after its last), and, where they were made,
    ``generated`` and ``hard``, lists of texts; ``hard_spans`` has first character and the one after the last of each.
    Documents that cannot be used are passed over and listed in ``errors.jsonl``.

    ``lm`` generates continuations, ``batch_size`` prefixes per pass, and ``scorer`` finds hard ones; ``elsewhere`` does
    so instead of both, which still say what is made. With ``resume`` a run by the same configuration from the same
    files continues; ``force`` deletes an earlier run, and never other files.
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
    with lock_folder(folder):
        output = _Output(folder)
        output.begin(manifest, resume=resume, force=force)
        engine: JobEngine = LocalEngine(1) if elsewhere is None else elsewhere.engine
        work: Work[DocumentPart, Made] = partial(make_part, PassageMaker(config, lm, scorer, batch_size))
        work = work if elsewhere is None else elsewhere.work(config, batch_size)
        try:
            with resume_hint(output.how_to_go_on), engine.pool(work, folder=folder) as pool:
                made, bad = _make_parts(inputs, output, config, pool, text_column, show)
            if not made.documents and bad:
                output.clear()
                raise DataError(f"no document can be used; the first one is {bad[0]}")
            if not made.passages:
                output.clear()
                raise DataError(
                    f"no document is long enough for a prefix of {config.prefix_words // 2} to {config.prefix_words} "
                    f"words and a continuation of {config.fewest_words}; choose smaller prefix_words or fewest_words"
                )
        finally:
            if not output.parts():
                output.clear()  # a mistake leaves nothing behind
    return made


def demand_output(folder: Path, *, resume: bool = False, force: bool = False) -> None:
    """Check that a run could begin, or go on, in ``folder``, before a model is loaded for it; nothing is left there."""
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} is a file, and a folder is to be written; choose another name")
    with lock_folder(folder):
        _Output(folder).demand_free(resume=resume, force=force)


def _make_parts(
    inputs: InputFiles,
    output: "_Output",
    config: NegativesConfig,
    pool: WorkerPool[DocumentPart, Made],
    text_column: str,
    show: bool | None,
) -> tuple[Made, list[BadDocument]]:
    result = [Made(0, 0, 0, 0, 0)]
    bad: list[BadDocument] = []
    with progress(None, "making passages", show=show) as advance:

        def missing() -> Iterator[DocumentPart]:
            first, step = part_of(config.part)
            read = read_documents(inputs.files, text_column=text_column, bad=bad.append)
            documents = islice(enumerate(read), first, None, step)
            for number, group in enumerate(iter(lambda: list(islice(documents, config.part_documents)), [])):
                path = output.part(number)
                if path.is_file():
                    result.append(made_of(len(group), _rows_of(path)))
                    advance(len(group))
                else:
                    yield DocumentPart(path.absolute(), [(place, item.text) for place, item in group])

        for part, made in pool.map(missing()):
            if inputs.changed():
                part.path.unlink()
                raise DataError("the files of the corpus have changed since the run began; give --force to start again")
            result.append(made)
            advance(len(part.documents))
    if bad:
        write_json_lines(output.errors, map(asdict, bad))
    total = Made(*(sum(numbers) for numbers in zip(*map(astuple, result), strict=True)))
    return replace(total, errors=len(bad)), bad


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

    @property
    def errors(self) -> Path:
        """The list of documents that could not be used."""
        return self.folder / "errors.jsonl"

    def parts(self) -> list[Path]:
        """Return the finished parts."""
        return sorted(self.folder.glob(PARTS))

    def how_to_go_on(self) -> str:
        """Return what to tell whoever interrupted the run; "" where nothing is kept."""
        return f"finished parts are kept in {self.folder}: give --resume to go on from there" if self.parts() else ""

    def demand_free(self, *, resume: bool, force: bool) -> None:
        """Refuse what an earlier run left, unless it is to be resumed or replaced, and what is no run's."""
        path = self.folder / MANIFEST
        torn = {f".{path.name}.part", SHARED}
        there = {item.name for item in self.folder.iterdir()} - {LOCK} - torn
        if path.is_file():
            if not (resume or force):
                raise OutputExistsError(
                    f"{self.folder} exists already; resume it, replace it with --force, or choose another name"
                )
        elif there:
            raise OutputExistsError(f"{self.folder} exists already and holds other files; choose another name")

    def begin(self, manifest: Manifest, *, resume: bool, force: bool) -> None:
        """Note what is made, or check that it is what the folder was begun with."""
        self.demand_free(resume=resume, force=force)
        path = self.folder / MANIFEST
        if path.is_file() and not force:
            earlier = Manifest.read(path)
            if earlier is None:
                raise ConfigError(f"{path} is of another version of gerund; give --force to start again")
            if differs := manifest.difference(earlier):
                raise ConfigError(
                    f"{self.folder} was begun otherwise: {differs}; go on as before, or give --force to start again"
                )
            self._remove_torn()
            return
        if path.is_file():
            self.clear()
        write_atomic(path, manifest.to_json())

    def clear(self) -> None:
        """Remove everything that a run writes; the manifest last, so that what is left of it is known as its own."""
        self._remove_torn()
        for part in self.parts():
            part.unlink(missing_ok=True)
        self.errors.unlink(missing_ok=True)
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def _remove_torn(self) -> None:
        """Remove what whoever was killed has left half written."""
        for torn in (*self.folder.glob(".part-*.part"), *self.folder.glob(".errors*.part"), self.folder / SHARED):
            torn.unlink(missing_ok=True)


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
