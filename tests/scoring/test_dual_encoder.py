"""Our own scorer inside a search: it reads what is new, and the search is the same."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import TextError
from gerund.inference.encode.incremental import IncrementalEncoder
from gerund.scoring.dual_encoder import DualScorer, ScorerConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.sampling import Rerank, Sampling

SAMPLING = Sampling(temperature=1.0, seed=5)
PROMPTS = ["the cat sat in", "an inn"]


def scorer_of(folder, attention="causal", **settings):
    encoder = gerund.load(folder, attention=attention, dtype="float32", pooling="last")
    projection = np.random.default_rng(0).normal(size=(encoder.dimensions, encoder.dimensions)).astype(np.float32)
    return DualScorer(encoder, ScorerConfig(**settings), projection)


@pytest.mark.parametrize("most", [128, 7])
def test_a_growing_scorer_gives_the_same_scores(tiny_folder, most):
    plain = scorer_of(tiny_folder, continuation_tokens=most)
    incremental = plain.incremental()
    assert incremental is not plain
    assert plain.incremental() is not incremental
    for texts in (
        [[" the"], [" a tin", " rain"]],
        [[" the cat", " the end"], [" a tin in", " rain"]],
        [[" then"], [" a"]],
    ):
        for own, other in zip(incremental.score(PROMPTS, texts), plain.score(PROMPTS, texts), strict=True):
            assert own == pytest.approx(other, rel=1e-4, abs=1e-4)


@pytest.mark.slow
def test_of_a_prefix_beyond_the_context_the_end_is_read_and_of_a_candidate_the_beginning(bundled):
    assert (bundled.scorer.settings.prefix_tokens, bundled.scorer.settings.continuation_tokens) == (157, 107)
    end = "The old man looked at the sea and thought of his boat. " * 20
    candidates = [" He went home.", " Interest rates rose."]
    [wanted] = bundled.score([end], [candidates])
    other = "Of all this nothing was known in the north, where it rained. " * 200
    with pytest.raises(TextError, match="context"):
        bundled.score([other], [candidates], "cll")
    assert bundled.score([other + end], [candidates])[0] == pytest.approx(wanted, abs=1e-6)
    assert bundled.score([other], [candidates])[0] != pytest.approx(wanted, abs=1e-3)
    begun = " He rowed home before the night, and slept." * 30
    [[once, longer]] = bundled.score([end], [[begun, begun + " " + other]])
    assert once == pytest.approx(longer, abs=1e-6)


def test_a_plan_that_looks_ahead_reads_anew(tiny_folder):
    plain = scorer_of(tiny_folder, attention="bidir")
    assert plain.incremental() is plain


@pytest.mark.slow
def test_the_search_is_the_same(tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    rerank = Rerank(4, beams=2, every=3, scorer=scorer_of(tiny_folder))
    found = lm.generate(PROMPTS, 12, SAMPLING, rerank=rerank)
    monkeypatch.setattr(DualScorer, "incremental", lambda self: self)
    expected = lm.generate(PROMPTS, 12, SAMPLING, rerank=rerank)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.rank_score for one in found] == pytest.approx([one.rank_score for one in expected], rel=1e-4)


@pytest.mark.slow
def test_what_a_search_has_read_goes_with_it(tiny_folder):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    scorer = scorer_of(tiny_folder)
    found = []
    init = IncrementalEncoder.__init__

    class Watched(IncrementalEncoder):
        def __init__(self, runtime):
            init(self, runtime)
            found.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gerund.scoring.dual_encoder.IncrementalEncoder", Watched)
            lm.generate(PROMPTS, 6, SAMPLING, rerank=Rerank(2, beams=2, every=2, scorer=scorer))
        assert found
        assert all(one() is None for one in found)
    finally:
        gc.enable()


def test_another_reading_has_no_scorer(tiny_folder):
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    lm.scorer = scorer_of(tiny_folder)
    assert lm.with_encoder(lm.encoder).scorer is lm.scorer
    other = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan("bidir")))
    assert other.scorer is None
    assert lm.scorer is not None


@pytest.mark.parametrize(
    ("prefixes", "continuations", "said"),
    [
        (["a", " "], [["b"], ["c"]], "prefix 1 is empty, and this scorer compares it with what follows"),
        (["a", "a"], [["b"], ["c", ""]], "continuation 1 of prefix 1 is empty"),
    ],
)
def test_of_nothing_there_is_no_vector(tiny_folder, prefixes, continuations, said):
    with pytest.raises(TextError, match=said):
        scorer_of(tiny_folder).score(prefixes, continuations)
