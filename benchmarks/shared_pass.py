"""Masked tokens and missing spans in one pass beside two: what sharing MAGNET's corrupted view saves.

    python benchmarks/shared_pass.py [--texts 16] [--length 128] [--rounds 5]

The bundled model with a LoRA adapter, random texts, fp32. Both systems take the same corrupted view and compute the
same two losses and their gradients; checks first that these agree, then times the systems in turn.
"""

from collections.abc import Callable

import torch
from torch import nn

import harness
from gerund.training.estimate import RandomTexts
from gerund.training.objectives.base import prepare_objectives
from gerund.training.objectives.hybrid import HybridLosses
from gerund.training.recipe import load_recipe
from gerund.training.trainable_model import prepare_model

RECIPE = "magnet-default"
ONE, TWO = "one pass", "two passes"


def gradients(model: nn.Module, way: Callable[[], None]) -> list[torch.Tensor]:
    """Return the gradients that one way leaves on the adapter."""
    model.zero_grad()
    way()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def main(argv: list[str] | None = None) -> None:
    """Compare one pass with two."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    options = harness.parse(parser, argv, quick={"texts": 4, "length": 64})
    sizes = [
        f"objectives.{kind}.{name}={value}"
        for kind in ("mntp", "msg")
        for name, value in (("batch_size", options.texts), ("length", options.length))
    ]
    recipe = load_recipe(RECIPE, [*sizes, "objectives.sscl.weight=0", "precision=fp32"])
    trainable = prepare_model(recipe, write=False)
    vocabulary = trainable.model.get_input_embeddings().num_embeddings
    [objective] = prepare_objectives(recipe, trainable, RandomTexts(vocabulary))
    batch = objective.batches.make(0, 0, options.texts)
    model, both = trainable.model, objective.losses
    assert isinstance(both, HybridLosses)

    def one_pass() -> None:
        sum(both(model, batch).values()).backward()

    def two_passes() -> None:
        # The mask of both, so that each loss is the very one of the shared pass.
        for name in ("mntp", "msg"):
            both.names = (name,)
            sum(both(model, batch).values()).backward()
        both.names = ("mntp", "msg")

    systems = {TWO: two_passes, ONE: one_pass}
    first, second = (gradients(model, way) for way in systems.values())
    apart = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(first, second, strict=True))
    check = harness.require("largest difference of a gradient, relative to its largest entry,", apart, 1e-3)
    rounds = harness.alternate(systems, options.rounds)
    caption = (
        f"MNTP and MSG on one corrupted view, {options.texts} texts of {options.length} tokens, LoRA, fp32 (goal: 1.6)."
    )
    harness.report(options, __file__, [rounds.table("passes", caption, base=TWO, checks=[check])])


if __name__ == "__main__":
    main()
