"""What is hidden, and that its perplexity is that of the hidden tokens alone."""

import json
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.perplexity import DocumentInfilling, InfillingTask, StoryInfilling, sample_spans

STORIES = [
    {"sentences": ["A cat sat.", "It was thin.", "It ran in."], "endings": ["It ate.", "It sank."], "gold": 0},
    {"sentences": ["A man sang.", "The rain came."], "endings": ["He went.", "He stayed in."], "gold": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


@pytest.fixture
def data(tmp_path):
    (tmp_path / "suffix").mkdir()
    (tmp_path / "lm").mkdir()
    (tmp_path / "suffix" / "tales.jsonl").write_text("".join(json.dumps(row) + "\n" for row in STORIES))
    (tmp_path / "suffix" / "swag.jsonl").write_text('{"prefix": "a", "suffixes": ["b", "c"], "gold": 0}\n')
    for split in ("test", "valid"):
        rows = [{"text": f"{split} the thin man in the inn and another in the rain. " * n} for n in (1, 3, 4)]
        (tmp_path / "lm" / f"news.{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def by_name(data):
    return {task.name: task for task in InfillingTask.find(data)}


def test_tasks_are_found(data):
    found = by_name(data)
    assert {name: type(task) for name, task in found.items()} == {
        "infilling/news": DocumentInfilling,
        "infilling/tales": StoryInfilling,
    }
    assert found["infilling/news"].has_validation
    assert not found["infilling/tales"].has_validation
    assert InfillingTask.find(data / "none") == []


def test_the_perplexity_is_that_of_the_hidden_sentence(data, lm):
    task = by_name(data)["infilling/tales"]
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(seed=3))
    texts = task.hidden(lm, task.files[0], 2, np.random.default_rng(3))
    for name, mode in (("infill", "infill"), ("left_only", "causal")):
        logprobs = []
        for item in texts:
            [(start, end)] = item.spans
            logprobs += lm.span_logprobs(item.text[:start], item.text[start:end], item.text[end:], mode=mode).tolist()
        assert score.metrics[name] == pytest.approx(np.exp(-np.mean(logprobs)), rel=1e-5)
    assert score.metrics["infill_over_left_only"] == pytest.approx(score.metrics["infill"] / score.metrics["left_only"])
    assert score.size == 2


def test_any_sentence_but_the_first_is_hidden(data, lm):
    task = by_name(data)["infilling/tales"]
    hidden = set()
    for seed in range(60):
        for item in task.hidden(lm, task.files[0], 2, np.random.default_rng(seed)):
            [(start, end)] = item.spans
            hidden.add(item.text[start:end])
    assert hidden == {" It was thin.", " It ran in.", " It ate.", " The rain came.", " He stayed in."}


def test_documents_are_cut_and_short_ones_passed_over(data, lm):
    task = DocumentInfilling(name="infilling/news", files=by_name(data)["infilling/news"].files, length=60)
    texts = task.hidden(lm, task.files[0], 9, np.random.default_rng(0))
    assert 1 <= len(texts) < 3
    for item in texts:
        assert item.text.startswith("test the thin man")
        assert len(lm.tokenizer(item.text)["input_ids"]) <= 60
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(split="validation"))
    assert score.value != task.run(language_model_system("tiny", lm), EvaluationConfig()).value
    assert task.run(language_model_system("tiny", lm), EvaluationConfig()) == task.run(
        language_model_system("tiny", lm), EvaluationConfig()
    )


def test_spans_have_the_papers_lengths_and_context_on_both_sides():
    rng = np.random.default_rng(0)
    counts, sizes = set(), set()
    for _ in range(3000):
        spans = sample_spans(256, rng)
        counts.add(len(spans))
        edges = [0, *(place for span in spans for place in span), 256]
        assert all(after - before >= 1 for before, after in zip(edges[::2], edges[1::2], strict=True))
        sizes |= {end - start for start, end in spans}
    assert counts == {1, 2, 3}
    assert sizes == set(range(8, 33))
    for n in range(32, 80):
        for start, end in sample_spans(n, rng):
            assert 1 <= start < end < n


def test_nothing_to_hide(tmp_path, lm):
    (tmp_path / "lm").mkdir()
    (tmp_path / "lm" / "news.test.jsonl").write_text('{"text": "short"}\n')
    [task] = InfillingTask.find(tmp_path)
    with pytest.raises(DataError, match="no text is long enough"):
        task.run(language_model_system("tiny", lm), EvaluationConfig())
    with pytest.raises(ConfigError, match="samples=0"):
        DocumentInfilling(name="infilling/news", samples=0)
    with pytest.raises(ConfigError, match="length=10"):
        DocumentInfilling(name="infilling/news", length=10)


@pytest.mark.parametrize("seed", range(5))
def test_letters_of_several_tokens_are_hidden_whole(tmp_path, lm, seed):
    """Every letter is three tokens here, so that a span's border may lie in the middle of one."""
    (tmp_path / "lm").mkdir()
    rows = [{"text": "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3067\u3059\u3002" * 20} for _ in range(30)]
    (tmp_path / "lm" / "ja.test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = InfillingTask.find(tmp_path)
    task = DocumentInfilling(name=found.name, files=found.files, length=60)
    assert task.run(language_model_system("tiny", lm), EvaluationConfig(seed=seed)).size >= 25


def test_an_encoders_own_limit_on_length_changes_nothing(data, lm):
    task = by_name(data)["infilling/news"]
    task = DocumentInfilling(name=task.name, files=task.files, length=60)
    short = lm.with_encoder(replace(lm.encoder, max_length=8))
    scores = [task.run(language_model_system("tiny", one), EvaluationConfig()) for one in (lm, short)]
    assert scores[0] == scores[1]


def test_a_file_that_cannot_be_read_hides_no_other_task(data):
    (data / "suffix" / "broken.jsonl").write_text("{")
    assert "infilling/tales" in by_name(data)
    assert "infilling/broken" not in by_name(data)
