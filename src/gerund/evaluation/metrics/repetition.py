"""How often a text repeats itself, and how much of it stood in its prefix.

All are shares of one text; a corpus has the mean over its texts (Welleck et al. 2020, section 6), since the
share of distinct n-grams in many texts taken together falls with their number. A text that is too short for a
measure does not repeat itself: 0.

Knows: sequences of words or tokens. Does not know: models, where the texts are from.
"""

from collections.abc import Hashable, Sequence

WINDOW = 20


def sentences_of(text: str, language: str = "en") -> list[str]:
    """Split a text into sentences without the white space around them; what follows the last full stop is one too.

    >>> sentences_of("Mr. Smith left.  He left. He")
    ['Mr. Smith left.', 'He left.', 'He']
    """
    from sentencex import segment

    return [stripped for sentence in segment(language, text) if (stripped := sentence.strip())]


def rep_n(tokens: Sequence[Hashable], n: int) -> float:
    """Return 1 - unique n-grams / n-grams (MAGNET, equation 6).

    >>> rep_n("a b c a b d".split(), 2)
    0.2
    """
    total = len(tokens) - n + 1
    if total < 1:
        return 0.0
    unique = {tuple(tokens[start : start + n]) for start in range(total)}
    return (total - len(unique)) / total


def rep_sentences(sentences: Sequence[str]) -> float:
    """Return 1 - unique sentences / sentences (MAGNET, equation 6).

    >>> rep_sentences(["He left.", "He left.", "He left.", "She"])
    0.5
    """
    if not sentences:
        return 0.0
    return (len(sentences) - len(set(sentences))) / len(sentences)


def rep_window(tokens: Sequence[Hashable], prefix: Sequence[Hashable] = (), *, window: int = WINDOW) -> float:
    """Return the share of tokens that stand among the ``window`` tokens before them (RankGen, Table 16: ``rep``).

    Args:
        tokens: what was written.
        prefix: what stood before; its last tokens count as tokens before the first ones that were written,
            as in Welleck et al. (2020), who look back into whatever precedes.
        window: how far to look back.

    >>> rep_window("the cat saw the dog".split())
    0.2
    >>> rep_window("the cat saw the dog".split(), "a dog and the".split())
    0.6
    """
    if not tokens:
        return 0.0
    everything = [*prefix, *tokens]
    places = range(len(prefix), len(everything))
    copied = sum(everything[place] in everything[max(0, place - window) : place] for place in places)
    return copied / len(tokens)
