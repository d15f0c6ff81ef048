"""The numbers in brackets by which an answer cites its sources: those that no source has are taken out again.

Knows: texts, also those that come piece by piece. Does not know: models, sources.
"""

import re

_NUMBER = r"[0-9]{1,3}"
_ITEM = rf"{_NUMBER}(?:\s?[-\u2013]\s?{_NUMBER})?"
_CITATION = re.compile(rf"[ \t]*\[\s?({_ITEM}(?:\s?[,;]\s?{_ITEM})*)\s?\]")
# What may still become one: white space at the end, or a bracket that is not closed.
_BEGUN = re.compile(r"[ \t]*\[[0-9\s,;\u2013-]*\Z|[ \t]+\Z")


class Citations:
    """Takes out the numbers that no source has, while a text comes; remembers those that stay.

    Args:
        count: how many sources there are; they are numbered from 1.

    Attributes:
        cited: the numbers that stay, each once, in the order in which they came.
        dropped: the numbers that were taken out.

    >>> found = Citations(3)
    >>> found.put("In 1825 [1, 7]. So ") + found.put("it was [") + found.put("2][9].") + found.end()
    'In 1825 [1]. So it was [2].'
    >>> found.cited, found.dropped
    ([1, 2], [7, 9])
    """

    def __init__(self, count: int) -> None:
        self.cited: list[int] = []
        self.dropped: list[int] = []
        self._count = count
        self._held = ""

    def put(self, text: str) -> str:
        """Take more of the text; return what of it is certain."""
        text = self._held + text
        begun = _BEGUN.search(text)
        first = len(text) if begun is None else begun.start()
        self._held = text[first:]
        return self._checked(text[:first])

    def end(self) -> str:
        """Return what was held back: the text has come to its end."""
        rest, self._held = self._held, ""
        return self._checked(rest)

    def _checked(self, text: str) -> str:
        return _CITATION.sub(self._kept, text)

    def _kept(self, found: re.Match[str]) -> str:
        numbers = [number for item in re.split(r"[,;]", found[1]) for number in _numbers(item)]
        good = [number for number in numbers if 1 <= number <= self._count]
        self.cited += [number for number in dict.fromkeys(good) if number not in self.cited]
        bad = [number for number in dict.fromkeys(numbers) if number not in good]
        self.dropped += [number for number in bad if number not in self.dropped]
        if len(good) == len(numbers):
            return found[0]
        space = found[0][: len(found[0]) - len(found[0].lstrip())]
        return f"{space}[{', '.join(map(str, good))}]" if good else ""


def checked(text: str, count: int) -> tuple[str, list[int], list[int]]:
    """Return a text without the numbers that no source has, those that stay, and those that were taken out.

    >>> checked("It rises [1-3] by yeast [4].", 3)
    ('It rises [1-3] by yeast.', [1, 2, 3], [4])
    """
    citations = Citations(count)
    kept = citations.put(text) + citations.end()
    return kept, citations.cited, citations.dropped


def _numbers(item: str) -> list[int]:
    """Return the numbers of an item: one, or all from one to another."""
    ends = [int(part) for part in re.split(r"[-\u2013]", item)]
    return list(range(ends[0], ends[-1] + 1)) or ends
