"""Continuations of a batch that share characters with the true one are no negatives of it."""

import json

import numpy as np
import pytest
import torch

from gerund.errors import DataError
from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from gerund.scoring.word_overlap import OverlapScorer
from gerund.training.objectives.rankgen import read_passages
from tests.tiny import save_tiny
from tests.training.objectives.rankgen_recipes import WORDS, built, recipe, text


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory):
    """Passages of one book from every sentence on, with hard stretches, as `gerund negatives` writes them."""
    folder = tmp_path_factory.mktemp("overlapping")
    rng = np.random.default_rng(5)
    book = " ".join(f"{word.capitalize()} {text(rng, int(rng.integers(2, 5)))}" for word in rng.choice(WORDS, 40))
    (folder / "book.jsonl").write_text(json.dumps({"text": book}) + "\n")
    settings = NegativesConfig(prefix_words=14, fewest_words=3, most_words=10, generate=0.0, hard=3)
    make_negatives([folder / "book.jsonl"], folder / "passages", settings, scorer=OverlapScorer())
    return book, folder / "passages"


# Nothing is cut: of texts that are cut, equal beginnings are equal texts.
ROOM = {"length": 64, "continuation_length": 64}


def slow_overlaps(book, batch, rows):
    """Return which keys share a character with a query's true continuation, character by character."""
    right = [set(range(*example.span[1:])) for example, _ in rows]
    keys = [*right, *(set(range(*example.negative_spans[which])) for example, which in rows if which is not None)]
    for (example, _), characters in zip(rows, right, strict=True):
        assert book[min(characters) : max(characters) + 1] == example.continuation
    assert len(keys) == sum(len(group["identity"]) for name, group in batch.items() if name != "query")
    return [[not own.isdisjoint(key) for key in keys] for own in right]


class TestTrueContinuations:
    """Section 2.2: every other continuation of the batch is a negative; what overlaps the true one is right too."""

    @pytest.mark.parametrize("negatives", ["both", "inbook", "generative"])
    def test_are_never_negatives(self, base, overlapping, negatives):
        book, passages = overlapping
        _, objective, _ = built(recipe(base, passages, negatives=negatives, batch_size=24, **ROOM))
        batch = objective.batches.make(0, 0, 24)
        rows = [objective.batches.texts.row(number) for number in range(24)]
        if negatives == "inbook":
            rows = [(example, None) for example, _ in rows]
        overlaps = slow_overlaps(book, batch, rows)
        vectors = torch.randn(len(batch) * 24, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        queries, positives, *others = vectors.split([24] * len(batch))
        identities = [group["identity"].tolist() for group in batch.values()]
        keys, ids = torch.cat([positives, *others]), [own for group in identities[1:] for own in group]
        total, hidden = 0.0, 0
        for i in range(24):
            scores = [queries[i] @ keys[i]]
            for j in range(len(keys)):
                another = j != i and (j >= 24 or negatives != "generative")
                same = ids[j] in (identities[0][i], identities[1][i])
                hidden += another and overlaps[i][j] and not same
                if another and not same and not overlaps[i][j]:
                    scores.append(queries[i] @ keys[j])
            total += float(torch.logsumexp(torch.stack(scores), 0) - scores[0])
        assert hidden > (7 if negatives != "generative" else 0)
        loss, _ = objective.losses.compare(vectors, batch, gather=False)
        assert float(loss) == pytest.approx(total / 24, rel=1e-9)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({}, "no field 'span'; present are: document, prefix, continuation"),
            ({"span": [0, 9]}, "'span' holds 3 rising places of characters"),
            ({"span": [0, 9, 9]}, "'span' holds 3 rising places"),
            ({"span": [0, True, 9]}, "'span' holds 3 rising places"),
            ({"span": "0 9 12"}, "'span' holds 3 rising places"),
            ({"span": [0, 4, 9], "hard": ["a"]}, "1 texts in 'hard', and 0 in 'hard_spans'"),
            ({"span": [0, 4, 9], "hard": ["a"], "hard_spans": [[-1, 3]]}, "'hard_spans' holds 2 rising places"),
        ],
    )
    def test_malformed_places(self, tmp_path, row, message):
        (tmp_path / "p.jsonl").write_text(json.dumps({"document": 0, "prefix": "a", "continuation": "b"} | row))
        with pytest.raises(DataError, match=f"p.jsonl, line 1: {message}"):
            read_passages([tmp_path / "p.jsonl"])
