"""A large contrastive batch by cached gradients, beside the plain loss of the same batch and of a small one.

    python benchmarks/cached_contrastive.py [--pairs 512 --chunk 32 --tokens 32] [--rounds 3]

The embedded default model, random token ids, mean pooling, one training step a side and a process. Memory is the peak
resident size beyond that before the step, measured in a process of its own in which freed memory goes back to the
system at once, so that it is what was in use and not what the allocator kept; time is that of the CPU. Checks first
that the cached loss and gradients are those of the plain one. The goals are 1.3 of the memory of a plain step on one
chunk, and 1.5 of the time of a plain step on the whole batch.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from gerund.entry import load
from gerund.training.losses.cached import cached_loss
from gerund.training.losses.contrastive import info_nce

MEMORY_GOAL, TIME_GOAL = 1.3, 1.5
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc's
SIDES = ("plain, one chunk", "plain, whole batch", "cached, whole batch")


def embed(model: nn.Module, ids_PLT: Tensor) -> Tensor:
    """Return ``(P, 2, D)``: the vectors of both texts of every pair."""
    return model.base_model(ids_PLT.flatten(0, 1), use_cache=False).last_hidden_state.mean(dim=1).unflatten(0, (-1, 2))


def compare(pairs_P2D: Tensor) -> Tensor:
    """Return the mean loss of the pairs."""
    own = torch.arange(len(pairs_P2D))
    return info_nce(pairs_P2D[:, 0], pairs_P2D[:, 1], own, temperature=0.05) / len(pairs_P2D)


def step(side: str, model: nn.Module, chunks: tuple[Tensor, ...]) -> Tensor:
    """Compute one side's loss and gradients."""
    if side.startswith("cached"):
        return cached_loss(lambda chunk: embed(model, chunk), chunks, compare)
    if side == "plain, one chunk":
        chunks = chunks[:1]
    # In chunks as well, so that nothing but the graph that is kept differs.
    loss = compare(torch.cat([embed(model, chunk) for chunk in chunks]))
    loss.backward()
    return loss.detach()


def peak() -> float:
    """Return this process's peak resident size in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def work(arguments: argparse.Namespace) -> None:
    """Run one side; print its memory, its times, and what it found."""
    model = load(adapter="none", dtype="float32", device="cpu").model.train()
    torch.manual_seed(0)
    ids = torch.randint(100, model.config.vocab_size, (arguments.pairs, 2, arguments.tokens))
    ids[:, 1, ::2] = ids[:, 0, ::2]  # the texts of a pair have something in common
    before, seconds, found, memory = peak(), [], [], 0.0
    for index in range(arguments.rounds):
        model.zero_grad(set_to_none=True)
        start = time.process_time()
        loss = step(arguments.work, model, ids.split(arguments.chunk))
        seconds.append(time.process_time() - start)
        if not index:
            memory = peak() - before
            found = [loss.item(), *(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)]
    print(json.dumps({"memory": memory, "seconds": statistics.median(seconds), "found": found}))


def run(side: str, arguments: list[str], environment: dict[str, str]) -> dict:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--work", side]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run all sides and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments)
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {arguments.pairs} pairs of texts of ", end="")
    print(f"{arguments.tokens} tokens, chunks of {arguments.chunk} pairs")
    results = {}
    for side in SIDES:
        results[side] = run(side, sys.argv[1:], {})
        results[side]["memory"] = run(side, [*sys.argv[1:], "--rounds", "1"], RETURNING)["memory"]
    small, plain, cached = (results[side] for side in SIDES)
    apart = max(abs(a / b - 1) for a, b in zip(cached["found"], plain["found"], strict=True))
    print(f"  loss and gradients: largest relative difference to the plain loss {apart:.1e}")
    if apart > 1e-3:
        sys.exit("the cached gradients are not those of the plain loss")
    for side, result in results.items():
        print(f"  {side:20} peak {result['memory']:6.0f} MiB   {result['seconds']:6.2f} s of CPU")
    print(f"  memory {cached['memory'] / small['memory']:.2f} of a plain step on one chunk (goal {MEMORY_GOAL})")
    print(f"  memory {cached['memory'] / plain['memory']:.3f} of a plain step on the whole batch")
    print(f"  time {cached['seconds'] / plain['seconds']:.2f} of a plain step on the whole batch (goal {TIME_GOAL})")


if __name__ == "__main__":
    main()
