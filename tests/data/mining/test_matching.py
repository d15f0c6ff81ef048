"""Symbol weights, shared windows and pairs against a slow, literal version of the rule."""

import random
import tracemalloc
import unicodedata
from time import perf_counter

import numpy as np
import pytest

from gerund.data.mining import Match, candidates, matching_pairs, substrings
from gerund.data.mining.candidates import Rule, find_pairs
from gerund.data.mining.substrings import LAST_LIGHT_LETTER, SymbolWeights, Texts, code_points, normalised
from gerund.errors import ConfigError, TextError
from tests.data.mining import reference


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


class TestFigure2:
    def test_nine_letters_are_too_few(self):
        assert matching_pairs(["Tom is chasing Jerry.", "Jerry is chasing Tom."]) == []

    def test_fourteen_letters_are_enough(self):
        found = matching_pairs(["Spike is chasing Tom.", "Spike is chasing Jerry."])
        assert found == [Match(0, 1, "spike is chasing", 14 * 3 + 2)]

    def test_what_the_first_pair_shares(self):
        # With the spaces around it, which the figure leaves out, it would weigh 30.
        [match] = matching_pairs(["Tom is chasing Jerry.", "Jerry is chasing Tom."], threshold=28)
        assert match == Match(0, 1, "is chasing", 9 * 3 + 1)
        assert matching_pairs(["Tom is chasing Jerry.", "Jerry is chasing Tom."], threshold=29) == []


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

    def test_equal_sentences_match(self):
        assert matching_pairs(["Long enough to match."] * 3, max_uses=1) == [
            Match(0, 1, "long enough to match.", 51 + 4)
        ]
        assert len(matching_pairs(["Long enough to match."] * 5)) == 10

    def test_the_leftmost_of_equally_heavy_spans(self):
        [match] = matching_pairs(["abcdefghij 1 klmnopqrst", "klmnopqrst 2 abcdefghij"])
        assert match.span == "abcdefghij"

    def test_short_texts(self):
        short, long = "我喜欢她", "别人都说喜欢她的那个人其实并不认识她本人"
        assert matching_pairs([short, long], 40) == []
        assert matching_pairs([short, long], 40, short_threshold=20) == [Match(0, 1, "喜欢她", 30)]
        assert matching_pairs([long, "x" + long[:3] + "汉" * 16], 40, short_threshold=20) == []

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


class TestSpans:
    @pytest.mark.sweep(quick=0, check=3)
    @pytest.mark.parametrize("seed", range(20))
    def test_are_common_and_maximal(self, seed):
        draw = random.Random(seed)
        words = ["alpha", "beta", "汉字", "gamma delta", "x", "1999", "...", "语言"]
        sentences = [" ".join(draw.choice(words) for _ in range(draw.randint(1, 40))) for _ in range(16)]
        forms = [normalised(sentence) for sentence in sentences]
        for match in matching_pairs(sentences):
            assert match.span in forms[match.i]
            assert match.span in forms[match.j]
            assert match.span == match.span.strip()
            assert SymbolWeights().of_text(match.span) == match.weight >= 30
            assert reference.heaviest(forms[match.i], forms[match.j], SymbolWeights()) == (match.weight, match.span)


class TestWorstCases:
    """Each of these took minutes or all memory where pairs, windows or places were multiplied out."""

    def quick(self, work, seconds, megabytes):
        begin = perf_counter()
        work()
        assert perf_counter() - begin < seconds
        tracemalloc.start()
        try:
            work()
            assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
        finally:
            tracemalloc.stop()

    def test_repeated_characters(self):
        sentences = ["a" * (1000 + number) for number in range(60)]
        self.quick(lambda: matching_pairs(sentences), 10, 150)

    @pytest.mark.slow
    def test_almost_repeated_characters(self):
        sentences = ["a" * 20_000 + "b" + "a" * 20_001, "a" * 20_002 + "c" + "a" * 19_999]
        [match] = matching_pairs(sentences)
        assert match.weight == 60_003
        self.quick(lambda: matching_pairs(sentences), 10, 100)

    def test_thousands_of_identical_sentences(self):
        sentences = ["All rights reserved; see the terms of use, which nobody reads."] * 3000
        self.quick(lambda: matching_pairs(sentences, max_uses=4), 10, 150)
        found = matching_pairs(sentences, max_uses=4)
        assert len(found) == 6000

    @pytest.mark.slow
    def test_thousands_of_alike_sentences(self):
        sentences = [f"This is page {number} of the {number * 7} pages of this long report." for number in range(4000)]
        self.quick(lambda: matching_pairs(sentences, max_uses=2), 20, 150)

    def test_a_title_that_everything_shares(self):
        sentences = ["The history of the town"] + [f"The history of the town, part {number}." for number in range(5000)]
        found = find_pairs([[normalised(one) for one in sentences]], Rule(), titled=True)
        assert len(found.spans) == 5000

    @pytest.mark.slow
    def test_a_very_long_line(self):
        text = "".join(map(chr, np.random.default_rng(0).integers(97, 123, 500_000)))
        self.quick(lambda: matching_pairs([text, text[1000:], "unrelated words"]), 10, 300)


def test_texts_know_their_stretches():
    texts = Texts([["ab c", ""], ["🙂d"]], SymbolWeights())
    assert (len(texts), [texts.text(number) for number in range(3)]) == (3, ["ab c", "", "🙂d"])
    assert texts.total_weights().tolist() == [10, 0, 4]
    assert texts.document.tolist() == [0, 0, 1]
