"""What an engine's workers embed is what this process would embed."""

import pytest

import gerund
from gerund import Chunking, Document
from gerund.jobs.engine import LocalEngine
from gerund.retrieval import embedding
from gerund.retrieval.embedding import embedded_by, embedding_pool, shards_of
from gerund.retrieval.indexing import migrate_index
from gerund.worker_model import WorkerModel

DOCUMENTS = [Document(f"note {i}", f"The cat number {i} sat on the mat. " * (1 + i % 5), f"Cat {i}") for i in range(20)]


@pytest.fixture
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(embedding, "_SHARD", 4)


@pytest.mark.parametrize("late", [False, True])
def test_the_same_hits(lm, small_shards, late):
    chunking = Chunking(tokens=40, late=late)
    alone, spread = (gerund.open_index(None, lm, chunking=chunking) for _ in range(2))
    alone.add_documents(DOCUMENTS)
    with embedded_by(LocalEngine(1), spread):
        spread.add_documents(DOCUMENTS)
    assert spread.elsewhere is None
    assert len(spread) == len(alone) > len(DOCUMENTS)
    # Texts that differ in a number alone are equal but for rounding, so hits are compared by place, not by rank.
    mine, theirs = (
        {(hit.source, hit.start): hit.similarity for hit in one.search("cat 7", k=1000)} for one in (spread, alone)
    )
    assert mine == pytest.approx(theirs, abs=1e-6)


@pytest.mark.slow
def test_two_processes(lm, small_shards):
    alone, spread = (gerund.open_index(None, lm, chunking=Chunking(tokens=40)) for _ in range(2))
    alone.add_documents(DOCUMENTS)
    with embedded_by(LocalEngine(2), spread):
        spread.add_documents(DOCUMENTS[:12])
        spread.add_documents(DOCUMENTS[12:])
    mine, theirs = (
        {(hit.source, hit.start): hit.similarity for hit in one.search("cat 7", k=1000)} for one in (spread, alone)
    )
    assert mine == pytest.approx(theirs, abs=1e-6)


def test_where_nothing_is_new_nobody_begins(lm):
    index = gerund.open_index(None, lm, chunking=Chunking(tokens=40))
    index.add_documents(DOCUMENTS)
    with embedded_by(_Nobody(), index):
        assert index.add_documents(DOCUMENTS).documents == 0


class _Nobody(LocalEngine):
    def pool(self, *_, **__):
        raise AssertionError("somebody began")


@pytest.mark.slow
def test_migration(lm, small_shards):
    index = gerund.open_index(None, lm, chunking=Chunking(tokens=40))
    index.add_documents(DOCUMENTS)
    chunking = Chunking(tokens=20)
    with embedding_pool(LocalEngine(1), WorkerModel.of(lm), chunking) as embed:
        assert migrate_index(index.store, lm, chunking, embed=embed) == len(DOCUMENTS)
    other = gerund.open_index(None, lm, chunking=chunking)
    other.add_documents(DOCUMENTS)
    again = gerund.open_index(index.store, lm)
    own, wanted = (
        {(hit.source, hit.start): hit.similarity for hit in one.search("cat 7", k=1000, mode="vectors")}
        for one in (again, other)
    )
    assert own == pytest.approx(wanted, abs=1e-6)
    assert len(own) > len(DOCUMENTS)


def test_lots_depend_on_the_documents_alone(small_shards):
    documents = [["chunk"] * count for count in (1, 2, 3, 9, 1)]
    shards = list(shards_of(documents))
    assert [shard.index for shard in shards] == [0, 1, 2]
    assert [[len(one) for one in shard.documents] for shard in shards] == [[1, 2, 3], [9], [1]]
    assert [one for shard in shards for one in shard.documents] == documents
