"""Symbol weights, shared windows and pairs against a slow, literal version of the rule."""

import random
import tracemalloc
import unicodedata
from time import perf_counter

import numpy as np
import pytest

from gerund.data.mining import Match, candidates, matching_pairs, substrings
from gerund.data.mining.candidates import Rule, find_pairs
from gerund.data.mining.substrings import LAST_LIGHT_LETTER, SymbolWeights, normalised
from gerund.errors import ConfigError, TextError
from tests.data.mining import reference


def test_every_symbol_weighs_what_its_category_says():
    letter = np.array([unicodedata.category(chr(code))[0] == "L" for code in range(0x110000)])
    heavy = np.arange(0x110000) > LAST_LIGHT_LETTER
    expected = np.where(letter, np.where(heavy, 10, 3), 1)
    np.testing.assert_array_equal(SymbolWeights().of(np.arange(0x110000)), expected)


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


ALPHABETS = {
    "one letter": "a",
    "two letters": "ab",
    "letters and spaces": "ab ",
    "han and latin": "汉字ab 。",
    "combining marks": "e\u0301a\u0308b",
    "astral": "🙂𝔸𐐷a\U00020000",
    "controls": "a\x00\x01b\u200d",
    "many letters": "abcdefgh ",
}


def rows(found):
    return list(zip(*found.columns(), strict=True))


def drawn(draw, alphabet, most=7, length=30):
    texts = [
        "".join(draw.choice(alphabet) for _ in range(draw.randint(0, length))) for _ in range(draw.randint(0, most))
    ]
    # Copies, prefixes and repetitions are what goes wrong.
    if texts and draw.random() < 0.5:
        text = draw.choice(texts)
        texts.insert(draw.randrange(len(texts) + 1), draw.choice([text, text[3:], text * 2, text[::-1]]))
    return [normalised(text) for text in texts]


def check(draw, alphabet):
    sentences = drawn(draw, alphabet)
    threshold = draw.choice([1, 3, 5, 9, 10, 12, 20, 30, 31])
    short = draw.choice([None, max(1, threshold * 2 // 3)])
    rule = Rule(threshold, short, short_characters=draw.choice([None, 1, 12, 25]) if short else None)
    wanted = reference.pairs(sentences, rule)
    assert rows(find_pairs([sentences], rule)) == wanted
    for uses in (1, 2):
        assert rows(find_pairs([sentences], rule, max_uses=uses)) == reference.limited(wanted, uses)
    titled = [row for row in wanted if row[0] == 0]
    assert rows(find_pairs([sentences], rule, titled=True)) == titled
    assert rows(find_pairs([sentences], rule, titled=True, max_uses=2)) == titled[:2]
    # Documents side by side do not see each other.
    n = len(sentences)
    moved = [(i + n, j + n, span, weight) for i, j, span, weight in wanted]
    assert rows(find_pairs([sentences, [], sentences], rule)) == wanted + moved
    return len(wanted)


EACH_ALPHABET = pytest.mark.parametrize("alphabet", ALPHABETS.values(), ids=ALPHABETS.keys())


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("part", range(4))
@EACH_ALPHABET
def test_equal_to_all_substrings(alphabet, part):
    draw = random.Random(4 * len(alphabet) + part)
    assert sum(check(draw, alphabet) for _ in range(30)) > 25


@pytest.mark.slow
def test_other_weights_equal_to_all_substrings():
    draw = random.Random(1)
    for weights in (SymbolWeights(1, 1, 1), SymbolWeights(1, 2, 50), SymbolWeights(1000, 300, 100)):
        for _ in range(60):
            sentences = drawn(draw, "汉ab ")
            rule = Rule(weights.letter * 5, None, weights)
            assert rows(find_pairs([sentences], rule)) == reference.pairs(sentences, rule)


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("bits", [0, 3])
@EACH_ALPHABET
def test_colliding_hashes_decide_nothing(monkeypatch, alphabet, bits):
    own = substrings.mixed
    monkeypatch.setattr(substrings, "mixed", lambda *given: own(*given) & np.uint64(2**bits - 1))
    draw = random.Random(2)
    assert sum(check(draw, alphabet) for _ in range(15)) > 5


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("bits", [2, 64])
@EACH_ALPHABET
def test_the_search_over_weights_finds_the_same_spans(monkeypatch, alphabet, bits):
    # Every pair goes that way now, and none is settled by one text containing the other.
    monkeypatch.setattr(substrings, "_SEEDS_A_SYMBOL", -1000)
    own = substrings.mixed
    monkeypatch.setattr(substrings, "mixed", lambda *given: own(*given) & np.uint64(2**bits - 1))
    draw = random.Random(3)
    assert sum(check(draw, alphabet) for _ in range(15)) > 5


def test_small_chunks_change_nothing(monkeypatch):
    for module in (substrings, candidates):
        monkeypatch.setattr(module, "CHUNK", 8)
    draw = random.Random(4)
    for alphabet in ALPHABETS.values():
        check(draw, alphabet)


def test_figure_2():
    """GUR: nine letters in common are too few, and fourteen are enough."""
    few = ["Tom is chasing Jerry.", "Jerry is chasing Tom."]
    assert matching_pairs(few) == matching_pairs(few, threshold=29) == []
    # With the spaces around it, which the figure leaves out, it would weigh 30.
    assert matching_pairs(few, threshold=28) == [Match(0, 1, "is chasing", 9 * 3 + 1)]
    enough = ["Spike is chasing Tom.", "Spike is chasing Jerry."]
    assert matching_pairs(enough) == [Match(0, 1, "spike is chasing", 14 * 3 + 2)]


class TestRule:
    def test_exactly_the_threshold(self):
        ten, nine = "abcdefghij", "abcdefghi"
        assert matching_pairs([f"1{ten}2", f"3{ten}4"]) == [Match(0, 1, ten, 30)]
        assert matching_pairs([f"1{nine}2", f"3{nine}4"]) == []
        assert matching_pairs(["我喜欢你", "他喜欢你"]) == [Match(0, 1, "喜欢你", 30)]
        assert matching_pairs(["我喜欢你", "他喜欢她"]) == []
        assert matching_pairs(["1我喜abc 2", "3我喜abc 4"]) == []
        assert matching_pairs(["1我喜abc 22", "3我喜abc 22"]) == [Match(0, 1, "我喜abc 22", 32)]

    def test_forms_are_compared(self):
        assert matching_pairs(["The　Ｂｉｇ\nＢａｎｇ theory", "the big bang THEORY"]) == [
            Match(0, 1, "the big bang theory", 16 * 3 + 3)
        ]
        # One letter with an accent, composed or not.
        [match] = matching_pairs(["cafe\u0301 de la gare", "Café de la Gare!"])
        assert match.span == "café de la gare"

    def test_short_texts_by_their_characters(self):
        """GUR, section IV-A: below 64 characters two Chinese characters in common, else three."""
        texts = ["喜欢" + "一" * 61, "喜欢" + "二" * 61, "喜欢" + "三" * 62, "喜欢她" + "四" * 61, "喜欢她" + "五" * 61]
        assert [len(text) for text in texts] == [63, 63, 64, 64, 64]
        found = matching_pairs(texts, 30, short_threshold=20, short_characters=64)
        # A short text and a long one are no short pair.
        assert found == [Match(0, 1, "喜欢", 20), Match(3, 4, "喜欢她", 30)]
        greedy = matching_pairs(texts, 30, 1, short_threshold=20, short_characters=64)
        assert greedy == found
        assert matching_pairs(texts, 30) == [Match(3, 4, "喜欢她", 30)]

    def test_nothing_to_compare(self):
        assert matching_pairs([]) == matching_pairs([""]) == matching_pairs(["", " ", "\x00"]) == []
        assert matching_pairs(["Alone in this document."]) == []
        assert matching_pairs(["\ud800 half a surrogate pair", "\ud800 half a surrogate pair"]) != []

    @pytest.mark.parametrize(
        "settings, message",
        [
            (dict(threshold=0), "threshold=0"),
            (dict(max_uses=0), "max_uses=0"),
            (dict(short_threshold=31), "short_threshold=31 is not between 1 and the threshold, 30"),
            (dict(short_characters=64), "give short_threshold"),
            (dict(short_threshold=20, short_characters=0), "short_characters=0 makes no text a short one"),
        ],
    )
    def test_mistakes(self, settings, message):
        with pytest.raises(ConfigError, match=message):
            matching_pairs(["a", "b"], **settings)

    @pytest.mark.parametrize("sentences", ["one text", ["one", 2], None, 3])
    def test_sentences_are_a_list_of_strings(self, sentences):
        with pytest.raises(TextError, match="a list of strings"):
            matching_pairs(sentences)

    @pytest.mark.parametrize("weight", [0, -1, 1.5, True])
    def test_weights_are_whole_and_positive(self, weight):
        with pytest.raises(ConfigError, match="letter="):
            SymbolWeights(letter=weight)


# Each of these took minutes or all memory where pairs, windows or places were multiplied out: the sentences, how often
# each may be used, how many pairs they make, and seconds and megabytes that are enough.
WORST = {
    "repeated": (lambda: ["a" * (1000 + number) for number in range(60)], None, 1770, 10, 150),
    "almost repeated": (
        lambda: ["a" * 20_000 + "b" + "a" * 20_001, "a" * 20_002 + "c" + "a" * 19_999], None, 1, 10, 100),
    "identical": (lambda: ["All rights reserved; see the terms of use, which nobody reads."] * 3000, 4, 6000, 10, 150),
    "alike": (
        lambda: [f"This is page {n} of the {n * 7} pages of this long report." for n in range(4000)], 2, 3999, 20, 150),
    "a long line": (lambda: [LONG, LONG[1000:], "unrelated words"], None, 1, 10, 300),
}  # fmt: skip
LONG = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 500_000)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("repeated", "identical") else pytest.mark.slow) for name in WORST]
)
def test_worst_cases(name):
    make, uses, pairs, seconds, megabytes = WORST[name]
    sentences = make()
    begin = perf_counter()
    assert len(matching_pairs(sentences, max_uses=uses)) == pairs
    assert perf_counter() - begin < seconds
    tracemalloc.start()
    try:
        matching_pairs(sentences, max_uses=uses)
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


def test_a_title_that_everything_shares():
    sentences = ["The history of the town"] + [f"The history of the town, part {number}." for number in range(5000)]
    found = find_pairs([[normalised(one) for one in sentences]], Rule(), titled=True)
    assert len(found.spans) == 5000
