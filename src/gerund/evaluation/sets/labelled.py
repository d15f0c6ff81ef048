"""Texts with a class each, in splits or in one file, and pairs of texts with a rating each.

Knows: rows of ``text`` and ``label``, the two formats of pairs, names of splits. Does not know: what is measured.
"""

from collections import Counter
from pathlib import Path

from gerund.errors import DataError
from gerund.evaluation.sets.rows import read_json_lines, read_tab_lines
from gerund.evaluation.task import LabelledTexts, RatedPairs

ENDINGS = (".jsonl", ".jsonl.xz", ".jsonl.gz")
# What published sets call a split; the first file that is there counts.
_SPLITS = {"train": ("train",), "validation": ("valid", "validation", "dev"), "test": ("test",)}
_LISTED = 10


def read_labelled(path: Path) -> LabelledTexts:
    """Return the texts and labels of a .jsonl file (or .jsonl.xz, .jsonl.gz), in its order.

    Args:
        path: rows of ``{"text": ..., "label": ...}``; a label is a text or a whole number.

    Raises:
        DataError: the file is missing, empty, or has a malformed row; the message names file and line.
    """
    rows = read_json_lines(path)
    return LabelledTexts([row.text("text") for row in rows], [row.label("label") for row in rows])


def labelled_splits(folder: Path) -> dict[str, Path]:
    """Return which of ``train``, ``validation`` and ``test`` a folder has, and their files.

    ``valid``, ``validation`` and ``dev`` all count as validation.
    """
    found = {}
    for split, names in _SPLITS.items():
        paths = (folder / f"{name}{ending}" for name in names for ending in ENDINGS)
        path = next((path for path in paths if path.is_file()), None)
        if path is not None:
            found[split] = path
    return found


def named_files(folder: Path, endings: tuple[str, ...] = ENDINGS) -> dict[str, Path]:
    """Return the files of a folder that end so, by their names without the ending, sorted.

    Nothing where there is no such folder; of two files of one name the ending that is listed first counts.
    """
    found: dict[str, Path] = {}
    for ending in endings:
        for path in folder.glob(f"*{ending}"):
            found.setdefault(path.name.removesuffix(ending), path)
    return dict(sorted(found.items()))


def check_labels(
    train: LabelledTexts, test: LabelledTexts, *, train_path: Path, test_path: Path, at_least: int = 1
) -> None:
    """Refuse training data that a classifier cannot learn the test set's classes from.

    Args:
        train: what is learnt from.
        test: what is scored.
        train_path: where ``train`` was read, for the message.
        test_path: where ``test`` was read, for the message.
        at_least: how many training examples a class needs: 1 for few-shot samples, 2 where a class is
            interpolated between neighbours (SMOTE).

    Raises:
        DataError: a label is only in the test set, a class has too few training examples, or there is only
            one class; the message names the file and the labels (the first ten).
    """
    counts = Counter(train.labels)
    unseen = sorted(set(test.labels) - counts.keys())
    if unseen:
        raise DataError(f"{train_path}: no example of {_some(unseen)}, which {test_path} asks for")
    if len(counts) < 2:
        raise DataError(f"{train_path}: every example has the label {train.labels[0]!r}; two classes are needed")
    rare = sorted(label for label, count in counts.items() if count < at_least)
    if rare:
        raise DataError(f"{train_path}: fewer than {at_least} examples of {_some(rare)}; add some or drop the class")


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


def _some(labels: list[str]) -> str:
    """Name up to ten labels.

    >>> _some(["a", "b"])
    "label 'a', 'b'"
    """
    more = f" and {len(labels) - _LISTED} more" if len(labels) > _LISTED else ""
    return f"label {', '.join(map(repr, labels[:_LISTED]))}{more}"
