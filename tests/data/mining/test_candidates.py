"""Documents to pairs of texts: titles, offsets, repetitions, and the methods without a condition."""

import pytest

from gerund.data.corpus import Document
from gerund.data.mining.candidates import NOWHERE, MiningConfig, candidates_of, opening_of, pairs_of, prepare
from gerund.errors import ConfigError, GerundError

TEXT = "Spike is chasing Tom.  Nobody laughs.\nSpike is chasing Jerry. Spike is  chasing TOM. Is it over?"


def mined(text, title="", number=0, **settings):
    chosen = MiningConfig(**settings)
    document = prepare(Document(text, title), number, chosen)
    [pairs] = pairs_of([document], chosen)
    for pair in pairs:
        for one in pair[:2]:
            assert one.start == NOWHERE or document.text[one.start : one.end] == one.text or settings["method"] == "ict"
    return document, pairs


class TestTitles:
    def test_stand_nowhere(self):
        _, [pair, other] = mined(TEXT, "Spike is chasing cats")
        assert other.b.text == "Spike is chasing Jerry."
        assert (pair.a.start, pair.a.end, pair.a.text) == (-1, -1, "Spike is chasing cats")
        assert (pair.b.start, pair.b.end, pair.b.text, pair.span) == (0, 21, TEXT[:21], "spike is chasing")

    def test_the_first_sentence_takes_the_place_of_none(self):
        _, [pair] = mined(TEXT, " \n")
        assert (pair.a.start, pair.a.text, pair.b.text) == (0, "Spike is chasing Tom.", "Spike is chasing Jerry.")

    def test_a_sentence_that_is_the_title_is_no_pair(self):
        document, pairs = mined("Spike is chasing Tom. Nobody laughs.", "SPIKE is chasing Tom.")
        assert pairs == []
        assert (document.total, document.repeated, candidates_of(document, MiningConfig())) == (2, 1, 1)

    def test_are_paired_only_with_title(self):
        document, pairs = mined(TEXT, "Spike is chasing cats", pairs="all")
        assert [(one.a.start, one.b.start) for one in pairs] == [(0, 38)]
        assert (document.total, document.repeated, candidates_of(document, MiningConfig(pairs="all"))) == (5, 1, 6)

    def test_half_a_surrogate_pair(self):
        _, [pair] = mined("Spike is chasing Tom.", "Spike is chasing \ud800")
        assert pair.a.text == "Spike is chasing ?"


class TestOpenings:
    TEXT = "Spike is chasing Tom.  Nobody laughs.\nSpike is chasing Jerry."

    def opening(self, title="Spike is chasing", text=TEXT, **settings):
        config = MiningConfig(**settings)
        return opening_of(prepare(Document(text, title), 0, config), config)

    def test_are_whole_sentences(self):
        assert self.opening() == self.TEXT
        assert self.opening(context=50) == "Spike is chasing Tom.  Nobody laughs."
        assert self.opening(context=37) == "Spike is chasing Tom.  Nobody laughs."
        assert self.opening(context=36) == "Spike is chasing Tom."

    def test_of_a_longer_sentence_what_fits(self):
        assert self.opening(context=8) == "Spike is"

    def test_need_a_title_that_is_paired(self):
        assert self.opening(title="") is None
        assert self.opening(pairs="all") is None
        assert self.opening(method="ict") is None
        assert self.opening(method="none", max_uses=None) == self.TEXT


def test_chinese():
    text = "北京大学是中国的一所大学。它在北京。北京大学的图书馆很大！“北京大学”？"
    _, pairs = mined(text, "北京大学", language="zh")
    assert [(pair.b.text, pair.span) for pair in pairs] == [
        ("北京大学是中国的一所大学。", "北京大学"),
        ("北京大学的图书馆很大！", "北京大学"),
        ("“北京大学”？", "北京大学"),
    ]


def test_short_sentences_are_passed_over():
    document, _ = mined("Yes! Never! No! Always!", min_length=5)
    assert [one.text for one in document.sentences] == ["Never!", "Always!"]


@pytest.mark.parametrize("text", ["One sentence only, which is long enough.", "", "\n \n"])
def test_one_sentence_makes_no_pair(text):
    for settings in (dict(), dict(pairs="all"), dict(method="none"), dict(method="ict")):
        assert mined(text, **settings)[1] == []


def test_offsets_are_those_of_the_cleaned_text():
    text = "The great bridge over the wide and dangerous river\nwas built of stone and of wood. The great bridge fell."
    document, [pair] = mined(text, clean="gutenberg")
    assert "\n" not in document.text
    assert document.text[pair.b.start : pair.b.end] == "The great bridge fell."


class TestLimits:
    TEXT = " ".join(f"Spike is chasing number {number}." for number in range(10))

    def test_uses(self):
        _, pairs = mined(self.TEXT, "Spike is chasing", max_uses=3)
        assert len(pairs) == 3
        _, pairs = mined(self.TEXT, pairs="all", max_uses=2)
        places = [one.start for pair in pairs for one in pair[:2]]
        assert len(pairs) == 9
        assert max(map(places.count, places)) == 2
        assert len(mined(self.TEXT, pairs="all", max_uses=None)[1]) == 45

    def test_a_draw_of_a_document_depends_on_seed_and_document(self):
        def places(**more):
            return [(p.a.start, p.b.start) for p in mined(self.TEXT, pairs="all", per_document=5, **more)[1]]

        every = [(p.a.start, p.b.start) for p in mined(self.TEXT, pairs="all")[1]]
        assert places() == places()
        assert len(places()) == 5
        assert set(places()) < set(every)
        assert places() == sorted(places())
        assert len({tuple(places(seed=seed, number=number)) for seed in range(3) for number in range(3)}) == 9


class TestNone:
    def test_title_with_every_sentence(self):
        _, pairs = mined(TEXT, "A title", method="none", max_uses=None)
        assert [(pair.a.text, pair.span, pair.weight) for pair in pairs] == [("A title", None, None)] * 4
        assert len(mined(TEXT, "A title", method="none", max_uses=2)[1]) == 2

    def test_all(self):
        _, pairs = mined(TEXT, method="none", pairs="all", max_uses=1)
        assert [(pair.a.start, pair.b.start) for pair in pairs] == [(0, 23), (38, 85)]


class TestIct:
    def test_a_sentence_and_the_rest(self):
        sentences = ["First one here.", "Second one here.", "Third one here."]
        document, [pair] = mined(" ".join(sentences), method="ict")
        sentences.remove(pair.a.text)
        assert pair.b.text == " ".join(sentences)
        assert (pair.b.start, pair.b.end) == (0, len(document.text))
        drawn = {
            mined(" ".join(["First one here.", *sentences]), method="ict", seed=seed)[1][0].a.text for seed in range(20)
        }
        assert len(drawn) > 1

    def test_no_space_where_none_was(self):
        _, [pair] = mined("这是第一句。这是第二句。这是第三句。", method="ict", language="zh")
        assert " " not in pair.b.text
        assert len(pair.b.text) == 12

    def test_passages_are_whole_sentences(self):
        text = " ".join(f"This is sentence number {number}." for number in range(40))
        document, pairs = mined(text, method="ict", context=100)
        assert candidates_of(document, MiningConfig(method="ict", context=100)) == len(pairs) + 1 == 14
        assert all(pair.b.end - pair.b.start <= 100 for pair in pairs)


class TestCrops:
    def test_of_whole_words(self):
        text = " ".join(f"This is sentence number {number}." for number in range(200))
        document, pairs = mined(text, method="crops", context=500)
        assert len(pairs) > 10
        for pair in pairs:
            for crop in pair[:2]:
                assert f" {crop.text} " in f" {document.text} "
                assert len(crop.text) <= 300

    def test_of_chinese(self):
        _, [pair] = mined("这是第一句没有空格的话。" * 10 + "这是最后一句。", method="crops", language="zh")
        assert 0 < len(pair.a.text) < 120


class TestMistakes:
    @pytest.mark.parametrize(
        "settings, message",
        [
            (dict(method="lsc"), "unknown method 'lsc'; valid are: lcs, none, ict, crops"),
            (dict(pairs="every"), "unknown enumeration of pairs 'every'; valid are: title, all"),
            (dict(clean="html"), "unknown text cleaning 'html'"),
            (dict(language="English"), "is not a language code"),
            (dict(threshold=0), "threshold=0"),
            (dict(short_threshold=40), "short_threshold=40"),
            (dict(max_uses=0), "max_uses=0 is below 1"),
            (dict(per_document=0), "per_document=0 is below 1"),
            (dict(context=1, method="ict"), "context=1 is below 2"),
            (dict(context=99, pairs="all"), "context means nothing to pairs of all sentences"),
            (dict(short_characters=64), "give short_threshold"),
            (
                dict(method="none", short_threshold=20, short_characters=64),
                "short_threshold means nothing to the method none",
            ),
            (dict(method="none", threshold=10), "threshold means nothing to the method none"),
            (dict(method="ict", pairs="all"), "pairs means nothing to the method ict"),
            (dict(method="crops", max_uses=1), "max_uses means nothing to the method crops"),
            (dict(method="none", pairs="all", max_uses=None), "give max_uses"),
        ],
    )
    def test_are_refused(self, settings, message):
        with pytest.raises(GerundError, match=message) as caught:
            MiningConfig(**settings)
        assert isinstance(caught.value, ConfigError)
