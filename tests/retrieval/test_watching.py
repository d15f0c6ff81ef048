"""An index that follows its files: what appears, changes and goes; what is half-written; how it ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.retrieval.indexing import Watcher, watch

OLD = 1_000_000_000


def write(path, text, age=100.0):
    """Write a file that was changed so many seconds ago."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    at = time.time() - age
    os.utime(path, (at, at))
    return path


@pytest.fixture
def notes(tmp_path):
    (tmp_path / "notes").mkdir()
    return tmp_path / "notes"


@pytest.fixture
def index(tmp_path, bundled):
    return gerund.open_index(tmp_path / "my.index", bundled)


def sources(index):
    return sorted(Path(one).name for one in index.sources())


@pytest.mark.slow
def test_a_broken_document_is_told_and_ends_nothing(index, notes):
    watcher = Watcher(index, [notes], prune=True, interval=2)
    write(notes / "a.txt", "One cat.")
    write(notes / "b.docx", "no archive")
    write(notes / "empty.txt", " ")
    summary = watcher.round()
    assert (summary.documents, [Path(one.file).name for one in summary.failed]) == (1, ["b.docx", "empty.txt"])
    assert watcher.round() is None  # told once
    write(notes / "c.pdf", "%PDF-1.4 broken")
    assert [Path(one.file).name for one in watcher.round().failed] == ["c.pdf"]
    assert sources(index) == ["a.txt"]


@pytest.mark.slow
def test_what_appears_changes_and_goes(index, notes):
    watcher = Watcher(index, [notes], prune=True, interval=2)
    assert watcher.round().documents == 0  # an empty folder is none to stop at
    write(notes / "a.txt", "One cat.")
    write(notes / "sub" / "b.txt", "Two dogs.")
    assert watcher.round().documents == 2
    assert watcher.round() is None
    write(notes / "a.txt", "One cat, and a mouse.", age=50)
    summary = watcher.round()
    assert (summary.files, summary.documents) == (1, 1)
    assert index.search("mouse", 1)[0].text == "One cat, and a mouse."
    (notes / "a.txt").unlink()
    assert watcher.round().removed == 1
    assert sources(index) == ["b.txt"]
    assert watcher.round() is None


def test_without_prune_what_goes_stays(index, notes):
    write(notes / "a.txt", "One cat.")
    watcher = Watcher(index, [notes], prune=False, interval=2)
    assert watcher.round().documents == 1
    (notes / "a.txt").unlink()
    assert watcher.round() is None
    assert sources(index) == ["a.txt"]
    write(notes / "a.txt", "One cat.", age=10)
    assert watcher.round().unchanged == 1


def test_what_went_while_nobody_looked_is_found_at_the_start(index, notes):
    write(notes / "a.txt", "One cat.")
    write(notes / "b.txt", "Two dogs.")
    index.add(notes)
    (notes / "b.txt").unlink()
    summary = Watcher(index, [notes], prune=True, interval=2).round()
    assert (summary.removed, summary.unchanged) == (1, 1)
    assert sources(index) == ["a.txt"]


def test_a_file_that_is_being_written_waits(index, notes):
    watcher = Watcher(index, [notes], prune=False, interval=60)
    path = write(notes / "a.txt", "One", age=0)
    assert watcher.round() is None
    write(path, "One cat", age=0)
    assert watcher.round() is None  # it has changed since the last look
    assert watcher.round().documents == 1
    assert index.search("cat", 1)[0].text == "One cat"


def test_a_file_that_was_read_half_written_is_read_again(index, notes):
    watcher = Watcher(index, [notes], prune=False, interval=2)
    rows = write(notes / "rows.jsonl", '{"text": "One cat."}\n{"te')
    summary = watcher.round()
    assert "rows.jsonl, line 2: not valid JSON" in summary.failed[0].reason
    assert watcher.round() is None  # told once
    write(rows, '{"text": "One cat."}\n{"text": "Two dogs."}\n', age=50)
    assert watcher.round().failed == []
    assert [hit.text for hit in index.search("dogs", 1)] == ["Two dogs."]


def test_a_folder_that_is_taken_away_keeps_its_documents(index, notes):
    write(notes / "a.txt", "One cat.")
    watcher = Watcher(index, [notes], prune=True, interval=2)
    watcher.round()
    away = notes.rename(notes.with_name("away"))
    summary = watcher.round()
    assert "its documents are kept" in summary.failed[0].reason
    assert watcher.round() is None
    assert sources(index) == ["a.txt"]
    away.rename(notes)
    assert watcher.round() is None
    (notes / "a.txt").unlink()
    assert watcher.round().removed == 1


def test_it_runs_until_it_is_stopped(index, notes):
    stop, seen = threading.Event(), []

    def report(summary):
        seen.append(summary.documents)
        if len(seen) == 1:
            write(notes / "b.txt", "Two dogs.", age=0)
        else:
            stop.set()

    write(notes / "a.txt", "One cat.")
    watch(index, notes, interval=0.02, stop=stop, report=report)
    assert seen == [1, 1]


def test_mistakes(index, notes):
    for interval in (0, -1, float("nan"), float("inf"), "2"):
        with pytest.raises(ConfigError, match="interval"):
            watch(index, notes, interval=interval)
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        watch(index, [notes, notes / "nowhere"])


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_cleanly(notes, tmp_path, number, code):
    write(notes / "a.txt", "One cat.")
    command = [sys.executable, "-m", "gerund", "index", str(notes), "-o", str(tmp_path / "my.index"), "--watch"]
    with subprocess.Popen([*command, "--interval", "0.1"], stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "stored (" in line and len(lines) < 4:
                write(notes / f"{len(lines)}.txt", "Two dogs.", age=0)
            elif len(lines) >= 3:
                process.send_signal(number)
                break
        rest = process.stderr.read()
        assert process.wait(60) == code, [*lines, rest]
    assert "stopped; everything that was stored is kept" in rest
    assert "Traceback" not in rest
    assert len(gerund.open_index(tmp_path / "my.index").sources()) == 3
