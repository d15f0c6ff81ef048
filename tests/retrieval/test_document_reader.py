"""The process that parses documents: its limits, how it ends, and that no document ends anything else."""

import gzip
import json
import logging
import os
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from gerund.data import tables
from gerund.errors import ConfigError, DataError
from gerund.retrieval import document_reader
from gerund.retrieval.document_reader import DocumentReader, NoTextError, ReadLimits
from tests.retrieval.broken_documents import broken_files
from tests.retrieval.test_formats import paragraph, pdf, word, write

PAGE = "<p>A page.</p>"


@pytest.fixture(scope="module")
def reader():
    with DocumentReader(ReadLimits(seconds=30, memory=200_000_000)) as opened:
        yield opened


@pytest.fixture(scope="module")
def small_reader():
    with DocumentReader(ReadLimits(seconds=30, memory=64_000_000)) as opened:
        yield opened


def reason(reader, path):
    with pytest.raises(DataError) as caught:
        list(reader.read(path))
    assert str(path)[-20:] in str(caught.value)
    return str(caught.value)


def good(reader, tmp_path):
    [found] = reader.read(write(tmp_path / "good.html", PAGE))
    return found.text == "A page."


@pytest.mark.slow
def test_plain_text_and_tables_need_no_process(tmp_path):
    with DocumentReader() as opened:
        files = {"a.txt": "One.", "a.md": "# One", "a.csv": "text\nOne.\n", "a.jsonl": '{"text": "a"}'}
        for name, content in files.items():
            assert list(opened.read(write(tmp_path / name, content)))
        assert opened._process is None
        assert good(opened, tmp_path)
        process = opened._process
        assert good(opened, tmp_path)
        assert opened._process is process
    assert process.poll() is not None


@pytest.mark.slow
def test_the_process_starts_without_what_models_need():
    code = "import sys, gerund.retrieval.reader_process; print({'torch', 'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_a_file_in_the_working_folder_is_not_imported(tmp_path, monkeypatch):
    write(tmp_path / "zipfile.py", "raise SystemExit(1)")
    write(tmp_path / "html_to_markdown.py", "raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with DocumentReader() as opened:
        assert good(opened, tmp_path)


@pytest.mark.slow
def test_what_ends_the_process_is_the_error_of_one_file(tmp_path, reader, monkeypatch):
    assert good(reader, tmp_path)
    process = reader._process
    path = write(tmp_path / "a.html", PAGE)
    reads = document_reader.DocumentReader._next

    def killing(self, *args):
        process.kill()
        process.wait()
        process.stdout.read()  # what it may have answered already
        return reads(self, *args)

    monkeypatch.setattr(document_reader.DocumentReader, "_next", killing)
    assert "its reader process ended (signal 9); the file may be damaged, or need more memory than 200 MB" in reason(
        reader, path
    )
    monkeypatch.undo()
    assert good(reader, tmp_path)
    # Between two files it is nobody's.
    assert reader._process is not None
    reader._process.kill()
    reader._process.wait()
    assert good(reader, tmp_path)


@pytest.mark.slow
def test_a_document_that_takes_too_long_is_given_up(tmp_path):
    # What it holds would be read in a minute.
    slow = write(tmp_path / "slow.html", "<table><tr>" + "<td>x" * 200_000)
    with DocumentReader(ReadLimits(seconds=0.2)) as opened:
        begin = time.monotonic()
        assert "reading it took longer than 0.2 seconds" in reason(opened, slow)
        assert time.monotonic() - begin < 60
        assert good(opened, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems limit no memory")
def test_a_document_that_needs_too_much_memory_is_given_up(tmp_path, small_reader):
    path = write(tmp_path / "huge.html", "<p>x</p>" * 1_000_000)
    message = reason(small_reader, path)
    assert "more memory than 64 MB" in message
    assert "--read-memory" in message
    assert good(small_reader, tmp_path)


@pytest.mark.slow
def test_archives_that_unpack_to_too_much_are_refused(tmp_path, small_reader):
    write(tmp_path / "bomb.txt.gz", gzip.compress(b"a" * 17_000_000))
    word(tmp_path / "bomb.docx", paragraph("x"))
    with zipfile.ZipFile(tmp_path / "bomb.docx", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/footnotes.xml", b" " * 17_000_000)
    for name in ("bomb.txt.gz", "bomb.docx"):
        assert "it is larger than 16 MB unpacked; allow the reader more memory" in reason(small_reader, tmp_path / name)
    assert good(small_reader, tmp_path)


def test_a_row_that_fills_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MOST_ROW_BYTES", 1000)
    with DocumentReader() as opened:
        for name, content in (("a.jsonl", '{"text": "' + "x" * 2000 + '"}'), ("a.csv", 'text\n"' + "x\n" * 2000)):
            assert "more than a row may have" in reason(opened, write(tmp_path / name, content))


def test_who_stops_in_the_middle_of_a_file_gets_the_next_one_right(tmp_path, reader):
    rows = "".join(json.dumps({"text": f"Row {number}."}) + "\n" for number in range(300))
    rows_read = reader.read(write(tmp_path / "a.jsonl.gz", gzip.compress(rows.encode())))
    assert next(rows_read).text == "Row 0."
    rows_read.close()
    assert good(reader, tmp_path)
    assert [one.text for one in reader.read(tmp_path / "a.jsonl.gz")][-1] == "Row 299."


def test_bad_rows_come_through(tmp_path, reader):
    rows = '{"text": "a"}\n{\n{"text": "b"}\n'
    path = write(tmp_path / "a.jsonl.gz", gzip.compress(rows.encode()))
    bad = []
    assert [one.text for one in reader.read(path, bad.append)] == ["a", "b"]
    assert "line 2: not valid JSON" in str(bad[0])


def test_a_detected_encoding_is_logged(tmp_path, reader, caplog):
    path = write(tmp_path / "a.txt", "hello there".encode("utf-16-le"))
    with caplog.at_level(logging.INFO, "gerund.retrieval"):
        [found] = reader.read(path)
        [page] = reader.read(write(tmp_path / "a.html", '<meta charset="windows-1252"><p>café'.encode("cp1252")))
    assert (found.text, page.text) == ("hello there", "café")
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", f"{tmp_path / 'a.txt'}: read as utf-16-le (detected)"),
        ("INFO", f"{tmp_path / 'a.html'}: read as windows-1252 (declared)"),
    ]


def test_names_of_files_come_through(tmp_path, reader):
    for name in ("a b'\"\n.html", "ä.html", os.fsdecode(b"caf\xe9.html")):
        [found] = reader.read(write(tmp_path / name, PAGE))
        assert found.text == "A page."
    assert "not a readable PDF" in reason(reader, write(tmp_path / "ä.pdf", pdf(["x"])[:50]))


@pytest.mark.parametrize(
    "settings",
    [{"seconds": 0}, {"seconds": -1}, {"seconds": float("inf")}, {"seconds": "x"}, {"memory": 1}, {"memory": 1e9}],
)
def test_limits_that_cannot_be(settings):
    with pytest.raises(ConfigError, match="at most" if settings == {"seconds": float("inf")} else next(iter(settings))):
        ReadLimits(**settings)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system ends no process")
def test_the_process_ends_when_nobody_is_there_any_more(tmp_path):
    opened = DocumentReader()
    assert good(opened, tmp_path)
    process = opened._process
    process.stdin.close()
    assert process.wait(30) == 0
    opened.close()


@pytest.mark.slow
def test_broken_documents_end_nothing(tmp_path, reader):
    for _, path in broken_files(tmp_path, 320, seed=1):
        try:
            for one in reader.read(path, lambda error: None):
                assert one.text.strip()
        except NoTextError:
            continue
        except DataError as error:
            assert str(path) in str(error)  # noqa: PT017
    assert good(reader, tmp_path)
