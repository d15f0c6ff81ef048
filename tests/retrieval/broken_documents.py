"""Broken documents, made from small good ones: bytes of a file, or of a part of an archive, cut, changed or repeated.

``python -m tests.retrieval.broken_documents 4000`` reads so many, and prints how each kind ended.
"""

import gzip
import io
import lzma
import random
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gerund.errors import DataError
from gerund.retrieval.document_reader import DocumentReader, ReadLimits
from tests.retrieval.test_formats import book, paragraph, pdf, word

PAGE = (
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
        "a.epub": book(folder / "a.epub", {"a.xhtml": PAGE, "b.xhtml": PAGE}).read_bytes(),
        "a.pdf": pdf(["A sentence that", "goes on."]),
        "a.html": PAGE.encode(),
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
        "a.html.gz": gzip.compress(PAGE.encode()),
        "a.docx.gz": gzip.compress((folder / "a.docx").read_bytes()),
    }


def broken(content: bytes, chance: random.Random) -> bytes:
    """Return a document with one to four mistakes, in its bytes or in what its archive holds."""
    for _ in range(chance.randint(1, 4)):
        if content[:2] == b"PK" and chance.random() < 0.7:
            content = _with_broken_part(content, chance)
        elif content[:2] == b"\x1f\x8b" and chance.random() < 0.7:
            content = _repacked(content, chance)
        else:
            content = _changed(content, chance)
    return content


def _repacked(content: bytes, chance: random.Random) -> bytes:
    try:
        return gzip.compress(_changed(gzip.decompress(content), chance))
    except (OSError, EOFError, ValueError):
        return _changed(content, chance)
    except Exception:  # zlib's own
        return content


def _with_broken_part(content: bytes, chance: random.Random) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
    except Exception:
        return _changed(content, chance)
    if not parts:
        return content
    name = chance.choice(sorted(parts))
    how = chance.random()
    if how < 0.1:
        del parts[name]
    elif how < 0.2:
        parts[chance.choice(["../x", name.upper(), "/" + name, "\u00e4"])] = parts.pop(name)
    else:
        parts[name] = _changed(parts[name], chance)
    out = io.BytesIO()
    method = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    with zipfile.ZipFile(out, "w", method) as archive:
        for one, raw in parts.items():
            archive.writestr(one, raw)
    return out.getvalue()


def _changed(content: bytes, chance: random.Random) -> bytes:
    if not content:
        return chance.choice(_PIECES)
    begin, size = chance.randrange(len(content)), chance.choice([1, 1, 2, 8, 40, 400])
    piece, rest = content[begin : begin + size], content[begin + size :]
    how = chance.randrange(7)
    if how == 0:
        return content[:begin]
    if how == 1:
        return content[:begin] + rest
    if how == 2:
        return content[:begin] + piece * chance.choice([2, 3, 200]) + rest
    if how == 3:
        return content[:begin] + bytes(chance.randrange(256) for _ in piece) + rest
    if how == 4:
        flipped = bytes(byte ^ (1 << chance.randrange(8)) for byte in piece)
        return content[:begin] + flipped + rest
    if how == 5:
        return content[:begin] + chance.choice(_PIECES) + rest
    return content[:begin] + chance.choice(_PIECES) + piece + rest


def broken_files(folder: Path, count: int, seed: int = 0) -> Iterator[tuple[str, Path]]:
    """Write broken documents one after the other, of each kind in turn, and yield kind and file."""
    chance = random.Random(seed)
    kinds = sorted(good_documents(folder).items())
    for number in range(count):
        name, content = kinds[number % len(kinds)]
        stem, _, ending = name.partition(".")
        path = folder / f"{stem}{number:05}.{ending}"
        path.write_bytes(broken(content, chance))
        yield ending, path


def main(count: int, seed: int) -> None:
    """Read broken documents, and print how many of each kind were read, and how the others ended."""
    ends: dict[str, Counter[str]] = {}
    begin, slowest = time.perf_counter(), (0.0, "")
    with tempfile.TemporaryDirectory() as name, DocumentReader(ReadLimits(seconds=20)) as reader:
        for ending, path in broken_files(Path(name), count, seed):
            start = time.perf_counter()
            try:
                for _ in reader.read(path, lambda error: None):
                    pass
                end = "read"
            except DataError as error:
                end = "reader process ended" if "reader process" in str(error) else type(error).__name__
                end = "too long" if "took longer" in str(error) else end
            slowest = max(slowest, (time.perf_counter() - start, path.name))
            ends.setdefault(ending, Counter())[end] += 1
    for ending, counts in sorted(ends.items()):
        print(f"{ending:9} {dict(counts)}")
    print(f"{count} broken documents in {time.perf_counter() - begin:.0f} s, the slowest {slowest}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
