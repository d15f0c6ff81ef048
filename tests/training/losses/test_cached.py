"""Cached gradients are the gradients of the plain loss, with dropout, autocast and trained comparisons."""

import copy

import pytest
import torch
from torch import nn

from gerund.training.losses.contrastive import cached_loss, info_nce

D = 6


class Encoder(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(D, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, D))

    def forward(self, rows_ND):
        return self.layers(rows_ND)


class Comparison(nn.Module):
    """Queries and keys, one after the other; a projection, a dropout of its own and the temperature are trained."""

    def __init__(self, dropout):
        super().__init__()
        self.projection = nn.Sequential(nn.Linear(D, 4), nn.Dropout(dropout))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, all_ND):
        queries, keys = self.projection(all_ND).chunk(2)
        own = torch.arange(len(queries))
        return info_nce(queries, keys, own, temperature=self.log_temperature.exp()) / len(queries)


def case(dropout, dtype=torch.float64, sizes=(3, 3, 2, 4)):
    torch.manual_seed(0)
    parts = nn.ModuleDict({"encoder": Encoder(dropout), "comparison": Comparison(dropout)}).to(dtype)
    return parts, torch.randn(sum(sizes), D, dtype=dtype).split(sizes)


def plain(parts, chunks):
    loss = parts["comparison"](torch.cat([parts["encoder"](chunk) for chunk in chunks]))
    loss.backward()
    return loss.detach()


def cached(parts, chunks, **kwargs):
    return cached_loss(parts["encoder"], chunks, parts["comparison"], **kwargs)


def run(way, parts, chunks, **kwargs):
    """Return loss, all gradients, and the random number that would come next."""
    parts = copy.deepcopy(parts)
    torch.manual_seed(5)
    loss = way(parts, chunks, **kwargs)
    return [loss, *(p.grad for p in parts.parameters()), torch.rand(3)]


def assert_same(found, expected, tolerance=0.0):
    assert len(found) == len(expected) > 5
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("sizes", [(3, 3, 2, 4), (12,), (1, 11), (1,) * 12])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_equals_the_plain_loss_over_the_same_chunks(dropout, sizes, dtype, tolerance):
    parts, chunks = case(dropout, dtype, sizes)
    found = run(cached, parts, chunks)
    assert not found[0].requires_grad
    assert_same(found, run(plain, parts, chunks), tolerance)


@pytest.mark.parametrize("sizes", [(3, 3, 2, 4), (12,)])
def test_the_trainer_scales_and_sees_which_chunk_is_last(sizes):
    parts, chunks = case(0.4, sizes=sizes)
    seen = []

    def backward(scalar, last):
        seen.append(last)
        assert scalar.shape == ()
        (scalar * 7).backward()

    found = run(cached, parts, chunks, backward=backward)
    assert seen == [False] * (len(sizes) - 1) + [True]
    expected = run(plain, parts, chunks)
    # What the comparison is trained in is scaled like everything else.
    assert_same(found, [expected[0], *(7 * gradient for gradient in expected[1:-1]), expected[-1]], 1e-13)


def test_the_last_chunk_alone_touches_what_the_comparison_is_trained_in():
    parts, chunks = case(0.0)
    touched, first = [], next(parts["encoder"].parameters())
    for parameter in parts["comparison"].parameters():
        parameter.register_post_accumulate_grad_hook(lambda own: touched.append("comparison"))
    first.register_post_accumulate_grad_hook(lambda own: touched.append("encoder"))
    cached(parts, chunks)
    assert touched[:3] == ["encoder"] * 3
    assert sorted(touched[3:]) == ["comparison"] * 3 + ["encoder"]


def test_a_weight_that_embeds_and_compares_gets_both_gradients():
    torch.manual_seed(0)
    chunks = torch.randn(6, D, dtype=torch.float64).split(2)
    shared = nn.Linear(D, D).double()
    results = []
    for way in (cached, plain):
        shared.zero_grad()
        way({"encoder": shared, "comparison": lambda all_ND: shared(all_ND).square().sum()}, chunks)
        results.append(shared.weight.grad.clone())
    torch.testing.assert_close(*results, rtol=1e-13, atol=1e-13)


def test_under_one_autocast_over_everything_all_weights_still_learn():
    parts, chunks = case(0.4, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(cached, parts, chunks)
        expected = run(plain, parts, chunks)
    assert all(gradient is not None for gradient in found)
    assert torch.equal(found[0], expected[0])
    for own, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(own, other, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("sizes", [(3, 3, 2, 4), (12,)])
def test_without_gradients_there_is_the_value_alone(sizes):
    parts, chunks = case(0.4, sizes=sizes)
    expected = run(plain, parts, chunks)
    torch.manual_seed(5)
    with torch.no_grad():
        loss = cached(parts, chunks, backward=lambda scalar, last: pytest.fail("nothing to go back to"))
    assert torch.equal(loss, expected[0])
    assert torch.equal(torch.rand(3), expected[-1])


def test_a_chunk_is_embedded_twice_and_only_once_with_a_graph():
    parts, chunks = case(0.0)
    calls = []

    def embed(chunk):
        calls.append(torch.is_grad_enabled())
        return parts["encoder"](chunk)

    cached_loss(embed, chunks, parts["comparison"])
    assert calls == [False] * 4 + [True] * 4
    calls.clear()
    cached_loss(embed, chunks[:1], lambda all_ND: all_ND.sum())
    assert calls == [True]
