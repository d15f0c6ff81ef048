"""A system whose vectors are known, collections and files to score it on, and a network that is not there."""

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.evaluation.fakes import FakeEncoder


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
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors

    def heard(self) -> set[tuple[str | None, str]]:
        """Every text that was encoded, with its prompt."""
        return {(prompt, text) for prompt, texts in self.asked for text in texts}


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


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every connection an error."""

    def connect(*_: object) -> None:
        raise AssertionError("something reached for the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
