"""InfoNCE against the sums written out, one query and one key at a time."""

import pytest
import torch

from gerund.training.losses.contrastive import accuracy, batch_info_nce, info_nce
from gerund.training.objectives.contrastive import ContrastiveLosses
from tests.training.objectives import slow

B, K, D = 4, 7, 5


def excluding(excluded):
    return lambda i, j: excluded is not None and excluded[i][j]


def case(dtype=torch.float64, n_keys=K):
    torch.manual_seed(0)
    queries = torch.randn(B, D, dtype=dtype, requires_grad=True)
    keys = torch.randn(n_keys, D, dtype=dtype, requires_grad=True)
    return queries, keys, torch.tensor([2, 0, 2, 3])


EXCLUDED = torch.tensor([[1, 0, 1, 0, 1, 0, 0], [0] * 7, [1] * 7, [0, 1, 1, 0, 0, 0, 1]]).bool()


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("temperature", [0.05, 1.0])
@pytest.mark.parametrize("excluded", [None, EXCLUDED])
def test_info_nce(similarity, temperature, excluded):
    queries, keys, positives = case()
    temperature = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    ends = (queries, keys, temperature)
    expected, _ = slow.contrast(queries, keys, positives, excluding(excluded), temperature, similarity)
    loss = info_nce(queries, keys, positives, temperature=temperature, similarity=similarity, excluded_BK=excluded)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    for own, other in zip(torch.autograd.grad(loss, ends), torch.autograd.grad(expected, ends), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zero_vectors_do_no_harm(similarity, dtype):
    queries, keys, positives = case(dtype)
    with torch.no_grad():
        queries[0], keys[2], keys[6] = 0.0, 0.0, 0.0
    loss = info_nce(queries, keys, positives, temperature=0.05, similarity=similarity)
    loss.backward()
    given = queries.detach().double(), keys.detach().double(), positives
    expected, _ = slow.contrast(*given, excluding(None), 0.05, similarity)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient in (queries.grad, keys.grad):
        assert gradient.isfinite().all()
        assert gradient.abs().max() < 1e3


def test_autocast_does_not_blur_similarities():
    queries, keys, positives = case(torch.float32)
    plain = info_nce(queries, keys, positives, temperature=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        loss = info_nce(queries, keys, positives, temperature=0.05)
    assert torch.equal(loss, plain)
    blurred = info_nce(queries.bfloat16(), keys.bfloat16(), positives, temperature=0.05)
    assert blurred.dtype == torch.float32


def test_no_queries():
    queries, keys, _ = case(torch.float32)
    nothing = torch.zeros(0, dtype=torch.long)
    loss = info_nce(queries[:0], keys, nothing, temperature=0.1)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(keys.grad, torch.zeros_like(keys))
    assert accuracy(queries[:0], keys, nothing).item() == 0


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("excluded", [None, EXCLUDED])
def test_accuracy(similarity, excluded):
    for seed in range(20):
        torch.manual_seed(seed)
        queries, keys = torch.randn(B, D), torch.randn(K, D)
        positives = torch.randint(0, K, (B,))
        keys[positives] += 1.5 * queries
        _, count = slow.contrast(queries, keys, positives, excluding(excluded), similarity=similarity)
        found = accuracy(queries, keys, positives, similarity=similarity, excluded_BK=excluded)
        assert found.item() == count


def test_vectors_that_are_all_the_same_tell_nothing():
    same = torch.ones(B, D)
    assert accuracy(same, same, torch.arange(B)).item() == 0
    assert accuracy(same, same[:1], torch.zeros(B, dtype=torch.long)).item() == B


def test_a_nested_loss_is_the_mean_over_shortened_vectors():
    generator = torch.Generator().manual_seed(0)
    vectors_ND = torch.randn(8, 6, generator=generator).requires_grad_(True)
    identity = torch.arange(8)
    batch = {"query": {"identity": identity[:4]}, "positive": {"identity": identity[4:]}}
    losses = ContrastiveLosses.__new__(ContrastiveLosses)
    losses.temperature, losses.similarity, losses.in_batch, losses.matryoshka = 0.1, "cosine", True, [2, 4]
    found, right = losses.compare(vectors_ND, batch, gather=False)
    apart = [
        batch_info_nce(
            vectors_ND[:, :size],
            [identity[:4], identity[4:]],
            temperature=0.1,
            similarity="cosine",
            in_batch=True,
            gather=False,
        )
        for size in (6, 4, 2)
    ]
    torch.testing.assert_close(found, sum(loss for loss, _ in apart) / 3)
    assert right == apart[0][1]
    [gradient] = torch.autograd.grad(found, vectors_ND)
    assert gradient[:, 4:].abs().sum() > 0
