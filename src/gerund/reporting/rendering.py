"""HTML pages: templates, embedded figures, names and versions.

Everything is escaped and nothing is fetched: styles and script are in the page, and its policy forbids the rest.
"""

import base64
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from gerund.errors import GerundError, MissingDependencyError
from gerund.jobs.files import write_atomic
from gerund.reporting.plots.style import require_matplotlib
from gerund.version import __version__

# Pictures are drawn at 150 dots an inch; a page has 96.
_SCALE = 96 / 150


@dataclass(frozen=True)
class Picture:
    """A picture for a page."""

    title: str  # a few words
    caption: str  # what is to be seen, in a sentence or two
    alt: str  # what it shows, for those who do not see it
    png: bytes
    group: str  # the heading under which it stands

    @property
    def data_uri(self) -> str:
        """The picture as part of a page."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    @property
    def css_size(self) -> tuple[int, int]:
        """Width and height in a page's pixels."""
        # Every PNG file begins with its signature and the header chunk, which begins with width and height.
        width, height = struct.unpack(">II", self.png[16:24])
        return round(width * _SCALE), round(height * _SCALE)


@dataclass(frozen=True)
class Gallery:
    """Pictures, and for those that could not be drawn a sentence each."""

    pictures: tuple[Picture, ...] = ()  # what was drawn
    missing: tuple[str, ...] = ()  # what was not, and why

    def groups(self) -> list[tuple[str, list[Picture]]]:
        """Return the pictures under their headings, in the order in which those first occur."""
        by_group: dict[str, list[Picture]] = {}
        for picture in self.pictures:
            by_group.setdefault(picture.group, []).append(picture)
        return list(by_group.items())


# One picture: what it is, and how it is drawn.
Wanted = tuple[str, Callable[[], Picture]]


def drawn(wanted: Iterable[Wanted]) -> Gallery:
    """Draw what can be drawn.

    For the rest there is a sentence that says why not: what was measured in hours must not be lost to a picture.
    """
    try:
        require_matplotlib()
    except MissingDependencyError as error:
        return Gallery((), (f"There are no pictures: {error}.",))
    pictures, missing = [], []
    for what, draw in wanted:
        try:
            pictures.append(draw())
        except Exception as error:
            reason = str(error) if isinstance(error, GerundError) else f"{type(error).__name__}: {error}"
            missing.append(f"{what} could not be drawn: {reason}.")
    return Gallery(tuple(pictures), tuple(dict.fromkeys(missing)))


def write_html(path: Path, template: str, **values: object) -> Path:
    """Fill a template and write it; the folder is made where it is missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("gerund.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"duration": duration, "breakable": _breakable}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, environment.get_template(template).render(version=__version__, **values))
    return path


def _breakable(text: str) -> str:
    """Return a name that may be broken behind its underscores."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(escape(text).split("_"))


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(0.34), duration(59.7), duration(75), duration(7300)
    ('0.3 s', '1 min 0 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


_PACKAGES = ("torch", "transformers", "tokenizers", "mteb", "scikit-learn", "scipy", "bm25s", "lm-eval")


def versions() -> dict[str, str]:
    """Return the versions of the packages that scores may depend on, of those that are installed."""
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def shareable(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description that says nothing about the machine: of a model's folder only the last name.

    >>> shareable({"model": "/data/models/tiny", "pooling": "mean"})
    {'model': 'tiny', 'pooling': 'mean'}
    >>> shareable({"model": "Qwen/Qwen3-0.6B"})
    {'model': 'Qwen/Qwen3-0.6B'}
    """
    return {**description, "model": bare_name(str(description.get("model", "")))}


def bare_name(name: str) -> str:
    """Return a hub id as it is, and of a path only the last part."""
    path = PureWindowsPath(name) if "\\" in name else PurePosixPath(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    return path.name if is_path else name
