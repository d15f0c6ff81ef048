"""The processes of one training: who is the first, who waits for whom, and what all of them have to see.

Knows: ranks, nodes, torch's process group, what launchers leave in the environment. Does not know: models, texts.
"""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import distributed

from gerund.errors import ConfigError, GerundError
from gerund.training.losses.gathering import process_count

Found = TypeVar("Found")


def process_index() -> int:
    """Return the rank of this process: 0 is the first, and the only one where there is no group."""
    return distributed.get_rank() if process_count() > 1 else 0


def planned_processes() -> int:
    """Return how many processes a launcher has started, before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def wait() -> None:
    """Wait until all processes are here."""
    if process_count() > 1:
        distributed.barrier()


def by_the_first(find: Callable[[], Found]) -> Found:
    """Return what the first process finds, in all of them; a mistake that it finds is raised in all of them."""
    outcome: list[Any] = [None]
    if process_index() == 0:
        try:
            outcome = [find()]
        except GerundError as error:
            outcome = [error]
    if process_count() > 1:
        distributed.broadcast_object_list(outcome)
    [found] = outcome
    if isinstance(found, GerundError):
        raise found
    return cast("Found", found)


@contextmanager
def one_a_node() -> Iterator[None]:
    """Run the block in the first process, then in the first of every other node, then in all that are left.

    What is made on a disk is so made once where all nodes share it, and once a node where each has its own; the
    others find it.
    """
    local_index = int(os.environ.get("LOCAL_RANK", str(process_index())))
    turn = 0 if process_index() == 0 else 1 if local_index == 0 else 2
    for _ in range(turn):
        wait()
    yield
    for _ in range(2 - turn):
        wait()


def demand_shared_folder(folder: Path) -> None:
    """Refuse an output folder that the nodes do not share: checkpoints would be scattered.

    Raises:
        ConfigError: A process on another node does not see what the first one writes; raised in all of them.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", str(process_count()))) >= process_count():
        return

    def leave_sign() -> str:
        folder.mkdir(parents=True, exist_ok=True)
        sign = folder / f".seen-by-all-{secrets.token_hex(8)}"
        sign.touch()
        return sign.name

    name = by_the_first(leave_sign)
    seen: list[bool] = [False] * process_count()
    distributed.all_gather_object(seen, (folder / name).exists())
    if process_index() == 0:
        (folder / name).unlink()
    if not all(seen):
        raise ConfigError(
            f"process {seen.index(False)} does not see what the first one writes into {folder}: several nodes need an "
            "output folder that all of them share (data.cache may be a folder of each node's own)"
        )
