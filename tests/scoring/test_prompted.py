"""Ranking by asking the model: against one pass at a time, with the prompt put together by hand."""

import time

import numpy as np
import pytest
import torch

from gerund import AttentionPlan, ConfigError, TextError
from gerund.evaluation.tuning import measures_of
from gerund.inference.inspection import unplanned_maps
from gerund.scoring.prompted import Listwise, QueryAttention
from tests.tiny import byte_tokenizer, tiny_lm

QUERY = "the tin"
DOCUMENTS = ["a cat in the inn.", "there", "an in-tin thing in the rain", "<s> of tins"]
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def build(template=None, answers=("Yes", "No"), limit=2000):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(answers))
    tokenizer.chat_template, tokenizer.model_max_length = template, limit
    changes = {"num_hidden_layers": 3, "max_position_embeddings": limit}
    return tiny_lm("llama", tokenizer, changes=changes, attention=AttentionPlan("causal"))


@pytest.fixture(scope="module", params=[None, TEMPLATE], ids=["plain", "chat"])
def lm(request):
    return build(request.param)


def ids_of(lm, parts):
    """Return token ids of parts that are tokenized apart; "<s>" in text is spelled."""
    found = []
    for text in parts:
        found += [lm.tokenizer.bos_token_id] if text is None else [
            token for piece in [text] for token in lm.tokenizer(piece, add_special_tokens=False,
                                                                split_special_tokens=True).input_ids]  # fmt: skip
    return found


def turn(lm, asked):
    if lm.tokenizer.chat_template:
        return [None, f"user: {asked}", None, "assistant:"]
    return [None, f"{asked}\nAnswer:"]


def logits(lm, ids):
    with torch.no_grad():
        return lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1]


def test_yesno_is_the_difference_of_two_logits(lm):
    yes, no = (lm.tokenizer.convert_tokens_to_ids(name) for name in ("Yes", "No"))
    expected = []
    for text in DOCUMENTS:
        asked = f"Query: {QUERY}\n\nDocument: {text}\n\nIs the document relevant to the query? Answer Yes or No."
        # In the question itself both answers are tokens, which the tokenizer of texts finds by itself.
        found = logits(lm, ids_of(lm, turn(lm, asked)))
        expected.append(float(found[yes] - found[no]))
    found = lm.rerank(QUERY, DOCUMENTS, by="yesno")
    assert found.scores == pytest.approx(sorted(expected, reverse=True), abs=1e-4)
    assert found.indices == list(np.argsort(-np.array(expected), kind="stable"))


def letters_of(lm, texts):
    """Return the log-probability of each document's letter, by one pass over the prompt."""
    listed = "".join(f"[{'ABCDEFGHIJ'[place]}] {text}\n\n" for place, text in enumerate(texts))
    asked = (
        f"{listed}Query: {QUERY}\n\nWhich of the documents is the most relevant to the query? Answer with its letter."
    )
    letters = [lm.tokenizer.convert_tokens_to_ids("ABCDEFGHIJ"[place]) for place in range(len(texts))]
    return logits(lm, ids_of(lm, turn(lm, asked)))[letters].log_softmax(0).tolist()


def test_listwise_is_the_mean_of_both_orders(lm):
    forward, backward = letters_of(lm, DOCUMENTS), letters_of(lm, DOCUMENTS[::-1])[::-1]
    expected = [(a + b) / 2 for a, b in zip(forward, backward, strict=True)]
    scorer = Listwise(lm.model, lm.tokenizer, QUERY)
    assert scorer.window_scores(DOCUMENTS).tolist() == pytest.approx(expected, abs=1e-4)
    found = lm.rerank(QUERY, DOCUMENTS, by="listwise")
    assert found.indices == list(np.argsort(-np.array(expected), kind="stable"))
    assert found.scores == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert lm.rerank(QUERY, DOCUMENTS[:1], by="listwise").scores == [1]


def test_listwise_slides_a_window_from_the_last_to_the_first():
    lm = build()
    texts = [f"tin {number}" + "in" * (number % 5) for number in range(18)]
    order = list(range(18))
    for first in (8, 3, 0):
        window = order[first : first + 10]
        forward = letters_of(lm, [texts[place] for place in window])
        backward = letters_of(lm, [texts[place] for place in window][::-1])[::-1]
        value = np.array(forward) + np.array(backward)
        order[first : first + 10] = [window[place] for place in np.argsort(-value, kind="stable")]
    assert lm.rerank(QUERY, texts, by="listwise").indices == order


def test_listwise_keeps_places_after_its_deadline(monkeypatch):
    lm, read = build(), []
    scorer = Listwise(lm.model, lm.tokenizer, QUERY)
    texts = [f"tin {number}" for number in range(18)]
    assert scorer(texts, end=time.monotonic()).argsort()[::-1].tolist() == list(range(18))

    def slow(self, window):
        read.append(window)
        time.sleep(0.2)
        return np.arange(float(len(window)))

    monkeypatch.setattr(Listwise, "window_scores", slow)
    found = lm.rerank(QUERY, texts, by="listwise", scores=list(range(18, 0, -1)), weight=1.0, deadline=0.1)
    assert len(read) == 1
    assert found.indices == [*range(8), *range(17, 7, -1)]


def attention_of(lm, document, query):
    """Return the mean attention of the query's tokens to the document, from transformers' own weights."""
    frame = f"Document: {document}\n\nQuery:"
    role = "user: " if lm.tokenizer.chat_template else ""
    whole = ids_of(lm, [None, f"{role}{frame} {query}"])
    head = len(ids_of(lm, [None, f"{role}Document:"]))
    own = len(ids_of(lm, [f" {document}"]))
    tail = len(ids_of(lm, [f" {query}"]))
    weights = unplanned_maps(lm.model, whole)[-1].weights  # (heads, T, T)
    return float(weights[:, -tail:, head : head + own].sum(-1).mean())


def test_attention_is_what_the_query_pays_less_what_nothing_pays(lm):
    texts = ["a cat in the inn.", "there", "a thing in the rain"]
    scorer = QueryAttention(lm.model, lm.tokenizer, QUERY)
    expected = [attention_of(lm, text, QUERY) - attention_of(lm, text, "N/A") for text in texts]
    assert scorer(texts).tolist() == pytest.approx(expected, abs=1e-4)
    found = lm.rerank(QUERY, texts, by="attention")
    assert found.indices == list(np.argsort(-np.array(scorer(texts)), kind="stable"))


@pytest.mark.parametrize("by", ["yesno", "listwise", "attention"])
def test_bad_input(by):
    lm = build(limit=400)
    assert lm.rerank(QUERY, [], by=by).indices == []
    assert lm.rerank(QUERY, ["in", "in", "tin"], by=by).read == 3
    long = lm.rerank(QUERY, ["tin " * 1000, "in"], by=by)
    assert sorted(long.indices) == [0, 1]
    assert np.isfinite(long.scores).all()
    with pytest.raises(TextError, match="the query is so long"):
        lm.rerank("tin " * 300, DOCUMENTS, by=by)


def test_only_what_a_model_can_do_is_tried():
    assert [by for by in ("yesno", "listwise", "attention") if by in measures_of(build())] == [
        "yesno", "listwise", "attention"]  # fmt: skip
    lm = build(answers=())
    assert "yesno" not in measures_of(lm)
    with pytest.raises(ConfigError, match="no single tokens for Yes and No"):
        lm.rerank(QUERY, DOCUMENTS, by="yesno")
