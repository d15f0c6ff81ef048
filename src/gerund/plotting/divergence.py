"""Pictures of how far generated texts are from people's.

Knows: divergence curves, matplotlib. Does not know: texts, models.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gerund.errors import ConfigError
from gerund.plotting.style import INK, QUIET, headline, legend_beside, new_figure, quiet_axis, series_mark, shortened

_NAME_LENGTH = 34


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
        label = f"{shortened(name, _NAME_LENGTH)}: {value:.3f}"
        x, y = np.asarray(curve).T
        axis.plot(x, y, linewidth=1.4, markersize=3, label=label, zorder=3, **series_mark(place))
    quiet_axis(axis, grid="both")
    axis.set_xlabel("model's texts that people would not write →  few", fontsize=9, color=INK)
    axis.set_ylabel("people's texts that the model would not write →  few", fontsize=9, color=INK)
    axis.set_title("area under the curve: MAUVE", fontsize=8, color=QUIET, loc="left")
    headline(figure, title)
    legend_beside(axis)
    return figure
