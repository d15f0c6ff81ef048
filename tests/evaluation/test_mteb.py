"""The adapter to MTEB: its protocol, its own mock tasks, prompts, and vectors that nothing can be scored on."""

import logging
import random
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from scipy import stats

import gerund
from gerund.errors import ConfigError, DataError, MissingDependencyError, ModelError
from gerund.evaluation import mteb as mteb_tasks
from gerund.evaluation.mteb import TASKS_15, MTEBEncoder, MtebNamed, mteb_seed, own_random_state, quiet, score_of
from gerund.evaluation.registry import select
from gerund.evaluation.systems.base import EmbeddingCache, Encodes, key_of_text
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import Sts
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import PromptText
from tests.evaluation.tables import Table, forbid_network, random_table
from tests.tiny import byte_tokenizer, tiny


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    forbid_network(monkeypatch)


@pytest.fixture(scope="module")
def lm():
    tokenizer = byte_tokenizer()
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
    tokenizer.model_max_length = 512
    return gerund.LanguageModel(model, tokenizer, EncoderConfig(AttentionPlan("causal")), name="some/model")


def task_named(name="STSBenchmark", kind="STS"):
    return SimpleNamespace(name=name, type=kind)


def test_mteb_takes_it_for_an_encoder(lm):
    from mteb.models import CrossEncoderProtocol, EncoderProtocol, SearchProtocol

    encoder = MTEBEncoder(lm)
    assert isinstance(encoder, EncoderProtocol)
    assert not isinstance(encoder, (SearchProtocol, CrossEncoderProtocol))


@pytest.mark.parametrize(
    "kind", ["STS", "PairClassification", "Classification", "Clustering", "Retrieval", "Reranking"]
)
def test_mtebs_own_mock_tasks_run(lm, kind):
    import mteb
    from mteb import mocks

    task = getattr(mocks, f"Mock{kind}Task")()
    [result] = mteb.evaluate(
        MTEBEncoder(lm, show_progress=False), task, cache=None, co2_tracker=False, show_progress_bar=False
    ).task_results
    assert np.isfinite(result.get_score())


def test_results_are_kept_under_name_and_fingerprint(lm):
    meta = MTEBEncoder(lm).mteb_model_meta
    assert (meta.name, meta.revision) == ("some/model", lm.fingerprint())
    other = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan("bidir")))
    assert MTEBEncoder(other).mteb_model_meta.revision != meta.revision
    assert MTEBEncoder(lm, name="me/it").mteb_model_meta.name == "me/it"


def test_vectors_are_those_of_the_model_in_their_order(lm):
    batches = [{"text": ["a cat", "", "a very long dog"]}, {"text": ["an inn"]}]
    texts = [text for batch in batches for text in batch["text"]]
    raw = MTEBEncoder(lm).encode(batches, task_metadata=task_named(), hf_split="test", hf_subset="default")
    np.testing.assert_allclose(raw, lm.encode(texts, normalize=False, empty="zeros"), atol=1e-6)
    unit = MTEBEncoder(lm, normalize=True).encode(batches, task_metadata=task_named())
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), [1, 0, 1, 1], atol=1e-5)
    clustered = MTEBEncoder(lm).encode(batches, task_metadata=task_named("X", "Clustering"))
    np.testing.assert_array_equal(clustered, unit)
    kept = EmbeddingCache()
    MTEBEncoder(language_model_system("kept", lm, kept)).encode(batches, task_metadata=task_named())
    assert key_of_text("an inn") in kept.store(language_model_system("tiny", lm).cache_key, "")


def test_documents_may_have_a_prompt_of_their_own():
    table = random_table("a")
    encoder = MTEBEncoder(table, prompts={"SciDocsRR": "q"}, document_prompts={"SciDocsRR": "d"})
    for name, role in (("SciDocsRR", "document"), ("SciDocsRR", "query"), ("SciFact", "document")):
        encoder.encode([{"text": ["a"]}], task_metadata=task_named(name, "Reranking"), prompt_type=role)
    assert [prompt for prompt, _ in table.asked] == ["d", "q", None]


def test_the_name_chooses_the_prompt_before_the_type_and_documents_have_none():
    prompts = {"STS": "by type", "SICK-R": "by name", "Retrieval": "find"}
    asked = [
        (task_named(), None, "by type"),
        (task_named("SICK-R"), None, "by name"),
        (task_named("X", "Clustering"), None, None),
        (task_named("NFCorpus", "Retrieval"), "query", "find"),
        (task_named("NFCorpus", "Retrieval"), "document", None),
    ]
    for metadata, role, wanted in asked:
        table = random_table(["a"])
        MTEBEncoder(table, prompts=prompts).encode([{"text": ["a"]}], task_metadata=metadata, prompt_type=role)
        assert table.asked == [(wanted, ["a"])]


@pytest.mark.parametrize("given", [{}, {"Retrieval": "find: "}])
def test_queries_and_documents_are_read_in_the_encoders_own_prompts(lm, given):
    from mteb.types import PromptType

    own = lm.with_encoder(replace(lm.encoder, prompts={"query": "Ask", "document": "{text} is told"}))
    encoder, metadata = MTEBEncoder(own, prompts=given), task_named("X", "Retrieval")
    for role, wanted in ((PromptType.query, given.get("Retrieval", "Ask")), (PromptType.document, "{text} is told")):
        found = encoder.encode([{"text": ["a cat"]}], task_metadata=metadata, prompt_type=role)
        np.testing.assert_array_equal(found, lm.encode(["a cat"], PromptText(wanted), normalize=False))
    alone = encoder.encode([{"text": ["a cat"]}], task_metadata=task_named())
    np.testing.assert_array_equal(alone, lm.encode(["a cat"], normalize=False))


def test_similarities_are_cosines_and_zero_for_zero_vectors():
    encoder = MTEBEncoder(random_table(["a"]))
    a, b = np.array([[3.0, 4.0], [0.0, 0.0]]), np.array([[4.0, 3.0], [1.0, 0.0]])
    torch.testing.assert_close(encoder.similarity(a, b), torch.tensor([[0.96, 0.6], [0.0, 0.0]]))
    torch.testing.assert_close(encoder.similarity_pairwise(a, torch.tensor(b)), torch.tensor([0.96, 0.0]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_vectors_that_are_not_finite_are_refused(value):
    with pytest.raises(ModelError, match="table gives vectors that are not finite"):
        MTEBEncoder(Table({"a": [1.0, value]})).encode([{"text": ["a"]}], task_metadata=task_named())


def test_it_is_public():
    from gerund import evaluation

    assert evaluation.MTEBEncoder is MTEBEncoder


def test_the_default_seed_is_mtebs():
    assert mteb_seed(EvaluationConfig()) == 42
    assert mteb_seed(EvaluationConfig(seed=3)) == 45


def test_a_run_leaves_the_random_state_alone(tmp_path):
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "a.test.tsv").write_text("1\ta\tb\n2\tc\td\n")
    [task] = Sts.find(tmp_path)

    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    wanted = [draws(), draws()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    found = [draws()]
    task.run(random_table("abcd"), EvaluationConfig())
    assert [*found, draws()] == wanted


def test_the_random_state_comes_back_after_an_error():
    random.seed(1)
    wanted = random.random()
    random.seed(1)
    with suppress(KeyError), own_random_state():
        random.seed(5)
        raise KeyError
    assert random.random() == wanted


def test_only_what_is_expected_is_silenced_and_only_meanwhile():
    from sklearn.exceptions import ConvergenceWarning

    log = logging.getLogger("mteb")
    level = log.level
    with quiet():
        warnings.warn("lbfgs failed to converge after 100 iteration(s)", ConvergenceWarning, stacklevel=1)
        assert datasets.are_progress_bars_disabled()
        with pytest.raises(ConvergenceWarning):
            warnings.warn("liblinear failed to converge", ConvergenceWarning, stacklevel=1)
    assert not datasets.are_progress_bars_disabled()
    assert log.level == level
    with pytest.raises(ConvergenceWarning):
        warnings.warn("lbfgs failed to converge", ConvergenceWarning, stacklevel=1)


def test_what_is_not_defined_is_0_with_a_note():
    score = score_of({"a": float("nan"), "b": 0.5, "c": 1.0}, "a", ("b",), notes=["first"], size=3)
    assert score.metrics == {"a": 0.0, "b": 0.5}
    assert score.notes[0] == "first"
    assert score.notes[1].startswith("a cannot be computed")
    assert score.size == 3
    assert score_of({"a": 0.25}, "a").notes == ()


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
