"""Files into a store: skipped, replaced, pruned, interrupted, by two at once, and followed as they change."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.progress import progress, progress_lines
from gerund.retrieval import indexing
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.indexing import Watcher, Writer, all_failed, refill, watch
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import IndexMetadata
from tests.retrieval.helpers import ABOUT, cut_lines, embed, index_files, vector_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store():
    found = MemoryStore()
    found.create(ABOUT)
    return found


def add(store, *paths, root=None, **settings):
    writer = Writer(store, cut_lines, embed, root)
    writer.add_files(list(paths), **settings)
    return writer.summary


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def texts(store):
    chunks = store.chunks_of(list(store.documents()))
    return {source: [one.text for one in chunks if one.source == source] for source in store.documents()}


def test_what_is_unchanged_is_passed_over_and_what_has_changed_is_replaced(store, tmp_path):
    folder = write(tmp_path / "n", a="one\ntwo\n", b="three\n")
    first = add(store, folder, root=tmp_path)
    assert (first.files, first.documents, first.chunks, first.unchanged) == (2, 2, 3, 0)
    assert texts(store) == {"n/a.txt": ["one", "two"], "n/b.txt": ["three"]}
    again = add(store, folder, root=tmp_path)
    assert (again.files, again.documents, again.unchanged) == (2, 0, 2)
    write(folder, a="other\n", c="new\n")
    third = add(store, folder, root=tmp_path)
    assert (third.documents, third.unchanged, third.removed) == (2, 1, 0)
    assert texts(store) == {"n/a.txt": ["other"], "n/b.txt": ["three"], "n/c.txt": ["new"]}


class SlowEmbedding:
    """Embeds, and waits after three of four steps until that was shown; keeps what was written until then."""

    def __init__(self, capsys):
        self.capsys, self.err = capsys, ""

    def __call__(self, documents):
        with progress(4, "encoding", show=False) as advance:
            advance(3)
            end = time.monotonic() + 5
            while "3 of 4" not in self.err and time.monotonic() < end:
                self.err += self.capsys.readouterr().err
        return embed(documents)


def test_progress_is_that_of_the_embedding(store, tmp_path, capsys):
    folder = write(tmp_path / "n", a="one\ntwo\n", b="three\nfour\n")
    embed_slowly = SlowEmbedding(capsys)
    with progress_lines(0.02):
        Writer(store, cut_lines, embed_slowly, tmp_path).add_files([folder])
    assert re.search(
        r"gerund: 2 of 2 files read, chunks embedded: 3 of 4 in \d+ s, about \d+ s left\n", embed_slowly.err
    )
    assert "chunks embedded: 4 of 4 in" in capsys.readouterr().err


def test_progress_of_embedding_anew_is_that_of_the_embedding(store, tmp_path, capsys):
    add(store, write(tmp_path / "n", a="one\n", b="two\n", c="three\n", d="four\n"), root=tmp_path)
    embed_slowly = SlowEmbedding(capsys)
    with progress_lines(0.02):
        assert refill(store, store.create_successor(ABOUT), cut_lines, embed_slowly) == 4
    assert "embedding anew: 3 of 4 in" in embed_slowly.err
    assert "embedding anew: 4 of 4 in" in capsys.readouterr().err


def test_rows_of_a_table_are_documents_of_their_own(store, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n{"id": "c", "text": "three"}\n')
    assert add(store, path, root=tmp_path).documents == 3
    path.write_text('{"id": "a", "text": "one"}\n{"id": "b", "text": "changed"}\n')
    summary = add(store, path, root=tmp_path)
    assert (summary.documents, summary.removed) == (1, 1)
    assert texts(store) == {"t.jsonl#a": ["one"], "t.jsonl#b": ["changed"]}
    path.write_text('{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}\n')
    summary = add(store, path, root=tmp_path)
    assert [one.reason for one in summary.failed] == [f"{path}: the id 'a' is there twice"]
    assert "t.jsonl#b" in texts(store)  # nothing is removed for a file that is not understood


def test_rows_that_cannot_be_read_stop_no_other(store, tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n{\n{"id": "c", "text": 3}\n{"id": "d", "text": "four"}\n')
    summary = add(store, path, root=tmp_path)
    [failure] = summary.failed
    assert (failure.file, failure.rows) == (str(path), 2)
    assert failure.reason.startswith(f"{path}, line 2: not valid JSON")
    assert failure.more == (f"{path}, line 3: 'text' is not a text but int",)
    assert all_failed(summary) is None
    assert texts(store) == {"t.jsonl#a": ["one"], "t.jsonl#d": ["four"]}
    assert store.files() == {}
    path.write_text('{"id": "a", "text": "one"}\n{"id": "c", "text": "three"}\n')
    assert (add(store, path, root=tmp_path).failed, sorted(texts(store))) == ([], ["t.jsonl#a", "t.jsonl#c"])


def test_what_is_gone_stays_unless_it_is_pruned(store, tmp_path):
    inside, outside = write(tmp_path / "in", a="one\n", b="two\n"), write(tmp_path / "out", c="three\n")
    table = outside / "t.csv"
    table.write_text("text\nrow\n")
    add(store, inside, outside, root=tmp_path)
    for path in (inside / "a.txt", outside / "c.txt"):
        path.unlink()
    assert add(store, inside, root=tmp_path).removed == 0
    # Only what belongs to the paths that are given.
    assert add(store, inside, root=tmp_path, prune=True).removed == 1
    assert sorted(texts(store)) == ["in/b.txt", "out/c.txt", "out/t.csv#L2"]
    (inside / "b.txt").unlink()
    assert add(store, inside, root=tmp_path, prune=True).removed == 1  # the folder is empty now
    table.unlink()
    assert add(store, table, root=tmp_path, prune=True).removed == 1  # a file that is gone itself
    assert sorted(texts(store)) == ["out/c.txt"]
    assert store.files().keys() == {"out/c.txt"}
    with pytest.raises(DataError, match="no such file or folder"):
        add(store, tmp_path / "typo", root=tmp_path, prune=True)


def test_of_the_index_s_own_folder_only_what_lies_there_is_pruned(store, tmp_path):
    work, other = write(tmp_path / "work", a="one\n", b="two\n"), write(tmp_path / "other", c="three\n")
    add(store, work, other, root=work)
    writer = Writer(store, cut_lines, embed, work)
    writer.add_documents([Document("d", "four\n"), Document("e", "five\n", file="s3://bucket/e.txt")])
    (work / "b.txt").unlink()
    assert add(store, work, root=work, prune=True).removed == 1
    assert sorted(texts(store)) == [f"{other}/c.txt", "a.txt", "d", "e"]
    (other / "c.txt").unlink()
    assert add(store, work, root=work, prune=True).removed == 0  # it is gone, but did not lie there
    assert add(store, other, root=work, prune=True).removed == 1


def test_a_folder_above_the_index_s_own_is_pruned(store, tmp_path):
    root = tmp_path / "above" / "root"
    write(root, a="one\n", b="two\n")
    write(tmp_path / "above" / "beside", c="three\n")
    like = write(tmp_path / "above" / "root too", d="four\n")  # its name begins as the index's folder's does
    add(store, tmp_path / "above", root=root)
    for path in (root / "b.txt", tmp_path / "above" / "beside" / "c.txt", like / "d.txt"):
        path.unlink()
    assert add(store, root, root=root, prune=True).removed == 1
    write(root, b="two\n")
    add(store, root, root=root)
    (root / "b.txt").unlink()
    assert add(store, tmp_path / "above", root=root, prune=True).removed == 3
    assert sorted(texts(store)) == ["a.txt"]
    shutil.rmtree(tmp_path / "above")
    assert add(store, tmp_path / "above", root=root, prune=True).removed == 1  # a folder that is gone itself


def test_the_text_of_a_file_that_has_none_any_more_is_removed(store, tmp_path):
    folder = write(tmp_path / "n", a="one\n", b="two\n")
    table = folder / "t.jsonl"
    table.write_text('{"id": "a", "text": "row"}\n')
    add(store, folder, root=tmp_path)
    write(folder, a="")
    table.write_text('{"id": "a", "text": ""}\n')
    summary = add(store, folder, root=tmp_path)
    assert [one.reason for one in summary.failed] == [
        f"{path}: there is no text in it" for path in (folder / "a.txt", table)
    ]
    assert (summary.removed, texts(store), store.files().keys()) == (2, {"n/b.txt": ["two"]}, {"n/b.txt"})
    again = add(store, folder, root=tmp_path)
    assert (len(again.failed), again.removed) == (2, 0)
    write(folder, a="one\n")  # as it was before
    assert (add(store, folder, root=tmp_path).documents, sorted(texts(store))) == (1, ["n/a.txt", "n/b.txt"])


def test_a_table_that_is_put_back_as_it_was_before_a_bad_row_is_read_again(store, tmp_path):
    table, before = tmp_path / "t.jsonl", '{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    table.write_text(before)
    add(store, table, root=tmp_path)
    table.write_text('{"id": "a", "text": "changed"}\n{\n')
    assert len(add(store, table, root=tmp_path).failed) == 1
    table.write_text(before)
    add(store, table, root=tmp_path)
    assert texts(store) == {"t.jsonl#a": ["one"], "t.jsonl#b": ["two"]}


def test_a_file_that_cannot_be_read_keeps_its_text(store, tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("one\n")
    add(store, path, root=tmp_path)
    path.write_bytes(b"\xff\xfe\xff")
    assert len(add(store, path, root=tmp_path, prune=True).failed) == 1
    assert texts(store) == {"t.txt": ["one"]}


def test_a_broken_file_stops_no_other(store, tmp_path):
    folder = write(tmp_path / "n", a="one\n", c="two\n", empty=" \n")
    (folder / "b.jsonl").write_text('{"text": "good"}\n{\n')
    (folder / "b.pdf").write_bytes(b"%PDF-1.4 broken")
    summary = add(store, folder, root=tmp_path)
    assert [Path(one.file).name for one in summary.failed] == ["b.jsonl", "b.pdf", "empty.txt"]
    assert sorted(texts(store)) == ["n/a.txt", "n/b.jsonl#L1", "n/c.txt"]
    assert store.files().keys() == {"n/a.txt", "n/c.txt"}
    assert len(add(store, folder, root=tmp_path).failed) == 3  # and again, until it is repaired


def test_nothing_readable(store, tmp_path):
    (tmp_path / "picture.png").write_text("x")
    with pytest.raises(DataError, match=r"there is no file to read; files are read that end in \.txt, \.md"):
        add(store, tmp_path)


def test_names_hold_wherever_a_command_is_run(store, tmp_path, monkeypatch):
    folder = write(tmp_path / "project" / "notes", a="one\n")
    elsewhere = write(tmp_path / "elsewhere", b="two\n")
    monkeypatch.chdir(folder)
    add(store, Path(), elsewhere, root=tmp_path / "project")
    assert sorted(texts(store)) == sorted([f"{elsewhere}/b.txt", "notes/a.txt"])
    monkeypatch.chdir(tmp_path)
    assert add(store, Path("project/notes"), Path("project/../elsewhere"), root=tmp_path / "project").unchanged == 2


def test_documents_without_files(store):
    writer = Writer(store, cut_lines, embed, None)
    writer.add_documents([Document("a", "one\n"), Document("b", "two\n"), Document("a", "three\n")])
    assert texts(store) == {"a": ["three"], "b": ["two"]}  # as it came last
    writer = Writer(store, cut_lines, embed, None)
    writer.add_documents([Document("a", "three\n"), Document("b", "")])
    assert (writer.summary.documents, writer.summary.removed) == (0, 1)
    writer.remove(["a"])
    assert texts(store) == {}
    with pytest.raises(DataError, match="has no document 'a'"):
        writer.remove(["a"])


@pytest.mark.parametrize(
    ("stored", "given", "left", "removed"),
    [
        ("one", ["", "two"], ["two"], 0),
        ("one", ["two", ""], [], 1),
        ("one", ["two", "one"], ["one"], 0),
        ("one", ["", "one"], ["one"], 0),
        ("one", ["", ""], [], 1),
        ("", ["one", ""], [], 0),
        ("", ["", "one"], ["one"], 0),
        ("", ["one", "", "two"], ["two"], 0),
    ],
)
@pytest.mark.parametrize("at_once", [1, 256])
def test_a_document_that_comes_twice_counts_as_it_came_last(store, monkeypatch, stored, given, left, removed, at_once):
    monkeypatch.setattr(indexing, "DOCUMENTS_AT_ONCE", at_once)
    Writer(store, cut_lines, embed, None).add_documents([Document("a", stored)])
    writer = Writer(store, cut_lines, embed, None)
    writer.add_documents([Document("a", text) for text in given])
    assert [one.text for one in store.chunks_of(["a"])] == left
    assert len(store.documents()) == len(left)
    if at_once > 1:
        assert writer.summary.removed == removed


def test_many_are_stored_at_once_and_an_interruption_says_what_is_kept(store, tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "DOCUMENTS_AT_ONCE", 2)
    folder = write(tmp_path / "n", **{name: f"{name}\n" for name in "abcde"})
    seen = []

    def interrupted(documents):
        seen.append(len(documents))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return embed(documents)

    writer = Writer(store, cut_lines, interrupted, tmp_path)
    with pytest.raises(KeyboardInterrupt) as stop:
        writer.add_files([folder])
    assert "2 documents of this run are kept" in stop.value.__notes__[0]
    assert seen == [2, 2]
    assert add(store, folder, root=tmp_path).documents == 3
    assert len(texts(store)) == 5


def test_everything_is_embedded_anew_from_what_is_stored(store, tmp_path):
    folder = write(tmp_path / "n", a="one\n\n\ntwo\n", b="three\n")
    add(store, folder, root=tmp_path)
    (folder / "a.txt").unlink()  # the file is not needed
    about = IndexMetadata("another", "m", 3, "x", Chunking(9))
    asked = []

    def cut_words(document):
        asked.append(document)
        return cut_lines(document)

    def embed_small(documents):
        return np.stack([vector_of(one.text)[:3] for own in documents for one in own])

    other = store.create_successor(about)
    assert refill(store, other, cut_words, embed_small) == 2
    assert [(one.source, one.text, one.title) for one in asked] == [
        ("n/a.txt", "one\n\n\ntwo", "a"),
        ("n/b.txt", "three", "b"),
    ]
    assert refill(store, other, cut_words, embed_small) == 0  # what is there is not done again
    assert other.documents() == store.documents()
    assert other.files() == store.files()
    store.swap(other)
    # The next run knows by its hash what it read before the migration.
    assert add(store, folder, root=tmp_path).unchanged == 1
    add(store, folder, root=tmp_path, prune=True)
    assert texts(store) == {"n/b.txt": ["three"]}


@pytest.mark.slow
def test_two_writers_and_a_reader_at_once(tmp_path):
    write(tmp_path / "a", **{f"a{place}": f"text {place}\nmore\n" for place in range(4)})
    write(tmp_path / "b", **{f"b{place}": f"text {place}\n" for place in range(4)})
    script = (
        "import sys; from pathlib import Path\n"
        "from gerund.retrieval import indexing; indexing.DOCUMENTS_AT_ONCE = 2\n"
        "from tests.retrieval.helpers import index_files\n"
        "index_files(Path('my.index'), [Path(one) for one in sys.argv[1:]])\n"
    )
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'src')!r}]\n"
    command = [sys.executable, "-c", path + script]
    running = [subprocess.Popen([*command, *names], cwd=tmp_path) for names in (["a", "b"], ["b", "a"])]
    store = LanceStore(tmp_path / "my.index")
    while any(one.poll() is None for one in running):
        time.sleep(0.1)  # a reader that never pauses takes the processor from those who write
        if store.about() is not None:
            found = store.chunks_of(list(store.documents()))
            assert len({one.id for one in found}) == len(found)
    assert [one.returncode for one in running] == [0, 0]
    assert len(store.documents()) == 8
    assert store.count() == 12
    assert index_files(tmp_path / "my.index", [tmp_path / "a", tmp_path / "b"]).unchanged == 8


def crash(folder: Path, *arguments: object) -> int:
    command = [sys.executable, "-m", "tests.retrieval.crashes", str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.slow
def test_killed_and_repeated_the_rows_are_the_same(tmp_path):
    assert crash(tmp_path, "steps", 7) == 3


@pytest.mark.full  # for each kill several processes import LanceDB: minutes
@pytest.mark.parametrize(("how", "kills"), [("steps", 10), ("times", 10)])
def test_killed_at_every_step_and_at_any_time(tmp_path, how, kills):
    assert crash(tmp_path, how) >= kills


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names are Unicode there")
def test_a_name_that_is_no_text(store, tmp_path):
    path = Path(os.fsdecode(os.fsencode(write(tmp_path / "n", a="one\n")) + b"/caf\xe9.txt"))
    path.write_text("two\n")
    assert add(store, tmp_path / "n", root=tmp_path).failed == []
    assert texts(store) == {"n/a.txt": ["one"], "n/caf\\xe9.txt": ["two"]}
    assert add(store, tmp_path / "n", root=tmp_path).unchanged == 2
    path.unlink()
    assert add(store, tmp_path / "n", root=tmp_path, prune=True).removed == 1


OLD = 1_000_000_000


def write_aged(path, text, age=100.0):
    """Write a file that was changed so many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    at = time.time() - age
    os.utime(path, (at, at))
    return path


@pytest.fixture
def watched(tmp_path):
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def followed(tmp_path, bundled):
    return gerund.open_index(tmp_path / "my.index", bundled)


def names_of(index):
    return sorted(Path(one).name for one in index.sources())


@pytest.mark.slow
def test_a_broken_document_is_told_and_ends_nothing(followed, watched):
    watcher = Watcher(followed, [watched], prune=True, interval=2)
    write_aged(watched / "a.txt", "One cat.")
    write_aged(watched / "b.docx", "no archive")
    write_aged(watched / "empty.txt", " ")
    summary = watcher.round()
    assert (summary.documents, [Path(one.file).name for one in summary.failed]) == (1, ["b.docx", "empty.txt"])
    assert watcher.round() is None  # told once
    write_aged(watched / "c.pdf", "%PDF-1.4 broken")
    assert [Path(one.file).name for one in watcher.round().failed] == ["c.pdf"]
    assert names_of(followed) == ["a.txt"]


@pytest.mark.slow
def test_what_appears_changes_and_goes(followed, watched):
    watcher = Watcher(followed, [watched], prune=True, interval=2)
    assert watcher.round().documents == 0  # an empty folder is none to stop at
    write_aged(watched / "a.txt", "One cat.")
    write_aged(watched / "sub" / "b.txt", "Two dogs.")
    assert watcher.round().documents == 2
    assert watcher.round() is None
    write_aged(watched / "a.txt", "One cat, and a mouse.", age=50)
    summary = watcher.round()
    assert (summary.files, summary.documents) == (1, 1)
    assert followed.search("mouse", 1)[0].text == "One cat, and a mouse."
    (watched / "a.txt").unlink()
    assert watcher.round().removed == 1
    assert names_of(followed) == ["b.txt"]
    assert watcher.round() is None


def test_without_prune_what_goes_stays(followed, watched):
    write_aged(watched / "a.txt", "One cat.")
    watcher = Watcher(followed, [watched], prune=False, interval=2)
    assert watcher.round().documents == 1
    (watched / "a.txt").unlink()
    assert watcher.round() is None
    assert names_of(followed) == ["a.txt"]
    write_aged(watched / "a.txt", "One cat.", age=10)
    assert watcher.round().unchanged == 1


def test_what_went_while_nobody_looked_is_found_at_the_start(followed, watched):
    write_aged(watched / "a.txt", "One cat.")
    write_aged(watched / "b.txt", "Two dogs.")
    followed.add(watched)
    (watched / "b.txt").unlink()
    summary = Watcher(followed, [watched], prune=True, interval=2).round()
    assert (summary.removed, summary.unchanged) == (1, 1)
    assert names_of(followed) == ["a.txt"]


def test_a_file_that_is_being_written_waits(followed, watched):
    watcher = Watcher(followed, [watched], prune=False, interval=60)
    path = write_aged(watched / "a.txt", "One", age=0)
    assert watcher.round() is None
    write_aged(path, "One cat", age=0)
    assert watcher.round() is None  # it has changed since the last look
    assert watcher.round().documents == 1
    assert followed.search("cat", 1)[0].text == "One cat"


def test_a_file_that_was_read_half_written_is_read_again(followed, watched):
    watcher = Watcher(followed, [watched], prune=False, interval=2)
    rows = write_aged(watched / "rows.jsonl", '{"text": "One cat."}\n{"te')
    summary = watcher.round()
    assert "rows.jsonl, line 2: not valid JSON" in summary.failed[0].reason
    assert watcher.round() is None  # told once
    write_aged(rows, '{"text": "One cat."}\n{"text": "Two dogs."}\n', age=50)
    assert watcher.round().failed == []
    assert [hit.text for hit in followed.search("dogs", 1)] == ["Two dogs."]


def test_a_folder_that_is_taken_away_keeps_its_documents(followed, watched):
    write_aged(watched / "a.txt", "One cat.")
    watcher = Watcher(followed, [watched], prune=True, interval=2)
    watcher.round()
    away = watched.rename(watched.with_name("away"))
    summary = watcher.round()
    assert "its documents are kept" in summary.failed[0].reason
    assert watcher.round() is None
    assert names_of(followed) == ["a.txt"]
    away.rename(watched)
    assert watcher.round() is None
    (watched / "a.txt").unlink()
    assert watcher.round().removed == 1


def test_it_runs_until_it_is_stopped(followed, watched):
    stop, seen = threading.Event(), []

    def report(summary):
        seen.append(summary.documents)
        if len(seen) == 1:
            write_aged(watched / "b.txt", "Two dogs.", age=0)
        else:
            stop.set()

    write_aged(watched / "a.txt", "One cat.")
    watch(followed, watched, interval=0.02, stop=stop, report=report)
    assert seen == [1, 1]


def test_mistakes_of_watching(followed, watched):
    for interval in (0, -1, float("nan"), float("inf"), "2"):
        with pytest.raises(ConfigError, match="interval"):
            watch(followed, watched, interval=interval)
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        watch(followed, [watched, watched / "nowhere"])


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_cleanly(watched, tmp_path, number, code):
    write_aged(watched / "a.txt", "One cat.")
    command = [sys.executable, "-m", "gerund", "index", str(watched), "-o", str(tmp_path / "my.index"), "--watch"]
    with subprocess.Popen([*command, "--interval", "0.1"], stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "stored (" in line and len(lines) < 4:
                write_aged(watched / f"{len(lines)}.txt", "Two dogs.", age=0)
            elif len(lines) >= 3:
                process.send_signal(number)
                break
        rest = process.stderr.read()
        assert process.wait(60) == code, [*lines, rest]
    assert "stopped; everything that was stored is kept" in rest
    assert "Traceback" not in rest
    assert len(gerund.open_index(tmp_path / "my.index").sources()) == 3
