"""What each kind of system can do follows from what it has, and so do the sentences about what it cannot."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.base import (
    CAPABILITIES,
    EmbeddingCache,
    Encodes,
    EncodesWords,
    EncodesWordTokens,
    Generates,
    HasLikelihoods,
    Ranks,
    ScoresCandidates,
    System,
    capabilities,
    key_of_text,
    unsupported_message,
)
from gerund.evaluation.systems.language_model import language_model_system, trained_plan
from gerund.evaluation.systems.search import BM25System, HybridSystem
from tests.evaluation.tables import FakeEncoder
from tests.evaluation.toys import ToyLikelihood, ToyTask
from tests.tiny import save_tiny_t5


@pytest.fixture(scope="module")
def causal(tiny_folder):
    return language_model_system("tiny", gerund.load(tiny_folder))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return language_model_system("t5", gerund.load(save_tiny_t5(tmp_path_factory.mktemp("t5"))))


def test_siblings_differ_in_what_they_can_do(causal, t5):
    assert capabilities(causal) == list(CAPABILITIES)
    assert capabilities(t5) == [Encodes, EncodesWords, EncodesWordTokens, Ranks, ScoresCandidates, Generates]
    assert capabilities(BM25System()) == [Ranks, ScoresCandidates]
    assert capabilities(HybridSystem(causal)) == [Ranks, ScoresCandidates]
    assert capabilities(FakeEncoder("vectors")) == [Encodes, Ranks]


def test_somebody_elses_system_takes_part_where_it_has_the_members():
    class Lengths(System):
        name = fingerprint = "lengths"

        def describe(self):
            return {"model": "lengths"}

        def encode(self, texts, *, prompt=None, normalize=False, show=None):
            return FakeEncoder("ones").encode(texts)

    one = Lengths("lengths")
    assert capabilities(one) == [Encodes]
    with pytest.raises(ConfigError, match="can generate texts, and lengths can only encode whole texts"):
        evaluate([one], [ToyTask(name="toy/one")])


def test_systems_that_can_do_the_same_are_named_together(causal, t5):
    found = unsupported_message([BM25System(), HybridSystem(causal), t5], [HasLikelihoods, HasLikelihoods, Generates])
    assert found == (
        "these tasks need a system that can tell how probable a text is or generate texts, and bm25, tiny + BM25 can "
        "only rank documents and score candidates; t5 can only encode whole texts, encode words, encode the tokens "
        "of words, rank documents, score candidates and generate texts"
    )


def test_one_that_can_is_enough(causal, t5):
    done = evaluate([t5, causal, BM25System()], [ToyLikelihood(name="toy-likelihood/one")])
    assert [result.system for result in done.results] == ["tiny"]


def test_a_hybrid_of_vectors_alone_takes_no_scorer():
    one = HybridSystem(FakeEncoder("vectors"))
    assert one.find_scorer("", seed=0) is None
    with pytest.raises(ConfigError, match="takes no scorer such as pmi"):
        one.find_scorer("pmi", seed=0)


@pytest.mark.slow
def test_an_adapter_is_named_with_the_plan_it_was_trained_under(tmp_path):
    bundled = gerund.load()
    other = bundled.with_encoder(replace(bundled.encoder, attention=gerund.AttentionPlan("causal")))
    for lm in (bundled, other):
        told = language_model_system("x", lm).describe()
        assert told["adapter_name"] == "default"
        assert told["adapter_plan"] == bundled.encoder.attention.with_defaults(lm.n_layers).to_dict()
    assert "adapter_name" not in language_model_system("x", gerund.load(adapter="none")).describe()
    assert trained_plan(tmp_path, 4) is None


class Encoder:
    """Turns a text into (length, first letter) and counts what it was asked."""

    def __init__(self):
        self.asked = []

    def __call__(self, texts, kept):
        self.asked += texts
        return np.array([[len(text), ord(text[0]) if text else 0] for text in texts], dtype=np.float32)


@pytest.fixture(params=["memory", "disk"])
def cache(request, tmp_path):
    return EmbeddingCache(tmp_path / "kept" if request.param == "disk" else None)


def test_each_text_is_encoded_once(cache):
    encode = Encoder()
    first = cache.vectors("f", "", ["bb", "a", "bb", ""], encode)
    np.testing.assert_array_equal(first, [[2, 98], [1, 97], [2, 98], [0, 0]])
    second = cache.vectors("f", "", ["ccc", "a"], encode)
    np.testing.assert_array_equal(second, [[3, 99], [1, 97]])
    assert encode.asked == ["bb", "a", "", "ccc"]


def test_encoders_and_prompts_are_kept_apart(cache):
    encode = Encoder()
    for fingerprint, prompt in [("f", ""), ("g", ""), ("f", "query: ")]:
        cache.vectors(fingerprint, prompt, ["a"], encode)
    assert encode.asked == ["a", "a", "a"]


def test_put_keeps_what_is_there(cache):
    cache.put("f", "", ["a", "b"], np.array([[1.0], [2.0]]))
    cache.put("f", "", ["b", "c", "c"], np.array([[9.0], [3.0], [3.0]]))
    rows = cache.vectors("f", "", ["c", "b", "a"], Encoder())
    assert rows.tolist() == [[3.0], [2.0], [1.0]]
    assert key_of_text("a") in cache.store("f", "")
    assert key_of_text("d") not in cache.store("f", "")


def test_no_text_no_vector(cache):
    assert cache.vectors("f", "", [], Encoder()).shape[0] == 0


def test_vectors_outlive_the_process(tmp_path):
    EmbeddingCache(tmp_path).vectors("f", "p", ["a", "b"], Encoder())
    encode = Encoder()
    again = EmbeddingCache(tmp_path).vectors("f", "p", ["b", "c"], encode)
    assert again.tolist() == [[1, 98], [1, 99]]
    assert encode.asked == ["c"]
