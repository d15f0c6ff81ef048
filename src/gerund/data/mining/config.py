"""What is mined out of a corpus, and what came of it.

Knows: names and limits of options. Does not know: texts, files.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from gerund.data.cleaning import CLEANERS
from gerund.data.corpus import BadDocument
from gerund.data.mining.matching import Rule
from gerund.data.mining.symbols import SymbolWeights
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
    """Quirks to remove from the documents first: a style of ``gerund.data.cleaning.clean_text``."""
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
