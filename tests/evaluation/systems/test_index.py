"""An index among the systems: it ranks what a user's search ranks, whatever is asked of it."""

import numpy as np
import pytest

import gerund
from gerund import Chunking, Document
from gerund.errors import ConfigError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import RERANKED, IndexCache, IndexOptions, IndexSystem, parse_index
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.retrieval import Reranking, Retrieval
from tests.cli.helpers import run_cli
from tests.evaluation.tables import forbid_network, write_collection, write_pairs
from tests.evaluation.tasks import trec

DOCUMENTS = {
    "bread": "Bread is made of flour, water and salt. " * 8 + "Yeast makes the dough rise.",
    "rail": "The first public railway to use steam was opened in 1825.", "sea": "The old man looked at the sea.",
    "birds": "Swallows build nests of mud. " * 20 + "Trains and railways are not for birds.", "empty": "",
}  # fmt: skip
QUERIES = {"q1": "when was the railway opened", "q2": "what makes dough rise", "q3": "nests"}
JUDGED = [("q1", "rail", 1), ("q2", "bread", 1), ("q3", "birds", 1), ("q3", "sea", 0)]
WAYS = ["index", "index:words", "index:vectors", "index:rerank", "index:vectors,whole", "index:late"]
WAYS += ["index:vectors,binary"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    write_collection(tmp_path / "retrieval" / "small", DOCUMENTS, QUERIES, JUDGED)
    return tmp_path


def by_hand(lm, way):
    """Return the order of documents that a user's search gives."""
    index = gerund.open_index(None, lm, chunking=Chunking(late=way.is_late, precision=way.precision))
    index.add_documents([Document(name, text) for name, text in DOCUMENTS.items()])
    rerank = RERANKED if way.is_reranked else 0
    found = {}
    for query, text in QUERIES.items():
        sources = dict.fromkeys(hit.source for hit in index.search(text, 100, mode=way.mode, rerank=rerank))
        found[query] = {source: 1 / place for place, source in enumerate(sources, start=1)}
    return found


@pytest.mark.slow
def test_scores_are_those_of_a_users_search(folder, bundled):
    [task] = Retrieval.find(folder)
    systems = systems_of([bundled, *WAYS])
    assert [one.label for one in systems[1:]] == [f"{systems[0].label}, index ({parse_index(name)})" for name in WAYS]
    assert len({one.cache_key for one in systems}) == len(systems)
    for system in systems[1:]:
        score = task.run(system, EvaluationConfig())
        if not system.options.is_whole:
            run = by_hand(bundled, system.options)
            wanted = [trec.measures(run[query], {name: grade for asked, name, grade in JUDGED if asked == query})
                      for query in QUERIES]  # fmt: skip
            for name, value in trec.mean(wanted).items():
                if name in score.metrics:
                    assert score.metrics[name] == pytest.approx(value, abs=6e-6), (system.label, name)
        assert score.value > 0.5


def test_whole_documents_are_one_chunk(bundled):
    system = IndexSystem(language_model_system("m", bundled), IndexOptions(is_whole=True))
    search = system.search_model({})
    corpus = {"id": list(DOCUMENTS), "text": list(DOCUMENTS.values()), "title": [""] * len(DOCUMENTS)}
    search.index(corpus)
    assert len(search._index) == len(DOCUMENTS) - 1
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
def test_candidates_alone_are_ranked_and_those_not_found_come_last(folder, bundled):
    rows = [("q1", "sea"), ("q1", "empty"), ("q1", "rail"), ("q2", "sea"), ("q3", "empty"), ("q3", "birds")]
    write_pairs(folder / "retrieval" / "small" / "candidates" / "test.tsv", ("query-id", "corpus-id"), rows)
    [task] = Reranking.find(folder)
    [system] = systems_of([bundled, "index:words"])[1:]
    score = task.run(system, EvaluationConfig())
    assert score.value == pytest.approx(np.mean([1, 0, 1]), abs=6e-6)


@pytest.mark.parametrize("name", ["index:", "index:magic", "index:vectors,", "index:0.4"])
def test_names_that_are_none(name):
    with pytest.raises(ConfigError, match="part after index:"):
        parse_index(name)


def test_names():
    assert parse_index("bm25") is None
    assert parse_index("index:words,whole") == IndexOptions("words", is_whole=True)
    with pytest.raises(ConfigError, match="index is that of a language model"):
        systems_of(["bm25", "index"])


@pytest.mark.slow
def test_on_the_command_line(folder):
    for _ in range(2):  # the second time from the scores that are kept
        report = ["--tasks", "retrieval", "--data", folder, "-o", folder / "report"]
        ran = run_cli("eval", "default", "index:words", *report)
        assert ran.code == 0, ran.err
        assert "index (words)" in ran.out + ran.err


def test_slips_in_a_name_show_before_anything_is_loaded(folder):
    report = ["--tasks", "retrieval", "--data", folder, "-o", folder / "report"]
    assert "unknown part after index:" in run_cli("eval", "index:x", *report).mistake
