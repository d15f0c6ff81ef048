"""``gerund.open_index``: from files to hits and answers, in a folder and in memory, and by whom it is searched."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund import Answer, Chunking, Document, Hit
from gerund.errors import ConfigError, DataError, FingerprintError, ModelError, TextError
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.retrieval.formats import Section
from gerund.retrieval.question_answering import NOTHING, coverage
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from tests.retrieval.helpers import NOTES, notes_index
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def index(bundled):
    return notes_index(bundled)


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return gerund.load(tiny_folder)


SMALL = Chunking(tokens=40)


def test_search_is_the_sum_of_both_rankings(index, bundled):
    query = "how is bread made"
    [hits] = index.search_all([query], 4)
    chunks = {one.source: one for one in index.store.chunks_of(list(NOTES))}
    words = {chunk.source: score for chunk, score in index.store.words(KeywordQuery(query), 100)}
    cosines = bundled.encode([one.text for one in chunks.values()]) @ bundled.encode(query)
    cosines = dict(zip(chunks, cosines.tolist(), strict=True))
    share = bundled.fusion_weight
    wanted = {one: (1 - share) * words.get(one, 0) / max(words.values()) + share * cosines[one] for one in chunks}
    assert [hit.source for hit in hits] == sorted(wanted, key=lambda one: -wanted[one])
    for rank, hit in enumerate(hits, start=1):
        assert (hit.rank, hit.text, hit.title) == (rank, NOTES[hit.source], f"About {hit.source}")
        assert hit.score == pytest.approx(wanted[hit.source], abs=1e-5)
        assert hit.words == (pytest.approx(words[hit.source]) if hit.source in words else None)
        assert hit.similarity == pytest.approx(cosines[hit.source], abs=1e-5)
    assert hits[0].source == "bread"


def test_modes_weights_and_several_queries(index):
    queries = ["steam railway", "nests of birds"]
    by_mode = {mode: index.search_all(queries, 4, mode=mode) for mode in ("words", "vectors", "hybrid")}
    for found in by_mode.values():
        assert [hits[0].source for hits in found] == ["rail", "birds"]
    assert all(hit.similarity is None and hit.score == hit.words for hit in by_mode["words"][0])
    assert all(hit.words is None and hit.score == hit.similarity for hit in by_mode["vectors"][0])
    for one, together in zip(queries, by_mode["hybrid"], strict=True):
        by_itself = index.search(one, 4)
        assert [hit.source for hit in by_itself] == [hit.source for hit in together]
        assert [hit.score for hit in by_itself] == pytest.approx([hit.score for hit in together], abs=1e-5)
    alone = index.search(queries[0], 4, weight=1)
    assert [hit.source for hit in alone] == [hit.source for hit in by_mode["vectors"][0]]
    assert len(index.search(queries[0], 2)) == 2


def test_filters_and_phrases(index):
    assert {hit.source for hit in index.search("bread", filter="source <> 'bread'")} == {"rail", "birds", "sea"}
    assert [hit.source for hit in index.search('"public railway"', mode="words")] == ["rail"]
    assert index.search('"railway public"', mode="words") == []
    assert [hit.source for hit in index.search('trains "public railway"')] == ["rail"]
    assert index.search('"railway public" bread') == []
    assert index.search('"public railway"', filter="source <> 'rail'") == []
    assert len(index.search('"?!" bread')) == 4
    assert len(index.search('"railway public"', mode="vectors")) == 4
    assert len(index.search("the of and", mode="words")) == 4  # stop words count where there is nothing else
    assert len(index.search("the of and zzz", mode="words")) == 0
    assert len(index.search("the of and")) == 4
    assert index.search("?!*(", mode="words") == []


def test_other_ways_to_ask_join_the_query(index, bundled, monkeypatch):
    monkeypatch.setattr(type(bundled), "expand", lambda _self, query, count: ["swallows", "nests"][:count])
    plain, expanded = index.search("zzz", mode="words"), index.search("zzz", mode="words", expand=2)
    assert plain == []
    assert [hit.source for hit in expanded] == ["birds"]
    assert index.search("zzz", 1, mode="vectors", expand=2)[0].source == "birds"


@pytest.mark.parametrize("by", [None, "lift", "likelihood", "model", "own", "vectors"])
def test_the_model_puts_the_first_into_a_new_order(index, bundled, by):
    plain = index.search("bread", 4)
    found = index.search("bread", 4, rerank=3, rerank_by=by)
    first = [hit.score for hit in plain[:3]]
    order = bundled.rerank("bread", [hit.text for hit in plain[:3]], by=by or "lift", scores=first).indices
    assert [hit.source for hit in found] == [*(plain[place].source for place in order), plain[3].source]
    assert [hit.rank for hit in found] == [1, 2, 3, 4]
    relevance = [hit.relevance for hit in found[:3]]
    assert relevance == sorted(relevance, reverse=True)
    assert [found[3].relevance, plain[0].relevance] == [None, None]
    assert index.search("?!", 4, mode="words", rerank=3, rerank_by=by) == []


def test_what_the_new_order_weighs_and_how_long_it_may_take(index):
    plain = index.search("bread", 4)
    kept = index.search("bread", 4, rerank=4, rerank_weight=0)
    assert [hit.source for hit in kept] == [hit.source for hit in plain]
    assert None not in [hit.relevance for hit in kept]
    assert (kept.rerank.offered, kept.rerank.read, kept.rerank.seconds > 0) == (4, 4, True)
    late = index.search("bread", 4, rerank=4, rerank_deadline=1e-9)
    assert (late.rerank.offered, late.rerank.read) == (4, 0)
    assert index.search("bread", 4).rerank is None
    assert [(hit.source, hit.relevance) for hit in late] == [(hit.source, None) for hit in plain]
    answer = index.ask("what is bread made of", rerank=3, rerank_by="lift", rerank_weight=0.5, rerank_deadline=60)
    assert (answer.rerank.by, answer.rerank.offered, answer.rerank.read) == ("lift", 3, 3)
    assert Answer.from_dict(answer.to_dict()) == answer
    assert index.ask("what is bread made of").rerank is None
    assert answer.found
    for given, words in (
        ({"rerank_weight": 2}, "rerank_weight must be at most 1"), ({"rerank_deadline": 0}, "rerank_deadline must be"),
        ({"rerank": 10_001}, "rerank must be at most 10000"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            index.search("bread", **given)
        with pytest.raises(ConfigError, match=words):
            index.ask("bread", **given)
    with pytest.raises(ConfigError, match="the weight is for mode=hybrid"):
        index.search("bread", mode="words", weight=0.5)


def test_a_new_order_that_the_model_does_not_know(tiny):
    other = gerund.open_index(None, tiny, chunking=SMALL)
    other.add_documents([Document("a", "One.")])
    with pytest.raises(ConfigError, match="was not trained to score"):
        other.search("one", rerank=1, rerank_by="own")
    with pytest.raises(ConfigError, match="likelihood"):
        other.search("one", rerank=1, rerank_by="magic")


def test_hits_and_answers_serialise(index):
    for hit in index.search("bread"):
        assert Hit.from_dict(json.loads(json.dumps(hit.to_dict()))) == hit
    answer = index.ask("When was the first railway opened?")
    assert Answer.from_dict(json.loads(json.dumps(answer.to_dict()))) == answer


def test_an_answer_is_a_sentence_of_a_source_as_it_stands_there(index):
    answer = index.ask("When was the first public railway opened?")
    assert answer.found
    assert answer.text == "The first public railway to use steam locomotives was opened in 1825."
    [number] = answer.cited
    source = answer.sources[number - 1]
    assert (source.number, source.source) == (number, "rail")
    assert NOTES["rail"][source.start : source.end] == source.text
    assert answer.text in source.text
    assert [one.number for one in answer.sources] == [1, 2, 3, 4]
    assert index.ask("What makes dough rise?").text == "Yeast makes the dough rise."


@pytest.mark.parametrize("question", ["Who is the king of Norway?", "zzz", "How do quarks bind gluons in hadrons?"])
def test_where_nothing_is_relevant_it_says_so(index, question):
    answer = index.ask(question)
    assert (answer.text, answer.found, answer.sources, answer.cited) == (NOTHING, False, [], [])
    assert index.ask("What is bread made of?", filter="source = 'nobody'").found is False


def test_coverage_is_that_of_one_chunk():
    hits = [Hit("a", 0, 9, "Steam and trains.", 1, 1), Hit("b", 0, 9, "A railway.", 1, 2, title="Opened")]
    assert coverage("steam railways opened", hits, "en") == pytest.approx(2 / 3)
    assert coverage("what is it", hits, "en") == 1.0
    assert coverage("steam", [], "en") == 0.0


@pytest.mark.parametrize("bad", ["", "  ", 5, None, "\ud800"])
def test_questions_that_are_none(index, bad):
    for ask in (index.search, index.ask):
        with pytest.raises(
            TextError, match=r"the (query|question) (is empty|is not valid)|a (query|question) must be a string"
        ):
            ask(bad)
    with pytest.raises(TextError, match="query 1 is"):
        index.search_all(["bread", bad])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 0}, "k=0 is not a number from 1 to 10000"),
        ({"k": 2.5}, "k is a whole number"),
        ({"rerank": -1}, "rerank must be at least 0, got -1"),
        ({"mode": "both"}, "unknown mode 'both'; valid are: hybrid, words, vectors"),
        ({"weight": 2}, "is not a number from 0"),
        ({"weight": "much"}, "the weight is a number"),
        ({"filter": ""}, "a filter is a condition in SQL"),
        ({"filter": "source = 'a' ADN tokens > 1000"}, "at character 14: 'ADN' is not expected there"),
        ({"filter": "nope = 1"}, "cannot be used: at character 1: there is no column nope"),
    ],
)
def test_settings_that_cannot_be(index, settings, message):
    with pytest.raises(ConfigError, match=message):
        index.search("bread", **settings)


def test_queries_are_a_list(index):
    with pytest.raises(TextError, match="queries are a list of texts"):
        index.search_all("bread")
    for mode in ("words", "vectors", "hybrid"):
        assert index.search_all([], mode=mode) == []


# ------------------------------------------------------------------------------------------------------ in a folder


@pytest.fixture
def notes(tmp_path):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, text in NOTES.items():
        (folder / f"{name}.md").write_text(f"# {name}\n\n{text}\n")
    return folder


def test_a_folder_is_indexed_opened_and_searched_with_the_model_that_it_names(notes, tiny_folder, tiny, tmp_path):
    place = tmp_path / "my.index"
    made = gerund.open_index(place, tiny_folder, chunking=SMALL)
    summary = made.add(notes)
    assert (summary.documents, summary.failed) == (4, [])
    opened = gerund.open_index(str(place))
    assert opened.chunking == SMALL
    assert len(opened) == len(made) == summary.chunks
    assert opened.search("steam", 1, mode="words")[0].source == "notes/rail.md"
    assert opened._lm is None  # words need no model
    hits = opened.search("steam", 3)
    assert opened.lm.fingerprint() == tiny.fingerprint()
    assert hits == gerund.open_index(place, tiny).search("steam", 3)
    assert hits[0].heading == "rail"
    assert opened.sources() == ["notes/birds.md", "notes/bread.md", "notes/rail.md", "notes/sea.md"]
    opened.remove("notes/sea.md")
    assert len(made.sources()) == 3


def test_another_encoder_is_refused_by_name(notes, tiny_folder, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = "my.index"
    gerund.open_index(place, tiny, chunking=SMALL).add(notes / "sea.md")
    other = gerund.load(tiny_folder, attention="causal")
    with pytest.raises(FingerprintError, match=r"^my\.index was made with .*\(mask0-bidir k=2.*-bidir, not causal"):
        gerund.open_index(place, other)
    lazily = gerund.open_index(place, other.spec)
    with pytest.raises(FingerprintError, match="migrate"):
        lazily.search("sea")
    with pytest.raises(ConfigError, match=r"is cut into chunks of 40 tokens, early, en, not 20 tokens, late, en"):
        gerund.open_index(place, tiny, chunking=Chunking(tokens=20, late=True))


def test_it_is_migrated_beside_and_swapped(notes, tiny_folder, tiny, tmp_path):
    place = tmp_path / "my.index"
    old = gerund.open_index(place, tiny, chunking=SMALL)
    old.add(notes)
    (notes / "sea.md").unlink()
    other = gerund.load(tiny_folder, attention="causal")
    index = gerund.open_index(place, other.spec)
    assert index.migrate(chunking=Chunking(tokens=20, late=True)) == 4
    assert index.about.fingerprint == other.fingerprint()
    assert index.chunking == Chunking(tokens=20, late=True)
    assert index.migrate() == 0
    assert any(hit.source == "notes/sea.md" for hit in index.search("waves", mode="words"))
    assert gerund.open_index(place, other).search("waves", 2) == index.search("waves", 2)
    assert index.add(notes, prune=True).removed == 1
    assert index.add(notes).unchanged == 3
    with pytest.raises(DataError, match="nothing to migrate"):
        gerund.open_index(tmp_path / "none", tiny).migrate()


def test_it_is_migrated_with_the_model_that_it_names(tiny_folder, tmp_path):
    other = gerund.load(tiny_folder, attention="causal", pooling="last")
    gerund.open_index(tmp_path / "my.index", other, chunking=SMALL).add_documents([Document("a", "One sentence.")])
    index = gerund.open_index(tmp_path / "my.index")
    assert index.migrate(chunking=Chunking(tokens=20)) == 1
    assert index.about.fingerprint == other.fingerprint()


def test_what_another_made_in_the_meantime_is_not_mixed(tiny, tmp_path):
    early, late, usual = (gerund.open_index(tmp_path / "my.index", tiny, chunking=cut) for cut in (SMALL, None, None))
    other = gerund.open_index(tmp_path / "my.index", tiny, chunking=Chunking(tokens=20, multi=1))
    writer, text = early._writer(), Document("b", "Steam locomotives.")
    other.add_documents([Document("a", "Bread is made of flour.")])
    with pytest.raises(ConfigError, match="is cut into chunks of 20 tokens, early, en, with token vectors, not 40"):
        writer.add_documents([text])
    for call in (lambda: early.add_documents([text]), lambda: early.search("bread")):
        with pytest.raises(ConfigError, match="not 40 tokens"):
            call()
    assert {hit.source for hit in late.search("bread")} == {"a"}
    assert usual.add_documents([text]).documents == 1
    assert usual.chunking == other.chunking
    assert {hit.source for hit in other.search("bread", rerank=3, rerank_by="maxsim")} == {"a", "b"}


def test_the_weight_is_the_encoders_own(notes, tiny_folder, tmp_path):
    lm = gerund.load(tiny_folder, fusion=0.8)
    index = gerund.open_index(tmp_path / "my.index", lm, chunking=SMALL)
    index.add(notes)
    assert index.search("steam") == index.search("steam", weight=0.8) != index.search("steam", weight=0.3)
    assert gerund.open_index(tmp_path / "my.index").search("steam") == index.search("steam")
    # It is no part of the encoder: the same index, another weight.
    other = gerund.open_index(tmp_path / "my.index", lm.with_encoder(replace(lm.encoder, fusion=None)))
    assert other.search("steam") == index.search("steam", weight=0.2) != index.search("steam", weight=0.5)


def test_the_weight_that_a_model_is_tuned_to_later_is_found(notes, tiny, tmp_path):
    tiny.save(tmp_path / "model")
    gerund.open_index(tmp_path / "my.index", gerund.load(tmp_path / "model"), chunking=SMALL).add(notes)
    usual = gerund.open_index(tmp_path / "my.index").search("steam")
    settings = tmp_path / "model" / "gerund.json"
    said = json.loads(settings.read_text())
    said["encoder"]["fusion"] = 0.9
    settings.write_text(json.dumps(said))
    index = gerund.open_index(tmp_path / "my.index")
    assert index.search("steam") == index.search("steam", weight=0.9) != usual


def test_a_model_in_memory_has_to_be_given_again(notes, tiny, tmp_path):
    lm = gerund.LanguageModel(tiny.model, tiny.tokenizer, tiny.encoder)
    gerund.open_index(tmp_path / "my.index", lm, chunking=SMALL).add(notes)
    with pytest.raises(ConfigError, match=r"was made with a model in memory .*open it with that model"):
        gerund.open_index(tmp_path / "my.index").search("sea")
    assert gerund.open_index(tmp_path / "my.index", lm).search("sea")


def test_what_is_no_index_model_or_document(tiny, tmp_path):
    index = gerund.open_index(tmp_path / "my.index", tiny, chunking=SMALL)
    for search in (index.search, index.ask):
        with pytest.raises(DataError, match="there is no index yet; add documents first"):
            search("bread")
    assert not (tmp_path / "my.index").exists()
    with pytest.raises(DataError, match="no such file or folder"):
        index.add(tmp_path / "nowhere")
    (tmp_path / "broken.pdf").write_text("x")
    with pytest.raises(DataError, match=r"no file could be read: .*broken\.pdf: not a readable PDF"):
        index.add(tmp_path / "broken.pdf")
    assert not (tmp_path / "my.index").exists()  # a slip makes no index of nothing
    assert index.about is None
    for make, message in {
        lambda: gerund.open_index("a\0b", tiny): "NUL",
        lambda: gerund.open_index(5, tiny): "`where` must be a folder, a store or None, got 5",
        lambda: gerund.open_index(None, 5): "`lm` must be a model of",
        lambda: gerund.open_index(None, tiny, chunking=64): "`chunking` must be a Chunking",
        lambda: gerund.open_index(None, tiny, chunking=SMALL).add_documents(["text"]): "`documents` must be Documents",
    }.items():
        with pytest.raises(ConfigError, match=message):
            make()
    with pytest.raises(ConfigError, match="chunks of 128 tokens do not fit"):
        gerund.open_index(tmp_path / "other.index", tiny).add_documents([Document("a", "One.")])
    assert not (tmp_path / "other.index").exists()


@pytest.mark.parametrize(
    "document",
    [
        Document("\udc80", "text"), Document("a\0b", "text"), Document(5, "text"), Document("a", None),
        Document("a", "text", title=5), Document("a", "\udc80"),
        Document("a", "x", sections=(Section(0, ("\udc80",)),)),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_stored(index, document):
    with pytest.raises(TextError, match="document"):
        index.add_documents([document])
    assert index.document(document.source if document.source != "a" else "x\0y") is None


def test_the_model_is_found_from_another_folder(notes, tiny_folder, tmp_path, monkeypatch):
    shutil.copytree(tiny_folder, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path / "models")
    place = tmp_path / "my.index"
    gerund.open_index(place, "tiny", chunking=SMALL).add(notes)
    monkeypatch.chdir(tmp_path)
    assert gerund.open_index(place).search("waves", 1)
    assert gerund.open_index(place, "models/tiny").add(notes).unchanged == 4
    (tmp_path / "models" / "tiny").rename(tmp_path / "moved")
    with pytest.raises(
        ModelError, match=r"the model of .*my\.index cannot be loaded: .*name it where it is now \(-m, lm=\)"
    ):
        gerund.open_index(place).search("waves", 1)
    assert gerund.open_index(place, "moved").search("waves", 1)


DOCUMENTS = [gerund.Document("bread", "Bread is made of flour."), gerund.Document("rail", "Trains need rails.")]


def student(folder: Path, teacher: gerund.LanguageModel, seed: int, dimensions: int | None = None):
    """A model that declares its teacher's space."""
    base = gerund.load(save_tiny(folder / f"base{seed}", "llama"))
    torch.manual_seed(seed)
    settings = HeadConfig(
        base.runtime.state_width, dimensions or teacher.dimensions, "linear", space=teacher.fingerprint()
    )
    base.save(folder / f"student{seed}")
    ProjectionHead(settings).save(folder / f"student{seed}")
    return gerund.load(folder / f"student{seed}")


@pytest.fixture
def teacher(tmp_path):
    return gerund.load(save_tiny(tmp_path / "teacher", "gpt2"), attention="causal")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a folder"])
def test_student_and_teacher_search_each_other_s_index(tmp_path, teacher, kept):
    if kept:
        pytest.importorskip("lancedb")
    one, other = student(tmp_path, teacher, 1), student(tmp_path, teacher, 2)
    assert one.space == other.space == teacher.space == teacher.fingerprint()
    assert len({one.fingerprint(), other.fingerprint(), teacher.fingerprint()}) == 3
    for number, maker in enumerate((teacher, one)):
        where = tmp_path / f"{number}.index" if kept else None
        index = gerund.open_index(where, maker, chunking=Chunking(tokens=16))
        index.add_documents(DOCUMENTS)
        for searcher in (teacher, one, other):
            opened = gerund.open_index(index.store if where is None else where, searcher)
            hits = opened.search("flour", k=2, mode="vectors")
            wanted = maker.encode([hit.text for hit in hits]) @ searcher.encode("flour")
            assert [hit.similarity for hit in hits] == pytest.approx(wanted.tolist(), abs=2e-3)


def test_documents_are_added_by_the_maker_alone(tmp_path, teacher):
    index = gerund.open_index(None, teacher, chunking=Chunking(tokens=16))
    index.add_documents(DOCUMENTS)
    opened = gerund.open_index(index.store, student(tmp_path, teacher, 1))
    with pytest.raises(FingerprintError, match="may search it"):
        opened.add_documents(DOCUMENTS)


def test_others_are_refused(tmp_path, teacher):
    index = gerund.open_index(None, teacher, chunking=Chunking(tokens=16))
    index.add_documents(DOCUMENTS)
    stranger = gerund.load(save_tiny(tmp_path / "stranger", "gpt2"), attention="bidir")
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, stranger)
    with pytest.raises(FingerprintError, match="was made with"):
        gerund.open_index(index.store, student(tmp_path, teacher, 3, dimensions=teacher.dimensions - 1))


@pytest.mark.slow
def test_the_space_is_no_longer_declared_when_the_vectors_are_others(tmp_path, teacher):
    found = student(tmp_path, teacher, 1)
    again = gerund.load(tmp_path / "student1", pooling="last")
    assert not np.allclose(found.encode("flour"), again.encode("flour"))
    assert again.space == again.fingerprint() != teacher.fingerprint()
    another = gerund.load(tmp_path / "student1", prompt="passage: ")
    assert another.space == another.fingerprint()
    assert found.with_encoder(another.encoder).space != teacher.fingerprint()


def test_indices_of_earlier_versions_are_read():
    chunking = Chunking()
    about = IndexMetadata("f", "m", 3, "causal, mean", chunking, None, "s")
    assert IndexMetadata.from_json(about.to_json(), "it") == about
    earlier = about.to_json().replace(', "space": "s"', "")
    assert IndexMetadata.from_json(earlier, "it").space == ""
