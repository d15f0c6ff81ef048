"""Unicode normalization of texts: NFKC, without invisible characters and hyphens at line ends.

Search, word overlap and encoders compare texts in this form; stored and quoted texts stay unchanged.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Sequence

import regex

# Among the characters that most programs may leave out of sight, by Unicode's tables.
JOINERS = r"\u200c\u200d"
"""Shape Arabic and Indian letters and put emoji together; behind other letters they change nothing."""
SHOWN = r"\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe0e\ufe0f"
"""Change what is seen: variation selectors behind emoji, and fillers, which stand for a letter."""

_INVISIBLE = rf"[\p{{Default_Ignorable_Code_Point}}--[{JOINERS}{SHOWN}]]"
_UNSEEN = rf"[\p{{Default_Ignorable_Code_Point}}--[{SHOWN}]]"
# Letters behind which a joiner changes nothing.
_UNJOINED = r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Nd}\uff9e\uff9f]"
# "Haus- und Gartenarbeit" has its hyphen at a line's end too.
_CONJUNCTION = r"(?:and|or|und|oder|bzw|en|of|och|eller|og)\b"
# No part of a pattern gives back what it took, so that a hostile text takes no longer than another.
_LINE_END = (
    rf"(?=[{_UNSEEN}--\u00ad]*+[-\u00ad\u2010]){_UNSEEN}*+[-\u2010]?{_UNSEEN}*+[ \t]*+(?:\r\n|\n|\r)\s*+{_UNSEEN}*+"
    rf"(?=\p{{Ll}})(?!{_CONJUNCTION})"
)

_LINE_ENDS = regex.compile(rf"(?V1)\p{{L}}\p{{M}}*+\K{_LINE_END}")
_REMOVED = regex.compile(rf"(?V1)\p{{L}}\p{{M}}*+\K{_LINE_END}|{_UNJOINED}\p{{M}}*+\K{_UNSEEN}++|{_INVISIBLE}++")
_HYPHENATED = regex.compile(rf"(?V1)(\p{{L}}[\p{{L}}\p{{M}}\p{{N}}]*+){_LINE_END}([\p{{L}}\p{{M}}\p{{N}}]++)")
_CLUSTER = regex.compile(r"\X")


def normalized(text: str) -> str:
    r"""Return a text in NFKC, without invisible characters and without the hyphens of words divided at a line's end.

    Plain ASCII stays as it is but for such hyphens. A text of invisible characters alone stays as it is.

    >>> normalized("ef\ufb01cient photo\u00adsyn\u200bthesis, reor-\nganised")
    'efficient photosynthesis, reorganised'
    """
    if text.isascii():
        return _REMOVED.sub("", text) if _has_lines(text) else text
    return unicodedata.normalize("NFKC", _REMOVED.sub("", text)) or text


def joined_lines(text: str) -> str:
    r"""Return a text without the hyphens of words that are divided at a line's end, and otherwise as it is.

    >>> joined_lines("reor-\nganised, Haus- \nund Garten")
    'reorganised, Haus- \nund Garten'
    """
    return _LINE_ENDS.sub("", text) if _has_lines(text) else text


def halves(text: str) -> list[str]:
    r"""Return the halves of each word that is divided at a line's end, which may be two words with a hyphen.

    >>> halves("A well-\nknown and reor-\nganised house")
    ['well known', 'reor ganised']
    """
    return [" ".join(halves) for halves in _HYPHENATED.findall(text)] if _has_lines(text) else []


def _has_lines(text: str) -> bool:
    return "\n" in text or "\r" in text


class Alignment:
    r"""A text in its normal form, and which stretch of the text each stretch of that form stands for.

    Attributes:
        text: the normal form.

    >>> aligned = Alignment("Das ist scho\u0308n")
    >>> aligned.text[8:], aligned.original(8, 13)
    ('schön', (8, 14))
    """

    def __init__(self, text: str) -> None:
        self.text = normalized(text)
        self._starts: Sequence[int] = ()
        self._source: Sequence[tuple[int, int]] = ()
        if self.text == text:
            return
        pieces = _pieces(text)
        if "".join(piece for piece, _, _ in pieces) != self.text:
            pieces = [(self.text, 0, len(text))]  # clusters that compose with each other; none are known
        starts, at = [], 0
        for piece, _, _ in pieces:
            starts.append(at)
            at += len(piece)
        self._starts, self._source = starts, [(start, end) for _, start, end in pieces]

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the stretch of the text that a stretch of the normal form stands for."""
        if not self._starts:
            return start, end
        first = bisect_right(self._starts, start) - 1
        if start >= end:
            return self._source[first][0], self._source[first][0]
        return self._source[first][0], self._source[bisect_right(self._starts, end - 1) - 1][1]


def _pieces(text: str) -> list[tuple[str, int, int]]:
    """Return the normal form of each cluster of characters, with where the cluster starts and ends in the text."""
    removed = [match.span() for match in _REMOVED.finditer(text)]
    gaps = zip([0, *(end for _, end in removed)], [*(start for start, _ in removed), len(text)], strict=True)
    places = [place for start, end in gaps for place in range(start, end)]
    pieces = []
    for cluster in _CLUSTER.finditer("".join(text[place] for place in places)):
        start, end = cluster.span()
        pieces.append((unicodedata.normalize("NFKC", cluster[0]), places[start], places[end - 1] + 1))
    return pieces
