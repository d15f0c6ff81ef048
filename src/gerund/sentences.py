"""Where a text's sentences end, by sentencex; and what to do where that library gives up.

Knows: the splitter. Does not know: documents, what sentences are for.
"""

import re

# sentencex 1.0 looks one byte before a full stop for an initial (J. Smith) and panics inside of a longer white space.
_BEFORE_FULL_STOP = re.compile(r"([^\W\d_])(\s*)[^\S\x00-\x7f](?=\.)")


def segments(text: str, language: str = "en") -> list[str]:
    r"""Return a text's sentences with the white space behind them.

    Args:
        text: the text.
        language: its code, such as en.

    >>> segments("Mr. Smith left. He")
    ['Mr. Smith left. ', 'He']
    >>> segments("Plan W\xa0.D was his. It failed.")
    ['Plan W\xa0.D was his. ', 'It failed.']
    """
    from sentencex import segment

    safe = _BEFORE_FULL_STOP.sub(lambda found: f"{found[1]}{found[2]} " if found[1].isupper() else found[0], text)
    try:
        found: list[str] = list(segment(language, safe))
    except BaseException as error:
        # What a Rust library panics with is no Exception, and would end everything.
        if type(error).__name__ != "PanicException":
            raise
        return text.splitlines(keepends=True)
    return found if safe == text else _cut_alike(text, found, safe)


def _cut_alike(text: str, pieces: list[str], other: str) -> list[str]:
    """Cut a text where one of the same length was cut; the splitter may drop white space between its pieces."""
    found, end = [], 0
    for piece in pieces:
        start = other.index(piece, end)
        end = start + len(piece)
        found.append(text[start:end])
    return found
