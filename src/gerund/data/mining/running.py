"""Mines a corpus of any size: in several processes, part by part, so that an interrupted run goes on where it was.

Where one part ends and the next begins depends on the documents alone, so the output is the same to the byte, however
many processes work on it and however often they were interrupted. In memory there are a few shards of documents, never
the corpus.

Knows: files, parts, resuming. Does not know: how pairs are found, processes.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial, reduce
from operator import add
from pathlib import Path

from gerund.data.corpus import FORMATS as CORPUS_FORMATS
from gerund.data.corpus import corpus_format
from gerund.data.mining.config import Mined, MiningConfig
from gerund.data.mining.gathering import FORMATS, gather
from gerund.data.mining.parts import ENDING, Facts, Work, make_part, read_facts
from gerund.data.mining.shards import Shard, shards_of
from gerund.errors import ConfigError, DataError, FinishedError, InputError, OutputExistsError
from gerund.jobs.engine import JobEngine, LocalEngine, is_alone, mapped_by_place
from gerund.jobs.files import errors_file_of, make_folder, refuse_existing, refuse_special, write_json_lines
from gerund.jobs.manifest import InputFiles, Manifest
from gerund.jobs.working_folder import MAKING, PLACING, WorkingFolder, kept_work_told, working_folder
from gerund.progress import progress

_ERRORS_SHOWN = 5


def mine(
    files: Sequence[Path],
    output: Path,
    config: MiningConfig | None = None,
    *,
    text_column: str = "text",
    title_column: str = "title",
    workers: int | None = None,
    engine: JobEngine | None = None,
    resume: bool = False,
    force: bool = False,
    show: bool | None = None,
) -> Mined:
    """Write the pairs of a corpus to a file, each once and shuffled.

    Processes are started anew, not forked: a script that calls this with more than one needs the usual
    ``if __name__ == "__main__":``.

    Args:
        files: the documents, in the formats of ``gerund.data.corpus``.
        output: a .parquet or .jsonl file; see ``gerund.data.mining.parts.COLUMNS`` for what is in it.
        config: what is mined.
        text_column: column or field that holds the text.
        title_column: the one that holds the title; it may be absent.
        workers: processes; None for one a core. The output does not depend on it.
        engine: where else it is done, in the place of ``workers``; the output does not depend on it either.
        resume: go on with what an interrupted run has left, made by the same configuration from the same files.
        force: replace the output if there is one, and throw away what does not fit.
        show: whether to show progress; None only on a terminal.

    Returns:
        What came of it. Documents that could not be used are in there, and all of them in ``OUT.errors.jsonl``.

    Raises:
        DataError: there is no document, or none that can be used, or no pair in any of them; or a file has changed
            while it was read.
        ConfigError: the configuration, or the name of the output.
        FinishedError: it is to be resumed, and is finished already.
        OutputExistsError: there is an output already, or what an interrupted run has left.
        InputError: what is left is of another configuration or other files; another process writes the same output;
            the output is a symbolic link.
        ResourceError: memory or disk ran out; finished parts are kept.
        KeyboardInterrupt: with a note that says what is kept.
    """
    config = config or MiningConfig()
    engine = engine or LocalEngine(workers)
    errors_file = _check_places(files, output)
    with working_folder(output, ENDING) as folder:
        # A run that was killed between its last steps has put its output in place already.
        placed = resume and folder.placing()
        if resume and not force and not placed and output.is_file() and not folder.begun():
            raise FinishedError(f"{output} is finished already, and nothing is left to resume; --force makes it anew")
        if not force and not placed:
            refuse_existing(output, errors_file)
        inputs = InputFiles(files)
        columns = {"text_column": text_column, "title_column": title_column}
        manifest = Manifest("mine", {**asdict(config), **columns}, inputs.digest, "the files of the corpus")
        work = Work(config, text_column, title_column, manifest.key, folder.path.absolute())
        job = _Job(inputs, output, errors_file, folder, engine, work, manifest, show)
        return job.run(resume=resume, force=force, placed=placed)


@dataclass
class _Job:
    """One corpus on its way into one output, with the lock held."""

    inputs: InputFiles
    output: Path
    errors_file: Path
    folder: WorkingFolder
    engine: JobEngine
    work: Work
    manifest: Manifest
    show: bool | None
    parts: dict[int, Facts] = field(default_factory=dict)

    def run(self, *, resume: bool, force: bool, placed: bool) -> Mined:
        """Make what is not there yet, and put the output in its place."""
        begin = time.perf_counter()
        self._adopt(resume=resume, force=force)
        earlier = dict(self.parts)
        with kept_work_told(self._how_to_go_on):
            self._make_parts()
            facts = self._total()
            pairs = self._place(facts, replace_it=force or placed)
        self.folder.remove()
        seconds = time.perf_counter() - begin
        # Parts are made anew where their documents are no longer the same.
        resumed = [index for index, part in self.parts.items() if earlier.get(index) is part]
        mine = sum(part.size for index, part in self.parts.items() if index not in resumed)
        return Mined(
            output=self.output,
            documents=facts.documents,
            sentences=facts.sentences,
            repeated=facts.repeated,
            candidates=facts.candidates,
            found=facts.found,
            duplicates=facts.found - pairs,
            pairs=pairs,
            errors=len(facts.errors),
            first_errors=facts.errors[:_ERRORS_SHOWN],
            errors_file=self.errors_file if facts.errors else None,
            megabytes=round(facts.size / 1e6, 3),
            seconds=round(seconds, 3),
            resumed_parts=len(resumed),
            megabytes_per_second=round(mine / 1e6 / seconds, 3),
        )

    def _how_to_go_on(self) -> str:
        if not self.folder.begun():
            return ""
        return f"finished parts are kept in {self.folder.path}: give --resume to go on from there"

    def _adopt(self, *, resume: bool, force: bool) -> None:
        """Take over the finished parts of an earlier run."""
        if not force:
            self.folder.demand_known()
        earlier = self.folder.manifest()
        if earlier is not None and self.folder.begun():
            changed = self.manifest.difference(earlier)
            if resume and not changed:
                found = {index: read_facts(path) for index, path in self.folder.parts().items()}
                self.parts = {
                    index: facts for index, facts in found.items() if facts is not None and facts.job == self.work.job
                }
                return
            if not force:
                what = f"does not fit: {changed}" if changed else "is unfinished"
                way = "go on as before" if changed else "give --resume to go on with it"
                raise (InputError if changed else OutputExistsError)(
                    f"what {self.folder.path} holds {what}; {way}, or --force to begin anew"
                )
        self.folder.clear()
        self.folder.write_manifest(self.manifest, MAKING)

    def _make_parts(self) -> None:
        """Work through every shard that has no part yet."""
        adopted, self.parts = self.parts, {}
        spread = not is_alone(self.engine)
        with progress(None, "mining", show=self.show) as advance:

            def missing() -> Iterator[Shard]:
                columns = {"text_column": self.work.text_column, "title_column": self.work.title_column}
                for shard in shards_of(self.inputs.files, self.work.config.part_size, **columns):
                    facts = adopted.get(shard.index)
                    if facts is None or facts.shard != shard.digest():
                        yield shard.by_place() if spread else shard
                    else:
                        self.parts[shard.index] = facts
                        advance(len(shard.records))

            with self.engine.pool(partial(make_part, self.work), folder=self.folder.path) as pool:
                for shard, facts in mapped_by_place(pool, missing()):
                    self.parts[shard.index] = facts
                    advance(len(shard.records))
        if self.inputs.changed():
            self.folder.clear()
            raise DataError("the files of the corpus have changed while they were read; run the same command again")

    def _total(self) -> Facts:
        """Return the sum of all parts, after checking that there is something to write."""
        facts = reduce(add, (self.parts[index] for index in sorted(self.parts)), Facts(self.work.job))
        if facts.found:
            return facts
        self.folder.clear()
        bad = f"; {_how_many(len(facts.errors), 'document')} could not be used, the first: " if facts.errors else ""
        first = facts.errors[0] if facts.errors else None
        told = f"{bad}{first}" if first else ""
        if not facts.documents:
            raise DataError(f"there is no document to mine{told}")
        raise DataError(
            f"no two sentences of {_how_many(facts.documents, 'document')} are a pair by these settings{told}"
        )

    def _place(self, facts: Facts, *, replace_it: bool) -> int:
        """Gather the parts and put the output in its place."""
        parts = [self.folder.part(index) for index in sorted(self.parts)]
        with progress(None, "sorting", show=self.show):
            pairs = gather(parts, self.folder.joined(self.output.name), self.folder.spill())
        if not replace_it:
            refuse_existing(self.output, self.errors_file)
        self.folder.write_manifest(self.manifest, PLACING)
        if facts.errors:
            write_json_lines(self.errors_file, map(asdict, facts.errors))
        else:
            self.errors_file.unlink(missing_ok=True)
        self.folder.put([self.output])
        return pairs


def _check_places(files: Sequence[Path], output: Path) -> Path:
    """Return where errors are listed, after checking all that can be checked before anything is read."""
    ending = output.suffix
    if ending not in FORMATS:
        raise ConfigError(f"{output}: pairs are written to a file that ends in {' or '.join(FORMATS)}")
    if output.is_dir():
        raise InputError(f"{output} is a folder; choose another output")
    errors_file = errors_file_of(output)
    refuse_special(output)
    refuse_special(errors_file)
    if not files:
        raise DataError(f"there is no file to mine; endings are {', '.join(CORPUS_FORMATS)}")
    for path in files:
        corpus_format(path)
        if not path.is_file():
            raise DataError(f"{path}: no such file")
        for target in (output, errors_file):
            if target.exists() and target.samefile(path):
                raise InputError(f"{target} is a file of the corpus; choose another output")
    make_folder(output.absolute().parent)
    return errors_file


def _how_many(count: int, what: str) -> str:
    """Say a number of things.

    >>> _how_many(1, "document"), _how_many(2000, "document")
    ('1 document', '2,000 documents')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"
