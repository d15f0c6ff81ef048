"""Shards that go to other processes by the place of their documents, and whole where those are not found."""

import gzip
import os
import pickle
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.mining import mine
from gerund.data.mining.job import Extent, shards_of
from gerund.errors import DataError
from gerund.jobs.engine import LocalEngine, prepare
from tests.data.mining.corpora import SMALL, articles, write_jsonl


def shards(files, size=2000):
    return list(shards_of(files, size, text_column="text", title_column="title"))


def sent(shard):
    """Return what another process gets."""
    return pickle.loads(pickle.dumps(shard))


@pytest.fixture
def awkward(tmp_path):
    """Lines of every length, blank ones, a byte order mark, no line end behind the last."""
    file = tmp_path / "awkward.jsonl"
    lines = [b'{"text": "one"}\n', b"\n", b"\r\n", b'{"text": "\xc3\xa4"}\r\n', *[b"broken\n"] * 3, b"\xff\n", b"x"]
    file.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    return file


@pytest.mark.parametrize("size", [1, 20, 10**6])
def test_lines_come_back_as_they_were(awkward, tmp_path, size):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(40))
    notes = tmp_path / "note.md"
    notes.write_text("# A note\n\nand its text", "utf-8")
    for shard in shards([awkward, corpus, notes, awkward], size):
        there = sent(shard.by_place())
        assert there.records == []
        assert there.loaded().records == shard.records
        assert there.loaded().digest() == shard.digest()
        assert sent(shard).records == shard.records


def test_a_place_is_a_few_bytes(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(400))
    [shard] = shards([corpus], 10**9)
    assert len(pickle.dumps(shard.by_place())) < 1000 < corpus.stat().st_size < len(pickle.dumps(shard))


def test_tables_and_archives_are_sent(tmp_path):
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), table)
    archive = tmp_path / "b.jsonl.gz"
    archive.write_bytes(gzip.compress(b'{"text": "three"}\n'))
    for file in (table, archive):
        [shard] = shards([file])
        assert shard.by_place() is shard
        assert sent(shard).records == shard.records


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: path.write_bytes(path.read_bytes().replace(b"e", b"o"))])
def test_other_documents_are_found_out(tmp_path, spoil):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(3))
    [shard] = shards([corpus], 10**9)
    there = sent(shard.by_place())
    spoil(corpus)
    assert there.loaded() is None
    assert sent(shard.by_place().whole()).loaded().records == shard.records


@dataclass
class Elsewhere:
    """An engine of machines that do not have the corpus."""

    workers: int = 2
    whole: list[bool] = field(default_factory=list)

    @contextmanager
    def pool(self, work, *, folder=None):
        self.work = prepare(pickle.loads(pickle.dumps(work)))
        yield self

    def map(self, given):
        for shard in given:
            there = sent(shard)
            self.whole.append(bool(there.records))
            yield shard, self.work(there)


def test_machines_without_the_corpus_are_sent_the_documents(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(60))
    mine([corpus], tmp_path / "here.parquet", SMALL, workers=1)

    def missing(extent):
        raise DataError(f"{extent.place}: cannot be read")

    engine = Elsewhere()
    with monkeypatch.context() as patch:
        patch.setattr(Extent, "read", missing)
        mine([corpus], tmp_path / "there.parquet", SMALL, engine=engine)
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()
    assert len(engine.whole) > 3
    assert engine.whole == [False, *[True] * (len(engine.whole) - 1)]


@pytest.mark.slow
def test_processes_read_the_documents_themselves(tmp_path, monkeypatch):
    """Also where the corpus is named by a path from this folder."""
    write_jsonl(tmp_path / "corpus.jsonl", articles(60))
    monkeypatch.chdir(tmp_path)
    seen = []

    class Watched(LocalEngine):
        @contextmanager
        def pool(self, work, *, folder=None):
            with super().pool(work, folder=folder) as inner:
                yield _Watching(inner, seen)

    mine([Path("corpus.jsonl")], tmp_path / "one.parquet", SMALL, workers=1)
    mine([Path("corpus.jsonl")], tmp_path / "two.parquet", SMALL, engine=Watched(2))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert len(seen) > 3
    assert all(facts is not None and shard.extents for shard, facts in seen)


@dataclass
class _Watching:
    inner: object
    seen: list

    def map(self, given):
        for one in self.inner.map(given):
            self.seen.append(one)
            yield one
