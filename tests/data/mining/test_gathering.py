"""Parts into one file: order, duplicates, and more than fits the memory."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.mining import job
from gerund.data.mining.job import COLUMNS, KEYS, gather, schema


def write_part(path, rows):
    names = (*COLUMNS, *KEYS)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns, schema=schema({**COLUMNS, **KEYS})), path)
    return path


def row(document, high, low, place=0, text="x"):
    return {"document": document, "key_high": high, "key_low": low, "place": place, "text_a": text}


def gathered(parts, tmp_path):
    target = tmp_path / "out.parquet"
    count = gather(parts, target, tmp_path / "spill")
    found = pq.read_table(target).to_pylist()
    assert (len(found), (tmp_path / "spill").exists()) == (count, False)
    return found


def test_sorted_by_key_and_the_earliest_of_equal_ones(tmp_path):
    big = 2**64 - 1
    first = write_part(tmp_path / "1.parquet", [row(0, big, 1), row(1, 5, 5), row(2, 5, 6, 1), row(2, 5, 6, 0, "y")])
    second = write_part(tmp_path / "2.parquet", [row(3, big, 1), row(4, 5, 7), row(5, 5, 5), row(6, 0, big)])
    empty = write_part(tmp_path / "3.parquet", [])
    found = gathered([first, empty, second], tmp_path)
    assert [(one["document"], one["text_a"]) for one in found] == [(6, "x"), (1, "x"), (2, "y"), (4, "x"), (0, "x")]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [1, 100, 2**20])
def test_the_same_through_any_number_of_buckets(tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(job, "_BUCKET", bucket)
    monkeypatch.setattr(job, "_ROWS", 7)
    draw = random.Random(0)
    rows = [row(number, draw.getrandbits(64), draw.getrandbits(64), text=str(number)) for number in range(2000)]
    # The second half repeats keys of the first.
    rows += [{**draw.choice(rows), "document": number} for number in range(2000, 3000)]
    parts = [write_part(tmp_path / f"{number}.parquet", rows[number * 500 :][:500]) for number in range(6)]
    found = gathered(parts, tmp_path)
    order = sorted(rows[:2000], key=lambda one: (one["key_high"], one["key_low"]))
    assert [one["text_a"] for one in found] == [one["text_a"] for one in order]
    assert {one["document"] for one in found} == set(range(2000))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_BUCKET", 2**20)
    draw = random.Random(0)
    parts = []
    for number in range(40):
        # Long texts that do not get smaller by packing: 80 MB of them.
        rows = [row(number, draw.getrandbits(64), 0, place, draw.randbytes(10_000).hex()) for place in range(100)]
        parts.append(write_part(tmp_path / f"{number}.parquet", rows))
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        assert gather(parts, tmp_path / "out.parquet", tmp_path / "spill") == 4000
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 20e6
