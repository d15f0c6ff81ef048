"""Systems whose vectors are known, texts and files to score them on, and a network that is not there."""

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gerund.evaluation.systems.base import Encoder
from gerund.models.vectors import unit

WORDS = ("a cat", "the rain", "an inn", "the end", "a thin man", "the sea", "in the tin", "another day")


class FakeEncoder(Encoder):
    """An encoder that only has what a test gives it; its vectors are all the same."""

    dimensions = 3
    max_length = None

    @property
    def name(self) -> str:
        return self.label

    @property
    def fingerprint(self) -> str:
        return self.label

    def describe(self) -> dict[str, Any]:
        return {"model": self.label}

    def prompt_text(self, prompt: str | None) -> str:
        return prompt or ""

    def compute(self, texts: list[str], prompt: str | None, show: bool | None, kept: Any = None) -> np.ndarray:
        return np.ones((len(texts), self.dimensions), np.float32)


class Table(FakeEncoder):
    """Gives each text the vector that a table has for it, and remembers what it was asked."""

    name = fingerprint = "table"
    max_length = None

    def __init__(self, vectors: Mapping[str, Sequence[float]]) -> None:
        super().__init__("table")
        self.vectors = vectors
        self.asked: list[tuple[str | None, list[str]]] = []

    @property
    def dimensions(self):
        return len(next(iter(self.vectors.values())))

    def encode(self, texts, *, prompt=None, normalize=False, show=None):
        self.asked.append((prompt, list(texts)))
        vectors = np.array([self.vectors[text] for text in texts], dtype=np.float32)
        return unit(vectors) if normalize else vectors

    def heard(self) -> set[tuple[str | None, str]]:
        """Every text that was encoded, with its prompt."""
        return {(prompt, text) for prompt, texts in self.asked for text in texts}


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


def random_table(texts: Sequence[str], width: int = 5, seed: int = 0) -> Table:
    """Give every text a random vector."""
    rng = np.random.default_rng(seed)
    return Table({text: rng.normal(size=width) for text in dict.fromkeys(texts)})


def same_vectors(texts: Sequence[str], value: float = 1.0) -> Table:
    """Give all texts one vector."""
    return Table({text: [value] * 3 for text in texts})


def write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_collection(
    folder: Path,
    documents: Mapping[str, str],
    queries: Mapping[str, str],
    judged: Sequence[tuple[str, str, int]],
    split: str = "test",
) -> Path:
    """Write a collection in BEIR's layout."""
    write_lines(folder / "corpus.jsonl", [{"_id": one, "title": "", "text": text} for one, text in documents.items()])
    write_lines(folder / "queries.jsonl", [{"_id": one, "text": text} for one, text in queries.items()])
    write_pairs(folder / "qrels" / f"{split}.tsv", ("query-id", "corpus-id", "score"), judged)
    return folder


def write_pairs(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Path:
    """Write a file of judgements or candidates."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in [header, *rows]), encoding="utf-8")
    return path


def write_classification(folder: Path, name: str = "made-up", **splits: Sequence[tuple[str, object]]) -> Path:
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


def write_data(folder: Path) -> Path:
    """Write sentence pairs, a collection, labelled texts and a corpus, small enough for a tiny model."""
    for split, shift in (("test", 1), ("dev", 2)):
        rows = [(f"{i % 6}", one, WORDS[(i * shift + i % 6) % 8]) for i, one in enumerate(WORDS)]
        write_pairs(folder / "sts" / f"small.{split}.tsv", rows[0], rows[1:])
    documents = {f"d{i}": f"{text} and more" for i, text in enumerate(WORDS)}
    queries = {f"q{i}": text for i, text in enumerate(WORDS[:4])}
    write_collection(folder / "retrieval" / "small", documents, queries, [(f"q{i}", f"d{i}", 1) for i in range(4)])
    write_classification(folder, "fruit", train=fruits(12), valid=fruits(4, 12), test=fruits(5, 20))
    text = "The cat sat in the rain. It was the end of another day. The man went to the inn. " * 12
    write_lines(folder / "lm" / "small.test.jsonl", [{"title": "one", "text": text}])
    return folder


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every connection an error."""

    def connect(*_: object) -> None:
        raise AssertionError("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
