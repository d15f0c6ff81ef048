"""Augment a text by light edits of its words, for a positive in contrastive training.

After EDA (Wei and Zou 2019): words are deleted and exchanged, here neighbors only, so that the meaning survives; and a
crop. MAGNET's own positives come from a paraphrasing model; these need none. Words are split at white space, so a text
in a script without spaces is one word and is returned unchanged.
"""

import numpy as np

from gerund.errors import ConfigError, TextError


def augment(text: str, rng: np.random.Generator, *, deletion: float = 0.1, swap: float = 0.1, crop: float = 1.0) -> str:
    r"""Return another version of a text: cropped, thinned out, then with neighboring words exchanged.

    It is the text's words, at least one, with single spaces between them. ``deletion`` and ``swap`` are probabilities
    per word; no word moves twice. With ``crop`` below 1, a random contiguous stretch is taken first, whose length is
    uniform from this fraction to all words.

    >>> augment("the quick brown fox jumps over the lazy dog by the river", np.random.default_rng(1), crop=0.6)
    'brown fox jumps over the lazy dog the river'
    >>> augment("one  word\nafter another", np.random.default_rng(0), deletion=0, swap=0)
    'one word after another'
    """
    for name, value in (("deletion", deletion), ("swap", swap), ("crop", crop)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is a fraction from 0 to 1, not {value}")
    words = text.split()
    if not words:
        raise TextError("a text without words cannot be augmented")
    return " ".join(_swapped(_thinned(_cropped(words, crop, rng), deletion, rng), swap, rng))


def _cropped(words: list[str], crop: float, rng: np.random.Generator) -> list[str]:
    length = max(1, round(rng.uniform(crop, 1.0) * len(words)))
    start = int(rng.integers(len(words) - length + 1))
    return words[start : start + length]


def _thinned(words: list[str], deletion: float, rng: np.random.Generator) -> list[str]:
    stays = rng.random(len(words)) >= deletion
    if not stays.any():
        stays[rng.integers(len(words))] = True
    return [word for word, stay in zip(words, stays, strict=True) if stay]


def _swapped(words: list[str], swap: float, rng: np.random.Generator) -> list[str]:
    words = list(words)
    swaps = rng.random(len(words)) < swap
    place = 0
    while place < len(words) - 1:
        if swaps[place]:
            words[place : place + 2] = reversed(words[place : place + 2])
            place += 1
        place += 1
    return words
