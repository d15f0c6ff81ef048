"""What all pictures share: bytes that repeat, colours that stay apart, and matplotlib left as it was."""

import itertools

import matplotlib
import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.reporting.plots.style import (
    COLOURS,
    MARKERS,
    MOST_KINDS,
    headline,
    legend_beside,
    legible,
    new_figure,
    picture,
    series_mark,
)

# What the eye makes of linear RGB when one kind of cone is missing (Machado, Oliveira and Fernandes 2009, severity 1).
EYES = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def lab(colour, eye):
    """Return CIE L*a*b* of a colour as an eye sees it."""
    rgb = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(EYES[eye]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = (
        np.cbrt(value) if value > 0.008856 else 7.787 * value + 16 / 116 for value in to_xyz @ seen / [0.9505, 1, 1.089]
    )
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def drawn(title="a $title_1$"):
    figure = new_figure(4, 3)
    headline(figure, title)
    axis = figure.subplots()
    for place, name in enumerate(["$x_1$", "日本"]):
        axis.plot([0, 1], [place, 1], label=legible(name), **series_mark(place))
    legend_beside(axis)
    return figure


@pytest.mark.parametrize("eye", EYES)
def test_colours_stay_apart(eye):
    apart = [np.linalg.norm(lab(one, eye) - lab(other, eye)) for one, other in itertools.combinations(COLOURS, 2)]
    assert min(apart) > 17


def test_every_mark_is_another_one_and_neighbours_differ_in_both():
    marks = [series_mark(place) for place in range(MOST_KINDS)]
    assert len({(mark["color"], mark["marker"]) for mark in marks}) == MOST_KINDS == len(COLOURS) * len(MARKERS)
    for one, other in itertools.pairwise(marks):
        assert one["color"] != other["color"]
        assert one["marker"] != other["marker"]


@pytest.mark.slow
@pytest.mark.parametrize(("format", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_same_picture_has_the_same_bytes(format, start):
    one, other = picture(drawn(), format), picture(drawn(), format)
    assert one == other
    assert one.startswith(start)
    assert picture(drawn("another"), format) != one


def test_names_inside_svg_still_lead_somewhere():
    svg = picture(drawn(), "svg").decode()
    named = {part.split('"')[0] for part in svg.split(' id="')[1:]}
    used = {part.split(")")[0] for part in svg.split("url(#")[1:]}
    used |= {part.split('"')[0] for part in svg.split('xlink:href="#')[1:]}
    assert used
    assert used <= named


def test_drawing_leaves_no_trace_in_matplotlib():
    settings = dict(matplotlib.rcParams)
    picture(drawn(), "svg")
    assert dict(matplotlib.rcParams) == settings


def test_what_the_font_lacks_is_a_box():
    assert legible("a日b") == "a▯b"


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigError, match="valid are: png, svg, pdf"):
        picture(None, "gif")
