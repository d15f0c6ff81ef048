"""Repetition and overlap, against slow counts of what the definitions say."""

import random
from collections import Counter

import pytest

from gerund.papers.generated_texts import rep_n, rep_sentences, rep_window, sentences_of
from gerund.scoring.word_overlap import STOP_WORDS, OverlapScorer, content_overlap, overlap, words_of
from tests.scoring.test_likelihood import slow_content_overlap


def texts():
    """Yield random short texts over few words, so that much repeats."""
    draw = random.Random(0)
    for _ in range(60):
        yield [draw.choice("abcde") for _ in range(draw.randrange(1, 40))]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rep_n_counts_every_gram_beyond_its_first(n):
    for words in texts():
        grams = Counter(" ".join(words[start : start + n]) for start in range(len(words)) if start + n <= len(words))
        again = sum(count - 1 for count in grams.values())
        assert rep_n(words, n) == pytest.approx(again / grams.total() if grams else 0.0)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_rep_window_looks_back_into_the_prefix(window):
    for words in texts():
        cut = len(words) // 3
        copied = 0
        for place in range(cut, len(words)):
            before = [words[other] for other in range(len(words)) if place - window <= other < place]
            copied += words[place] in before
        assert rep_window(words[cut:], words[:cut], window=window) == pytest.approx(copied / (len(words) - cut))


def test_a_token_beyond_the_window_is_no_copy():
    assert rep_window(["a", *"0123456789ABCDEFGHI", "a"]) == pytest.approx(1 / 21)
    assert rep_window(["a", *"0123456789ABCDEFGHIJ", "a"]) == 0


def test_overlap_counts_occurrences():
    for words in texts():
        cut = len(words) // 3
        hits = [word for word in words[cut:] if words[:cut].count(word) > 0]
        assert overlap(words[cut:], words[:cut]) == pytest.approx(len(hits) / len(words[cut:]))


def test_measures_take_token_ids_as_well():
    assert rep_n([5, 6, 5, 6], 2) == pytest.approx(1 / 3)
    assert rep_window([5, 6, 5], [6]) == pytest.approx(2 / 3)
    assert overlap([5, 6], [6]) == 0.5


def test_nothing_and_too_little_do_not_repeat():
    assert rep_n([], 1) == rep_n(["a", "a", "a"], 4) == 0
    assert rep_sentences([]) == rep_sentences(["One."]) == 0
    assert rep_window([]) == rep_window([], ["a"]) == rep_window(["a"]) == 0
    assert overlap([], ["a"]) == overlap(["a"], []) == 0


def test_a_loop_is_nearly_all_repetition():
    words = ["so", "it", "goes"] * 100
    assert rep_n(words, 4) > 0.98
    assert rep_window(words) == pytest.approx(297 / 300)
    assert rep_sentences(sentences_of("He was a king. " * 50)) == pytest.approx(49 / 50)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n ", []),
        ("One", ["One"]),
        ("It cost 3.50 dollars.\n\n\nMr. Smith paid.", ["It cost 3.50 dollars.", "Mr. Smith paid."]),
        (" leading space. Then more! ", ["leading space.", "Then more!"]),
    ],
)
def test_sentences(text, sentences):
    assert sentences_of(text) == sentences


def test_words_keep_case_and_punctuation():
    assert words_of(" The the\nthe. ") == ["The", "the", "the."]


def test_overlap_without_stop_words_is_the_released_count():
    draw = random.Random(1)
    words = ["The", "the", "dog", "Dog,", "dog's", "cat", "--", "It's", "not", "over", "a", "sea.", "SEA", "an-end"]
    for _ in range(300):
        candidate, prefix = (" ".join(draw.choices(words, k=draw.randrange(12))) for _ in range(2))
        assert content_overlap(candidate, prefix) == pytest.approx(slow_content_overlap(candidate, prefix))
    # NLTK's list as RankGen used it: 179 words, of which 26 have an apostrophe.
    assert len(STOP_WORDS) == 153
    own = OverlapScorer("content_overlap")
    assert own.name == "content_overlap"
    assert own.score(["The dog saw the sea."], [[" The sea, the sky.", " And the."]]) == [[0.5, 0.0]]


def test_overlap_is_of_texts_as_they_read():
    alike = {
        "Zürich im Mai": "Zu\u0308rich im Mai",
        "photo\u00adsynthesis": "photosynthesis",
        "ef\ufb01cient": "efficient",
    }
    for one, other in alike.items():
        assert overlap(words_of(one), words_of(other)) == 1
        assert content_overlap(one, other) == 1
    assert OverlapScorer().score(["東京は首都です"], [["首都は東京です", "富士"]]) == [[1.0, 0.0]]
