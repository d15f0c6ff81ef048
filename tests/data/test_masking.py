"""Masked tokens, random masks and spans: what is drawn, how often, and what is refused."""

import itertools
from collections import Counter
from itertools import combinations, groupby, pairwise, product

import numpy as np
import pytest

from gerund.data.masking import (
    clipped_geometric,
    corrupt,
    hump_geometric,
    mask_tokens,
    sample_corrupted_spans,
    sample_spans,
)
from gerund.errors import ConfigError

MASK, RANDOM = 3, np.arange(1000, 1010)


def text(length, specials=(0,), seed=0):
    """Return ids that are neither the mask token nor among the random ones, and which may be touched."""
    ids = np.random.default_rng(seed).integers(10, 900, length).astype(np.int32)
    maskable = np.ones(length, dtype=bool)
    maskable[list(specials)] = False
    return ids, maskable


def masked(ids, maskable, rng, rate=0.2, **settings):
    return mask_tokens(ids, maskable, rate=rate, mask_id=MASK, random_ids=RANDOM, rng=rng, **settings)


class TestMaskTokens:
    def test_devlins_fractions(self):
        ids, maskable = text(200_000, specials=range(0, 200_000, 10))
        corrupted, selected = masked(ids, maskable, np.random.default_rng(0))
        n = selected.sum()
        # Three standard deviations of a share of 0.2 of 180,000, and of 0.8 and 0.1 of the 36,000 selected.
        assert n / 180_000 == pytest.approx(0.2, abs=0.003)
        assert (corrupted[selected] == MASK).mean() == pytest.approx(0.8, abs=0.0065)
        assert (corrupted[selected] >= 1000).mean() == pytest.approx(0.1, abs=0.005)
        assert (corrupted[selected] == ids[selected]).mean() == pytest.approx(0.1, abs=0.005)
        assert (
            np.bincount(corrupted[corrupted >= 1000] - 1000).min() > 250
        )  # each of ten random tokens, about 360 times
        assert (corrupted[~selected] == ids[~selected]).all()
        assert not selected[~maskable].any()

    def test_how_many_are_selected_is_left_to_chance(self):
        ids, maskable = text(51)
        counts = [masked(ids, maskable, np.random.default_rng(seed))[1].sum() for seed in range(2000)]
        # Binomial(50, 0.2): mean 10, variance 8.
        assert np.mean(counts) == pytest.approx(10, abs=0.2)
        assert np.var(counts) == pytest.approx(8, abs=0.8)

    def test_one_token_at_least(self):
        ids, maskable = text(6)
        selected = np.array([masked(ids, maskable, np.random.default_rng(seed), 0.01)[1] for seed in range(2000)])
        assert (selected.sum(axis=1) >= 1).all()
        fraction = selected.mean(axis=0)
        assert fraction[0] == 0
        assert fraction[1:] == pytest.approx(0.2, abs=0.03)  # each of the five in turn

    def test_one_token_and_none(self):
        ids, maskable = text(2)
        for seed in range(20):
            assert masked(ids, maskable, np.random.default_rng(seed), 0.01)[1].tolist() == [False, True]
        corrupted, selected = masked(ids, np.zeros(2, dtype=bool), np.random.default_rng(0), 1.0)
        assert corrupted.tolist() == ids.tolist()
        assert not selected.any()
        assert [len(part) for part in masked(ids[:0], maskable[:0], np.random.default_rng(0))] == [0, 0]

    def test_pure(self):
        ids, maskable = text(50)
        before = ids.copy(), maskable.copy()
        one, again, other = (masked(ids, maskable, np.random.default_rng(seed)) for seed in (0, 0, 1))
        assert one[0].tolist() == again[0].tolist()
        assert one[1].tolist() != other[1].tolist()
        assert one[0].dtype == ids.dtype
        assert (ids == before[0]).all()
        assert (maskable == before[1]).all()

    @pytest.mark.parametrize(
        "settings, message",
        [
            ({"rate": 0.0}, "rate must be above 0"),
            ({"rate": 1.1}, "rate must be above 0"),
            ({"rate": float("nan")}, "rate must be above 0"),
            ({"mask_fraction": 0.8, "random_fraction": 0.3}, "must be fractions of one whole"),
            ({"mask_fraction": -0.1}, "must be fractions of one whole"),
            ({"random_ids": []}, "needs random_ids"),
        ],
    )
    def test_mistakes_are_named(self, settings, message):
        ids, maskable = text(5)
        given = {"rate": 0.2, "mask_id": MASK, "random_ids": RANDOM, "rng": np.random.default_rng(0), **settings}
        with pytest.raises(ConfigError, match=message):
            mask_tokens(ids, maskable, **given)

    def test_shapes_that_do_not_fit(self):
        ids, maskable = text(5)
        for wrong in ((ids, maskable[:4]), (ids[None], maskable[None])):
            with pytest.raises(ConfigError, match="of one text each"):
                masked(*wrong, np.random.default_rng(0))


class TestCorrupt:
    @pytest.mark.parametrize("rate", [0.0, 0.15, 0.5, 1.0])
    def test_rate(self, rate):
        ids, maskable = text(40_000, specials=(0, 39_999))
        corrupted, selected = corrupt(ids, maskable, rate=rate, mask_id=MASK, rng=np.random.default_rng(0))
        assert selected[maskable].mean() == pytest.approx(rate, abs=0.0075)
        assert (corrupted[selected] == MASK).all()
        assert (corrupted[~selected] == ids[~selected]).all()
        assert not selected[~maskable].any()
        assert corrupted.dtype == ids.dtype

    def test_independently(self):
        ids, maskable = text(41, specials=())
        sampled = [corrupt(ids, maskable, rate=0.5, mask_id=MASK, rng=np.random.default_rng(s))[1] for s in range(3000)]
        sampled = np.array(sampled)
        assert sampled.sum(axis=1).var() == pytest.approx(41 / 4, rel=0.1)
        assert (sampled[:, 1:] & sampled[:, :-1]).mean() == pytest.approx(0.25, abs=0.01)

    def test_a_text_may_stay_whole_and_is_not_changed(self):
        ids, maskable = text(3)
        before = ids.copy()
        kept = [
            corrupt(ids, maskable, rate=0.5, mask_id=MASK, rng=np.random.default_rng(s))[1].any() for s in range(99)
        ]
        assert not all(kept)
        assert (ids == before).all()
        for rate in (-0.1, 1.1):
            with pytest.raises(ConfigError, match="rate must be from 0 to 1"):
                corrupt(ids, maskable, rate=rate, mask_id=MASK, rng=np.random.default_rng(0))


def spans_of(span):
    """Return (number, start, length) of every stretch that is not context."""
    found, place = [], 0
    for number, group in groupby(span.tolist()):
        length = len(list(group))
        if number:
            found.append((number, place, length))
        place += length
    return found


def arrangements(maskable, lengths):
    """Return every way to place spans of these lengths in this order, by trying them all."""
    ways = set()
    for starts in combinations(range(1, len(maskable)), len(lengths)):
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        apart = all(end < start for end, start in zip(ends, starts[1:], strict=False))
        inside = all(end <= len(maskable) and maskable[s:end].all() for s, end in zip(starts, ends, strict=True))
        if apart and inside:
            ways.add(starts)
    return ways


class TestSampleSpans:
    @pytest.mark.slow
    def test_rules_hold_for_texts_of_every_size(self):
        for length, count, seed in product((2, 5, 6, 9, 10, 11, 14, 40, 130, 131, 300), (1, 2, 4), range(40)):
            rng = np.random.default_rng([length, count, seed])
            maskable = rng.random(length) > (0.0, 0.1, 0.03)[seed % 3]
            span = sample_spans(maskable, count=count, rng=rng)
            assert span.shape == (length,)
            assert span.dtype == np.int64
            assert not span[~maskable].any()
            assert span[0] == 0
            found = spans_of(span)  # two that touch, or one number in two places, would show here
            assert [number for number, _, _ in found] == list(range(1, len(found) + 1))
            assert all(4 <= size <= 128 for _, _, size in found)
            assert all(a + size < b for (_, a, size), (_, b, _) in pairwise(found))
            assert len(found) <= count
            assert (maskable & (span == 0)).any() or not maskable.any()

    @pytest.mark.slow
    def test_numbers_and_lengths_are_uniform(self):
        maskable = np.ones(513, dtype=bool)
        maskable[0] = False
        sampled = [spans_of(sample_spans(maskable, rng=np.random.default_rng(seed))) for seed in range(6000)]
        counts = np.bincount([len(spans) for spans in sampled])
        assert counts[0] == 0
        assert counts[1] / 6000 == pytest.approx(0.5, abs=0.02)
        sizes = np.array([size for spans in sampled for _, _, size in spans])
        assert (sizes.min(), sizes.max()) == (4, 128)
        assert sizes.mean() == pytest.approx(66, abs=1.2)
        # 125 lengths, about 72 times each: chi-square with 124 degrees of freedom, 0.1% beyond 178.
        observed = np.bincount(sizes, minlength=129)[4:]
        expected = len(sizes) / 125
        assert ((observed - expected) ** 2 / expected).sum() < 178

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "pattern, settings",
        [
            (".xxxxxxxxx", {"count": 1, "shortest": 3, "longest": 3}),
            (".xxxxxxxxxx.", {"count": 2, "shortest": 3, "longest": 4}),
            ("xxxxxx.xxxxx", {"count": 2, "shortest": 2, "longest": 3}),
            (".xxx.xxxxxxx.xx", {"count": 3, "shortest": 2, "longest": 2}),
        ],
    )
    def test_every_arrangement_is_equally_likely(self, pattern, settings):
        maskable = np.array([letter == "x" for letter in pattern])
        seen: dict = {}
        for seed in range(2000):
            found = spans_of(sample_spans(maskable, rng=np.random.default_rng(seed), **settings))
            lengths = tuple(size for _, _, size in found)
            starts = tuple(start for _, start, _ in found)
            seen.setdefault(lengths, []).append(starts)
        assert {len(lengths) for lengths in seen} == set(range(1, settings["count"] + 1))
        for lengths, sampled in seen.items():
            possible = arrangements(maskable, lengths)
            assert set(sampled) <= possible
            expected = len(sampled) / len(possible)
            if expected > 20:
                off = sum((sampled.count(starts) - expected) ** 2 / expected for starts in possible)
                assert off < len(possible) + 4.5 * np.sqrt(2 * len(possible)) + 5  # far beyond chance

    @pytest.mark.parametrize(
        "length, count, longest",
        [(5, 0, 0), (6, 1, 4), (9, 1, 7), (10, 2, 4), (11, 2, 4), (12, 2, 5)],
    )
    def test_what_fits(self, length, count, longest):
        """One token of the text is left and one lies between two spans; the first is special."""
        maskable = np.arange(length) > 0
        sampled = [spans_of(sample_spans(maskable, rng=np.random.default_rng(seed))) for seed in range(300)]
        assert max(map(len, sampled)) == count
        most = [spans for spans in sampled if len(spans) == count]
        assert max((size for spans in most for _, _, size in spans), default=0) == longest

    def test_without_a_special_token_the_first_is_the_context(self):
        sampled = [sample_spans(np.ones(5, dtype=bool), rng=np.random.default_rng(seed)) for seed in range(10)]
        assert all(span.tolist() == [0, 1, 1, 1, 1] for span in sampled)

    def test_too_short_for_any(self):
        for length in (0, 1, 4):
            assert sample_spans(np.ones(length, dtype=bool), rng=np.random.default_rng(0)).tolist() == [0] * length
        apart = np.array([False, True, True, True, False, True, True, True])
        assert not sample_spans(apart, rng=np.random.default_rng(0)).any()
        assert not sample_spans(np.zeros(50, dtype=bool), rng=np.random.default_rng(0)).any()

    def test_pure(self):
        maskable = np.arange(60) > 0
        one, again, other = (sample_spans(maskable, rng=np.random.default_rng(seed)).tolist() for seed in (0, 0, 1))
        assert one == again != other
        assert maskable.tolist() == [False] + [True] * 59

    @pytest.mark.parametrize("settings", [{"count": 0}, {"shortest": 0}, {"shortest": 5, "longest": 4}])
    def test_impossible_settings(self, settings):
        with pytest.raises(ConfigError, match="spans need count"):
            sample_spans(np.ones(9, dtype=bool), rng=np.random.default_rng(0), **settings)


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
