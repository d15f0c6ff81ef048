"""The scorer that ranks samples by how much they agree."""

import numpy as np
import pytest

import gerund
from gerund import ConfigError, Rerank, Sampling
from gerund.scoring.registry import ConsensusScorer, score_samples

TEXTS = [" the cat sat", " an inn in the rain", " the cat sat", " a tin"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


def slow(lm, texts):
    """The mean cosine to the others, one pair at a time."""
    vectors = [lm.encode(text) for text in texts]
    cosines = [[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in vectors] for a in vectors]
    return [np.mean([cosine for other, cosine in enumerate(row) if other != own]) for own, row in enumerate(cosines)]


def test_is_the_mean_cosine_to_the_others(lm):
    groups = [TEXTS, [" a", " the end"], [" a"]]
    found = ConsensusScorer(lm).score(["x", "y", "z"], groups)
    for texts, scores in zip(groups[:2], found, strict=False):
        assert scores == pytest.approx(slow(lm, texts), abs=1e-5)
    assert found[2] == [0.0]
    assert lm.score(["x"], [TEXTS], "consensus")[0] == pytest.approx(found[0], abs=1e-6)
    assert ConsensusScorer(lm).score([], []) == []


def test_a_majority_wins(lm):
    scores = score_samples(ConsensusScorer(lm), ["x"], [[*TEXTS, " ", " the cat sat"]])[0]
    assert scores[0] == scores[2] == scores[5] == max(scores)
    assert scores[4] == -np.inf


def test_other_scorers_see_equal_texts_once():
    counting = Counting()
    [scores] = score_samples(counting, ["x"], [TEXTS])
    assert counting.asked == [list(dict.fromkeys(TEXTS))]
    assert scores == [len(text) for text in TEXTS]


class Counting:
    """A scorer that doesn't count repeats."""

    name = "counting"

    def score(self, prefixes, continuations):
        self.asked = [list(texts) for texts in continuations]
        return [[float(len(text)) for text in texts] for texts in continuations]


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
def test_best_of_is_short_for_rerank(lm, monkeypatch, method):
    rerank = Rerank(5, scorer="consensus")
    sampling = Sampling(temperature=1.0, seed=2)
    if method == "chat":
        monkeypatch.setattr(lm.tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} {% endfor %}")
    prompt = [{"role": "user", "content": "the cat"}] if method == "chat" else "the cat"
    call = getattr(lm, method)
    asked, expected = (
        call(prompt, 6, sampling, **how) for how in ({"best_of": 5, "rank": "consensus"}, {"rerank": rerank})
    )
    assert list(asked) == list(expected)
    with pytest.raises(ConfigError, match="`best_of` is a part of `rerank`; pass one of them, not both"):
        call(prompt, 6, sampling, best_of=2, rerank=rerank)


def test_the_best_is_nearest_to_all_samples(lm):
    [best] = lm.generate("the cat", 4, Sampling(temperature=1.0, seed=4), best_of=6, rank="consensus")
    assert len(best.candidates) == 6  # none was sampled twice
    scores = slow(lm, [one.text for one in best.candidates])
    assert [one.rank_score for one in best.candidates] == pytest.approx(scores, abs=1e-5)
    assert best.rank_score == pytest.approx(max(scores), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 0}, "samples must be at least 1, got 0"),
        ({"best_of": 3, "rank": "concensus"}, "unknown scorer 'concensus'; .* did you mean 'consensus'"),
        ({"best_of": 3, "temperature": 0}, "nothing to rank"),
        ({"best_of": 3, "n": 2}, "`n` can't be combined"),
    ],
)
def test_mistakes(lm, options, message):
    with pytest.raises(ConfigError, match=message):
        lm.generate("a", 3, **options)
