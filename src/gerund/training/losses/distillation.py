"""What a student's vectors cost beside its teacher's: cosine, squared error, and the batch's similarities.

Knows: two matrices of vectors, processes. Does not know: where either comes from, models, texts.

Shapes: B texts of this process, K of all processes, E numbers of a vector.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gerund.training.losses.gathering import gather_numbers, gather_rows


def cosine_loss(student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Return the mean of one minus the cosine between each text's two vectors.

    >>> cosine_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item()
    1.0
    """
    return (1 - functional.cosine_similarity(student_BE, teacher_BE, dim=-1)).mean()


def squared_loss(student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Return the mean over texts of the squared distance between the two vectors.

    Of the distance and not of each number, so that its size does not depend on how many numbers there are: for
    vectors of length 1 it is twice the cosine loss.

    >>> squared_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])).item()
    25.0
    """
    return (student_BE - teacher_BE).pow(2).sum(-1).mean()


def similarity_loss(student_BE: Tensor, teacher_BE: Tensor, *, temperature: float, gather: bool = False) -> Tensor:
    """Return how far the student's view of a batch is from the teacher's.

    Each text's cosines to the other texts of the batch, divided by the temperature, are a distribution over them; the
    loss is the mean Kullback-Leibler divergence of the student's from the teacher's (Fang et al. 2021, SEED; Tejankar
    et al. 2021, ISD). The two need not have as many numbers.

    Args:
        student_BE: The student's vectors.
        teacher_BE: The teacher's, which may be wider or narrower.
        temperature: Cosines are divided by it, on both sides.
        gather: Whether the texts of other processes are compared with too.

    Returns:
        A scalar; 0 where there is only one text.

    >>> one = torch.eye(3)
    >>> similarity_loss(one, 5 * one, temperature=0.1).item()
    0.0
    """
    student_BE, teacher_BE = (functional.normalize(rows.float(), dim=-1) for rows in (student_BE, teacher_BE))
    student_KE, teacher_KE, first = student_BE, teacher_BE, 0
    if gather:
        student_KE, first = gather_rows(student_BE)
        teacher_KE = gather_numbers(teacher_BE)
    if len(student_KE) < 2:
        return student_BE.sum() * 0
    rows_B = torch.arange(len(student_BE), device=student_BE.device)
    others_BK = torch.ones(len(student_BE), len(student_KE), dtype=torch.bool, device=student_BE.device)
    others_BK[rows_B, first + rows_B] = False

    def view(own_BE: Tensor, all_KE: Tensor) -> Tensor:
        """Return the logarithm of a distribution over the other texts ``(B, K - 1)``."""
        cosines = (own_BE @ all_KE.T)[others_BK].view(len(own_BE), -1)
        return (cosines / temperature).log_softmax(-1)

    wanted = view(teacher_BE, teacher_KE)
    return functional.kl_div(view(student_BE, student_KE), wanted, reduction="batchmean", log_target=True)


def prefixes(width: int, matryoshka: Sequence[int]) -> list[int]:
    """Return how many first numbers of a vector are trained: all of them, and those of a nested loss.

    >>> prefixes(384, [64, 128])
    [384, 128, 64]
    """
    return [width, *sorted((size for size in set(matryoshka) if size < width), reverse=True)]


@torch.no_grad()
def found_first(student_BE: Tensor, teacher_BE: Tensor) -> int:
    """Return for how many texts the teacher's vector that is nearest to the student's is that of the same text."""
    student_BE, teacher_BE = (functional.normalize(rows.float(), dim=-1) for rows in (student_BE, teacher_BE))
    cosines_BB = student_BE @ teacher_BE.T
    # A text may be there twice.
    return int((cosines_BB.diagonal() >= cosines_BB.amax(1) - 1e-6).sum())
