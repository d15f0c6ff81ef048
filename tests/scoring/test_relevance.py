"""Documents ranked for a query, each measure against one document at a time; in Python and on the command line."""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund import ConfigError, TextError, UnsupportedModelError
from gerund.scoring.relevance import BEFORE, BEHIND
from tests.cli.helpers import no_loading, run_cli

QUERY = "the tin"
DOCUMENTS = ["a cat in the inn.", "there", "an in-tin thing in the rain", "there"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    found = gerund.load(tiny_folder, dtype="float32")
    found.model.config.max_position_embeddings = found.tokenizer.model_max_length = 200
    return found


def upr(lm, query, document):
    """Return the mean log-probability of the query, token by token, each behind a whole pass."""
    before = lm.tokenizer(BEFORE + document.rstrip(".") + BEHIND).input_ids
    own = lm.tokenizer(" " + query, add_special_tokens=False).input_ids
    scores = []
    for place, token in enumerate(own):
        with torch.no_grad():
            logits = lm.model(torch.tensor([before + own[:place]]), use_cache=False).logits[0, -1]
        scores.append(float(logits.log_softmax(-1)[token]))
    return float(np.mean(scores))


def by_hand(lm, by):
    if by == "likelihood":
        return [upr(lm, QUERY, text) for text in DOCUMENTS]
    query = lm.encode(QUERY)
    return [float(lm.encode(text) @ query) for text in DOCUMENTS]


@pytest.mark.parametrize("by", ["vectors", "likelihood"])
def test_equals_one_document_at_a_time(lm, by):
    expected = by_hand(lm, by)
    found = lm.rerank(QUERY, DOCUMENTS, by=by)
    assert found.by == by
    assert sorted(found.indices) == [0, 1, 2, 3]
    assert found.scores == pytest.approx([expected[index] for index in found.indices], abs=1e-4)
    assert found.scores == sorted(found.scores, reverse=True)
    assert found.indices.index(1) < found.indices.index(3)  # equals stay in their order
    first = lm.rerank(QUERY, DOCUMENTS, 2, by=by)
    assert (first.indices, first.scores) == (found.indices[:2], found.scores[:2])
    assert lm.rerank(QUERY, [], by=by).indices == []


def test_of_a_long_document_the_beginning_is_read(lm):
    long = "xyz" * 100
    [one] = lm.rerank(QUERY, [long], by="likelihood").scores
    fixed = len(lm.tokenizer(f"{BEFORE}a{BEHIND} {QUERY}").input_ids)
    assert one == pytest.approx(upr(lm, QUERY, long[: 200 - fixed]), abs=1e-4)
    with pytest.raises(TextError, match="holds no document"):
        lm.rerank("xyz" * 100, ["a"], by="likelihood")


def test_prompts_for_queries_and_documents(tiny_folder):
    from dataclasses import replace

    lm = gerund.load(tiny_folder, dtype="float32")
    lm = lm.with_encoder(replace(lm.encoder, prompts={"query": "the ", "document": "in "}))
    [one] = lm.rerank("tin", ["cat"]).scores
    assert one == pytest.approx(float(lm.encode("tin", prompt="the ") @ lm.encode("cat", prompt="in ")), abs=1e-5)


@pytest.mark.parametrize("by", ["model", "own"])
def test_by_its_trained_scorer(bundled, lm, by):
    documents = ["Trains run on rails.", "Bread is baked of flour and water."]
    [expected] = bundled.scorer.score(["how to bake bread"], [documents])
    found = bundled.rerank("how to bake bread", documents, by=by)
    assert found.by == by
    assert found.scores == pytest.approx(sorted(expected, reverse=True))
    with pytest.raises(ConfigError, match="was not trained to score"):
        lm.rerank("how to bake bread", documents, by=by)


def test_a_t5_ranks_by_vectors(tmp_path):
    from tests.tiny import save_tiny_t5

    lm = gerund.load(save_tiny_t5(tmp_path / "t5"))
    assert sorted(lm.rerank(QUERY, DOCUMENTS).indices) == [0, 1, 2, 3]
    with pytest.raises(UnsupportedModelError):
        lm.rerank(QUERY, DOCUMENTS, by="likelihood")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("", ["a"]), TextError, "the query is empty"), ((3, ["a"]), TextError, "the query is not a string"),
        (("a", "b"), TextError, "documents are a list"), (("a", ["b", ""]), TextError, "document 1 is empty"),
        (("a", ["b", None]), TextError, "document 1 is not a text"), (("a", ["b"], 0), ConfigError, "`top_k` must be"),
        (("a", ["b\udcff"]), TextError, "document 0 is not valid Unicode"),
    ],
)  # fmt: skip
def test_mistakes(lm, arguments, error, words):
    with pytest.raises(error, match=words):
        lm.rerank(*arguments)
    with pytest.raises(ConfigError, match="unknown measure of relevance 'cosine'"):
        lm.rerank("a", ["b"], by="cosine")


class TestCommandLine:
    def test_one_query(self, tiny_folder):
        ran = run_cli("rerank", QUERY, *DOCUMENTS, "-m", tiny_folder, "--top-k", 2)
        expected = gerund.load(tiny_folder).rerank(QUERY, DOCUMENTS, 2)
        assert [line.split("  ")[-1] for line in ran.out.splitlines()] == [DOCUMENTS[one] for one in expected.indices]

    def test_many(self, tiny_folder, tmp_path):
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(json.dumps({"query": "tin", "documents": ["cat", "in"]}) + "\n")
        ran = run_cli("rerank", "-f", source, "-m", tiny_folder, "--by", "likelihood", "-o", out)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        assert sorted(json.loads(out.read_text())["indices"]) == [0, 1]

    def test_mistakes(self, tmp_path):
        source = tmp_path / "in.jsonl"
        with no_loading():
            assert "give at least one document" in run_cli("rerank", "a").mistake
            assert "give either a query" in run_cli("rerank").mistake
            assert "unknown measure" in run_cli("rerank", "a", "b", "--by", "x").mistake
            for line, words in (
                ('{"query": "a"}', "needs 'documents'"),
                ('{"query": "a", "documents": [1]}', "document 0"),
            ):
                source.write_text(line)
                said = run_cli("rerank", "-f", source).mistake
                assert words in said
                assert "in.jsonl" in said


def test_the_beginning_is_read_where_characters_take_several_tokens(lm):
    behind = "\u20ac" * 50  # 150 bytes, and so many tokens, more than the context has
    found = lm.rerank("the tin", [f"a tin {behind}", f"the rain {behind}", f"{behind} tin"], by="likelihood").scores
    assert len(set(found)) == 3
