"""Training steps with compiled decoder layers, and with plain products for short texts, beside transformers' own way.

    python benchmarks/compiled_layers.py [--tokens 8192] [--lengths 32,64,128,256] [--rounds 5]

The embedded default model with a LoRA adapter, read both ways; pairs of random texts and their contrastive loss; bf16
autocast on a CPU that has it. Three sides take the same step: the fused attention kernel for every text, as
transformers has it; plain products where texts are short, as gerund trains; and that with compiled layers (`compile:
true`). Checks first that losses and gradients agree, then times the sides in turn.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from gerund.attention import interface
from gerund.attention.streams import decoder_layers
from gerund.inference.encode.runtime import EncoderRuntime, hidden_states
from gerund.models.pooling import pool
from gerund.training.compiling import compile_layers
from gerund.training.losses.contrastive import info_nce
from gerund.training.recipe import load_recipe
from gerund.training.subject import prepare_subject, uses_bf16

FUSED, PLAIN, COMPILED = SIDES = ("fused kernel", "plain products", "compiled layers")


def choose(side: str, model: nn.Module, short: int) -> None:
    """Make the next steps those of one side."""
    interface._SHORT = 0 if side == FUSED else short
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None
    if side == COMPILED:
        compile_layers(model)


def step(runtime: EncoderRuntime, ids_NT: Tensor, bf16: bool) -> list[float]:
    """Train on pairs of texts, the first half against the second; return the loss and the size of every gradient."""
    model = runtime.model
    model.zero_grad(set_to_none=True)
    real_NT = torch.ones_like(ids_NT, dtype=torch.bool)
    real_NT[::3, -5:] = False  # padding
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden_NTD = hidden_states(model, ids_NT, real_NT, runtime.plan)
    left_PD, right_PD = pool(hidden_NTD, real_NT, "mean").float().chunk(2)
    loss = info_nce(left_PD, right_PD, torch.arange(len(left_PD)), temperature=0.05) / len(left_PD)
    loss.backward()
    norms = (float(weight.grad.norm()) for weight in model.parameters() if weight.grad is not None)
    return [loss.item(), *norms]


def main() -> None:
    """Run all sides and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--lengths", default="32,64,128,256")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    recipe = load_recipe("magnet-default")
    subject, short, bf16 = prepare_subject(recipe, write=False), interface._SHORT, uses_bf16(recipe)
    runtime, model = subject.runtime, subject.model.train()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {'bf16' if bf16 else 'fp32'}")
    for length in map(int, arguments.lengths.split(",")):
        torch.manual_seed(0)
        ids_NT = torch.randint(100, model.config.vocab_size, (arguments.tokens // length, length))
        found, seconds = {}, {side: [] for side in SIDES}
        for side in SIDES:  # compiles, too
            choose(side, model, short)
            found[side] = step(runtime, ids_NT, bf16)
        apart = max(
            abs(a / b - 1) for side in SIDES for a, b in zip(found[side], found[FUSED], strict=True) if b > 1e-6
        )
        print(f"{len(ids_NT)} texts of {length} tokens: losses and gradients differ by {apart:.1e} at most")
        if apart > (0.1 if bf16 else 1e-3):
            raise SystemExit("the sides do not compute the same")
        for _ in range(arguments.rounds):
            for side in SIDES:
                choose(side, model, short)
                start = time.process_time()
                step(runtime, ids_NT, bf16)
                seconds[side].append(time.process_time() - start)
        medians = {side: statistics.median(values) for side, values in seconds.items()}
        for side, median in medians.items():
            print(
                f"  {side:16} {median:6.2f} s of processor time, {medians[FUSED] / median:.2f} times as fast as {FUSED}"
            )


if __name__ == "__main__":
    main()
