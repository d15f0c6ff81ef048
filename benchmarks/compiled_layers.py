"""Training steps with compiled decoder layers, and with plain products for short texts, beside transformers' own way.

    python benchmarks/compiled_layers.py [--tokens 8192] [--lengths 32,64,128,256] [--rounds 5]

The bundled model with a LoRA adapter under bidirectional attention; pairs of random texts and their contrastive loss;
bf16 autocast on a CPU that has it. Three systems take the same step: the fused attention kernel for every text, as
transformers has it; plain products where texts are short, as gerund trains; and that with compiled layers (`compile:
true`). Checks first that losses and gradients agree, then times the systems in turn.
"""

import torch
from torch import Tensor, nn

import harness
from gerund.attention import interface
from gerund.attention.layouts import decoder_layers
from gerund.inference.encode.runtime import EncoderRuntime, hidden_states
from gerund.poolings import pool
from gerund.training.losses.contrastive import info_nce
from gerund.training.processes import compile_layers, uses_bf16
from gerund.training.recipe import load_recipe
from gerund.training.trainable_model import prepare_model
from results import Column, Table

FUSED, PLAIN, COMPILED = SYSTEMS = ("transformers' fused kernel", "plain products", "compiled layers")
_SHORT = interface._SHORT


def choose(system: str, model: nn.Module) -> None:
    """Make the next steps those of one system."""
    interface._SHORT = 0 if system == FUSED else _SHORT
    for layer in decoder_layers(model):
        layer._compiled_call_impl = None
    if system == COMPILED:
        compile_layers(model)


def step(runtime: EncoderRuntime, ids_NT: Tensor, bf16: bool) -> Tensor:
    """Train on pairs of texts, the first half against the second; return the loss."""
    model = runtime.model
    model.zero_grad(set_to_none=True)
    real_NT = torch.ones_like(ids_NT, dtype=torch.bool)
    real_NT[::3, -5:] = False  # padding
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        hidden_NTD = hidden_states(model, ids_NT, real_NT, runtime.plan)
    left_PD, right_PD = pool(hidden_NTD, real_NT, "mean").float().chunk(2)
    loss = info_nce(left_PD, right_PD, torch.arange(len(left_PD)), temperature=0.05) / len(left_PD)
    loss.backward()
    return loss.detach()


def main(argv: list[str] | None = None) -> None:
    """Compare the systems at every length."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    parser.add_argument("--lengths", default="32,64,128,256", help="tokens of a text, with commas")
    parser.add_argument("--not-compiled", action="store_true", help="compiling takes minutes")
    options = harness.parse(parser, argv, quick={"tokens": 256, "lengths": "32", "not_compiled": True})
    systems = SYSTEMS[:2] if options.not_compiled else SYSTEMS
    recipe = load_recipe("magnet-default")
    trainable, bf16 = prepare_model(recipe, write=False), uses_bf16(recipe)
    runtime, model = trainable.runtime, trainable.model.train()
    rows, checks = [], []
    for length in map(int, options.lengths.split(",")):
        torch.manual_seed(0)
        ids_NT = torch.randint(100, model.config.vocab_size, (options.tokens // length, length))
        found = {}
        for system in systems:  # compiles, too
            choose(system, model)
            found[system] = harness.loss_and_gradients(step(runtime, ids_NT, bf16), model)
        apart = max(harness.relative_difference(found[system], found[FUSED]) for system in systems)
        what = f"largest relative difference of loss and gradients at {length} tokens"
        checks.append(harness.require(what, apart, 0.1 if bf16 else 1e-3))
        rounds = harness.alternate(
            dict.fromkeys(systems, lambda ids_NT=ids_NT: step(runtime, ids_NT, bf16)),
            options.rounds,
            prepare=lambda system, _: choose(system, model),
        )
        rows += rounds.rows(FUSED, texts=f"{len(ids_NT)} of {length} tokens")
    choose(PLAIN, model)
    caption = f"LoRA training steps on {options.tokens} tokens, pairs, bidirectional, {'bf16' if bf16 else 'fp32'}."
    columns = harness.time_columns(FUSED, Column("texts", "texts"))
    harness.report(options, __file__, [Table("steps", caption, columns, rows, checks=checks)])


if __name__ == "__main__":
    main()
