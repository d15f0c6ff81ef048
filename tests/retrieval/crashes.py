"""Kills indexing and migrating, and looks what the same command makes of it; run as a process of its own.

    python -m tests.retrieval.crashes FOLDER steps [STEP ...]
    python -m tests.retrieval.crashes FOLDER times [KILLS]

``steps`` kills each command once before a call of the store that writes, each in turn or the given ones, ``times`` at
random moments, ten or as many as are asked for, while LanceDB's threads write.
Children are forked before LanceDB is imported: it has threads, which no fork outlives. Prints how many were killed; any
difference to an uninterrupted run is an AssertionError.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow.parquet  # noqa: F401  (imported once here rather than in every child)

from gerund.retrieval import document_reader, indexing, lance_store
from gerund.retrieval.documents import Chunk, Chunking, Document, rebuilt
from gerund.retrieval.store import IndexMetadata
from tests.retrieval import helpers

WRITES = ("create", "replace", "note_files", "tidy", "create_successor", "swap", "drop_others")
OTHER = IndexMetadata("fedcba9876543210", "another model", helpers.DIMENSIONS, "bidir, mean", Chunking(9))
KILLS = 10


def in_child(work: Callable[[], None], after: float | None = None) -> bool:
    """Run something in a child, killed after some seconds; tells whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # whatever it is, the parent has to hear of it
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def killed_before(step: int, work: Callable[[], None]) -> bool:
    """Run something in a child that is killed before its n-th call of the store that writes."""

    def counted() -> None:
        left = step

        def call_of(own: Callable) -> Callable:
            def call(*arguments: object) -> object:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return own(*arguments)

            return call

        for name in WRITES:
            setattr(lance_store.LanceStore, name, call_of(getattr(lance_store.LanceStore, name)))
        work()

    return in_child(counted)


def write_files(folder: Path, version: int) -> list[Path]:
    """Write what is indexed: files of text and a table; the second version changes, adds and removes some."""
    folder.mkdir(exist_ok=True)
    for place in range(6):
        text = "".join(f"line {line} of {place}\n" for line in range(4 + place * version % 3))
        (folder / f"{place}.txt").write_text(text + ("changed\n" if version == 2 and place % 2 else ""))
    rows = [f'{{"id": {row}, "text": "row {row} of version {version * (row % 2)}"}}\n' for row in range(7 - version)]
    (folder / "table.jsonl").write_text("".join(rows))
    if version == 2:
        (folder / "5.txt").unlink()
        (folder / "new.txt").write_text("quite new\n")
    return [folder]


def check(place: Path, newer: list[Chunk], older: list[Chunk]) -> None:
    """Look at what a killed command left: whole documents, each of them as it was or as it is."""
    store = lance_store.LanceStore(place)
    if store.about() is None:
        assert not older
        return
    found = by_source(store.chunks_of(list(store.documents())))
    was, is_ = by_source(older), by_source(newer)
    for source, chunks in found.items():
        assert chunks in (was.get(source), is_.get(source)), f"{source} is neither what it was nor what it is"
    lost = (was.keys() & is_.keys()) - found.keys()
    assert not lost, f"lost: {lost}"


def by_source(chunks: list[Chunk]) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {}
    for one in chunks:
        found.setdefault(one.source, []).append(one)
    return found


def check_migrated(place: Path, newer: list[Chunk], older: list[Chunk]) -> None:
    """Look at what a killed migration left: the index before it, or the one behind it."""
    store = lance_store.LanceStore(place)
    about = store.about()
    assert about in (helpers.ABOUT, OTHER)
    assert all_chunks(store) == (newer if about == OTHER else older)


def all_chunks(store: lance_store.LanceStore) -> list[Chunk]:
    return store.chunks_of(list(store.documents()))


def migrate(place: Path) -> None:
    """Migrate as ``gerund index --migrate`` does, with stand-ins for what a model does."""
    indexing.DOCUMENTS_AT_ONCE = 3
    store = lance_store.LanceStore(place)
    indexing.replace_index(store, OTHER, cut_nowhere, lambda documents: -helpers.embed(documents), show_progress=False)


def cut_nowhere(document: Document) -> list[Chunk]:
    """Let the whole text be one chunk."""
    first = helpers.cut_lines(document)[0]
    text = document.text[first.start :].rstrip("\n")
    return [replace(first, end=first.start + len(text), text=text, tokens=len(text.split()))]


def expected(texts: Path) -> list[Chunk]:
    """Return what an uninterrupted run stores, without a store."""
    chunks = []
    for path in document_reader.find_files([texts]):
        for one in document_reader.read_file(path):
            file = f"{texts.name}/{path.name}"
            source, title = (f"{file}#{one.key}", "") if one.key else (file, path.stem)
            chunks += helpers.cut_lines(Document(source, one.text, one.title or title, one.sections, file))
    return sorted(chunks, key=lambda one: (one.source, one.start))


def through(
    place: Path,
    kill: Callable[[Callable[[], None]], bool],
    work: Callable[[], None],
    look: Callable[[], None],
    wanted: list[Chunk],
    sign: int = 1,
    *,
    once: bool = False,
) -> int:
    """Run something, killed until it is through, with a look at what is there after each kill; return their number.

    Args:
        place: the index.
        kill: runs something, and tells whether it was killed.
        work: what is run.
        look: what is run after each kill.
        wanted: the chunks that are there in the end.
        sign: of their vectors.
        once: kill it once, then look, run it and compare in one process.
    """

    def same() -> None:
        store = lance_store.LanceStore(place)
        assert all_chunks(store) == wanted, "other rows than without an interruption"
        assert store.is_tidy(), "rows are missing in the index of words"
        near = store.vectors(sign * helpers.vector_of(wanted[0].text), 1)
        assert near[0][1] > 0.999
        assert near[0][0].text == wanted[0].text
        tables = sorted(path.name for path in place.glob("*.lance"))
        assert len(tables) == 3, f"what was given up is left: {tables}"

    def rest() -> None:
        look()
        work()
        same()

    kills = 0
    while kill(work):
        kills += 1
        if once:
            assert not in_child(rest)
            return kills
        assert not in_child(look)
    assert not in_child(same)
    return kills


def round_(folder: Path, name: str, kill: Callable[[Callable[[], None]], bool], *, once: bool = False) -> int:
    """Make an index, bring it up to date and migrate it, each killed until it is through; return how many kills."""
    room = folder / name
    place = room / "my.index"
    room.mkdir()
    kills = 0
    older: list[Chunk] = []
    for version in (1, 2):
        paths = write_files(room / "texts", version)
        newer = expected(room / "texts")

        def work(paths: list[Path] = paths) -> None:
            indexing.DOCUMENTS_AT_ONCE = 3
            helpers.index_files(place, paths, prune=True)

        kills += through(place, kill, work, partial(check, place, newer, older), newer, once=once)
        older = newer
    documents = [(rebuilt(own), own[0].digest) for own in by_source(older).values()]
    newer = [replace(one, digest=digest) for document, digest in documents for one in cut_nowhere(document)]
    look = partial(check_migrated, place, newer, older)
    return kills + through(place, kill, partial(migrate, place), look, newer, -1, once=once)


def main(folder: Path, how: str, *steps: str) -> None:
    """Kill, repeat, compare."""
    kills = 0
    if how == "steps":
        for step in map(int, steps) if steps else range(60):
            # Killed before this step, then let through.
            killed = round_(folder, f"step-{step}", partial(killed_before, step), once=True)
            kills += killed
            if not killed:
                break
    else:
        chance, rounds, wanted = random.Random(0), 0, int(*steps or [KILLS])
        while kills < wanted:
            rounds += 1
            # Every fifth is let through, however slow the machine is.
            moments = iter([*(chance.uniform(0.1, 1.6) for _ in range(4)), None] * wanted)
            kills += round_(folder, f"time-{rounds}", lambda work, moments=moments: in_child(work, next(moments)))
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
