"""MAUVE: against a literal double loop, against values of the authors' library, and on distributions that are known."""

import itertools
import math
import sys

import numpy as np
import pytest

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.papers.generated_texts import curve_area, divergence_curve, mauve

# Counts of two histograms and what mauve-text 0.4.0 says of them.
LIBRARY = [
    ([8, 4, 12, 6, 11, 13, 7, 8, 13, 8, 19, 11], [7, 12, 9, 10, 12, 17, 5, 10, 12, 10, 9, 7], 0.967220966167231),
    ([3, 4, 10, 11, 10, 5, 12, 14, 18, 12, 12, 9], [30, 36, 6, 2, 5, 16, 11, 2, 0, 1, 0, 11], 0.173649470155883),
    ([15, 13, 13, 19, 6, 16, 22, 11, 4, 1, 6, 4, 5, 15, 0], [0, 0, 2, 0, 0, 0, 0, 0, 28, 46, 1, 16, 3, 1, 53],
     0.016304833025246677),
    ([6, 15, 11, 7, 5, 12, 11, 7, 12, 8, 12, 4, 14, 14, 17, 8, 11, 12, 7, 7],
     [12, 3, 12, 16, 9, 5, 5, 4, 9, 7, 5, 13, 18, 11, 6, 21, 12, 8, 17, 7], 0.8480782199718979),
]  # fmt: skip
# Rows of the library's curve for the third pair.
LIBRARY_CURVE = {0: (1, 0), 1: (0.9999966, 0), 7: (0.3250229057, 0.0040682336), 13: (0.0608448901, 0.0712113292),
                 20: (0.0018293765, 0.4546436116), 25: (0, 0.9999982333), 26: (0, 1)}  # fmt: skip
# Mean and standard deviation over five k-means seeds of mauve-text 0.4.0 (its k-means starts otherwise): n, size,
# shift, seed of ``clouds``.
LIBRARY_CLOUDS = {
    (200, 16, 0.0, 0): (0.9697, 0.0182),
    (200, 16, 0.2, 1): (0.8785, 0.0140),
    (200, 16, 0.5, 2): (0.2293, 0.0360),
    (500, 16, 0.2, 0): (0.8406, 0.0262),
    (500, 64, 0.3, 0): (0.3741, 0.0267),
}


def clouds(n, size, shift, seed=0):
    """Sample two sets of vectors from normal distributions, the second shifted in every direction."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((n, size)), generator.standard_normal((n, size)) + shift


def slow_curve(p, q, scaling, points):
    curve = [(0.0, 1.0)]
    for step in range(points - 1, -1, -1):
        weight = 1e-6 + step * (1 - 2e-6) / (points - 1)
        to_q = to_p = 0.0
        for a, b in zip(p, q, strict=True):
            mixed = weight * a + (1 - weight) * b
            if b > 0:
                to_q += b * math.log(b / mixed)
            if a > 0:
                to_p += a * math.log(a / mixed)
        curve.append((math.exp(-scaling * to_q), math.exp(-scaling * to_p)))
    return [*curve, (1.0, 0.0)]


def slow_area(curve):
    total = 0.0
    for (left, y), (right, next_y) in itertools.pairwise(curve):
        total += (right - left) * (y + next_y) / 2
    return total


def histogram(counts):
    return np.array(counts) / sum(counts)


@pytest.mark.parametrize(("scaling", "points"), [(5.0, 25), (1.0, 25), (5.0, 7)])
@pytest.mark.parametrize("seed", range(5))
def test_curve_and_area_are_the_literal_sums(scaling, points, seed):
    p, q = np.random.default_rng(seed).dirichlet(np.full(9, 0.4), size=2)
    p[seed], q[-1] = 0, 0
    p, q = p / p.sum(), q / q.sum()
    curve = divergence_curve(p, q, scaling=scaling, points=points)
    np.testing.assert_allclose(curve, slow_curve(p, q, scaling, points), atol=1e-12)
    assert curve_area(curve) == pytest.approx(slow_area(curve.tolist()), abs=1e-12)


@pytest.mark.parametrize(("p", "q", "value"), LIBRARY)
def test_equal_histograms_give_the_librarys_value(p, q, value):
    assert curve_area(divergence_curve(histogram(p), histogram(q))) == pytest.approx(value, abs=1e-12)


def test_the_librarys_curve():
    p, q, _ = LIBRARY[2]
    curve = divergence_curve(histogram(p), histogram(q))[::-1]  # the library begins at the other end
    for row, point in LIBRARY_CURVE.items():
        np.testing.assert_allclose(curve[row], point, atol=1e-9)


@pytest.mark.parametrize(("p", "q", "value"), [([1, 2, 1], [1, 2, 1], 1.0), ([1, 0], [0, 1], 0.0)])
def test_equal_and_disjoint_histograms(p, q, value):
    assert curve_area(divergence_curve(histogram(p), histogram(q))) == pytest.approx(value, abs=0.005)


def test_either_side_may_be_called_p():
    p, q, value = LIBRARY[1]
    forth, back = divergence_curve(histogram(p), histogram(q)), divergence_curve(histogram(q), histogram(p))
    np.testing.assert_allclose(forth, back[::-1, ::-1], atol=1e-12)
    assert curve_area(back) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("cloud", "library"), LIBRARY_CLOUDS.items())
def test_vectors_give_about_what_the_library_gives(cloud, library):
    result = mauve(*clouds(*cloud))
    mean, spread = library
    assert abs(result.value - mean) < 2.5 * (result.spread + spread)
    assert result.buckets == cloud[0] // 10
    assert result.n == cloud[0]


@pytest.mark.slow
def test_sampling_noise_is_as_it_was_measured():
    """Of one distribution 500 vectors a side come to about .96, of two they stay clearly below, and 100 say less."""
    same = [mauve(*clouds(500, 16, 0.0, seed), seeds=2).value for seed in range(4)]
    shifted = [mauve(*clouds(500, 16, 0.3, seed), seeds=2).value for seed in range(4)]
    assert np.mean(same) == pytest.approx(0.965, abs=0.015)
    assert max(shifted) < min(same) - 0.1
    few = [mauve(*clouds(100, 16, 0.3, seed), seeds=2).value for seed in range(4)]
    assert np.std(few) > np.std(same)


@pytest.mark.slow
def test_value_spread_and_curve_belong_together():
    p, q = clouds(120, 8, 0.4)
    result = mauve(p, q)
    alone = [mauve(p, q, seeds=1, first_seed=seed) for seed in range(5)]
    values = [one.value for one in alone]
    assert result.value == pytest.approx(np.mean(values))
    assert result.spread == pytest.approx(np.std(values))
    assert result.spread > 0 == alone[0].spread
    assert curve_area(result.curve) == pytest.approx(np.median(values))
    assert mauve(p, q).value == result.value


def test_scaling_softens():
    p, q = clouds(120, 8, 0.4)
    assert mauve(p, q, seeds=1, scaling=1.0).value > mauve(p, q, seeds=1).value


def test_length_of_vectors_does_not_matter():
    p, q = clouds(120, 8, 0.4)
    longer = np.random.default_rng(1).uniform(0.1, 10, size=(120, 1))
    assert mauve(p * longer, q).value == pytest.approx(mauve(p, q).value, abs=1e-9)


def test_the_longer_side_is_cut_and_few_texts_are_noted():
    p, q = clouds(160, 8, 0.4)
    cut = mauve(p, q[:120])
    assert (cut.n, cut.buckets) == (120, 12)
    assert cut.value == mauve(p[:120], q[:120]).value
    [note] = cut.notes
    assert "120 texts" in note
    assert mauve(*clouds(500, 4, 0.0), seeds=1).notes == ()


@pytest.mark.slow
def test_equal_texts_everywhere():
    """A model that writes one and the same text shares one bucket at most with people; all alike is equal."""
    p, q = clouds(120, 8, 0.0)
    stuck = np.repeat(p[:1], 120, axis=0)
    assert mauve(stuck, q).value < 0.1
    assert mauve(stuck, stuck).value == pytest.approx(1.0)
    silent = np.zeros((120, 8))
    assert mauve(silent, q).value < 0.05


@pytest.mark.parametrize(
    ("p", "q", "error", "words"),
    [
        (np.ones((99, 4)), np.ones((500, 4)), DataError, "99 and 500 texts"),
        (np.ones((120, 4)), np.ones((120, 5)), ConfigError, r"\(120, 4\) and \(120, 5\)"),
        (np.ones(120), np.ones((120, 5)), ConfigError, "one size"),
        (np.ones((120, 4)), np.full((120, 4), np.nan), DataError, "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(p, q, error, words):
    with pytest.raises(error, match=words):
        mauve(p, q)


def test_without_scikit_learn_the_message_has_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gerund\[eval\]'"):
        mauve(*clouds(120, 4, 0.0))
