"""Cleans up well-known kinds of raw text: hard-wrapped books, extracted encyclopedias, what pandoc makes of a page.

Knows: their quirks. Does not know: files, what the text is for.
"""

import re
from collections.abc import Callable

from gerund.errors import unknown_name

_BLANK_LINES = re.compile(r"\n[ \t]*\n\s*")
_EMPHASIS = re.compile(r"(?<![A-Za-z0-9_])_([^_\n]+)_(?![A-Za-z0-9_])")
_PICTURE = re.compile(r"\[(?:Picture|Illustration)[^\]]*\]", re.IGNORECASE)
_EMPTY_BRACKETS = re.compile(r"\s*\([\s,;:]*\)")
_SPACES = re.compile(r"[ \t]+")
# Gutenberg wraps near column 70. A paragraph with shorter lines is verse, a heading or a list.
_WRAPPED_LINE_LENGTH = 50


def _clean_gutenberg(text: str) -> str:
    text = _PICTURE.sub("", text.replace("\r\n", "\n"))
    paragraphs = (_unwrap(paragraph) for paragraph in _BLANK_LINES.split(text))
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _unwrap(paragraph: str) -> str:
    lines = [_SPACES.sub(" ", line).strip() for line in paragraph.split("\n")]
    lines = [line for line in lines if line]
    if sum(map(str.isalpha, paragraph)) < 0.5 * len(paragraph.replace(" ", "")):
        return ""  # a rule, a table of numbers, a row of asterisks
    wrapped = sum(len(line) for line in lines[:-1]) >= _WRAPPED_LINE_LENGTH * (len(lines) - 1)
    joined = (" " if wrapped else "\n").join(lines)
    return _EMPHASIS.sub(r"\1", joined)


def _clean_wikipedia(text: str) -> str:
    return _EMPTY_BRACKETS.sub("", text).strip()


# A rule of a table, two columns of one, a caption that lost its link, an address, and the name of a picture file.
_RULE = re.compile(r"^[\s|+:=-]*[-=+|]{4}[\s|+:=-]*$", re.MULTILINE)
_COLUMNS = re.compile(r"\S {3,}\S")
_LINK_END = re.compile(r"^[^\[]*\]\]\s*")
_ADDRESS = re.compile(r"\b(?:https?|ftp)://\S+")
_PICTURE_FILE = re.compile(r"\S+\.(?:jpe?g|png|svg|gif|tiff?)\b\S*", re.IGNORECASE)
_LIST_MARKER = re.compile(r"^\s*(?:[-*]|\d+\.)\s{2,}", re.MULTILINE)
_CAPITAL_WORD = "[A-ZÀ-ÖØ-Þ][A-ZÀ-ÖØ-Þ'’-]*[A-ZÀ-ÖØ-Þ]{2}"
_CAPITALS = re.compile(rf"\b{_CAPITAL_WORD}(?: {_CAPITAL_WORD})+\b")
_LOOSE_EMPHASIS = re.compile(r"(?<!\w)_(?=\w)|(?<=\w)_(?!\w)")
_PROSE = 0.6


def _clean_pandoc(text: str) -> str:
    paragraphs = [_clean_pandoc_paragraph(paragraph) for paragraph in _BLANK_LINES.split(text.replace("\r\n", "\n"))]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph)


def _clean_pandoc_paragraph(paragraph: str) -> str:
    if _RULE.search(paragraph) or "[TABLE]" in paragraph or "{" in paragraph or "|" in paragraph:
        return ""  # a table, a map's data, a template that was not expanded
    lines = [_LIST_MARKER.sub("", line).strip() for line in paragraph.split("\n")]
    if 2 * sum(bool(_COLUMNS.search(line)) for line in lines) > len(lines):
        return ""  # a row of a table without rules
    body = _LINK_END.sub("", "\n".join(line for line in lines if line))
    body = _PICTURE_FILE.sub("", _ADDRESS.sub("", body))
    if sum(map(str.isalpha, body)) < _PROSE * len(body.replace(" ", "")):
        return ""
    body = _EMPTY_BRACKETS.sub("", _LOOSE_EMPHASIS.sub("", body))
    body = _CAPITALS.sub(lambda words: words[0].title(), body)
    return _SPACES.sub(" ", body).strip()


CLEANERS: dict[str, Callable[[str], str]] = {
    "none": str,
    "gutenberg": _clean_gutenberg,
    "wikipedia": _clean_wikipedia,
    "pandoc": _clean_pandoc,
}


def clean_text(text: str, style: str) -> str:
    r"""Return ``text`` without the quirks of where it came from.

    ``gutenberg`` joins hard-wrapped lines into paragraphs, removes the underscores of ``_emphasis_`` and
    drops picture captions and rules; verse and headings keep their lines. ``wikipedia`` removes the empty
    brackets that extraction leaves behind. ``pandoc`` does so too and undoes what pandoc makes of a wiki page's
    markup in plain text: tables, ``_emphasis_``, words in capitals for bold ones, list markers, rests of links.
    ``none`` changes nothing.

    >>> clean_text("It was a _very_ dark night, and nobody in the house\nwas up.", "gutenberg")
    'It was a very dark night, and nobody in the house was up.'
    >>> clean_text("Fraile () is a mountain ( , ) in Chile.", "wikipedia")
    'Fraile is a mountain in Chile.'
    >>> clean_text("A ROYAL TERN (_Thalasseus maximus_) is a bird.\n\n  ---- ----\n  Size   49 cm", "pandoc")
    'A Royal Tern (Thalasseus maximus) is a bird.'
    """
    try:
        clean = CLEANERS[style]
    except KeyError:
        raise unknown_name("text cleaning", style, list(CLEANERS)) from None
    return clean(text)
