"""BM25 against its formula, and as MTEB's retrieval protocol wants it."""

import unicodedata
from collections import Counter
from math import log

import numpy as np
import pytest
from datasets import Dataset

from gerund.evaluation.systems.search import BM25Index, BM25Search, bm25_candidates

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
