"""One form for texts that read the same, and where its stretches stand in them."""

import random
import time
import unicodedata

import pytest

from gerund.text_analysis import Alignment, Analyzer, halves, joined_lines, normalized

PHOTO = "photosynthesis"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (unicodedata.normalize("NFD", "Genève, Müller, 한국어, ガ"), "Genève, Müller, 한국어, ガ"),
        ("photo\u00adsynthesis", PHOTO),
        ("photo\u200bsynthesis", PHOTO),
        ("photo\u2060syn\ufeffthesis\u200e", PHOTO),
        ("photo\u200dsyn\u200cthesis", PHOTO),
        ("photo-\nsynthesis", PHOTO),
        ("photo- \r\n  synthesis", PHOTO),
        ("photo\u2010\nsynthesis", PHOTO),
        ("photo\u00ad\nsynthesis", PHOTO),
        ("photo-\u200b\n\nsynthesis", PHOTO),
        ("cafe\u0301-\nteria", "caféteria"),
        ("ef\ufb01ciency", "efficiency"),
        ("ＡＢＣ１２３", "ABC123"),
        ("ｶﾞｷﾞ", "ガギ"),
        ("葛\U000e0100城", "葛城"),
    ],
)
def test_what_reads_the_same_is_the_same(text, wanted):
    assert normalized(text) == wanted
    assert normalized(wanted) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "Plain ASCII, with don't, x-y and 3.14.\n- a list-\n\n- Another\n",
        "Jean-\nPaul, 1990-\n1995, a -\nb",
        "Haus-\nund Gartenarbeit",
        "é ü ß 北京 한국 ไทย हिन्दी",
        "می\u200cخواهم",  # a joiner that shapes letters
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f",  # and one that puts emoji together
        "\u200b",
        "",
    ],
)
def test_what_has_its_form_stays(text):
    assert normalized(text) == text
    assert joined_lines(text) == text
    assert Alignment(text).original(0, len(text)) == (0, len(text))


def test_joining_lines_changes_nothing_else():
    text = "reor-\nganised ef\ufb01cient \u200b"
    assert joined_lines(text) == "reorganised ef\ufb01cient \u200b"
    assert halves(text) == ["reor ganised"]


def test_stretches_are_those_of_the_text():
    text = "Die scho\u0308ne Photo\u00adsyn-\nthese ef\ufb01zient \u00bd."
    aligned = Alignment(text)
    assert aligned.text == "Die schöne Photosynthese effizient 1\u20442."
    for word, wanted in {
        "Die": "Die",
        "schöne": "scho\u0308ne",
        "Photosynthese": "Photo\u00adsyn-\nthese",
        "effizient": "ef\ufb01zient",
        "1\u20442": "\u00bd",
        "ö": "o\u0308",
        "fizi": "\ufb01zi",  # half of a ligature is the whole
    }.items():
        start = aligned.text.index(word)
        first, end = aligned.original(start, start + len(word))
        assert text[first:end] == wanted
    assert aligned.original(5, 5)[0] == aligned.original(5, 5)[1]


def test_every_stretch_of_random_texts_is_aligned():
    rng = random.Random(0)
    parts = [
        "a",
        "e\u0301",
        "o\u0308\u0323",
        "\u00ad",
        "\u200b",
        "-\nb",
        "\ufb03",
        "ｶﾞ",
        "\u1112\u1161\u11ab",
        "北",
        " ",
        "\u200d",
        "\ufdfa",
    ]
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 12)))
        aligned = Alignment(text)
        spans = [aligned.original(place, place + 1) for place in range(len(aligned.text))]
        assert all(0 <= start < end <= len(text) for start, end in spans)
        assert spans == sorted(spans)
        assert normalized(aligned.text) == aligned.text


@pytest.mark.parametrize(
    "unit", ["\u200d", "a\u200d", "a\u00ad", "-\n", "a-\n", "\u200b\u200d", "\u0301", "a- ", "\u00ad\n"]
)
def test_hostile_texts_take_no_longer_than_others(unit):
    begin = time.process_time()
    for text in (unit * 20_000, "a" + unit * 20_000):
        normalized(text)
        joined_lines(text)
        halves(text)
        Analyzer("en").document(text)
    assert time.process_time() - begin < 10  # with anything quadratic it takes minutes
