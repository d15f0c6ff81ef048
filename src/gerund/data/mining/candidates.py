"""Mining settings, and the four methods that make pairs of texts from a document.

GUR, section III-B: two sentences are similar when the longest common substring of their normalized forms is long
enough. Figure 2: with "Tom is chasing Jerry." and "Jerry is chasing Tom." it is not, with "Spike is chasing Tom." and
"Spike is chasing Jerry." it is.

Shapes: n sentences, p pairs, M meetings.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gerund.checks import one_of
from gerund.data.corpus import CLEANERS, BadDocument, Document, clean_text
from gerund.data.files import as_utf8
from gerund.data.mining.substrings import (
    CHUNK,
    Meetings,
    SymbolWeights,
    Texts,
    find_windows,
    heaviest_spans,
    normalised,
    ranges,
    share,
    slices,
)
from gerund.data.passages import sentence_bounds
from gerund.errors import ConfigError, TextError


@dataclass(frozen=True)
class Side:
    """Meetings that make two sentences a pair."""

    meetings: Meetings
    short: np.ndarray | None = None
    """``(n,)`` bool: the short sentences, of which a pair needs one; None where any two make a pair."""
    both: bool = False  # whether a pair needs two short sentences


def all_pairs(n: int, sides: Sequence[Side], wanted: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Return every pair that a side makes, once and sorted; ``wanted`` ``(n,)`` bool restricts its first sentence."""
    keys = np.empty(0, dtype=np.int64)
    waiting: list[np.ndarray] = []
    for side in sides:
        sentence, group = side.meetings.sentence, side.meetings.group
        partners = np.searchsorted(group, group, side="right") - np.arange(len(group)) - 1
        if wanted is not None:
            partners[~wanted[sentence]] = 0
        for part in slices(partners, CHUNK):
            counts = partners[part]
            first = np.repeat(sentence[part], counts)
            second = sentence[ranges(np.arange(len(group))[part] + 1, counts)]
            if side.short is not None:
                kept = (np.logical_and if side.both else np.logical_or)(side.short[first], side.short[second])
                first, second = first[kept], second[kept]
            waiting.append(np.unique(first * n + second))
            # A pair may meet in many groups: what waits must not grow far beyond the result.
            if sum(map(len, waiting)) > max(4 * CHUNK, len(keys)):
                keys, waiting = np.unique(np.concatenate([keys, *waiting])), []
    keys = np.unique(np.concatenate([keys, *waiting]))
    return keys // max(n, 1), keys % max(n, 1)


def greedy_pairs(n: int, sides: Sequence[Side], max_uses: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs in their order, without those of a sentence that was used ``max_uses`` times already.

    In a group only as many are tried as may be taken, so that the cost of n similar sentences is not quadratic.
    """
    sentence, start, stop, members = _lists(sides)
    # Index of the next sentence that may still be used: a union-find over used sentences.
    following = list(range(len(members) + 1))
    used = [0] * n
    first: list[int] = []
    second: list[int] = []
    for i, rows in _by_sentence(sentence):
        left = max_uses - used[i]
        if left < 1:
            continue
        partners: set[int] = set()
        for row in rows:
            partners.update(_next_usable(members, following, used, max_uses, start[row], stop[row], left))
        for j in sorted(partners)[:left]:
            used[i] += 1
            used[j] += 1
            first.append(i)
            second.append(j)
    return np.array(first, dtype=np.int64), np.array(second, dtype=np.int64)


def _next_usable(
    members: list[int], following: list[int], used: list[int], max_uses: int, place: int, stop: int, count: int
) -> list[int]:
    """Return the next members of a list, from a place on, that may still be used."""
    usable: list[int] = []
    while len(usable) < count:
        while following[place] != place:
            following[place] = following[following[place]]
            place = following[place]
        if place >= stop:
            break
        if used[members[place]] < max_uses:
            usable.append(members[place])
        else:
            following[place] = place + 1
        place += 1
    return usable


def _lists(sides: Sequence[Side]) -> tuple[np.ndarray, list[int], list[int], list[int]]:
    """Return, per sentence and group, the range of its possible partners (sentence, start, stop); and the partners."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    before = 0

    def add(rows: np.ndarray, partners: np.ndarray) -> None:
        nonlocal before
        sentence, group = side.meetings.sentence, side.meetings.group
        n = int(sentence.max()) + 1
        keys = group[partners] * n + sentence[partners]
        places = group[rows] * n + sentence[rows]
        columns[0].append(sentence[rows])
        columns[1].append(before + np.searchsorted(keys, places, side="right"))
        columns[2].append(before + np.searchsorted(group[partners], group[rows], side="right"))
        columns[3].append(sentence[partners])
        before += len(partners)

    for side in sides:
        every = np.arange(len(side.meetings.sentence))
        if not len(every):
            continue
        if side.short is None:
            add(every, every)
        else:
            short = side.short[side.meetings.sentence]
            add(every[short], every[short] if side.both else every)
            if not side.both:
                # A long sentence only pairs with a short one.
                add(every[~short], every[short])
    if not columns[0]:
        return np.empty(0, dtype=np.int64), [], [], []
    joined = [np.concatenate(column) for column in columns]
    return joined[0], joined[1].tolist(), joined[2].tolist(), joined[3].tolist()


def _by_sentence(sentence: np.ndarray) -> list[tuple[int, list[int]]]:
    order = np.argsort(sentence, kind="stable")
    values, bounds = np.unique(sentence[order], return_index=True)
    rows = np.split(order, bounds[1:])
    return [(value, part.tolist()) for value, part in zip(values.tolist(), rows, strict=True)] if len(values) else []


# In the released code, a text is short if its symbols weigh 15 in total, in its weights of 1, 0.3 and 0.1.
SHORT_WEIGHT = 150


class Match(NamedTuple):
    """Two sentences that are a pair.

    Attributes:
        i: the first one's index.
        j: the second one's, larger.
        span: the heaviest common substring of their normalised forms; of several, the leftmost in ``i``.
        weight: its weight.
    """

    i: int
    j: int
    span: str
    weight: int


@dataclass(frozen=True)
class Rule:
    """When two sentences are a pair."""

    threshold: int = 30  # minimum weight of their heaviest common substring
    short_threshold: int | None = None  # minimum weight in a pair of short texts; None for no such exception
    weights: SymbolWeights = field(default_factory=SymbolWeights)  # weights of symbols
    short_characters: int | None = None
    """Two texts with fewer characters are a pair of short texts (GUR, section IV-A, has 64, with a short threshold of
    20: two Chinese characters). None: one of the two weighs at most ``SHORT_WEIGHT``, as in the released code."""

    def __post_init__(self) -> None:
        if self.threshold < 1:
            raise ConfigError(f"threshold={self.threshold} would make a pair of any two sentences; 1 is the least")
        if self.short_threshold is not None and not 1 <= self.short_threshold <= self.threshold:
            raise ConfigError(
                f"short_threshold={self.short_threshold} is not between 1 and the threshold, {self.threshold}"
            )
        if self.short_characters is not None and self.short_characters < 1:
            raise ConfigError(f"short_characters={self.short_characters} makes no text a short one; 1 is the least")
        if self.short_characters is not None and self.short_threshold is None:
            raise ConfigError("short_characters says which texts are short; give short_threshold for them too")

    def short(self, texts: Texts) -> np.ndarray:
        """Return which sentences are short, ``(n,)`` bool."""
        if self.short_characters is None:
            return texts.total_weights() <= SHORT_WEIGHT
        return np.diff(texts.bounds) < self.short_characters


def matching_pairs(
    sentences: Sequence[str],
    threshold: int = 30,
    max_uses: int | None = None,
    *,
    short_threshold: int | None = None,
    short_characters: int | None = None,
    weights: SymbolWeights | None = None,
) -> list[Match]:
    """Return the pairs among the sentences of one document (GUR, section III-B).

    >>> def figure_2(*sentences: str) -> list[str]:
    ...     return [match.span for match in matching_pairs(sentences)]
    >>> figure_2("Tom is chasing Jerry.", "Jerry is chasing Tom.")
    []
    >>> figure_2("Spike is chasing Tom.", "Spike is chasing Jerry.")
    ['spike is chasing']

    Args:
        sentences: the sentences, as they stand in the document. Equal ones match.
        threshold: the minimum weight of the heaviest common substring of two normalized sentences: 10 for a letter
            beyond U+2710, 3 for another letter, 1 for anything else, inner spaces too.
        max_uses: the maximum number of pairs per sentence, taken greedily in their order; None for any number.
        short_threshold: the smaller threshold of short texts; see ``Rule``.
        short_characters: two texts with fewer characters in their normalized forms are short; see ``Rule``.
        weights: other weights of symbols.

    Returns:
        The pairs, sorted by ``i`` and ``j``. Without ``max_uses`` their number may be quadratic.

    Raises:
        ConfigError: a threshold, weight or number of uses is out of range.
        TextError: the sentences aren't a list of strings.
    """
    is_list = not isinstance(sentences, str) and isinstance(sentences, Sequence)
    if not is_list or not all(isinstance(sentence, str) for sentence in sentences):
        raise TextError("the sentences of a document are a list of strings")
    rule = Rule(threshold, short_threshold, weights or SymbolWeights(), short_characters)
    pairs = find_pairs([[normalised(sentence) for sentence in sentences]], rule, max_uses=max_uses)
    return [Match(*row) for row in zip(*pairs.columns(), strict=True)]


@dataclass(frozen=True)
class Pairs:
    """The pairs among the sentences of some documents, which are numbered consecutively."""

    first: np.ndarray  # ``(p,)`` int64, the first sentence of each pair
    second: np.ndarray  # ``(p,)`` int64, the second, of the same document
    weights: np.ndarray  # ``(p,)`` int64, the weights of their spans
    spans: list[str]

    def columns(self) -> tuple[list[int], list[int], list[str], list[int]]:
        """Return first, second, span and weight as lists."""
        return self.first.tolist(), self.second.tolist(), self.spans, self.weights.tolist()


def find_pairs(
    documents: Sequence[Sequence[str]], rule: Rule, *, titled: bool = False, max_uses: int | None = None
) -> Pairs:
    """Return the pairs of several documents of normalized sentences, sorted.

    ``titled`` pairs only the first sentence of each document with its others.
    """
    if max_uses is not None and max_uses < 1:
        raise ConfigError(f"max_uses={max_uses} leaves no sentence to be used; 1 is the least")
    texts = Texts(documents, rule.weights)
    title = np.zeros(len(texts), dtype=bool)
    title[np.flatnonzero(np.diff(texts.document, prepend=-1))] = True
    title_only = title if titled else None
    shared = share(texts, find_windows(texts, rule.threshold), title_only)
    meetings = Meetings(texts, shared)
    sides = [Side(meetings, None)]
    if rule.short_threshold is not None:
        shared = share(texts, find_windows(texts, rule.short_threshold), title_only)
        meetings = Meetings(texts, shared)
        sides.append(Side(meetings, rule.short(texts), both=rule.short_characters is not None))
    if max_uses is None or titled:
        first, second = all_pairs(len(texts), sides, title_only)
        if max_uses is not None:
            # How many pairs of the same title stand before each.
            kept = np.arange(len(first)) - np.searchsorted(first, first) < max_uses
            first, second = first[kept], second[kept]
    else:
        first, second = greedy_pairs(len(texts), sides, max_uses)
    spans = heaviest_spans(texts, shared, meetings, first, second)
    stretches = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
    return Pairs(first, second, spans.weights, [texts.stretch(start, end) for start, end in stretches])


METHODS = ("lcs", "none", "ict", "crops")
ENUMERATIONS = ("title", "all")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:[-_][A-Za-z0-9]+)*")
# Options that only some methods look at.
_ONLY_FOR = {
    "pairs": ("lcs", "none"),
    "threshold": ("lcs",),
    "short_threshold": ("lcs",),
    "short_characters": ("lcs",),
    "weights": ("lcs",),
    "max_uses": ("lcs", "none"),
}


@dataclass(frozen=True, kw_only=True)
class MiningConfig:
    """Which pairs are mined, and how."""

    method: str = "lcs"
    """``lcs``: sentences that share a heavy substring (GUR, section III-B). ``none``: the same enumeration without that
    condition (GUR-LCS, section IV-A). ``ict``: a sentence and the rest of its passage (inverse cloze task).
    ``crops``: two independent crops of a passage (Contriever)."""
    pairs: str = "title"
    """Which sentences are compared: ``title`` pairs the title with each sentence (the paper's corpus, section
    IV-A), ``all`` any two sentences of a document (section III-B). A document without a title has its first sentence in
    the title's place."""
    threshold: int = 30
    """Minimum weight of the heaviest common substring: 30 are ten Latin letters or three Chinese characters."""
    short_threshold: int | None = None
    """A smaller threshold for short texts, such as 20: two Chinese characters."""
    short_characters: int | None = None
    """Two texts with fewer characters in their normalised forms are short ones (GUR, section IV-A, has 64); None: two
    texts of which one weighs 150 at most, as in the released code."""
    weights: SymbolWeights = field(default_factory=SymbolWeights)
    """Weights of symbols."""
    max_uses: int | None = 4
    """Maximum number of pairs per sentence or title; pairs are taken in their order. None for any number."""
    per_document: int | None = None
    """Maximum number of pairs per document, sampled by the seed; None for all."""
    language: str = "en"
    """Language of the sentence splitter, such as ``en``, ``zh``, ``de``."""
    clean: str = "none"
    """Quirks to remove from the documents first: a style of ``gerund.data.corpus.clean_text``."""
    min_length: int = 2
    """Minimum number of characters of a sentence's normalized form; shorter sentences are skipped."""
    context: int = 1000
    """Maximum number of characters of a passage, in whole sentences: for ``ict`` and ``crops``, which make one pair per
    passage, and for the opening of each document where titles are paired."""
    seed: int = 0
    """Seed of the order of the pairs, and of sampling."""
    part_size: int = 4 * 2**20
    """Bytes of documents per part: what an interruption costs."""

    def __post_init__(self) -> None:
        for kind, value, valid in (
            ("method", self.method, METHODS),
            ("enumeration of pairs", self.pairs, ENUMERATIONS),
            ("text cleaning", self.clean, tuple(CLEANERS)),
        ):
            one_of(kind, value, valid)
        if not _LANGUAGE.fullmatch(self.language):
            raise ConfigError(f"language={self.language!r} is not a language code such as en, zh or de")
        for name, least in (("max_uses", 1), ("per_document", 1), ("min_length", 1), ("context", 2), ("part_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                none = "; for any number None, or --max-uses 0" if name == "max_uses" else ""
                raise ConfigError(f"{name}={value} is below {least}{none}")
        _ = self.rule
        default = {option.name: option.default for option in fields(self)} | {"weights": SymbolWeights()}
        for name, methods in _ONLY_FOR.items():
            if self.method not in methods and getattr(self, name) != default[name]:
                raise ConfigError(f"{name} means nothing to the method {self.method}; leave it out")
        if self.pairs == "all" and self.method in ("lcs", "none") and self.context != 1000:
            raise ConfigError("context means nothing to pairs of all sentences, which have no title; leave it out")
        if self.method == "none" and self.pairs == "all" and self.max_uses is None:
            raise ConfigError("method none would pair every sentence with every other; give max_uses")

    @property
    def rule(self) -> Rule:
        """When two sentences are a pair."""
        return Rule(self.threshold, self.short_threshold, self.weights, self.short_characters)


@dataclass(frozen=True)
class Mined:
    """Counts of a mining run."""

    output: Path
    documents: int  # documents with a text
    sentences: int  # their sentences that were long enough, without titles
    repeated: int  # sentences that their document had before, which were skipped
    candidates: int  # pairs of sentences that were compared
    found: int  # pairs found
    duplicates: int  # pairs that another document had before, which were dropped
    pairs: int  # pairs written
    errors: int  # documents that could not be used
    first_errors: tuple[BadDocument, ...]
    errors_file: Path | None  # the list of all of them, if any
    megabytes: float  # size of the documents, unpacked, in millions of bytes
    seconds: float
    resumed_parts: int  # parts that an earlier run had finished
    megabytes_per_second: float  # throughput of this run, everything included


# Contriever crops spans of 5 to 50% of a text, lengths sampled evenly.
CROP_FRACTION = (0.05, 0.5)
# Where a title stands that is no part of the text.
NOWHERE = -1
# Words, or single characters of scripts that put no spaces between words.
_UNIT = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff]|"
    r"[^\s\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003ffff]+"
)


class Sentence(NamedTuple):
    """A stretch of a document: offsets (``NOWHERE`` for a title), text, and normalized form."""

    start: int
    end: int
    text: str
    form: str


class Pair(NamedTuple):
    """Two stretches of a document that belong together, and their heaviest common substring if it is computed."""

    a: Sentence
    b: Sentence
    span: str | None
    weight: int | None


@dataclass(frozen=True)
class Prepared:
    """A document cut into sentences."""

    number: int  # its number in the corpus
    text: str  # its cleaned text: what offsets refer to
    sentences: list[Sentence]  # its distinct sentences; with the title first where titles are paired
    total: int  # how many sentences it has, with repeated sentences and without the title
    repeated: int  # how many of them it had before


def prepare(document: Document, number: int, config: MiningConfig) -> Prepared:
    """Cut a document into sentences.

    A sentence whose normalized form the document had before (its title included) is skipped: a pair of equal texts
    teaches nothing, and a pair with the repetition is the same as a pair with the first.
    """
    text = clean_text(document.text, config.clean)
    sentences = [
        Sentence(start, end, piece, form)
        for start, end in sentence_bounds(text, config.language)
        if len(form := normalised(piece := text[start:end])) >= config.min_length
    ]
    once: dict[str, Sentence] = {}
    if config.method in ("lcs", "none") and config.pairs == "title":
        title = as_utf8(document.title.strip())
        if form := normalised(title):
            once[form] = Sentence(NOWHERE, NOWHERE, title, form)
    titles = len(once)
    for sentence in sentences:
        once.setdefault(sentence.form, sentence)
    return Prepared(number, text, list(once.values()), len(sentences), len(sentences) + titles - len(once))


def candidates_of(document: Prepared, config: MiningConfig) -> int:
    """Return how many pairs of sentences are compared."""
    n = len(document.sentences)
    if config.method in ("ict", "crops"):
        return sum(1 for _ in _passages(document, config))
    return max(n - 1, 0) if config.pairs == "title" else n * (n - 1) // 2


def opening_of(document: Prepared, config: MiningConfig) -> str | None:
    """Return the opening from which a model can generate the title (GUR, section IV-A); None without a paired title.

    It is the whole sentences that fit into the context, or the beginning of a longer sentence.
    """
    if not document.sentences or document.sentences[0].start != NOWHERE:
        return None
    ends = [sentence.end for sentence in document.sentences[1:] if sentence.end <= config.context]
    return document.text[: max(ends, default=config.context)].strip() or None


def pairs_of(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    """Return the pairs of each document, in its order."""
    pairs_by_document = _METHODS[config.method](documents, config)
    most = config.per_document
    if most is not None:
        for index, pairs in enumerate(pairs_by_document):
            if len(pairs) > most:
                rng = np.random.default_rng([config.seed, documents[index].number, 1])
                chosen = sorted(rng.choice(len(pairs), most, replace=False).tolist())
                pairs_by_document[index] = [pairs[place] for place in chosen]
    return pairs_by_document


def _by_substring(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    forms = [[sentence.form for sentence in document.sentences] for document in documents]
    matched = find_pairs(forms, config.rule, titled=config.pairs == "title", max_uses=config.max_uses)
    owner = [place for place, document in enumerate(documents) for _ in document.sentences]
    sentences = [sentence for document in documents for sentence in document.sentences]
    pairs: list[list[Pair]] = [[] for _ in documents]
    for first, second, span, weight in zip(*matched.columns(), strict=True):
        pairs[owner[first]].append(Pair(sentences[first], sentences[second], span, weight))
    return pairs


def _unfiltered(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    pairs = []
    for document in documents:
        sentences = document.sentences
        n = len(sentences)
        most = n if config.max_uses is None else config.max_uses
        if config.pairs == "title":
            places = [(0, place) for place in range(1, min(n, most + 1))]
        else:
            places = _each_so_often(n, most)
        pairs.append([Pair(sentences[i], sentences[j], None, None) for i, j in places])
    return pairs


def _each_so_often(n: int, most: int) -> list[tuple[int, int]]:
    """Return pairs of numbers below n in their order, each number used at most ``most`` times.

    >>> _each_so_often(5, 2)
    [(0, 1), (0, 2), (1, 2), (3, 4)]
    """
    used = [0] * n
    pairs = []
    for i in range(n):
        j = i + 1
        while j < n and used[i] < most:
            if used[j] < most:
                pairs.append((i, j))
                used[i] += 1
                used[j] += 1
            j += 1
    return pairs


def _passages(document: Prepared, config: MiningConfig) -> Iterator[list[Sentence]]:
    """Yield runs of sentences of at most ``context`` characters, or a single longer sentence."""
    run: list[Sentence] = []
    for sentence in document.sentences:
        if run and sentence.end - run[0].start > config.context:
            yield run
            run = []
        run.append(sentence)
    if run:
        yield run


def _by_passage(
    two_of: Callable[[str, list[Sentence], np.random.Generator], tuple[Sentence, Sentence]],
    documents: Sequence[Prepared],
    config: MiningConfig,
) -> list[list[Pair]]:
    """Return two texts of each passage, unless they are equal or one of them has nothing to compare."""
    all_pairs = []
    for document in documents:
        rng = np.random.default_rng([config.seed, document.number])
        couples = (two_of(document.text, run, rng) for run in _passages(document, config))
        all_pairs.append([Pair(a, b, None, None) for a, b in couples if a.form and b.form and a.form != b.form])
    return all_pairs


def _taken_out(text: str, run: list[Sentence], rng: np.random.Generator) -> tuple[Sentence, Sentence]:
    """ICT (Lee et al. 2019; GUR, section II-B): a sentence and the rest of its passage."""
    sentence = run[int(rng.integers(len(run)))]
    start, end = run[0].start, run[-1].end
    before, after = text[start : sentence.start], text[sentence.end : end]
    spaced = before[-1:].isspace() or after[:1].isspace()
    rest = f"{before.rstrip()}{' ' if spaced else ''}{after.lstrip()}".strip()
    return sentence, Sentence(start, end, rest, normalised(rest))


def _cropped(text: str, run: list[Sentence], rng: np.random.Generator) -> tuple[Sentence, Sentence]:
    """Two independent crops of each passage (Contriever; GUR, reference 26), of whole words."""
    units = [(unit.start(), unit.end()) for unit in _UNIT.finditer(text, run[0].start, run[-1].end)]
    return _crop(text, units, rng), _crop(text, units, rng)


def _crop(text: str, units: list[tuple[int, int]], rng: np.random.Generator) -> Sentence:
    fraction = rng.uniform(*CROP_FRACTION)
    length = max(round(fraction * len(units)), 1)
    first = int(rng.integers(len(units) - length + 1))
    start, end = units[first][0], units[first + length - 1][1]
    return Sentence(start, end, text[start:end], normalised(text[start:end]))


_METHODS: dict[str, Callable[[Sequence[Prepared], MiningConfig], list[list[Pair]]]] = {
    "lcs": _by_substring,
    "none": _unfiltered,
    "ict": partial(_by_passage, _taken_out),
    "crops": partial(_by_passage, _cropped),
}
