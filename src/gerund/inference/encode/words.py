"""Word embeddings: which tokens make up which word, and their mean.

Knows: character offsets. Does not know: models.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gerund.checks import flag, is_listing, one_of
from gerund.errors import TextError
from gerund.inference.tokens import Tokens

WordPooling = Literal["mean", "first"]


def check_words(sentences: Any) -> list[list[str]]:
    """Return the sentences as lists of words, refusing whatever is not a list of words.

    Raises:
        TextError: a sentence is a string or empty, or a word is empty, holds only white space, or is no string.
    """
    if not is_listing(sentences):
        kind = "a string" if isinstance(sentences, str) else type(sentences).__name__
        raise TextError(f"give lists of words, such as [['EU', 'rejects']], not {kind}")
    checked = []
    for index, words in enumerate(sentences):
        if not is_listing(words):
            raise TextError(f"sentence {index} is not a list of words but {type(words).__name__}")
        words = list(words)
        if not words:
            raise TextError(f"sentence {index} has no words")
        for place, word in enumerate(words):
            if not isinstance(word, str) or not word.strip():
                raise TextError(f"word {place} of sentence {index} is empty or not a string: {word!r}")
        checked.append(words)
    return checked


def word_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return for each word which tokens hold any of its characters.

    Args:
        words: the words, joined by single spaces in the text.
        offsets: (start, end) characters of each token in that text.

    Returns:
        For each word the indices into ``offsets``; none for a word that was cut off.

    >>> word_tokens(["EU", "rejects"], [(0, 2), (2, 6), (6, 10)])
    [[0], [1, 2]]
    """
    result: list[list[int]] = []
    begin = 0
    token = 0
    for word in words:
        end = begin + len(word)
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        own = []
        place = token
        while place < len(offsets) and offsets[place][0] < end:
            if offsets[place][1] > offsets[place][0]:
                own.append(place)
            place += 1
        result.append(own)
        begin = end + 1
    return result


def word_token_states(words: Sequence[str], tokens: Tokens, states_TD: np.ndarray) -> list[np.ndarray]:
    """Return for each word the states ``(n_tokens, D)`` of its tokens; none for a word that was cut off.

    A token that holds characters of several words is each of theirs.
    """
    places = word_tokens(words, tokens.offsets)
    return [states_TD[[tokens.specials_before + place for place in own]] for own in places]


def word_vectors(
    words: Sequence[str], tokens: Tokens, states_TD: np.ndarray, *, pooling: WordPooling = "mean", shift: bool = False
) -> np.ndarray:
    """Turn token states into word vectors.

    Args:
        words: the words of one sentence.
        tokens: its tokens, with offsets.
        states_TD: states of special and text tokens, as ``encode_tokens`` gives them.
        pooling: ``mean`` over the word's tokens, or its ``first`` token.
        shift: read the output *before* each token, which predicts it (MAGNET, section 3.2).

    Returns:
        ``(n_words, D)`` float32; a word that was cut off has a zero vector.
    """
    one_of("word pooling", pooling, ["mean", "first"])
    back = int(flag("shift", shift))
    vectors = np.zeros((len(words), states_TD.shape[1]), dtype=np.float32)
    for index, own in enumerate(word_tokens(words, tokens.offsets)):
        if not own:
            continue
        rows = [max(0, tokens.specials_before + place - back) for place in own]
        vectors[index] = states_TD[rows[0]] if pooling == "first" else states_TD[rows].mean(axis=0)
    return vectors
