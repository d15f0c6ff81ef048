"""Cuts a corpus into shards. Where one ends and the next begins depends on the documents alone.

To another process a shard goes without its documents, where these are lines or whole files: it says where they stand,
and that process reads them. A checksum is compared, so that a file that is not the same there, or not there at all, is
found out.

Knows: files of documents, their sizes and places. Does not know: what is done with a shard.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zlib import crc32

from gerund.data.corpus import Record, all_records, plain_lines
from gerund.data.files import opened
from gerund.errors import DataError

# Documents of a shard at most, however small they are.
_MOST_DOCUMENTS = 20_000


@dataclass(frozen=True)
class Extent:
    """Bytes of a file in which documents stand one after the other.

    Attributes:
        path: the file as it was named; messages and the output name it so.
        place: where it lies, for a process that works in another folder.
        number: the line that the first document stands on, or 1.
        unit: as in ``Record``.
        offset: where its bytes begin.
        length: how many there are.
    """

    path: Path
    place: Path
    number: int
    unit: str
    offset: int
    length: int

    def read(self) -> list[Record]:
        """Return the documents.

        Raises:
            DataError: the file cannot be read.
        """
        with opened(self.place) as file:
            file.seek(self.offset)
            content = file.read(self.length)
        if not self.unit:
            return [Record(self.path, self.number, "", content, self.offset)]
        return list(plain_lines(self.path, BytesIO(content), number=self.number, offset=self.offset))


@dataclass(frozen=True)
class Shard:
    """Some consecutive documents of a corpus.

    Attributes:
        index: the shard's number, from 0.
        first: the number of its first document in the corpus.
        size: bytes of its documents.
        records: the documents; none in a process that was told their places alone, before ``loaded``.
        extents: where they stand; none where they have to be sent themselves.
        checksum: of their bytes, where there are extents.
    """

    index: int
    first: int
    size: int
    records: list[Record]
    extents: tuple[Extent, ...] = ()
    checksum: int = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to another process."""
        return {**self.__dict__, "records": [] if self.extents else self.records}

    def by_place(self) -> "Shard":
        """Return the same shard, which goes to other processes without its documents, where that can be."""
        if self.extents or (extents := extents_of(self.records)) is None:
            return self
        return replace(self, extents=extents, checksum=_checksum(self.records))

    def whole(self) -> "Shard":
        """Return the same shard, which goes to other processes with its documents."""
        return replace(self, extents=(), checksum=0)

    def loaded(self) -> "Shard | None":
        """Return the shard with its documents; None where other ones, or none, stand where they should."""
        if self.records or not self.extents:
            return self
        try:
            found = replace(self, records=[record for extent in self.extents for record in extent.read()])
        except DataError:
            return None
        return found if _checksum(found.records) == self.checksum else None

    def digest(self) -> str:
        """Return a hash of the documents, and of the files that they come from."""
        digest = hashlib.blake2b(f"{self.first} {self.size}".encode(), digest_size=8)
        for record in self.records:
            content = record.content
            pieces = content if isinstance(content, tuple) else (content,)
            head = [record.path.name, record.number, *(_length(piece) for piece in pieces)]
            digest.update(json.dumps(head).encode("utf-8", "surrogatepass"))
            for piece in pieces:
                digest.update(piece if isinstance(piece, bytes) else str(piece).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def _checksum(records: Sequence[Record]) -> int:
    """Return what tells these bytes from others of a file with the same name; four times as quick as reading them."""
    value = len(records)
    for record in records:
        if isinstance(record.content, bytes):
            value = crc32(record.content, value)
    return value


def _length(piece: object) -> int | None:
    return len(piece) if isinstance(piece, bytes | str) else None


def extents_of(records: Sequence[Record]) -> tuple[Extent, ...] | None:
    r"""Return where documents stand, a run of lines at a time; None where one of them stands in no plain file.

    >>> lines = [Record(Path("a.jsonl"), 1, "line", b"one\n", 0), Record(Path("a.jsonl"), 3, "line", b"three", 5)]
    >>> [(one.number, one.offset, one.length) for one in extents_of(lines)]
    [(1, 0, 10)]
    """
    found: list[Extent] = []
    begun, end = None, 0
    for record in records:
        if record.offset is None or not isinstance(record.content, bytes):
            return None
        if begun is None or begun.path != record.path or not record.unit:
            if begun is not None:
                found.append(_extent(begun, end))
            begun = record
        end = record.offset + len(record.content)
    return (*found, _extent(begun, end)) if begun is not None else None


def _extent(first: Record, end: int) -> Extent:
    assert first.offset is not None
    place = first.path.absolute()
    return Extent(first.path, place, first.number, first.unit, first.offset, end - first.offset)


def shards_of(files: Sequence[Path], size: int, *, text_column: str, title_column: str) -> Iterator[Shard]:
    """Yield the shards of a corpus.

    Args:
        files: read in order.
        size: bytes that a shard has at least, but for the last, and few more.
        text_column: column or field that holds the text.
        title_column: the one that holds the title.
    """
    index = number = total = 0
    records: list[Record] = []
    for record in all_records(files, text_column, title_column):
        records.append(record)
        total += _size(record)
        if total >= size or len(records) == _MOST_DOCUMENTS:
            yield Shard(index, number, total, records)
            index, number, total, records = index + 1, number + len(records), 0, []
    if records:
        yield Shard(index, number, total, records)


def _size(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes):
        return len(content)
    if isinstance(content, tuple):
        return sum(len(part.encode("utf-8", "replace")) for part in content if isinstance(part, str))
    return 0
