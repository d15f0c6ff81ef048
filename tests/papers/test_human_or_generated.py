"""A document's own continuation against a generated one."""

import json
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.papers import rankgen_suffixes as human_or_generated
from gerund.papers.rankgen_suffixes import HumanOrGenerated
from gerund.scoring.likelihood import MEASURES, Evidence
from tests.data.test_passages import SENTENCES


@pytest.fixture(scope="module")
def system():
    # A model of letters writes no ten words.
    return language_model_system("bundled", gerund.load(adapter="none", attention="mask0-bidir"))


@pytest.fixture
def task(tmp_path):
    (tmp_path / "lm").mkdir()
    rows = [{"text": " ".join(SENTENCES[:60])}, {"text": "Too short."}, {"text": " ".join(SENTENCES[100:180])}]
    (tmp_path / "lm" / "tales.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = HumanOrGenerated.find(tmp_path)
    return replace(found, prefix_words=20, continuation_words=12, samples=6, writer="own")


@pytest.mark.slow
def test_one_of_two_is_from_the_document(task, system):
    assert (task.name, type(task)) == ("human-or-generated/tales", HumanOrGenerated)
    choices = task.choices(6, EvaluationConfig(seed=1), system)
    assert len(choices) == 6
    assert {choice.gold for choice in choices} == {0, 1}
    for choice in choices:
        right, wrong = choice.candidates[choice.gold], choice.candidates[1 - choice.gold]
        assert f"{choice.prefix} {right}" in " ".join(SENTENCES)
        assert wrong not in " ".join(SENTENCES)
        assert wrong == wrong.strip()
    assert task.choices(6, EvaluationConfig(seed=1), system) == choices
    assert task.choices(6, EvaluationConfig(seed=2), system) != choices


@pytest.mark.slow
def test_accuracies_are_those_of_the_measures(task, system):
    score = task.run(system, EvaluationConfig())
    choices = task.choices(6, EvaluationConfig(), system)
    evidence = Evidence(system.lm, [c.prefix for c in choices], [c.candidates for c in choices], show=False)
    found = MEASURES["avg_cll"](evidence)
    right = [own.argmax() == choice.gold for own, choice in zip(found, choices, strict=True)]
    assert (score.main, score.size) == ("avg_cll", 6)
    assert score.metrics["avg_cll"] == pytest.approx(np.mean(right))
    assert "avg_cll_2way" not in score.metrics


@pytest.mark.slow
def test_the_scorer_alone(task, system):
    score = replace(task, scorer="overlap", likelihoods=False).run(system, EvaluationConfig())
    assert score.main == "scorer"
    assert score.metrics["scorer"] == score.metrics["overlap"]
    assert set(score.metrics) == {"scorer", "overlap", "content_overlap", "random"}


def test_length_gives_nothing_away(task, system, monkeypatch):
    """RankGen, section 2.2: generated continuations are of 10 to 128 words, as true ones are."""
    words = ["goes"] * 9
    written = [
        " ".join(words),
        " ".join([*words, "on", "for", "ever", "here.", *words, "again."]),
        "Short. " * 14,
        "A b.",
    ]
    given = iter(range(6))
    monkeypatch.setattr(
        human_or_generated, "continuations_of_length", lambda *_a, **_k: [written[next(given) % 4] for _ in range(6)]
    )
    choices = task.choices(6, EvaluationConfig(seed=1), system)
    assert len(choices) == 3  # the others are too short
    for choice in choices:
        assert all(10 <= len(text.split()) <= 12 for text in choice.candidates)
    monkeypatch.setattr(human_or_generated, "continuations_of_length", lambda *_a, **_k: ["A b."] * 6)
    with pytest.raises(DataError, match="own writes no 10 words behind any"):
        task.choices(6, EvaluationConfig(seed=1), system)


def test_mistakes(task, system):
    with pytest.raises(DataError, match="no document is long enough for prefixes of 900 words"):
        replace(task, prefix_words=900).run(system, EvaluationConfig())
    with pytest.raises(ConfigError, match="samples=0 leaves nothing"):
        replace(task, samples=0)
    with pytest.raises(ConfigError, match="at least 10 words"):
        replace(task, continuation_words=9)
