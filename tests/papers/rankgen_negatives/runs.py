"""Runs of `make_negatives`, and what they leave."""

import json
from functools import partial

import torch

import gerund
from gerund.papers import rankgen_negatives as negative_passages
from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from gerund.scoring.word_overlap import OverlapScorer

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


def demand_same_elsewhere(engine, books, folder, model):
    """Make negatives in this process and by the workers of an engine: the same bytes."""
    settings = NegativesConfig(**{**SMALL, "generate": 0.5, "hard": 1, "per_document": 4, "part_documents": 2})
    lm, scorer = loaded(model)
    make_negatives([books], folder / "alone", settings, lm=lm, scorer=scorer)
    elsewhere = negative_passages.Elsewhere(engine, partial(loaded, model))
    made = make_negatives([books], folder / "spread", settings, lm=lm, scorer=scorer, elsewhere=elsewhere)
    assert made.generated > 0
    assert bytes_of(folder / "spread") == bytes_of(folder / "alone")


def loaded(model):
    torch.set_num_threads(1)
    return gerund.load(model, dtype="float32"), OverlapScorer()
