"""Contrastive training steps that pass texts of similar length together, beside one padded pass over each group.

    gerund mine ... -o pairs.parquet
    python benchmarks/pairs_by_length.py --folder . [--steps 4] [--rounds 3]

The steps of the recipe `gur-adapt` on the bundled model: 64 mined pairs of up to 128 tokens. Checks first that
both systems find the same loss and gradients, then times them in turn.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

import harness
from gerund.data.mining.candidates import MiningConfig
from gerund.data.mining.job import mine
from gerund.training.corpus.texts import Sources
from gerund.training.losses import vectors
from gerund.training.objectives.base import prepare_objectives
from gerund.training.processes import compile_layers, uses_bf16
from gerund.training.recipe import load_recipe
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model
from inputs import DEMO

PADDED, BY_LENGTH = SYSTEMS = ("one padded pass", "passes by length")


def main(argv: list[str] | None = None) -> None:
    """Compare both ways to pass a batch."""
    parser = harness.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the mined pairs are; with --quick pairs of the demo")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without compiled layers")
    options = harness.parse(parser, argv, quick={"steps": 1, "plain": True})
    if options.folder is not None:
        compare(options, [f"data.folder={options.folder}"])
    elif not options.quick:
        parser.error("--folder is missing")
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(options, demo_pairs(Path(folder)))


def demo_pairs(folder: Path) -> list[str]:
    """Mine a few pairs of the demo's documents; return the settings of the recipe that takes them."""
    mine([DEMO / "documents.jsonl"], folder / "pairs.parquet", MiningConfig(pairs="all", method="none"), show=False)
    return [f"data.folder={folder}", "objectives.gur.pairs.files=[pairs.parquet]", "objectives.gur.batch_size=4"]


def compare(options: Any, source: list[str]) -> None:
    """Check, time and report."""
    overrides = ["model.base=default", *source]
    if options.fp32:
        overrides.append("precision=fp32")
    recipe = load_recipe("gur-adapt", overrides)
    torch.manual_seed(0)
    trainable, bf16 = prepare_model(recipe, write=False), uses_bf16(recipe)
    objectives = prepare_objectives(recipe, trainable, Sources(recipe, trainable.tokenizer, print))
    module = TrainingModule(trainable.model, {one.name: one.losses for one in objectives}, bf16=bf16).train()
    if not options.plain:
        compile_layers(trainable.model)
    data = StepData(objectives, steps=options.steps)
    items = [data[number] for number in range(options.steps)]
    own = vectors.may_split_passes

    def choose(system: str, _round: int = 0) -> None:
        vectors.may_split_passes = lambda _model: system == BY_LENGTH

    def step(inputs: dict[str, Any]) -> float:
        module.zero_grad(set_to_none=True)
        return float(run_step(module, objectives, inputs).total)

    tokens = padded = 0
    apart = 0.0
    for inputs in items:  # compiles, too
        found = []
        for system in SYSTEMS:
            choose(system)
            found.append(harness.loss_and_gradients(step(inputs), module))
        apart = max(apart, harness.relative_difference(found[1], found[0]))
        tokens += sum(int(group["real"].sum()) for group in inputs["gur"].values())
        padded += sum(group["real"].numel() for group in inputs["gur"].values())
    check = harness.require("largest relative difference of loss and gradients", apart, 0.1 if bf16 else 1e-3)
    rounds = harness.alternate(
        dict.fromkeys(SYSTEMS, lambda: [step(inputs) for inputs in items]), options.rounds, prepare=choose
    )
    vectors.may_split_passes = own
    caption = f"{options.steps} contrastive steps of the recipe `gur-adapt`, {'bf16' if bf16 else 'fp32'}."
    table = rounds.table("steps", caption, base=PADDED, checks=[check])
    harness.report(options, __file__, [table], tokens=tokens, tokens_with_padding=padded)


if __name__ == "__main__":
    main()
