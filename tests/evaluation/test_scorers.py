"""Scorers against likelihoods that are computed one token at a time."""

import numpy as np
import pytest
import torch

import gerund
from gerund.evaluation.scorers import SCORERS, Evidence

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


def by_hand(lm, prefix, candidate):
    before = len(logprobs(lm, prefix))
    whole, alone = logprobs(lm, f"{prefix} {candidate}"), logprobs(lm, f" {candidate}")
    given = whole[before:]
    known = prefix.split()
    return {
        "cll": sum(given),
        "avg_cll": sum(given) / len(given),
        "avg_ull": sum(whole) / len(whole),
        "pmi": sum(given) - sum(alone),
        "overlap": np.mean([word in known for word in candidate.split()]),
    }


def test_every_scorer(lm):
    evidence = Evidence(lm, PREFIXES, CANDIDATES, show=False)
    for name, scorer in SCORERS.items():
        found = scorer(evidence)
        assert [len(own) for own in found] == [3, 2]
        if name == "random":
            continue
        for prefix, candidates, own in zip(PREFIXES, CANDIDATES, found, strict=True):
            expected = [by_hand(lm, prefix, candidate)[name] for candidate in candidates]
            np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


def test_chance_depends_on_the_seed_alone(lm):
    draws = [SCORERS["random"](Evidence(lm, PREFIXES, CANDIDATES, seed=seed))[0].tolist() for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
