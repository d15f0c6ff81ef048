"""The process that parses documents: its limits, how it ends, and that no document ends anything else."""

import gzip
import io
import json
import logging
import lzma
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data import tables
from gerund.errors import ConfigError, DataError
from gerund.retrieval import document_reader
from gerund.retrieval.document_reader import DocumentReader, NoTextError, ReadLimits
from tests.retrieval.test_formats import book, paragraph, pdf, word, write

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


# ---------------------------------------------------------------------------------------------------- broken documents

WHOLE_PAGE = (
    '<?xml version="1.0" encoding="utf-8"?><html><head><title>T</title></head><body><h1>Bread &amp; water</h1>'
    "<table><tr><td>a<td>b</tr></table><nav><ul><li>Menu</ul></nav><math><mi>E</mi></math><p>Caf&eacute; b\u00e4r</p>"
)
# What breaks parsers: ends, numbers out of bounds, deep nesting, entities, other encodings.
_PIECES = [
    b"", b"\0", b"\xff", b"\xff\xfe", b"<", b">", b"&", b"\"", b"]]>", b"<!--", b"<![CDATA[",
    b"<!DOCTYPE x [<!ENTITY a 'b'>]>", b"&a;", b"&#xD800;", b"-1", b"99999999999999999999", b"(" * 500, b"[" * 500,
    b"<" * 500, b"<<" * 200, b"<div>" * 600, b"<w:p>" * 300, b"</w:p>", b" 0 R", b" obj", b"endstream",
    b"/Filter/FlateDecode", b"\xed\xa0\x80", b"encoding='utf-16'", b"encoding='x'", b"{", b"\"text\":", b"1e999",
    b"\\ud800", b"\n", b"\r\n---\n", b"#" * 50, b"\t" * 50,
]  # fmt: skip


def good_documents(folder: Path) -> dict[str, bytes]:
    """Return a good document of each kind by its name."""
    pq.write_table(pa.table({"id": [1, 2], "text": ["One.", "Two."], "title": ["a", None]}), folder / "a.parquet")
    cell = f"<w:tc>{paragraph('x')}</w:tc>"
    body = (
        paragraph("Bread")
        + f"<w:tbl><w:tr>{cell}{cell}</w:tr></w:tbl><w:p><m:oMath><m:r><m:t>E</m:t></m:r></m:oMath></w:p>"
    )
    text = "# Title\n\nSome *text* with [a link](b.md).\n\n```\ncode\n```\n\n| a | b |\n|---|---|\n"
    rows = '{"id": 1, "text": "One."}\n{"id": 2, "text": "Two.", "title": "T"}\n'
    return {
        "a.docx": word(folder / "a.docx", body).read_bytes(),
        "a.epub": book(folder / "a.epub", {"a.xhtml": WHOLE_PAGE, "b.xhtml": WHOLE_PAGE}).read_bytes(),
        "a.pdf": pdf(["A sentence that", "goes on."]),
        "a.html": WHOLE_PAGE.encode(),
        "a.md": text.encode(),
        "a.txt": "Text in caf\u00e9s.\n".encode() * 3,
        "b.txt": "Text in UTF-16.\n".encode("utf-16"),
        "a.jsonl": rows.encode(),
        "a.csv": b'id,text,title\n1,"One, two",T\n2,Three,\n',
        "a.tsv": b"id\ttext\n1\tOne\n",
        "a.parquet": (folder / "a.parquet").read_bytes(),
        "a.txt.gz": gzip.compress(text.encode()),
        "a.md.xz": lzma.compress(text.encode()),
        "a.jsonl.gz": gzip.compress(rows.encode()),
        "a.html.gz": gzip.compress(WHOLE_PAGE.encode()),
        "a.docx.gz": gzip.compress((folder / "a.docx").read_bytes()),
    }


def broken(content: bytes, chance: random.Random) -> bytes:
    """Return a document with one to four mistakes, in its bytes or in what its archive holds."""
    for _ in range(chance.randint(1, 4)):
        inside = {b"PK": _with_broken_part, b"\x1f\x8b": _repacked}.get(content[:2], _changed)
        try:
            content = (inside if chance.random() < 0.7 else _changed)(content, chance)
        except Exception:  # what was broken before is no archive any more; zlib and lzma have errors of their own
            content = _changed(content, chance)
    return content


def _repacked(content: bytes, chance: random.Random) -> bytes:
    return gzip.compress(_changed(gzip.decompress(content), chance))


def _with_broken_part(content: bytes, chance: random.Random) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(sorted(parts))
    part, how = parts.pop(name), chance.random()
    if how > 0.2:
        parts[name] = _changed(part, chance)
    elif how > 0.1:  # and otherwise it is missing
        parts[chance.choice(["../x", name.upper(), "/" + name, "\u00e4"])] = part
    out = io.BytesIO()
    method = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(out, "w", method) as archive:
        for one, raw in parts.items():
            archive.writestr(one, raw)
    return out.getvalue()


def _changed(content: bytes, chance: random.Random) -> bytes:
    begin, size = chance.randrange(len(content) + 1), chance.choice([1, 1, 2, 8, 40, 400])
    piece, rest, another = content[begin : begin + size], content[begin + size :], chance.choice(_PIECES)
    return content[:begin] + chance.choice([
        b"",
        rest,
        piece * chance.choice([2, 3, 200]) + rest,
        chance.randbytes(len(piece)) + rest,
        bytes(byte ^ (1 << chance.randrange(8)) for byte in piece) + rest,
        another + rest,
        another + piece + rest,
    ])  # fmt: skip


def broken_files(folder: Path, count: int, seed: int = 0) -> Iterator[Path]:
    """Write broken documents one after the other, of each kind in turn, and yield their paths."""
    chance = random.Random(seed)
    kinds = sorted(good_documents(folder).items())
    for number in range(count):
        name, content = kinds[number % len(kinds)]
        stem, _, ending = name.partition(".")
        path = folder / f"{stem}{number:05}.{ending}"
        path.write_bytes(broken(content, chance))
        yield path


@pytest.mark.slow
def test_broken_documents_end_nothing(tmp_path, reader):
    for path in broken_files(tmp_path, 320, seed=1):
        try:
            for one in reader.read(path, lambda error: None):
                assert one.text.strip()
        except NoTextError:
            continue
        except DataError as error:
            assert str(path) in str(error)  # noqa: PT017
    assert good(reader, tmp_path)
