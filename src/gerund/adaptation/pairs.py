"""Training pairs out of the documents that were not put aside.

Three kinds: sentences of a document that share a long substring, and the title with such a sentence (both by ``gerund
mine``); and a document's title or first sentence with its chunks, as an index cuts them, which is what a search does.

Knows: the miner, chunks, which texts must not be trained on. Does not know: models, recipes.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.adaptation.config import LEAST_PAIRS, AdaptConfig
from gerund.adaptation.measuring import chunking_for
from gerund.adaptation.queries import Split, common_titles, made_query, order_of
from gerund.data.files import opened
from gerund.data.mining import MiningConfig, mine
from gerund.data.passages import sentence_bounds
from gerund.errors import DataError
from gerund.jobs.files import whole_file
from gerund.normalization import normalized
from gerund.retrieval.chunking import cut
from gerund.retrieval.documents import Document

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

PAIRS, TEXTS = "pairs.jsonl", "texts.jsonl"

# Chunks of a document that are paired with what it is asked by.
_CHUNKS = 4
# Bytes of a sentence by which a document can be told; in Chinese these are eight characters.
_TELLING = 24
# Documents in which a sentence may stand and still be of one: what more of them have is a phrase of their kind.
_VERSIONS = 5
# Characters of what was put aside in which each text is searched for. In more of them that would take minutes, and only
# whole sentences are compared.
_SEARCHED = 4 * 2**20
# What one process mines in seconds; starting others takes longer.
_SMALL = 16 * 2**20


@dataclass(frozen=True)
class Pairs:
    """What there is to train on.

    Attributes:
        sentences: pairs of sentences that share a long substring.
        titles: pairs of a title, or a first sentence, with such a sentence.
        chunks: pairs of a title or a first sentence with a chunk.
        left_out: pairs that were dropped since the documents that were put aside have a sentence of theirs, too.
    """

    sentences: int
    titles: int
    chunks: int
    left_out: int

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return self.sentences + self.titles + self.chunks

    @property
    def summary(self) -> str:
        """Say what there is to train on.

        >>> Pairs(1200, 300, 2000, 0).summary
        '3,500 pairs: 2,000 of a title or first sentence and a chunk, 300 and a sentence, 1,200 of two sentences'
        """
        return (
            f"{self.count:,} pairs: {self.chunks:,} of a title or first sentence and a chunk, "
            f"{self.titles:,} and a sentence, {self.sentences:,} of two sentences"
        )


def make_pairs(
    found: Split,
    folder: Path,
    options: AdaptConfig,
    lm: "LanguageModel",
    *,
    show: bool | None = None,
) -> Pairs:
    """Write the pairs of the documents to train on, and these documents themselves.

    Args:
        found: documents and queries.
        folder: where ``pairs.jsonl`` and ``texts.jsonl`` are written.
        options: language and seed.
        lm: the model, by whose tokens an index cuts documents.
        show: whether to show progress; None only on a terminal.

    Raises:
        DataError: there are too few pairs.
        ResourceError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / TEXTS) as file:
        for document in found.training:
            file.write(_line({"title": document.title, "text": document.text}))
    kinds = {
        "sentences": _mined(folder, "all", options, show),
        "titles": _mined(folder, "title", options, show),
        "chunks": list(chunk_pairs(found.training, lm, options)),
    }
    leaks = leak_finder(found, options.language)
    counts, left_out = dict.fromkeys(kinds, 0), 0
    written: set[tuple[str, str]] = set()
    with whole_file(folder / PAIRS) as file:
        for kind, pairs in kinds.items():
            for one, other in pairs:
                if leaks(one) or leaks(other):
                    left_out += 1
                elif (one, other) not in written:
                    written.add((one, other))
                    file.write(_line({"text_a": one, "text_b": other, "kind": kind}))
                    counts[kind] += 1
    pairs_found = Pairs(**counts, left_out=left_out)
    if pairs_found.count < LEAST_PAIRS:
        raise DataError(
            f"{len(found.training):,} documents make {pairs_found.count} pairs, and {LEAST_PAIRS} are needed to train: "
            "give more documents, or longer ones"
        )
    return pairs_found


def chunk_pairs(documents: Sequence[Document], lm: "LanguageModel", options: AdaptConfig) -> Iterator[tuple[str, str]]:
    """Yield what a document is asked by with some of its chunks: titles and first sentences are made as for queries."""
    common, chunking = common_titles(documents), chunking_for(lm, options.language)
    for document in documents:
        made = made_query(document, common, options)
        if made is None:
            continue
        query, rest = made
        chunks = [one.text for one in cut(rest, lm.tokenizer, chunking)]
        rng = np.random.default_rng(int.from_bytes(order_of(document, options.seed), "little"))
        # The first one always: it says most often what the document is about.
        others = (rng.permutation(max(len(chunks) - 1, 0))[: _CHUNKS - 1] + 1).tolist()
        yield from ((query.text, chunks[place]) for place in [0, *others][: len(chunks)])


def texts_put_aside(found: Split, language: str) -> frozenset[str]:
    """Return the queries and all sentences of the documents that were put aside, for comparison."""
    texts = {plain(one.text) for one in found.queries}
    for one in found.held_out:
        texts |= _sentences(one.text, language)
        texts |= {plain(one.text), plain(one.title)}
    return frozenset(texts - {""})


def leak_finder(found: Split, language: str) -> Callable[[str], bool]:
    """Return what says whether a text must not be trained on.

    It must not where it is a query or a title of what was put aside, where it has a sentence of it, or where it is a
    stretch of such a document or has all of one. Documents that are nearly the same would give the answers away. A
    sentence that many documents have, such as a line on rights, gives nothing away.
    """
    whole = texts_put_aside(found, language)
    telling = {text for text in whole if _is_telling(text)}
    counts = Counter(sentence for one in found.training for sentence in telling & _sentences(one.text, language))
    telling -= {sentence for sentence, count in counts.items() if count > _VERSIONS}
    documents = sorted({plain(one.text) for one in found.held_out} & telling, key=len)
    joined = "\n".join(documents) if sum(map(len, documents)) <= _SEARCHED else ""

    @lru_cache(maxsize=2**16)
    def leaks(text: str) -> bool:
        own = plain(text)
        if own in whole or not telling.isdisjoint(_sentences(text, language)):
            return True
        if _is_telling(own) and own in joined:
            return True
        return any(one in own for one in takewhile(lambda one: len(one) <= len(own), documents))

    return leaks


def _sentences(text: str, language: str) -> set[str]:
    return {plain(text[start:end]) for start, end in sentence_bounds(text, language)}


def _is_telling(text: str) -> bool:
    """Tell whether a text is long enough to be of one document: what is shorter may stand anywhere."""
    return len(text.encode("utf-8", "replace")) >= _TELLING


def plain(text: str) -> str:
    r"""Return a text as it is compared: in its normal form, without a difference in case or white space.

    >>> plain("A  Cat\n sat.")
    'a cat sat.'
    """
    return " ".join(normalized(text).split()).casefold()


def _mined(folder: Path, pairs: str, options: AdaptConfig, show: bool | None) -> list[tuple[str, str]]:
    """Return what the miner finds; nothing where no two sentences share enough."""
    # Long stretches for two sentences of the body, which at 30 share only a common phrase.
    own: dict[str, Any] = {"threshold": 60, "max_uses": 2, "per_document": 6} if pairs == "all" else {"per_document": 8}
    config = MiningConfig(pairs=pairs, language=options.language, seed=options.seed, **own)
    texts, output = folder / TEXTS, folder / f"mined-{pairs}.jsonl"
    workers = 1 if texts.stat().st_size < _SMALL else None
    try:
        mine([texts], output, config, workers=workers, force=True, show=show)
    except DataError:
        # The documents are whole: what is missing is a pair.
        return []
    with opened(output) as file:
        rows: list[Mapping[str, Any]] = [json.loads(line) for line in file]
    output.unlink()
    output.with_name(f"mined-{pairs}.errors.jsonl").unlink(missing_ok=True)
    return [(row["text_a"], row["text_b"]) for row in rows]


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")
