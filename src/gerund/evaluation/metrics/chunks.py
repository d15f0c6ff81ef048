"""Chunks of tagged sentences and their precision, recall and F1, as the CoNLL shared tasks count them (conlleval).

Tjong Kim Sang and De Meulder, "Introduction to the CoNLL-2003 shared task", 2003, section 3.

Knows: IOB tags. Does not know: words, files, models.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkScores:
    """What share of the chunks was found; a prediction counts where begin, end and type are all right.

    Attributes:
        precision: share of the predicted chunks that are right; 0 where none is predicted.
        recall: share of the true chunks that were found; 0 where there are none.
        f1: harmonic mean of both; 0 where both are 0.
    """

    precision: float
    recall: float
    f1: float


def chunks(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return the chunks of one sentence as (first word, word after the last, type).

    Reads IOB1 (B- only where a chunk follows one of its own type) and IOB2 (B- at every beginning) alike, and
    what a classifier may put together that is neither: a chunk begins at B-, after O, and where the type
    changes.

    Args:
        tags: ``O``, or ``B-`` or ``I-`` with a type.

    >>> sorted(chunks(["I-ORG", "O", "I-PER", "B-PER", "I-LOC"]))
    [(0, 1, 'ORG'), (2, 3, 'PER'), (3, 4, 'PER'), (4, 5, 'LOC')]
    """
    found = set()
    begin, current = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if current and (mark == "B" or kind != current):
            found.add((begin, place, current))
            current = ""
        if kind and not current:
            begin, current = place, kind
    return found


def chunk_scores(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> ChunkScores:
    """Compare the chunks of all sentences together (micro-averaged over types).

    Args:
        gold: the true tags of each sentence.
        predicted: as many tags for as many sentences.

    >>> chunk_scores([["I-PER", "I-PER", "O"]], [["I-PER", "I-PER", "I-LOC"]])
    ChunkScores(precision=0.5, recall=1.0, f1=0.6666666666666666)
    """
    right = n_gold = n_predicted = 0
    for true_tags, tags in zip(gold, predicted, strict=True):
        true_chunks, found = chunks(true_tags), chunks(tags)
        right += len(true_chunks & found)
        n_gold += len(true_chunks)
        n_predicted += len(found)
    # 2 PR / (P + R), without a division by 0 where nothing is right.
    f1 = 2 * right / max(1, n_gold + n_predicted)
    return ChunkScores(right / max(1, n_predicted), right / max(1, n_gold), f1)
