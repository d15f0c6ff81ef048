"""Perplexity: every token once, with the context that its window gives; what is counted, cut and refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, ModelError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import perplexity
from gerund.evaluation.tasks.perplexity import (
    DocumentInfilling,
    InfillingTask,
    PerplexityTask,
    StoryInfilling,
    sample_spans,
    windows,
)
from gerund.language_model import LanguageModel
from tests.tiny import byte_tokenizer, tiny

DOCUMENTS = [
    "The other man ran. He was in the end na\u00efve \u2014 and then another thing came, again and again, to an end."
]
DOCUMENTS += ["Short one.", " ", "In the inn an ant ran around the other end of the land."]
QUIET = EvaluationConfig(show_progress=False)


@pytest.fixture
def corpus(tmp_path):
    return write(tmp_path / "lm" / "news.test.jsonl", DOCUMENTS)


def write(path: Path, texts) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def task(path, **options):
    return PerplexityTask(name="perplexity/news", files=(path,), **options)


def system(bos=True, name="llama"):
    tokenizer = byte_tokenizer(bos)
    return language_model_system("tiny", LanguageModel(tiny(name, vocab_size=len(tokenizer)), tokenizer))


@torch.no_grad()
def slow(lm, ids, *, window, stride, head):
    """Score each token by itself: find the first window that reaches it, and feed what precedes it in there."""
    inner = window - len(head)
    nats = {}
    for place in range(0 if head else 1, len(ids)):
        begin = 0
        while begin + inner <= place:
            begin += stride
        before = [*head, *ids[begin:place]]
        nats[place] = -lm.model(torch.tensor([before])).logits[0, -1].log_softmax(dim=-1)[ids[place]].item()
    return nats


def check(metrics, nats, spelled):
    total = sum(nats)
    assert metrics["perplexity"] == pytest.approx(math.exp(total / len(nats)), rel=1e-4)
    assert metrics["bits_per_byte"] == pytest.approx(
        total / math.log(2) / sum(len(text.encode()) for text in spelled), rel=1e-4
    )
    assert metrics["word_perplexity"] == pytest.approx(
        math.exp(total / sum(len(text.split()) for text in spelled)), rel=1e-4
    )


@pytest.mark.parametrize("window, stride", [(None, None), (20, 5), (20, 18), (7, 1)])
def test_every_token_counts_once_with_the_context_of_its_window(corpus, window, stride):
    who = system()
    texts = [text for text in DOCUMENTS if text.strip()]
    score = task(corpus, window=window, stride=stride).run(who, QUIET)
    nats = []
    for text in texts:
        ids = who.lm.tokenizer(text, add_special_tokens=False).input_ids
        nats += slow(who.lm, ids, window=window or 64, stride=stride or 32, head=[1]).values()
    check(score.metrics, nats, texts)
    assert score.main == "bits_per_byte"
    assert score.size == 3
    assert f"{len(nats)} tokens of 3 documents in windows of {window or 64} that move by {stride or 32}" in score.notes


def test_a_beginning_token_that_the_tokenizer_only_knows_is_put_in_front(corpus):
    plain = task(corpus).run(system(bos=True), QUIET)
    assert task(corpus).run(system(bos=False), QUIET).metrics == pytest.approx(dict(plain.metrics))


@pytest.mark.slow
@pytest.mark.parametrize("window, stride", [(None, None), (20, 5)])
def test_without_a_beginning_token_the_first_one_counts_neither_as_token_nor_as_text(corpus, window, stride):
    who = system(bos=False)
    who.lm.tokenizer.bos_token = None
    texts = [text for text in DOCUMENTS if text.strip()]
    nats, spelled = [], []
    for text in texts:
        ids = who.lm.tokenizer(text, add_special_tokens=False).input_ids
        nats += slow(who.lm, ids, window=window or 64, stride=stride or 32, head=[]).values()
        spelled.append(text[len(who.lm.tokenizer.decode(ids[:1])) :])
    check(task(corpus, window=window, stride=stride).run(who, QUIET).metrics, nats, spelled)


def test_joined_documents_have_the_end_token_between_them_which_is_not_scored(corpus):
    who = system()
    texts = [text for text in DOCUMENTS if text.strip()]
    ids, scored = [], []
    for text in texts:
        own = who.lm.tokenizer(text, add_special_tokens=False).input_ids
        ids += ([2, 1] if ids else []) + own
        scored += ([False, False] if scored else []) + [True] * len(own)
    nats = slow(who.lm, ids, window=20, stride=5, head=[1])
    score = task(corpus, window=20, stride=5, joined=True).run(who, QUIET)
    check(score.metrics, [value for place, value in nats.items() if scored[place]], texts)
    assert score.metrics["perplexity"] != pytest.approx(
        task(corpus, window=20, stride=5).run(who, QUIET).metrics["perplexity"]
    )


def test_tokens_are_bounded_for_a_document_and_for_all(corpus):
    who = system()
    score = task(corpus, document_tokens=9, max_tokens=20).run(who, QUIET)
    nats, spelled = [], []
    for text, most in zip([text for text in DOCUMENTS if text.strip()], (9, 9, 2), strict=True):
        ids = who.lm.tokenizer(text, add_special_tokens=False).input_ids[:most]
        nats += slow(who.lm, ids, window=64, stride=32, head=[1]).values()
        spelled.append(text[: len(who.lm.tokenizer.decode(ids))])
    assert len(nats) == 20
    check(score.metrics, nats, spelled)


def test_the_limit_counts_documents(corpus):
    assert task(corpus).run(system(), replace(QUIET, limit=2)).size == 2


def test_the_validation_file_is_the_second_one(corpus, tmp_path):
    other = write(tmp_path / "lm" / "news.valid.jsonl", DOCUMENTS[1:])
    [found] = PerplexityTask.find(tmp_path)
    assert (found.name, found.files, found.has_validation) == ("perplexity/news", (corpus, other), True)
    who = system()
    assert found.run(who, replace(QUIET, split="validation")).metrics == task(other).run(who, QUIET).metrics


def test_a_corpus_may_be_plain_text_and_have_a_validation_file_only(tmp_path):
    (tmp_path / "lm").mkdir()
    path = tmp_path / "lm" / "wikitext2.valid.txt"
    path.write_text(DOCUMENTS[0], encoding="utf-8")
    (tmp_path / "lm" / "news.train.jsonl").touch()
    [found] = PerplexityTask.find(tmp_path)
    assert (found.name, found.has_validation) == ("perplexity/wikitext2.valid", False)
    who = system()
    assert (
        found.run(who, QUIET).metrics == task(write(tmp_path / "lm" / "x.jsonl", DOCUMENTS[:1])).run(who, QUIET).metrics
    )
    assert PerplexityTask.find(tmp_path / "absent") == []


def test_quirks_are_removed_by_the_name_of_the_file_or_as_one_says(tmp_path):
    who = system()
    raw = write(tmp_path / "wiki.test.jsonl", ["Fraile () is a mountain."])
    clean = write(tmp_path / "plain.test.jsonl", ["Fraile is a mountain."])
    assert task(raw).run(who, QUIET).metrics == task(clean).run(who, QUIET).metrics
    assert task(raw, clean="none").run(who, QUIET).metrics != task(clean).run(who, QUIET).metrics
    with pytest.raises(ConfigError, match="unknown text cleaning 'web'"):
        task(raw, clean="web").run(who, QUIET)


def test_a_text_without_white_space_has_no_perplexity_by_word(tmp_path):
    score = task(write(tmp_path / "one.jsonl", ["\u65e5\u672c" * 100])).run(system(), QUIET)
    assert set(score.metrics) == {"bits_per_byte", "perplexity"}
    assert score.notes[1] == "no perplexity by word: this text has hardly any white space"


@pytest.mark.parametrize(
    "options, said",
    [
        ({"window": 0}, "perplexity.window=0 leaves nothing"),
        ({"stride": -1}, "perplexity.stride=-1 leaves nothing"),
        ({"max_tokens": 0}, "perplexity.max_tokens=0 leaves nothing"),
        ({"document_tokens": 0}, "perplexity.document_tokens=0 leaves nothing"),
        ({"window": 65}, "window=65 is longer than the model's context of 64 tokens"),
        ({"window": 10, "stride": 9}, "stride=9 leaves no context in a window of 10 tokens"),
        ({"window": 1}, "stride=1 leaves no context in a window of 1 tokens"),
    ],
)
def test_impossible_options_are_refused(corpus, options, said):
    with pytest.raises(ConfigError, match=said):
        task(corpus, **options).run(system(), QUIET)


def test_a_corpus_without_text_is_refused(tmp_path):
    path = write(tmp_path / "empty.jsonl", [" "])
    with pytest.raises(DataError, match=r"empty\.jsonl: no text that could be scored"):
        task(path).run(system(), QUIET)
    with pytest.raises(DataError, match=r"absent\.jsonl: no such file"):
        task(tmp_path / "absent.jsonl").run(system(), QUIET)


def test_log_probabilities_that_are_no_numbers_are_told(corpus):
    who = system()
    torch.nn.init.constant_(who.lm.model.get_output_embeddings().weight, float("nan"))
    with pytest.raises(ModelError, match=r"not numbers in torch\.float32; load it with another dtype"):
        task(corpus).run(who, QUIET)


def test_a_long_text_is_not_tokenised_whole(tmp_path, monkeypatch):
    path = write(tmp_path / "long.jsonl", ["word " * 5000])
    seen = []
    real = perplexity.tokenize
    monkeypatch.setattr(
        perplexity, "tokenize", lambda tok, texts, *a, **k: seen.extend(texts) or real(tok, texts, *a, **k)
    )
    task(path, max_tokens=10).run(system(), QUIET)
    assert max(map(len, seen)) == 400


def test_windows_reach_every_token_once():
    for n in range(12):
        for first in (0, 1):
            found = [place for _, scored, end in windows(n, 5, 2, first) for place in range(scored, end)]
            assert found == list(range(first, n))


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


def test_a_file_that_cannot_be_read_hides_no_other_task(data):
    (data / "suffix" / "broken.jsonl").write_text("{")
    assert "infilling/tales" in by_name(data)
    assert "infilling/broken" not in by_name(data)


@pytest.mark.parametrize("kind", [PerplexityTask, DocumentInfilling])
def test_an_encoders_own_limit_on_length_changes_nothing(data, lm, kind):
    [task] = [one for one in kind.find(data) if one.name.endswith("/news")]
    if kind is DocumentInfilling:
        task = replace(task, length=60)
    short = lm.with_encoder(replace(lm.encoder, max_length=8))
    scores = [task.run(language_model_system("tiny", one), QUIET) for one in (lm, short)]
    assert scores[0] == scores[1]
