"""What a plan adds to a forward pass beyond what its mask costs in plain SDPA.

    python benchmarks/plan_overhead.py [--rounds 30]

The same model, the same padded batch: once plain transformers in SDPA with the explicit 4-D mask that the
plan amounts to, once gerund's attention function with the plan. Checks first that both give the same states,
then times them in turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gerund.attention.interface import BoundPlan, attach
from gerund.attention.masks import visible
from gerund.attention.plan import AttentionPlan

LAYERS = 6


def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    """Return two models with the same random weights, the second attached to gerund's functions."""
    config = LlamaConfig(
        vocab_size=8192, hidden_size=384, intermediate_size=1024, num_hidden_layers=LAYERS, num_attention_heads=6
    )
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    ours = LlamaForCausalLM(config).eval()
    ours.load_state_dict(plain.state_dict())
    attach(ours)
    return plain, ours


@torch.no_grad()
def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    plain, ours = models()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {LAYERS} layers, d=384")
    for rows, length in ((32, 64), (8, 256), (2, 1024)):
        ids = torch.randint(0, 8192, (rows, length))
        real = torch.ones_like(ids)
        real[1:, -length // 8 :] = 0
        plan = AttentionPlan("mask0-bidir", k=LAYERS).resolve(LAYERS)

        def explicit(ids: torch.Tensor = ids, real: torch.Tensor = real) -> torch.Tensor:
            mask = visible(plan.views[0], ids.shape[1], real_BT=real)  # noqa: B023
            return plain.model(ids, attention_mask=mask, use_cache=False).last_hidden_state

        def planned(ids: torch.Tensor = ids, real: torch.Tensor = real) -> torch.Tensor:
            bound = BoundPlan(plan, real)  # noqa: B023
            return ours.model(ids, use_cache=False, attention_plan=bound).last_hidden_state

        difference = (explicit() - planned())[real.bool()].abs().max().item()
        if difference > 1e-5:
            sys.exit(f"the two sides differ by {difference:.1e}")
        ratio = paired(planned, explicit, arguments.rounds)
        print(f"  {rows:3} x {length:4} tokens: {100 * (ratio - 1):+.1f} % (largest difference {difference:.0e})")


def paired(one: Callable[[], object], other: Callable[[], object], rounds: int) -> float:
    """Return the median of the ratios one/other over pairs of runs next to each other."""
    ratios = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        one()
        middle = time.perf_counter()
        other()
        ratios.append((middle - start) / (time.perf_counter() - middle))
    return statistics.median(ratios[2:])


if __name__ == "__main__":
    main()
