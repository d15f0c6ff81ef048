"""Compare attention plans on sentence pairs that people have rated: which one reads this model best?

    python examples/compare_plans.py PAIRS.tsv [--model MODEL] [--limit 500]

PAIRS.tsv has a rating and two sentences a line, separated by tabs, as the STS Benchmark has. Printed is, for each plan,
Spearman's rank correlation between the ratings and the cosines. The weights are read without the model's adapter, which
was trained under one of the plans and would make the others look worse; `--adapter own` takes it all the same.
"""

import argparse
from pathlib import Path

import numpy as np

import gerund

PLANS = ("causal", "echo", "bidir", "inplace-back", "inter-back", "mask0-for", "mask0-bidir", "mask0+bidir")


def ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, equal values sharing the mean of theirs."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2)[group]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return the rank correlation of two rows of numbers."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def main() -> None:
    """Read the pairs, and print one line a plan, best first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    parser.add_argument("--adapter", default="none", help="own, none or a PEFT folder (%(default)s)")
    parser.add_argument("--limit", type=int, default=500)
    arguments = parser.parse_args()
    rows = [line.split("\t") for line in arguments.pairs.read_text(encoding="utf-8").splitlines()[: arguments.limit]]
    ratings = np.array([float(row[0]) for row in rows])
    adapter = None if arguments.adapter == "own" else arguments.adapter
    found = []
    for plan in PLANS:
        lm = gerund.load(arguments.model, attention=plan, adapter=adapter)
        left, right = lm.encode([row[1] for row in rows]), lm.encode([row[2] for row in rows])
        found.append((spearman(ratings, (left * right).sum(axis=1)), plan))
    for correlation, plan in sorted(found, reverse=True):
        print(f"{plan:<16}{correlation:.4f}")


if __name__ == "__main__":
    main()
