"""A large contrastive batch by cached gradients, beside the plain loss of the same batch and of a small one.

    python benchmarks/cached_contrastive.py [--pairs 512 --chunk 32 --tokens 32] [--rounds 3]

The bundled model, random token ids, mean pooling, one training step a system and a process. Memory is the peak resident
size beyond that before the step, measured where freed memory goes back to the operating system at once, so that it is
what was in use and not what the allocator kept. Checks first that the cached loss and gradients are those of the plain
one. The goals are 1.3 of the memory of a plain step on one chunk, and 1.5 of the time of the plain batch.
"""

from typing import Any

import torch
from torch import Tensor, nn

import harness
from gerund.entry import load
from gerund.jobs.engine import peak_resident_mib
from gerund.training.losses.contrastive import cached_loss, info_nce
from results import Column, Table

MEMORY_GOAL, TIME_GOAL = 1.3, 1.5
SMALL, PLAIN, CACHED = SYSTEMS = ("plain, one chunk", "plain, whole batch", "cached, whole batch")


def embed(model: nn.Module, ids_PLT: Tensor) -> Tensor:
    """Return ``(P, 2, D)``: the vectors of both texts of every pair."""
    return model.base_model(ids_PLT.flatten(0, 1), use_cache=False).last_hidden_state.mean(dim=1).unflatten(0, (-1, 2))


def compare(pairs_P2D: Tensor) -> Tensor:
    """Return the mean loss of the pairs."""
    own = torch.arange(len(pairs_P2D))
    return info_nce(pairs_P2D[:, 0], pairs_P2D[:, 1], own, temperature=0.05) / len(pairs_P2D)


def step(system: str, model: nn.Module, chunks: tuple[Tensor, ...]) -> Tensor:
    """Compute one system's loss and gradients."""
    model.zero_grad(set_to_none=True)
    if system == CACHED:
        return cached_loss(lambda chunk: embed(model, chunk), chunks, compare)
    if system == SMALL:
        chunks = chunks[:1]
    # In chunks as well, so that nothing but the graph that is kept differs.
    loss = compare(torch.cat([embed(model, chunk) for chunk in chunks]))
    loss.backward()
    return loss.detach()


def child(case: dict[str, Any]) -> dict[str, Any]:
    """Run one system; return its memory, its seconds, and what it found."""
    model = load(adapter="none", dtype="float32", device="cpu").model.train()
    torch.manual_seed(0)
    ids_PLT = torch.randint(100, model.config.vocab_size, (case["pairs"], 2, case["tokens"]))
    ids_PLT[:, 1, ::2] = ids_PLT[:, 0, ::2]  # the texts of a pair have something in common
    chunks = ids_PLT.split(case["chunk"])
    before = peak_resident_mib()
    loss = step(case["system"], model, chunks)
    memory = peak_resident_mib() - before
    found = harness.loss_and_gradients(loss, model)
    if case["memory_only"]:
        return {"memory": memory}
    spent = harness.spend(lambda: step(case["system"], model, chunks))
    return {"cpu": spent.cpu, "wall": spent.wall, "found": found}


def main(argv: list[str] | None = None) -> None:
    """Compare all systems."""
    parser = harness.parser(__doc__)
    parser.add_argument("--pairs", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    options = harness.parse(parser, argv, quick={"pairs": 32, "chunk": 8, "tokens": 16})
    if options.child:
        harness.answer(child(options.child))
        return
    sizes = {key: getattr(options, key) for key in ("pairs", "chunk", "tokens")}
    cases = {name: {"system": name, "memory_only": False, **sizes} for name in SYSTEMS}
    rounds, found = harness.alternate_children(__file__, cases, options.rounds)
    apart = harness.relative_difference(found[CACHED][0]["found"], found[PLAIN][0]["found"])
    check = harness.require("largest relative difference of loss and gradients", apart, 1e-3)
    memory = {
        name: harness.in_child(__file__, {**case, "memory_only": True}, harness.RETURN_FREED_MEMORY)["memory"]
        for name, case in cases.items()
    }
    rows = rounds.rows(PLAIN)
    for row in rows:
        name = str(row["system"])
        row |= {"memory": memory[name], "of_small": memory[name] / memory[SMALL]}
        row |= {"of_plain": memory[name] / memory[PLAIN]}
    columns = harness.time_columns(
        PLAIN, Column("memory", "memory of the step", "MiB", 0), Column("of_small", f"of {SMALL}", "", 2),
        Column("of_plain", f"of {PLAIN}", "", 3),
    )  # fmt: skip
    caption = (
        f"A contrastive step on {options.pairs} pairs of texts of {options.tokens} tokens, chunks of {options.chunk} "
        f"pairs (goals: {MEMORY_GOAL} of the memory of one chunk, {TIME_GOAL} of the time of the plain batch)."
    )
    harness.report(options, __file__, [Table("step", caption, columns, rows, checks=[check])])


if __name__ == "__main__":
    main()
