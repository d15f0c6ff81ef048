"""Shared plot style (colors, markers, axes, legends), and rendering figures to PNG, SVG or PDF bytes.

Figures are never made by pyplot, so that matplotlib's global state isn't changed.
"""

import io
import re
from collections.abc import Mapping
from typing import Any

from gerund.checks import one_of
from gerund.errors import MissingDependencyError

FORMATS = ("png", "svg", "pdf")

INK, PALE, QUIET, TINT = "#262230", "#d9d6de", "#8b8b8b", "#f4f1f9"

# Seven colours that stay apart in the eyes of those who lack one kind of cone (a test measures it); with more
# than seven things to tell apart the marker changes too.
COLOURS = ("#4b1d8f", "#e8743b", "#56b4e9", "#0f8b6d", "#8c2d04", "#c9b400", "#f0a3c8")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MOST_KINDS = len(COLOURS) * len(MARKERS)

_SVG_ID = re.compile(rb'(?P<before>\bid="|#)(?P<name>\w*[0-9a-f]{10})(?=["\)])')


def require_matplotlib() -> None:
    """Check that pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("pictures need matplotlib: pip install 'gerund[plot]'") from error


def new_figure(width: float, height: float) -> Any:
    """Return an empty white ``matplotlib.figure.Figure`` of so many inches."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.set_facecolor("white")
    return figure


def picture(figure: Any, format: str = "png") -> bytes:
    """Return a figure as the bytes of a file; the same figure gives the same bytes.

    Raises:
        ConfigError: an unknown format.
    """
    one_of("picture format", format, FORMATS)
    buffer = io.BytesIO()
    metadata: dict[str, dict[str, None]] = {"png": {"Software": None}, "svg": {"Date": None}}
    figure.savefig(buffer, format=format, metadata=metadata.get(format, {"CreationDate": None, "Producer": None}))
    return _numbered(buffer.getvalue()) if format == "svg" else buffer.getvalue()


def series_mark(place: int) -> dict[str, Any]:
    """Return colour and marker of the thing at ``place``; both differ from the next, so that grey print is enough.

    >>> [series_mark(place)["marker"] for place in (0, 1, 6, 7)]
    ['o', 's', 'X', 's']
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[(place + place // len(COLOURS)) % len(MARKERS)],
    }


def quiet_axis(axis: Any, *, grid: str = "y") -> None:
    """Leave an axis two pale lines, small figures and a pale grid along ``grid`` (``x``, ``y`` or ``both``)."""
    axis.tick_params(labelsize=8, colors=INK, length=2)
    axis.grid(axis=grid, color=PALE, linewidth=0.6)
    axis.set_axisbelow(True)
    for side, spine in axis.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_edgecolor(PALE)


def headline(figure: Any, title: str) -> None:
    """Write the title above everything."""
    figure.suptitle(legible(title), fontsize=11, color=INK, fontweight="bold", parse_math=False)


def legend_beside(owner: Any, handles_of: Any | None = None, **settings: Any) -> Any:
    """Put a frameless legend right of an axis, or of a whole figure when the handles' axis is given too."""
    look: dict[str, Any] = {"fontsize": 8, "frameon": False, "labelcolor": INK, **settings}
    if handles_of is None:
        legend = owner.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), **look)
    else:
        legend = owner.legend(*handles_of.get_legend_handles_labels(), loc="outside right center", **look)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return legend


def legible(text: str) -> str:
    """Return the text with a box for every character that the font lacks, which matplotlib would warn about."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="DejaVu Sans"))).get_charmap()
    return "".join(char if ord(char) in known else "▯" for char in text)


def shortened(text: str, most: int) -> str:
    """Return a legible name of at most ``most`` characters on one line.

    >>> shortened("inplace-bidir of a model", 12)
    'inplace-bid…'
    """
    text = legible(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shown(value: float, percent: bool, sign: str = "%") -> str:
    """Return a value as tables show it.

    >>> shown(0.7123, True), shown(0.7123, True, sign=""), shown(31.416, False)
    ('71.2%', '71.2', '31.4')
    """
    return f"{100 * value:.1f}{sign}" if percent else f"{value:.3g}"


def percent_axis(axis: Any, percent: bool) -> None:
    """Label the y axis in percent where its values are fractions."""
    if percent:
        axis.yaxis.set_major_formatter(lambda value, _place: f"{100 * value:.4g}%")


def _numbered(svg: bytes) -> bytes:
    """Replace the random names inside an SVG file by numbers, in the order in which they are given out."""
    names: Mapping[bytes, bytes] = {
        name: b"id%d" % number
        for number, name in enumerate(
            dict.fromkeys(match["name"] for match in _SVG_ID.finditer(svg) if match["before"] != b"#")
        )
    }
    return _SVG_ID.sub(lambda match: match["before"] + names.get(match["name"], match["name"]), svg)
