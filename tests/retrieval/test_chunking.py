"""Chunks against their definition, late vectors against one pass, and what an engine's workers embed."""

import warnings

import numpy as np
import pytest

import gerund
from gerund import Chunking, Document
from gerund.errors import ConfigError
from gerund.inference.text_ids import encode_texts
from gerund.jobs.engine import LocalEngine
from gerund.retrieval import embedding
from gerund.retrieval.documents import cut, rebuilt
from gerund.retrieval.embedding import Embedder, embedded_by, embedding_pool, shards_of
from gerund.retrieval.formats import Section, markdown
from gerund.retrieval.indexing import migrate_index
from gerund.worker_model import WorkerModel
from tests.jobs.pickled import PickledEngine

TEXT = (
    "Bread is old. It is made of flour, water and salt.\n\nYeast is a fungus! Does it eat? Yes.\n"
    "# Rails\nTrains run on rails. They are of steel.\r\n\r\n  A third thing, and it is long: "
    + "very " * 30
    + "long. End."
)


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


def tokens_of(lm, text):
    return len(encode_texts(lm.tokenizer, [text], specials=False)[0].ids)


@pytest.mark.parametrize("budget", [1, 5, 17, 40, 1000])
def test_every_character_is_in_one_chunk_and_chunks_keep_to_the_budget(lm, budget):
    document = Document("a", TEXT, "T", (Section(TEXT.index("# Rails"), ("Rails",)),), "f.md")
    chunks = cut(document, lm.tokenizer, Chunking(tokens=budget))
    assert [one.number for one in chunks] == list(range(len(chunks)))
    place = 0
    for one in chunks:
        assert one.text == TEXT[one.start : one.end] == one.text.strip()
        assert not TEXT[place : one.start].strip()
        assert one.tokens <= budget
        assert tokens_of(lm, one.text) <= budget + 1  # where a sentence is cut, its tokens may be others
        place = one.end
        assert (one.source, one.title, one.file, one.digest) == ("a", "T", "f.md", document.digest)
    assert not TEXT[place:].strip()
    border = TEXT.index("# Rails")
    assert all(one.end <= border or one.start >= border for one in chunks)
    assert [one.heading for one in chunks] == ["Rails" if one.start >= border else "" for one in chunks]


def test_chunks_are_whole_sentences_as_many_as_fit(lm):
    text = "One two. Three four. Five six. Seven."
    sizes = [tokens_of(lm, one) for one in ("One two. ", "Three four. ", "Five six. ", "Seven.")]
    chunks = cut(Document("a", text), lm.tokenizer, Chunking(tokens=sizes[0] + sizes[1]))
    assert [one.text for one in chunks] == ["One two. Three four.", "Five six. Seven."]
    chunks = cut(Document("a", text), lm.tokenizer, Chunking(tokens=sizes[0] + sizes[1] - 1))
    assert [one.text for one in chunks] == ["One two.", "Three four.", "Five six. Seven."]


def test_a_long_sentence_is_cut_between_words_and_a_long_word_between_characters(lm):
    words = cut(Document("a", "alpha beta gamma delta"), lm.tokenizer, Chunking(tokens=12))
    assert [one.text for one in words] == ["alpha beta", "gamma delta"]
    letters = cut(Document("a", "x" * 25), lm.tokenizer, Chunking(tokens=10))
    assert [len(one.text) for one in letters] == [10, 10, 5]
    # Several tokens of one character are not divided, whatever the budget.
    signs = cut(Document("a", "😀😀"), lm.tokenizer, Chunking(tokens=1))
    assert "".join(one.text for one in signs) == "😀😀"


@pytest.mark.parametrize("text", ["", " \n ", "\n\n"])
def test_nothing_to_cut(lm, text):
    assert cut(Document("a", text), lm.tokenizer, Chunking()) == []


def test_a_document_is_rebuilt_with_every_offset(lm):
    notes = markdown("## Note\n\nOne.\n\n## Note\n\nTwo.\n")
    again = rebuilt(cut(Document("a", notes.text, "", notes.sections), lm.tokenizer, Chunking(tokens=15)))
    assert [section.path for section in again.sections] == [("Note",)] * 2
    sections = (Section(0, ("Top",)), Section(TEXT.index("# Rails"), ("Top", "Rails")))
    document = Document("a", TEXT, "T", sections, "f")
    chunks = cut(document, lm.tokenizer, Chunking(tokens=15))
    again = rebuilt(chunks)
    assert again.text.split() == TEXT.rstrip().split()
    assert (again.source, again.title, again.sections, again.file) == ("a", "T", sections, "f")
    other = cut(again, lm.tokenizer, Chunking(tokens=40))
    assert all(TEXT[one.start : one.end].split() == one.text.split() for one in other)


def test_early_chunks_are_texts_of_their_own(lm):
    chunks = [
        cut(Document(name, "One two. Three four. Five.", "T"), lm.tokenizer, Chunking(tokens=12)) for name in "ab"
    ]
    found = Embedder(lm, Chunking(tokens=12)).chunks(chunks)
    assert found == pytest.approx(lm.encode([one.text for own in chunks for one in own]), abs=1e-6)
    with_title = Embedder(lm, Chunking(tokens=12, context=True)).chunks(chunks)
    assert with_title == pytest.approx(lm.encode([f"T\n{one.text}" for own in chunks for one in own]), abs=1e-6)


def test_late_chunks_are_pooled_from_one_pass(lm):
    text = "One two. Three four. Five."
    chunks = cut(Document("a", text, "T"), lm.tokenizer, Chunking(tokens=12))
    assert len(chunks) > 1
    found = Embedder(lm, Chunking(tokens=12, late=True)).chunks([chunks, chunks])
    [wanted] = lm.encode_spans([text], [[(one.start, one.end) for one in chunks]])
    assert found == pytest.approx(np.concatenate([wanted, wanted]), abs=1e-5)
    with_title = Embedder(lm, Chunking(tokens=12, late=True, context=True)).chunks([chunks])
    [wanted] = lm.encode_spans([f"T\n{text}"], [[(one.start + 2, one.end + 2) for one in chunks]])
    assert with_title == pytest.approx(wanted, abs=1e-5)
    assert not np.allclose(found[: len(chunks)], Embedder(lm, Chunking(tokens=12)).chunks([chunks]), atol=1e-3)
    assert Embedder(lm, Chunking(tokens=12, late=True)).chunks([]).shape == (0, lm.dimensions)


@pytest.mark.parametrize("context", [False, True])
def test_a_long_document_is_read_in_windows_that_overlap_by_a_chunk(lm, context):
    text = " ".join(f"Sentence {place} is here." for place in range(30))  # far more than the 64 tokens of the model
    document = Document("a", text, "A title")
    chunks = cut(document, lm.tokenizer, Chunking(tokens=22))
    embedder = Embedder(lm, Chunking(tokens=22, late=True, context=context))
    windows = list(embedder._windows(chunks))
    assert len(windows) > 3
    assert [one.repeated for one in windows] == [0] + [1] * (len(windows) - 1)
    seen = [one.text[a:b] for one in windows for a, b in one.spans[one.repeated :]]
    assert seen == [one.text for one in chunks]
    assert all(one.text.startswith("A title\n") == context for one in windows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is cut off
        found = embedder.chunks([chunks])
    wanted = [lm.encode_spans([one.text], [one.spans])[0][one.repeated :] for one in windows]
    assert found == pytest.approx(np.concatenate(wanted), abs=1e-5)
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(chunks)))


def test_chunks_too_large_to_overlap_stand_alone(lm):
    chunks = cut(Document("a", " ".join(["x" * 48] * 3)), lm.tokenizer, Chunking(tokens=50))
    windows = list(Embedder(lm, Chunking(tokens=50, late=True))._windows(chunks))
    assert [(len(one.spans), one.repeated) for one in windows] == [(1, 0)] * len(chunks)


def test_prompts_of_the_encoder_go_before_queries_and_documents(tiny_folder):
    from dataclasses import replace

    lm = gerund.load(tiny_folder, dtype="float32")
    lm = lm.with_encoder(replace(lm.encoder, prompts={"query": "Q: ", "document": "D: "}))
    embedder = Embedder(lm, Chunking(tokens=20))
    assert embedder.queries(["one"]) == pytest.approx(lm.encode(["one"], prompt="Q: "))
    assert embedder.sentences(["one"]) == pytest.approx(lm.encode(["one"], prompt="D: "))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, "`tokens` must be at least 1, got 0"),
        ({"tokens": 2.5}, "tokens is a whole number, not 2.5"),
        ({"late": "yes"}, "late is True or False"),
        ({"language": "en/../x"}, "is not a language code such as en"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Chunking(**settings)


@pytest.mark.slow
def test_chunks_that_the_model_cannot_read(lm):
    with pytest.raises(ConfigError, match=r"chunks of 200 tokens do not fit .* room for \d+; choose smaller ones"):
        Embedder(lm, Chunking(tokens=200))
    with pytest.raises(ConfigError, match="no chunk can be pooled from one pass; embed chunks early"):
        Embedder(gerund.load(template="metaeol"), Chunking(late=True))


DOCUMENTS = [Document(f"note {i}", f"The cat number {i} sat on the mat. " * (1 + i % 5), f"Cat {i}") for i in range(20)]


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
    [(LocalEngine(1), False), (PickledEngine(2), True), pytest.param(LocalEngine(2), False, marks=pytest.mark.full)],
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
