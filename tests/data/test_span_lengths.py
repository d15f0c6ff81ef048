"""Spans that are hidden: how long, how many, where."""

import itertools
from collections import Counter

import numpy as np
import pytest

from gerund.data.masking import clipped_geometric, hump_geometric, sample_corrupted_spans
from gerund.errors import ConfigError


def test_the_hump_is_the_papers():
    # GUR's listing: distribution = [p ** abs(i - mode) for i in range(lower, upper + 1)], normalised.
    weights = [0.66 ** abs(i - 3) for i in range(1, 11)]
    np.testing.assert_allclose(hump_geometric(), np.array(weights) / sum(weights))
    assert clipped_geometric() @ np.arange(1, 11) == pytest.approx(3.8, abs=0.02)  # SpanBERT, section 2


@pytest.mark.parametrize(("lengths", "expected"), [("hump", hump_geometric()), ("geometric", clipped_geometric())])
def test_lengths_are_those_of_the_distribution(lengths, expected):
    # Long texts, so that the last span of a text, which is cut to what is left, hardly counts.
    counts = Counter()
    for seed in range(30):
        spans = sample_corrupted_spans(4000, np.random.default_rng(seed), lengths=lengths)
        counts.update(len(span) for span in spans)
    total = counts.total()
    found = np.array([counts[length] / total for length in range(1, 11)])
    np.testing.assert_allclose(found, expected, atol=0.02)
    mean = found @ np.arange(1, 11)
    assert mean == pytest.approx(expected @ np.arange(1, 11), rel=0.03)
    assert found.argmax() == expected.argmax()


def test_t5_has_spans_of_three_on_average():
    spans = [
        span for seed in range(50) for span in sample_corrupted_spans(400, np.random.default_rng(seed), lengths="t5")
    ]
    assert np.mean([len(span) for span in spans]) == pytest.approx(3.0, abs=0.01)


@pytest.mark.parametrize("lengths", ["hump", "geometric", "t5"])
@pytest.mark.parametrize("rate", [0.15, 0.5, 0.9])
def test_hides_the_share_that_is_asked_for(lengths, rate):
    rng = np.random.default_rng(0)
    for tokens in [2, 3, 4, 5, 7, 10, 33, 128]:
        for _ in range(20):
            spans = sample_corrupted_spans(tokens, rng, rate=rate, lengths=lengths)
            hidden = sum(map(len, spans))
            assert hidden == min(max(1, round(rate * tokens)), tokens - 1)
            assert spans[0].start >= 0
            assert spans[-1].stop <= tokens
            assert all(one.stop < two.start for one, two in itertools.pairwise(spans))


def test_nothing_of_a_text_of_one_token():
    assert sample_corrupted_spans(1, np.random.default_rng(0)) == []
    assert sample_corrupted_spans(0, np.random.default_rng(0)) == []


def test_every_arrangement_is_equally_likely():
    rng = np.random.default_rng(0)
    found = Counter(tuple(sample_corrupted_spans(6, rng, rate=0.2)) for _ in range(6000))
    assert set(found) == {(range(start, start + 1),) for start in range(6)}
    assert min(found.values()) > 850


def test_bad_settings():
    rng = np.random.default_rng(0)
    for rate in (0, 1, -0.1):
        with pytest.raises(ConfigError, match="must be between 0 and 1"):
            sample_corrupted_spans(10, rng, rate=rate)
    with pytest.raises(ConfigError, match="unknown span lengths 'humps'"):
        sample_corrupted_spans(10, rng, lengths="humps")
