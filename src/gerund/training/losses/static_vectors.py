"""A vector for each token whose mean over a text is near a teacher's vector of it: least squares in closed form.

Knows: tokens, vectors. Does not know: models, teachers, how texts are read.

Shapes: B texts, T tokens of a text, V tokens of the vocabulary, E numbers of a vector.
"""

import torch
from torch import Tensor

LARGEST_VOCABULARY = 32768
"""The normal equations are a matrix of so many rows and columns."""


class TokenVectorFit:
    """Least squares of a teacher's vectors on the mean over each text's tokens, with a small ridge.

    Only sums are kept, so any number of texts fits the memory.

    Args:
        vocabulary: How many tokens there are.
        dimensions: Numbers of a vector.
        ridge: Added to the diagonal, as a fraction of a text: how much a token has to be seen to count.

    >>> fit = TokenVectorFit(3, 1, ridge=1e-6)
    >>> ids_BT, pooled_BT = torch.tensor([[0, 1], [1, 1]]), torch.tensor([[True, True], [True, False]])
    >>> fit.add(ids_BT, pooled_BT, torch.tensor([[3.0], [4.0]]))
    >>> [round(value, 3) for value in fit.solve()[:, 0].tolist()]
    [2.0, 4.0, 0.0]
    """

    def __init__(self, vocabulary: int, dimensions: int, *, ridge: float = 0.01) -> None:
        self.vocabulary, self.ridge = vocabulary, ridge
        self.squares_VV = torch.zeros(vocabulary, vocabulary)
        self.products_VE = torch.zeros(vocabulary, dimensions)

    @torch.no_grad()
    def add(self, ids_BT: Tensor, pooled_BT: Tensor, teacher_BE: Tensor) -> None:
        """Add texts: their tokens, which of them are pooled, and their teacher's vectors."""
        weight_BT = pooled_BT.float() / pooled_BT.sum(1, keepdim=True).clamp(min=1)
        row_N, place_N = pooled_BT.nonzero(as_tuple=True)
        ids_N, weight_N = ids_BT[row_N, place_N], weight_BT[row_N, place_N]
        self.products_VE.index_add_(0, ids_N, weight_N[:, None] * teacher_BE[row_N])
        both_BTT = pooled_BT[:, :, None] & pooled_BT[:, None, :]
        pairs_BTT = ids_BT[:, :, None] * self.vocabulary + ids_BT[:, None, :]
        weights_BTT = weight_BT[:, :, None] * weight_BT[:, None, :]
        self.squares_VV.view(-1).index_add_(0, pairs_BTT[both_BTT], weights_BTT[both_BTT])

    @torch.no_grad()
    def solve(self) -> Tensor:
        """Return the vectors ``(V, E)``; zeros for a token that was never seen."""
        system_VV = self.squares_VV.double()
        system_VV.diagonal().add_(self.ridge)
        factor_VV = torch.linalg.cholesky(system_VV)
        found_VE: Tensor = torch.cholesky_solve(self.products_VE.double(), factor_VV).float()
        return found_VE
