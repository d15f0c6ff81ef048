"""Markdown and HTML as Markdown text with sections.

Markdown stays as it is written, so that offsets are those of the file; only its headings are looked for. HTML is
converted to Markdown by html-to-markdown, and its offsets are those of the Markdown.

Knows: headings, front matter, menus. Does not know: files, chunks.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from gerund.errors import DataError, MissingDependencyError
from gerund.retrieval.parsed_text import ParsedText, Section

# Every expression here takes linear time, whatever the text: what is read may be anybody's.
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_NO_TITLE_LINE = re.compile(r"[ \t]*$| {4}|\t| {0,3}(?:[-*+>|]|\d{1,9}[.)])")
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(?P<fields>.*?\r?\n)(?:---|\.\.\.)[ \t]*(?:\r?\n|$)", re.DOTALL)
_TITLE_FIELD = re.compile(r"^title:(?P<title>.*)$", re.MULTILINE | re.IGNORECASE)
_MARKS = re.compile(r"[*_`]+|!?\[([^\[\]]*)\]\([^()]*\)")

# A heading goes with every chunk below it, so a longer one is cut.
_HEADING = 300


def markdown(text: str) -> ParsedText:
    r"""Find the headings of a Markdown text; those in fenced code are none.

    The title is that of its front matter, else the first heading of the first level.

    >>> found = markdown("# Bread\n\nFlour.\n\n## Yeast\n\nIt rises.")
    >>> found.title, [one.path for one in found.sections]
    ('Bread', [('Bread',), ('Bread', 'Yeast')])
    """
    front = _FRONT_MATTER.match(text)
    field = _TITLE_FIELD.search(front["fields"]) if front else None
    headings = list(_headings(text, front.end() if front else 0))
    title = field["title"].strip().strip("\"'") if field else ""
    title = title or next((name for _, level, name in headings if level == 1), "")
    return ParsedText(text, title, sections_of(headings))


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
        elif (atx := _ATX.match(bare)) and (name := _without_closing_marks(bare[atx.end() :])):
            yield place, len(atx[1]), _plain(name)
            before = None
        elif before and (underline := _SETEXT.match(bare)):
            yield before[0], 1 if underline[1][0] == "=" else 2, _plain(before[1])
            before = None
        else:
            # Only a paragraph of one line becomes a heading here: a rule below a longer one is a rule.
            follows_text = before is not None
            before = None if follows_text or _NO_TITLE_LINE.match(bare) else (place, bare)
        place += len(line)


def _without_closing_marks(heading: str) -> str:
    """Return a heading without the number signs that may close it.

    >>> _without_closing_marks(" Deep ### "), _without_closing_marks(" C#"), _without_closing_marks(" ##")
    ('Deep', 'C#', '')
    """
    text = heading.rstrip()
    without = text.rstrip("#")
    return (without if without != text and without[-1:].isspace() else text).strip()


def _plain(heading: str) -> str:
    plain = " ".join(_MARKS.sub(lambda mark: mark[1] or "", heading).split())
    return plain if len(plain) <= _HEADING else f"{plain[:_HEADING]}..."


# What only marks words. Without it a quotation reads as the page does, and addresses of links are no text.
_INLINE_TAGS = ["a", "b", "strong", "i", "em", "u", "s", "del", "ins", "mark", "small", "abbr"]
_MENUS = ["nav", "[role=navigation]"]
_MENU_LINE = re.compile(r"\s*(?:[-*+]|\d{1,9}[.)]|#{1,6})(?=\s)")
_MENU_WORDS = 10
# A cell that spans columns becomes as many cells, so a small page can make an endless table.
_MOST_GROWTH, _SMALL = 10, 10**5


def html(text: str) -> ParsedText:
    r"""Return an HTML page as Markdown with its headings; emphasis and the addresses of links are left out.

    A ``nav`` element is left out where nothing is in it but a list of a few words each; all other text is kept.

    Raises:
        DataError: its elements are nested too deeply to be read, or its tables are endless.
        MissingDependencyError: html-to-markdown is not installed.

    >>> page = "<title>T</title><nav><ul><li>Menu</ul></nav><h1>Bread</h1><p>Flour &amp; <b>water</b>.</p><p>Salt.</p>"
    >>> found = html(page)
    >>> found.text, found.title, [one.path for one in found.sections]
    ('# Bread\n\nFlour & water.\n\nSalt.', 'T', [('Bread',)])
    """
    content = _converted(text, ())
    if "nav" in text.lower():
        without = _converted(text, tuple(_MENUS))
        left_out = Counter(content.split("\n")) - Counter(without.split("\n"))
        if without and all(not line.strip() or _is_menu_line(line) for line in left_out):
            content = without
    found = markdown(content)
    return ParsedText(content, _title(text) or found.title, found.sections)


def _is_menu_line(line: str) -> bool:
    return _MENU_LINE.match(line) is not None and len(line.split(maxsplit=_MENU_WORDS + 2)) <= _MENU_WORDS + 1


def _title(text: str) -> str:
    # With a title the converter begins the text with front matter, so it is asked for by itself.
    document = _library().convert(text, _options((), True)).metadata.document
    return " ".join((document.title or "").split()) if document else ""


def _converted(text: str, left_out: tuple[str, ...]) -> str:
    result = _library().convert(text, _options(left_out, False))
    if any(str(warning.kind).endswith("depth_limit_exceeded") for warning in result.warnings):
        raise DataError("its elements are nested too deeply")
    content = result.content or ""
    if len(content) > _MOST_GROWTH * len(text) + _SMALL:
        raise DataError(f"its tables would grow to {len(content):,} characters")
    # Spaces at a line's end are a mark of Markdown for a line break, which is there without them.
    return "\n".join(line.rstrip() for line in content.split("\n")).strip("\n")


@cache
def _options(left_out: tuple[str, ...], metadata: bool) -> Any:
    library = _library()
    return library.ConversionOptions(
        # Its own way to clean a page loses what is in a form, and headings in a header.
        preprocessing=library.PreprocessingOptions(enabled=False),
        hidden_content="all",
        exclude_selectors=list(left_out),
        extract_metadata=metadata,
        strip_tags=list(_INLINE_TAGS),
        compact_tables=True,
        autolinks=False,
        expand_abbreviations=False,
        include_blockquote_citations=False,
        inline_data_media="alt_text_only",
    )


def _library() -> Any:
    try:
        import html_to_markdown
    except ImportError as error:
        raise MissingDependencyError("needs html-to-markdown to be read: pip install 'gerund[documents]'") from error
    return html_to_markdown
