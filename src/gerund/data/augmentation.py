"""Makes a second version of a text by light changes to its words, as a positive for contrastive training.

After EDA (Wei and Zou 2019): words deleted and words exchanged, here neighbours only, so that the sense survives;
and a crop. MAGNET's own positives come from a paraphrasing model; these need none.

Knows: words between white space. Does not know: languages, tokens. A text in a script without spaces is one word
and comes back as it is.
"""

import numpy as np

from gerund.errors import ConfigError, TextError


def augment(text: str, rng: np.random.Generator, *, deletion: float = 0.1, swap: float = 0.1, crop: float = 1.0) -> str:
    r"""Return another version of a text: cropped, then thinned out, then with neighbouring words exchanged.

    >>> augment("the quick brown fox jumps over the lazy dog by the river", np.random.default_rng(1), crop=0.6)
    'brown fox jumps over the lazy dog the river'
    >>> augment("one  word\nafter another", np.random.default_rng(0), deletion=0, swap=0)
    'one word after another'

    Args:
        text: the text; it has at least one word.
        rng: the source of randomness.
        deletion: probability that a word is left out; the last one left is kept.
        swap: probability that a word changes places with the next one; no word moves twice.
        crop: first of all, a contiguous stretch of at least this fraction of the words is taken, its length uniform
            from this fraction to all of them and its place random; 1 takes all.

    Returns:
        At least one of the text's words, with single spaces between them.

    Raises:
        TextError: the text has no word.
        ConfigError: a setting is no fraction from 0 to 1.
    """
    for name, value in (("deletion", deletion), ("swap", swap), ("crop", crop)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is a fraction from 0 to 1, not {value}")
    words = text.split()
    if not words:
        raise TextError("a text without words cannot be augmented")
    kept = _thinned(_cropped(words, crop, rng), deletion, rng)
    return " ".join(_swapped(kept, swap, rng))


def _cropped(words: list[str], crop: float, rng: np.random.Generator) -> list[str]:
    kept = max(1, round(rng.uniform(crop, 1.0) * len(words)))
    start = int(rng.integers(len(words) - kept + 1))
    return words[start : start + kept]


def _thinned(words: list[str], deletion: float, rng: np.random.Generator) -> list[str]:
    stays = rng.random(len(words)) >= deletion
    if not stays.any():
        stays[rng.integers(len(words))] = True
    return [word for word, stay in zip(words, stays, strict=True) if stay]


def _swapped(words: list[str], swap: float, rng: np.random.Generator) -> list[str]:
    words = list(words)
    wanted = rng.random(len(words)) < swap
    place = 0
    while place < len(words) - 1:
        if wanted[place]:
            words[place : place + 2] = reversed(words[place : place + 2])
            place += 1
        place += 1
    return words
