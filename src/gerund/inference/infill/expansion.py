"""Query expansion: mask words of a query and let an infilling model replace them.

GUR, section V-C and Table II: "auto prompts" mask words at random, but never the keywords; "artificial prompts" are
written by people, with a blank where the model is to generate.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from gerund.checks import demand_number, is_listing
from gerund.errors import ConfigError, TextError
from gerund.inference.generate.sampling import request_seeds
from gerund.inference.tokens import check_unicode
from gerund.normalization import Alignment, normalized
from gerund.settings.sampling import MOST_AT_ONCE, Sampling
from gerund.text_analysis import word_spans
from gerund.types import Infill

FRACTION = 0.3
"""Fraction of a query's words that is masked."""

MAX_TOKENS = 8
"""Tokens of a gap at most: queries are short."""

# Prompts that are filled for each expansion that is asked for: fillings repeat each other, and the query.
_TRIES = 4
# What half of a character is decoded to.
_BROKEN = "\N{REPLACEMENT CHARACTER}"

# Fills the gaps of a text.
Fill = Callable[[str, Sampling], Infill]


@dataclass(frozen=True)
class Query:
    """A query, and which of its words stay.

    Attributes:
        text: the query.
        words: where its words stand, from left to right.
        kept: which of them are never masked.
    """

    text: str
    words: list[tuple[int, int]]
    kept: frozenset[int]

    @classmethod
    def of(cls, text: str, keep: Sequence[str] = ()) -> "Query":
        """Find a query's words, and those that are to be kept, wherever they stand; capitals make no difference.

        Words are compared in their normal form; ``words`` are places in the text as it is.
        """
        aligned = Alignment(text)
        forms = _word_forms(aligned.text)
        if not forms:
            raise TextError("the query has no word" if text.strip() else "the query is empty")
        kept: set[int] = set()
        for phrase in _listed(keep):
            places = _places_of(_word_forms(normalized(phrase)), forms)
            if not places:
                raise TextError(f"{phrase!r} is to be kept and is not in the query {text!r}")
            kept |= places
        # A character such as a fraction may be several words, and is masked or kept as a whole.
        spans = [aligned.original(start, end) for start, end in word_spans(aligned.text)]
        words = list(dict.fromkeys(spans))
        return cls(text, words, frozenset(words.index(spans[place]) for place in kept))

    def masked(self, rng: np.random.Generator, *, fraction: float = FRACTION, blank: str, begins: bool = True) -> str:
        """Return an auto prompt: the query with a blank in the place of some of its words.

        So many words are masked as the fraction comes to, rounded, at least one; never those that are kept, and never
        all. Masked words with nothing but white space between them share a blank. Where no word may be masked, the
        blank is put before the query or behind it.

        >>> query = Query.of("How high is a welding platform?", ["platform"])
        >>> query.masked(np.random.default_rng(0), fraction=0.5, blank="[blank]")
        'How high [blank] platform?'
        """
        free = [place for place in range(0 if begins else 1, len(self.words)) if place not in self.kept]
        most = min(len(free), len(self.words) - 1)
        if not most:
            behind = rng.random() < 0.5 or not begins
            return f"{self.text.rstrip()} {blank}" if behind else f"{blank} {self.text.lstrip()}"
        count = min(max(1, round(fraction * len(self.words))), most)
        hidden = sorted(rng.choice(free, size=count, replace=False).tolist())
        text, end = "", 0
        for place in hidden:
            start, stop = self.words[place]
            between = self.text[end:start]
            if not text or between.strip():
                text += between + blank
            end = stop
        return text + self.text[end:]


def expand(
    fill: Fill,
    query: str,
    count: int,
    *,
    keep: Sequence[str] = (),
    fraction: float = FRACTION,
    blank: str,
    sampling: Sampling,
    begins: bool = True,
) -> list[str]:
    """Return other ways to ask: the query with some of its words written anew.

    A query that has blanks is an artificial prompt and is filled as it is; any other is masked at random, anew for each
    filling. What says the same as the query or an earlier expansion, in normal form, capitals and white space
    apart, is left out, and what has grown together with a word beside a mask, or holds half of a character.
    """
    masked = validate_expansion(query, count, keep=keep, fraction=fraction, blank=blank)
    found: dict[str, tuple[float, str]] = {}
    known = _folded(query)
    mask = None if masked is None else partial(masked.masked, fraction=fraction, blank=blank, begins=begins)
    for prompt, own in _prompts(query, mask, count, sampling):
        filled = fill(prompt, own)
        text = " ".join(filled.text.split())
        scores = [score for span, score in zip(filled.spans, filled.scores, strict=True) if span.strip()]
        # As it was filled: which hyphens divide a word is known by the line ends behind them.
        folded = _folded(filled.text)
        whole = _stand_whole(prompt.split(blank), filled.text) and _BROKEN not in text
        if scores and whole and folded != known:
            score = sum(scores) / len(scores)
            found[folded] = max(found.get(folded, (score, text)), (score, text))
        if len(found) == count:
            break
    if len(found) < count:
        warnings.warn(f"{len(found)} of {count} expansions of {query!r} were found", stacklevel=3)
    return [text for _, text in sorted(found.values(), key=lambda one: -one[0])]


def validate_expansion(
    query: str, count: int, *, keep: Sequence[str] = (), fraction: float = FRACTION, blank: str
) -> Query | None:
    """Return the query whose words are masked; None for one that has blanks of its own.

    The arguments are those of ``expand``, whose first step this is.
    """
    if type(count) is not int or not 1 <= count <= MOST_AT_ONCE:
        raise ConfigError(f"count is a whole number from 1 to {MOST_AT_ONCE}, not {count!r}")
    demand_number("fraction", fraction)
    if not 0 < fraction < 1:
        raise ConfigError(f"the fraction of words that is masked lies between 0 and 1, and is {fraction}")
    if not isinstance(query, str):
        raise TextError(f"the query is a string, not {type(query).__name__}")
    check_unicode("the query", query)
    if blank not in query:
        return Query.of(query, keep)
    if keep or fraction != FRACTION:
        raise ConfigError(f"the query says by {blank} what is written anew, so there is nothing to keep or to mask")
    return None


def _prompts(
    query: str, mask: Callable[[np.random.Generator], str] | None, count: int, sampling: Sampling
) -> Iterator[tuple[str, Sampling]]:
    """Yield texts with gaps, and how each is filled: every one with a seed of its own."""
    [seed] = request_seeds(sampling, 1)
    rng = np.random.default_rng(seed)
    if mask is None and sampling.is_greedy:
        yield query, sampling  # the same each time
        return
    for _ in range(_TRIES * count):
        prompt = query if mask is None else mask(rng)
        seed = int(rng.integers(1 << 31))
        yield prompt, sampling if sampling.is_greedy else replace(sampling, seed=seed)


def _listed(keep: Any) -> list[str]:
    """Return what is to be kept as a list; a text, which is a sequence of letters, is meant as a whole."""
    if isinstance(keep, str):
        return [keep]
    listed = list(keep) if is_listing(keep) else [keep]
    if not all(isinstance(one, str) for one in listed):
        raise TextError(f"what is to be kept is a list of words of the query, not {keep!r}")
    return listed


def _word_forms(text: str) -> list[str]:
    """Return the words of a normal form as they are compared."""
    return [text[start:end].casefold() for start, end in word_spans(text)]


def _places_of(wanted: Sequence[str], words: Sequence[str]) -> set[int]:
    """Return the places of the words that are wanted, wherever they stand one behind the other."""
    if not wanted:
        return set()
    starts = [place for place in range(len(words)) if words[place : place + len(wanted)] == wanted]
    return {place for start in starts for place in range(start, start + len(wanted))}


def _stand_whole(pieces: Sequence[str], text: str) -> bool:
    """Tell whether all words around the gaps are words of the filled text, in their order.

    >>> _stand_whole(["dry ", " walls"], "dry old walls"), _stand_whole(["dry ", " walls"], "dryer walls")
    (True, False)
    """
    words = iter(_word_forms(normalized(text)))
    return all(word in words for piece in pieces for word in _word_forms(normalized(piece)))


def _folded(text: str) -> str:
    return " ".join(normalized(text).casefold().split())
