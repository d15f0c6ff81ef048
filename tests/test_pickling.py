"""A model goes to another process as its spec."""

import copy
import pickle

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.language_model import LanguageModel
from gerund.scoring.dual_encoder import _for_scoring
from gerund.seq2seq_model import Seq2SeqModel
from tests.tiny import save_tiny_t5


def test_a_language_model_is_loaded_again_as_it_was_read(tiny_folder):
    lm = gerund.load(tiny_folder, attention="mask0-bidir", k=2, pooling="last", prompts={"query": "Q: "})
    data = pickle.dumps(lm)
    assert len(data) < 5000, "the spec, and no weights"
    again = pickle.loads(data)
    assert type(again) is LanguageModel
    assert (again.spec, again.fingerprint()) == (lm.spec, lm.fingerprint())
    np.testing.assert_array_equal(again.encode("the cat", prompt_name="query"), lm.encode("the cat", prompt="Q: "))


def test_what_was_changed_since_goes_along(tiny_folder):
    lm = gerund.load(tiny_folder)
    other = lm.with_encoder(gerund.EncoderConfig(pooling="first", attention=gerund.AttentionPlan("causal")))
    assert pickle.loads(pickle.dumps(other)).fingerprint() == other.fingerprint() != lm.fingerprint()


def test_a_t5(tmp_path):
    lm = gerund.load(save_tiny_t5(tmp_path / "t5"))
    again = pickle.loads(pickle.dumps(lm))
    assert type(again) is Seq2SeqModel
    assert again.fingerprint() == lm.fingerprint()


def test_a_copy_is_the_same_model_in_the_same_memory(tiny_folder):
    lm = gerund.load(tiny_folder)
    assert copy.copy(lm).model is lm.model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda lm: LanguageModel(lm.model, lm.tokenizer), "a model in memory can't be pickled: only models from"),
        (lambda lm: _for_scoring(lm, lm.encoder), "can't be pickled"),
        (
            lambda lm: lm.with_encoder(gerund.EncoderConfig(transform="all-but-the-top")).fitted(list("abcdefgh")),
            "has no spec; save it first",
        ),
    ],
)
def test_what_no_spec_says_is_refused(tiny_folder, make, message):
    with pytest.raises(ConfigError, match=message):
        pickle.dumps(make(gerund.load(tiny_folder)))
