"""Markdown and HTML as plain text with sections.

Markdown stays as it is written, so that offsets are those of the file; only its headings are looked for. HTML becomes
the text that a reader sees, without what stands around an article: scripts, menus, footers.

Knows: headings, paragraphs, lists, tables. Does not know: files, chunks.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser

from gerund.retrieval.documents import Section


@dataclass(frozen=True)
class ParsedText:
    """What is in a file.

    Attributes:
        text: the text.
        title: its title; empty where nothing says so.
        sections: where its sections begin.
        key: which of several documents of one file it is; empty where the file is one document.
    """

    text: str
    title: str = ""
    sections: tuple[Section, ...] = ()
    key: str = ""


_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?:[ \t]+(.*?))??(?:[ \t]+#+)?[ \t]*$")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_NO_TITLE_LINE = re.compile(r"[ \t]*$| {4}|\t| {0,3}(?:[-*+>|]|\d+[.)])")
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(?P<fields>.*?\r?\n)(?:---|\.\.\.)[ \t]*(?:\r?\n|$)", re.DOTALL)
_TITLE_FIELD = re.compile(r"^title:[ \t]*(?P<title>\S.*?)[ \t]*$", re.MULTILINE | re.IGNORECASE)
_MARKS = re.compile(r"[*_`]+|!?\[([^\]]*)\]\([^)]*\)")


def markdown(text: str) -> ParsedText:
    r"""Find the headings of a Markdown text; those in fenced code are none.

    The title is that of its front matter, else the first heading of the first level.

    >>> found = markdown("# Bread\n\nFlour.\n\n## Yeast\n\nIt rises.")
    >>> found.title, [one.path for one in found.sections]
    ('Bread', [('Bread',), ('Bread', 'Yeast')])
    """
    front = _FRONT_MATTER.match(text)
    named = _TITLE_FIELD.search(front["fields"]) if front else None
    found = list(_headings(text, front.end() if front else 0))
    title = named["title"].strip("\"'") if named else next((name for _, level, name in found if level == 1), "")
    return ParsedText(text, title, sections_of(found))


def sections_of(headings: list[tuple[int, int, str]]) -> tuple[Section, ...]:
    """Return sections with their paths, from (start, level, heading) in the order of the text.

    >>> [one.path for one in sections_of([(0, 2, "A"), (5, 3, "B"), (9, 2, "C")])]
    [('A',), ('A', 'B'), ('C',)]
    """
    above: list[tuple[int, str]] = []
    found = []
    for start, level, name in headings:
        above = [one for one in above if one[0] < level]
        above.append((level, name))
        found.append(Section(start, tuple(own for _, own in above)))
    return tuple(found)


def _headings(text: str, begin: int) -> Iterator[tuple[int, int, str]]:
    place, fence = begin, ""
    before: tuple[int, str] | None = None  # a line that an underline would make a heading
    for line in text[begin:].splitlines(keepends=True):
        bare = line.rstrip("\r\n")
        opening = _FENCE.match(bare)
        if fence:
            closes = opening is not None and opening[1].startswith(fence) and not bare.strip(" `~")
            fence = "" if closes else fence
            before = None
        elif opening:
            fence, before = opening[1], None
        elif (atx := _ATX.match(bare)) and (atx[2] or "").strip():
            yield place, len(atx[1]), _plain(atx[2])
            before = None
        elif before and (underline := _SETEXT.match(bare)):
            yield before[0], 1 if underline[1][0] == "=" else 2, _plain(before[1])
            before = None
        else:
            # Only a paragraph of one line becomes a heading here: a rule below a longer one is a rule.
            follows_text = before is not None
            before = None if follows_text or _NO_TITLE_LINE.match(bare) else (place, bare)
        place += len(line)


def _plain(heading: str) -> str:
    return " ".join(_MARKS.sub(lambda mark: mark[1] or "", heading).split())


_LEFT_OUT = {
    "script", "style", "noscript", "template", "svg", "math", "nav", "footer", "aside", "form", "button", "select",
    "iframe", "object", "dialog",
}  # fmt: skip
# Elements that have no end tag, and so hold nothing.
_VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
_PARAGRAPHS = {
    "p", "div", "section", "article", "main", "header", "blockquote", "figure", "figcaption", "table", "ul", "ol", "dl",
    "pre", "address", "details", "summary", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "body",
}  # fmt: skip
_LINES = {"br", "li", "tr", "dt", "dd", "caption", "option"}
_LEVELS = {f"h{level}": level for level in range(1, 7)}


def html(text: str) -> ParsedText:
    r"""Return the text that a reader of an HTML page sees, with its headings.

    >>> found = html("<title>T</title><nav>Menu</nav><h1>Bread</h1><p>Flour &amp; <b>water</b>.</p><p>Salt.</p>")
    >>> found.text, found.title, [one.path for one in found.sections]
    ('Bread\n\nFlour & water.\n\nSalt.', 'T', [('Bread',)])
    """
    parser = _Page()
    parser.feed(text)
    parser.close()
    return parser.parsed()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._pieces: list[str] = []
        self._length = 0
        self._gap = ""  # white space that the next piece is put behind
        self._open: list[str] = []  # elements that are left out, the outermost first
        self._preformatted = 0
        self._headings: list[tuple[int, int, str]] = []
        self._heading: tuple[int, int] | None = None
        self._cells = 0
        self._title: list[str] | None = None
        self.title = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        del attrs
        if self._open or tag in _LEFT_OUT:
            if tag not in _VOID:
                self._open.append(tag)
            return
        if tag == "title" and not self.title:
            self._title = []
        self._break(tag)
        if tag in _LEVELS:
            self._heading = (len(self._pieces), _LEVELS[tag])
        elif tag == "li":
            self._put("- ")
        elif tag == "tr":
            self._cells = 0
        elif tag in ("td", "th"):
            if self._cells:
                self._gap = " | "
            self._cells += 1
        elif tag == "pre":
            self._preformatted += 1

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin and end an element; one that holds nothing leaves nothing open."""
        del attrs
        if not self._open and tag not in _LEFT_OUT:
            self._break(tag)

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        if tag == "title" and self._title is not None:
            self.title, self._title = " ".join("".join(self._title).split()), None
        if self._open:
            if tag in self._open:
                del self._open[self._open.index(tag) :]
            return
        if tag in _LEVELS and self._heading is not None:
            self._end_heading()
        elif tag == "pre" and self._preformatted:
            self._preformatted -= 1
        self._break(tag)

    def handle_data(self, data: str) -> None:
        """Take text."""
        if self._title is not None:
            self._title.append(data)
        if self._open or self._title is not None:
            return
        if self._preformatted:
            self._put(data)
            return
        words = " ".join(data.split())
        if not words:
            self._gap = self._gap or (" " if data and self._pieces else "")
            return
        if data[0].isspace() and not self._gap and self._pieces:
            self._gap = " "
        self._put(words)
        self._gap = " " if data[-1].isspace() else ""

    def parsed(self) -> ParsedText:
        """Return what was read."""
        if self._heading is not None:
            self._end_heading()
        text = "".join(self._pieces).rstrip()
        first = next((name for _, level, name in self._headings if level == 1), "")
        return ParsedText(text, self.title or first, sections_of(self._headings))

    def _put(self, piece: str) -> None:
        if self._gap and self._pieces and not (self._pieces[-1].endswith("- ") and self._gap == " "):
            self._pieces.append(self._gap)
            self._length += len(self._gap)
        self._gap = ""
        self._pieces.append(piece)
        self._length += len(piece)

    def _break(self, tag: str) -> None:
        wanted = "\n\n" if tag in _PARAGRAPHS else "\n" if tag in _LINES else ""
        if len(wanted) > self._gap.count("\n"):
            self._gap = wanted

    def _end_heading(self) -> None:
        assert self._heading is not None
        first, level = self._heading
        self._heading = None
        own = "".join(self._pieces[first:])
        if name := " ".join(own.split()):
            begin = self._length - len(own)
            self._headings.append((begin + len(own) - len(own.lstrip()), level, name))
