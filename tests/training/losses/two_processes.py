"""What one of two processes does, whose results go to a folder.

Not a test by itself; test_gathering.py starts it and compares with one process.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from gerund.errors import DataError
from gerund.training.losses.contrastive import cached_loss, excluded_pairs, info_nce
from gerund.training.processes import gather_numbers, gather_rows
from tests.training.processes.one_of_two import joined

ROWS, WIDTH = 6, 5


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 4)).double()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs of queries and keys, all processes together, and the ids of the texts; some texts come twice."""
    torch.manual_seed(1)
    left, right = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return left, right, torch.tensor([0, 1, 2, 3, 9, 5]), torch.tensor([6, 7, 8, 9, 10, 6])


def loss(left: torch.Tensor, right: torch.Tensor, left_ids: torch.Tensor, right_ids: torch.Tensor) -> torch.Tensor:
    """Mean over the own rows of both directions against all rows; in one process these are all there are."""
    total = torch.zeros((), dtype=torch.float64)
    for queries, keys, query_ids, key_ids in ((left, right, left_ids, right_ids), (right, left, right_ids, left_ids)):
        all_keys, first = gather_rows(keys)
        positives = first + torch.arange(len(queries))
        excluded = excluded_pairs(query_ids, gather_numbers(key_ids), positives)
        total = total + info_nce(queries, all_keys, positives, temperature=0.1, excluded_BK=excluded) / 2
    return total / len(left)


def plain(net: nn.Module, left: torch.Tensor, right: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
    value = loss(net(left), net(right), *ids)
    value.backward()
    return value.detach()


def cached(net: nn.Module, left: torch.Tensor, right: torch.Tensor, *ids: torch.Tensor) -> torch.Tensor:
    chunks = [*left.split(2), *right.split(2)]
    return cached_loss(net, chunks, lambda all_ND: loss(*all_ND.chunk(2), *ids))


def results_of(way: str, own: slice, processes: int) -> dict[str, torch.Tensor]:
    """Return loss and gradients of a way to compute them, averaged over the processes as DDP does."""
    net = encoder()
    value = globals()[way](net, *(part[own] for part in batch()))
    found = {f"{way}.loss": value, **{f"{way}.{name}": p.grad for name, p in net.named_parameters()}}
    if processes > 1:
        for tensor in found.values():
            torch.distributed.all_reduce(tensor)
            tensor /= processes
    return found


def complaint(work: object, rows: torch.Tensor) -> torch.Tensor:
    """Return what an error says, as bytes."""
    try:
        work(rows)
    except DataError as error:
        return torch.tensor(list(str(error).encode()), dtype=torch.uint8)
    return torch.zeros(1, dtype=torch.uint8)


def work(folder: Path, rank: int, port: int) -> None:
    """Gather rows and gradients as process ``rank`` of two."""
    with joined(folder, rank, port):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        save_file(
            {name: tensor.contiguous() for name, tensor in gathered(rank).items()}, folder / f"{rank}.safetensors"
        )
        torch.distributed.destroy_process_group()


def gathered(rank: int) -> dict[str, torch.Tensor]:
    """Return what this process has seen, and what it was refused."""
    own = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    found = {**results_of("plain", own, 2), **results_of("cached", own, 2)}
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    found["rows"], first = gather_rows(rows.T)  # not contiguous
    found["first"] = torch.tensor(first)
    found["numbers"] = gather_numbers(torch.tensor([5, 6, 7])[::2] + rank)
    found["more rows"] = complaint(gather_rows, torch.zeros(2 + rank, 3))
    found["wider rows"] = complaint(gather_rows, torch.zeros(2, 3 + rank))
    found["more numbers"] = complaint(gather_numbers, torch.zeros(2 + rank))
    found["still in step"], _ = gather_rows(torch.full((1, 1), float(rank)))
    return found
