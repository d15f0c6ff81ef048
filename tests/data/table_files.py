"""Tables in files, and what is read out of them."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.tables import open_table, read_rows
from gerund.errors import DataError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def read(path, max_rows=1000, max_characters=2**20, bad=None, start=None, **settings):
    table = open_table(path, **settings)
    return list(read_rows(table, max_rows=max_rows, max_characters=max_characters, bad=bad, start=start))


def pairs(path, **settings):
    return [pair for rows in read(path, **settings) for pair in zip(rows.ids, rows.texts, strict=True)]


def refused(path, **settings):
    with pytest.raises(DataError) as caught:
        read(path, **settings)
    message = str(caught.value)
    assert str(path) in message
    return message.removeprefix(str(path))
