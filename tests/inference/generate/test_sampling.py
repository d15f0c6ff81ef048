"""Filters against transformers' own, and samples against the softmax."""

import pytest
import torch
from transformers import TopPLogitsWarper

from gerund.inference.generate import sampling as module
from gerund.inference.generate.sampling import NucleusFilter, chosen_tokens, generator_for, sample_seed


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0, 12.0])
@pytest.mark.parametrize("likeliest", [(1, 30), (5,), (256, 2048)])
def test_nucleus_is_that_of_transformers(monkeypatch, top_p, spread, likeliest):
    monkeypatch.setattr(module, "_LIKELIEST", likeliest)
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


def test_draws_follow_the_softmax():
    scores = torch.tensor([[1.0, float("-inf"), 0.0, 3.0, float("-inf")]])
    generators = [torch.Generator().manual_seed(seed) for seed in range(20_000)]
    sampled = chosen_tokens(scores.expand(len(generators), -1), generators)
    fractions = torch.bincount(sampled, minlength=5) / len(sampled)
    assert fractions[[1, 4]].tolist() == [0, 0]
    torch.testing.assert_close(fractions, scores.softmax(-1)[0], atol=0.012, rtol=0)  # four standard errors


@pytest.mark.parametrize("number", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_draw(monkeypatch, number):
    """What is shut out is not sampled by the smallest and the largest number either."""
    monkeypatch.setattr(torch, "rand", lambda *size, **more: torch.full(size, number, dtype=torch.float64))
    scores = torch.full((1, 9), float("-inf"))
    scores[0, 3], scores[0, 5] = 0.1, 0.3
    [token] = chosen_tokens(scores, [torch.Generator()]).tolist()
    assert token == (3 if number == 0 else 5)


def test_a_draw_does_not_depend_on_the_others():
    scores = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    alone = [int(chosen_tokens(scores[row : row + 1], [generator_for(7, row)])) for row in range(6)]
    together = chosen_tokens(scores, [generator_for(7, row) for row in range(6)])
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    assert chosen_tokens(scores, None).tolist() == scores.argmax(-1).tolist()


@pytest.mark.slow
def test_what_is_unlikely_is_drawn_in_a_large_vocabulary():
    """Half of the probability lies in tokens that float32 would lose beside the first one."""
    scores = torch.zeros(1, 2**24 + 1)
    scores[0, 0] = 24 * torch.log(torch.tensor(2.0))
    sampled = torch.cat([chosen_tokens(scores, [generator_for(seed)]) for seed in range(12)])
    assert 1 <= (sampled > 0).sum() <= 11


def test_long_seeds_are_told_apart():
    """Torch reads 32 bits of a seed."""
    seeds = [0, 2**32, 2**33, -1, 2**63]
    numbers = [torch.rand(1, generator=torch.Generator().manual_seed(sample_seed(seed, 0))).item() for seed in seeds]
    assert len(set(numbers)) == len(seeds)
    assert [sample_seed(seed, 1) for seed in (0, 7)] == [1, 7_000_022]
