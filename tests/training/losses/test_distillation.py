"""Distillation's losses beside slow ones that add up one pair at a time, by value and by gradient."""

import math

import pytest
import torch

from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.training.losses.distillation import (
    StaticFit,
    cosine_loss,
    fit_projection,
    prefixes,
    similarity_loss,
    squared_loss,
    top1_count,
)


def vectors(seed, count, size):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def cosine(one, other):
    return sum(a * b for a, b in zip(one, other, strict=True)) / (one.norm() * other.norm())


def slow_cosine(student, teacher):
    return sum(1 - cosine(s, t) for s, t in zip(student, teacher, strict=True)) / len(student)


def slow_squared(student, teacher):
    apart = [sum((a - b) ** 2 for a, b in zip(s, t, strict=True)) for s, t in zip(student, teacher, strict=True)]
    return sum(apart) / len(student)


def slow_similarity(student, teacher, temperature):
    total = 0
    for row in range(len(student)):
        others = [other for other in range(len(student)) if other != row]
        wanted = [torch.exp(cosine(teacher[row], teacher[other]) / temperature) for other in others]
        given = [torch.exp(cosine(student[row], student[other]) / temperature) for other in others]
        for w, g in zip(wanted, given, strict=True):
            p, q = w / sum(wanted), g / sum(given)
            total = total + p * (torch.log(p) - torch.log(q))
    return total / len(student)


LOSSES = {
    "cosine": (cosine_loss, slow_cosine),
    "squared": (squared_loss, slow_squared),
    "similarity": (lambda s, t: similarity_loss(s, t, temperature=0.3), lambda s, t: slow_similarity(s, t, 0.3)),
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("fast", "slow"), LOSSES.values(), ids=LOSSES)
def test_values_and_gradients_are_those_of_the_slow_loss(fast, slow):
    teacher = vectors(1, 5, 4)
    one, other = (vectors(0, 5, 4).requires_grad_(True) for _ in range(2))
    quick, right = fast(one, teacher), slow(other, teacher)
    torch.testing.assert_close(quick, right)
    quick.backward()
    right.backward()
    torch.testing.assert_close(one.grad, other.grad)
    assert one.grad.abs().max() > 1e-3


@pytest.mark.usefixtures("double")
def test_similarities_do_not_ask_for_as_many_numbers():
    student, teacher = vectors(0, 6, 3), vectors(1, 6, 9)
    found = similarity_loss(student, teacher, temperature=0.1)
    torch.testing.assert_close(found, slow_similarity(student, teacher, 0.1))


def test_similarities_are_those_of_a_turned_space():
    teacher = vectors(0, 6, 4)
    turned, _ = torch.linalg.qr(vectors(1, 4, 4))
    assert similarity_loss(teacher @ turned, teacher, temperature=0.05).item() == pytest.approx(0, abs=1e-5)
    assert cosine_loss(teacher @ turned, teacher).item() > 0.1


def test_one_text_is_like_no_other():
    student = vectors(0, 1, 4).requires_grad_(True)
    loss = similarity_loss(student, vectors(1, 1, 4), temperature=0.1)
    loss.backward()
    assert loss.item() == 0
    assert not student.grad.any()


def test_nested_sizes_begin_with_all_and_leave_out_what_is_no_smaller():
    assert prefixes(8, [4, 2, 4, 8, 16]) == [8, 4, 2]


def test_found_first_counts_a_text_twice_in_the_batch():
    teacher = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert top1_count(torch.tensor([[1.0, 0.1], [1.0, 0.1], [1.0, 0.2]]), teacher) == 2


@pytest.mark.parametrize("ridge", [0.01, 1.0])
def test_vectors_of_tokens_are_least_squares(ridge):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 7, (40, 6), generator=generator)
    pooled = torch.arange(6) < torch.randint(1, 7, (40, 1), generator=generator)
    teacher = vectors(2, 40, 3).float()
    fit = StaticFit(8, 3, ridge=ridge)
    for part in range(0, 40, 16):
        own = pooled[part : part + 16]
        row, place = own.nonzero(as_tuple=True)
        tokens = ids[part : part + 16][row, place]
        fit.add(row, tokens, 1 / own.sum(1)[row], teacher[part : part + 16])
    found = fit.solve(tolerance=1e-7)
    counts = torch.zeros(40, 8, dtype=torch.float64)
    for row in range(40):
        own = [int(token) for token, counted in zip(ids[row], pooled[row], strict=True) if counted]
        for token in own:
            counts[row, token] += 1 / len(own)
    # Ridge as least squares on more rows: that of numpy's textbook.
    wide = torch.cat([counts, math.sqrt(ridge) * torch.eye(8, dtype=torch.float64)])
    wanted = torch.cat([teacher.double(), torch.zeros(8, 3, dtype=torch.float64)])
    torch.testing.assert_close(found, torch.linalg.lstsq(wide, wanted).solution.float(), atol=1e-5, rtol=1e-5)
    assert not found[7].any()


def test_a_fitted_projection_is_the_least_squares_one():
    states, wanted = vectors(0, 50, 6).float() + 3, vectors(1, 6, 4).float()
    teacher = states @ wanted
    head = ProjectionHead(HeadConfig(6, 4, "linear"))
    fit_projection(head, [(states[:20], teacher[:20]), (states[20:], teacher[20:])], ridge=1e-6)
    torch.testing.assert_close(head.outer.weight.T, wanted, atol=1e-3, rtol=0)
    # With a penalty its gradient, computed from the sum of squares, is zero.
    fit_projection(head, [(states, teacher)], ridge=0.5)
    weight = head.outer.weight.detach().double().requires_grad_()
    penalty = 0.5 * len(states) * states.double().var(dim=0, correction=0).mean()
    loss = (states.double() @ weight.T - teacher.double()).square().sum() + penalty * weight.square().sum()
    [gradient] = torch.autograd.grad(loss, weight)
    assert float(gradient.abs().max()) < 1e-3 * loss.item()
