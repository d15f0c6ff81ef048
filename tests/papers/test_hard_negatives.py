"""The hardest of all stretches, found a few at a time, against scoring every one of them at once."""

from dataclasses import dataclass

import numpy as np
import pytest

from gerund.papers.rankgen_negatives import Hardest
from gerund.scoring.dual_encoder import VectorScorer


@dataclass(frozen=True)
class Text:
    text: str


class Lengths:
    """Scores by length, which ties, and notes how many texts come at a time."""

    name = "lengths"

    def __init__(self):
        self.asked = []

    def score(self, prefixes, continuations):
        self.asked += map(len, continuations)
        return [[float(len(text)) for text in own] for own in continuations]


def vector_scorer(encoded):
    def encode(texts):
        encoded.extend(texts)
        return np.array([[len(text), text.count("a"), 1.0] for text in texts])

    return VectorScorer("vectors", lambda texts: np.array([[1.0, 3.0, 0.0] for _ in texts]), encode)


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return [Text("".join(rng.choice(list("ab"), int(rng.integers(1, 12))))) for _ in range(500)]


@pytest.mark.parametrize("count", [1, 10, 600])
@pytest.mark.parametrize("chunk", [1, 7, 256, 1000])
def test_are_the_best_of_all(texts, chunk, count):
    scorer = Lengths()
    found = Hardest(scorer, chunk=chunk).of("prefix", iter(texts), count)
    # Python's sort keeps the order of equals.
    assert [id(one) for one in found] == [id(one) for one in sorted(texts, key=lambda one: -len(one.text))[:count]]
    assert sum(scorer.asked) == 500
    assert max(scorer.asked) <= chunk


def test_nothing_to_choose_from():
    assert Hardest(Lengths()).of("prefix", iter([]), 3) == []


@pytest.mark.parametrize("room", [0, 12 * 40, 2**20])
def test_vectors_are_kept_within_their_room(texts, room):
    encoded = []
    scorer = vector_scorer(encoded)
    finder = Hardest(scorer, chunk=50, room=room)
    [scores] = vector_scorer([]).score(["prefix"], [[f" {one.text}" for one in texts]])
    order = sorted(range(len(texts)), key=lambda place: -scores[place])
    for _ in range(2):
        assert finder.of("prefix", texts, 10) == [texts[place] for place in order[:10]]
        assert len(finder._cache) * 12 <= room
    different = len({one.text for one in texts})
    if room == 2**20:
        assert len(encoded) == different  # the second time nothing is encoded anew
    else:
        assert len(encoded) > 1.5 * different
