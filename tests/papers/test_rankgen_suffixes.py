"""Which continuation belongs to a prefix: candidates from files and from documents."""

import json
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers import rankgen_suffixes as human_or_generated
from gerund.papers.rankgen_suffixes import (
    ChoiceTask,
    HumanOrGenerated,
    InbookTask,
    SuffixTask,
    accuracy,
    rank_of,
    recalls,
)
from gerund.scoring.likelihood import MEASURES, Evidence
from gerund.scoring.word_overlap import WORD_MEASURES, OverlapScorer, overlap
from tests.data.test_passages import SENTENCES

ROWS = [
    {"prefix": "the cat", "suffixes": ["in the rain", "an end", "a tin"], "gold": 0},
    {"prefix": "a man", "suffixes": ["and an inn", "the sea", "in"], "gold": 2},
    {"prefix": "the sea", "suffixes": ["a", "in the tin", "and a man"], "gold": 1},
]


NOBODY = object()


@pytest.fixture(scope="module")
def lm(tiny_folder):
    lm = gerund.load(tiny_folder)
    # Room for whole passages in letters: rotary positions have no end.
    lm.tokenizer.model_max_length = lm.model.config.max_position_embeddings = 1024
    return lm


@pytest.fixture
def data(tmp_path):
    (tmp_path / "suffix").mkdir()
    (tmp_path / "lm").mkdir()
    (tmp_path / "suffix" / "swag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for split, step in (("test", 1), ("valid", -1)):
        book = " ".join(SENTENCES[::step])
        rows = [{"text": book}, {"text": "Too short."}, {"text": " ".join(SENTENCES[200:])}]
        (tmp_path / "lm" / f"books.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def inbook(data, **options):
    [task] = [task for task in SuffixTask.find(data) if isinstance(task, InbookTask)]
    return InbookTask(name=task.name, files=task.files, **{"prefix_words": 20, "continuation_words": 12, **options})


def test_tasks_are_found(data):
    assert {task.name: type(task) for task in SuffixTask.find(data)} == {
        "suffix-identification/books": InbookTask,
        "suffix-identification/swag": ChoiceTask,
    }
    assert SuffixTask.find(data / "none") == []


@pytest.mark.slow
def test_accuracies_are_those_of_the_scorers(data, lm):
    [task] = [task for task in SuffixTask.find(data) if isinstance(task, ChoiceTask)]
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(seed=5))
    evidence = Evidence(lm, [row["prefix"] for row in ROWS], [row["suffixes"] for row in ROWS], seed=5, show=False)
    for name, scorer in MEASURES.items():
        right = [int(np.argmax(own)) == row["gold"] for own, row in zip(scorer(evidence), ROWS, strict=True)]
        if name not in WORD_MEASURES:  # which have ties
            assert score.metrics[name] == pytest.approx(np.mean(right)), name
    assert (score.main, score.size) == ("avg_cll", 3)
    assert task.run(language_model_system("tiny", lm), EvaluationConfig(limit=2)).size == 2


def test_a_tie_shares_the_point():
    scores = [np.array([1.0, 1.0, 0.0]), np.array([0.0, 2.0]), np.array([5.0, 5.0, 5.0, 5.0])]
    assert accuracy(scores, [0, 0, 3]) == pytest.approx((1 / 2 + 0 + 1 / 4) / 3)


def test_the_right_continuation_stands_anywhere_among_ten_others(data):
    choices = inbook(data).choices(40, EvaluationConfig(seed=1), NOBODY)
    assert len(choices) == 40
    assert {len(choice.candidates) for choice in choices} == {11}
    assert len({choice.gold for choice in choices}) > 5
    book = " ".join(SENTENCES)
    for choice in choices:
        assert f"{choice.prefix} {choice.candidates[choice.gold]}" in book
        wrong = [text for place, text in enumerate(choice.candidates) if place != choice.gold]
        assert not any(f"{choice.prefix} {text}" in book for text in wrong)
    assert inbook(data).choices(40, EvaluationConfig(seed=1), NOBODY) == choices
    assert inbook(data).choices(40, EvaluationConfig(seed=2), NOBODY) != choices
    assert inbook(data).choices(5, EvaluationConfig(split="validation"), NOBODY) != inbook(data).choices(
        5, EvaluationConfig(), NOBODY
    )


@pytest.mark.slow
def test_two_of_the_eleven(data, lm):
    task = inbook(data, samples=6, scorer="pmi")
    score = task.run(language_model_system("tiny", lm), EvaluationConfig())
    assert score.main == "scorer"
    assert score.metrics["scorer"] == score.metrics["pmi"]
    assert score.metrics["scorer_2way"] == score.metrics["pmi_2way"]
    choices = task.choices(6, EvaluationConfig(), NOBODY)
    evidence = Evidence(lm, [c.prefix for c in choices], [c.candidates for c in choices], show=False)
    for name in ("avg_cll", "pmi"):
        found = MEASURES[name](evidence)
        eleven = [own.argmax() == choice.gold for own, choice in zip(found, choices, strict=True)]
        others = [0 if choice.gold else 1 for choice in choices]
        two = [own[c.gold] > own[other] for own, c, other in zip(found, choices, others, strict=True)]
        assert score.metrics[name] == pytest.approx(np.mean(eleven))
        assert score.metrics[f"{name}_2way"] == pytest.approx(np.mean(two))
    assert score.notes


def test_mistakes(data, tmp_path):
    with pytest.raises(DataError, match="no document is long enough for prefixes of 5000 words"):
        inbook(data, prefix_words=5000).choices(3, EvaluationConfig(), NOBODY)
    with pytest.raises(ConfigError, match="samples=0"):
        inbook(data, samples=0)
    with pytest.raises(ConfigError, match="at least 10 words"):
        inbook(data, continuation_words=3)


def test_hard_negatives_are_those_that_share_most_words(data, lm):
    easy, hard = (inbook(data, hard_by=name).choices(10, EvaluationConfig(), NOBODY) for name in ("", "overlap"))
    shared = [
        np.mean(
            [
                overlap(text.split(), choice.prefix.split())
                for choice in choices
                for place, text in enumerate(choice.candidates)
                if place != choice.gold
            ]
        )
        for choices in (easy, hard)
    ]
    assert shared[1] > shared[0]
    assert {len(choice.candidates) for choice in hard} == {11}
    book = " ".join(SENTENCES)
    assert all(f"{choice.prefix} {choice.candidates[choice.gold]}" in book for choice in hard)
    score = inbook(data, hard_by="overlap", samples=10, likelihoods=False).run(
        language_model_system("tiny", lm), EvaluationConfig()
    )
    cheap = {"overlap", "content_overlap", "random"}
    assert set(score.metrics) == cheap | {f"{name}_2way" for name in cheap}
    with pytest.raises(ConfigError, match="pmi differs from model to model"):
        inbook(data, hard_by="pmi").choices(2, EvaluationConfig(), NOBODY)
    with pytest.raises(ConfigError, match="unknown scorer 'nosuch'; valid are: overlap, content_overlap, default, the"):
        inbook(data, hard_by="nosuch").choices(2, EvaluationConfig(), NOBODY)


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
    # Texts that the model ends early are left out; which, depends on the processor's arithmetic.
    assert 4 <= len(choices) <= 6
    assert {choice.gold for choice in choices} == {0, 1}
    for choice in choices:
        right, wrong = choice.candidates[choice.gold], choice.candidates[1 - choice.gold]
        assert f"{choice.prefix} {right}" in " ".join(SENTENCES)
        assert wrong not in " ".join(SENTENCES)
        assert wrong == wrong.strip()
    assert task.choices(6, EvaluationConfig(seed=1), system) == choices
    assert task.choices(6, EvaluationConfig(seed=2), system) != choices


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


QUERIES = ["the cat in the rain", "an inn"]
TEXTS = ["a cat", "an inn in the rain", "the end"]


def test_ranks_are_those_of_sorting():
    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.permutation(20).astype(float)
        right = int(rng.integers(20))
        assert rank_of(scores, right) == sorted(scores, reverse=True).index(scores[right]) + 1
    assert rank_of(np.zeros(4), 2) == 4


def test_recalls():
    found = recalls([1, 2, 7, 60])
    assert [found[f"recall_at_{depth}"] for depth in (1, 3, 5, 10, 50)] == [0.25, 0.5, 0.5, 0.75, 0.75]
    assert found["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 7 + 1 / 60) / 4)


def test_scores_by_scorer_by_vectors_and_by_bm25(tiny_folder):
    one = language_model_system("tiny", gerund.load(tiny_folder))
    own = OverlapScorer()
    np.testing.assert_allclose(
        one.candidate_scores(QUERIES, TEXTS, scorer=own, prompt=None), own.score(QUERIES, [TEXTS, TEXTS])
    )
    vectors = one.lm.encode(TEXTS, normalize=True) @ one.lm.encode(QUERIES, normalize=True).T
    np.testing.assert_allclose(one.candidate_scores(QUERIES, TEXTS, scorer=None, prompt=None), vectors.T, atol=1e-5)
    pytest.importorskip("bm25s")
    found = BM25System().candidate_scores(QUERIES, TEXTS)
    assert found.shape == (2, 3)
    assert found[1].argmax() == 1
