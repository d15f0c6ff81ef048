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

from gerund.checks import demand_number, is_listing, whole_number
from gerund.errors import ConfigError, TextError
from gerund.inference.generate.sampling import request_seeds
from gerund.inference.tokens import check_unicode
from gerund.settings.sampling import MOST_AT_ONCE, Sampling
from gerund.text_analysis import Alignment, normalized, word_spans
from gerund.types import Infill

FRACTION = 0.3
"""Fraction of a query's words to mask."""

MAX_TOKENS = 8
"""Tokens per blank at most: queries are short."""

# Prompts per requested expansion: fillings repeat each other, and the query.
_TRIES = 4
# Decoded from half of a character.
_BROKEN = "\N{REPLACEMENT CHARACTER}"

# Fills the blanks of a text.
Fill = Callable[[str, Sampling], Infill]


@dataclass(frozen=True)
class Query:
    """A query, and the words of it that are never masked."""

    text: str
    words: list[tuple[int, int]]  # characters of each word, from left to right
    kept: frozenset[int]  # indices of words

    @classmethod
    def of(cls, text: str, keep: Sequence[str] = ()) -> "Query":
        """Find a query's words, and all occurrences of the words or phrases to keep, ignoring case.

        Words are compared in their normal form; ``words`` are characters of the original text.
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
        # A character such as a fraction may be several words, which are masked or kept together.
        spans = [aligned.original(start, end) for start, end in word_spans(aligned.text)]
        words = list(dict.fromkeys(spans))
        return cls(text, words, frozenset(words.index(spans[place]) for place in kept))

    def masked(self, rng: np.random.Generator, *, fraction: float = FRACTION, blank: str, begins: bool = True) -> str:
        """Return an auto prompt: the query with some words replaced by blanks.

        The number of masked words is the fraction, rounded, at least one; never the kept words, and never all. Adjacent
        masked words share a blank. Where no word may be masked, the blank is put before or after the query. With
        ``begins`` False no blank is at the beginning.

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
    """Return up to ``count`` expansions: the query with some of its words replaced, the most likely filling first.

    A query with blanks is an artificial prompt and is filled as is; any other is masked at random for each filling,
    with masks that depend on the sampling seed. Skipped are texts that equal the query or an earlier expansion, in
    normal form and ignoring case and white space, spans that continue a word, and halves of characters.
    """
    masked = validate_expansion(query, count, keep=keep, fraction=fraction, blank=blank)
    words: dict[str, tuple[float, str]] = {}
    known = _folded(query)
    mask = None if masked is None else partial(masked.masked, fraction=fraction, blank=blank, begins=begins)
    for prompt, settings in _prompts(query, mask, count, sampling):
        filled = fill(prompt, settings)
        text = " ".join(filled.text.split())
        scores = [score for span, score in zip(filled.spans, filled.scores, strict=True) if span.strip()]
        # Normalized before white space: line ends show which hyphens divide a word.
        folded = _folded(filled.text)
        whole = _stand_whole(prompt.split(blank), filled.text) and _BROKEN not in text
        if scores and whole and folded != known:
            score = sum(scores) / len(scores)
            words[folded] = max(words.get(folded, (score, text)), (score, text))
        if len(words) == count:
            break
    if len(words) < count:
        warnings.warn(f"{len(words)} of {count} expansions of {query!r} were found", stacklevel=3)
    return [text for _, text in sorted(words.values(), key=lambda entry: -entry[0])]


def validate_expansion(
    query: str, count: int, *, keep: Sequence[str] = (), fraction: float = FRACTION, blank: str
) -> Query | None:
    """Validate the arguments of ``expand``; return the query to mask, or None for one with blanks."""
    if not 1 <= whole_number("count", count) <= MOST_AT_ONCE:
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
    """Yield texts with blanks, and sampling settings with a different seed for each."""
    [seed] = request_seeds(sampling, 1)
    rng = np.random.default_rng(seed % 2**64)  # torch takes negative seeds too
    if mask is None and sampling.is_greedy:
        yield query, sampling  # the same each time
        return
    for _ in range(_TRIES * count):
        prompt = query if mask is None else mask(rng)
        seed = int(rng.integers(1 << 31))
        yield prompt, sampling if sampling.is_greedy else replace(sampling, seed=seed)


def _listed(keep: Any) -> list[str]:
    """Return the phrases to keep as a list."""
    if isinstance(keep, str):
        return [keep]
    listed = list(keep) if is_listing(keep) else [keep]
    if not all(isinstance(item, str) for item in listed):
        raise TextError(f"what is to be kept is a list of words of the query, not {keep!r}")
    return listed


def _word_forms(text: str) -> list[str]:
    """Return the words of a text in normal form, case-folded."""
    return [text[start:end].casefold() for start, end in word_spans(text)]


def _places_of(wanted: Sequence[str], words: Sequence[str]) -> set[int]:
    """Return the indices of the words of all occurrences of a phrase."""
    if not wanted:
        return set()
    starts = [place for place in range(len(words)) if words[place : place + len(wanted)] == wanted]
    return {place for start in starts for place in range(start, start + len(wanted))}


def _stand_whole(pieces: Sequence[str], text: str) -> bool:
    """Whether all words around the blanks are words of the filled text, in their order.

    >>> _stand_whole(["dry ", " walls"], "dry old walls"), _stand_whole(["dry ", " walls"], "dryer walls")
    (True, False)
    """
    words = iter(_word_forms(normalized(text)))
    return all(word in words for piece in pieces for word in _word_forms(normalized(piece)))


def _folded(text: str) -> str:
    return " ".join(normalized(text).casefold().split())
