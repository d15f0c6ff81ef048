"""Indices that store token vectors: what is stored, and searches that re-rank by it."""

import json

import numpy as np
import pytest

import gerund
from gerund import Chunking, ConfigError
from gerund.errors import FingerprintError
from gerund.inference.encode.multi import TokenReader
from gerund.jobs.engine import LocalEngine
from gerund.models.heads import LateHead
from gerund.progress import counted_by
from gerund.retrieval.documents import cut
from gerund.retrieval.embedding import Embedder, embedded_by
from gerund.retrieval.store import from_bytes
from gerund.scoring.late_interaction import LateInteraction, TokenRarity
from gerund.settings.encoder import LateConfig
from tests.cli.helpers import run_cli
from tests.retrieval.helpers import NOTES

QUERY = "how is bread made"
DOCUMENTS = [gerund.Document(name, text) for name, text in NOTES.items()]


def made(where, lm, multi=1):
    index = gerund.open_index(where, lm, chunking=Chunking(tokens=40, multi=multi))
    index.add_documents(DOCUMENTS)
    return index


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_the_second_stage_reads_no_document(lm, tmp_path, place, monkeypatch):
    index = made(None if place == "memory" else tmp_path / "my.index", lm)
    first = index.search(QUERY, 4)
    read = []
    whole = TokenReader.vectors
    monkeypatch.setattr(
        TokenReader, "vectors", lambda self, texts, **how: (read.append(len(texts)), whole(self, texts, **how))[1]
    )
    hits = index.search(QUERY, 4, rerank=3, rerank_by="maxsim", rerank_weight=1)
    assert [number for number in read if number] == [1]  # the query
    monkeypatch.undo()
    texts = [hit.text for hit in first[:3]]
    reader = lm.token_reader()
    everything = [one.text for one in index.store.chunks_of(list(NOTES))]
    rarity = TokenRarity(map(reader.ids, reader.tokens(everything, is_query=False)))
    wanted = dict(zip(texts, LateInteraction(lm, QUERY, rarity=rarity)(texts), strict=True))
    assert [hit.text for hit in hits[:3]] == sorted(wanted, key=lambda text: -wanted[text])
    assert hits[3].source == first[3].source
    # Without those that are stored, documents are read.
    plain = gerund.open_index(None, lm, chunking=Chunking(tokens=40))
    plain.add_documents(DOCUMENTS)
    again = plain.search(QUERY, 4, rerank=3, rerank_by="maxsim", rerank_weight=1)
    wanted = lm.rerank(QUERY, texts, by="maxsim")
    assert [hit.text for hit in again[:3]] == [texts[place] for place in wanted.indices]


def test_progress_is_that_of_both_passes(lm, monkeypatch):
    shares, after_first = [], []
    vectors = TokenReader.vectors

    def watched(self, texts, **how):
        after_first.append(sum(shares))
        return vectors(self, texts, **how)

    monkeypatch.setattr(TokenReader, "vectors", watched)
    chunks = [cut(document, lm.tokenizer, Chunking(tokens=40)) for document in DOCUMENTS]
    with counted_by(shares.append):
        Embedder(lm, Chunking(tokens=40, multi=1)).embedded(chunks)
    assert after_first == [pytest.approx(0.5)]
    assert sum(shares) == pytest.approx(1)
    shares.clear()
    with counted_by(shares.append):
        Embedder(lm, Chunking(tokens=40)).embedded(chunks)
    assert sum(shares) == pytest.approx(1)


def test_what_is_stored_of_a_chunk(lm, tmp_path):
    index = made(tmp_path / "my.index", lm, multi=3)
    chunks = index.store.chunks_of(list(NOTES))
    stored = index.store.token_vectors([one.id for one in chunks])
    assert stored.keys() == {one.id for one in chunks}
    for one in chunks:
        np.testing.assert_array_equal(
            from_bytes(stored[one.id]), lm.encode_multi(one.text, precision="int8", pool_factor=3)
        )
    assert index.store.token_vectors([]) == {}
    # Changed and removed documents take theirs along.
    index.add_documents([gerund.Document("bread", "Rye.")])
    index.remove("rail")
    left = index.store.chunks_of(list(NOTES))
    known = index.store.token_vectors([one.id for one in (*chunks, *left)])
    assert known.keys() == {one.id for one in left}
    assert gerund.open_index(tmp_path / "my.index").chunking.multi == 3


def test_several_processes_store_the_same(lm, tmp_path):
    one, other = (gerund.open_index(tmp_path / name, lm, chunking=Chunking(40, multi=1)) for name in "ab")
    one.add_documents(DOCUMENTS)
    with embedded_by(LocalEngine(1), other):
        other.add_documents(DOCUMENTS)
    ids = [chunk.id for chunk in one.store.chunks_of(list(NOTES))]
    assert one.store.token_vectors(ids) == other.store.token_vectors(ids)


def test_another_projection_is_told(lm, tmp_path):
    trained = lm.with_encoder(lm.encoder)
    trained.late = LateHead(LateConfig(), np.eye(4, lm.runtime.state_width, dtype=np.float32))
    index = made(tmp_path / "my.index", lm)
    for found in (index, gerund.open_index(tmp_path / "my.index", trained)):
        assert found.search(QUERY, 1, rerank=2, rerank_by="lift")
    with pytest.raises(FingerprintError, match="made otherwise"):
        found.search(QUERY, 1, rerank=2)  # its own measure is maxsim
    assert found.migrate() == len(DOCUMENTS)
    assert found.search(QUERY, 1, rerank=2)
    [stored] = (
        index.store.__class__(tmp_path / "my.index").token_vectors([found.store.chunks_of(["bread"])[0].id]).values()
    )
    assert from_bytes(stored).shape[1] == 4


def test_mistakes(lm):
    with pytest.raises(ConfigError, match="`multi` must be 0 or more"):
        Chunking(multi=-1)
    assert Chunking.from_dict(Chunking(multi=2).to_dict()) == Chunking(multi=2)
    assert "multi" not in Chunking().to_dict()
    assert str(Chunking(multi=2)).endswith("with token vectors")


def test_on_the_command_line(tiny_folder, tmp_path):
    (tmp_path / "a.txt").write_text("Bread is made of flour.")
    (tmp_path / "b.txt").write_text("Trains run on rails.")
    paths = [tmp_path / "a.txt", tmp_path / "b.txt", "-o", tmp_path / "my.index"]
    ran = run_cli("index", *paths, "-m", tiny_folder, "--pool-factor", "2")
    assert (ran.code, "goes with --multi" in ran.err) == (2, True)
    assert (
        run_cli("index", *paths, "-m", tiny_folder, "--multi", "--pool-factor", "2", "--chunk-tokens", "40").code == 0
    )
    ran = run_cli("search", tmp_path / "my.index", "flour", "--rerank", "2", "--rerank-by", "maxsim", "--json")
    assert ran.code == 0
    assert all("relevance" in json.loads(line) for line in ran.out.splitlines())
