"""Documents ranked for a query, each measure against one document at a time; in Python and on the command line."""

import json
import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund import ConfigError, TextError, UnsupportedModelError
from gerund.inference.tokens import split_pairs
from gerund.models import saved_settings
from gerund.scoring import document_reader, query_likelihood
from gerund.scoring.query_likelihood import QueryLikelihood, QueryPrompt
from gerund.training.objectives.settings import OBJECTIVES
from tests.cli.helpers import no_loading, run_cli

QUERY = "the tin"
DOCUMENTS = ["a cat in the inn.", "there", "an in-tin thing in the rain", "there"]
TEMPLATE = "{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}{% endfor %}<s>"


@pytest.fixture(scope="module")
def lm(tiny_folder):
    found = gerund.load(tiny_folder, dtype="float32")
    found.model.config.max_position_embeddings = found.tokenizer.model_max_length = 200
    return found


def logprobs(lm, before, query=QUERY):
    """Return the log-probability of each of the query's tokens behind a text, or behind tokens."""
    ids = lm.tokenizer(before).input_ids if isinstance(before, str) else before
    own = lm.tokenizer(" " + query, add_special_tokens=False).input_ids
    with torch.no_grad():
        found = lm.model(torch.tensor([ids + own]), use_cache=False).logits[0].log_softmax(-1)
    return np.array([float(found[len(ids) + place - 1, token]) for place, token in enumerate(own)])


def by_hand(lm, by, documents=DOCUMENTS):
    if by == "vectors":
        query = lm.encode(QUERY)
        return [float(lm.encode(text) @ query) for text in documents]
    alone, scores = logprobs(lm, "Query:"), []
    for text in documents:
        given = logprobs(lm, f"Document: {text}\n\nQuery:")
        each = {"lift": np.maximum(given - alone, 0), "likelihood": given,
                "mixed": np.log((np.exp(given) + np.exp(alone)) / 2)}  # fmt: skip
        scores.append(float(each[by].mean()))
    return scores


@pytest.mark.parametrize("by", ["vectors", "likelihood", "mixed", "lift"])
def test_equals_one_document_at_a_time(lm, by):
    expected = by_hand(lm, by)
    found = lm.rerank(QUERY, DOCUMENTS, by=by)
    assert (found.by, found.read, found.weight) == (by, 4, None)
    assert sorted(found.indices) == [0, 1, 2, 3]
    assert found.scores == pytest.approx([expected[index] for index in found.indices], abs=1e-4)
    assert found.scores == sorted(found.scores, reverse=True)
    assert found.indices.index(1) < found.indices.index(3)  # equals stay in their order
    first = lm.rerank(QUERY, DOCUMENTS, 2, by=by)
    assert (first.indices, first.scores) == (found.indices[:2], found.scores[:2])
    assert lm.rerank(QUERY, [], by=by).indices == []


def test_the_query_stands_in_a_turn_of_the_chat(lm):
    chats = gerund.load(lm.name, dtype="float32")
    chats.tokenizer.chat_template = TEMPLATE
    prompt = QueryPrompt.of(chats.tokenizer)
    assert prompt.before("a cat") == "<s>user: Document: a cat\n\nQuery:"
    assert prompt.before(None) == "<s>user: Query:"
    [text] = chats.rerank(QUERY, ["a cat"], by="likelihood").scores
    ids = [chats.tokenizer.bos_token_id, *chats.tokenizer("user: Document: a cat\n\nQuery:", add_special_tokens=False)
           .input_ids]  # fmt: skip
    assert text == pytest.approx(logprobs(chats, ids).mean(), abs=1e-4)
    # What a document spells is text, never the end of its turn.
    spelled = split_pairs(chats.tokenizer, [(prompt.before("a<s>b"), " x")], None)
    assert spelled[0].ids.count(chats.tokenizer.bos_token_id) == 1
    chats.tokenizer.chat_template = "{{ raise_exception('no user here') }}"
    assert not QueryPrompt.of(chats.tokenizer).is_rendered


def test_of_a_long_document_the_best_passage_counts(lm):
    room = 201 - len(lm.tokenizer(f"Document: a\n\nQuery: {QUERY}").input_ids)
    long = "x" * (3 * room) + " the tin thing"
    passages = QueryLikelihood(lm.model, lm.tokenizer, QUERY, "lift")._passages(long)
    assert len(passages) > 3
    assert all(len(lm.tokenizer(one, add_special_tokens=False).input_ids) <= room for one in passages)
    assert passages[0] == "x" * room
    assert passages[-1].endswith("the tin thing")
    [one] = lm.rerank(QUERY, [long], by="lift").scores
    assert one == pytest.approx(max(by_hand(lm, "lift", passages)), abs=1e-4)
    with pytest.raises(TextError, match="holds no document"):
        lm.rerank("xyz" * 100, ["a"], by="likelihood")


def test_documents_are_kept_for_the_next_query(lm, monkeypatch):
    plain = lm.rerank("in the rain", DOCUMENTS, by="lift")
    tokens = []
    run = document_reader.DocumentReader._run
    monkeypatch.setattr(
        document_reader.DocumentReader, "_run", lambda self, ids, *rest: tokens.append(ids) or run(self, ids, *rest)
    )
    again = lm.rerank("in the rain", DOCUMENTS, by="lift")
    assert again == plain
    assert [len(one) for one in tokens] == [1, 4]  # the query alone, and behind all documents in one pass
    kept = query_likelihood.Kept(0)
    kept.add(query_likelihood._kept[lm.model][None].find(list(query_likelihood._kept[lm.model][None]._texts)))
    assert not kept._texts
    assert kept._bytes == 0


def test_a_model_that_keeps_nothing_reads_whole_texts(lm, monkeypatch):
    expected = by_hand(lm, "lift")
    monkeypatch.setattr(document_reader.DocumentReader, "_can_keep", lambda self: False)
    monkeypatch.setattr(query_likelihood, "_kept", type(query_likelihood._kept)())
    found = lm.rerank(QUERY, DOCUMENTS, by="lift")
    assert found.scores == pytest.approx([expected[index] for index in found.indices], abs=1e-4)


class TestFirstStage:
    def test_is_fused_by_z_scores(self, lm):
        first = [1.0, 3.0, 2.0, 0.0]
        own = np.array(by_hand(lm, "lift"))

        def z(values):
            return (values - np.mean(values)) / np.std(values)

        for weight in (0.0, 0.25, None, 1.0):
            found = lm.rerank(QUERY, DOCUMENTS, by="lift", scores=first, weight=weight)
            share = 0.5 if weight is None else weight
            expected = share * z(own) + (1 - share) * z(np.array(first))
            assert found.indices == np.argsort(-expected, kind="stable").tolist()
            assert found.scores == pytest.approx(np.sort(expected)[::-1], abs=1e-3)
            assert found.weight == share
        tuned = lm.with_encoder(replace(lm.encoder, rerank_by="mixed", rerank_weight=0.75))
        found = tuned.rerank(QUERY, DOCUMENTS, scores=first)
        assert (found.by, found.weight) == ("mixed", 0.75)
        assert tuned.fingerprint() == lm.fingerprint()

    def test_equal_scores_decide_nothing(self, lm):
        alone = lm.rerank(QUERY, DOCUMENTS, by="lift").indices
        assert lm.rerank(QUERY, DOCUMENTS, by="lift", scores=[0.1] * 4).indices == alone
        assert lm.rerank(QUERY, ["there"] * 3, by="lift", scores=[1, 3, 2]).indices == [1, 2, 0]
        assert lm.rerank(QUERY, ["there"], by="lift", scores=[2]).scores == [0.0]

    def test_only_its_best_are_read(self, lm):
        many = [f"a cat {number}" for number in range(10_000)]
        scores = [float(-number % 7919) for number in range(10_000)]
        found = lm.rerank(QUERY, many, by="lift", scores=scores, depth=3)
        order = np.argsort(-np.array(scores), kind="stable").tolist()
        assert found.read == 3
        assert sorted(found.indices[:3]) == sorted(order[:3])
        assert found.indices[3:] == order[3:]
        assert found.scores == sorted(found.scores, reverse=True)

    def test_a_deadline_leaves_the_rest_in_its_place(self, lm, monkeypatch):
        clock = iter(range(100))  # one second passes between two looks
        monkeypatch.setattr("gerund.scoring.relevance.time.monotonic", lambda: next(clock))
        found = lm.rerank(QUERY, DOCUMENTS, by="lift", scores=[4, 3, 2, 1], deadline=4.5)
        assert 0 < found.read < 4
        assert found.indices[found.read :] == list(range(found.read, 4))
        assert found.scores == sorted(found.scores, reverse=True)
        monkeypatch.undo()
        assert lm.rerank(QUERY, DOCUMENTS, by="lift", scores=[1, 2, 3, 4], deadline=1e-9).indices == [3, 2, 1, 0]
        start = time.monotonic()
        assert lm.rerank(QUERY, DOCUMENTS, by="vectors", deadline=60).read == 4
        assert time.monotonic() - start < 30

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ({"scores": [1, 2, 3, float("nan")]}, "score 3 is nan"), ({"scores": [1, 2]}, "one number per document, 4"),
            ({"scores": 3}, "one number per document"), ({"scores": [1, 2, 3, "4"]}, "score 3 is a number, not '4'"),
            ({"weight": 0.5}, "`weight` is about the scores of a first stage"), ({"depth": 5}, "`depth` is about"),
            ({"scores": [1, 2, 3, 4], "weight": 1.5}, "weight must be from 0"),
            ({"scores": [1, 2, 3, 4], "depth": 0}, "depth must be at least 1"), ({"deadline": 0}, "deadline must be"),
        ],
    )  # fmt: skip
    def test_mistakes(self, lm, given, words):
        with pytest.raises(ConfigError, match=words):
            lm.rerank(QUERY, DOCUMENTS, **given)


def test_a_language_model_ranks_by_lift_and_an_encoder_by_vectors(lm, bundled):
    assert (lm.default_measure(), lm.rerank(QUERY, DOCUMENTS).by) == ("lift", "lift")
    assert (bundled.default_measure(), bundled.default_measure(is_second=True)) == ("vectors", "lift")
    ready = lm.with_encoder(replace(lm.encoder, conventions="sentence-transformers"))
    assert ready.default_measure() == "vectors"


def test_vectors_count_less_beside_words_where_they_were_not_trained(tiny_folder, tmp_path, lm, bundled):
    weights = {"trained": 0.5, "untrained": 0.2}
    assert (lm.fusion_weight, bundled.fusion_weight) == (weights["untrained"], weights["trained"])
    ready = lm.with_encoder(replace(lm.encoder, conventions="sentence-transformers"))
    assert ready.fusion_weight == weights["trained"]
    assert lm.with_encoder(replace(lm.encoder, fusion=0.9)).fusion_weight == 0.9
    # A model whose weights were trained as a whole has nothing but its record to say so.
    shutil.copytree(tiny_folder, tmp_path / "model")
    for kind, weight in (("causal", weights["untrained"]), ("gur", weights["trained"])):
        record = {"recipe": {"objectives": [{"kind": kind}]}}
        (tmp_path / "model" / "training.json").write_text(json.dumps(record))
        assert gerund.load(tmp_path / "model").fusion_weight == weight
    vectors = {one.name() for one in OBJECTIVES if one.trains_vectors} - {"rankgen"}
    assert vectors <= saved_settings._EMBEDDING


def test_prompts_for_queries_and_documents(tiny_folder):
    lm = gerund.load(tiny_folder, dtype="float32")
    lm = lm.with_encoder(replace(lm.encoder, prompts={"query": "the ", "document": "in "}))
    [one] = lm.rerank("tin", ["cat"], by="vectors").scores
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
        assert "ranked by lift alone" in ran.err

    def test_many(self, tiny_folder, tmp_path):
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(json.dumps({"query": "tin", "documents": ["cat", "in"]}) + "\n")
        ran = run_cli("rerank", "-f", source, "-m", tiny_folder, "--by", "likelihood", "-o", out, "--scores", "1,2")
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        assert sorted(json.loads(out.read_text())["indices"]) == [0, 1]
        source.write_text(json.dumps({"query": "tin", "documents": ["cat", "in"], "scores": [1, 2]}) + "\n")
        ran = run_cli("rerank", "-f", source, "-m", tiny_folder, "--weight", 0, "--depth", 1)
        record = json.loads(ran.out)
        assert record.pop("seconds") >= 0
        assert record == {"query": "tin", "by": "lift", "indices": [1, 0], "scores": [0.0, -1.0], "read": 1}

    def test_mistakes(self, tmp_path):
        source = tmp_path / "in.jsonl"
        with no_loading():
            assert "give at least one document" in run_cli("rerank", "a").mistake
            assert "give either a query" in run_cli("rerank").mistake
            assert "unknown measure" in run_cli("rerank", "a", "b", "--by", "x").mistake
            assert "--scores are numbers" in run_cli("rerank", "a", "b", "--scores", "x").mistake
            assert "one number per document, 1" in run_cli("rerank", "a", "b", "--scores", "1,2").mistake
            for line, words in (
                ('{"query": "a"}', "needs 'documents'"),
                ('{"query": "a", "documents": [1]}', "document 0"),
            ):
                source.write_text(line)
                said = run_cli("rerank", "-f", source).mistake
                assert words in said
                assert "in.jsonl" in said
