"""A served reranker: its scores by every route, and what it can't do is a client's mistake."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gerund.entry import load
from gerund.server.config import ServerConfig
from tests.ready_made import PAIR_TEMPLATE, answering, reranker
from tests.server.conftest import Running

QUERY = "the ants"
DOCUMENTS = ["rain in the sun", "the ant", "thin air"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served") / "reranker"
    reranker(folder, layout="LogitScore", tokenizer=answering(template=PAIR_TEMPLATE))
    running = Running(load(folder, dtype="float32"), ServerConfig(), [])
    yield running
    running.stop()


def test_rerank(served: Running) -> None:
    expected = served.lm.rerank(QUERY, DOCUMENTS)
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = served.ok(route, query=QUERY, documents=DOCUMENTS)
        found, cost = answer["results"], answer["rerank"]
        assert (cost["by"], cost["offered"], cost["read"]) == ("model", len(DOCUMENTS), len(DOCUMENTS))
        assert cost["seconds"] > 0
        assert [one["index"] for one in found] == expected.indices
        assert [one["relevance_score"] for one in found] == pytest.approx(expected.scores, abs=1e-5)
    found = served.ok("/rerank", query=QUERY, texts=DOCUMENTS)
    assert [one["score"] for one in found] == pytest.approx(expected.scores, abs=1e-5)


def test_mistakes_are_the_clients(served: Running) -> None:
    for route, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "by": "vectors"}),
    ):
        found = served.post(route, **body)
        assert found.status_code == 400
        assert "is a reranker" in found.json()["error"]["message"]
    found = served.post("/v1/rerank", query="cat " * 200, documents=["b"])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "query")


def test_a_classifier_is_served_although_it_neither_encodes_nor_generates(tmp_path: Path) -> None:
    running = Running(load(reranker(tmp_path / "st", layout="CrossEncoder")), ServerConfig(), [])
    try:
        assert len(running.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]) == 3
        assert "cannot generate" in running.post("/v1/completions", prompt="a").json()["error"]["message"]
    finally:
        running.stop()
