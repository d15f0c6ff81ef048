"""Masked tokens and missing spans in one pass beside two: what sharing MAGNET's corrupted view saves.

    python benchmarks/shared_pass.py [--texts 16] [--length 128] [--rounds 5]

The embedded default model with a LoRA adapter, random texts. Both sides take the same corrupted view and compute the
same two losses and their gradients; checks first that these agree, then times the sides in turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from gerund.training.building import build_objectives
from gerund.training.estimating import RandomTexts
from gerund.training.objectives.hybrid import HybridLosses
from gerund.training.recipe import load_recipe
from gerund.training.subject import prepare_subject

RECIPE = "magnet-default"


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    sizes = [
        f"objectives.{kind}.{name}={value}"
        for kind in ("mntp", "msg")
        for name, value in (("batch_size", arguments.texts), ("length", arguments.length))
    ]
    recipe = load_recipe(RECIPE, [*sizes, "objectives.sscl.weight=0", "precision=fp32"])
    subject = prepare_subject(recipe, write=False)
    vocabulary = subject.model.get_input_embeddings().num_embeddings
    [objective] = build_objectives(recipe, subject, RandomTexts(vocabulary))
    batch = objective.batches.make(0, 0, arguments.texts)
    model, both = subject.model, objective.losses
    assert isinstance(both, HybridLosses)

    def one_pass() -> None:
        sum(both(model, batch).values()).backward()

    def two_passes() -> None:
        # The mask of both, so that each loss is the very one of the shared pass.
        for name in ("mntp", "msg"):
            both.names = (name,)
            sum(both(model, batch).values()).backward()
        both.names = ("mntp", "msg")

    ways = {"one pass": one_pass, "two passes": two_passes}
    first, second = (gradients(model, way) for way in ways.values())
    worst = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(first, second, strict=True))
    print(f"{arguments.texts} texts of {arguments.length} tokens; gradients differ by {worst:.1e} of the largest")
    if worst > 1e-3:
        raise SystemExit("the two sides do not compute the same")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name].append(time.process_time() - start)
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in medians.items():
        print(f"{name:12} {seconds:.2f} s of processor time")
    print(f"two passes / one pass {medians['two passes'] / medians['one pass']:.2f}")


def gradients(model: nn.Module, way: Callable[[], None]) -> list[torch.Tensor]:
    """Return the gradients that one way leaves on the adapter."""
    model.zero_grad()
    way()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


if __name__ == "__main__":
    main()
