"""Labelled texts that are made up, and a system whose vectors everybody can check."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.evaluation.fakes import FakeEncoder
from tests.evaluation.tables import write_lines

Rows = Sequence[tuple[str, object]]


class Letters(FakeEncoder):
    """Embeds a text as how often each letter of the alphabet occurs in it, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__("letters")
        self.encoded: list[str] = []
        self.prompts: list[str | None] = []

    def encode(self, texts: Sequence[str], *, prompt=None, normalize=False, show=None) -> np.ndarray:
        self.encoded += texts
        self.prompts.append(prompt)
        return np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float32)


def write_classification(folder: Path, name: str = "made-up", **splits: Rows) -> Path:
    """Write a folder of labelled texts below ``folder`` and return ``folder``."""
    for split, rows in splits.items():
        path = folder / "classification" / name / f"{split}.jsonl"
        write_lines(path, [{"text": text, "label": label} for text, label in rows])
    return folder


def fruits(n: int, start: int = 0) -> list[tuple[str, str]]:
    """Return ``n`` texts a class that a linear classifier of letters tells apart."""
    return [
        (f"{word * (1 + number % 3)} {'xyz'[number % 3]}{number}", label)
        for label, word in (("apple_tree", "appl"), ("fig-tree", "fig"), ("plum", "um"))
        for number in range(start, start + n)
    ]
