"""Vectors of spans and words, pooled from one pass over the full text."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np

from gerund.arrays import Array, as_like, as_numpy
from gerund.checks import flag, is_listing, one_of
from gerund.errors import TextError
from gerund.inference.encode.batches import Encodes, demand_own_states, in_batches
from gerund.inference.tokens import Tokens
from gerund.poolings import pool

Span = tuple[int, int]


def check_spans(spans: Any, texts: Sequence[str]) -> list[list[Span]]:
    """Validate the spans of each text."""
    if not is_listing(spans) or len(spans) != len(texts):
        raise TextError("give a list of stretches for each text, such as [[(0, 5), (6, 20)]]")
    checked = []
    for index, (text_spans, text) in enumerate(zip(spans, texts, strict=True)):
        listed = list(text_spans) if is_listing(text_spans) else [text_spans]
        for span in listed:
            whole = isinstance(span, Sequence) and len(span) == 2 and all(isinstance(place, Integral) for place in span)
            if not whole or not 0 <= span[0] < span[1] <= len(text):
                raise TextError(f"{span!r} is no stretch of text {index}, which has {len(text)} characters")
        checked.append([(int(start), int(end)) for start, end in listed])
    return checked


def span_tokens(text: Tokens, spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Return the first token and the end of each span, counted in ``text.ids``.

    A token belongs to each span that it has a character of. A span that was truncated or has no token is empty.

    >>> text = Tokens([9, 5, 6, 7], text_from=1, specials_before=1, offsets=((0, 2), (2, 6), (6, 10)))
    >>> span_tokens(text, [(0, 2), (3, 10), (10, 12)])
    [(1, 2), (2, 4), (4, 4)]
    """
    ranges = []
    for start, end in spans:
        rows = [row for row, (first, behind) in enumerate(text.offsets) if first < end and behind > start]
        rows = [row for row in rows if text.offsets[row][0] < text.offsets[row][1]]
        place = (rows[0], rows[-1] + 1) if rows else (len(text.offsets), len(text.offsets))
        ranges.append((text.text_from + place[0], text.text_from + place[1]))
    return ranges


def encode_spans(
    runtime: Encodes,
    texts: Sequence[Tokens | None],
    spans: Sequence[Sequence[Span]],
    *,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[np.ndarray]:
    """Encode each text once, and pool every span from the states of its tokens: ``(spans, D)`` float32 per text.

    Pooling, projection head and transform are the encoder's, so the vectors can be compared with those of full texts.
    They are not normalized, and zeros for a span without tokens.
    """
    demand_own_states(runtime)
    vectors = [np.zeros((len(text_spans), runtime.width), dtype=np.float32) for text_spans in spans]

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Array, begin: Array) -> None:
        for place, (row, text) in enumerate(zip(rows, batch, strict=True)):
            used = [(index, span) for index, span in enumerate(span_tokens(text, spans[row])) if span[0] < span[1]]
            if used:
                found_SD = _pooled(runtime, text, hidden_BTD[place], int(begin[place]), [span for _, span in used])
                vectors[row][[index for index, _ in used]] = found_SD

    in_batches(runtime, texts, runtime.states, keep, batch_tokens=batch_tokens, show=show)
    return vectors


def _pooled(runtime: Encodes, text: Tokens, hidden_TD: Array, begin: int, spans: Sequence[Span]) -> np.ndarray:
    """Pool spans of one text's states: ``(S, D)`` float32."""
    longest = max(end - start for start, end in spans)
    place_L = as_like(np.arange(longest), hidden_TD)
    first_S = as_like(np.array([begin + start for start, _ in spans]), hidden_TD)
    length_S = as_like(np.array([end - start for start, end in spans]), hidden_TD)
    token_SL = (first_S[:, None] + place_L).clip(max=len(hidden_TD) - 1)
    pooled_SL = place_L < length_S[:, None]
    vectors_SD = pool(hidden_TD[token_SL], pooled_SL, runtime.config.pooling)
    if runtime.head is not None:
        ids_T = as_like(np.array(text.ids), hidden_TD)
        vectors_SD = runtime.head(vectors_SD, ids_T[(token_SL - begin).clip(0, len(text) - 1)], pooled_SL)
    found_SD = as_numpy(vectors_SD)
    return found_SD if runtime.transform is None else runtime.transform(found_SD)


WordPooling = Literal["mean", "first"]


def check_words(sentences: Any) -> list[list[str]]:
    """Validate sentences given as lists of words."""
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
    """Return the tokens of each word, joined by single spaces in the text; none for a word that was truncated.

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
        rows = []
        place = token
        while place < len(offsets) and offsets[place][0] < end:
            if offsets[place][1] > offsets[place][0]:
                rows.append(place)
            place += 1
        result.append(rows)
        begin = end + 1
    return result


def word_token_states(words: Sequence[str], tokens: Tokens, states_TD: np.ndarray) -> list[np.ndarray]:
    """Return the states ``(n_tokens, D)`` of each word's tokens; a token may belong to several words."""
    places = word_tokens(words, tokens.offsets)
    return [states_TD[[tokens.specials_before + place for place in rows]] for rows in places]


def word_vectors(
    words: Sequence[str], tokens: Tokens, states_TD: np.ndarray, *, pooling: WordPooling = "mean", shift: bool = False
) -> np.ndarray:
    """Turn token states into word vectors ``(n_words, D)`` float32; zeros for a word that was truncated.

    ``shift`` reads the output *before* each token, which predicts it (MAGNET, section 3.2).
    """
    one_of("word pooling", pooling, ["mean", "first"])
    back = int(flag("shift", shift))
    vectors = np.zeros((len(words), states_TD.shape[1]), dtype=np.float32)
    for index, word_rows in enumerate(word_tokens(words, tokens.offsets)):
        if not word_rows:
            continue
        rows = [max(0, tokens.specials_before + place - back) for place in word_rows]
        vectors[index] = states_TD[rows[0]] if pooling == "first" else states_TD[rows].mean(axis=0)
    return vectors
