"""Filters against transformers' own."""

import pytest
import torch
from transformers import TopPLogitsWarper

from gerund.inference import drawing
from gerund.inference.drawing import NucleusFilter


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("likeliest", [(1, 30), (5,), (256, 2048)])
def test_nucleus_is_that_of_transformers(monkeypatch, top_p, spread, likeliest):
    monkeypatch.setattr(drawing, "_LIKELIEST", likeliest)
    scores = spread * torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores[0, 7] = 60.0  # one token has all of the probability
    if spread == 0.0:
        scores += torch.arange(400) * 1e-6  # which of equally likely tokens stay is nobody's promise
    expected = TopPLogitsWarper(top_p)(None, scores)
    assert torch.equal(NucleusFilter(top_p)(None, scores), expected)


def test_tokens_that_were_shut_out_stay_out():
    scores = torch.full((1, 50), float("-inf"))
    scores[0, 3], scores[0, 4] = 1.0, 0.5
    found = NucleusFilter(0.99)(None, scores)
    assert found.isfinite().nonzero()[:, 1].tolist() == [3, 4]
