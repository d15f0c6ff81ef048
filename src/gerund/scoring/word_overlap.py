"""Measure how many words a continuation shares with its prefix.

Words are compared in their normal form, which plain ASCII has already, so that published counts are unchanged.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from gerund.scoring.names import WORD_MEASURE_NAMES
from gerund.text_analysis import normalized, overlap_words

# NLTK's list of English stop words when RankGen was published, but for those with an apostrophe: no word has one when
# punctuation is removed.
_STOPPED = (
    "i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers "
    "herself it its itself they them their theirs themselves what which who whom this that these those am is are "
    "was were be been being have has had having do does did doing a an the and but if or because as until while of "
    "at by for with about against between into through during before after above below to from up down in out on "
    "off over under again further then once here there when where why how all any both each few more most other "
    "some such no nor not only own same so than too very s t can will just don should now d ll m o re ve y ain "
    "aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn weren won wouldn "
)
STOP_WORDS = frozenset(_STOPPED.split())
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words_of(text: str) -> list[str]:
    """Split a text at white space, case and punctuation unchanged; Chinese and the like by character.

    Words, not a model's tokens, so that models with different tokenizers can be compared. Human continuations have a
    ``rep_window`` of 0.16 to 0.17 on English books and Wikipedia this way; RankGen (Table 16) has 0.158 and 0.150.

    >>> words_of("To be, or not to be.")
    ['To', 'be,', 'or', 'not', 'to', 'be.']
    """
    return overlap_words(normalized(text))


def overlap(continuation: Sequence[Hashable], prefix: Sequence[Hashable]) -> float:
    """Return the fraction of a continuation's tokens that also occur in its prefix (RankGen, appendix D.3).

    Every occurrence counts, and so do the most frequent words. RankGen's Table 17 says "all tokens" but its human
    texts (0.140 and 0.207) are only met when stop words are left out, so its figures are much lower than these.

    >>> overlap("the dog and the cat".split(), "a dog saw the".split())
    0.6
    """
    if not continuation:
        return 0.0
    prefix_words = set(prefix)
    return sum(token in prefix_words for token in continuation) / len(continuation)


def content_words(text: str) -> list[str]:
    """Return the words of a text that are not stop words, in lower case and without ASCII punctuation.

    >>> content_words("To be, or not to be: that's the Question.")
    ['thats', 'question']
    """
    plain = _ARTICLES.sub(" ", normalized(text).lower().translate(_WITHOUT_PUNCTUATION))
    return [word for word in overlap_words(plain) if word not in STOP_WORDS]


def content_overlap(continuation: str, prefix: str) -> float:
    """Return the fraction of a continuation's words that its prefix has too, without stop words.

    As RankGen's released code counts for its Tables 1 to 3, 11, 14 and 17: a word counts as often as both texts have
    it, and two texts without any word have the score 1.

    >>> content_overlap("The dog and the dog saw a cat.", "A dog, the CAT!")
    0.5
    """
    words, prefix_words = Counter(content_words(continuation)), Counter(content_words(prefix))
    if not words:
        return 0.0 if prefix_words else 1.0
    return (words & prefix_words).total() / words.total()


def word_overlap(continuation: str, prefix: str) -> float:
    """Return the fraction of a continuation's words that occur in its prefix, stop words and punctuation included.

    >>> word_overlap("the dog and the cat", "a dog saw the")
    0.6
    """
    return overlap(words_of(continuation), words_of(prefix))


# Functions from continuation and prefix to a score.
WORD_MEASURES: Mapping[str, Callable[[str, str], float]] = dict(
    zip(WORD_MEASURE_NAMES, (word_overlap, content_overlap), strict=True)
)


class OverlapScorer:
    """A measure of ``WORD_MEASURES`` as a scorer, which needs no model.

    >>> OverlapScorer().score(["a dog saw the"], [["the dog and the cat", "no"]])
    [[0.6, 0.0]]
    """

    def __init__(self, name: str = WORD_MEASURE_NAMES[0]) -> None:
        self.name = name

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        measure = WORD_MEASURES[self.name]
        return [
            [measure(text, prefix) for text in texts] for prefix, texts in zip(prefixes, continuations, strict=True)
        ]
