"""Other models served: a second one for the vectors, of gerund or of sentence-transformers; and rerankers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gerund
from gerund.errors import QueueFullError
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.server.config import ServerConfig
from gerund.server.service import EncoderQueue
from tests.ready_made import PAIR_TEMPLATE, answering, reranker
from tests.server.conftest import Running


@pytest.fixture(scope="module")
def other(tiny_folder: Path) -> Any:
    return gerund.load(tiny_folder, attention="bidir", dtype="float32")


@pytest.fixture(scope="module")
def outside(other: Any, tmp_path_factory: pytest.TempPathFactory) -> SentenceEncoder:
    pytest.importorskip("sentence_transformers")
    folder = other.export(tmp_path_factory.mktemp("exported") / "minilm", "sentence-transformers").folder
    return SentenceEncoder(str(folder))


@pytest.fixture(scope="module", params=["gerund", "sentence-transformers"])
def both(request: pytest.FixtureRequest, served_lm: Any, other: Any) -> Iterator[Running]:
    encoder = other if request.param == "gerund" else request.getfixturevalue("outside")
    with Running(served_lm, ServerConfig(max_new_tokens=8), [], encoder) as running:
        yield running


def test_vectors_are_the_encoders_and_texts_the_models(both: Running, other: Any) -> None:
    answer = both.ok("/v1/embeddings", input=["a cat", "the rain"])
    vectors = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(vectors, other.encode(["a cat", "the rain"]), atol=1e-5)
    assert answer["fingerprint"] == both.service.encoder.fingerprint()
    assert answer["usage"]["total_tokens"] == sum(len(ids) for ids in other.tokenizer(["a cat", "the rain"]).input_ids)
    ranked = both.ok("/v1/rerank", query="a cat", documents=["the rain", "a cat"])["results"]
    assert [item["index"] for item in ranked] == [1, 0]
    documents, first = ["the rain", "a cat", "thin air"], {"scores": [3, 1, 2], "weight": 0.7}
    answer = both.post("/v1/rerank", query="a cat", documents=documents, by="vectors", **first)
    if isinstance(both.service.encoder, SentenceEncoder):
        assert answer.json()["error"]["param"] == "scores"
    else:
        expected = other.rerank("a cat", documents, by="vectors", **first)
        found = [(item["index"], item["relevance_score"]) for item in answer.json()["results"]]
        assert [index for index, _ in found] == expected.indices
        assert [score for _, score in found] == pytest.approx(expected.scores, abs=1e-4)
    chat = both.ok("/v1/completions", prompt="a cat", max_tokens=4, temperature=0)["choices"][0]["text"]
    assert chat == both.lm.generate("a cat", 4)[0].text
    status = both.post("/v1/embeddings", input="a cat", multi=True).status_code
    assert status == (400 if isinstance(both.service.encoder, SentenceEncoder) else 200)
    [card] = both.client.get("/v1/models").json()["data"]
    assert (card["encoder"], card["dimensions"]) == (both.service.encoder.name, other.dimensions)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": "a", "prompt_name": "nope"}, 400),
        ({"input": "a", "dimensions": 10**6}, 400),
        ({"input": "a" * 3000}, 400),
        ({"input": "a" * 3000, "truncate": True}, 200),
    ],
)
def test_mistakes_are_the_clients(both: Running, body: dict[str, Any], status: int) -> None:
    assert both.post("/v1/embeddings", **body).status_code == status


def test_a_full_queue_is_told(outside: SentenceEncoder) -> None:
    queue = EncoderQueue(outside, limit=10)
    first = queue.submit_encode(["a" * 400] * 50)
    with pytest.raises(QueueFullError, match="wait to be encoded"):
        queue.submit_encode(["a" * 400])
    assert first.result().vectors.shape == (50, outside.dimensions)
    queue.close()


# ---------------------------------------------------------------------------------------------------------- rerankers

QUERY = "the ants"
DOCUMENTS = ["rain in the sun", "the ant", "thin air"]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served") / "reranker"
    reranker(folder, layout="LogitScore", tokenizer=answering(template=PAIR_TEMPLATE))
    with Running(gerund.load(folder, dtype="float32"), ServerConfig(), []) as running:
        yield running


def test_a_reranker_ranks_by_every_route(ranker: Running) -> None:
    expected = ranker.lm.rerank(QUERY, DOCUMENTS)
    for route in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = ranker.ok(route, query=QUERY, documents=DOCUMENTS)
        found, cost = answer["results"], answer["rerank"]
        assert (cost["by"], cost["offered"], cost["read"]) == ("model", len(DOCUMENTS), len(DOCUMENTS))
        assert cost["seconds"] > 0
        assert [one["index"] for one in found] == expected.indices
        assert [one["relevance_score"] for one in found] == pytest.approx(expected.scores, abs=1e-5)
    found = ranker.ok("/rerank", query=QUERY, texts=DOCUMENTS, return_text=True)
    assert [one["score"] for one in found] == pytest.approx(expected.scores, abs=1e-5)
    assert [one["text"] for one in found] == [DOCUMENTS[one["index"]] for one in found]


def test_what_a_reranker_cannot_do_is_the_clients_mistake(ranker: Running) -> None:
    for route, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "by": "vectors"}),
    ):
        found = ranker.post(route, **body)
        assert found.status_code == 400
        assert "is a reranker" in found.json()["error"]["message"]
    found = ranker.post("/v1/rerank", query="cat " * 200, documents=["b"])
    assert (found.status_code, found.json()["error"]["param"]) == (400, "query")


def test_a_classifier_is_served_although_it_neither_encodes_nor_generates(tmp_path: Path) -> None:
    lm = gerund.load(reranker(tmp_path / "st", layout="CrossEncoder"))
    with Running(lm, ServerConfig(), []) as running:
        assert len(running.ok("/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]) == 3
        assert "cannot generate" in running.post("/v1/completions", prompt="a").json()["error"]["message"]
