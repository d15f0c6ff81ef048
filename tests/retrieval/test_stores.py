"""Both stores against each other and against what a query means, written out."""

import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.retrieval.documents import Chunking
from gerund.retrieval.hybrid_search import hybrid_rankings, with_phrases
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from tests.retrieval.helpers import ABOUT, DIMENSIONS, chunk, sources, stored, vector_of

TEXTS = {
    "bread": "Bread is baked of flour and water.",
    "rail": "The first public railway was opened for steam locomotives.",
    "sea": "Steam rose from the warm sea, and swallows were nesting near it.",
    "it's": "What's quoted isn't lost.",
}


@pytest.fixture(params=["lance", "memory"])
def store(request, tmp_path):
    found = LanceStore(tmp_path / "my.index") if request.param == "lance" else MemoryStore()
    assert found.about() is None
    assert (found.count(), found.documents(), found.files()) == (0, {}, {})
    found.create(ABOUT)
    return found


@pytest.fixture
def filled(store):
    stored(store, [chunk(source, text) for source, text in TEXTS.items()])
    return store


@pytest.fixture
def both(tmp_path):
    return LanceStore(tmp_path / "my.index"), MemoryStore()


def fill(store, texts, about=ABOUT):
    store.create(about)
    stored(store, [chunk(source, text) for source, text in texts.items()])


def by_words(store, query, limit=20, where=None):
    """Return the documents that a query finds."""
    return sources(store.words(KeywordQuery.of(query), limit, where))


def cosines_of(texts, query):
    return pytest.approx([float(vector_of(text) @ query) for text in texts])


def test_metadata_and_chunks_come_back_unchanged(store):
    assert store.about() == ABOUT
    store.create(IndexMetadata("another", "m", 3, "x", Chunking(5)))  # there is one
    assert store.about() == ABOUT
    chunks = [chunk("a", "One.", title="T", heading="H > I"), chunk("a", "Two.", 1), chunk("b", "Three's")]
    stored(store, chunks)
    assert store.chunks_of(["b", "a"]) == chunks
    assert store.count() == 3
    assert {source: (one.digest, one.file) for source, one in store.documents().items()} == {
        "a": ("hash of One.", "a.txt"),
        "b": ("hash of Three's", "b.txt"),
    }


def test_a_document_is_replaced_whole(filled):
    stored(filled, [chunk("rail", "Trains."), chunk("rail", "More trains.", 1), chunk("new", "New.")])
    assert filled.count() == 6
    assert [one.text for one in filled.chunks_of(["rail"])] == ["Trains.", "More trains."]
    assert by_words(filled, "railway", 5) == []
    stored(filled, [chunk("rail", "Fewer trains.")])
    assert [one.text for one in filled.chunks_of(["rail"])] == ["Fewer trains."]
    filled.replace(["rail", "it's", "unknown"], [], np.zeros((0, 0), dtype=np.float32))
    assert sorted(filled.documents()) == ["bread", "new", "sea"]
    assert filled.vectors(vector_of("Fewer trains."), 1)[0][0].source != "rail"


def test_files_are_noted_and_forgotten(store):
    store.note_files({"a": "1", "it's": "2"})
    store.note_files({"a": "3", "it's": None})
    assert store.files() == {"a": "3"}


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("flour", ["bread"]),
        ("swallow nests", ["sea"]),  # stems
        ('"public railway"', ["rail"]),
        ('"railway public"', []),
        ('"public railway" swallows', ["rail"]),
        ("zebra", []),
        ("", []),
        ('"', []),
        ("( OR ) AND -x :*", []),
        ("flour)(", ["bread"]),
        ("flour: +AND", ["bread"]),
    ],
)
def test_words(filled, query, wanted):
    assert by_words(filled, query, 5) == wanted


STOP_WORDS = {
    "flour": "Bread is made of flour. It is baked in ovens.",
    "who": "The band The Who played in Leeds.",
    "leeds": "Who played in Leeds? The band that is the best.",
    "code": "Use foo_bar(x) and C++ or don't.",
    "long": "To be or not to be, that is the question.",
}


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ('"made of flour"', ["flour"]),
        ('"made in flour"', []),  # neither here nor there, though "in" stands between other words
        ('"making of flours"', []),  # "made" and "making" have other stems
        ('"baking in oven"', ["flour"]),
        ('"flour of"', []),
        ('"The Who"', ["who"]),
        ("“the who”", ["who"]),
        ('"to be or not to be"', ["long"]),
        ('"be to or not to be"', []),
        ('"don\'t"', ["code"]),
        ('"is the"', ["leeds", "long"]),
        ('"is the" question', ["long", "leeds"]),  # a word beside a phrase is a wish
        ('"is the" "band that"', ["leeds"]),
        ('"is the" "in Leeds" "the band"', ["leeds"]),
        ('"played in Leeds" "?!"', ["leeds", "who"]),
        ('"the zebra" flour', []),
    ],
)
def test_stop_words_count_in_phrases(store, query, wanted):
    stored(store, [chunk(source, text) for source, text in STOP_WORDS.items()])
    store.tidy()
    found = store.words(KeywordQuery.of(query), 9)
    assert sorted(sources(found)) == sorted(wanted)
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    if wanted and query.endswith("question"):
        assert sources(found) == wanted
    told, cosines = store.words_with_cosines(KeywordQuery.of(query), vector_of("x"), 9)
    assert (sources(told), len(cosines)) == (sources(found), len(found))
    assert cosines == cosines_of([chunk.text for chunk, _ in told], vector_of("x"))
    assert set(sources(store.words(KeywordQuery.of(query), 9, "source = 'who' OR false"))) == {"who"} & set(wanted)
    assert len(store.words(KeywordQuery.of(query), 1)) == min(1, len(wanted))


def test_a_phrase_is_looked_for_behind_what_only_looks_like_it(store):
    # Shorter texts come first, and none of them has the phrase.
    others = [chunk(f"d{place}", "made in flour") for place in range(30)]
    stored(store, [*others, chunk("bread", "Of all that there is in the house bread alone is made of flour.")])
    assert by_words(store, '"made of flour"', 2) == ["bread"]


SCRIPTS = {
    "zh": "中国的首都是北京。", "ja": "日本の首都は東京です。", "ko": "서울은 대한민국의 수도이다.",
    "th": "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", "nfd": unicodedata.normalize("NFD", "Ein Bericht über Genève."),
    "soft": "The photo\u00adsynthesis of plants.", "zero": "A chromato\u200bgraphy column.",
    "ligature": "The ef\ufb01ciency of it.", "line": "The reor-\nganisation of it.", "half": "A well-\nknown man.",
    "hash": "key " + "0123456789abcdef" * 4, "compound": "Donaudampfschifffahrtselektrizitätenhauptbetriebswerk",
    "who": "The band The Who.", "ru": "Москва́ является столицей.",
}  # fmt: skip


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("北京", ["zh"]),
        ("首都", ["ja", "zh"]),
        ("京", ["ja", "zh"]),  # a character that is a word
        ('"国的首都"', ["zh"]),
        ('"都首的国"', []),
        ("서울", ["ko"]),
        ("수도는", ["ko"]),
        ("เมืองหลวง", ["th"]),
        ("столица Москвы", ["ru"]),
        ("Genève", ["nfd"]),
        (unicodedata.normalize("NFD", "Genève"), ["nfd"]),
        ("photosynthesis", ["soft"]),
        ("chromatography", ["zero"]),
        ("efficiency", ["ligature"]),
        ("reorganisation", ["line"]),
        ("well-known", ["half"]),
        ("0123456789abcdef" * 4, ["hash"]),
        ("donaudampfschifffahrtselektrizitätenhauptbetriebswerk", ["compound"]),
        ("中国的 zebra 什么", ["zh"]),
        ('"The Who"', ["who"]),
    ],
)
def test_words_of_any_script_are_found_in_an_index_of_the_default_language(store, query, wanted):
    stored(store, [chunk(source, text) for source, text in SCRIPTS.items()])
    store.tidy()
    assert sorted(by_words(store, query, 20)) == wanted


def test_a_query_of_stop_words_alone_finds_what_has_most_of_them(store):
    stored(store, [chunk(source, text) for source, text in STOP_WORDS.items()])
    assert by_words(store, "The Who", 9)[0] in ("who", "leeds")
    assert by_words(store, "to be or not to be", 9)[0] == "long"
    assert by_words(store, "who is that zebra", 9) == []  # beside a word they are nothing


def test_both_rank_by_the_same_words(both):
    for store in both:
        fill(store, {**SCRIPTS, **STOP_WORDS, **TEXTS})
    for query in ("the first railway of steam", "首都是北京", "Who is in Leeds", "flour flour water"):
        lance, memory = (by_words(store, query) for store in both)
        assert (set(lance), lance[0]) == (set(memory), memory[0])


def test_words_and_phrases_in_another_language(both):
    about = IndexMetadata("f", "m", DIMENSIONS, "causal, mean", Chunking(language="de"))
    texts = {"see": "Die alten Häuser am See.", "der": "Der Hund bellt.", "sein": "Sein oder nicht sein."}
    texts |= {"ein": "Ein Hund bellt, und nicht der."}
    queries = {"des Hauses": ["see"], "die am": ["see"]}
    queries |= {'"der Hund"': ["der"], '"nicht der"': ["ein"], '"oder nicht"': ["sein"]}
    for store in both:
        fill(store, texts, about)
        assert {query: by_words(store, query) for query in queries} == queries


def test_words_are_found_in_title_and_heading_too(store):
    stored(store, [chunk("a", "It is dark.", title="Rye", heading="Bread > Sour dough"), chunk("b", "Nothing here.")])
    assert [by_words(store, word, 5) for word in ("rye", "sour", "dark")] == [["a"]] * 3


def test_words_rank_by_bm25_and_come_with_the_cosines_of_their_chunks(filled):
    matches = filled.words(KeywordQuery("steam locomotives"), 5)
    assert sources(matches) == ["rail", "sea"]
    assert matches[0][1] > matches[1][1] > 0
    assert by_words(filled, "steam locomotives", 1) == ["rail"]
    query = vector_of("anything")
    found, cosines = filled.words_with_cosines(KeywordQuery("steam locomotives"), query, 5)
    assert found == matches
    assert cosines == cosines_of([TEXTS[source] for source in sources(found)], query)
    filtered = filled.words_with_cosines(KeywordQuery("steam"), query, 5, "source = 'sea'")
    assert (sources(filtered[0]), len(filtered[1])) == (["sea"], 1)
    for unknown in ("?!", "unheard"):
        assert filled.words_with_cosines(KeywordQuery(unknown), query, 5) == ([], [])


def test_what_words_alone_find_is_joined_with_its_cosine(filled):
    query = vector_of(TEXTS["bread"])
    words, both = hybrid_rankings(filled, ["steam locomotives"], query[None], 1, None)
    assert (sources(words), sources(both)) == (["rail"], ["bread", "rail"])
    assert [score for _, score in both] == pytest.approx([1.0, float(vector_of(TEXTS["rail"]) @ query)], abs=1e-6)
    assert hybrid_rankings(filled, ["steam locomotives"], 0 * query[None], 1, None) == (words, [])


def test_vectors_are_ranked_by_their_cosine(filled):
    query = vector_of("anything")
    wanted = sorted(TEXTS, key=lambda source: -float(vector_of(TEXTS[source]) @ query))
    found = filled.vectors(query, 4)
    assert sources(found) == wanted
    assert [score for _, score in found] == pytest.approx([float(vector_of(TEXTS[one]) @ query) for one in wanted])
    assert sources(filled.vectors(query, 2)) == wanted[:2]


@pytest.mark.parametrize("kind", ["lance", "memory"])
@pytest.mark.parametrize("precision", ["float16", "binary"])
@pytest.mark.parametrize("dimensions", [16, 19])  # of the last byte of 19 bits five are empty
def test_small_vectors_are_ranked_as_written_out(tmp_path, kind, precision, dimensions):
    about = IndexMetadata("f", "m", dimensions, "causal, mean", Chunking(precision=precision))
    store = LanceStore(tmp_path / "my.index") if kind == "lance" else MemoryStore()
    store.create(about)
    assert store.about() == about
    rng = np.random.default_rng(0)
    exact, query = rng.normal(size=(40, dimensions)), rng.normal(size=dimensions)
    exact, query = exact / np.linalg.norm(exact, axis=1, keepdims=True), query / np.linalg.norm(query)
    chunks = [chunk(f"d{place}", f"Text {place}.") for place in range(40)]
    store.replace([one.source for one in chunks], chunks, exact.astype(np.float32))
    kept = np.sign(exact) / np.sqrt(dimensions) if precision == "binary" else exact.astype(np.float16)
    found = store.vectors(query.astype(np.float32), 10)  # forty are looked at again: all of them
    order = sorted(range(40), key=lambda place: -float(kept[place] @ query))[:10]
    assert sources(found) == [f"d{place}" for place in order]
    tolerance = 1e-6 if precision == "binary" else 2e-3
    assert [score for _, score in found] == pytest.approx([float(kept[one] @ query) for one in order], abs=tolerance)
    told = store.words_with_cosines(KeywordQuery("text"), query.astype(np.float32), 5)
    assert told[0] == store.words(KeywordQuery("text"), 5)
    places = [int(one.source[1:]) for one, _ in told[0]]
    assert told[1] == pytest.approx([float(kept[one] @ query) for one in places], abs=tolerance)
    assert sources(store.vectors(query.astype(np.float32), 40, "source = 'd7'")) == ["d7"]
    store.replace(["d7"], [chunk("d7", "Anew.")], -exact[7:8].astype(np.float32))
    [(_, score)] = store.vectors(query.astype(np.float32), 1, "source = 'd7'")
    assert score == pytest.approx(-float(kept[7] @ query), abs=tolerance)


def test_only_the_nearest_by_their_bits_are_looked_at_again(tmp_path):
    rng = np.random.default_rng(1)
    exact, query = rng.normal(size=(200, 32)).astype(np.float32), rng.normal(size=32).astype(np.float32)
    near = np.argsort((np.signbit(exact) != np.signbit(query)).sum(axis=1), kind="stable")[:8].tolist()
    wanted = sorted(near, key=lambda place: -float(np.sign(exact[place]) @ query))[:2]
    store = MemoryStore()
    store.create(IndexMetadata("f", "m", 32, "causal, mean", Chunking(precision="binary")))
    chunks = [chunk(f"d{place}", f"Text {place}.") for place in range(200)]
    store.replace([one.source for one in chunks], chunks, exact)
    assert sources(store.vectors(query, 2)) == [f"d{place}" for place in wanted]


@pytest.mark.parametrize("where", ["nope = 3", "source =", "1); DROP TABLE chunks; --", "("])
def test_filters_that_cannot_be_used(filled, where):
    for search in (
        lambda: filled.words(KeywordQuery("steam"), 3, where),
        lambda: filled.vectors(vector_of("x"), 3, where),
    ):
        with pytest.raises(ConfigError, match="its columns are source, file"):
            search()
    assert filled.count() == 4


def test_another_takes_its_place_in_one_step(filled):
    filled.note_files({"a": "1"})
    about = IndexMetadata("other", "another model", 3, "bidir, mean", Chunking(9))
    other = filled.create_successor(about)
    other.replace(["new"], [chunk("new", "New text.")], np.eye(3, dtype=np.float32)[:1])
    assert (filled.about(), filled.count()) == (ABOUT, 4)
    filled.swap(other)
    assert (filled.about(), filled.count(), filled.files()) == (about, 1, {})
    assert by_words(filled, "text", 3) == ["new"]
    assert sources(filled.vectors(np.eye(3, dtype=np.float32)[0], 3)) == ["new"]


def test_both_find_the_same_by_vectors_of_many(both):
    chunks = [chunk(f"d{place}", f"word{place % 7} number {place}") for place in range(300)]
    for store in both:
        store.create(ABOUT)
        stored(store, chunks[:200])
        store.tidy()
        stored(store, chunks[150:])  # some again, some that no index has yet
    for query in ("a", "b", "c"):
        lance, memory = (sources(store.vectors(vector_of(query), 20)) for store in both)
        assert lance == memory
    lance, memory = (set(by_words(store, "word3 word5", 300)) for store in both)
    assert lance == memory


def test_threads_that_share_a_store_write_one_after_the_other(store):
    chunks = [chunk(f"d{place}", f"text {place}") for place in range(5)]
    all_there, failed = threading.Barrier(4), []

    def write():
        try:
            all_there.wait(30)
            stored(store, chunks)
        except Exception as error:
            failed.append(error)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(write)
    assert failed == []
    assert (store.count(), len(store.chunks_of(["d1"]))) == (5, 1)
    stored(store, [chunk("d1", "changed")])
    assert [one.text for one in store.chunks_of(["d1"])] == ["changed"]


def test_an_interruption_leaves_the_old_chunks_in_memory(monkeypatch):
    store = MemoryStore()
    fill(store, TEXTS)
    before = store.vectors(vector_of("steam"), 9)

    def interrupted(*_values):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gerund.retrieval.memory_store.astuple", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stored(store, [chunk("bread", "changed"), chunk("new", "added")])
    assert store.vectors(vector_of("steam"), 9) == before
    assert store.words_with_cosines(KeywordQuery("bread"), vector_of("steam"), 9)[0][0][0].text == TEXTS["bread"]
    assert "new" not in store.documents()


def test_a_search_in_memory_holds_off_writers(monkeypatch):
    store = MemoryStore()
    fill(store, TEXTS)
    fetch, others = store._fetch, []

    def while_another_writes(*arguments):
        if not others:
            others.append(threading.Thread(target=lambda: stored(store, [chunk("sea", "changed")])))
            others[0].start()
            others[0].join(0.05)
        return fetch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_fetch", while_another_writes)
        matches = store.vectors(vector_of("steam"), 9)
        others[0].join()
    assert {one.text for one, _ in matches} == set(TEXTS.values())
    assert store.chunks_of(["sea"])[0].text == "changed"


def test_phrases_hold_for_what_vectors_found(filled):
    found = filled.vectors(vector_of("steam"), 4)
    assert len(found) == 4
    kept = partial(with_phrases, filled, matches=found)
    assert sources(kept("steam", where=None)) == sources(found)
    assert sources(kept('steam "public railway"', where=None)) == ["rail"]
    assert sources(kept('"public railway"', where="source <> 'rail'")) == []
    assert sources(kept('"railway public"', where=None)) == []
    assert sources(kept('"?!"', where=None)) == sources(found)
