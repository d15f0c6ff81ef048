"""Pictures of scores show the numbers they were given."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from gerund.errors import ConfigError
from gerund.reporting.plots.scores import (
    ScorePanel,
    TradePoint,
    divergence_curves,
    k_curves,
    score_bars,
    trade_off,
)
from gerund.reporting.plots.style import COLOURS, picture

CURVES = {"mask0-bidir": [(4, 0.5), (1, 0.3), (2, 0.4)], "$odd_name$": [(1, 0.45), (2, 0.35)]}
PANELS = [
    ScorePanel("sts/stsb", {"causal": (0.411, None), "bidir": (0.52, 0.03)}),
    ScorePanel(
        "perplexity/wiki", {"causal": (31.4, None), "other": (29.0, None)}, percent=False, higher_is_better=False
    ),
]
# One model under four plans, three of them nearly alike, and another model.
POINTS = [
    TradePoint("causal", 0.41, 1.62, "one"),
    TradePoint("mask0-bidir", 0.520, 1.62, "one"),
    TradePoint("mask0-all", 0.519, 1.62, "one"),
    TradePoint("inplace-back", 0.518, 1.62, "one"),
    TradePoint("of another kind", 0.3, 2.5, "two"),
]


def texts(axis):
    return [text.get_text() for text in axis.texts]


def legend(axis):
    return [text.get_text() for text in axis.get_legend().get_texts()]


def lines(axis):
    """Return the data of every line by its label, without those that have none."""
    found = {line.get_label(): line for line in axis.get_lines()}
    return {name: (list(line.get_xdata()), list(line.get_ydata())) for name, line in found.items() if name[0] != "_"}


def test_curves_are_in_order_and_their_best_points_marked():
    [axis] = k_curves(CURVES, title="a title", ylabel="F1", baseline=0.42).axes
    drawn = lines(axis)
    assert drawn["mask0-bidir: 50.0% at k=4"] == ([1, 2, 4], [0.3, 0.4, 0.5])
    assert drawn["$odd_name$: 45.0% at k=1"] == ([1, 2], [0.45, 0.35])
    assert drawn["base model: 42.0%"][1] == [0.42, 0.42]
    marked = [line for line in axis.get_lines() if line.get_markersize() == 9]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in marked] == [(4, 0.5), (1, 0.45)]
    assert legend(axis) == list(drawn)
    assert axis.get_ylabel() == "F1"
    assert len({line.get_marker() for line in marked}) == len({line.get_color() for line in marked}) == 2


def test_less_may_be_better_and_numbers_plain():
    [axis] = k_curves(CURVES, title="", ylabel="", higher_is_better=False, percent=False).axes
    assert legend(axis) == ["mask0-bidir: 0.3 at k=1", "$odd_name$: 0.35 at k=2"]


@pytest.mark.parametrize("count", [1, 81])
def test_few_and_many_points(count):
    [axis] = k_curves({"one": [(k, 0.01 * k) for k in range(count)]}, title="", ylabel="").axes
    assert axis.get_lines()[0].get_markersize() == (4.5 if count == 1 else 2.5)
    ticks = axis.get_xticks()
    assert all(tick == int(tick) for tick in ticks)
    assert len(ticks) <= 16


def test_k0_has_a_curve_of_its_own():
    [axis] = k_curves(
        {"mask0+bidir": [(0, 0.7), (3, 0.73)]}, over="k0", title="", ylabel="Spearman", baseline=0.72
    ).axes
    assert legend(axis) == ["mask0+bidir: 73.0% at k0=3", "mask0-bidir: 72.0%"]
    assert axis.get_xlabel().startswith("k0:")


def test_bars_have_one_place_a_system():
    axes = score_bars(PANELS, title="all").axes
    assert [label.get_text() for label in axes[0].get_yticklabels()] == ["causal", "bidir", "other"]
    widths = [{round(bar.get_y() + 0.36): bar.get_width() for bar in axis.patches} for axis in axes]
    assert widths == [{0: 0.411, 1: 0.52}, {0: 31.4, 2: 29.0}]
    assert axes[0].patches[0].get_facecolor() == axes[1].patches[0].get_facecolor()
    assert texts(axes[0]) == ["41.1", "52.0", " –"]
    assert texts(axes[1]) == ["31.4", " –", "29"]
    bold = [[text.get_text() for text in axis.texts if text.get_fontweight() == "bold"] for axis in axes]
    assert bold == [["52.0"], ["29"]]
    assert [axis.get_title() for axis in axes] == ["sts/stsb (%)", "perplexity/wiki, less is better"]
    [whisker] = axes[0].containers[-1].lines[2]
    np.testing.assert_allclose(whisker.get_segments()[0][:, 0], [0.49, 0.55])


def test_many_panels_leave_no_empty_frame_and_colours_come_round():
    names = {f"model {number}": (0.1 + number / 20, None) for number in range(9)}
    axes = score_bars([ScorePanel(f"task {number}", names) for number in range(4)], title="").axes
    assert [axis.get_visible() for axis in axes] == [True] * 4 + [False] * 2
    faces = [bar.get_facecolor() for bar in axes[0].patches]
    assert len(set(faces)) == len(COLOURS)


def test_negative_and_single_scores():
    [axis] = score_bars([ScorePanel("t", {"a": (-0.2, None)})], title="").axes
    assert axis.get_xlim()[0] == pytest.approx(-0.2)
    assert [text.get_fontweight() for text in axis.texts] == ["normal"]


def named(axis):
    """Return the box of every name, its line left out."""
    return {note.get_text(): Text.get_window_extent(note) for note in axis.texts}


def test_names_of_points_keep_clear_of_each_other():
    figure = trade_off(POINTS, title="both", ylabel="mean")
    picture(figure)
    [axis] = figure.axes
    boxes = named(axis)
    assert set(boxes) == {point.label for point in POINTS}
    for one, other in itertools.combinations(boxes.values(), 2):
        assert not one.overlaps(other)
    frame = axis.get_window_extent()
    for box in boxes.values():
        assert frame.x0 <= box.x0 < box.x1 <= frame.x1
        assert frame.y0 <= box.y0 < box.y1 <= frame.y1
    led = {note.get_text() for note in axis.texts if note.arrow_patch is not None}
    assert led
    assert not led & {"causal", "of another kind"}


def test_points_stand_where_they_belong():
    [axis] = trade_off(POINTS, title="both", ylabel="mean of $x_1$", xlabel="perplexity").axes
    drawn = lines(axis)
    assert drawn["one"] == ([1.62] * 4, [0.41, 0.520, 0.519, 0.518])
    assert drawn["two"] == ([2.5], [0.3])
    assert axis.get_xlabel() == "perplexity (less is better)"
    assert legend(axis) == ["one", "two"]
    assert axis.yaxis.get_major_formatter()(0.415) == "41.5%"


def test_a_single_point_has_no_legend():
    [axis] = trade_off([TradePoint("a", 3.0, 1.0)], title="", ylabel="", percent=False).axes
    assert axis.get_legend() is None
    assert texts(axis) == ["a"]


@pytest.mark.slow
def test_more_points_than_there_is_room_for_are_all_named():
    crowd = [TradePoint(f"a rather long name {number}", 0.5, 1.0) for number in range(60)]
    [axis] = trade_off(crowd, title="", ylabel="").axes
    assert len(texts(axis)) == 60


@pytest.mark.sweep(quick=3, check=6)
@pytest.mark.parametrize(
    "draw",
    [
        lambda: k_curves(CURVES, title="日本 $t$", ylabel="é", baseline=0.4),
        lambda: score_bars(PANELS, title="$a_b$"),
        lambda: trade_off(POINTS, title="t", ylabel="y"),
    ],
)
@pytest.mark.parametrize("format", ["png", "svg"])
def test_the_same_numbers_give_the_same_bytes(draw, format):
    assert picture(draw(), format) == picture(draw(), format)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: k_curves({}, title="", ylabel=""),
        lambda: k_curves({"a": []}, title="", ylabel=""),
        lambda: score_bars([], title=""),
        lambda: score_bars([ScorePanel("t", {})], title=""),
        lambda: trade_off([], title="", ylabel=""),
    ],
)
def test_nothing_cannot_be_drawn(draw):
    with pytest.raises(ConfigError, match="no scores to draw"):
        draw()


def test_what_is_not_comparable_has_no_best():
    scores = {"a": (0.8, None), "b": (0.7, None)}
    for marks_best, expected in ((True, ["80.0"]), (False, [])):
        [axis] = score_bars([ScorePanel("t", scores, marks_best=marks_best)], title="").axes
        assert [text.get_text() for text in axis.texts if text.get_fontweight() == "bold"] == expected


CURVES_divergence = {
    "greedy": (0.2, np.array([(0.0, 1.0), (0.1, 0.2), (1.0, 0.0)])),
    "nucleus": (0.9, np.array([(0.0, 1.0), (0.9, 0.9), (1.0, 0.0)])),
}


@pytest.mark.slow
def test_draws_each_curve_with_its_score():
    figure = divergence_curves(CURVES_divergence, title="Books")
    [axis] = figure.axes
    assert [line.get_label() for line in axis.lines] == ["nucleus: 0.900", "greedy: 0.200"]
    np.testing.assert_array_equal(axis.lines[1].get_xydata(), CURVES_divergence["greedy"][1])
    assert picture(figure) == picture(divergence_curves(CURVES_divergence, title="Books"))


def test_nothing_to_draw():
    with pytest.raises(ConfigError, match="no curves"):
        divergence_curves({}, title="Books")
