"""What an engine's workers embed is what this process would embed."""

import pytest

import gerund
from gerund import Chunking, Document
from gerund.jobs.engine import LocalEngine
from gerund.retrieval import embedding
from gerund.retrieval.embedding import embedded_by, embedding_pool, shards_of
from gerund.retrieval.indexing import migrate_index
from gerund.worker_model import WorkerModel
from tests.jobs.pickled import PickledEngine

DOCUMENTS = [Document(f"note {i}", f"The cat number {i} sat on the mat. " * (1 + i % 5), f"Cat {i}") for i in range(20)]


@pytest.fixture
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(embedding, "_SHARD", 4)


def indexed(lm, **chunking):
    index = gerund.open_index(None, lm, chunking=Chunking(**chunking))
    index.add_documents(DOCUMENTS)
    return index


def similarities(index, mode="hybrid"):
    """Return similarities by chunk: texts that differ only in a number are equal except for rounding."""
    return {(hit.source, hit.start): hit.similarity for hit in index.search("cat 7", k=1000, mode=mode)}


@pytest.mark.parametrize(
    ("engine", "late"),
    [
        (LocalEngine(1), False),
        (PickledEngine(2), True),
        pytest.param(LocalEngine(2), False, marks=pytest.mark.full),
    ],
    ids=["here", "pickled", "processes"],
)
def test_the_same_hits(lm, small_shards, engine, late):
    alone = indexed(lm, tokens=40, late=late)
    spread = gerund.open_index(None, lm, chunking=alone.chunking)
    with embedded_by(engine, spread):
        spread.add_documents(DOCUMENTS[:12])
        spread.add_documents(DOCUMENTS[12:])
    assert spread.elsewhere is None
    assert len(spread) == len(alone) > len(DOCUMENTS)
    assert similarities(spread) == pytest.approx(similarities(alone), abs=1e-6)


def test_where_nothing_is_new_nobody_begins(lm):
    index = indexed(lm, tokens=40)
    with embedded_by(_Nobody(), index):
        assert index.add_documents(DOCUMENTS).documents == 0


class _Nobody(LocalEngine):
    def pool(self, *_, **__):
        raise AssertionError("somebody began")


@pytest.mark.slow
def test_migration(lm, small_shards):
    index, expected = indexed(lm, tokens=40), indexed(lm, tokens=20)
    with embedding_pool(LocalEngine(1), WorkerModel.of(lm), expected.chunking) as embed:
        assert migrate_index(index.store, lm, expected.chunking, embed=embed) == len(DOCUMENTS)
    migrated = similarities(gerund.open_index(index.store, lm), "vectors")
    assert migrated == pytest.approx(similarities(expected, "vectors"), abs=1e-6)
    assert len(migrated) > len(DOCUMENTS)


def test_lots_depend_on_the_documents_alone(small_shards):
    documents = [["chunk"] * count for count in (1, 2, 3, 9, 1)]
    shards = list(shards_of(documents))
    assert [shard.index for shard in shards] == [0, 1, 2]
    assert [[len(one) for one in shard.documents] for shard in shards] == [[1, 2, 3], [9], [1]]
    assert [one for shard in shards for one in shard.documents] == documents
