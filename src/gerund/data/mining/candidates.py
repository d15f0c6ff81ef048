"""From documents to pairs of texts, by one of the methods.

Knows: sentences, offsets, methods, sampling. Does not know: files, processes, what other documents have.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gerund.data.cleaning import clean_text
from gerund.data.corpus import Document
from gerund.data.files import as_utf8
from gerund.data.mining.config import MiningConfig
from gerund.data.mining.matching import find_pairs
from gerund.data.mining.symbols import normalised
from gerund.data.passages import sentence_bounds

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
