"""The bundled model, which has a scorer of its own, ranks what it wrote."""

from typing import Any

import pytest

import gerund
from gerund.server.config import ServerConfig
from gerund.settings.sampling import Sampling
from tests.server.conftest import Running


@pytest.mark.slow
def test_the_models_own_scorer_ranks_its_texts() -> None:
    # In bfloat16 the texts of an engine are those of `generate` on some processors only.
    bundled = gerund.load(dtype="float32")
    running = Running(bundled, ServerConfig(), [])
    try:
        assert running.client.get("/v1/models").json()["data"][0]["scorer"] == "own"
        body: dict[str, Any] = {"prompt": "The old man", "max_tokens": 8, "seed": 8, "best_of": 5, "n": 2}
        found = running.ok("/v1/completions", **body)["choices"]
        written = bundled.generate("The old man", 8, Sampling(temperature=1, seed=8), n=5)
        texts = [one.text for one in written]
        [scores] = bundled.score(["The old man"], [texts], scorer="own")
        best = sorted(zip(scores, texts, strict=True), reverse=True)[:2]
        assert [one["text"] for one in found] == [text for _, text in best]
        assert [one["rank_score"] for one in found] == pytest.approx([score for score, _ in best], abs=1e-4)
        named = running.ok("/v1/completions", **body, scorer="own")["choices"]
        assert [one["text"] for one in named] == [one["text"] for one in found]
        other = running.ok("/v1/completions", **body, scorer="pmi")["choices"]
        assert [one["rank_score"] for one in other] != [one["rank_score"] for one in found]
    finally:
        running.stop()
