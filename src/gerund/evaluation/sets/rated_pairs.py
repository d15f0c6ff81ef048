"""Pairs of texts with a rating each: graded similarity, or same or not.

Knows: the two formats of files. Does not know: what is measured on them.
"""

from pathlib import Path

from gerund.errors import DataError
from gerund.evaluation.sets.rows import read_json_lines, read_tab_lines
from gerund.evaluation.task import RatedPairs


def read_scored_pairs(path: Path) -> RatedPairs:
    """Return the pairs of a file of graded similarity, as the STS tasks have them.

    Args:
        path: rows of score, first and second sentence, separated by tabs, without a header.

    Raises:
        DataError: the file is missing, empty, or has a malformed row; the message names file and line.
    """
    rows = read_tab_lines(path, ("score", "sentence1", "sentence2"))
    ratings = [row.number("score") for row in rows]
    return RatedPairs([row.text("sentence1") for row in rows], [row.text("sentence2") for row in rows], ratings)


def read_labelled_pairs(path: Path) -> RatedPairs:
    """Return the pairs of a file of pairs that mean the same (1) or do not (0).

    Args:
        path: rows of ``{"text1": ..., "text2": ..., "label": 0 or 1}``.

    Raises:
        DataError: the file is missing, empty, or has a malformed row; the message names file and line.
    """
    rows = read_json_lines(path)
    ratings = [row.number("label") for row in rows]
    for row, rating in zip(rows, ratings, strict=True):
        if rating not in (0.0, 1.0):
            raise DataError(f"{row.where}: 'label' is {rating:g}, and must be 0 or 1")
    return RatedPairs([row.text("text1") for row in rows], [row.text("text2") for row in rows], ratings)


def first_pairs(pairs: RatedPairs, limit: int | None) -> RatedPairs:
    """Return at most the first ``limit`` pairs.

    >>> first_pairs(RatedPairs(["a", "b"], ["c", "d"], [0.0, 5.0]), 1)
    RatedPairs(left=['a'], right=['c'], ratings=[0.0])
    """
    return RatedPairs(pairs.left[:limit], pairs.right[:limit], pairs.ratings[:limit])
