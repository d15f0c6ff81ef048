"""Filters against transformers' own, and samples against the softmax."""

import numpy as np
import pytest
import torch
from transformers import TopPLogitsWarper, TypicalLogitsWarper

from gerund.arrays import counts_of
from gerund.inference.generate import sampling as module
from gerund.inference.generate.sampling import (
    Draws,
    chosen_tokens,
    draws_for,
    filters_of,
    nucleus,
    penalised,
    sample_seed,
    typical,
)
from gerund.settings.sampling import Sampling


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
    assert torch.equal(nucleus(scores, top_p), expected)


def test_tokens_that_were_shut_out_stay_out():
    scores = torch.full((1, 50), float("-inf"))
    scores[0, 3], scores[0, 4] = 1.0, 0.5
    found = nucleus(scores, 0.99)
    assert found.isfinite().nonzero()[:, 1].tolist() == [3, 4]


def test_draws_follow_the_softmax():
    scores = torch.tensor([[1.0, float("-inf"), 0.0, 3.0, float("-inf")]])
    draws = [Draws(seed) for seed in range(5_000)]
    sampled = chosen_tokens(scores.expand(len(draws), -1), draws)
    fractions = torch.bincount(sampled, minlength=5) / len(sampled)
    assert fractions[[1, 4]].tolist() == [0, 0]
    torch.testing.assert_close(fractions, scores.softmax(-1)[0], atol=0.024, rtol=0)  # four standard errors


@pytest.mark.parametrize("number", [0.0, 1.0 - 2**-53])
def test_the_ends_of_the_draw(monkeypatch, number):
    """What is shut out is not sampled by the smallest and the largest number either."""
    monkeypatch.setattr(Draws, "next", lambda _: number)
    scores = torch.full((1, 9), float("-inf"))
    scores[0, 3], scores[0, 5] = 0.1, 0.3
    [token] = chosen_tokens(scores, [Draws()]).tolist()
    assert token == (3 if number == 0 else 5)


def test_a_draw_does_not_depend_on_the_others():
    scores = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    alone = [int(chosen_tokens(scores[row : row + 1], [draws_for(7, row)])) for row in range(6)]
    together = chosen_tokens(scores, [draws_for(7, row) for row in range(6)])
    assert together.tolist() == alone
    assert len(set(alone)) > 1
    assert chosen_tokens(scores, None).tolist() == scores.argmax(-1).tolist()


@pytest.mark.full
def test_what_is_unlikely_is_drawn_in_a_large_vocabulary():
    """Half of the probability lies in tokens that float32 would lose beside the first one."""
    scores = torch.zeros(1, 2**24 + 1)
    scores[0, 0] = 24 * torch.log(torch.tensor(2.0))
    sampled = torch.cat([chosen_tokens(scores, [draws_for(seed)]) for seed in range(12)])
    assert 1 <= (sampled > 0).sum() <= 11


def test_long_seeds_are_told_apart():
    """32 bits of a seed are used."""
    seeds = [0, 2**32, 2**33, -1, 2**63]
    numbers = [Draws(sample_seed(seed, 0)).next() for seed in seeds]
    assert len(set(numbers)) == len(seeds)
    assert [sample_seed(seed, 1) for seed in (0, 7)] == [1, 7_000_022]


def test_draws_are_those_of_torch():
    for seed in (0, 7, 2**31 - 1, 7_000_022_000_021):
        generator, draws = torch.Generator().manual_seed(seed), Draws(seed)
        numbers = [draws.next() for _ in range(400)]
        assert numbers == [torch.rand(1, generator=generator, dtype=torch.float64).item() for _ in range(400)]
        assert draws.copy().next() == draws.next()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.9, min_p=0.02),
        Sampling(temperature=1.2, typical_p=0.4),
    ],
)
def test_arrays_and_tensors_are_sampled_alike(sampling):
    logits = 4 * torch.randn(6, 3000, generator=torch.Generator().manual_seed(2))
    logits[0, 10:] = float("-inf")
    found = []
    for scores in (logits, logits.numpy()):
        for filter_ in filters_of(sampling):
            scores = filter_(scores)
        draws = None if sampling.is_greedy else [draws_for(row) for row in range(6)]
        found.append((chosen_tokens(scores, draws), scores))
    assert isinstance(found[1][0], np.ndarray)
    assert found[0][0].tolist() == found[1][0].tolist()
    torch.testing.assert_close(torch.from_numpy(found[1][1]), found[0][1])


@pytest.mark.parametrize("typical_p", [0.1, 0.5, 0.95])
def test_typical_tokens_are_those_of_transformers(typical_p):
    scores = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(3))
    assert torch.equal(typical(scores, typical_p), TypicalLogitsWarper(typical_p)(None, scores))


def test_penalties_of_arrays_are_those_of_tensors():
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.7, logit_bias={3: 2.0})
    logits = torch.tensor([1.0, -2.0, 0.5, 0.0])
    counts, seen = counts_of([0, 0, 1], logits), torch.tensor([True, True, False, False])
    expected = penalised(sampling, logits, counts, seen)
    found = penalised(sampling, logits.numpy(), counts.numpy(), seen.numpy())
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected.numpy())
    assert expected.tolist() == pytest.approx([1 / 1.5 - 0.6 - 0.7, -3.0 - 0.3 - 0.7, 0.5, 2.0])
