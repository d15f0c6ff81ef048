"""Check the sentences of a generated answer against its sources, and attribute those that cite none.

A sentence is compared by its words, not by a second opinion of the model: models that are small enough to invent an
answer are also small enough to confirm it. Words of the question count for nothing, since any answer may repeat them,
and a number or a name that no source has makes a sentence unsupported whatever its other words are. If it is one of the
question, the sentence is weak at most: it may say of the captain what was asked of the ship.
"""

import re
from collections.abc import Sequence

from gerund.data.passages import sentence_bounds
from gerund.text_analysis import Analyzer
from gerund.types import SentenceCheck, Source

SUPPORTED, WEAK, UNSUPPORTED = "supported", "weak", "unsupported"

# Fractions of a sentence's words that one source has, from which it counts as supported, and as weakly so.
_SUPPORTED, _WEAK = 0.7, 0.4
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
# A word after another in the same sentence that begins as names do.
_NAME = re.compile(r"(?<=\s)[\"'(\u201c\u201e\u00ab]?([^\W\d_][\w-]*)")
_NOUNS_ARE_CAPITALIZED = ("de", "lb")
_CITATION = re.compile(r"\[[\d\s,;\u2013-]*\]")


class AnswerChecker:
    """Checks sentences against the sources of an answer.

    >>> source = Source(1, "rail.txt", 0, 57, "The railway opened in 1825, from Stockton to Darlington.")
    >>> checker = AnswerChecker("When did it open?", [source])
    >>> checks = checker.check("It opened in 1825. It ran to London in 1830.")
    >>> [(check.support, check.sources) for check in checks]
    [('supported', [1]), ('unsupported', [])]
    >>> [check.support for check in checker.check("The railway opened from Stockton to Darlington in Wales.")]
    ['unsupported']
    >>> AnswerChecker("What opened in Wales?", [source]).check("In Wales the railway opened.")[0].support
    'weak'
    """

    def __init__(self, question: str, sources: Sequence[Source], language: str = "en") -> None:
        self._language, self._analyzer = language, Analyzer(language)
        self._asked, self._asked_numbers = self._analyzer.content(question), set(_NUMBER.findall(question))
        self._asked_names = self._names(question)
        self._sources = sources
        texts = [f"{source.title}\n{source.heading}\n{source.text}" for source in sources]
        self._terms = [frozenset(self._analyzer.document(text)) for text in texts]
        self._numbers = [set(_NUMBER.findall(text)) for text in texts]

    def check(self, text: str) -> list[SentenceCheck]:
        """Return for each sentence of a text how well the sources support it, and which of them does."""
        return [self._check(text[start:end]) for start, end in sentence_bounds(text, self._language)]

    def _check(self, sentence: str) -> SentenceCheck:
        bare = _CITATION.sub("", sentence)
        words = self._analyzer.content(bare)
        new_words = words - self._asked
        # A sentence without a word of its own says yes or no, or repeats the question.
        compared = new_words or words
        numbers, names = set(_NUMBER.findall(bare)), (self._names(bare) | self._asked_names) & words
        new_numbers, new_names = numbers - self._asked_numbers, names - self._asked
        shares = [
            len(compared & terms) / len(compared) if compared and new_numbers <= known and new_names <= terms else 0.0
            for terms, known in zip(self._terms, self._numbers, strict=True)
        ]
        best = max(shares, default=0.0)
        if best < _WEAK:
            return SentenceCheck(sentence, UNSUPPORTED, round(best, 3), [])
        # The first of the best, since sources are in the order of their relevance.
        place = shares.index(best)
        has_all = numbers <= self._numbers[place] and names <= self._terms[place]
        support = SUPPORTED if best >= _SUPPORTED and new_words and has_all else WEAK
        return SentenceCheck(sentence, support, round(best, 3), [self._sources[place].number])

    def _names(self, sentence: str) -> frozenset[str]:
        """Return the words that are capitalized inside a sentence; none where every noun is."""
        if self._language in _NOUNS_ARE_CAPITALIZED:
            return frozenset()
        names = (word for word in _NAME.findall(sentence) if word[0].isupper())
        return frozenset().union(*map(self._analyzer.content, names))
