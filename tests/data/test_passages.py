"""Passages are whole sentences of the wished lengths; negatives are of the same document and overlap nothing."""

from time import perf_counter

import numpy as np
import pytest

from gerund.data import passages
from gerund.data.passages import (
    cut_passages,
    cut_to_words,
    inbook_negatives,
    other_stretches,
    sample_passages,
    split_sentences,
    wrong_for,
)

# Sentences of 3 to 9 words that can be told apart.
SENTENCES = [" ".join([f"Word{i}", *(["goes"] * (1 + i % 7)), "here."]) for i in range(400)]
BOOK = "".join(sentence + ("\n\n" if i % 9 == 8 else " ") for i, sentence in enumerate(SENTENCES))


def words(text):
    return len(text.split())


def test_sentences_are_found_with_their_places():
    found = split_sentences(f"  {BOOK}  ")
    assert [f"  {BOOK}  "[one.start : one.end] for one in found] == SENTENCES
    assert [one.words for one in found] == [words(sentence) for sentence in SENTENCES]
    assert split_sentences("") == split_sentences(" \n ") == []
    assert len(split_sentences("Dr. Smith met Mrs. Jones at 3 p.m. in London. He left.")) == 2


@pytest.mark.parametrize(("prefix_words", "most"), [(256, 128), (64, 32), (20, 14)])
def test_lengths_and_borders(prefix_words, most):
    sentences = split_sentences(BOOK)
    passages = cut_passages(BOOK, sentences, prefix_words=prefix_words, continuation_words=(10, most))
    assert len(passages) >= 3
    ends = 0
    for one in passages:
        assert prefix_words - 9 < words(one.prefix) <= prefix_words
        assert 10 <= one.words == words(one.continuation) <= most
        start, end = one.sentences.start, one.sentences.stop
        assert start >= ends
        ends = end
        joined = BOOK[sentences[start].start : sentences[end - 1].end]
        assert joined.startswith(one.prefix)
        assert joined.endswith(one.continuation)
        assert joined[len(one.prefix) : -len(one.continuation)].isspace()


def test_what_is_too_short_or_too_long_makes_no_passage():
    sentences = split_sentences("Only one sentence.")
    assert cut_passages("Only one sentence.", sentences) == []
    long = "word " * 400 + "end. Short one. " * 3
    assert cut_passages(long, split_sentences(long), prefix_words=20, continuation_words=(10, 30)) == []
    assert cut_passages("", []) == []


def test_negatives():
    sentences = split_sentences(BOOK)
    for place, one in enumerate(cut_passages(BOOK, sentences, prefix_words=64, continuation_words=(10, 32))):
        negatives = inbook_negatives(BOOK, sentences, one, 10, np.random.default_rng(place))
        assert len({stretch.text for stretch in negatives}) == 10
        for stretch in negatives:
            text = stretch.text
            assert text == BOOK[stretch.start : stretch.end]
            assert text.startswith("Word")
            assert text.endswith("here.")
            assert 0.5 * one.words <= words(text) <= 1.5 * one.words
            marks = {word for word in text.split() if word.startswith("Word")}
            assert not marks & set(f"{one.prefix} {one.continuation}".split())
        assert negatives == inbook_negatives(BOOK, sentences, one, 10, np.random.default_rng(place))


def test_a_short_document_has_fewer_negatives():
    text = " ".join(SENTENCES[:12])
    sentences = split_sentences(text)
    [one, *_] = cut_passages(text, sentences, prefix_words=20, continuation_words=(10, 20))
    assert len(inbook_negatives(text, sentences, one, 50, np.random.default_rng(0))) < 12


def test_every_sentence_that_is_far_enough_begins_one_stretch():
    sentences = split_sentences(BOOK)
    one = cut_passages(BOOK, sentences, prefix_words=64, continuation_words=(10, 32))[1]
    found = list(other_stretches(BOOK, sentences, one))
    starts = [stretch.start for stretch in found]
    assert starts == sorted(set(starts))
    passage = set(range(one.start, one.end))
    assert not any(passage & set(range(stretch.start, stretch.end)) for stretch in found)
    # Left out are those that would reach into the passage, and at the end those that would be too short.
    free = [sentence.start for sentence in sentences if sentence.start not in passage]
    assert set(starts) < set(free)
    assert len(free) - len(starts) < 12
    assert {stretch.text for stretch in inbook_negatives(BOOK, sentences, one, 10**6, np.random.default_rng(0))} == {
        stretch.text for stretch in found
    }


def test_a_stretch_that_says_the_same_at_another_place_is_no_negative():
    text = " ".join(["The same words stand here again."] * 30)
    sentences = split_sentences(text)
    [one, *_] = cut_passages(text, sentences, prefix_words=20, continuation_words=(10, 20))
    assert inbook_negatives(text, sentences, one, 10, np.random.default_rng(0)) == []
    refrain = "The wind went round the house, and the door stood open all night."
    text = " ".join(f"{refrain if i % 4 == 1 else SENTENCES[i]}" for i in range(200))
    sentences = split_sentences(text)
    for place, one in enumerate(cut_passages(text, sentences, prefix_words=40, continuation_words=(10, 14))):
        assert refrain in f"{one.prefix} {one.continuation}"
        negatives = inbook_negatives(text, sentences, one, 10, np.random.default_rng(place))
        assert len(negatives) == 10
        assert refrain not in {stretch.text for stretch in negatives}


def test_passages_know_where_they_stand():
    sentences = split_sentences(BOOK)
    sampled = sample_passages(BOOK, sentences, np.random.default_rng(0), prefix_words=40, continuation_words=(5, 30))
    for one in (*sampled, *cut_passages(BOOK, sentences, prefix_words=40, continuation_words=(5, 30))):
        assert BOOK[one.middle : one.end] == one.continuation
        assert BOOK[one.start : one.middle].rstrip() == one.prefix
        assert len(one.sentences) == BOOK[one.start : one.end].count("here.")


def test_what_is_wrong_behind_a_prefix_shares_no_sentence_with_the_passage():
    sentences = split_sentences(BOOK)[:200]
    rng = np.random.default_rng(1)
    sampled = sample_passages(BOOK, sentences, rng, prefix_words=40, continuation_words=(5, 30))
    masked = 0
    for one in sampled:
        said = {word for word in f"{one.prefix} {one.continuation}".split() if word.startswith("Word")}
        for other, is_wrong in zip(sampled, wrong_for(one, sampled), strict=True):
            # The first word of a sentence tells which one it is.
            shares = not said.isdisjoint(other.continuation.split())
            assert is_wrong == (not shares)
            masked += shares
    # Before, only equal texts were known to be right.
    assert masked > 2 * sum(one.continuation == other.continuation for one in sampled for other in sampled)


def test_long_texts_are_split_as_their_paragraphs_are(monkeypatch):
    text = "\n\n".join(f'He said: "Mr. Smith, number {n}, left." She\nstayed. Did she? Yes!' for n in range(200))
    whole = passages.sentence_bounds(text)
    monkeypatch.setattr(passages, "_STRETCH", 300)
    assert passages.sentence_bounds(text) == whole


def test_a_long_paragraph_of_quotations_does_not_take_the_square_of_its_time():
    text = 'He said: "I have seen it" (once).\nShe " did not . ' * 20_000
    begin = perf_counter()
    found = passages.sentence_bounds(text)
    assert perf_counter() - begin < 20
    assert len(found) >= 20_000


@pytest.mark.parametrize("words", [3, 10, 14, 40])
@pytest.mark.parametrize("ended", [True, False])
def test_generated_texts_keep_to_the_lengths_of_true_ones(words, ended):
    rng = np.random.default_rng(words)
    for _ in range(60):
        sentences = [" ".join([f"Word{i}", *["goes"] * int(rng.integers(0, 25)), "here."]) for i in range(6)]
        text = " " + " ".join(sentences)
        if not ended:
            text = text.rsplit(" ", 1)[0]
        kept = cut_to_words(text, words, fewest=10, most=30)
        ends = [len(" ".join(sentences[: i + 1]).split()) for i in range(6 if ended else 5)]
        within = [end for end in ends if 10 <= end <= 30]
        assert text.split()[: len(kept.split())] == kept.split()
        if within:
            nearest = min(within, key=lambda end: abs(end - words))
            assert len(kept.split()) == nearest
        elif words < 10:
            assert kept == ""
        else:
            assert len(kept.split()) == min(words, len(text.split()))
    assert cut_to_words("He left. She too.", 10, fewest=10, most=30) == ""
