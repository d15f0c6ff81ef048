"""lm-evaluation-harness on our models gives what our own likelihoods give, without a network."""

import json
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.lm_eval import (
    HarnessTask,
    _own_tasks,
    last_word_task,
    lm_eval_model,
    multiple_choice_task,
    run_tasks,
)
from gerund.inference.likelihood import continuation_logprobs
from tests.evaluation.tables import forbid_network

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CHOICES = [
    {"prefix": f"the {one}", "suffixes": [f"in the {two}", "and a man", f"{two} an end"], "gold": i % 3}
    for i, (one, two) in enumerate([("cat", "rain"), ("dog", "inn"), ("thin man", "sea"), ("day", "tin")])
]
TEXTS = ["the cat in the rain", "a man and another man", "in the end"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    forbid_network(monkeypatch)


@pytest.fixture
def data(tmp_path):
    for folder, name, rows in [("suffix", "swag", CHOICES), ("last_word", "words", [{"text": t} for t in TEXTS])]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def sums(lm, pairs):
    return [float(own.continuation.sum()) for own in continuation_logprobs(lm.model, lm.tokenizer, pairs)]


def test_multiple_choice_equals_our_likelihoods(lm, data):
    found = run_tasks(lm, [multiple_choice_task(data / "suffix" / "swag.jsonl", "swag")])["swag"]
    right = {"acc": [], "acc_norm": []}
    for row in CHOICES:
        scores = sums(lm, [(row["prefix"], f" {suffix}") for suffix in row["suffixes"]])
        right["acc"].append(np.argmax(scores) == row["gold"])
        lengths = [len(suffix) for suffix in row["suffixes"]]
        right["acc_norm"].append(np.argmax(np.array(scores) / lengths) == row["gold"])
    assert found == {name: pytest.approx(np.mean(values)) for name, values in right.items()}


def test_last_words_equal_our_likelihoods(lm, data):
    found = run_tasks(lm, [last_word_task(data / "last_word" / "words.jsonl", "words")])["words"]
    pairs = [(text.rpartition(" ")[0], f" {text.rpartition(' ')[2]}") for text in TEXTS]
    assert found["perplexity"] == pytest.approx(np.exp(-np.mean(sums(lm, pairs))), rel=1e-4)
    assert 0 <= found["acc"] <= 1


def test_the_harness_sees_the_untouched_model(lm, tiny_folder):
    both = gerund.load(tiny_folder, attention="bidir")
    both = both.with_encoder(replace(both.encoder, max_length=8))
    for own in (lm, both):
        harness = lm_eval_model(own)
        assert harness.model is own.model
        assert harness.tokenizer is not own.tokenizer
        assert harness.max_length == 64
    pairs = [("the cat", " in the rain")]
    assert sums(lm, pairs) == sums(both, pairs)


def test_as_tasks_of_an_evaluation(lm, data):
    tasks = {task.name: task for task in HarnessTask.find(data)}
    assert list(tasks) == ["lm-eval/swag.local", "lm-eval/words.local"]
    one = language_model_system("tiny", lm)
    whole, part = (tasks["lm-eval/swag.local"].run(one, EvaluationConfig(limit=limit)) for limit in (None, 2))
    assert whole.main == part.main == "acc_norm"
    assert tasks["lm-eval/words.local"].run(one, EvaluationConfig()).main == "acc"


@pytest.fixture
def some_of_its_tasks(monkeypatch):
    """Let the harness read the files of a few of its tasks: all of them take it twenty seconds."""
    from lm_eval.tasks._index import TaskIndex

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", lambda root: (root / "lambada").glob("**/*.yaml"))
    _own_tasks.cache_clear()
    yield
    _own_tasks.cache_clear()


@pytest.mark.usefixtures("some_of_its_tasks")
def test_what_has_to_be_fetched_and_cannot_be(lm):
    assert "lambada_openai" in HarnessTask.known_names()
    task = HarnessTask(name="lm-eval/lambada_openai")
    with pytest.raises(DataError, match="lm-eval/lambada_openai cannot be run"):
        task.run(language_model_system("tiny", lm), EvaluationConfig())


def test_the_last_word_of_a_text_may_begin_a_line(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"text": "She said\nhello\n"}))
    [row] = last_word_task(path, "words")["custom_dataset"]()["test"]
    assert (row["query"], row["word"]) == ("She said", "\nhello")


@pytest.mark.parametrize("text", ["word ", " "])
def test_a_text_of_one_word(tmp_path, text):
    path = tmp_path / "words.jsonl"
    path.write_text('{"text": "two words"}\n' + json.dumps({"text": text}) + "\n")
    with pytest.raises(DataError, match="line 2: 'text' has a single word"):
        last_word_task(path, "words")
