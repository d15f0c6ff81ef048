"""Runs of `make_negatives`, and what they leave."""

import json

from gerund.training.negatives import NegativesConfig, make_negatives

SENTENCES = [" ".join([f"W{i}", *(["a"] * (1 + i % 5)), "in."]) for i in range(60)]
SMALL = {"prefix_words": 12, "fewest_words": 3, "most_words": 9}


def rows(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("part-*.jsonl"))
        for line in path.read_text().split("\n")
        if line
    ]


def make(books, folder, lm=None, **changes):
    settings = {**SMALL, "generate": 0.0, "part_documents": 2, **changes}
    more = {name: settings.pop(name) for name in ("resume", "scorer", "force", "text_column") if name in settings}
    return make_negatives([books], folder, NegativesConfig(**settings), lm=lm, **more)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
