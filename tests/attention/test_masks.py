"""Masks against the one-decision-at-a-time reference, for every direction, padding and window."""

import itertools

import numpy as np
import pytest
import torch

from gerund.attention.masks import Chunk, padding_side, visible
from gerund.settings.plan import Direction, View
from tests.attention.reference import sees

KIND = {
    Direction.CAUSAL: "forward",
    Direction.BACKWARD: "back",
    Direction.BIDIRECTIONAL: "both",
    Direction.HYBRID: "hybrid",
}
REALS = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 0, 0]]
SPANS = [[0, 0, 1, 1, 0, 2], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 2, 1, 1, 0]]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("hidden", "window"), list(itertools.product([0, 1, 2], [None, 1, 2, 3, 99])))
def test_every_entry(direction, hidden, window):
    real, span = torch.tensor(REALS), torch.tensor(SPANS)
    mask = visible(View(direction, hidden), 6, real_BT=real, span_BT=span, window=window)
    assert mask.shape == (4, 1, 6, 6)
    for b, query, key in itertools.product(range(4), range(6), range(6)):
        expected = sees(KIND[direction], query, key, REALS[b], hidden=hidden, window=window, span=SPANS[b])
        assert bool(mask[b, 0, query, key]) is expected, (b, query, key)


def test_without_padding_all_texts_share_one_mask():
    shared = visible(View(Direction.BIDIRECTIONAL, 1), 4)
    assert shared.shape == (1, 1, 4, 4)
    assert torch.equal(shared, visible(View(Direction.BIDIRECTIONAL, 1), 4, real_BT=torch.ones(1, 4)))


def test_reverse_causal_is_a_special_sink_mask():
    """LBW, appendix F.2: of ten tokens, MASK9 is the reverse causal mask."""
    assert torch.equal(visible(View(Direction.BIDIRECTIONAL, 9), 10), visible(View(Direction.BACKWARD), 10))


def test_hybrid_needs_spans():
    with pytest.raises(ValueError, match="span_BT"):
        visible(View(Direction.HYBRID), 3)


def test_all_tokens_one_span_is_causal():
    span = torch.ones(1, 5, dtype=torch.long)
    assert torch.equal(visible(View(Direction.HYBRID), 5, span_BT=span), visible(View(Direction.CAUSAL), 5))


@pytest.mark.parametrize(
    ("rows", "side"),
    [
        ([[1, 1]], "none"),
        ([[0, 1], [1, 1]], "left"),
        ([[1, 0], [1, 1]], "right"),
        ([[1, 0], [0, 1]], "mixed"),
        ([[0, 1, 0]], "mixed"),
    ],
)
def test_padding_side(rows, side):
    assert padding_side(torch.tensor(rows)) == side


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("window", [None, 2, Chunk(3)])
def test_arrays_are_masked_as_tensors(direction, window):
    view = View(direction, hidden=1)
    own = visible(view, 6, real_BT=np.array(REALS, bool), span_BT=np.array(SPANS), window=window)
    other = visible(view, 6, real_BT=torch.tensor(REALS).bool(), span_BT=torch.tensor(SPANS), window=window)
    assert isinstance(own, np.ndarray)
    assert (own == other.numpy()).all()
