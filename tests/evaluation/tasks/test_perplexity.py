"""Perplexity: every token once, with the context that its window gives; what is counted, cut and refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, ModelError
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import perplexity
from gerund.evaluation.tasks.perplexity import PerplexityTask, windows
from gerund.language_model import LanguageModel
from tests.tiny import byte_tokenizer, save_tiny, tiny

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


@pytest.mark.slow
def test_the_scale_is_that_of_the_embedded_default(data_folder, bundled):
    """The model card says 1.174 bits per byte of wiki.test; a tenth of it is quick and near."""
    wiki = next(one for one in PerplexityTask.find(data_folder) if one.name == "perplexity/wiki")
    assert wiki.has_validation
    score = replace(wiki, max_tokens=5000).run(language_model_system("default", bundled), QUIET)
    assert score.value == pytest.approx(1.17, abs=0.08)


def test_an_encoders_own_limit_on_length_changes_nothing(corpus, tmp_path):
    folder = save_tiny(tmp_path / "model")
    lm = gerund.load(folder)
    short = lm.with_encoder(replace(lm.encoder, max_length=8))
    assert (
        task(corpus).run(language_model_system("a", lm), QUIET).metrics
        == task(corpus).run(language_model_system("b", short), QUIET).metrics
    )
