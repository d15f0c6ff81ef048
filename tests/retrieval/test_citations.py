"""Numbers in brackets: those that no source has go, however the text comes in pieces."""

import random

import pytest

from gerund.retrieval.question_answering import Citations


def checked(text, count):
    citations = Citations(count)
    return citations.put(text) + citations.end(), citations.cited, citations.dropped


@pytest.mark.parametrize(
    ("text", "kept", "cited", "dropped"),
    [
        ("In 1825 [1].", "In 1825 [1].", [1], []), ("In 1825[1][2].", "In 1825[1][2].", [1, 2], []),
        ("In 1825 [4].", "In 1825.", [], [4]), ("a [0] b", "a b", [], [0]), ("a [2, 9] b", "a [2] b", [2], [9]),
        ("a [1-3] b", "a [1-3] b", [1, 2, 3], []), ("a [2-5]", "a [2, 3]", [2, 3], [4, 5]),
        ("a [3\u20132]", "a [3\u20132]", [3, 2], []), ("in [1825] [x] [] [1", "in [1825] [x] [] [1", [], []),
        ("a [ 1 ; 2 ] [1]", "a [ 1 ; 2 ] [1]", [1, 2], []), ("", "", [], []), ("a  [7]\n [8]b", "a\nb", [], [7, 8]),
    ],
)  # fmt: skip
def test_what_stays_and_what_goes(text, kept, cited, dropped):
    assert checked(text, 3) == (kept, cited, dropped)


def test_pieces_make_the_same_as_the_whole():
    draw = random.Random(0)
    parts = ["a", " ", "[", "]", "1", "2", "7", ",", ", ", "-", "\n", "[1]", " [9]"]
    for _ in range(400):
        text = "".join(draw.choices(parts, k=24))
        citations, given, at = Citations(2), "", 0
        while at < len(text):
            step = draw.randint(1, 4)
            given += citations.put(text[at : at + step])
            at += step
        given += citations.end()
        assert (given, citations.cited, citations.dropped) == checked(text, 2), text


def test_nothing_is_held_back_for_longer_than_needed():
    citations = Citations(1)
    assert citations.put("word") == "word"
    assert citations.put(" [") == ""
    assert citations.put("x") == " [x"
