"""Passages are whole sentences of the wished lengths; negatives are of the same document and overlap nothing."""

from time import perf_counter

import numpy as np
import pytest

from gerund.data import passages
from gerund.data.passages import cut_passages, inbook_negatives, split_sentences

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
        assert len(set(negatives)) == 10
        for text in negatives:
            assert text in BOOK
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


def test_a_stretch_that_repeats_the_right_continuation_is_no_negative():
    text = " ".join(["The same words stand here again."] * 30)
    sentences = split_sentences(text)
    [one, *_] = cut_passages(text, sentences, prefix_words=20, continuation_words=(10, 20))
    assert one.continuation not in inbook_negatives(text, sentences, one, 10, np.random.default_rng(0))


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
