"""Words of texts, and how many of them a continuation shares with its prefix.

Knows: white space. Does not know: models, scores.
"""

from collections.abc import Hashable, Sequence

from gerund.scoring.names import OVERLAP


def words_of(text: str) -> list[str]:
    """Split a text at white space, as letters stand, punctuation left on its word.

    Words, not a model's tokens, so that models with different tokenizers can be compared. Human continuations
    come to a ``rep_window`` of 0.16 to 0.17 so on English books and Wikipedia; RankGen (Table 16) has 0.158 and
    0.150.

    >>> words_of("To be, or not to be.")
    ['To', 'be,', 'or', 'not', 'to', 'be.']
    """
    return text.split()


def overlap(continuation: Sequence[Hashable], prefix: Sequence[Hashable]) -> float:
    """Return the fraction of a continuation's tokens that also occur in its prefix (RankGen, appendix D.3).

    Every occurrence counts, and so do the most frequent words. RankGen's Table 17 says "all tokens" but its human
    texts (0.140 and 0.207) are only met when stop words are left out, so its figures are much lower than these.

    >>> overlap("the dog and the cat".split(), "a dog saw the".split())
    0.6
    """
    if not continuation:
        return 0.0
    known = set(prefix)
    return sum(token in known for token in continuation) / len(continuation)


class OverlapScorer:
    """The fraction of a continuation's words that its prefix has, as a scorer without a model.

    >>> OverlapScorer().score(["a dog saw the"], [["the dog and the cat", "no"]])
    [[0.6, 0.0]]
    """

    name = OVERLAP

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        return [
            [overlap(words_of(text), words_of(prefix)) for text in own]
            for prefix, own in zip(prefixes, continuations, strict=True)
        ]
