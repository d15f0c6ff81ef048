"""Plot embeddings: maps colored by class, and histograms of pair similarities by rating.

UniMAE's Figure 2 for any encoders and classes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from gerund.checks import demand_number, one_of, whole_number
from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.models.vectors import unit
from gerund.reporting.plots.style import (
    COLOURS,
    INK,
    MARKERS,
    MOST_KINDS,
    PALE,
    QUIET,
    headline,
    legend_beside,
    new_figure,
    quiet_axis,
    require_matplotlib,
    shortened,
)

METHODS = ("tsne", "umap", "pca")
MOST_CLASSES = 6
MOST_POINTS = 2000
FEWEST_POINTS = 5

_PER_ROW = 2
_PANEL_INCHES = 3.3
_CHARACTER_INCHES = 0.073
_NAME_LENGTH = 26
_TITLE_LENGTH = 34
_BINS = 40
# For ratings that are ordered: from unlike to alike, from pale to dark, apart in grey print too.
_ORDERED = ("#f2b48c", "#e8743b", "#a4408a", "#4b1d8f")


@dataclass(frozen=True)
class Tsne:
    """Settings of t-SNE, as in UniMAE's Figure 2 (section 3.4); scikit-learn's own are 1000 and 12."""

    iterations: int = 2000
    """Steps at most."""
    exaggeration: float = 20.0
    """How strongly neighbours attract each other in the first 250 steps."""

    def __post_init__(self) -> None:
        demand_number("exaggeration", self.exaggeration)
        if not (whole_number("iterations", self.iterations) >= 250 and 1 <= self.exaggeration < float("inf")):
            raise ConfigError(
                "t-SNE takes at least 250 iterations and an exaggeration of at least 1, not "
                f"{self.iterations} and {self.exaggeration}"
            )


@dataclass(frozen=True)
class Separation:
    """How far the least and the best rated pairs are apart in an encoder's eyes, whatever their number."""

    mean: float  # mean cosine of all pairs; near 1 in an anisotropic space, where everything is alike
    low: float  # mean cosine of the pairs with the lowest ratings
    high: float  # mean cosine of those with the highest
    effect: float  # their difference in standard deviations (Cohen's d)
    # The fraction that their two distributions have in common; 1 - the largest difference of the distribution
    # functions, which is the common area of two densities that cross once.
    overlap: float


def embedding_map(vectors: np.ndarray, labels: Sequence[str], *, title: str, **settings: Any) -> Any:
    """Draw the embeddings of texts on a plane, coloured by class; settings are those of ``embedding_maps``."""
    return embedding_maps({"": vectors}, labels, title=title, **settings)


def embedding_maps(
    maps: Mapping[str, np.ndarray],
    labels: Sequence[str],
    *,
    title: str,
    method: str = "tsne",
    seed: int = 0,
    tsne: Tsne | None = None,
    most_classes: int = MOST_CLASSES,
    most_points: int = MOST_POINTS,
) -> Any:
    """Draw the same texts as several encoders see them, one panel an encoder, coloured by class.

    Args:
        maps: ``(n, D)`` by the encoder's name.
        labels: n classes; only the most frequent ones are drawn.
        title: of the figure.
        method: ``tsne`` (scikit-learn, cosine distance, perplexity 30 or a third of the points, started from the
            main directions), ``umap`` (umap-learn, cosine distance, 15 neighbours) or ``pca``.
        seed: which points are drawn when there are too many, and where t-SNE and UMAP end.
        tsne: settings of t-SNE; None for those of UniMAE's Figure 2.
        most_classes: maximum number of classes.
        most_points: maximum number of points, sampled at random.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: an unknown method, labels that do not fit, or too many classes to tell apart.
        DataError: too few points, all alike, or numbers that are not finite.
        MissingDependencyError: matplotlib, scikit-learn or umap-learn is not installed.
    """
    require_matplotlib()
    one_of("method", method, METHODS)
    tsne = tsne or Tsne()
    classes = _classes(maps, labels, most_classes)
    rows = _rows(labels, classes, most_points, seed)
    methods: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {"tsne": partial(_tsne, tsne), "umap": _umap}
    drawn = {name: _projected(np.asarray(vectors)[rows], methods.get(method), seed) for name, vectors in maps.items()}
    shown = [labels[row] for row in rows]
    longest = max(min(len(name), _NAME_LENGTH) for name in classes)
    figure, axes = _grid(len(maps), square=True, margin=0.45 + longest * _CHARACTER_INCHES)
    for axis, (name, (places, remark)) in zip(axes, drawn.items(), strict=True):
        _draw_map(axis, places, shown, classes)
        heading = "\n".join(part for part in (shortened(name, _TITLE_LENGTH), remark) if part)
        axis.set_title(heading, fontsize=9, color=INK, parse_math=False)
    headline(figure, title)
    total = len(set(labels))
    shown_of = f"{total} classes" if total == len(classes) else f"the {len(classes)} most frequent of {total} classes"
    _caption(figure, f"{_described(method, len(rows), seed, tsne)} of\n{len(rows)} texts; {shown_of}")
    legend = legend_beside(figure, axes[0])
    for handle in legend.legend_handles:
        handle.set_sizes([34])
        handle.set_alpha(1)
    return figure


def separation(cosines: np.ndarray, ratings: Sequence[float]) -> Separation:
    """Return how far the least and the best rated pairs are apart: of two ratings each, of more the outer quarters."""
    groups = _groups(ratings, len(cosines))
    low, high = (np.sort(np.asarray(cosines, dtype=float)[members]) for members in (groups[0][1], groups[-1][1]))
    deviation = math.sqrt((low.var() + high.var()) / 2)
    everywhere = np.concatenate([low, high])
    fractions = [np.searchsorted(side, everywhere, side="right") / len(side) for side in (low, high)]
    return Separation(
        mean=float(np.mean(cosines)),
        low=float(low.mean()),
        high=float(high.mean()),
        effect=float((high.mean() - low.mean()) / deviation) if deviation > 0 else 0.0,
        overlap=float(1 - np.abs(fractions[0] - fractions[1]).max()),
    )


def similarity_histograms(cosines: Mapping[str, np.ndarray], ratings: Sequence[float], *, title: str) -> Any:
    """Draw how the cosines of pairs are distributed by rating, one panel an encoder, all on one scale.

    An encoder of use sets the colours apart; an anisotropic one has everything near 1.

    Args:
        cosines: ``(n,)`` by the encoder's name; see ``gerund.models.vectors.compared_in_pairs``.
        ratings: n ratings. Two different ones are "not the same" and "the same"; more are cut into quarters.
        title: of the figure.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: as many ratings as cosines are needed.
        DataError: all ratings are the same.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    if not cosines:
        raise ConfigError("there are no cosines to draw")
    summaries = {name: separation(values, ratings) for name, values in cosines.items()}
    groups = _groups(ratings, len(next(iter(cosines.values()))))
    # A few pairs far out must not squeeze the rest: they are counted in the first bin.
    lowest = min(float(np.quantile(values, 0.005)) for values in cosines.values())
    edges = np.linspace(math.floor(10 * min(lowest, 0.9)) / 10, 1.0, _BINS + 1)
    figure, axes = _grid(len(cosines), height=0.95 + 0.48 * len(groups), sharex=True)
    for place, (axis, (name, values)) in enumerate(zip(axes, cosines.items(), strict=True)):
        _draw_histograms(axis, np.asarray(values), groups, edges, named=place % _PER_ROW == 0)
        summary = summaries[name]
        lines = [
            shortened(name, _TITLE_LENGTH),
            f"means {summary.low:.2f} and {summary.high:.2f}: {summary.effect:.1f} sd apart, "
            f"overlap {summary.overlap:.0%}",
        ]
        axis.set_title("\n".join(lines), fontsize=8.5, color=INK, parse_math=False, linespacing=1.4)
    headline(figure, title)
    _caption(figure, "cosine of a pair; lines: means, dotted: of all pairs")
    return figure


def _classes(maps: Mapping[str, np.ndarray], labels: Sequence[str], most: int) -> list[str]:
    """Return the most frequent classes, after a look at everything that was given."""
    sizes = {len(vectors) for vectors in maps.values()}
    if sizes != {len(labels)}:
        raise ConfigError(f"{len(labels)} labels do not fit {', '.join(map(str, sorted(sizes))) or 'no'} vectors")
    if not 1 <= most <= MOST_KINDS:
        raise ConfigError(f"most_classes={most} is not between 1 and {MOST_KINDS}")
    if not all(np.isfinite(vectors).all() for vectors in maps.values()):
        raise DataError("there are vectors with numbers that are not finite")
    return [label for label, _ in Counter(labels).most_common(most)]


def _rows(labels: Sequence[str], classes: Sequence[str], most: int, seed: int) -> np.ndarray:
    known = set(classes)
    rows = np.array([row for row, label in enumerate(labels) if label in known])
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
    if len(rows) < FEWEST_POINTS:
        raise DataError(f"a map of {len(rows)} texts shows nothing; give at least {FEWEST_POINTS}")
    return rows


def _projected(
    vectors: np.ndarray, project: Callable[[np.ndarray, int], np.ndarray] | None, seed: int
) -> tuple[np.ndarray, str]:
    """Return places ``(n, 2)``, and what is to be said of this encoder's alone; the main directions by default."""
    vectors = vectors.astype(np.float64)
    if (vectors == vectors[0]).all():
        raise DataError("all vectors are alike: there is no map of them")
    return _principal(vectors) if project is None else (project(vectors, seed), "")


def _principal(vectors: np.ndarray) -> tuple[np.ndarray, str]:
    directed = unit(vectors)
    left, sizes, directions = np.linalg.svd(directed - directed.mean(axis=0), full_matrices=False)
    # The sign of a direction is arbitrary and differs between processors: its largest part is made positive.
    signs = np.sign(directions[np.arange(len(directions)), np.abs(directions).argmax(axis=1)])
    places = (left * sizes * signs)[:, :2]
    if places.shape[1] < 2:
        places = np.pad(places, ((0, 0), (0, 1)))
    total = float((sizes**2).sum())
    fraction = float((sizes[:2] ** 2).sum()) / total if total > 0 else 1.0
    return places, f"{fraction:.0%} of the variance"


def _perplexity(n: int) -> float:
    return min(30.0, (n - 1) / 3)


def _tsne(settings: Tsne, vectors: np.ndarray, seed: int) -> np.ndarray:
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise MissingDependencyError("t-SNE needs scikit-learn: pip install 'gerund[eval]'") from error
    start = _principal(vectors)[0]
    project = TSNE(
        metric="cosine",
        perplexity=_perplexity(len(vectors)),
        max_iter=settings.iterations,
        early_exaggeration=settings.exaggeration,
        # As scikit-learn does for its own start: small, and the same for every scale of the vectors.
        init=(1e-4 * start / start[:, 0].std()).astype(np.float32),
        random_state=seed,
    )
    # Sums over several threads are rounded differently each time, and the map would differ.
    with threadpool_limits(1):
        places: np.ndarray = project.fit_transform(vectors)
    return places


def _umap(vectors: np.ndarray, seed: int) -> np.ndarray:
    try:
        umap = import_module("umap")
    except ImportError as error:
        raise MissingDependencyError("method='umap' needs umap-learn: pip install umap-learn") from error
    places: np.ndarray = umap.UMAP(metric="cosine", random_state=seed, n_jobs=1).fit_transform(vectors)
    return places


def _described(method: str, n: int, seed: int, tsne: Tsne) -> str:
    if method == "pca":
        return "The two main directions"
    if method == "umap":
        return f"UMAP (cosine, 15 neighbours, seed {seed})"
    steps = f"perplexity {_perplexity(n):.0f}, {tsne.iterations} iterations, exaggeration {tsne.exaggeration:g}"
    return f"t-SNE (cosine, {steps}, started from the main directions, seed {seed})"


def _grid(
    panels: int, *, height: float = _PANEL_INCHES, square: bool = False, margin: float = 0.3, sharex: bool = False
) -> tuple[Any, list[Any]]:
    """Return a figure and one axis a panel, two in a row; a single one is larger."""
    columns = min(_PER_ROW, panels)
    rows = math.ceil(panels / columns)
    width = _PANEL_INCHES * (1.4 if columns == 1 else 1.0)
    figure = new_figure(columns * width + margin, rows * (width + 0.3 if square else height) + 0.65)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=sharex).flatten().tolist()
    for axis in axes[panels:]:
        axis.set_visible(False)
    figure.get_layout_engine().set(wspace=0.06)
    return figure, axes[:panels]


def _draw_map(axis: Any, places: np.ndarray, labels: Sequence[str], classes: Sequence[str]) -> None:
    size = float(np.clip(7000 / len(places), 7, 36))
    for number, name in enumerate(classes):
        rows = [row for row, label in enumerate(labels) if label == name]
        axis.scatter(
            places[rows, 0],
            places[rows, 1],
            s=size,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number // len(COLOURS)],
            alpha=0.85,
            edgecolors="white",
            linewidths=0.25,
            label=shortened(str(name), _NAME_LENGTH),
        )
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_box_aspect(1)
    for spine in axis.spines.values():
        spine.set_edgecolor(PALE)


def _groups(ratings: Sequence[float], n: int) -> list[tuple[str, np.ndarray]]:
    """Return name and members of each group of pairs, lowest ratings first."""
    values = np.asarray(ratings, dtype=float)
    if len(values) != n:
        raise ConfigError(f"{len(values)} ratings do not fit {n} cosines")
    different = np.unique(values)
    if len(different) < 2:
        raise DataError("all ratings are the same: there is nothing to tell apart")
    if len(different) == 2:
        return [("not the same", values == different[0]), ("the same", values == different[1])]
    # Ratings are often tied, so that a quarter may have none of its own.
    limits = np.unique(np.quantile(values, [0.25, 0.5, 0.75]))
    limits = limits[limits < different[-1]] if limits[0] < different[-1] else different[-2:-1]
    place = np.searchsorted(limits, values, side="left")
    members = [place == number for number in range(len(limits) + 1)]
    return [(_range_name(values[group]), group) for group in members if group.any()]


def _range_name(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return f"rated {low:.3g}" if low == high else f"rated {low:.3g} to {high:.3g}"


def _draw_histograms(
    axis: Any, cosines: np.ndarray, groups: Sequence[tuple[str, np.ndarray]], edges: np.ndarray, *, named: bool
) -> None:
    """Draw one histogram above the other, the lowest ratings at the bottom."""
    held = np.clip(cosines, edges[0], edges[-1])
    fractions = [np.histogram(held[members], edges)[0] / members.sum() for _, members in groups]
    highest = max(fraction.max() for fraction in fractions)
    shades = _ORDERED if len(groups) == len(_ORDERED) else _ORDERED[1 :: len(_ORDERED) - len(groups)]
    for row, ((_, members), fraction, shade) in enumerate(zip(groups, fractions, shades, strict=True)):
        axis.stairs(row + 0.9 * fraction / highest, edges, baseline=row, fill=True, color=shade, alpha=0.85)
        axis.plot([cosines[members].mean()] * 2, [row, row + 0.9], color=INK, linewidth=1.2)
    axis.axvline(cosines.mean(), color=QUIET, linestyle=":", linewidth=1.2)
    quiet_axis(axis, grid="x")
    axis.set_yticks([row + 0.35 for row in range(len(groups))], [name if named else "" for name, _ in groups])
    axis.tick_params(axis="y", length=0)
    axis.tick_params(labelbottom=True)
    axis.set_ylim(0, len(groups))
    axis.set_xlim(edges[0], edges[-1])


def _caption(figure: Any, text: str) -> None:
    figure.supxlabel(text, fontsize=7.5, color=QUIET, parse_math=False)
