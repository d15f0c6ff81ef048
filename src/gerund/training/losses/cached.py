"""Contrastive losses over batches that do not fit the memory: cached gradients.

Knows: chunks, vectors, the state of the random numbers. Does not know: what a chunk holds, models, the trainer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from gerund.training.losses.vocabulary import trained_leaves


def cached_loss(
    embed: Callable[[Any], Tensor],
    chunks: Sequence[Any],
    compare: Callable[[Tensor], Tensor],
    *,
    backward: Callable[[Tensor, bool], None] | None = None,
) -> Tensor:
    """Compute a loss over all vectors of a batch and its gradients, in the memory of one chunk.

    GradCache (Gao et al., 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", section 3):
    every chunk is embedded without a graph; the loss on the vectors gives each its gradient; then each chunk is
    embedded anew, under the random numbers of the first time, and takes its vectors' gradients back. Value and
    gradients are those of the loss on all chunks at once, dropout included.

    What ``compare`` itself is trained in (a projection, a temperature) gets its gradient with the last chunk, through
    ``backward`` too: so scaling applies to it, and under DDP every parameter is touched by the one synchronised pass.

    Args:
        embed: from a chunk to its vectors ``(b, D)``.
        chunks: the batch in parts, at least one.
        compare: from the vectors of all chunks, ``(N, D)`` in their order, to a scalar loss; it may gather rows of
            other processes.
        backward: called for each chunk with a scalar whose gradients are the chunk's part of the loss's, and whether
            it is the last chunk; None runs ``scalar.backward()``. Only the gradients of that scalar mean anything.

    Returns:
        The loss, without a graph. Under ``no_grad`` that is all there is.

    >>> weight = torch.tensor([[2.0]], requires_grad=True)
    >>> rows = [torch.tensor([[1.0]]), torch.tensor([[3.0]])]
    >>> cached_loss(lambda chunk: chunk @ weight, rows, lambda vectors: vectors.square().sum()).item()
    40.0
    >>> weight.grad.item()
    40.0
    """
    if not chunks:
        raise ValueError("a loss needs at least one chunk")
    push = backward or _plainly
    if not torch.is_grad_enabled():
        return compare(torch.cat([embed(chunk) for chunk in chunks]))
    if len(chunks) == 1:
        loss = compare(embed(chunks[0]))
        push(loss, True)
        return loss.detach()
    begins: list[_RandomState] = []
    vectors: list[Tensor] = []
    with torch.no_grad():
        for chunk in chunks:
            begins.append(_RandomState.now())
            vectors.append(embed(chunk))
    # Older torch (2.8 among them) remembers the weights that autocast cast just now, cut off from their gradients.
    torch.clear_autocast_cache()
    all_ND = torch.cat(vectors).requires_grad_()
    loss = compare(all_ND)
    after = _RandomState.now()
    own = [leaf for leaf in trained_leaves(loss) if leaf is not all_ND]
    gradient_ND, *own_gradients = torch.autograd.grad(loss, [all_ND, *own], materialize_grads=True)
    parts = gradient_ND.split([len(rows) for rows in vectors])
    del vectors, all_ND
    for index, (chunk, begin, part_BD) in enumerate(zip(chunks, begins, parts, strict=True)):
        last = index == len(chunks) - 1
        begin.restore()
        scalar = (embed(chunk) * part_BD).sum()
        if last:
            scalar = scalar + sum((leaf * part).sum() for leaf, part in zip(own, own_gradients, strict=True))
            after.restore()
        push(scalar, last)
        del scalar  # its graph, before the next one is built
    return loss.detach()


def _plainly(scalar: Tensor, is_last_chunk: bool) -> None:
    del is_last_chunk
    scalar.backward()


@dataclass(frozen=True)
class _RandomState:
    """Where the random numbers stand, on the CPU and on every CUDA device."""

    cpu: Tensor
    cuda: list[Tensor]

    @classmethod
    def now(cls) -> Self:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
