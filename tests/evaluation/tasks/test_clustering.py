"""Clustering: MTEB's V-measure against its definition on k-means labels of our own."""

import random
from collections import Counter
from math import log

import numpy as np
import pytest
from sklearn.cluster import MiniBatchKMeans

from gerund.errors import DataError
from gerund.evaluation.mteb import mteb_seed
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.classification import Clustering
from tests.evaluation.tables import Table, forbid_network, same_vectors, write_lines


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


ROWS = [(f"text {number}", "abc"[number * number % 3]) for number in range(40)] + [("alone", "d")]
TEXTS = [text for text, _ in ROWS]


@pytest.fixture
def task(tmp_path):
    write_lines(tmp_path / "clustering" / "small.jsonl", [{"text": text, "label": label} for text, label in ROWS])
    [found] = Clustering.find(tmp_path)
    return found


def table_of():
    rng = np.random.default_rng(0)
    centres = {label: 2 * rng.normal(size=3) for label in "abcd"}
    return Table({text: centres[label] + rng.normal(size=3) for text, label in ROWS})


def entropy(values):
    counts = Counter(values).values()
    return -sum(count / len(values) * log(count / len(values)) for count in counts)


def v_measure(labels, clusters):
    """Harmonic mean of homogeneity and completeness (Rosenberg and Hirschberg, 2007)."""
    joint = entropy(list(zip(labels, clusters, strict=True)))
    h_label, h_cluster = entropy(labels), entropy(clusters)
    homogeneity = 1 - (joint - h_cluster) / h_label if h_label else 1.0
    completeness = 1 - (joint - h_label) / h_cluster if h_cluster else 1.0
    total = homogeneity + completeness
    return 2 * homogeneity * completeness / total if total else 0.0


def expected(table, rows, config):
    labels = [label for _, label in rows]
    vectors = np.array([table.vectors[text] for text, _ in rows], dtype=np.float32)
    seed = mteb_seed(config)
    rng = random.Random(seed)
    kmeans = MiniBatchKMeans(len(set(labels)), batch_size=512, n_init=1, random_state=seed)
    found = []
    for _ in range(10):
        places = rng.choices(range(len(rows)), k=len(rows))
        clusters = kmeans.fit_predict(vectors[places])
        found.append(v_measure([labels[place] for place in places], clusters.tolist()))
    return found


@pytest.mark.parametrize("seed", [0, 5])
def test_v_measure_is_that_of_k_means_on_the_same_samples(task, seed):
    config, table = EvaluationConfig(seed=seed), table_of()
    wanted = expected(table, ROWS, config)
    score = task.run(table, config)
    assert score.main == "v_measure"
    assert 0.05 < score.value < 0.95
    assert score.value == pytest.approx(np.mean(wanted), abs=1e-6)
    assert score.spread == pytest.approx(np.std(wanted), abs=1e-6)
    assert (score.runs, score.size) == (10, 41)
    assert score == task.run(table, config)


def test_limit_samples_texts(task):
    config, table = EvaluationConfig(limit=9), table_of()
    chosen = task.picture_data(config)
    rows = list(zip(chosen.texts, chosen.labels, strict=True))
    assert len(rows) == 9
    assert rows != ROWS[:9]
    assert set(rows) < set(ROWS)
    assert task.run(table, config).value == pytest.approx(np.mean(expected(table, rows, config)), abs=1e-6)


def test_all_that_is_encoded_is_known_before(task):
    for config in (EvaluationConfig(), EvaluationConfig(limit=9, prompts={"clustering": "P: "})):
        table = table_of()
        task.run(table, config)
        assert table.heard() == {(task.prompt(config), text) for text in task.texts(config)}


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_constant_embeddings_score_nothing(task, value):
    assert task.run(same_vectors(TEXTS, value), EvaluationConfig()).value == pytest.approx(0.0, abs=1e-9)


def test_a_single_label_is_refused(tmp_path):
    write_lines(tmp_path / "clustering" / "flat.jsonl", [{"text": text, "label": "a"} for text in TEXTS])
    [task] = Clustering.find(tmp_path)
    with pytest.raises(DataError, match=r"flat.jsonl: every text has the label 'a'"):
        task.run(table_of(), EvaluationConfig())


def test_tasks_are_the_files_of_a_folder(task, tmp_path):
    assert task.name == "clustering/small"
    assert not task.has_validation
    assert Clustering.find(tmp_path / "absent") == []
