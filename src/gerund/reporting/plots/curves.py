"""Curves: a score by number of converted layers, and how far generated texts are from people's (MAUVE).

Knows: numbers with names, matplotlib. Does not know: tasks, models, files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gerund.errors import ConfigError
from gerund.reporting.plots.style import (
    INK,
    QUIET,
    headline,
    legend_beside,
    legible,
    new_figure,
    percent_axis,
    quiet_axis,
    require_matplotlib,
    series_mark,
    shortened,
    shown,
)

Curve = Sequence[tuple[int, float]]

_NAME_LENGTH = 30
_DIVERGENCE_NAME_LENGTH = 34
_MOST_TICKS = 14


def k_curves(
    curves: Mapping[str, Curve],
    *,
    title: str,
    ylabel: str,
    baseline: float | None = None,
    percent: bool = True,
    higher_is_better: bool = True,
) -> Any:
    """Draw a score against the number of converted layers for several plans (LBW, Figures 2 and 4).

    The best point of every plan is marked, and said in the legend.

    Args:
        curves: ``(k, score)`` by plan, in any order.
        title: stands above everything.
        ylabel: what the score is.
        baseline: the score of the untouched model, dotted.
        percent: whether scores are fractions that are shown as percent.
        higher_is_better: which way is up.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    return _score_curves(
        curves,
        ("k: how many layers are converted", "k"),
        title=title,
        ylabel=ylabel,
        dotted=None if baseline is None else ("untouched", baseline),
        percent=percent,
        higher_is_better=higher_is_better,
    )


def k0_curve(
    curve: Curve,
    *,
    title: str,
    ylabel: str,
    baseline: float | None = None,
    percent: bool = True,
    higher_is_better: bool = True,
) -> Any:
    """Draw a score of ``mask0+bidir`` against k0, the converted layers without the first token (LBW, Figure 6).

    Args:
        curve: ``(k0, score)`` in any order.
        title: as in ``k_curves``.
        ylabel: as in ``k_curves``.
        baseline: the score of ``mask0-bidir``, dotted.
        percent: as in ``k_curves``.
        higher_is_better: as in ``k_curves``.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    return _score_curves(
        {"mask0+bidir": curve},
        ("k0: how many of the converted layers do not see the first token", "k0"),
        title=title,
        ylabel=ylabel,
        dotted=None if baseline is None else ("mask0-bidir", baseline),
        percent=percent,
        higher_is_better=higher_is_better,
    )


def divergence_curves(curves: Mapping[str, tuple[float, np.ndarray]], *, title: str) -> Any:
    """Draw MAUVE's divergence curves (RankGen, Figure 8): the larger the area under one, the nearer to people's texts.

    Args:
        curves: by name, the MAUVE score and the curve ``(points, 2)`` from (0, 1) to (1, 0).
        title: stands above everything.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    if not curves:
        raise ConfigError("there are no curves to draw")
    figure = new_figure(7.8, 4.4)
    axis = figure.subplots()
    ordered = sorted(curves.items(), key=lambda item: -item[1][0])
    for place, (name, (value, curve)) in enumerate(ordered):
        label = f"{shortened(name, _DIVERGENCE_NAME_LENGTH)}: {value:.3f}"
        x, y = np.asarray(curve).T
        axis.plot(x, y, linewidth=1.4, markersize=3, label=label, zorder=3, **series_mark(place))
    quiet_axis(axis, grid="both")
    axis.set_xlabel("model's texts that people would not write →  few", fontsize=9, color=INK)
    axis.set_ylabel("people's texts that the model would not write →  few", fontsize=9, color=INK)
    axis.set_title("area under the curve: MAUVE", fontsize=8, color=QUIET, loc="left")
    headline(figure, title)
    legend_beside(axis)
    return figure


def _score_curves(
    curves: Mapping[str, Curve],
    what: tuple[str, str],
    *,
    title: str,
    ylabel: str,
    dotted: tuple[str, float] | None,
    percent: bool,
    higher_is_better: bool,
) -> Any:
    from matplotlib.ticker import MaxNLocator

    require_matplotlib()
    if not curves or not all(curves.values()):
        raise ConfigError("there are no scores to draw")
    figure = new_figure(7.8, 3.9)
    axis = figure.subplots()
    xlabel, letter = what
    pick = max if higher_is_better else min
    for place, (name, points) in enumerate(curves.items()):
        ordered = sorted(points)
        mark = series_mark(place)
        best = pick(ordered, key=lambda point: point[1])
        said = f"{shortened(name, _NAME_LENGTH)}: {shown(best[1], percent)} at {letter}={best[0]}"
        x, y = zip(*ordered, strict=True)
        small = 4.5 if len(ordered) <= 24 else 2.5
        axis.plot(x, y, linewidth=1.5, markersize=small, label=said, zorder=3, **mark)
        axis.plot(*best, markersize=9, markeredgecolor=INK, markeredgewidth=1.1, linestyle="none", zorder=4, **mark)
    if dotted is not None:
        said = f"{dotted[0]}: {shown(dotted[1], percent)}"
        axis.axhline(dotted[1], color=QUIET, linestyle=":", linewidth=1.4, zorder=2, label=said)
    quiet_axis(axis)
    places = sorted({k for points in curves.values() for k, _ in points})
    if len(places) <= _MOST_TICKS:
        axis.set_xticks(places)
    else:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=_MOST_TICKS))
    axis.margins(x=0.03, y=0.09)
    percent_axis(axis, percent)
    axis.set_xlabel(xlabel, fontsize=9, color=INK)
    axis.set_ylabel(legible(ylabel), fontsize=9, color=INK, parse_math=False)
    headline(figure, title)
    legend_beside(axis)
    return figure
