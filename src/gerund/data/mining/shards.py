"""Cuts a corpus into shards. Where one ends and the next begins depends on the documents alone.

Knows: files of documents, their sizes. Does not know: what is done with a shard.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from gerund.data.corpus import Record, read_records
from gerund.data.mining.parts import Shard, Work
from gerund.errors import DataError

# Documents of a shard at most, however small they are.
_MOST_DOCUMENTS = 20_000


def shards_of(files: Sequence[Path], work: Work) -> Iterator[Shard]:
    """Yield the shards of a corpus, of about ``part_size`` bytes each."""
    index = number = size = 0
    records: list[Record] = []
    for record in _records(files, work):
        records.append(record)
        size += _size(record)
        if size >= work.config.part_size or len(records) == _MOST_DOCUMENTS:
            yield Shard(index, number, size, records)
            index, number, size, records = index + 1, number + len(records), 0, []
    if records:
        yield Shard(index, number, size, records)


def _records(files: Sequence[Path], work: Work) -> Iterator[Record]:
    for path in files:
        number = 0
        try:
            for record in read_records(path, text_column=work.text_column, title_column=work.title_column):
                number = record.number
                yield record
        except DataError as error:
            # An archive that is cut off, a table without the column: an error among others, and on with the next file.
            yield Record(path, number + 1, "", error)


def _size(record: Record) -> int:
    content = record.content
    if isinstance(content, bytes):
        return len(content)
    if isinstance(content, tuple):
        return sum(len(part.encode("utf-8", "replace")) for part in content if isinstance(part, str))
    return 0
