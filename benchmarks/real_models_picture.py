"""Draw `real_models.py`'s readings: score against cost, as `docs/pictures/real-models.png`.

    python benchmarks/real_models_picture.py

Reads `results/real_models.json` alone.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from results import RESULTS

OUTPUT = RESULTS.parents[1] / "docs" / "pictures" / "real-models.png"
KINDS = {"as it comes": ("o", "#444444"), "best layers and pooling": ("s", "#1f77b4"),
         "best with a transform": ("^", "#d95f02")}  # fmt: skip


def draw(tables: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw one panel a model: each pass as it comes, with its best layers and pooling, and with the best transform."""
    shown = [table for table in tables if table["id"].startswith("dev-")]
    figure, axes = plt.subplots(1, len(shown), figsize=(5.2 * len(shown), 4.6), squeeze=False, layout="constrained")
    for axis, table in zip(axes[0], shown, strict=True):
        for what, (marker, color) in KINDS.items():
            rows = [row for row in table["rows"] if row["what"] == what]
            axis.scatter(
                [row["cost"] for row in rows], [row["mean"] for row in rows], marker=marker, c=color, s=28, label=what
            )
        for row in (row for row in table["rows"] if row["what"] == "as it comes"):
            axis.annotate(row["pass"], (row["cost"], row["mean"]), (4, -9), textcoords="offset points", fontsize=7)
        axis.set_title(table["id"].removeprefix("dev-"))
        axis.set_xlabel("processor time (causal pass = 1)")
        axis.set_ylabel("mean of pairs, retrieval and intents, %")
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(argv)
    draw(json.loads((RESULTS / "real_models.json").read_text(encoding="utf-8"))["tables"], options.output)


if __name__ == "__main__":
    main()
