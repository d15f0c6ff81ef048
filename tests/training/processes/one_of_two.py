"""What one of two processes does: it carries recipes out, one after the other.

Not a test by itself; starting.py starts it. What stopped it and what it told go to files.
"""

import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel

from gerund.errors import DataError, GerundError
from gerund.training.corpus.texts import Sources
from gerund.training.losses import vectors as by_length
from gerund.training.objectives.base import prepare_objectives
from gerund.training.processes import (
    check_shared_folder,
    gather_numbers,
    gather_rows,
    on_first_process,
    once_per_node,
    process_count,
    process_index,
)
from gerund.training.recipe import load_recipe
from gerund.training.run import _gathered, _start, train
from gerund.training.sharding import WEIGHTS, gather_trained, is_sharded, read_weights, whole
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model
from tests.training.outcomes import CrashError, crashing


def carry_out(recipe, overrides, *, resume=False, crash=None):
    """Train once; return what stopped it, as text, or None."""
    try:
        with crashing(crash):
            train(load_recipe(recipe, overrides), resume=resume)
    except (GerundError, CrashError) as error:
        return str(error) or type(error).__name__
    return None


def one_step(recipe, step, how="none"):
    """Return losses, gradients and the gradients' norm of one step from fresh adapters.

    In several processes all but the first begin without weights, and with other random numbers for what they do have.
    """
    first = process_index() == 0
    prepared = prepare_model(recipe, weights=first)
    objectives = prepare_objectives(recipe, prepared, Sources(recipe, prepared.tokenizer))
    module = TrainingModule(prepared.model, {objective.name: objective.losses for objective in objectives})
    torch.manual_seed(3 + process_index())
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            # Zeros at the start: then nothing would reach the other half of the adapter.
            torch.nn.init.normal_(parameter, std=0.1)
    before = gather_trained(module) if first else {}
    _start(recipe.model_copy(update={"sharding": how}), prepared, module, torch.device("cpu"))
    sharded = how == "fsdp2" and process_count() > 1
    assert is_sharded(module) == sharded
    assert by_length.may_split_passes(prepared.model) != sharded
    wrapped = DistributedDataParallel(module) if how == "none" and process_count() > 1 else module
    wrapped.train()
    data = StepData(objectives, steps=recipe.steps, processes=process_count())
    result = run_step(wrapped, objectives, data[step * process_count() + process_index()])
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    found = {f"gradient.{name}": whole(gradient) for name, gradient in gradients.items()}
    for name, value in result.losses.items():
        if process_count() > 1:
            torch.distributed.all_reduce(value)
        found[f"loss.{name}"] = value
    found["norm"] = whole(torch.nn.utils.get_total_norm(gradients.values()))
    if sharded:
        check_sharded(recipe, prepared, module, before)
    return found


def check_sharded(recipe, prepared, module, before):
    """Demand that sharded weights are spread, written, read and finished as whole ones."""
    first = process_index() == 0
    tensors = gather_trained(module, keep=first)
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    local = sum(p.to_local().numel() for p in module.parameters())
    assert local <= 0.6 * sum(p.numel() for p in module.parameters())
    with tempfile.TemporaryDirectory() as folder:
        other = {name: tensor + 1 for name, tensor in before.items()}
        [shared] = on_first_process(lambda: [other])
        save_file(shared, Path(folder) / f"{WEIGHTS}.safetensors")
        read_weights(module, Path(folder))
    finished = _gathered(recipe, prepared, module)
    if not first:
        assert finished is prepared
        return
    assert not is_sharded(finished.model)
    for name, parameter in finished.model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, other[f"model.{name}"])
        else:
            assert parameter.is_meta


def work_steps(folder: Path, rank: int, port: int) -> None:
    """Take one step by each recipe, with DDP and with FSDP2, as process ``rank`` of two."""
    with joined(folder, rank, port):
        # Each would read its texts in a number of passes of its own.
        by_length._CPU_TOKENS = 1
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))
        for path in sorted(folder.glob("*.yaml")):
            for how in ("none", "fsdp2"):
                found = one_step(load_recipe(path), 1, how)
                if rank == 0:
                    save_file(found, folder / f"{path.stem}-{how}.safetensors")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@contextmanager
def joined(folder, rank, port):
    """Be process ``rank`` of two, whose words go to a file."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ.update(
        {name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo"
    )
    # As torchrun does; accelerate warns where nobody has.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    with (folder / f"told-{rank}.txt").open("w", buffering=1) as told:
        sys.stdout = sys.stderr = told
        try:
            yield
        except BaseException:
            traceback.print_exc()
            raise


def work(folder: Path, rank: int, port: int) -> None:
    """Carry out the jobs of ``folder/jobs.json`` as process ``rank`` of two."""
    with joined(folder, rank, port):
        by_length._CPU_TOKENS = 1
        jobs = json.loads((folder / "jobs.json").read_text())
        stopped = [carry_out(**job) for job in jobs]
        (folder / f"stopped-{rank}.json").write_text(json.dumps(stopped))
        torch.distributed.destroy_process_group()


def work_nodes(folder: Path, rank: int, port: int) -> None:
    """Play a node of two with one process each: say in which order they go, and whether they see one folder."""
    with joined(folder, rank, port):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        torch.distributed.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=300))
        with once_per_node(), (folder / "order.txt").open("a") as order:
            order.write(f"{rank} begins\n")
            order.flush()
            time.sleep(0.2)
            order.write(f"{rank} ends\n")
        told = []
        for seen in (folder / "shared", folder / f"own-{rank}"):
            try:
                check_shared_folder(seen)
                told.append(None)
            except GerundError as error:
                told.append(str(error))
        (folder / f"nodes-{rank}.json").write_text(json.dumps(told))
        torch.distributed.destroy_process_group()


def complaint(work: object, rows: torch.Tensor) -> torch.Tensor:
    """Return what an error says, as bytes."""
    try:
        work(rows)
    except DataError as error:
        return torch.tensor(list(str(error).encode()), dtype=torch.uint8)
    return torch.zeros(1, dtype=torch.uint8)


def work_gathering(folder: Path, rank: int, port: int) -> None:
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
