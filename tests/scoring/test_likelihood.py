"""Scorers against likelihoods that are computed one token at a time."""

import string

import numpy as np
import pytest
import torch

import gerund
from gerund.inference.encode.incremental import IncrementalEncoder
from gerund.scoring import likelihood
from gerund.scoring.likelihood import MEASURES, Evidence, LikelihoodScorer
from gerund.scoring.names import MEASURE_NAMES
from gerund.scoring.word_overlap import STOP_WORDS
from tests.tiny import save_tiny

PREFIXES = ["the cat sat in", "an inn"]
CANDIDATES = [["the rain", "a tin and another", "the end"], ["in the sea", "at an end"]]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


def logprobs(lm, text):
    """Return the log-probability of every token of a text after the beginning token, by one pass of the model."""
    ids = lm.tokenizer(text)["input_ids"]
    with torch.no_grad():
        scores = torch.log_softmax(lm.model(torch.tensor([ids])).logits[0].float(), dim=-1)
    return [scores[place - 1, ids[place]].item() for place in range(1, len(ids))]


def slow_content_overlap(candidate, prefix):
    """As RankGen's released code scores: lower case, no punctuation, no article, no stop word; precision, clipped."""
    texts = []
    for text in (candidate, prefix):
        plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        texts.append([word for word in plain.split() if word not in {"a", "an", "the"} and word not in STOP_WORDS])
    own, known = texts
    if not own:
        return 0.0 if known else 1.0
    found = 0
    for word in own:
        if word in known:
            known.remove(word)  # each word of the prefix is found once
            found += 1
    return found / len(own)


def by_hand(lm, prefix, candidate):
    before = len(logprobs(lm, prefix))
    whole, alone = logprobs(lm, f"{prefix} {candidate}"), logprobs(lm, f" {candidate}")
    given = whole[before:]
    ids = lm.tokenizer(f"{prefix} {candidate}")["input_ids"]
    with torch.no_grad():
        all_logprobs = lm.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)[before:-1]
    vocabulary = all_logprobs.shape[-1]
    sure = -(all_logprobs + np.log(vocabulary)).sum() / (len(all_logprobs) * vocabulary)
    known = prefix.split()
    return {
        "cll": sum(given),
        "avg_cll": sum(given) / len(given),
        "avg_ull": sum(whole) / len(whole),
        "self_certainty": sure.item(),
        "pmi": sum(given) - sum(alone),
        "overlap": np.mean([word in known for word in candidate.split()]),
        "content_overlap": slow_content_overlap(candidate, prefix),
    }


@pytest.mark.slow
def test_every_scorer(lm):
    evidence = Evidence(lm, PREFIXES, CANDIDATES, show=False)
    for name, scorer in MEASURES.items():
        found = scorer(evidence)
        assert [len(own) for own in found] == [3, 2]
        if name == "random":
            continue
        for prefix, candidates, own in zip(PREFIXES, CANDIDATES, found, strict=True):
            expected = [by_hand(lm, prefix, candidate)[name] for candidate in candidates]
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


def test_the_names_that_are_known_without_torch_are_those_of_the_measures():
    assert set(MEASURE_NAMES) == set(MEASURES)


@pytest.mark.parametrize("name", [name for name in MEASURES if name != "random"])
def test_scorer_reads_continuations_as_they_stand(lm, name):
    spaced = [[f" {candidate}" for candidate in own] for own in CANDIDATES]
    found = LikelihoodScorer(lm, name).score(PREFIXES, spaced)
    expected = MEASURES[name](Evidence(lm, PREFIXES, CANDIDATES, show=False))
    assert found == [own.tolist() for own in expected]


def test_chance_depends_on_the_seed_alone(lm):
    draws = [MEASURES["random"](Evidence(lm, PREFIXES, CANDIDATES, seed=seed))[0].tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_without_a_beginning_token_the_first_token_of_a_text_counts_nowhere(tmp_path):
    lm = gerund.load(save_tiny(tmp_path / "bare", bos=False))
    lm.tokenizer.bos_token = None
    evidence = Evidence(lm, ["a tin", ""], [["and x"], ["x", "the"]], show=False)
    scores = {name: scorer(evidence) for name, scorer in MEASURES.items()}
    # The helper leaves the first token out. " and x" is five tokens, of which four are predicted when it stands alone.
    whole, alone = logprobs(lm, "a tin and x"), logprobs(lm, " and x")
    assert (len(whole), len(alone)) == (8, 4)
    assert scores["cll"][0][0] == pytest.approx(sum(whole[-5:]), rel=1e-4)
    assert scores["pmi"][0][0] == pytest.approx(sum(whole[-4:]) - sum(alone), rel=1e-4)
    # After nothing " x" has one token that is predicted, and " the" is a single one.
    np.testing.assert_allclose(scores["avg_cll"][1], [logprobs(lm, " x")[0], 0.0], rtol=1e-4)
    np.testing.assert_allclose(scores["avg_ull"][1], scores["avg_cll"][1])


ROUNDS = [
    [[" the", " a tin", " rain"], [" in"]],
    [[" the cat", " the end", " rain and the", " rain in", " a tin"], [" in the", " in an inn", " ran"]],
    [[" the cat sat in the", " rain"], [" in the rain then"]],
]


@pytest.mark.parametrize("measure", ["avg_cll", "cll", "avg_ull", "pmi", "self_certainty"])
def test_texts_that_grow_have_the_same_scores(tiny_folder, measure):
    lm = gerund.load(tiny_folder, dtype="float32")
    prefixes = ["the cat sat in the rain and then the end of it", "an inn"]
    plain = LikelihoodScorer(lm, measure)
    growing = plain.incremental()
    for texts in ROUNDS:
        for own, other in zip(growing.score(prefixes, texts), plain.score(prefixes, texts), strict=True):
            assert own == pytest.approx(other, abs=2e-5)
    assert {key[0] for key in growing._states} == set(prefixes)
    growing.score(["a tin"], [[" inn"]])
    assert {key[0] for key in growing._states} == {"a tin"}


def test_a_prefix_is_read_once_for_many_candidates(tiny_folder, monkeypatch):
    lm = gerund.load(tiny_folder, dtype="float32")
    prefix, texts = "the cat sat in the rain and then the end of it", [" the", " a tin", " rain", " in", " an end"]
    [shared] = LikelihoodScorer(lm, "avg_cll").score([prefix], [texts])
    read = []
    run = IncrementalEncoder._run
    monkeypatch.setattr(
        IncrementalEncoder, "_run", lambda self, ids, *rest: (read.append(tuple(ids.shape)), run(self, ids, *rest))[1]
    )
    LikelihoodScorer(lm, "avg_cll").score([prefix], [texts])
    (one, length), (rows, new) = read
    assert (one, rows) == (1, 5)
    assert length > 3 * new
    monkeypatch.setattr(likelihood, "_WORTH_SHARING", 100)
    [alone] = LikelihoodScorer(lm, "avg_cll").score([prefix], [texts])
    assert len(read) == 2
    assert shared == pytest.approx(alone, abs=2e-5)
