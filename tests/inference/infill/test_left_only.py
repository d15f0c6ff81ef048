"""Filling a gap from its left side alone: what the model writes until it ends its text."""

import math

import pytest

from gerund import Sampling
from gerund.errors import TextError
from gerund.inference.infill.blanks import BlankedText
from gerund.inference.infill.infilling import Search, fill
from tests.inference.infill.test_infilling import TEXT, Slow, build, left_and_right, not_here


def written_left_only(slow, left, length, end=None):
    """Write the most probable span by the causal model, one whole text at a time; an end before ``length`` ends it."""
    span, logprobs = [], []
    while len(span) < length:
        follow = slow.causal([*left, *span])[-1]
        banned = [token for token in not_here(span) if token != end or not span]
        follow[banned] = float("-inf")
        token = int(follow.argmax())
        logprobs.append(float(follow.max()))
        if token == end:
            break
        span.append(token)
    return span, logprobs


def test_left_only_continues_the_left_side_causally():
    lm, slow = build(), Slow()
    left, right = left_and_right(lm)
    for length in (2, 5):
        span, logprobs = written_left_only(slow, left, length)
        result = lm.infill(TEXT, lengths=length, method="left-only")
        assert result.token_ids == [span]
        assert result.scores == pytest.approx([slow.score(left, span, right, sum(logprobs))], abs=1e-5)
    other = lm.infill("In the end [blank] xyz", lengths=5, method="left-only")
    assert other.token_ids == lm.infill(TEXT, lengths=5, method="left-only").token_ids
    assert lm.infill("In the end [blank] xyz", lengths=5).token_ids != lm.infill(TEXT, lengths=5).token_ids


BEHIND = [" and ran.", " xyz", ". It was late.", " the end of the day came soon", "!"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lengths": [2, 5, 9]},
        {"beams": 3, "max_tokens": 6},
        {"beams": 3, "lengths": [2, 3]},
        {"sampling": Sampling(temperature=1.5, seed=3), "samples": 4, "lengths": [1, 4]},
        {"sampling": Sampling(temperature=1.5, seed=3), "samples": 4},
    ],
)
def test_the_text_behind_a_gap_chooses_nothing_for_left_only(settings):
    lm = build()
    found = {
        tuple(lm.infill(f"In the end [blank]{end}", method="left-only", **settings).token_ids[0]) for end in BEHIND
    }
    assert len(found) == 1
    assert len({tuple(lm.infill(f"In the end [blank]{end}", **settings).token_ids[0]) for end in BEHIND}) > 1


@pytest.mark.slow
def test_left_only_writes_until_the_model_ends_its_text():
    lm, slow = build(), Slow()
    left, _ = left_and_right(lm)
    whole, _ = written_left_only(slow, left, 32)
    assert lm.infill(TEXT, method="left-only").token_ids == [whole]
    assert lm.infill(TEXT, max_tokens=7, method="left-only").token_ids == [whole[:7]]
    # What it writes as its sixth token is from now on its end.
    end = next(token for token in whole[5:] if token not in whole[:5])
    lm.model.generation_config.eos_token_id = end
    span, logprobs = written_left_only(slow, left, 32, end)
    assert 0 < len(span) < 32
    result = lm.infill(TEXT, method="left-only")
    assert result.token_ids == [span]
    assert result.spans[0] == lm.tokenizer.decode(span)
    _, right = left_and_right(lm)
    assert result.scores == pytest.approx([slow.score(left, span, right, sum(logprobs[:-1]))], abs=1e-5)
    # Beams compare spans of several lengths by the mean of what was predicted, the end included.
    assert lm.infill(TEXT, method="left-only", beams=1).token_ids == result.token_ids
    assert all(end not in ids for ids in lm.infill(TEXT, method="left-only", beams=4).token_ids)


def test_among_lengths_left_only_takes_the_one_where_the_model_most_likely_ends():
    lm, slow = build(), Slow()
    left, _ = left_and_right(lm)
    for end in (40, 90, 130):
        lm.model.generation_config.eos_token_id = [end]
        banned = {end}
        spans = {}
        for length in (1, 3, 6):
            span = []
            for _ in range(length):
                follow = slow.causal([*left, *span])[-1]
                follow[[*not_here(span), *banned]] = float("-inf")
                span.append(int(follow.argmax()))
            ending = slow.causal([*left, *span])[-1]
            spans[sum(math.exp(float(ending[token])) for token in (end, lm.tokenizer.eos_token_id))] = span
        assert lm.infill(TEXT, lengths=[1, 3, 6], method="left-only").token_ids == [spans[max(spans)]]


def test_left_only_keeps_within_the_context():
    lm = build(max_position_embeddings=24)
    result = lm.infill(TEXT, method="left-only")
    left, _ = left_and_right(lm)
    assert 1 <= len(result.token_ids[0]) <= 24 - len(left)


@pytest.mark.parametrize("settings", [{}, {"lengths": [2, 9]}, {"lengths": 5}])
def test_the_text_behind_takes_no_room_of_left_only(settings):
    lm = build(max_position_embeddings=24)
    short, long = (
        lm.infill(f"In the end [blank]{end}", method="left-only", **settings) for end in (" xyz", " xyz" * 30)
    )
    assert short.token_ids == long.token_ids
    with pytest.raises(TextError, match="the model's context ends at 24"):
        lm.infill(f"In the end [blank]{' xyz' * 30}", **settings)


def test_gaps_of_left_only_leave_room_for_those_behind_them():
    lm = build(max_position_embeddings=40)
    found = [lm.infill(f"In the [blank] end [blank]{end}", method="left-only") for end in (" xyz", " xyz" * 40)]
    assert found[0].token_ids == found[1].token_ids
    assert all(found[0].token_ids)


def test_left_only_is_not_filled_in_chunks():
    lm = build()
    text = BlankedText.of(TEXT, "[blank]")
    a, b = (
        fill(lm.model, lm.tokenizer, text, Search([9], Sampling(), sees_right=False, chunk=chunk)) for chunk in (2, 32)
    )
    assert a == b
