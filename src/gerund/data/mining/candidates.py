"""Mining settings, and from documents to pairs of texts by one of four methods."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gerund.data.corpus import CLEANERS, BadDocument, Document, clean_text
from gerund.data.files import as_utf8
from gerund.data.mining.matching import Rule, find_pairs
from gerund.data.mining.substrings import SymbolWeights, normalised
from gerund.data.passages import sentence_bounds
from gerund.errors import ConfigError, unknown_name

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
    """What is mined."""

    method: str = "lcs"
    """``lcs``: sentences that share a heavy substring (GUR, section III-B). ``none``: the same enumeration without that
    condition (GUR-LCS, section IV-A). ``ict``: a sentence and the passage that it is taken out of (inverse cloze task).
    ``crops``: two independent crops of a passage (Contriever)."""
    pairs: str = "title"
    """Which sentences are put side by side: ``title`` pairs the title with each sentence (the paper's corpus, section
    IV-A), ``all`` any two sentences of a document (section III-B). A document without a title has its first sentence in
    the title's place."""
    threshold: int = 30
    """What the heaviest common substring weighs at least: 30 are ten Latin letters or three Chinese characters."""
    short_threshold: int | None = None
    """A smaller threshold of short texts, such as 20: two Chinese characters; None for none."""
    short_characters: int | None = None
    """Two texts with fewer characters in their normalised forms are short ones (GUR, section IV-A, has 64); None: two
    texts of which one weighs 150 at most, as in the released code."""
    weights: SymbolWeights = field(default_factory=SymbolWeights)
    """What symbols weigh."""
    max_uses: int | None = 4
    """How often a sentence of a document, or its title, is used at most; pairs are taken in their order. None for any
    number."""
    per_document: int | None = None
    """Pairs of a document at most, sampled by the seed; None for all."""
    language: str = "en"
    """Language of the sentence splitter, such as ``en``, ``zh``, ``de``."""
    clean: str = "none"
    """Quirks to remove from the documents first: a style of ``gerund.data.corpus.clean_text``."""
    min_length: int = 2
    """Characters of a sentence at least, in its normalised form; shorter ones are passed over."""
    context: int = 1000
    """Characters of a passage at most, in whole sentences: for ``ict`` and ``crops``, which take one pair of each; and
    where titles are paired, for the opening of each document."""
    seed: int = 0
    """Determines the order of the pairs, and what is sampled."""
    part_size: int = 4 * 2**20
    """Bytes of documents that a process works on at a time, which become a part: what an interruption costs."""

    def __post_init__(self) -> None:
        for kind, value, valid in (
            ("method", self.method, METHODS),
            ("enumeration of pairs", self.pairs, ENUMERATIONS),
            ("text cleaning", self.clean, tuple(CLEANERS)),
        ):
            if value not in valid:
                raise unknown_name(kind, value, valid)
        if not _LANGUAGE.fullmatch(self.language):
            raise ConfigError(f"language={self.language!r} is no language code such as en, zh or de")
        for name, least in (("max_uses", 1), ("per_document", 1), ("min_length", 1), ("context", 2), ("part_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                none = "; for any number None, or --max-uses 0" if name == "max_uses" else ""
                raise ConfigError(f"{name}={value} is below {least}{none}")
        _ = self.rule
        for one in fields(self):
            if self.method not in _ONLY_FOR.get(one.name, METHODS) and getattr(self, one.name) != _default(one):
                raise ConfigError(f"{one.name} means nothing to the method {self.method}; leave it out")
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
    """What came of a corpus.

    Attributes:
        output: the file of pairs.
        documents: documents with a text.
        sentences: sentences of these that were long enough, titles not counted.
        repeated: sentences that their document had before, which were passed over.
        candidates: pairs of sentences that were put side by side.
        found: pairs found.
        duplicates: pairs that another document had before, which were dropped.
        pairs: pairs that were written.
        errors: documents that could not be used.
        first_errors: the first of them.
        errors_file: the file that lists all of them; None where there are none.
        megabytes: size of the documents, unpacked, in millions of bytes.
        seconds: time that this run took.
        resumed_parts: parts that an earlier run had finished.
        megabytes_per_second: what this run itself went through a second, everything included.
    """

    output: Path
    documents: int
    sentences: int
    repeated: int
    candidates: int
    found: int
    duplicates: int
    pairs: int
    errors: int
    first_errors: tuple[BadDocument, ...]
    errors_file: Path | None
    megabytes: float
    seconds: float
    resumed_parts: int
    megabytes_per_second: float


def _default(one: Any) -> object:
    factory: Callable[[], object] | object = one.default_factory
    return factory() if callable(factory) else one.default


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
    """A stretch of a document.

    Attributes:
        start: its first character; ``NOWHERE`` for a title.
        end: the character after its last; ``NOWHERE`` for a title.
        text: the stretch as it stands there.
        form: its normalised form.
    """

    start: int
    end: int
    text: str
    form: str


class Pair(NamedTuple):
    """Two stretches of a document that belong together.

    Attributes:
        a: the one.
        b: the other.
        span: the heaviest common substring of their normalised forms; None where the method does not look for it.
        weight: what it weighs.
    """

    a: Sentence
    b: Sentence
    span: str | None
    weight: int | None


@dataclass(frozen=True)
class Prepared:
    """A document cut into sentences.

    Attributes:
        number: its number in the corpus.
        text: its text, cleaned: what offsets refer to.
        sentences: its sentences, each but once; with the title in front where titles are paired.
        total: how many sentences it has, repeated ones counted, the title not.
        repeated: how many of them it had before.
    """

    number: int
    text: str
    sentences: list[Sentence]
    total: int
    repeated: int


def prepare(document: Document, number: int, config: MiningConfig) -> Prepared:
    """Cut a document into sentences.

    A sentence whose normalised form the document had before (its title included) is passed over: a pair of equal texts
    teaches nothing, and a pair with the repetition is the same as one with the first.
    """
    text = clean_text(document.text, config.clean)
    found = [
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
    for sentence in found:
        once.setdefault(sentence.form, sentence)
    return Prepared(number, text, list(once.values()), len(found), len(found) + titles - len(once))


def candidates_of(document: Prepared, config: MiningConfig) -> int:
    """Return how many pairs of sentences are put side by side."""
    n = len(document.sentences)
    if config.method in ("ict", "crops"):
        return sum(1 for _ in _passages(document, config))
    return max(n - 1, 0) if config.pairs == "title" else n * (n - 1) // 2


def opening_of(document: Prepared, config: MiningConfig) -> str | None:
    """Return how a document begins, for its title to be written from (GUR, section IV-A); None without a paired title.

    These are whole sentences, as many as fit into the context, or what fits of a longer one.
    """
    if not document.sentences or document.sentences[0].start != NOWHERE:
        return None
    ends = [sentence.end for sentence in document.sentences[1:] if sentence.end <= config.context]
    return document.text[: max(ends, default=config.context)].strip() or None


def pairs_of(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    """Return the pairs of each document, in its order."""
    found = _METHODS[config.method](documents, config)
    if config.per_document is None:
        return found
    return [_sampled(pairs, one.number, config) for pairs, one in zip(found, documents, strict=True)]


def _sampled(pairs: list[Pair], number: int, config: MiningConfig) -> list[Pair]:
    most = config.per_document
    if most is None or len(pairs) <= most:
        return pairs
    rng = np.random.default_rng([config.seed, number, 1])
    return [pairs[place] for place in sorted(rng.choice(len(pairs), most, replace=False).tolist())]


def _by_substring(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    forms = [[sentence.form for sentence in one.sentences] for one in documents]
    matched = find_pairs(forms, config.rule, titled=config.pairs == "title", max_uses=config.max_uses)
    owner = [place for place, one in enumerate(documents) for _ in one.sentences]
    sentences = [sentence for one in documents for sentence in one.sentences]
    found: list[list[Pair]] = [[] for _ in documents]
    for first, second, span, weight in zip(*matched.columns(), strict=True):
        found[owner[first]].append(Pair(sentences[first], sentences[second], span, weight))
    return found


def _unfiltered(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    found = []
    for one in documents:
        n = len(one.sentences)
        most = n if config.max_uses is None else config.max_uses
        if config.pairs == "title":
            places = [(0, place) for place in range(1, min(n, most + 1))]
        else:
            places = _each_so_often(n, most)
        found.append([Pair(one.sentences[i], one.sentences[j], None, None) for i, j in places])
    return found


def _each_so_often(n: int, most: int) -> list[tuple[int, int]]:
    """Return pairs of numbers below n in their order, each number used as often as may be.

    >>> _each_so_often(5, 2)
    [(0, 1), (0, 2), (1, 2), (3, 4)]
    """
    used = [0] * n
    found = []
    for i in range(n):
        j = i + 1
        while j < n and used[i] < most:
            if used[j] < most:
                found.append((i, j))
                used[i] += 1
                used[j] += 1
            j += 1
    return found


def _passages(document: Prepared, config: MiningConfig) -> Iterator[list[Sentence]]:
    """Yield runs of sentences that are no longer than the context, or are a single sentence."""
    run: list[Sentence] = []
    for sentence in document.sentences:
        if run and sentence.end - run[0].start > config.context:
            yield run
            run = []
        run.append(sentence)
    if run:
        yield run


def _taken_out(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    """ICT (Lee et al. 2019; GUR, section II-B): a sentence and the rest of its passage."""
    found = []
    for one in documents:
        rng = np.random.default_rng([config.seed, one.number])
        pairs = []
        for run in _passages(one, config):
            sentence = run[int(rng.integers(len(run)))]
            start, end = run[0].start, run[-1].end
            before, after = one.text[start : sentence.start], one.text[sentence.end : end]
            spaced = before[-1:].isspace() or after[:1].isspace()
            rest = f"{before.rstrip()}{' ' if spaced else ''}{after.lstrip()}".strip()
            pair = Pair(sentence, Sentence(start, end, rest, normalised(rest)), None, None)
            if pair.b.form and pair.a.form != pair.b.form:
                pairs.append(pair)
        found.append(pairs)
    return found


def _cropped(documents: Sequence[Prepared], config: MiningConfig) -> list[list[Pair]]:
    """Two independent crops of each passage (Contriever; GUR, reference 26), of whole words."""
    found = []
    for one in documents:
        rng = np.random.default_rng([config.seed, one.number])
        pairs = []
        for run in _passages(one, config):
            units = [(unit.start(), unit.end()) for unit in _UNIT.finditer(one.text, run[0].start, run[-1].end)]
            a, b = (_crop(one.text, units, rng) for _ in range(2))
            if a.form and b.form and a.form != b.form:
                pairs.append(Pair(a, b, None, None))
        found.append(pairs)
    return found


def _crop(text: str, units: list[tuple[int, int]], rng: np.random.Generator) -> Sentence:
    fraction = rng.uniform(*CROP_FRACTION)
    length = max(round(fraction * len(units)), 1)
    first = int(rng.integers(len(units) - length + 1))
    start, end = units[first][0], units[first + length - 1][1]
    return Sentence(start, end, text[start:end], normalised(text[start:end]))


_METHODS = {"lcs": _by_substring, "none": _unfiltered, "ict": _taken_out, "crops": _cropped}
