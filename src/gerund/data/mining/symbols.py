"""What a text looks like to the miner: its normalised form, and what each of its symbols weighs.

GUR, section III-B compares "normalized versions" of sentences without saying which; its Figure 2 lets 14 Latin letters
pass and 9 not, and section IV-A takes two or three Chinese characters. The released code weighs 1, 0.3 and 0.1 in
floating point, where ten letters come to 2.999...; here the weights are whole numbers.

Knows: Unicode. Does not know: sentences, documents, pairs.
"""

import unicodedata
from dataclasses import dataclass
from functools import cache

import numpy as np

from gerund.errors import ConfigError
from gerund.normalization import normalized

# Letters beyond this code point (the released code's 10000) say as much as several Latin ones: Han, kana, Hangul, ...
LAST_LIGHT_LETTER = 0x2710
_CODE_POINTS = 0x110000
# The planes from here on have no letters: unassigned, tags, private use.
_BEYOND_LETTERS = 0x40000


@dataclass(frozen=True)
class SymbolWeights:
    """What a symbol adds to the weight of a substring."""

    wide: int = 10
    """A letter (Unicode category L) beyond U+2710: Han, kana, Hangul and others."""
    letter: int = 3
    """Any other letter."""
    other: int = 1
    """Anything else: spaces, digits, punctuation, combining marks."""

    def __post_init__(self) -> None:
        for name in ("wide", "letter", "other"):
            value = getattr(self, name)
            # A symbol without weight could be added to any substring, so that the longest one were not defined.
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
                raise ConfigError(f"the weight of a symbol is a whole number from 1 to 1,000,000, and {name}={value!r}")

    def of(self, codes: np.ndarray) -> np.ndarray:
        """Return the weight of each code point: ``(n,)`` uint32 to ``(n,)`` int64.

        >>> SymbolWeights().of(np.array([ord(symbol) for symbol in "aé 7汉"])).tolist()
        [3, 3, 1, 1, 10]
        """
        return np.array([self.other, self.letter, self.wide], dtype=np.int64)[_kinds()[codes]]

    def of_text(self, text: str) -> int:
        """Return what a whole text weighs.

        >>> SymbolWeights().of_text("spike is chasing ")
        45
        """
        return int(self.of(code_points(text)).sum())


def normalised(text: str) -> str:
    r"""Return the form in which texts are compared: the normal form in lower case, white space folded to one space.

    >>> normalised("  Spike\n is　ＣＨＡＳＩＮＧ Tom. ")
    'spike is chasing tom.'
    """
    return " ".join(normalized(text).lower().split())


def code_points(text: str) -> np.ndarray:
    """Return a text's code points, ``(n,)`` uint32; half a surrogate pair is one too."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


@cache
def _kinds() -> np.ndarray:
    """Return for each code point 0 for no letter, 1 for a letter, 2 for a letter beyond ``LAST_LIGHT_LETTER``."""
    kinds = np.zeros(_CODE_POINTS, dtype=np.uint8)
    kinds[:_BEYOND_LETTERS] = [unicodedata.category(chr(code))[0] == "L" for code in range(_BEYOND_LETTERS)]
    kinds[LAST_LIGHT_LETTER + 1 :] *= 2
    kinds.setflags(write=False)
    return kinds
