"""Weights of symbols against Unicode's own tables, and normalised forms."""

import unicodedata

import numpy as np
import pytest

from gerund.data.mining.substrings import LAST_LIGHT_LETTER, SymbolWeights, code_points, normalised


def test_every_symbol_weighs_what_its_category_says():
    letter = np.array([unicodedata.category(chr(code))[0] == "L" for code in range(0x110000)])
    heavy = np.arange(0x110000) > LAST_LIGHT_LETTER
    expected = np.where(letter, np.where(heavy, 10, 3), 1)
    np.testing.assert_array_equal(SymbolWeights().of(np.arange(0x110000)), expected)


@pytest.mark.parametrize(
    "text, weight",
    [
        ("abc", 9),
        ("汉字", 20),
        ("かな", 20),
        ("한글", 20),
        ("é", 3),
        ("e\u0301", 4),
        ("7.", 2),
        ("🙂", 1),
        ("\u2710", 1),
        ("", 0),
    ],
)
def test_weights(text, weight):
    assert SymbolWeights().of_text(text) == weight


@pytest.mark.parametrize(
    "text, form",
    [
        (" A\t\tB \n", "a b"),
        ("ＡＢＣ　ｄ", "abc d"),
        ("e\u0301", "é"),
        ("ﬁn", "fin"),
        ("İ", "i̇"),
        ("\u00a0x\u2028y\u3000", "x y"),
        ("\x00", "\x00"),
        ("Photo\u00adsyn\u200bthesis", "photosynthesis"),
        ("reor-\nganised", "reorganised"),
    ],
)
def test_normalised(text, form):
    assert normalised(text) == form
    assert normalised(form) == form


def test_code_points_beyond_the_first_plane_are_one_each():
    assert code_points("a🙂\ud800").tolist() == [97, 0x1F642, 0xD800]
