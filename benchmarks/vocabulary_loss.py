"""Cross-entropy over a large vocabulary: `token_loss` beside whole logits and torch's `cross_entropy`.

    python benchmarks/vocabulary_loss.py [--vocabulary 128256 --width 256 --tokens 4096] [--rounds 3]

Each system runs one step (loss, gradients of states and head) in a process of its own: a first one, whose memory is
measured beyond what weights and states took before, and a second one that is timed. Checks first that both systems find
the same loss and gradients. The goal is a peak of at most 0.35 of the plain step's.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import harness
from gerund.jobs.engine import peak_resident_mib
from gerund.training.losses.vocabulary import token_loss
from results import Column, Table, median_of

GOAL = 0.35
WHOLE, OURS = "logits of all tokens", "gerund's token_loss"


def plain(head: nn.Linear, states_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return the loss from the logits of all positions."""
    return functional.cross_entropy(head(states_ND).float(), targets_N, reduction="sum")


def chunked(head: nn.Linear, states_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Return our loss."""
    return token_loss(head, states_ND, targets_N, parameters=tuple(head.parameters()))


SYSTEMS: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {WHOLE: plain, OURS: chunked}


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Run one system; return its memory, its seconds, and what it found."""
    torch.manual_seed(0)
    head = nn.Linear(case["width"], case["vocabulary"], bias=False)
    states_ND = torch.randn(case["tokens"], case["width"], requires_grad=True)
    targets_N = torch.randint(0, case["vocabulary"], (case["tokens"],))
    # Gradients are compared by their products with these.
    probes = torch.randn(case["width"], 4)

    def step() -> Tensor:
        head.zero_grad(set_to_none=True)
        states_ND.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=case["bf16"]):
            loss = SYSTEMS[case["system"]](head, states_ND, targets_N)
        loss.backward()
        return loss.detach()

    before = peak_resident_mib()
    loss = step()
    memory = peak_resident_mib() - before
    products = [(gradient @ probes).square().sum(dim=0).sqrt() for gradient in (head.weight.grad, states_ND.grad)]
    spent = harness.spend(step)
    return {
        "memory": memory, "cpu": spent.cpu, "wall": spent.wall, "found": [loss.item(), *torch.cat(products).tolist()],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Compare both systems in both precisions."""
    parser = harness.parser(__doc__)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    options = harness.parse(parser, argv, quick={"vocabulary": 4096, "tokens": 512})
    if options.child:
        harness.answer(child(options.child))
        return
    sizes = {key: getattr(options, key) for key in ("vocabulary", "width", "tokens")}
    rows, checks = [], []
    for label, bf16 in (("fp32", False), ("bf16 autocast", True)):
        cases = {name: {"system": name, "bf16": bf16, **sizes} for name in SYSTEMS}
        rounds, found = harness.alternate_children(__file__, cases, options.rounds)
        apart = harness.relative_difference(found[OURS][0]["found"], found[WHOLE][0]["found"])
        what = f"largest relative difference of loss and gradients, {label}:"
        checks.append(harness.require(what, apart, 1e-2 if bf16 else 1e-4))
        for row in rounds.rows(WHOLE, precision=label):
            name = str(row["system"])
            memory = [one["memory"] for one in found[name]]
            part = [one / whole["memory"] for one, whole in zip(memory, found[WHOLE], strict=True)]
            goal = {} if name == WHOLE else {"fraction": median_of(part), "goal": GOAL}
            rows.append({**row, "memory": median_of(memory), **goal})
    columns = harness.time_columns(
        WHOLE, Column("precision", "precision"), Column("memory", "peak memory of the loss", "MiB", 0),
        Column("fraction", f"of {WHOLE}", "", 3), Column("goal", "goal", "", 2),
    )  # fmt: skip
    caption = (
        f"Loss and gradients of {options.tokens} tokens, vocabulary {options.vocabulary:,}, width {options.width}."
    )
    harness.report(options, __file__, [Table("loss", caption, columns, rows, checks=checks)])


if __name__ == "__main__":
    main()
