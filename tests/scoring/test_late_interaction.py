"""Late interaction against the slow obvious way: one text, one token and one document at a time."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, ConfigError, TextError
from gerund.attention.bound_plan import BoundPlan
from gerund.errors import DataError
from gerund.inference.encode.multi import TokenReader, rounded
from gerund.models.heads import LateHead
from gerund.scoring.late_interaction import LateInteraction, TokenRarity, maxsim
from gerund.settings.encoder import LateConfig
from tests.cli.helpers import run_cli
from tests.tiny import tiny_lm

QUERY = "the tin"
DOCUMENTS = ["a cat in the inn.", "there", "an in-tin thing in the rain", "there"]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm(attention=AttentionPlan("causal"))


def states_of(lm, text, marker, layer):
    """Return ids and states of a text's own tokens, of a pass over it alone."""
    whole = lm.tokenizer(marker + text, return_offsets_mapping=True)
    ids, own = whole.input_ids, [row for row, (_, end) in enumerate(whole.offset_mapping) if end > len(marker)]
    with torch.no_grad():
        bound = BoundPlan(lm.encoder.attention.resolve(lm.n_layers))
        out = lm.model.base_model(torch.tensor([ids]), output_hidden_states=True, attention_plan=bound, use_cache=False)
    return [ids[row] for row in own], out.hidden_states[layer][0, own].numpy()


def slow_score(lm, query, document, layer, projection=None, collection=None):
    """Return MaxSim, with idf over a collection where there is one, by two loops over tokens."""
    ids, asked = states_of(lm, query, "Query: ", layer)
    _, offered = states_of(lm, document, "Document: ", layer)
    if projection is not None:
        asked, offered = ([projection @ state for state in side] for side in (asked, offered))
    sets = [set(states_of(lm, text, "Document: ", layer)[0]) for text in collection or ()]
    total = weights = 0.0
    for token, one in zip(ids, asked, strict=True):
        found = sum(token in own for own in sets)
        weight = max(0.0, math.log((len(sets) + 1) / (found + 0.5))) if sets else 1.0
        cosines = [float(one @ other / np.linalg.norm(one) / np.linalg.norm(other)) for other in offered]
        total, weights = total + weight * max(cosines), weights + weight
    return total / weights


@pytest.mark.parametrize("plan", ["causal", "bidir"])
def test_equals_one_token_at_a_time(plan):
    lm = tiny_lm(attention=AttentionPlan(plan))
    ranking = lm.rerank(QUERY, DOCUMENTS, by="maxsim")
    assert ranking.by == "maxsim"
    for place, score in ranking:
        assert score == pytest.approx(slow_score(lm, QUERY, DOCUMENTS[place], 2), abs=1e-5)


def test_projected_and_with_the_layers_that_were_trained(lm, tmp_path):
    projection = np.random.default_rng(0).normal(size=(5, lm.runtime.state_width)).astype(np.float32)
    trained = lm.with_encoder(lm.encoder)
    trained.late = LateHead(LateConfig(layers="3"), projection)
    assert trained.default_measure() == "maxsim"
    for place, score in trained.rerank(QUERY, DOCUMENTS):
        assert score == pytest.approx(slow_score(lm, QUERY, DOCUMENTS[place], 3, projection), abs=1e-5)
    # It is saved with the model, and goes with the plan that it was trained for.
    trained.save(tmp_path / "model")
    again = gerund.load(tmp_path / "model", dtype="float32")
    assert again.late.fingerprint == trained.late.fingerprint
    np.testing.assert_allclose(again.encode_multi(QUERY), trained.encode_multi(QUERY), atol=1e-5)
    assert again.encode_multi(QUERY).shape[1] == 5
    assert gerund.load(tmp_path / "model", attention="bidir").late is None
    assert run_cli("convert", tmp_path / "model", tmp_path / "converted").code == 0
    assert gerund.load(tmp_path / "converted").late.fingerprint == trained.late.fingerprint
    assert again.with_encoder(replace(again.encoder, attention=AttentionPlan("bidir"))).late is None


def test_a_broken_projection(lm, tmp_path):
    trained = lm.with_encoder(lm.encoder)
    trained.late = LateHead(LateConfig(), np.ones((5, lm.runtime.state_width), dtype=np.float32))
    trained.save(tmp_path / "model")
    LateHead(LateConfig(), np.ones((5, 3), dtype=np.float32)).save(tmp_path / "model")
    with pytest.raises(DataError, match="for other states"):
        gerund.load(tmp_path / "model")
    (tmp_path / "model" / "late.safetensors").write_bytes(b"no")
    with pytest.raises(DataError, match="cannot be read"):
        gerund.load(tmp_path / "model")
    (tmp_path / "model" / "late.json").write_text(json.dumps({"format": 1, "late": {"layer": 3}}))
    with pytest.raises(ConfigError, match="layer"):
        gerund.load(tmp_path / "model")


def test_a_pass_ends_at_the_last_layer_that_is_needed(lm, monkeypatch):
    layers = lm.model.base_model.layers
    run = []
    for number, layer in enumerate(layers):
        own = layer.forward
        monkeypatch.setattr(
            layer, "forward", lambda *a, own=own, number=number, **k: (run.append(number), own(*a, **k))[1]
        )
    [vectors] = TokenReader(lm.runtime, LateConfig(layers="1+2")).vectors(
        TokenReader(lm.runtime, LateConfig(layers="1+2")).tokens([QUERY], is_query=True)
    )
    assert run == [0, 1]
    mean = (states_of(lm, QUERY, "Query: ", 1)[1] + states_of(lm, QUERY, "Query: ", 2)[1]) / 2
    np.testing.assert_allclose(vectors, mean / np.linalg.norm(mean, axis=1, keepdims=True), atol=1e-5)


def test_token_vectors(lm, bundled):
    one, other = lm.encode_multi([QUERY, "rain"])
    assert one.shape == (len(states_of(lm, QUERY, "Document: ", 2)[0]), lm.runtime.state_width)
    assert other.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(one, axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(lm.encode_multi("rain"), other, atol=1e-5)
    assert not np.allclose(lm.encode_multi("rain", is_query=True), other, atol=1e-2)
    assert lm.encode_multi([]) == []
    pooled = lm.encode_multi("rain", pool_factor=len(other) - 1)
    wanted = np.stack([other[:-1].mean(0), other[-1]])
    np.testing.assert_allclose(pooled, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)
    # A model that was trained to embed gives its last states, without a marker.
    states = bundled.encode_tokens("rain on rails")[0]
    assert any(
        np.allclose(bundled.encode_multi("rain on rails")[0], row / np.linalg.norm(row), atol=1e-4) for row in states
    )


@pytest.mark.parametrize(("precision", "apart"), [("float16", 1e-3), ("int8", 2e-2)])
def test_in_fewer_bits_the_score_is_almost_the_same(lm, precision, apart):
    vectors = lm.encode_multi(DOCUMENTS[0], precision=precision)
    assert vectors.dtype == np.dtype(precision)
    query = lm.encode_multi(QUERY, is_query=True)
    assert maxsim(query, vectors) == pytest.approx(maxsim(query, lm.encode_multi(DOCUMENTS[0])), abs=apart)
    assert rounded(np.zeros((0, 4), dtype=np.float32), precision).shape == (0, 4)


def test_what_cannot_be_compared(lm):
    assert lm.rerank(QUERY, [], by="maxsim").indices == []
    assert lm.rerank(QUERY, ["rain"], by="maxsim").indices == [0]
    assert maxsim(np.zeros((0, 3)), np.ones((2, 3))) == maxsim(np.ones((2, 3)), np.zeros((0, 3))) == 0
    with pytest.raises(ConfigError, match="cannot be compared"):
        maxsim(np.ones((2, 3)), np.ones((2, 4)))
    for given, words in (({"precision": "int4"}, "int4"), ({"pool_factor": 0}, "pool_factor")):
        with pytest.raises(ConfigError, match=words):
            lm.encode_multi("rain", **given)
    for texts in ("", [" "], ["rain", 3]):
        with pytest.raises(TextError):
            lm.encode_multi(texts)
    with pytest.raises(TextError, match="the query is empty"):
        lm.rerank(" ", DOCUMENTS, by="maxsim")
    short = tiny_lm(attention=AttentionPlan("causal"), max_length=24)
    with pytest.warns(UserWarning, match="were cut"):
        assert len(short.rerank("rain " * 50, ["rain " * 90, "tin"], by="maxsim")) == 2


def test_rare_tokens_of_a_collection_count_more(lm):
    reader = lm.token_reader()
    rarity = TokenRarity(map(reader.ids, reader.tokens(DOCUMENTS, is_query=False)))
    found = LateInteraction(lm, QUERY, rarity=rarity)(DOCUMENTS)
    wanted = [slow_score(lm, QUERY, text, 2, collection=DOCUMENTS) for text in DOCUMENTS]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
