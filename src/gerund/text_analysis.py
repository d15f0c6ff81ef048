"""Normalize texts, and split them into words, search terms and sentences, in any script.

The normal form is NFKC without invisible characters and hyphens at line ends. Search, word overlap and encoders compare
texts in this form; stored and quoted texts stay unchanged.

Indices on disk and in memory, BM25, and question answering share these functions. Scripts without spaces, and Korean,
whose particles are attached to the word, are split into single characters and pairs of neighbors: so documents and
queries are never split differently, and no dictionary is needed.
"""

import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import regex

from gerund.errors import is_panic

# Among the characters that most programs may leave out of sight, by Unicode's tables.
JOINERS = r"\u200c\u200d"
"""Shape Arabic and Indian letters and put emoji together; behind other letters they change nothing."""
SHOWN = r"\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe0e\ufe0f"
"""Change what is seen: variation selectors behind emoji, and fillers, which stand for a letter."""

_INVISIBLE = rf"[\p{{Default_Ignorable_Code_Point}}--[{JOINERS}{SHOWN}]]"
_UNSEEN = rf"[\p{{Default_Ignorable_Code_Point}}--[{SHOWN}]]"
# Letters behind which a joiner changes nothing.
_UNJOINED = r"[\p{Latin}\p{Greek}\p{Cyrillic}\p{Han}\p{Hiragana}\p{Katakana}\p{Hangul}\p{Thai}\p{Nd}\uff9e\uff9f]"
# "Haus- und Gartenarbeit" has its hyphen at a line's end too.
_CONJUNCTION = r"(?:and|or|und|oder|bzw|en|of|och|eller|og)\b"
# No part of a pattern gives back what it took, so that a hostile text takes no longer than another.
_LINE_END = (
    rf"(?=[{_UNSEEN}--\u00ad]*+[-\u00ad\u2010]){_UNSEEN}*+[-\u2010]?{_UNSEEN}*+[ \t]*+(?:\r\n|\n|\r)\s*+{_UNSEEN}*+"
    rf"(?=\p{{Ll}})(?!{_CONJUNCTION})"
)

_LINE_ENDS = regex.compile(rf"(?V1)\p{{L}}\p{{M}}*+\K{_LINE_END}")
_REMOVED = regex.compile(rf"(?V1)\p{{L}}\p{{M}}*+\K{_LINE_END}|{_UNJOINED}\p{{M}}*+\K{_UNSEEN}++|{_INVISIBLE}++")
_HYPHENATED = regex.compile(rf"(?V1)(\p{{L}}[\p{{L}}\p{{M}}\p{{N}}]*+){_LINE_END}([\p{{L}}\p{{M}}\p{{N}}]++)")
_CLUSTER = regex.compile(r"\X")


def normalized(text: str) -> str:
    r"""Return a text in NFKC, without invisible characters and without the hyphens of words divided at a line's end.

    Plain ASCII stays as it is but for such hyphens. A text of invisible characters alone stays as it is.

    >>> normalized("ef\ufb01cient photo\u00adsyn\u200bthesis, reor-\nganised")
    'efficient photosynthesis, reorganised'
    """
    if text.isascii():
        return _REMOVED.sub("", text) if _has_lines(text) else text
    return unicodedata.normalize("NFKC", _REMOVED.sub("", text)) or text


def joined_lines(text: str) -> str:
    r"""Return a text without the hyphens of words that are divided at a line's end, and otherwise as it is.

    >>> joined_lines("reor-\nganised, Haus- \nund Garten")
    'reorganised, Haus- \nund Garten'
    """
    return _LINE_ENDS.sub("", text) if _has_lines(text) else text


def halves(text: str) -> list[str]:
    r"""Return the halves of each word that is divided at a line's end, which may be two words with a hyphen.

    >>> halves("A well-\nknown and reor-\nganised house")
    ['well known', 'reor ganised']
    """
    return [" ".join(halves) for halves in _HYPHENATED.findall(text)] if _has_lines(text) else []


def _has_lines(text: str) -> bool:
    return "\n" in text or "\r" in text


class Alignment:
    r"""A text in its normal form, and which stretch of the text each stretch of that form stands for.

    Attributes:
        text: the normal form.

    >>> aligned = Alignment("Das ist scho\u0308n")
    >>> aligned.text[8:], aligned.original(8, 13)
    ('schön', (8, 14))
    """

    def __init__(self, text: str) -> None:
        self.text = normalized(text)
        self._starts: Sequence[int] = ()
        self._source: Sequence[tuple[int, int]] = ()
        if self.text == text:
            return
        pieces = _pieces(text)
        if "".join(piece for piece, _, _ in pieces) != self.text:
            pieces = [(self.text, 0, len(text))]  # clusters that compose with each other; none are known
        starts, at = [], 0
        for piece, _, _ in pieces:
            starts.append(at)
            at += len(piece)
        self._starts, self._source = starts, [(start, end) for _, start, end in pieces]

    def original(self, start: int, end: int) -> tuple[int, int]:
        """Return the stretch of the text that a stretch of the normal form stands for."""
        if not self._starts:
            return start, end
        first = bisect_right(self._starts, start) - 1
        if start >= end:
            return self._source[first][0], self._source[first][0]
        return self._source[first][0], self._source[bisect_right(self._starts, end - 1) - 1][1]


def _pieces(text: str) -> list[tuple[str, int, int]]:
    """Return the normal form of each cluster of characters, with where the cluster starts and ends in the text."""
    removed = [match.span() for match in _REMOVED.finditer(text)]
    gaps = zip([0, *(end for _, end in removed)], [*(start for start, _ in removed), len(text)], strict=True)
    places = [place for start, end in gaps for place in range(start, end)]
    pieces = []
    for cluster in _CLUSTER.finditer("".join(text[place] for place in places)):
        start, end = cluster.span()
        pieces.append((unicodedata.normalize("NFKC", cluster[0]), places[start], places[end - 1] + 1))
    return pieces


VERSION = 2
"""Changes when words come to be others: scores that were measured with other ones are then measured again."""

# The language whose stems and stop words a script has, where that of the documents is written in another.
_BY_SCRIPT = {
    "Latin": "en", "Cyrillic": "ru", "Greek": "el", "Arabic": "ar", "Armenian": "hy", "Devanagari": "hi", "Tamil": "ta",
}  # fmt: skip
# The languages that are not written in Latin letters.
_SCRIPT_OF = {
    "ar": "Arabic", "fa": "Arabic", "ur": "Arabic", "be": "Cyrillic", "bg": "Cyrillic", "mk": "Cyrillic",
    "ru": "Cyrillic", "sr": "Cyrillic", "uk": "Cyrillic", "el": "Greek", "hi": "Devanagari", "mr": "Devanagari",
    "ne": "Devanagari", "hy": "Armenian", "ta": "Tamil", "yi": "Hebrew", "he": "Hebrew", "ja": "Han", "zh": "Han",
    "ko": "Hangul", "th": "Thai", "lo": "Lao", "km": "Khmer", "my": "Myanmar",
}  # fmt: skip
_STEMMERS = {
    "ar": "arabic", "ca": "catalan", "da": "danish", "de": "german", "el": "greek", "en": "english", "es": "spanish",
    "et": "estonian", "eu": "basque", "fi": "finnish", "fr": "french", "ga": "irish", "hi": "hindi", "hu": "hungarian",
    "hy": "armenian", "id": "indonesian", "it": "italian", "lt": "lithuanian", "ne": "nepali", "nl": "dutch",
    "no": "norwegian", "pt": "portuguese", "ro": "romanian", "ru": "russian", "sr": "serbian", "sv": "swedish",
    "ta": "tamil", "tr": "turkish", "yi": "yiddish",
}  # fmt: skip

# The long vowel mark belongs to two scripts, and so to none.
_SCRIPTS = {
    "cjk": r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\u30fc",
    "hangul": r"\p{Hangul}",
    "south_east": r"\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}",
}
_UNSPACED = rf"[{''.join(_SCRIPTS.values())}]"
_RUNS = "|".join(rf"(?P<{name}>(?:[[\p{{L}}\p{{N}}]&&[{script}]]\p{{M}}*)+)" for name, script in _SCRIPTS.items())
_WORD = regex.compile(
    rf"(?V1){_RUNS}|(?P<spaced>[[\p{{L}}\p{{N}}]--{_UNSPACED}](?:[[\p{{L}}\p{{N}}]--{_UNSPACED}]|[\p{{M}}\u200c\u200d])*)"
)
_CHARACTER = regex.compile(r"\P{M}\p{M}*")
_ACCENT = regex.compile(r"[\p{Latin}\p{Greek}\p{Hebrew}\p{Arabic}]\K\p{Mn}++|\p{Cyrillic}\K[\u0300\u0301]++")
_OTHER_LETTERS = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ı": "i"})
_NO_LETTER = str.maketrans("", "", "\u200c\u200d\ufe0e\ufe0f")
_SCRIPT = {name: regex.compile(rf"\p{{{name}}}") for name in (*_BY_SCRIPT, "Hebrew")}
# Longer words come once, and are not kept in mind.
_LONG = 64
_KANA = regex.compile(r"[\p{Hiragana}\p{Katakana}]")
_OVERLAP = regex.compile(rf"(?V1){_UNSPACED}\p{{M}}*|(?:(?!{_UNSPACED})\S)+")
_STOP_WORDS_FILE = Path(__file__).parent / "assets" / "stop_words.json"


class _Word(NamedTuple):
    """A word of a text, or a run of characters of a script without spaces.

    Attributes:
        text: its letters as they stand.
        start: its first character.
        end: the character after its last.
        characters: the characters of a run, each with its marks; None for a word.
        kind: ``spaced`` for a word, or a name of ``_SCRIPTS``.
    """

    text: str
    start: int
    end: int
    characters: tuple[str, ...] | None = None
    kind: str = "spaced"


@dataclass(frozen=True)
class Analyzer:
    """Splits texts in one language into terms; words in another script are analyzed by that script.

    >>> analyzer = Analyzer("en")
    >>> analyzer.document("The caf\u00e9s of 北京市")
    ['the', 'cafe', 'of', '北', '北京', '京', '京市', '市']
    >>> analyzer.query("What are the cafés of 北京?"), analyzer.query("To be or not to be")
    (['cafe', '北京'], ['to', 'be', 'or', 'not', 'to', 'be'])
    """

    language: str

    def document(self, text: str) -> list[str]:
        """Return the terms of a text in order, then the halves of words that are hyphenated at a line end."""
        return [*self.phrase(text), *(term for half in halves(text) for term in self.phrase(half))]

    def phrase(self, text: str) -> list[str]:
        """Return the terms of a phrase, consecutive in every text that contains it."""
        return [term for word in _words(normalized(text)) for term in self._terms(word)]

    def query(self, text: str) -> list[str]:
        """Return the search terms of a query, with repetitions; stop words only where there is nothing else.

        A long query names what it is about more than once, and BM25 counts that.
        """
        words = list(_words(normalized(text)))
        content = [term for word in words for term in self._content(word)]
        if content:
            return content + [term for word in words for term in self._half_content(word)]
        return [term for word in words for term in self._pairs(word)]

    def content(self, text: str) -> frozenset[str]:
        """Return the content terms of a question, without stop words."""
        return frozenset(term for word in _words(normalized(text)) for term in self._content(word))

    def matches(self, text: str, query: str) -> list[tuple[int, int]]:
        """Return the (start, end) characters of a query's words in a text, in order.

        >>> Analyzer("en").matches("Railways: the rail\u00adway of 中国", "a railway in 中国")
        [(0, 8), (14, 22), (26, 28)]
        """
        terms, aligned = set(self.query(query)), Alignment(text)
        spans = list[tuple[int, int]]()
        for word in _words(aligned.text):
            for start, end in self._places(word, terms):
                if spans and start <= spans[-1][1] and word.characters is not None:
                    spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
                else:
                    spans.append((start, end))
        return [aligned.original(start, end) for start, end in spans]

    def _terms(self, word: _Word) -> list[str]:
        if word.characters is None:
            return [_term(word.text, self.language)]
        characters = word.characters
        return [term for left, right in pairwise(characters) for term in (left, left + right)] + [characters[-1]]

    def _pairs(self, word: _Word) -> list[str]:
        """Return the search terms of a word, stop word or not."""
        if word.characters is None:
            return [_term(word.text, self.language)]
        return _pairs_of(word.characters)

    def _content(self, word: _Word) -> list[str]:
        if word.characters is None:
            folded = _folded(word.text.casefold().translate(_NO_LETTER))
            return [] if folded in _stop_words(_language_of(word.text, self.language)) else self._terms(word)
        terms = list[str]()
        for first, stop in _content_spans(word, self.language):
            piece = word.characters[first:stop]
            terms += _pairs_of(piece)
        return terms

    def _half_content(self, word: _Word) -> list[str]:
        """Return the pairs of a run with one content character, which may be the end of a word."""
        if word.characters is None:
            return []
        is_content = [False] * len(word.characters)
        for first, stop in _content_spans(word, self.language):
            is_content[first:stop] = [True] * (stop - first)
        both = zip(pairwise(word.characters), pairwise(is_content), strict=True)
        return [left + right for (left, right), flags in both if len(set(flags)) > 1]

    def _places(self, word: _Word, wanted: set[str]) -> Iterator[tuple[int, int]]:
        if word.characters is None:
            if _term(word.text, self.language) in wanted:
                yield word.start, word.end
            return
        starts = [word.start]
        for character in word.characters:
            starts.append(starts[-1] + len(character))
        for place, character in enumerate(word.characters):
            if character in wanted:
                yield starts[place], starts[place + 1]
            if "".join(word.characters[place : place + 2]) in wanted and place + 1 < len(word.characters):
                yield starts[place], starts[place + 2]


def _pairs_of(characters: Sequence[str]) -> list[str]:
    return [left + right for left, right in pairwise(characters)] or [characters[0]]


def stop_words(language: str) -> frozenset[str]:
    """Return the stop words of a language in lower case; empty for an unknown language.

    >>> "the" in stop_words("en"), stop_words("pl")
    (True, frozenset())
    """
    return _listed_stop_words().get(language, frozenset())


def overlap_words(text: str) -> list[str]:
    """Split a normalized text at white space, and scripts without spaces into characters.

    >>> overlap_words("To be, or 北京.")
    ['To', 'be,', 'or', '北', '京', '.']
    """
    return text.split() if text.isascii() else _OVERLAP.findall(text)


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) characters of the words of a normalized text; without spaces, of every character.

    >>> [text[start:end] for text in ["It's हिन्दी 한국어 北京"] for start, end in word_spans(text)]
    ['It', 's', 'हिन्दी', '한국어', '北', '京']
    """
    spans = list[tuple[int, int]]()
    for word in _words(text):
        if word.characters is None or word.kind == "hangul":
            spans.append((word.start, word.end))
        else:
            spans += [
                (word.start + match.start(), word.start + match.end()) for match in _CHARACTER.finditer(word.text)
            ]
    return spans


def _words(text: str) -> Iterator[_Word]:
    """Yield the words of a normalized text."""
    for match in _WORD.finditer(text):
        kind = str(match.lastgroup)
        characters = None if kind == "spaced" else tuple(_CHARACTER.findall(match[0].casefold()))
        yield _Word(match[0], match.start(), match.end(), characters, kind)


@cache
def _content_patterns(name: str) -> Any:
    """Return the pattern of stop words in a run: the longest first; Korean ones only at its end."""
    listed = sorted(_listed_stop_words()[name], key=len, reverse=True)
    any_of = "|".join(map(regex.escape, listed))
    return regex.compile(rf"(?:{any_of})\Z" if name == "ko" else any_of)


def _content_spans(word: _Word, language: str) -> Iterator[tuple[int, int]]:
    """Yield the (start, end) characters of a run's parts that are not stop words."""
    assert word.characters is not None
    run = "".join(word.characters)
    name = {"hangul": "ko", "south_east": "th"}.get(word.kind)
    if name is None:
        name = "ja" if language == "ja" or _KANA.search(run) else "zh"
    stopped = set[int]()
    for match in _content_patterns(name).finditer(run):
        stopped |= set(range(*match.span()))
    at, first = 0, None
    for place, character in enumerate((*word.characters, "")):
        is_content = bool(character) and at not in stopped
        if is_content and first is None:
            first = place
        elif not is_content and first is not None:
            yield first, place
            first = None
        at += len(character)


@cache
def _listed_stop_words() -> dict[str, frozenset[str]]:
    listed: dict[str, str] = json.loads(_STOP_WORDS_FILE.read_text(encoding="utf-8"))
    return {name: frozenset(words.split()) for name, words in listed.items()}


@cache
def _stop_words(language: str) -> frozenset[str]:
    return frozenset(map(_folded, stop_words(language)))


def _language_of(word: str, language: str) -> str:
    """Return the language of a word: ``language`` where the word is in its script."""
    script = _script_of(word)
    return language if script == _SCRIPT_OF.get(language, "Latin") else _BY_SCRIPT.get(script, "")


def _script_of(word: str) -> str:
    if word.isascii():
        return "Latin"
    return next((name for name, pattern in _SCRIPT.items() if pattern.search(word)), "Latin")


def _term(word: str, language: str) -> str:
    """Return the term of a word: lower case, stemmed, without accents."""
    return _analysed(word, language) if len(word) <= _LONG else _analysed.__wrapped__(word, language)


@lru_cache(maxsize=1 << 16)
def _analysed(word: str, language: str) -> str:
    spoken = _language_of(word, language)
    word = word.casefold().translate(_NO_LETTER)
    # Stems of English know no accents, and those of other scripts do not need them.
    if spoken == "en" or _script_of(word) != "Latin":
        word = _folded(word)
    # Of some words nothing is left but what is stemmed away.
    stem = _stemmer(_STEMMERS[spoken]).stemWord(word) or word if spoken in _STEMMERS else word
    return _folded(stem)


@cache
def _stemmer(name: str) -> Any:
    from Stemmer import Stemmer

    return Stemmer(name)


def _folded(word: str) -> str:
    """Return a word without accents."""
    if word.isascii():
        return word
    bare = _ACCENT.sub("", unicodedata.normalize("NFD", word))
    return unicodedata.normalize("NFC", bare).translate(_OTHER_LETTERS)


# sentencex 1.0 looks one byte before a full stop for an initial (J. Smith) and panics inside of a longer white space.
_BEFORE_FULL_STOP = re.compile(r"([^\W\d_])(\s*)[^\S\x00-\x7f](?=\.)")


def segments(text: str, language: str = "en") -> list[str]:
    r"""Return a text's sentences, each with the white space after it.

    Args:
        text: the text.
        language: its code, such as en.

    >>> segments("Mr. Smith left. He")
    ['Mr. Smith left. ', 'He']
    >>> segments("Plan W\xa0.D was his. It failed.")
    ['Plan W\xa0.D was his. ', 'It failed.']
    """
    from sentencex import segment

    safe = _BEFORE_FULL_STOP.sub(lambda match: f"{match[1]}{match[2]} " if match[1].isupper() else match[0], text)
    try:
        sentences: list[str] = list(segment(language, safe))
    except BaseException as error:
        if not is_panic(error):
            raise
        return text.splitlines(keepends=True)
    return sentences if safe == text else _split_alike(text, sentences, safe)


def _split_alike(text: str, pieces: list[str], other: str) -> list[str]:
    """Split a text where another of the same length was split; the splitter may drop white space between pieces."""
    sentences, end = [], 0
    for piece in pieces:
        start = other.index(piece, end)
        end = start + len(piece)
        sentences.append(text[start:end])
    return sentences
