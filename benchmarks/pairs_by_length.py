"""Contrastive training steps that read texts of like length together, beside one padded pass over each group.

    gerund mine ... -o titles.parquet        (as the recipe default-encoder says)
    python benchmarks/pairs_by_length.py --folder . [--steps 4] [--rounds 3]

The steps of the recipe `default-encoder` on the embedded default model: 64 mined pairs of up to 128 tokens. Checks
first that both sides find the same loss and gradients, then times them in turn.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from gerund.training.building import CorpusTexts, build_objectives
from gerund.training.compiling import compile_layers
from gerund.training.corpus.sources import Sources
from gerund.training.objectives import contrastive
from gerund.training.recipe import load_recipe
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.subject import prepare_subject, uses_bf16

PADDED, BY_LENGTH = SIDES = ("one padded pass", "passes by length")


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", required=True, help="where the mined pairs are")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--plain", action="store_true", help="without compiled layers")
    arguments = parser.parse_args()
    overrides = ["model.base=default", f"data.folder={arguments.folder}"]
    if arguments.fp32:
        overrides.append("precision=fp32")
    recipe = load_recipe("default-encoder", overrides)
    torch.manual_seed(0)
    subject, bf16 = prepare_subject(recipe, write=False), uses_bf16(recipe)
    objectives = build_objectives(recipe, subject, CorpusTexts(Sources(recipe, subject.tokenizer, print)))
    module = TrainingModule(subject.model, {one.name: one.losses for one in objectives}, bf16=bf16).train()
    if not arguments.plain:
        compile_layers(subject.model)
    data = StepData(objectives, steps=arguments.steps)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {'bf16' if bf16 else 'fp32'}")

    def step(side: str, inputs: dict[str, Any]) -> list[float]:
        contrastive.passes_may_differ = lambda _model: side == BY_LENGTH
        module.zero_grad(set_to_none=True)
        total = float(run_step(module, objectives, inputs).total)
        return [total, *(float(weight.grad.norm()) for weight in module.parameters() if weight.grad is not None)]

    items = [data[number] for number in range(arguments.steps)]
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for inputs in items:  # compiles, too
        one, other = (step(side, inputs) for side in SIDES)
        apart = max(abs(a / b - 1) for a, b in zip(other, one, strict=True) if b > 1e-6)
        tokens = {name: int(group["real"].sum()) for name, group in inputs["gur"].items()}
        padded = {name: group["real"].numel() for name, group in inputs["gur"].items()}
        print(f"{sum(tokens.values())} tokens, {sum(padded.values())} with padding: apart by {apart:.1e} at most")
        if apart > (0.1 if bf16 else 1e-3):
            raise SystemExit("the sides do not compute the same")
    for _ in range(arguments.rounds):
        for side in SIDES:
            start = time.process_time()
            for inputs in items:
                step(side, inputs)
            seconds[side].append((time.process_time() - start) / len(items))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    for side, median in medians.items():
        print(f"  {side:17} {median:5.2f} s a step, {medians[PADDED] / median:.2f} times as fast as {PADDED}")


if __name__ == "__main__":
    main()
