"""STS: MTEB's correlations against scipy's on cosines of our own, and what is refused."""

import numpy as np
import pytest
from scipy import stats

from gerund.errors import DataError
from gerund.evaluation.data_files import RatedPairs
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import PairClassification, Sts
from tests.evaluation.tables import Table, forbid_network, random_table, same_vectors, write_lines


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


def write(folder, name, rows):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(f"{score}\t{left}\t{right}\n" for score, left, right in rows))


# Ratings tie, and so do the cosines of the last two pairs.
ROWS = [(5, "a", "b"), (0, "c", "d"), (2.5, "a", "e"), (2.5, "b", "f"), (4, "d", "e"), (1, "e", "d")]


@pytest.fixture
def task(tmp_path):
    write(tmp_path / "sts", "small.test.tsv", ROWS)
    write(tmp_path / "sts", "small.dev.tsv", ROWS[:3])
    [found] = Sts.find(tmp_path)
    return found


def cosines(table, rows):
    pairs = [(np.asarray(table.vectors[left]), np.asarray(table.vectors[right])) for _, left, right in rows]
    return [float(left @ right / np.linalg.norm(left) / np.linalg.norm(right)) for left, right in pairs]


def test_tasks_are_the_test_sets_of_a_folder(tmp_path):
    for name in ("b.test.tsv", "a.test.tsv", "a.dev.tsv", "a.train.tsv", "c.train.tsv", "notes.txt"):
        write(tmp_path / "sts", name, ROWS)
    found = Sts.find(tmp_path)
    assert [(task.name, task.has_validation) for task in found] == [("sts/a", True), ("sts/b", False)]
    assert [path.name for path in found[0].files] == ["a.test.tsv", "a.dev.tsv"]
    assert Sts.find(tmp_path / "absent") == []


def test_correlations_are_scipys(task):
    table = random_table("abcdef")
    score = task.run(table, EvaluationConfig())
    ratings = [row[0] for row in ROWS]
    assert score.main == "cosine_spearman"
    assert score.value == pytest.approx(stats.spearmanr(cosines(table, ROWS), ratings)[0], abs=1e-6)
    assert score.metrics["cosine_pearson"] == pytest.approx(stats.pearsonr(cosines(table, ROWS), ratings)[0], abs=1e-6)
    assert score.size == 6
    assert score.notes == ()
    assert score.examples.targets == tuple(ratings)
    assert score.examples.values == pytest.approx(cosines(table, ROWS), abs=1e-6)


def test_all_that_is_encoded_is_known_before(task):
    for config in (
        EvaluationConfig(),
        EvaluationConfig(limit=2, prompts={"sts": "P: "}),
        EvaluationConfig(split="validation"),
    ):
        table = random_table("abcdef")
        task.run(table, config)
        assert table.heard() == {(task.prompt(config), text) for text in task.texts(config)}


def test_limit_and_split_choose_the_pairs(task):
    table = random_table("abcdef")
    assert task.run(table, EvaluationConfig(limit=4)).value == pytest.approx(
        stats.spearmanr(cosines(table, ROWS[:4]), [row[0] for row in ROWS[:4]])[0], abs=1e-6
    )
    assert task.run(table, EvaluationConfig(split="validation")).size == 3
    assert task.picture_data(EvaluationConfig(limit=1)) == RatedPairs(["a"], ["b"], [5.0])


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_constant_embeddings_score_nothing_and_say_so(task, value):
    score = task.run(same_vectors("abcdef", value), EvaluationConfig())
    assert score.metrics == {"cosine_spearman": 0.0, "cosine_pearson": 0.0}
    assert "cannot be computed" in score.notes[0]


def test_constant_ratings_score_nothing_and_say_so(tmp_path):
    write(tmp_path / "sts", "flat.test.tsv", [(3, "a", "b"), (3, "c", "d")])
    [task] = Sts.find(tmp_path)
    score = task.run(random_table("abcd"), EvaluationConfig())
    assert score.value == 0.0
    assert score.notes


def test_a_zero_vector_among_others_does_no_harm(task):
    table = random_table("abcdef")
    score = task.run(Table({**table.vectors, "c": [0.0] * 5}), EvaluationConfig())
    assert np.isfinite(score.value)


def test_one_pair_is_not_enough(task):
    with pytest.raises(DataError, match=r"small.test.tsv: a correlation needs two pairs"):
        task.run(random_table("abcdef"), EvaluationConfig(limit=1))


def test_without_dev_there_is_nothing_to_validate_on(tmp_path):
    write(tmp_path / "sts", "small.test.tsv", ROWS)
    [task] = Sts.find(tmp_path)
    with pytest.raises(DataError, match=r"no small.dev.tsv"):
        task.run(random_table("abcdef"), EvaluationConfig(split="validation"))


PAIRS = [("a", "b", 1), ("c", "d", 0), ("a", "e", 1), ("b", "f", 0), ("d", "e", 0), ("e", "d", 1), ("f", "a", 0)]


@pytest.fixture
def task_pair_classification(tmp_path):
    rows = [{"text1": left, "text2": right, "label": label} for left, right, label in PAIRS]
    write_lines(tmp_path / "pairs" / "small.jsonl", rows)
    [found] = PairClassification.find(tmp_path)
    return found


def test_average_precision_of_the_best_similarity(task_pair_classification):
    score = task_pair_classification.run(random_table("abcdef", seed=3), EvaluationConfig())
    assert (score.main, score.size) == ("max_ap", 7)
    assert 3 / 7 < score.metrics["cosine_ap"] <= score.value < 1
    assert 4 / 7 <= score.metrics["accuracy"] < 1


def test_constant_embeddings_score_the_share_of_ones(task_pair_classification):
    for value in (0.0, 1.0):
        score = task_pair_classification.run(same_vectors("abcdef", value), EvaluationConfig())
        precision = {"max_ap": pytest.approx(3 / 7), "cosine_ap": pytest.approx(3 / 7)}
        # The threshold 0 takes all of them; one that takes none is there where the cosine is below 1.
        assert score.metrics == {**precision, "accuracy": pytest.approx(4 / 7, abs=(1 / 7 + 1e-6) * value + 1e-6)}


def test_all_that_is_encoded_is_known_before_pair_classification(task_pair_classification):
    for config in (EvaluationConfig(), EvaluationConfig(limit=2, prompts={"pair-classification/small": "P: "})):
        table = random_table("abcdef")
        task_pair_classification.run(table, config)
        assert table.heard() == {
            (task_pair_classification.prompt(config), text) for text in task_pair_classification.texts(config)
        }


def test_pairs_of_one_kind_are_refused(task_pair_classification):
    with pytest.raises(DataError, match=r"small.jsonl: all pairs have label 1; both 0 and 1 are needed"):
        task_pair_classification.run(random_table("abcdef"), EvaluationConfig(limit=1))


def test_tasks_are_the_files_of_a_folder(task_pair_classification, tmp_path):
    assert task_pair_classification.name == "pair-classification/small"
    assert not task_pair_classification.has_validation
    assert PairClassification.find(tmp_path / "absent") == []
