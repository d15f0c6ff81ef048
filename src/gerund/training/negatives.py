"""Makes what a scorer of continuations learns from: passages of documents, with wrong continuations.

RankGen, section 2.2 and appendix C.1. What is made lies in parts of a few documents each; each is written whole, so
that an interrupted run goes on behind the last one and ends with the same files::

    OUT/negatives.json        the manifest: what the parts belong to
    OUT/part-00000.jsonl      passages, one JSON object a line
    OUT/errors.jsonl          documents that could not be used, where there are any

Knows: files of a run, manifests. Does not know: how a passage is made, objectives, how a scorer is trained.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from gerund.data.corpus import BadDocument, part_of, read_documents
from gerund.errors import ConfigError, DataError, OutputExistsError
from gerund.jobs.engine import JobEngine, LocalEngine, Work, WorkerPool
from gerund.jobs.files import write_json_lines, write_whole
from gerund.jobs.locks import LOCK, hold
from gerund.jobs.manifest import InputFiles, Manifest
from gerund.jobs.shared_folder import NAME as SHARED
from gerund.jobs.working_folder import kept_work_told
from gerund.language_model import LanguageModel
from gerund.progress import progress
from gerund.scoring.dual_encoder import DualScorer
from gerund.training.negative_passages import (
    DocumentPart,
    Elsewhere,
    Made,
    NegativesConfig,
    PassageMaker,
    made_of,
    make_part,
)
from gerund.types import Scorer

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

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        folder: where to; made.
        config: what is made.
        lm: writes continuations; not needed where none are.
        scorer: finds hard ones; not needed where there are none.
        text_column: column or field that holds the text.
        batch_size: prefixes that are continued in one pass.
        elsewhere: who makes them in the place of ``lm`` and ``scorer``, which still say what is made.
        resume: go on with what is there, made by the same configuration from the same files.
        force: throw away what is there from an earlier run; files that are no such run's are never touched.
        show: whether to show progress; None only on a terminal.

    Raises:
        ConfigError: a configuration that needs a model or a scorer lacks it, or a resume with another.
        DataError: a file has changed since the run began, or no document can be used or is long enough.
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
        engine: JobEngine = LocalEngine(1) if elsewhere is None else elsewhere.engine
        work: Work[DocumentPart, Made] = partial(make_part, PassageMaker(config, lm, scorer, batch_size))
        work = work if elsewhere is None else elsewhere.work(config, batch_size)
        try:
            with kept_work_told(output.how_to_go_on), engine.pool(work, folder=folder) as pool:
                made, bad = _make_parts(inputs, output, config, pool, _Source(text_column, show))
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
    """Check that a run could begin, or go on, in ``folder``, before a model is loaded for it; nothing is left there.

    Raises:
        OutputExistsError: there is something already, and it is not to be resumed or replaced.
        InputError: another process writes into the folder.
        ResourceError: the folder cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} is a file, and a folder is to be written; choose another name")
    with hold(folder):
        _Output(folder).demand_free(resume=resume, force=force)


def _make_parts(
    inputs: InputFiles,
    output: "_Output",
    config: NegativesConfig,
    pool: WorkerPool[DocumentPart, Made],
    source: "_Source",
) -> tuple[Made, list[BadDocument]]:
    found = [Made(0, 0, 0, 0, 0)]
    bad: list[BadDocument] = []
    with progress(None, "making passages", show=source.show) as advance:

        def missing() -> Iterator[DocumentPart]:
            first, step = part_of(config.part)
            read = read_documents(inputs.files, text_column=source.text_column, bad=bad.append)
            documents = islice(enumerate(read), first, None, step)
            for number, own in enumerate(iter(lambda: list(islice(documents, config.part_documents)), [])):
                path = output.part(number)
                if path.is_file():
                    found.append(made_of(len(own), _rows_of(path)))
                    advance(len(own))
                else:
                    yield DocumentPart(path.absolute(), [(place, one.text) for place, one in own])

        for part, made in pool.map(missing()):
            if inputs.changed():
                part.path.unlink()
                raise DataError("the files of the corpus have changed since the run began; give --force to begin anew")
            found.append(made)
            advance(len(part.documents))
    if bad:
        write_json_lines(output.errors, map(asdict, bad))
    total = Made(*(sum(numbers) for numbers in zip(*map(astuple, found), strict=True)))
    return replace(total, errors=len(bad)), bad


@dataclass(frozen=True)
class _Source:
    text_column: str
    show: bool | None


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
        """Refuse what an earlier run left, unless it is to be resumed or replaced, and what is no run's.

        Raises:
            OutputExistsError: there is something already.
        """
        path = self.folder / MANIFEST
        torn = {f".{path.name}.part", SHARED}
        there = {one.name for one in self.folder.iterdir()} - {LOCK} - torn
        if path.is_file():
            if not (resume or force):
                raise OutputExistsError(
                    f"{self.folder} exists already; resume it, replace it with --force, or choose another name"
                )
        elif there:
            raise OutputExistsError(f"{self.folder} exists already and holds other files; choose another name")

    def begin(self, manifest: Manifest, *, resume: bool, force: bool) -> None:
        """Note what is made, or check that it is what the folder was begun with.

        Raises:
            ConfigError: it is not.
            OutputExistsError: there is something already.
        """
        self.demand_free(resume=resume, force=force)
        path = self.folder / MANIFEST
        if path.is_file() and not force:
            earlier = Manifest.read(path)
            if earlier is None:
                raise ConfigError(f"{path} is of another version of gerund; give --force to begin anew")
            if differs := manifest.difference(earlier):
                raise ConfigError(
                    f"{self.folder} was begun otherwise: {differs}; go on as before, or give --force to begin anew"
                )
            self._remove_torn()
            return
        if path.is_file():
            self.clear()
        write_whole(path, manifest.to_json())

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
