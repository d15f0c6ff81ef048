"""Divergence curves are drawn as they are, best first."""

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.reporting.plots.scores import divergence_curves
from gerund.reporting.plots.style import picture

CURVES = {
    "greedy": (0.2, np.array([(0.0, 1.0), (0.1, 0.2), (1.0, 0.0)])),
    "nucleus": (0.9, np.array([(0.0, 1.0), (0.9, 0.9), (1.0, 0.0)])),
}


@pytest.mark.slow
def test_draws_each_curve_with_its_score():
    figure = divergence_curves(CURVES, title="Books")
    [axis] = figure.axes
    assert [line.get_label() for line in axis.lines] == ["nucleus: 0.900", "greedy: 0.200"]
    np.testing.assert_array_equal(axis.lines[1].get_xydata(), CURVES["greedy"][1])
    assert picture(figure) == picture(divergence_curves(CURVES, title="Books"))


def test_nothing_to_draw():
    with pytest.raises(ConfigError, match="no curves"):
        divergence_curves({}, title="Books")
