"""MTEB's own tasks by name, with local rows in the place of what would be fetched."""

import sys

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from scipy import stats

from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.evaluation import mteb as mteb_tasks
from gerund.evaluation.mteb import TASKS_15, MtebNamed
from gerund.evaluation.registry import select
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import EvaluationConfig
from tests.evaluation.tables import forbid_network, random_table


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


def loads(monkeypatch, name, dataset):
    """Let a task of MTEB's load what is given instead of what it would fetch."""
    import mteb

    seeds = []

    def load_data(self, **_):
        seeds.append(self.seed)
        self.dataset = dataset(self) if callable(dataset) else dataset
        self.data_loaded = True

    monkeypatch.setattr(type(mteb.get_tasks(tasks=[name])[0]), "load_data", load_data)
    return seeds


PAIRS = [("a", "b", 5.0), ("c", "d", 0.0), ("a", "d", 2.0), ("b", "c", 1.0)]


def pairs(rows=PAIRS):
    left, right, ratings = zip(*rows, strict=True)
    return Dataset.from_dict({"sentence1": left, "sentence2": right, "score": ratings})


def spearman(table, rows):
    cosines = []
    for left, right, _ in rows:
        a, b = np.asarray(table.vectors[left]), np.asarray(table.vectors[right])
        cosines.append(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    return stats.spearmanr(cosines, [rating for *_, rating in rows])[0]


def test_the_fifteen_tasks_of_the_papers():
    tasks = select(["MTEB15", "STS12", "STS17"], None)
    assert [task.name for task in tasks] == [f"mteb/{name}" for name in (*TASKS_15, "STS12")]
    assert len(TASKS_15) == 15
    assert all(
        task.files == () and task.capability is Encodes and task.texts(EvaluationConfig()) == [] for task in tasks
    )


def test_known_names_are_text_tasks():
    names = MtebNamed.known_names()
    assert set(TASKS_15) < set(names)
    assert names == sorted(set(names))
    assert len(names) > 500
    assert "CIFAR10ZeroShot" not in names


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"unknown task 'STSBenchmrak'.*did you mean.*mteb/STSBenchmark"):
        select(["STSBenchmrak"], None)


def test_a_named_task_is_scored_by_mteb(monkeypatch):
    seeds = loads(monkeypatch, "STSBenchmark", {"test": pairs(), "validation": pairs(PAIRS[:2])})
    table = random_table("abcd")
    [task] = select(["STSBenchmark"], None)
    score = task.run(table, EvaluationConfig(prompts={"mteb": "P: "}, seed=1))
    assert score.main == "cosine_spearman"
    assert score.metrics == {"cosine_spearman": pytest.approx(spearman(table, PAIRS), abs=1e-6)}
    assert table.heard() == {("P: ", text) for text in "abcd"}
    assert seeds == [43]
    assert score.notes == ("MTEB recommends STSBenchmark.v2 instead",)


def test_limit_counts_rows(monkeypatch):
    loads(monkeypatch, "STSBenchmark", DatasetDict(test=pairs()))
    table = random_table("abcd")
    score = select(["STSBenchmark"], None)[0].run(table, EvaluationConfig(limit=3))
    assert score.value == pytest.approx(spearman(table, PAIRS[:3]), abs=1e-6)
    assert "the first 3 rows or queries" in score.notes


def test_of_many_languages_only_english_is_scored(monkeypatch):
    wrong = [(left, right, -rating) for left, right, rating in PAIRS]
    subsets = {"en-en": {"test": pairs()}, "en-de": {"test": pairs(wrong)}}
    loads(monkeypatch, "STS17", lambda task: {name: subsets[name] for name in task.hf_subsets})
    table = random_table("abcd")
    score = select(["STS17"], None)[0].run(table, EvaluationConfig())
    assert score.metrics == {"cosine_spearman": pytest.approx(spearman(table, PAIRS), abs=1e-6)}
    assert score.notes == ("of 11 subsets only en-en",)


def test_without_english_every_subset_is_scored_and_their_mean_is_shown(monkeypatch):
    import mteb

    several = {"a": pairs(), "b": pairs(PAIRS[:3])}
    name = next(
        task.metadata.name
        for task in mteb.get_tasks(task_types=["STS"], modalities=["text"])
        if len(task.hf_subsets) > 1
        and not any(all(one.startswith("eng-") for one in ones) for ones in task.metadata.eval_langs.values())
    )
    tables = list(several.values())
    loads(
        monkeypatch,
        name,
        lambda task: {
            subset: dict.fromkeys(task.metadata.eval_splits, tables[place % 2])
            for place, subset in enumerate(task.hf_subsets)
        },
    )
    table = random_table("abcd")
    score = select([name], None)[0].run(table, EvaluationConfig())
    parts = [value for metric, value in score.metrics.items() if metric != score.main]
    assert len(parts) > 1
    assert set(np.round(parts, 6)) == set(np.round([spearman(table, PAIRS), spearman(table, PAIRS[:3])], 6))
    assert score.value == pytest.approx(np.mean(parts))


def test_retrieval_gives_the_prompt_to_queries_and_the_limit_counts_them(monkeypatch):
    def dataset(_):
        return {
            "default": {
                "test": {
                    "corpus": Dataset.from_dict({"id": ["d1", "d2"], "title": ["", ""], "text": ["a", "b"]}),
                    "queries": Dataset.from_dict({"id": ["q0", "q1", "q2"], "text": ["e", "c", "d"]}),
                    "relevant_docs": {"q0": {}, "q1": {"d1": 1}, "q2": {"d2": 1}},
                    "top_ranked": None,
                }
            }
        }

    loads(monkeypatch, "NFCorpus", dataset)
    table = random_table("abcde")
    score = select(["NFCorpus"], None)[0].run(table, EvaluationConfig(limit=1, prompts={"mteb/NFCorpus": "Q: "}))
    assert score.main == "ndcg_at_10"
    assert table.heard() == {("Q: ", "c"), (None, "a"), (None, "b")}


def test_without_a_network_the_failure_is_one_sentence():
    [task] = select(["BIOSSES"], None)
    with pytest.raises(DataError, match=r"mteb/BIOSSES: MTEB could not fetch the data \(\w+\); they are") as caught:
        task.run(random_table("a"), EvaluationConfig())
    assert "\n" not in str(caught.value)


def test_without_mteb_the_way_to_it_is_told(monkeypatch):
    mteb_tasks._registry.cache_clear()
    monkeypatch.setitem(sys.modules, "mteb.get_tasks", None)
    try:
        with pytest.raises(MissingDependencyError, match=r"pip install 'gerund\[eval\]'"):
            MtebNamed.known_names()
    finally:
        monkeypatch.undo()
        mteb_tasks._registry.cache_clear()
