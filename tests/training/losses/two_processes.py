"""What one of two processes does, whose results go to a folder.

Not a test by itself; test_gathering.py starts it.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from gerund.errors import DataError
from gerund.training.processes import gather_numbers, gather_rows
from tests.training.processes.one_of_two import joined


def complaint(work: object, rows: torch.Tensor) -> torch.Tensor:
    """Return what an error says, as bytes."""
    try:
        work(rows)
    except DataError as error:
        return torch.tensor(list(str(error).encode()), dtype=torch.uint8)
    return torch.zeros(1, dtype=torch.uint8)


def work(folder: Path, rank: int, port: int) -> None:
    """Gather rows as process ``rank`` of two."""
    with joined(folder, rank, port):
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
        save_file(
            {name: tensor.contiguous() for name, tensor in gathered(rank).items()}, folder / f"{rank}.safetensors"
        )
        torch.distributed.destroy_process_group()


def gathered(rank: int) -> dict[str, torch.Tensor]:
    """Return what this process has seen, and what it was refused."""
    found = {}
    rows = torch.arange(4.0).view(2, 2) + 10 * rank
    found["rows"], first = gather_rows(rows.T)  # not contiguous
    found["first"] = torch.tensor(first)
    found["numbers"] = gather_numbers(torch.tensor([5, 6, 7])[::2] + rank)
    found["more rows"] = complaint(gather_rows, torch.zeros(2 + rank, 3))
    found["wider rows"] = complaint(gather_rows, torch.zeros(2, 3 + rank))
    found["more numbers"] = complaint(gather_numbers, torch.zeros(2 + rank))
    found["still in step"], _ = gather_rows(torch.full((1, 1), float(rank)))
    return found
