"""Scorers by name in ``lm.score``, and in ``lm.generate`` and ``lm.stream`` with ``rerank``."""

import sys
import threading

import numpy as np
import pytest

import gerund
from gerund import ConfigError, Generation, Ranked, Rerank, Sampling, TextError
from gerund.scoring import dual_encoder, registry
from gerund.scoring.likelihood import MEASURES, LikelihoodScorer

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
        with pytest.raises(ConfigError, match="there is nothing to rank"):
            lm.generate("a", 3, Sampling(), rerank=Rerank(3))
        with pytest.raises(ConfigError, match="samples must be at least 1, got 0"):
            Rerank(0)

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

    scorer, errors = dual_encoder.VectorScorer("lengths", encode, encode), []

    def work(first):
        try:
            for step in range(2000):
                own = [str((first + step + one) % 9) * (one + 1) for one in range(3)]
                assert scorer.prefix_vectors(own)[:, 0].tolist() == [1.0, 2.0, 3.0]
        except Exception as error:
            errors.append(error)

    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(usual)
    assert errors == []
