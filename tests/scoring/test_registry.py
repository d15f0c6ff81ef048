"""Scorers by name in ``lm.score``, ``lm.generate`` and ``lm.stream``; and the one that counts agreement."""

import sys
from functools import partial

import numpy as np
import pytest

import gerund
from gerund import ConfigError, Generation, Ranked, Rerank, Sampling, TextError
from gerund.scoring import dual_encoder, registry
from gerund.scoring.likelihood import MEASURES, LikelihoodScorer
from gerund.scoring.registry import ConsensusScorer, find_scorer, score_samples
from gerund.scoring.relevance import standardized
from tests.threads import at_once

SAMPLING = Sampling(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


class Longest:
    """A scorer of one's own."""

    name = "longest"

    def score(self, prefixes, continuations):
        """Score by length."""
        assert len(prefixes) == len(continuations)
        return [[float(len(text)) for text in own] for own in continuations]


class TestScore:
    def test_default_is_pmi(self, lm):
        texts = [[" the rain", " a tin"], [" an end"]]
        assert lm.score(["the cat", "a"], texts) == lm.score(["the cat", "a"], texts, "pmi")

    @pytest.mark.parametrize("name", MEASURES)
    def test_every_name(self, lm, name):
        [scores] = lm.score(["the cat sat"], [[" the rain", " a tin"]], name)
        assert scores == LikelihoodScorer(lm, name).score(["the cat sat"], [[" the rain", " a tin"]])[0]

    def test_scorer_of_ones_own(self, lm):
        assert lm.score(["a"], [[" b", " cde"]], Longest()) == [[2.0, 4.0]]

    @pytest.mark.parametrize("name", ["model", "own"])
    def test_the_models_own_scorer(self, bundled, lm, name):
        texts = ["the cat sat"], [[" the rain", " a tin"]]
        assert bundled.score(*texts, name) == bundled.score(*texts)
        with pytest.raises(ConfigError, match="was not trained to score continuations"):
            lm.score(*texts, name)

    def test_mixed_is_the_mean_of_pmi_and_its_own(self, bundled, lm):
        texts = ["the cat sat", "a"], [[" the rain", " a tin", " on the mat"], [" dog"]]
        of_three, of_one = bundled.score(*texts, "mixed")
        parts = [bundled.score(*texts, name)[0] for name in ("pmi", "model")]
        assert of_three == pytest.approx(np.mean([(np.array(x) - np.mean(x)) / np.std(x) for x in parts], axis=0))
        assert of_one == [0.0]
        with pytest.raises(ConfigError, match="was not trained to score continuations"):
            lm.score(*texts, "mixed")

    def test_mixed_has_likelihoods_after_a_rendered_conversation(self, bundled):
        plain, rendered, texts = ["hello"], ["<user>hello<assistant>"], [[" dog", " the rain", " on the mat"]]
        mixed = find_scorer("mixed", bundled)
        pmi, own = bundled.score(rendered, texts, "pmi"), bundled.score(plain, texts, "model")
        expected = np.mean([standardized(np.array(scores[0])) for scores in (pmi, own)], axis=0)
        assert mixed.after(plain, rendered).score(plain, texts)[0] == pytest.approx(expected)
        assert mixed.after(plain, rendered).incremental().score(plain, texts)[0] == pytest.approx(expected, abs=1e-4)
        [best] = bundled.generate("the cat", 4, SAMPLING, rerank=Rerank(2, every=2, scorer="mixed"))
        assert isinstance(best, Ranked)
        with pytest.raises(TextError, match="prefix 0 has"):
            bundled.score(["the cat " * 2000], texts, "mixed")

    @pytest.mark.slow
    def test_default_is_the_scorer_inside(self, lm, bundled):
        texts = ["the cat sat"], [[" the rain", " a tin"]]
        assert lm.score(*texts, "default")[0] == pytest.approx(bundled.score(*texts)[0], abs=1e-4)
        [one] = lm.generate("the cat", 4, SAMPLING, rerank=Rerank(2, scorer="default"))
        assert isinstance(one, Ranked)

    def test_nothing_to_score(self, lm):
        assert lm.score([], []) == []

    @pytest.mark.parametrize(
        ("prefixes", "texts", "scorer", "error", "message"),
        [
            (["a", "b"], [[" c"]], None, TextError, "2 prefixes have 1 lists of continuations"),
            (["a", "b"], [[" c"], [" d", "  "]], None, TextError, "continuation 1 of prefix 1 is empty"),
            (["a"], [[" "]], "overlap", TextError, "continuation 0 of prefix 0 is empty"),
            (["a"], ["book"], None, TextError, "each prefix has a list of continuations, .* and not 'book'"),
            (["a"], "book", None, TextError, "each prefix has a list of continuations, .* and not 'book'"),
            (["a"], None, None, TextError, "each prefix has a list of continuations, .* and not None"),
            (["a"], [3], None, TextError, "each prefix has a list of continuations, .* and not 3"),
            (["a"], [[3]], None, TextError, "text 0 is not a string"),
            (["a"], [[" b"]], "pmy", ConfigError, "unknown scorer 'pmy'; valid are: avg_cll, cll"),
            (["a"], [[" b"]], 7, ConfigError, "`scorer` must be a name or an object with a `score` method, got 7"),
        ],
    )
    def test_mistakes(self, lm, prefixes, texts, scorer, error, message):
        with pytest.raises(error, match=message):
            lm.score(prefixes, texts, scorer)


class TestGenerate:
    @pytest.mark.parametrize("scorer", [*MEASURES, Longest()])
    def test_the_best_by_its_scorer(self, lm, scorer):
        [one] = lm.generate("the cat", 8, SAMPLING, rerank=Rerank(4, scorer=scorer))
        assert isinstance(one, Ranked)
        [competing] = one.history
        if scorer != "random":
            texts = [candidate.text for candidate in competing]
            [scores] = lm.score(["the cat"], [texts], scorer)
            assert [candidate.rank_score for candidate in competing] == pytest.approx(scores, abs=1e-4)
        assert one.rank_score == max(candidate.rank_score for candidate in competing)

    def test_several_prompts_are_scored_with_their_own(self, lm):
        prompts = ["the cat", "an inn in the rain", "a"]
        for prompt, one in zip(
            prompts, lm.generate(prompts, 6, SAMPLING, rerank=Rerank(3, beams=2, every=2)), strict=True
        ):
            [scores] = lm.score([prompt], [[candidate.text for candidate in one.beams]])
            assert [candidate.rank_score for candidate in one.beams] == pytest.approx(scores, abs=1e-3)

    def test_nucleus_where_nothing_is_said(self, lm):
        [one] = lm.generate("the cat", 6, rerank=Rerank(3))
        assert len(one.history[0]) > 1

    def test_without_it_nothing_changes(self, lm):
        [plain] = lm.generate("the cat", 6, SAMPLING)
        assert type(plain) is Generation

    def test_stream(self, lm):
        rerank = Rerank(3, beams=2, every=2)
        [one] = lm.generate("the cat", 9, SAMPLING, rerank=rerank)
        assert "".join(lm.stream("the cat", 9, SAMPLING, rerank=rerank)) == one.text

    def test_mistakes(self, lm):
        with pytest.raises(ConfigError, match="unknown scorer 'x'"):
            lm.generate("a", 3, rerank=Rerank(3, scorer="x"))

    @pytest.mark.parametrize("verb", ["generate", "stream"])
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ({"max_new_tokens": 2.5}, "max_new_tokens is a whole number, not 2.5"),
            ({"sampling": 0.8}, "sampling is a Sampling, .* not 0.8"),
            ({"sampling": {}}, "sampling is a Sampling, .* not {}"),
            ({"sampling": {"seed": 1}, "rerank": Rerank(2)}, "sampling is a Sampling"),
            ({"max_new_tokens": 2.5, "rerank": Rerank(2)}, "max_new_tokens is a whole number, not 2.5"),
            ({"rerank": "pmi"}, "rerank must be a Rerank, .* not 'pmi'"),
        ],
    )
    def test_arguments_of_the_wrong_kind(self, lm, verb, arguments, said):
        with pytest.raises(ConfigError, match=said):
            list(getattr(lm, verb)("a", **arguments))


def test_ranks_by_meaning(stories_folder):
    """A trained model of stories knows what follows."""
    lm = gerund.load(stories_folder, dtype="float32")
    prefix = "Once upon a time, there was a little girl named Lily. She loved to play in the"
    [[right, wrong]] = lm.score([prefix], [[" park with her friends.", " was a said dog the."]])
    assert right > wrong


def test_a_hub_id_may_be_either_kind(monkeypatch, tmp_path):
    (tmp_path / "scorer.json").write_text("{}")
    for folder, expected in ((tmp_path, "dual"), (tmp_path / "none", "t5"), (None, "t5")):
        monkeypatch.setattr(registry.loading, "settings_folder", lambda source, folder=folder: folder)
        monkeypatch.setattr(registry.DualScorer, "of_folder", lambda lm, _: ("dual", lm))
        monkeypatch.setattr(registry.T5Scorer, "load", lambda where: ("t5", where))
        assert registry.load_scorer("someone/scorer", load=lambda where: where) == (expected, "someone/scorer")


def test_a_scorer_of_vectors_is_shared_by_threads(monkeypatch):
    monkeypatch.setattr(dual_encoder, "_CACHED_PREFIXES", 4)

    def encode(texts):
        return np.array([[float(len(text)), 1.0] for text in texts])

    scorer = dual_encoder.VectorScorer("lengths", encode, encode)

    def work(first):
        for step in range(2000):
            own = [str((first + step + one) % 9) * (one + 1) for one in range(3)]
            assert scorer.prefix_vectors(own)[:, 0].tolist() == [1.0, 2.0, 3.0]

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        at_once([partial(work, first) for first in range(6)])
    finally:
        sys.setswitchinterval(usual)


TEXTS = [" the cat sat", " an inn in the rain", " the cat sat", " a tin"]


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
