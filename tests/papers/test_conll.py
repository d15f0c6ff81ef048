from pathlib import Path

import pytest

from gerund.errors import DataError
from gerund.papers.token_labels import conll_splits, read_conll

GOOD = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

-DOCSTART- -X- -X- O

10\u00a0000 CD I-NP O
"""


def write(folder: Path, text: str | bytes, name: str = "train.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_sentences_and_tags(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, GOOD))
    assert sentences.words == [["EU", "rejects"], ["10\u00a0000"]]
    assert sentences.tags == {
        "pos": [["NNP", "VBZ"], ["CD"]],
        "chunk": [["I-NP", "I-VP"], ["I-NP"]],
        "ner": [["I-ORG", "O"], ["O"]],
    }


@pytest.mark.parametrize(
    "text",
    [
        GOOD.rstrip(),  # no line break at the end
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.replace(" ", "\t"),
        GOOD.replace("\n\n", "\n \n\n\n"),
        "\n\n" + GOOD,
        # Without a blank line after it.
        GOOD.replace("O O\n\n", "O O\n"),
    ],
)
def test_other_spellings_of_the_same(tmp_path: Path, text: str) -> None:
    assert read_conll(write(tmp_path, text)) == read_conll(write(tmp_path, GOOD, "other"))


def test_the_first_sentences(tmp_path: Path) -> None:
    sentences = read_conll(write(tmp_path, GOOD))
    assert sentences.first(None) == sentences
    assert sentences.first(5) == sentences
    assert sentences.first(1).words == [["EU", "rejects"]]
    assert sentences.first(1).tags["ner"] == [["I-ORG", "O"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no sentence"),
        ("\n\n", "no sentence"),
        ("-DOCSTART- -X- O O\n\n", "no sentence"),
        (GOOD + "one two three\n", r"train.txt, line 9: expected a word and 3 tags \(pos, chunk, ner\), found 3"),
        (GOOD + "one CD I-NP O extra\n", "line 9: .*found 5"),
        (GOOD + "one\n", "line 9: .*found 1"),
        (GOOD + "one CD I-NP PER\n", "line 9: the ner tag 'PER' is none of O, B-TYPE and I-TYPE"),
        (GOOD + "one CD E-NP O\n", "line 9: the chunk tag 'E-NP'"),
        (GOOD + "one CD I- O\n", "line 9: the chunk tag 'I-'"),
        (GOOD + "\u00a0 CD I-NP O\n", "line 9: the word is white space"),
        (b"caf\xe9 NN I-NP O\n", "line 1: not valid UTF-8"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_conll(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.txt: no such file"):
        read_conll(tmp_path / "none.txt")


def test_splits_by_either_name(tmp_path: Path) -> None:
    assert conll_splits(tmp_path) == {}
    for name in ("test.txt", "eng.train", "valid.txt", "train.txt", "README"):
        write(tmp_path, GOOD, name)
    assert conll_splits(tmp_path) == {
        "train": tmp_path / "eng.train",
        "validation": tmp_path / "valid.txt",
        "test": tmp_path / "test.txt",
    }


def test_official_counts(data_folder: Path) -> None:
    splits = conll_splits(data_folder / "tokens" / "conll2003")
    assert list(splits) == ["train", "validation", "test"]
    testb = read_conll(splits["test"])
    assert (len(testb.words), sum(map(len, testb.words))) == (3453, 46435)
