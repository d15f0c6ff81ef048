"""Words as a search compares them, in every script."""

import random

import pytest
import sentencex

from gerund.data.passages import sentence_bounds
from gerund.papers.generated_texts import sentences_of
from gerund.text_analysis import Analyzer, overlap_words, segments, stop_words

ENGLISH = Analyzer("en")


@pytest.mark.parametrize(
    ("document", "query"),
    [
        ("中国的首都是北京。", "首都"),
        ("中国的首都是北京。", "国"),
        ("日本の首都は東京です。", "東京"),
        ("ラーメンを食べる", "ラーメン"),
        ("서울은 대한민국의 수도이다.", "서울"),
        ("서울은 대한민국의 수도이다.", "수도는"),
        ("กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", "เมืองหลวง"),
        ("ນະຄອນຫຼວງວຽງຈັນ", "ວຽງຈັນ"),
        ("iPhone手机", "手机"),
        ("iPhone手机", "iphone"),
        ("हिन्दी भाषा", "हिन्दी"),
        ("Москва́ — столица", "столицей Москва"),
        ("ΑΘΗΝΑ", "Αθήνα"),
        ("أحمد", "احمد"),
        ("The résumé of Genève", "resume"),
        ("Łódź, Ærø, Straße", "lodz aero strasse"),
        ("H₂O and m²", "h2o m2"),
        ("0123456789abcdef" * 8, "0123456789ABCDEF" * 8),
    ],
)
def test_words_are_found_by_their_script(document, query):
    assert ENGLISH.content(query) <= set(ENGLISH.document(document))


@pytest.mark.parametrize(
    ("query", "content"),
    [
        ("What is the capital of China?", {"capit", "china"}),
        ("中国的首都是什么？", {"中国", "首都"}),
        ("水是什么？", {"水"}),
        ("日本の首都は何ですか", {"日本", "首都"}),
        ("猫は何ですか", {"猫"}),
        ("서울은 어디입니까?", {"서울"}),
        ("ใครเป็นครู", {"ครู"}),
        ("Где находится столица?", {"наход", "столиц"}),
        ("The Who", set()),
        ("什么是的", set()),
    ],
)
def test_what_a_question_is_about(query, content):
    assert ENGLISH.content(query) == content
    assert ENGLISH.query(query)  # stop words alone are searched too


def test_a_character_that_may_be_of_a_word_is_searched_with_its_neighbour():
    # 的 is a stop word, but not in 目的.
    assert "目的" in ENGLISH.query("目的")
    assert "目的" not in ENGLISH.content("目的")


@pytest.mark.parametrize("language", ["de", "fr", "ru", "sv", "ta"])
def test_a_language_has_its_own_stems(language):
    one, other = {
        "de": ("Häuser", "Hauses"), "fr": ("nationales", "nationaux"), "ru": ("столицей", "столица"),
        "sv": ("flickorna", "flickor"), "ta": ("பூக்கள்", "பூக்கள்"),
    }[language]  # fmt: skip
    analyzer = Analyzer(language)
    assert analyzer.document(one) == analyzer.document(other)


def test_of_a_word_that_is_all_ending_the_word_is_left():
    assert Analyzer("ne").document("छ") == ["छ"]


def test_stop_words_are_those_of_the_language():
    assert Analyzer("de").query("Wo ist der Hund?") == ["hund"]
    assert Analyzer("de").query("der die das") == ["der", "die", "das"]
    assert stop_words("de") > {"der", "und"}
    assert stop_words("xx") == frozenset()


def test_a_phrase_stands_in_a_text_one_term_behind_the_other():
    for text, phrase in [
        ("中国的首都是北京。", "国的首都"),
        ("It is made of flour.", "made of"),
        ("The Who", "the who"),
    ]:
        terms, wanted = ENGLISH.document(text), ENGLISH.phrase(phrase)
        assert any(terms[place : place + len(wanted)] == wanted for place in range(len(terms)))
    assert ENGLISH.phrase("首都国的")[:3] != ENGLISH.phrase("国的首都")[:3]


def test_words_divided_at_a_line_end_are_found_whole_and_in_halves():
    terms = ENGLISH.document("A well-\nknown, reor-\nganised house")
    assert {"wellknown", "well", "known", "reorganis"} <= set(terms)
    assert terms[:4] == ["a", "wellknown", "reorganis", "hous"]


def test_where_the_words_of_a_query_stand():
    text = "Die Mu\u0308hle von 北京 mahlt; die Mühlen."
    found = Analyzer("de").matches(text, "Mühle in 北京")
    assert [text[start:end] for start, end in found] == ["Mu\u0308hle", "北京", "Mühlen"]
    assert ENGLISH.matches(text, "zebra") == []


def test_words_of_overlap_are_those_between_spaces():
    assert overlap_words("a b-c d.") == ["a", "b-c", "d."]
    assert overlap_words("Zürich: 北京市!") == ["Zürich:", "北", "京", "市", "!"]


@pytest.mark.parametrize("space", ["\xa0", "\u2003", "\u3000", "\u2028", "\x85", "\u202f", " \xa0", "\xa0\xa0"])
@pytest.mark.parametrize("language", ["en", "de", "zh"])
def test_white_space_of_several_bytes_before_a_full_stop(space: str, language: str) -> None:
    text = f"The plan W{space}.D was his. It failed."
    assert segments(text, language)[-1] == "It failed."
    assert "".join(segments(text, language)).split() == text.split()
    (first, last), *_ = sentence_bounds(text, language)
    assert text[first:last].startswith("The plan")
    assert sentences_of(text)[-1] == "It failed."


def test_any_text_is_cut_without_loss() -> None:
    generator = random.Random(0)
    for _ in range(3000):
        text = "".join(generator.choices("Wab \xa0\u3000é.D,!?\n\"'(1)。", k=generator.randint(0, 30)))
        assert "".join("".join(segments(text)).split()) == "".join(text.split())


def test_other_texts_are_cut_as_ever() -> None:
    for text in ("Mr. Smith left.  He left. He", "a\xa0.b C. He", "One.\n\nTwo!", ""):
        assert segments(text) == list(sentencex.segment("en", text))


def test_where_the_splitter_panics_lines_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As PyO3's: no Exception."""

    def panics(language: str, text: str) -> list[str]:
        del language, text
        raise PanicException("byte index 1 is not a char boundary")

    monkeypatch.setattr(sentencex, "segment", panics)
    assert segments("One. Two.\nThree.") == ["One. Two.\n", "Three."]
    assert sentence_bounds("One. Two.\nThree.") == [(0, 9), (10, 16)]
