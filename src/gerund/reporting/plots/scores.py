"""Plot scores: bars per task, encoding against generation, scores by converted layers (k, k0), MAUVE curves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from gerund.errors import ConfigError
from gerund.reporting.plots.style import (
    COLOURS,
    INK,
    PALE,
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

_NAME_LENGTH = 30
_PANELS_PER_ROW = 3
_BAR_INCHES = 0.21
_LABEL_STEPS = 20
_LINE_POINTS = 11


@dataclass(frozen=True)
class ScorePanel:
    """The scores of one task."""

    title: str
    scores: Mapping[str, tuple[float, float | None]]  # value and spread (None for a single run) by system
    percent: bool = True  # whether values are fractions that are shown as percent
    higher_is_better: bool = True  # which way is up
    marks_best: bool = True  # whether the best is to be seen; scores of different settings have none


@dataclass(frozen=True)
class TradePoint:
    """What a model is worth on both sides."""

    label: str
    representation: float  # a score where more is better
    generation: float  # bits per byte or perplexity, where less is better
    group: str = ""  # points of one group have one colour; empty for no groups


def score_bars(panels: Sequence[ScorePanel], *, title: str) -> Any:
    """Draw one small panel a task with one bar a system, from zero on, and whiskers of one standard deviation.

    A system has the same place and colour everywhere, in the order in which it is first named; the best value
    of a task is bold.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    names = list(dict.fromkeys(name for panel in panels for name in panel.scores))
    if not names:
        raise ConfigError("there are no scores to draw")
    columns = min(_PANELS_PER_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    margin = 0.3 + 0.065 * max(len(shortened(name, _NAME_LENGTH)) for name in names)
    figure = new_figure(margin + 2.1 * columns, 0.5 + rows * (0.45 + _BAR_INCHES * len(names)))
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes, panels, strict=False):
        _draw_bars(axis, panel, names)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    headline(figure, title)
    return figure


def trade_off(
    points: Sequence[TradePoint], *, title: str, xlabel: str = "bits per byte", ylabel: str, percent: bool = True
) -> Any:
    """Draw what models are worth as encoders against what they are worth as writers, every point with its name.

    Args:
        points: in any order; those of one model under several plans share their x.
        title: of the figure.
        xlabel: what ``generation`` is; less is better.
        ylabel: what ``representation`` is; more is better.
        percent: whether ``representation`` is a fraction that is shown as percent.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    if not points:
        raise ConfigError("there are no scores to draw")
    groups = list(dict.fromkeys(point.group for point in points))
    figure = new_figure(7.0, 4.6)
    axis = figure.subplots()
    for place, group in enumerate(groups):
        members = [point for point in points if point.group == group]
        x, y = [point.generation for point in members], [point.representation for point in members]
        name = shortened(group, _NAME_LENGTH)
        axis.plot(x, y, linestyle="none", markersize=6.5, label=name, zorder=3, **series_mark(place))
    axis.margins(x=0.22, y=0.14)
    quiet_axis(axis, grid="both")
    percent_axis(axis, percent)
    axis.set_xlabel(f"{legible(xlabel)} (less is better)", fontsize=9, color=INK, parse_math=False)
    axis.set_ylabel(legible(ylabel), fontsize=9, color=INK, parse_math=False)
    axis.set_title("↖ better on both sides", fontsize=8, color=QUIET, loc="left")
    headline(figure, title)
    if len(groups) > 1:
        legend_beside(axis)
    _name_points(figure, axis, points)
    return figure


def _draw_bars(axis: Any, panel: ScorePanel, names: Sequence[str]) -> None:
    values = {name: value for name, (value, _) in panel.scores.items()}
    best = (max if panel.higher_is_better else min)(values.values(), default=None)
    reach = max((value + (panel.scores[name][1] or 0.0) for name, value in values.items()), default=0.0)
    for row, name in enumerate(names):
        if name not in values:
            axis.text(0, row, " –", va="center", fontsize=7.5, color=QUIET)
            continue
        value, spread = panel.scores[name]
        axis.barh(row, value, height=0.72, color=COLOURS[row % len(COLOURS)], alpha=0.85)
        if spread:
            axis.errorbar(value, row, xerr=spread, color=INK, elinewidth=1, capsize=2, capthick=1)
        end = max(value + (spread or 0.0), 0.0)
        weight = "bold" if panel.marks_best and value == best and len(values) > 1 else "normal"
        text = shown(value, panel.percent, sign="")
        axis.text(end + 0.03 * (reach or 1.0), row, text, va="center", fontsize=7.5, color=INK, fontweight=weight)
    axis.set_xlim(min(0.0, *values.values(), 0.0), 1.3 * reach if reach > 0 else 1.0)
    axis.set_yticks(range(len(names)), [shortened(name, _NAME_LENGTH) for name in names], parse_math=False)
    axis.set_xticks([])
    axis.tick_params(axis="y", length=0, labelsize=8, colors=INK)
    for side, spine in axis.spines.items():
        spine.set_visible(side == "left")
        spine.set_edgecolor(PALE)
    unit = " (%)" if panel.percent else ""
    down = "" if panel.higher_is_better else ", less is better"
    axis.set_title(shortened(panel.title, _NAME_LENGTH) + unit + down, fontsize=8.5, color=INK, parse_math=False)


def _name_points(figure: Any, axis: Any, points: Sequence[TradePoint]) -> None:
    """Put every name next to its point where it overlaps nothing; a line leads to it if it had to move."""
    figure.draw_without_rendering()  # computes all positions
    frame = axis.get_window_extent()
    taken = [_box_at(axis, point) for point in points]
    for point in sorted(points, key=lambda point: (-point.representation, point.generation, point.label)):
        measured = axis.text(0, 0, shortened(point.label, _NAME_LENGTH), fontsize=8, parse_math=False)
        size = measured.get_window_extent().size
        measured.remove()
        for side, step in _places():
            box = _box_at(axis, point, size, side, step)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        else:
            side, step = 1, 0
            box = _box_at(axis, point, size, side, step)
        taken.append(box)
        _write_name(axis, point, side, step)


def _write_name(axis: Any, point: TradePoint, side: int, step: int) -> None:
    line = {"arrowstyle": "-", "color": QUIET, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
    note = axis.annotate(
        shortened(point.label, _NAME_LENGTH),
        (point.generation, point.representation),
        xytext=_offset(side, step),
        textcoords="offset points",
        fontsize=8,
        color=INK,
        ha="left" if side > 0 else "right",
        va="center",
        zorder=4,
        parse_math=False,
        arrowprops={**line, "relpos": (0 if side > 0 else 1, 0.5)} if step else None,
    )
    note.set_in_layout(False)


def _offset(side: int, step: int) -> tuple[int, int]:
    """Return the offset of a name from its point, in points."""
    return side * (18 if step else 8), _LINE_POINTS * step


def _places() -> Iterator[tuple[int, int]]:
    """Yield positions of a name: right or left of its point, and a number of lines above or below it.

    Below first: points are named from the top.
    """
    for distance in range(_LABEL_STEPS):
        for step in dict.fromkeys((-distance, distance)):
            yield 1, step
            yield -1, step


def _box_at(axis: Any, point: TradePoint, size: tuple[float, float] | None = None, side: int = 0, step: int = 0) -> Any:
    """Return the box in pixels of a point's name at a place, or of the point itself."""
    from matplotlib.transforms import Bbox

    x, y = axis.transData.transform((point.generation, point.representation))
    if size is None:
        return Bbox.from_extents(x - 7, y - 7, x + 7, y + 7)
    scale = axis.figure.dpi / 72
    right, up = _offset(side, step)
    near, middle = x + scale * right, y + scale * up
    far = near + side * size[0]
    return Bbox.from_extents(min(near, far), middle - size[1] / 2, max(near, far), middle + size[1] / 2)


Curve = Sequence[tuple[int, float]]

_DIVERGENCE_NAME_LENGTH = 34
_MOST_TICKS = 14
_OVER = {
    "k": ("k: how many layers are converted", "base model"),
    "k0": ("k0: how many of the converted layers do not see the first token", "mask0-bidir"),
}


def k_curves(
    curves: Mapping[str, Curve],
    *,
    title: str,
    ylabel: str,
    over: Literal["k", "k0"] = "k",
    baseline: float | None = None,
    percent: bool = True,
    higher_is_better: bool = True,
) -> Any:
    """Draw a score against the number of converted layers, one curve per plan (LBW, Figures 2, 4 and 6).

    The best point of every curve is marked, and named in the legend.

    Args:
        curves: ``(k, score)`` by plan, in any order.
        title: of the figure.
        ylabel: what the score is.
        over: ``k``; or ``k0``, the converted layers without the first token, for curves of ``mask0+bidir``.
        baseline: the score of the base model, or of ``mask0-bidir`` over ``k0``: a dotted line.
        percent: whether scores are fractions that are shown as percent.
        higher_is_better: which way is up.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: there is nothing to draw.
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.ticker import MaxNLocator

    if not curves or not all(curves.values()):
        raise ConfigError("there are no scores to draw")
    xlabel, baseline_name = _OVER[over]
    figure = new_figure(7.8, 3.9)
    axis = figure.subplots()
    pick = max if higher_is_better else min
    for place, (name, points) in enumerate(curves.items()):
        ordered = sorted(points)
        mark = series_mark(place)
        best = pick(ordered, key=lambda point: point[1])
        label = f"{shortened(name, _NAME_LENGTH)}: {shown(best[1], percent)} at {over}={best[0]}"
        x, y = zip(*ordered, strict=True)
        small = 4.5 if len(ordered) <= 24 else 2.5
        axis.plot(x, y, linewidth=1.5, markersize=small, label=label, zorder=3, **mark)
        axis.plot(*best, markersize=9, markeredgecolor=INK, markeredgewidth=1.1, linestyle="none", zorder=4, **mark)
    if baseline is not None:
        label = f"{baseline_name}: {shown(baseline, percent)}"
        axis.axhline(baseline, color=QUIET, linestyle=":", linewidth=1.4, zorder=2, label=label)
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


def divergence_curves(curves: Mapping[str, tuple[float, np.ndarray]], *, title: str) -> Any:
    """Draw MAUVE's divergence curves (RankGen, Figure 8): the larger the area under one, the nearer to people's texts.

    Args:
        curves: by name, the MAUVE score and the curve ``(points, 2)`` from (0, 1) to (1, 0).
        title: of the figure.

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
