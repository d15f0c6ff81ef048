"""Metrics of generated texts: MAUVE, and how often a text repeats itself.

MAUVE says how far two sets of texts are apart in a language model's eyes (Pillutla et al. 2021). Both sets, as vectors,
are put into common buckets by k-means; the two histograms are compared by the area under their divergence curve: 1 when
they are equal, 0 when no bucket is shared. Written from the paper; on equal histograms it agrees with the authors'
library (mauve-text 0.4.0) to rounding.

Measures of repetition are fractions of one text; a corpus has the mean over its texts (Welleck et al. 2020, section 6),
since the fraction of distinct n-grams in many texts taken together falls with their number. A text that is too short
for a measure does not repeat itself: 0.

Knows: vectors, sequences of words or tokens. Does not know: models, where the texts are from.
"""

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.text_analysis import segments

LEAST = 100
ADVISED = 500
SCALING = 5.0
CURVE_POINTS = 25
WINDOW = 20

_TEXTS_A_BUCKET = 10
_VARIANCE = 0.9
_STARTS = 5
_ITERATIONS = 500
_RESAMPLES = 100


@dataclass(frozen=True)
class MauveResult:
    """What two sets of vectors came to.

    Attributes:
        value: mean over the k-means seeds, from 0 to 1.
        spread: standard deviation over the seeds; the spread over other samples is larger.
        error: standard error by resampling the texts, with replacement, in the buckets of the median seed.
        curve: ``(points, 2)`` divergence curve of the seed with the median value, from (0, 1) to (1, 0).
        buckets: number of clusters.
        n: vectors of either set.
        notes: sentences that a reader of the number has to know.
    """

    value: float
    spread: float
    error: float
    curve: np.ndarray
    buckets: int
    n: int
    notes: tuple[str, ...] = ()


def require_scikit_learn() -> None:
    """Check that MAUVE can be computed.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("MAUVE needs scikit-learn: pip install 'gerund[eval]'") from error


def mauve(
    p_features: np.ndarray, q_features: np.ndarray, *, seeds: int = 5, first_seed: int = 0, scaling: float = SCALING
) -> MauveResult:
    """Compare two sets of vectors.

    The vectors are given length 1, projected on the main directions that together hold 90% of the variance,
    given length 1 again, and clustered by k-means with a bucket for every ten vectors of a set and five starts.

    Args:
        p_features: ``(n, D)``; a longer set is cut to the length of the other.
        q_features: ``(m, D)``.
        seeds: how often the k-means is done again, each with a seed of its own.
        first_seed: seed of the first; the others follow it.
        scaling: the constant in the exponent of the curve.

    Raises:
        DataError: fewer than 100 vectors on a side, or numbers that are not finite.
        ConfigError: vectors of different sizes.
        MissingDependencyError: scikit-learn is not installed.
    """
    p, q = (np.asarray(side, dtype=np.float64) for side in (p_features, q_features))
    n = _checked_size(p, q)
    require_scikit_learn()
    points = _reduced(np.concatenate([p[:n], q[:n]]))
    buckets = max(2, round(n / _TEXTS_A_BUCKET))
    curves, labelled = [], []
    for seed in range(first_seed, first_seed + seeds):
        labels = _clusters(points, buckets, seed)
        labelled.append((labels[:n], labels[n:]))
        curves.append(_curve(*labelled[-1], buckets, scaling))
    values = [curve_area(curve) for curve in curves]
    median = int(np.argsort(values)[len(values) // 2])
    notes = []
    if n < ADVISED:
        notes.append(
            f"MAUVE of {n} texts a side is rough: below {ADVISED} it moves by several points from sample to sample"
        )
    return MauveResult(
        value=float(np.mean(values)),
        spread=float(np.std(values)),
        error=_resampled(*labelled[median], buckets, scaling, first_seed),
        curve=curves[median],
        buckets=buckets,
        n=n,
        notes=tuple(notes),
    )


def _curve(p_labels: np.ndarray, q_labels: np.ndarray, buckets: int, scaling: float) -> np.ndarray:
    p, q = (np.bincount(side, minlength=buckets) / len(side) for side in (p_labels, q_labels))
    return divergence_curve(p, q, scaling=scaling)


def _resampled(p_labels: np.ndarray, q_labels: np.ndarray, buckets: int, scaling: float, seed: int) -> float:
    """Return the standard deviation of the area over samples of the texts."""
    rng = np.random.default_rng(seed)
    areas = [
        curve_area(_curve(rng.choice(p_labels, len(p_labels)), rng.choice(q_labels, len(q_labels)), buckets, scaling))
        for _ in range(_RESAMPLES)
    ]
    return float(np.std(areas))


def divergence_curve(
    p: np.ndarray, q: np.ndarray, *, scaling: float = SCALING, points: int = CURVE_POINTS
) -> np.ndarray:
    """Return the divergence curve of two histograms (Pillutla et al., equation 1).

    For mixtures ``r = w p + (1 - w) q`` the points are ``(exp(-c KL(q|r)), exp(-c KL(p|r)))``, between the ends
    (0, 1) and (1, 0). As in the authors' library the weights w stand at even distances in the open interval
    (0, 1), and buckets are not smoothed: one that is empty on one side leaves every divergence finite.

    Args:
        p: ``(k,)`` fractions that add up to 1.
        q: the same.
        scaling: c.
        points: number of mixtures.

    Returns:
        ``(points + 2, 2)``, the first column rising, the second falling.
    """
    weights = np.linspace(1 - 1e-6, 1e-6, points)
    inner = []
    for weight in weights:
        mixture = weight * p + (1 - weight) * q
        inner.append((np.exp(-scaling * _kl(q, mixture)), np.exp(-scaling * _kl(p, mixture))))
    return np.array([(0.0, 1.0), *inner, (1.0, 0.0)])


def curve_area(curve: np.ndarray) -> float:
    """Return the area under a curve of ``(x, y)`` with rising x, by trapezoids.

    >>> curve_area(np.array([(0.0, 1.0), (1.0, 0.0)]))
    0.5
    """
    x, y = curve.T
    return float((np.diff(x) * (y[1:] + y[:-1])).sum() / 2)


def sentences_of(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences without the white space around them; what follows the last full stop is one too.

    >>> sentences_of("Mr. Smith left.  He left. He")
    ['Mr. Smith left.', 'He left.', 'He']
    """
    return [stripped for sentence in segments(text, language) if (stripped := sentence.strip())]


def rep_n(tokens: Sequence[Hashable], n: int) -> float:
    """Return 1 - unique n-grams / n-grams (MAGNET, equation 6).

    >>> rep_n("a b c a b d".split(), 2)
    0.2
    """
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    unique = {tuple(tokens[start : start + n]) for start in range(total)}
    return (total - len(unique)) / total


def rep_sentences(sentences: Sequence[str]) -> float:
    """Return 1 - unique sentences / sentences (MAGNET, equation 6).

    >>> rep_sentences(["He left.", "He left.", "He left.", "She"])
    0.5
    """
    if not sentences:
        return 0.0
    return (len(sentences) - len(set(sentences))) / len(sentences)


def rep_window(tokens: Sequence[Hashable], prefix: Sequence[Hashable] = (), *, window: int = WINDOW) -> float:
    """Return the fraction of tokens that stand among the ``window`` tokens before them (RankGen, Table 16: ``rep``).

    Args:
        tokens: what was written.
        prefix: what stood before; its last tokens count as tokens before the first ones that were written,
            as in Welleck et al. (2020), who look back into whatever precedes.
        window: how far to look back.

    >>> rep_window("the cat saw the dog".split())
    0.2
    >>> rep_window("the cat saw the dog".split(), "a dog and the".split())
    0.6
    """
    if not tokens:
        return 0.0
    everything = [*prefix, *tokens]
    places = range(len(prefix), len(everything))
    copied = sum(everything[place] in everything[max(0, place - window) : place] for place in places)
    return copied / len(tokens)


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    """Return the Kullback-Leibler divergence in nats; ``q`` is nowhere zero where ``p`` is not."""
    used = p > 0
    return float((p[used] * np.log(p[used] / q[used])).sum())


def _checked_size(p: np.ndarray, q: np.ndarray) -> int:
    if p.ndim != 2 or q.ndim != 2 or p.shape[1] != q.shape[1]:
        raise ConfigError(f"MAUVE compares vectors of one size, not arrays of shapes {p.shape} and {q.shape}")
    n = min(len(p), len(q))
    if n < LEAST:
        raise DataError(
            f"MAUVE of {len(p)} and {len(q)} texts says nothing; give at least {LEAST} of each, better {ADVISED}"
        )
    if not (np.isfinite(p).all() and np.isfinite(q).all()):
        raise DataError("MAUVE was given vectors with numbers that are not finite")
    return n


def _reduced(vectors: np.ndarray) -> np.ndarray:
    """Return the vectors on their main directions; directions hold 90% of the variance together."""
    from sklearn.decomposition import PCA

    vectors = _unit(vectors)
    if (vectors == vectors[0]).all():  # no variance to take a fraction of
        return vectors
    reduced: np.ndarray = PCA(n_components=_VARIANCE, svd_solver="full").fit_transform(vectors)
    return _unit(reduced)


def _clusters(points: np.ndarray, buckets: int, seed: int) -> np.ndarray:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    clustering: Any = KMeans(buckets, n_init=_STARTS, max_iter=_ITERATIONS, random_state=seed)
    with warnings.catch_warnings():
        # Many equal texts leave buckets empty, which is as it should be.
        warnings.filterwarnings("ignore", "Number of distinct clusters", ConvergenceWarning)
        labels: np.ndarray = clustering.fit_predict(points)
    return labels


def _unit(vectors: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1.0)
