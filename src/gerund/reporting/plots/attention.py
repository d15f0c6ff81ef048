"""Plot attention: maps before and after a conversion, and the attention sink of each layer.

LBW's Figure 3 for any model and plan.
"""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from gerund.inference.inspection import AttentionMap, sink_fraction
from gerund.reporting.plots.style import (
    INK,
    PALE,
    QUIET,
    TINT,
    headline,
    legend_beside,
    legible,
    new_figure,
    quiet_axis,
    require_matplotlib,
)
from gerund.settings.plan import View

MOST_LAYERS = 12
# With more tokens than this their names would be too small to read.
MOST_LABELS = 26

_BEFORE, _AFTER, _SECOND_PASS = "#e8743b", "#4b1d8f", "#c2337d"
_LABEL_INCHES = 0.135
_PANEL_INCHES = 1.7
_PER_ROW = 6
_WIDEST_INCHES = 13.0


def pick_layers(n_layers: int, most: int = MOST_LAYERS) -> list[int]:
    """Return at most ``most`` layers at even distances, the first and the last among them.

    >>> pick_layers(22, 4)
    [0, 7, 14, 21]
    """
    if n_layers <= most:
        return list(range(n_layers))
    return [round(step * (n_layers - 1) / (most - 1)) for step in range(most)]


def attention_figure(
    before: Sequence[AttentionMap],
    after: Sequence[AttentionMap],
    *,
    title: str,
    even: float,
    layers: Sequence[int] | None = None,
    labels: Sequence[str] | None = None,
) -> Any:
    """Draw mean attention maps of some layers before and after, and the sink fraction of all layers below.

    Args:
        before: one ``(T, T)`` map a layer of the untouched model.
        after: maps under the plan; further runs of a layer are drawn beside (or after) their layer.
        title: of the figure.
        even: the sink fraction that attention without preference would have, drawn as a dotted line.
        layers: the layers whose maps are drawn; None picks up to ``MOST_LAYERS``.
        labels: one name a token; left out when there are too many of them.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    require_matplotlib()
    shown = list(layers) if layers is not None else pick_layers(len(before))
    columns = _columns(before, after, shown)
    names = [legible(label) for label in labels] if labels is not None and len(labels) <= MOST_LABELS else None
    panel = max(_PANEL_INCHES, len(names) * _LABEL_INCHES) if names else _PANEL_INCHES
    if names and len(columns) > 2 * int(_WIDEST_INCHES / panel):
        names, panel = None, _PANEL_INCHES
    blocks = math.ceil(len(columns) / min(_PER_ROW, int(_WIDEST_INCHES / panel)))
    per_row = math.ceil(len(columns) / blocks)
    rows = max(len(column) for column in columns)
    width = max(7.5, per_row * (panel + 0.15) + 1.3)
    maps_height = blocks * (rows * (panel + 0.42) + (0.5 if names else 0.1)) + 0.3
    sinks_height = 2.6
    figure = new_figure(width, maps_height + sinks_height)
    upper, lower = figure.subfigures(2, 1, height_ratios=[maps_height, sinks_height])
    headline(upper, title)
    _draw_maps(upper, columns, per_row, rows, names)
    _draw_sinks(lower, before, after, even)
    return figure


_ROW_NAMES = ("before", "after", "second pass")
# Title and map; no map leaves the place empty.
_Panel = tuple[str, AttentionMap | None]


def _columns(before: Sequence[AttentionMap], after: Sequence[AttentionMap], shown: Sequence[int]) -> list[list[_Panel]]:
    """Sort the maps into columns: a layer before, after, and its second pass; layers on top have a column each."""
    repeated = max(item.run for item in after) > 1
    any_second = any(item.run == 1 and item.layer in shown for item in after) and not repeated
    columns: list[list[_Panel]] = []
    for layer in shown:
        runs = {item.run: item for item in after if item.layer == layer}
        column: list[_Panel] = [(f"layer {layer}", before[layer]), (_wrapped(runs[0].view), runs[0])]
        if any_second:
            second = runs.get(1)
            column.append((_wrapped(second.view) if second else "", second))
        columns.append(column)
    if repeated:
        for item in after:
            if item.run:
                columns.append([("", None), (f"+{item.run} on top\n{_wrapped(item.view)}", item)])
    return columns


def _wrapped(view: View) -> str:
    return str(view).replace(" without", "\nwithout")


def _draw_maps(figure: Any, columns: list[list[_Panel]], per_row: int, rows: int, names: Sequence[str] | None) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import PercentFormatter

    blocks = math.ceil(len(columns) / per_row)
    axes = figure.subplots(blocks * rows, per_row, squeeze=False)
    # Curved, or the sink would drown whatever else there is.
    norm = PowerNorm(0.45, vmin=0.0, vmax=1.0)
    image = None
    for place in range(blocks * per_row):
        block, column = divmod(place, per_row)
        for row in range(rows):
            axis = axes[block * rows + row, column]
            axis.set_xticks([])
            axis.set_yticks([])
            if column == 0:
                axis.set_ylabel(_ROW_NAMES[row], fontsize=9, color=INK, labelpad=6)
            panels = columns[place] if place < len(columns) else []
            if row >= len(panels) or panels[row][1] is None:
                axis.set_frame_on(False)
                continue
            title, item = panels[row]
            assert item is not None
            weights = item.weights.numpy()
            seen = np.ma.masked_where(weights == 0, weights)
            image = axis.imshow(seen, cmap=_colours(), norm=norm, interpolation="nearest")
            axis.set_title(title, fontsize=8, color=INK, linespacing=1.05)
            _trim(axis, names, with_y=column == 0, with_x=all(below is None for _, below in panels[row + 1 :]))
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.015, aspect=28)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    bar.ax.minorticks_off()
    bar.set_ticks([0.0, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 1.0])
    bar.ax.tick_params(labelsize=7, colors=INK)
    bar.outline.set_edgecolor(PALE)
    bar.set_label("attention (white: out of sight)", fontsize=8, color=INK)


def _colours() -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    magma = colormaps["magma_r"]
    # Not quite to black, and from a tint that differs from white: white is what cannot be seen at all.
    return ListedColormap([magma(0.02 + 0.9 * step / 255) for step in range(256)]).with_extremes(bad="white")


def _trim(axis: Any, names: Sequence[str] | None, *, with_y: bool, with_x: bool) -> None:
    """Give a map a quiet frame, and its tokens' names where they are wanted."""
    for spine in axis.spines.values():
        spine.set_edgecolor(PALE)
    axis.tick_params(length=0, pad=2, labelsize=6.5, colors=INK)
    if names is not None and with_x:
        axis.set_xticks(range(len(names)), names, rotation=90, parse_math=False)
    if names is not None and with_y:
        axis.set_yticks(range(len(names)), names, parse_math=False)


def _draw_sinks(figure: Any, before: Sequence[AttentionMap], after: Sequence[AttentionMap], even: float) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axis = figure.subplots()
    single = [item for item in after if item.run == 0]
    on_top = [item for item in after if item.run and max(other.run for other in after) > 1]
    _draw_views(axis, single, on_top)
    hidden = max(item.view.hidden for item in after)
    line = {"linewidth": 1.6, "markersize": 3.5, "marker": "o", "clip_on": False, "zorder": 3}
    # Broader, so that it still shows where both are the same.
    axis.plot(range(len(before)), sink_fraction(before), color=_BEFORE, label="before: to the first token",
              **{**line, "linewidth": 3.6, "markersize": 6.5})  # fmt: skip
    axis.plot(range(len(single) + len(on_top)), sink_fraction([*single, *on_top]), color=_AFTER,
              label="after: to the first token", **line)  # fmt: skip
    if hidden and len(after[0].taken) > hidden:
        # Whether the sink has only moved (LBW, section 3.5, finding 4).
        axis.plot(range(len(single)), sink_fraction(single, hidden), color=_AFTER, alpha=0.55, linestyle="--",
                  linewidth=1.3, zorder=3, label=f"after: to token {hidden + 1}, the first in sight")  # fmt: skip
    second_passes = [item for item in after if item.run == 1 and item not in on_top]
    if second_passes:
        places = [item.layer for item in second_passes]
        fractions = sink_fraction(second_passes)
        axis.plot(places, fractions, color=_SECOND_PASS, label="second pass: to the first token", **line)
    axis.axhline(even, color=QUIET, linestyle=":", linewidth=1.2, zorder=2, label="before, if attention were even")
    highest = max(max(curve.get_ydata()) for curve in axis.get_lines())
    axis.set_ylim(0, min(1.0, max(0.3, 1.15 * highest)))
    axis.set_xlim(-0.5, len(single) + len(on_top) - 0.5)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=24))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.set_xlabel("layer", fontsize=9, color=INK)
    axis.set_ylabel("fraction of attention", fontsize=9, color=INK)
    quiet_axis(axis)
    legend_beside(axis)


def _draw_views(axis: Any, single: Sequence[AttentionMap], on_top: Sequence[AttentionMap]) -> None:
    """Tint the converted layers, and write above them what they see."""
    place = 0.0
    items = [*single, *on_top]
    for view, group in groupby(items, key=lambda item: item.view):
        width = len(list(group))
        if view != View(single[0].view.direction.CAUSAL):
            axis.axvspan(place - 0.5, place + width - 0.5, color=TINT, zorder=0, linewidth=0)
        text = str(view) if width / len(items) > 0.3 else view.direction.value
        axis.text(place + width / 2 - 0.5, 1.02, text, transform=axis.get_xaxis_transform(),
                  ha="center", va="bottom", fontsize=7.5, color=QUIET)  # fmt: skip
        place += width
