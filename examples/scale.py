"""What bulk work with a large model needs, computed: GPU hours, hours, bytes, and what takes longest.

    python examples/scale.py [--texts 1e9] [--parameters 8e9] [--gpus 64] ...

docs/scale.md says where each rate comes from. Nothing here was run on a GPU.
"""

import argparse
from dataclasses import dataclass, fields

HOUR = 3600


@dataclass(frozen=True)
class Plan:
    """The work, the machines, and what one of them does a second."""

    texts: float = 1e9
    tokens: float = 128  # of a text
    size: float = 600  # bytes of a text
    parameters: float = 8e9
    dimensions: float = 4096
    pairs: float = 1e7  # that are trained on
    gpus: float = 64
    cores: float = 512
    flops: float = 989e12  # of a GPU, bfloat16, as its data sheet says
    use: float = 0.35  # of them that a model gets: assumed
    survey: float = 150e6  # bytes a second that one process reads, checks and hashes: measured
    tell: float = 140e6  # and reads again, to tell workers where they are: measured
    join: float = 400e6  # bytes of vectors a second that one process joins: measured
    mine: float = 6.5e6  # bytes a second and core: measured
    hand_out: float = 140e6  # bytes of documents a second that one process reads and sends: measured
    tidy: float = 1e6 * 256 / 384  # numbers of vectors a second that one machine indexes: measured

    @property
    def vectors(self) -> float:
        """Bytes of all vectors in float32."""
        return 4 * self.texts * self.dimensions

    def gpu_hours(self, operations: float) -> float:
        """Hours of one GPU."""
        return operations / (self.flops * self.use) / HOUR


def rows(plan: Plan) -> list[tuple[str, str, float, float]]:
    """Return each step: what it is, where it runs, GPU hours, and hours on all that it can use."""
    forward = 2 * plan.parameters * plan.tokens
    embed = plan.gpu_hours(plan.texts * forward)
    # Two texts a pair. Frozen weights: forward, backward for the activations, and forward again (checkpointing).
    train = plan.gpu_hours(2 * plan.pairs * 3 * forward)
    corpus = plan.texts * plan.size
    return [
        ("embed: first reading", "one process", 0, corpus / plan.survey / HOUR),
        ("embed: handing out", "one process, meanwhile", 0, corpus / plan.tell / HOUR),
        ("embed: the model", f"{plan.gpus:.0f} GPUs", embed, embed / plan.gpus),
        ("embed: joining the parts", "one process", 0, plan.vectors / plan.join / HOUR),
        ("mine: handing out", "one process, meanwhile", 0, corpus / plan.hand_out / HOUR),
        ("mine: the documents", f"{plan.cores:.0f} cores", 0, corpus / (plan.mine * plan.cores) / HOUR),
        ("train, LoRA", f"{plan.gpus:.0f} GPUs", train, train / plan.gpus),
        ("index: clusters and word lists", "one machine", 0, plan.texts * plan.dimensions / plan.tidy / HOUR),
    ]


def main() -> None:
    """Print the table, and the bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for one in fields(Plan):
        parser.add_argument(f"--{one.name}", type=float, default=one.default)
    plan = Plan(**vars(parser.parse_args()))
    print("| step | where | GPU hours | hours |\n|---|---|---|---|")
    for step, where, gpu_hours, hours in rows(plan):
        print(f"| {step} | {where} | {f'{gpu_hours:,.1f}' if gpu_hours else ''} | {hours:,.1f} |")
    print(f"\n{told(plan)}")


def told(plan: Plan) -> str:
    """Return what is stored and what goes over the network, in sentences."""
    seconds = rows(plan)[2][3] * HOUR  # of the model
    corpus, vectors, weights = plan.texts * plan.size, plan.vectors, 2 * plan.parameters
    return "\n".join(
        [
            f"- Texts {corpus / 1e12:.2f} TB. Vectors {vectors / 1e12:.1f} TB, while they are joined "
            f"{2 * vectors / 1e12:.1f} TB; as int8 {vectors / 4e12:.1f} TB, as bits {vectors / 32e12:.2f} TB.",
            f"- While the model runs, {corpus / seconds / 1e6:.1f} MB/s of texts leave the driver where workers do "
            f"not see the input, and {vectors / seconds / 1e6:.0f} MB/s of vectors go to storage.",
            f"- At the start each GPU reads {weights / 1e9:.0f} GB of weights, all together "
            f"{plan.gpus * weights / 1e12:.1f} TB.",
        ]
    )


if __name__ == "__main__":
    main()
