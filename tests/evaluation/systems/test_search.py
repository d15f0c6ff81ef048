"""BM25 against its formula, and as MTEB's retrieval protocol wants it."""

import unicodedata
from collections import Counter
from math import log

import numpy as np
import pytest
from datasets import Dataset

import gerund
from gerund import Chunking, Document
from gerund.errors import ConfigError
from gerund.evaluation.run import evaluate, key_of
from gerund.evaluation.systems.base import EmbeddingCache, Encodes, Ranks, ScoresCandidates
from gerund.evaluation.systems.language_model import CausalModelSystem, language_model_system, precompute
from gerund.evaluation.systems.search import (
    RERANKED,
    BM25Index,
    BM25Search,
    BM25System,
    Fusion,
    HybridSystem,
    IndexCache,
    IndexOptions,
    IndexSystem,
    bm25_candidates,
    fused,
    fused_scores,
    parse_fusion,
    parse_index,
)
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.retrieval import Reranking, Retrieval
from gerund.text_analysis import VERSION
from tests.cli.helpers import run_cli
from tests.evaluation.tables import forbid_network, random_table, write_collection, write_pairs
from tests.evaluation.tasks import trec
from tests.evaluation.toys import ToyTask

# Words that neither stemmer nor stop words touch.
DOCUMENTS = ["cat dog cat", "dog", "", "cow cat pig dog ant bug", "cow cow", "dog"]


def by_formula(query):
    """Lucene's BM25: k1 = 1.2, b = 0.75."""
    split = [text.split() for text in DOCUMENTS]
    average = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        counts = Counter(words)
        total = 0.0
        for word in query.split():
            n_with = sum(word in other for other in split)
            if n_with:
                weight = log(1 + (len(split) - n_with + 0.5) / (n_with + 0.5))
                total += weight * counts[word] / (counts[word] + 1.2 * (0.25 + 0.75 * len(words) / average))
        scores.append(total)
    return scores


@pytest.mark.parametrize("query", ["cat", "cow dog", "pig pig ant", "bird", "bird cow", ""])
def test_scores_are_the_formulas(query):
    np.testing.assert_allclose(BM25Index(DOCUMENTS).scores(query), by_formula(query), rtol=1e-5)


def test_words_are_stemmed_and_stop_words_count_only_where_there_is_nothing_else():
    index = BM25Index(["The cats were sleeping", "stones", "Who are the others?"])
    assert index.scores("sleeps a CAT")[0] > 0
    np.testing.assert_array_equal(index.scores("where were the cats"), index.scores("cats"))
    assert np.argmax(index.scores("The Who")) == 2


def test_the_first_of_equals_comes_first_and_strangers_last():
    ranked = BM25Index(DOCUMENTS).top("dog", 5)
    assert [place for place, _ in ranked] == [1, 5, 0, 3, 2]
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    assert ranked[4][1] == 0.0


def test_ties_keep_the_order_of_many_documents():
    ranked = BM25Index(["dog", "cat"] * 50).top("cat", 60)
    assert [place for place, _ in ranked] == [*range(1, 100, 2), *range(0, 20, 2)]


def test_candidates_share_a_word_with_the_query():
    documents = {f"d{place}": text for place, text in enumerate(DOCUMENTS)}
    assert bm25_candidates(documents, {"q": "cow", "none": "bird"}) == {"q": ["d4", "d3"], "none": []}
    assert bm25_candidates(documents, {"q": "cow"}, k=1) == {"q": ["d4"]}


@pytest.mark.parametrize("documents", [["", "the"], []])
def test_documents_without_a_word_are_found_by_nothing(documents):
    index = BM25Index(documents)
    assert index.scores("cat").tolist() == [0.0] * len(documents)
    assert len(index.top("cat", 3)) == len(documents)


def test_mteb_takes_it_for_a_searcher_and_no_encoder():
    from mteb.models import EncoderProtocol, SearchProtocol

    search = BM25Search()
    assert isinstance(search, SearchProtocol)
    assert not isinstance(search, EncoderProtocol)
    assert search.mteb_model_meta.name == "bm25"


def test_search_reads_titles_and_scores_every_candidate():
    search = BM25Search()
    search.index(Dataset.from_dict({"id": ["a", "b", "c"], "title": ["cow", "", ""], "text": ["pig", "pig", "ant"]}))
    queries = Dataset.from_dict({"id": ["q"], "text": ["cow"]})
    assert list(search.search(queries, top_k=2)["q"]) == ["a", "b"]
    found = search.search(queries, top_k=2, top_ranked={"q": ["c", "a", "b"]})["q"]
    assert set(found) == {"a", "b", "c"}
    assert found["a"] > found["b"] == found["c"] == 0.0


def test_words_are_those_of_an_index():
    nfd = unicodedata.normalize("NFD", "Zürich liegt am See")
    index = BM25Index([nfd, "東京は日本の首都です。", "A chromato\u200bgraphy column", "富士山は高い。"])
    for query, place in {"Zürich": 0, "zurich": 0, "東京": 1, "chromatography": 2, "富士山": 3}.items():
        scores = index.scores(query)
        assert scores[place] > 0
        assert np.count_nonzero(scores) == 1


WORDS = ("cow", "pig", "ant", "bug", "dog", "cat")
DOCUMENTS_hybrid = {f"d{n:02}": f"{WORDS[n % 6]} {WORDS[n % 5]} {WORDS[n // 6]} {n}" for n in range(30)} | {
    "e": "nothing"
}
QUERIES = {"q1": "cow dog", "q2": "ant", "q3": "bird"}
JUDGED = [("q1", "d04", 2), ("q1", "d10", 1), ("q2", "d02", 1), ("q2", "d20", 1), ("q3", "d05", 1), ("q3", "e", 1)]


RRF, CONVEX = Fusion("rrf"), Fusion(weight=0.4)


def by_reciprocal_rank(dense, lexical):
    rankings = [sorted(side, key=lambda one, side=side: -side[one]) for side in (dense, lexical)]
    found: dict[str, float] = {}
    for ranking in rankings:
        for document in ranking:
            found.setdefault(document, sum(1 / (60 + own.index(document) + 1) for own in rankings if document in own))
    return found


def by_convex_sum(dense, lexical, weight=0.4):
    """Join scores document by document, as the formula stands on paper; no side has more than 100."""
    best = max(lexical.values(), default=1)
    return {one: weight * dense[one] + (1 - weight) * lexical.get(one, 0) / best for one in dense}


FORMULAS = {RRF: by_reciprocal_rank, CONVEX: by_convex_sum}


def by_hand(table, query, how, candidates=tuple(DOCUMENTS_hybrid)):
    """Rank documents by cosine and by BM25, and join them."""
    asked = table.encode([QUERIES[query]], normalize=True)[0].astype(float)
    cosines = {one: float(asked @ table.encode([text], normalize=True)[0]) for one, text in DOCUMENTS_hybrid.items()}
    words = dict(zip(DOCUMENTS_hybrid, BM25Index(list(DOCUMENTS_hybrid.values())).scores(QUERIES[query]), strict=True))
    lexical = {one: float(words[one]) for one in candidates if words[one] > 0}
    return FORMULAS[how]({one: cosines[one] for one in candidates}, lexical)


@pytest.fixture
def table():
    return random_table([*DOCUMENTS_hybrid.values(), *QUERIES.values()])


@pytest.fixture
def folder(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS_hybrid, QUERIES, JUDGED)
    return tmp_path


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_scores_of_candidates_are_the_formula(how):
    draw = np.random.default_rng(0)
    for _ in range(20):
        dense, lexical = draw.normal(size=30), np.maximum(0, draw.normal(size=30))
        wanted = FORMULAS[how](dict(enumerate(dense)), {place: own for place, own in enumerate(lexical) if own > 0})
        assert fused_scores(dense, lexical, how) == pytest.approx([wanted[place] for place in range(30)])


def test_nobody_shares_a_word_with_the_query():
    assert fused_scores(np.array([0.1, 0.9]), np.zeros(2), RRF) == pytest.approx([1 / 62, 1 / 61])
    assert fused_scores(np.array([0.1, 0.9]), np.zeros(2), CONVEX) == pytest.approx([0.04, 0.36])


def test_only_the_first_of_each_ranking_count_by_their_places(monkeypatch):
    monkeypatch.setattr("gerund.evaluation.systems.search.DEPTH", 1)
    assert fused_scores(np.array([0.1, 0.9, 0.5]), np.array([2.0, 0.0, 3.0]), RRF).tolist() == [0, 1 / 61, 1 / 61]


def test_a_convex_sum_is_that_of_the_first_hundred_and_the_rest_stands_below(monkeypatch):
    monkeypatch.setattr("gerund.retrieval.hybrid_search.DEPTH", 2)
    dense = {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.6}
    found = fused(dense, {"d": 4.0, "a": 1.0, "c": 0.5}, CONVEX)
    # Of the vectors a and b count, of the words d and a, with their cosines; c is below on both sides.
    assert found == pytest.approx({"d": 0.24 + 0.6, "a": 0.36 + 0.6 / 4, "b": 0.32, "c": -1.0})
    assert list(found) == ["d", "a", "b", "c"]


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_retrieval_measures_the_joined_ranking(folder, table, how):
    [task] = Retrieval.find(folder)
    score = task.run(HybridSystem(table, how), EvaluationConfig())
    judged: dict[str, dict[str, int]] = {}
    for query, document, grade in JUDGED:
        judged.setdefault(query, {})[document] = grade
    wanted = trec.mean([trec.measures(by_hand(table, query, how), own) for query, own in judged.items()])
    for name, value in score.metrics.items():
        assert value == pytest.approx(wanted[name], abs=6e-6), name
    assert {"recall_at_100", "mrr_at_10"} <= set(score.metrics)


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_reranking_joins_the_rankings_of_the_candidates_alone(folder, table, how):
    offered = {"q1": ["d07", "d04", "e", "d10"], "q2": ["d02", "d03"]}
    rows = [(query, document) for query, own in offered.items() for document in own]
    path = folder / "retrieval" / "small" / "candidates" / "test.tsv"
    write_pairs(path, ("query-id", "corpus-id"), rows)
    [task] = Reranking.find(folder)
    wanted = []
    for query, own in offered.items():
        judged = {document: grade for asked, document, grade in JUDGED if asked == query}
        wanted.append(trec.measures(by_hand(table, query, how, own), judged))
    found = task.run(HybridSystem(table, how), EvaluationConfig(limit=2))
    assert found.value == pytest.approx(trec.mean(wanted)["map_at_1000"], abs=6e-6)


@pytest.mark.parametrize("how", [RRF, CONVEX], ids=["rrf", "convex"])
def test_candidates_of_other_tasks_are_joined(table, how):
    queries, texts = list(QUERIES.values()), list(DOCUMENTS_hybrid.values())
    found = HybridSystem(table, how).candidate_scores(queries, texts, scorer=None, prompt=None)
    for row, query in zip(found, QUERIES, strict=True):
        wanted = by_hand(table, query, how)
        assert row == pytest.approx([wanted[one] for one in DOCUMENTS_hybrid])


@pytest.mark.slow
def test_every_model_gains_one_and_its_vectors_are_computed_once(folder, tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder)
    found = systems_of([lm, "bm25", "hybrid"])
    assert [type(one) for one in found] == [CausalModelSystem, BM25System, HybridSystem]
    assert [isinstance(one, Encodes) for one in found] == [True, False, False]
    assert all(isinstance(one, Ranks) and isinstance(one, ScoresCandidates) for one in found)
    dense, _, hybrid = found
    assert hybrid.label == f"{dense.label} + BM25"
    encoded = []
    encode = type(lm).encode
    monkeypatch.setattr(
        type(lm), "encode", lambda self, texts, *a, **k: encoded.extend(texts) or encode(self, texts, *a, **k)
    )
    [task] = Retrieval.find(folder)
    done = evaluate(found, [task])
    assert [result.system for result in done.results] == [one.label for one in found]
    assert len(encoded) == len(set(encoded))
    assert len({result.score.value for result in done.results}) > 1


def test_it_is_left_out_where_bm25_is(tiny_folder):
    lm = gerund.load(tiny_folder)
    done = evaluate(systems_of([lm, "hybrid"]), [ToyTask(name="toy/a")])
    assert len(done.results) == 1
    with pytest.raises(ConfigError, match="can only rank documents and score candidates"):
        evaluate([HybridSystem(language_model_system("tiny", lm))], [ToyTask(name="toy/a")])


def test_it_shares_no_score_with_the_model_alone(folder, tiny_folder):
    [task] = Retrieval.find(folder)
    dense = language_model_system("tiny", gerund.load(tiny_folder), EmbeddingCache())
    hybrid = HybridSystem(dense)
    assert key_of(task, hybrid, EvaluationConfig()) != key_of(task, dense, EvaluationConfig())
    assert hybrid.fingerprint == hybrid.describe()["fingerprint"] != dense.fingerprint
    described = hybrid.describe()
    assert (described["with"], described["fusion"], described["weight"]) == ("bm25", "convex", 0.2)
    assert "weights" not in hybrid.describe()
    precompute([hybrid, hybrid], task.texts(EvaluationConfig()), prompt=None, show=False)  # encodes nothing


@pytest.mark.parametrize("names", [["hybrid"], ["hybrid", "bm25"]])
def test_without_a_model_there_is_nothing_to_join(names):
    with pytest.raises(ConfigError, match="name a model too"):
        systems_of(names)


def test_the_weight_is_the_encoders_own_where_nothing_is_said(tiny_folder):
    lm = gerund.load(tiny_folder, fusion=0.7)
    named = [HybridSystem(language_model_system("tiny", lm), parse_fusion(name)) for name in NAMES]
    assert [one.fusion for one in named] == [Fusion("convex", 0.7), Fusion("rrf"), Fusion("convex", 0.2)]
    assert [one.label for one in named] == ["tiny + BM25", "tiny + BM25 (RRF)", "tiny + BM25 (0.2 vectors)"]
    assert len({one.fingerprint for one in named}) == 3
    # Scores that were measured with other words are measured again.
    assert named[1].cache_key == f"{named[1].dense.cache_key}+bm25-words{VERSION}"
    assert [one.label for one in systems_of([lm, *NAMES])][1:] == [
        f"{systems_of([lm])[0].label}{end}" for end in (" + BM25", " + BM25 (RRF)", " + BM25 (0.2 vectors)")
    ]


NAMES = ("hybrid", "hybrid:rrf", "hybrid:0.2")


@pytest.mark.parametrize("name", ["hybrid:", "hybrid:best", "hybrid:1.5", "hybrid:nan"])
def test_a_fusion_that_there_is_none_of(name):
    with pytest.raises(ConfigError, match=r"hybrid: must be followed by rrf or|is not a number from 0"):
        parse_fusion(name)


DOCUMENTS_index = {
    "bread": "Bread is made of flour, water and salt. " * 8 + "Yeast makes the dough rise.",
    "rail": "The first public railway to use steam was opened in 1825.", "sea": "The old man looked at the sea.",
    "birds": "Swallows build nests of mud. " * 20 + "Trains and railways are not for birds.", "empty": "",
}  # fmt: skip
QUERIES_index = {"q1": "when was the railway opened", "q2": "what makes dough rise", "q3": "nests"}
JUDGED_index = [("q1", "rail", 1), ("q2", "bread", 1), ("q3", "birds", 1), ("q3", "sea", 0)]
WAYS = ["index", "index:words", "index:vectors", "index:rerank", "index:vectors,whole", "index:late"]
WAYS += ["index:vectors,binary"]


@pytest.fixture
def folder_index(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS_index, QUERIES_index, JUDGED_index)
    return tmp_path


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


def by_hand_index(lm, way):
    """Return the order of documents that a user's search gives."""
    index = gerund.open_index(None, lm, chunking=Chunking(late=way.is_late, precision=way.precision))
    index.add_documents([Document(name, text) for name, text in DOCUMENTS_index.items()])
    rerank = RERANKED if way.is_reranked else 0
    found = {}
    for query, text in QUERIES_index.items():
        sources = dict.fromkeys(hit.source for hit in index.search(text, 100, mode=way.mode, rerank=rerank))
        found[query] = {source: 1 / place for place, source in enumerate(sources, start=1)}
    return found


@pytest.mark.slow
def test_scores_are_those_of_a_users_search(folder_index, bundled):
    [task] = Retrieval.find(folder_index)
    systems = systems_of([bundled, *WAYS])
    assert [one.label for one in systems[1:]] == [f"{systems[0].label}, index ({parse_index(name)})" for name in WAYS]
    assert len({one.cache_key for one in systems}) == len(systems)
    for system in systems[1:]:
        score = task.run(system, EvaluationConfig())
        if not system.options.is_whole:
            run = by_hand_index(bundled, system.options)
            wanted = [trec.measures(run[query], {name: grade for asked, name, grade in JUDGED_index if asked == query})
                      for query in QUERIES_index]  # fmt: skip
            for name, value in trec.mean(wanted).items():
                if name in score.metrics:
                    assert score.metrics[name] == pytest.approx(value, abs=6e-6), (system.label, name)
        assert score.value > 0.5
        assert any(note.startswith("second stage: ") for note in score.notes) == bool(system.second.rerank)


def test_whole_documents_are_one_chunk(bundled):
    system = IndexSystem(language_model_system("m", bundled), IndexOptions(is_whole=True))
    search = system.search_model({})
    corpus = {"id": list(DOCUMENTS_index), "text": list(DOCUMENTS_index.values()), "title": [""] * len(DOCUMENTS_index)}
    search.index(corpus)
    assert len(search._index) == len(DOCUMENTS_index) - 1
    assert search._index.chunking.context


@pytest.mark.slow
def test_several_ways_share_one_index(bundled, monkeypatch):
    made = []
    plain = type(bundled).encode
    monkeypatch.setattr(
        type(bundled), "encode", lambda self, texts, *a, **k: made.append(texts) or plain(self, texts, *a, **k)
    )
    cache = IndexCache()
    corpus = {"id": ["a", "b"], "text": ["One cat.", "Two dogs."], "title": ["", ""]}
    for mode in ("hybrid", "words", "vectors"):
        IndexSystem(language_model_system("m", bundled), IndexOptions(mode), cache).search_model({}).index(corpus)
    assert len(made) == 1
    IndexSystem(language_model_system("m", bundled), IndexOptions(), cache).search_model({}).index(
        {**corpus, "id": ["a", "c"]}
    )
    assert len(made) == 2


@pytest.mark.slow
def test_candidates_alone_are_ranked_and_those_not_found_come_last(folder_index, bundled):
    rows = [("q1", "sea"), ("q1", "empty"), ("q1", "rail"), ("q2", "sea"), ("q3", "empty"), ("q3", "birds")]
    write_pairs(folder_index / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    [task] = Reranking.find(folder_index)
    [system] = systems_of([bundled, "index:words"])[1:]
    score = task.run(system, EvaluationConfig())
    assert score.value == pytest.approx(np.mean([1, 0, 1]), abs=6e-6)


@pytest.mark.parametrize("name", ["index:", "index:magic", "index:vectors,", "index:0.4"])
def test_names_that_are_none(name):
    with pytest.raises(ConfigError, match="part after index:"):
        parse_index(name)


@pytest.mark.parametrize("name", ["index:words,vectors", "index:float16,binary"])
def test_one_mode_and_one_precision(name):
    with pytest.raises(ConfigError, match=r"takes one (mode, not words and vectors|precision, not float16 and binary)"):
        parse_index(name)


def test_names():
    assert parse_index("bm25") is None
    assert parse_index("index:words,whole") == IndexOptions("words", is_whole=True)
    with pytest.raises(ConfigError, match="index is that of a language model"):
        systems_of(["bm25", "index"])


@pytest.mark.slow
def test_on_the_command_line(folder_index):
    for _ in range(2):  # the second time from the scores that are kept
        report = ["--tasks", "retrieval", "--data", folder_index, "-o", folder_index / "report"]
        ran = run_cli("eval", "default", "index:words", *report)
        assert ran.code == 0, ran.err
        assert "index (words)" in ran.out + ran.err
