"""Prompts by name, what is a slip rather than a text, and settings that are no settings."""

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.settings.sampling import Sampling, sampling_or

NAMED = gerund.EncoderConfig(prompt="own: ", prompts={"query": "Question: ", "document": ""})


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, "own: "),
        ({"prompt_name": "query"}, "Question: "),
        ({"prompt_name": "document"}, ""),
        ({"prompt": "querying a text: "}, "querying a text: "),
        ({"prompt": ""}, ""),
    ],
)
def test_a_prompt_is_a_text_or_the_name_of_one(given, used):
    assert NAMED.prompt_text(**given) == used


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (gerund.Sampling, {"temperature": "hot"}, "temperature is a number, not 'hot'"),
        (gerund.Sampling, {"temperature": True}, "temperature is a number, not True"),
        (gerund.Sampling, {"temperature": None}, "temperature is a number, not None"),
        (gerund.Sampling, {"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        (gerund.Sampling, {"temperature": float("inf")}, "temperature must be finite, got inf"),
        (gerund.Sampling, {"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        (gerund.Sampling, {"seed": "x"}, "seed is a whole number, not 'x'"),
        (gerund.Sampling, {"seed": 1.0}, "seed is a whole number, not 1.0"),
        (gerund.Sampling, {"top_k": 2.5}, "top_k is a whole number, not 2.5"),
        (gerund.Sampling, {"top_p": "0.9"}, "top_p is a number, not '0.9'"),
        (gerund.Sampling, {"typical_p": [1]}, r"typical_p is a number, not \[1\]"),
        (gerund.Rerank, {"samples": "5"}, "samples is a whole number, not '5'"),
        (gerund.Rerank, {"beams": None}, "beams is a whole number, not None"),
        (gerund.Rerank, {"every": 2.5}, "every is a whole number, not 2.5"),
    ],
)
def test_settings_of_the_wrong_kind(kind, settings, said):
    with pytest.raises(ConfigError, match=said):
        kind(**settings)


def test_a_prompt_that_is_no_unicode_is_named():
    with pytest.raises(ConfigError, match="the prompt 'query' is not valid Unicode"):
        gerund.EncoderConfig(prompts={"document": "fine", "query": "\ud800"})


def test_a_length_without_a_limit():
    # What tokenizers say that have no limit.
    assert gerund.EncoderConfig(max_length=10**30).max_length == 10**30
    assert gerund.Sampling(1.0, top_k=2**40).top_k == 2**40


def test_numbers_of_numpy_are_numbers():
    sampling = gerund.Sampling(temperature=np.float32(0.5), top_k=np.int64(3), top_p=np.float64(0.9), seed=np.int64(7))
    assert (type(sampling.top_k), type(sampling.seed)) == (int, int)
    assert sampling == gerund.Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=7)


def test_what_stands_for_settings_that_are_left_out():
    own = gerund.Sampling(temperature=1.0)
    assert sampling_or(None) == gerund.Sampling()
    assert sampling_or(None, own) == sampling_or(own) == own
    for given in (0.8, {}, "greedy"):
        with pytest.raises(ConfigError, match=r"sampling is a Sampling, such as Sampling\(temperature=0.8\), not "):
            sampling_or(given)


def test_a_seed_that_is_an_array():
    assert Sampling(seed=np.array([1, 2])).seed == (1, 2)
    with pytest.raises(ConfigError, match="seed is a whole number, not array"):
        Sampling(seed=np.array(3))
