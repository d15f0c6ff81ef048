"""Chunks that a model has read once are not read again, from the command line and from Python."""

import json

import pytest

import gerund
from gerund import ConfigError
from gerund.inference.generate.session import TENSORS
from gerund.jobs.disk_cache import DiskCache
from gerund.retrieval.question_answering import Question
from tests.cli.helpers import run_cli
from tests.retrieval.helpers import notes_index, write_notes
from tests.retrieval.test_question_answering import QUESTION, TURNS, chat_model
from tests.tiny import tiny_lm

ASKED = {"method": "generate", "context": "chunks", "max_new_tokens": 8, "fallback": False}


@pytest.fixture(scope="module")
def lm():
    return chat_model(context=3000)


@pytest.fixture
def index(lm):
    return notes_index(lm, tokens=100)


@pytest.fixture
def passes(lm, monkeypatch):
    """How many tokens the model has read in each pass."""
    found = []
    plain = lm.model.forward

    def counted(input_ids=None, **more):
        found.append(input_ids.shape[1])
        return plain(input_ids=input_ids, **more)

    monkeypatch.setattr(lm.model, "forward", counted)
    return found


@pytest.mark.parametrize("history", [(), TURNS], ids=["alone", "in a conversation"])
def test_chunks_are_read_once(index, lm, tmp_path, passes, history):
    cache = DiskCache(tmp_path / "cache")
    first = index.ask(QUESTION, 3, **ASKED, approximate_cache=cache, history=history)
    assert len(first.sources) == len(cache.sizes()) == 3
    passes.clear()
    again = index.ask(QUESTION, 3, **ASKED, approximate_cache=cache, history=history)
    assert again == first
    sizes = [len(lm.tokenizer(one.text, add_special_tokens=False).input_ids) for one in first.sources]
    kept = [size for size in passes if size >= min(sizes)]
    # Only what stands before the first chunk may be that long, where turns of a conversation do.
    assert len(kept) <= bool(history) + 1
    passes.clear()
    exact = index.ask(QUESTION, 3, **ASKED, history=history)
    assert sum(passes) > sum(sizes)
    assert exact.sources == first.sources
    assert exact.usage.prompt_tokens == first.usage.prompt_tokens


def test_the_prompt_has_the_same_tokens_as_without_it(index, lm, tmp_path):
    asked = Question.of(QUESTION, 3, {**ASKED, "approximate_cache": tmp_path / "cache"})
    exact = Question.of(QUESTION, 3, ASKED)
    assert index.prepare(asked).prompt.ids == index.prepare(exact).prompt.ids


def test_sources_that_do_not_fit_are_left_out(index, tmp_path):
    small = chat_model(context=index.ask(QUESTION, 4, **ASKED).usage.prompt_tokens)
    other = notes_index(small, tokens=100)
    answer = other.ask(QUESTION, 4, **ASKED, approximate_cache=tmp_path / "cache")
    assert answer.sources == other.ask(QUESTION, 4, **ASKED).sources
    assert len(answer.sources) == 3


def test_what_is_damaged_is_read_anew(index, tmp_path):
    cache = tmp_path / "cache"
    first = index.ask(QUESTION, 2, **ASKED, approximate_cache=cache)
    for path in cache.rglob(TENSORS):
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert index.ask(QUESTION, 2, **ASKED, approximate_cache=cache) == first


def test_a_cache_that_cannot_be_written_is_a_warning(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not cache a chunk"):
        answer = index.ask(QUESTION, 2, **ASKED, approximate_cache=tmp_path / "file")
    assert answer.found


def test_where_there_is_nothing_to_keep_it_is_refused(index, lm, tmp_path):
    with pytest.raises(ConfigError, match="a quoted answer reads nothing"):
        index.ask(QUESTION, method="extractive", approximate_cache=tmp_path)
    (tmp_path / "rail.txt").write_text("The railway opened in 1825.")
    with pytest.raises(ConfigError, match="is for an index"):
        gerund.open_document(tmp_path / "rail.txt", lm).ask(QUESTION, **ASKED, approximate_cache=tmp_path / "cache")
    with pytest.raises(ConfigError, match="the cache"):
        index.ask(QUESTION, approximate_cache=3)


def test_a_model_whose_keys_cannot_be_moved_is_refused(tmp_path):
    lm = tiny_lm("gpt2", changes={"n_positions": 2000})
    lm.tokenizer.model_max_length = 2000
    index = notes_index(lm, tokens=100)
    with pytest.raises(ConfigError, match="can't be moved"):
        index.ask(QUESTION, 3, **ASKED, approximate_cache=tmp_path)


@pytest.mark.slow
def test_from_the_command_line(tmp_path):
    notes = write_notes(tmp_path / "notes")
    assert run_cli("index", notes, "-o", tmp_path / "my.index").code == 0
    ask = ["ask", tmp_path / "my.index", QUESTION, "--generate", "--max-new-tokens", 4, "--json"]
    more = ["--approximate-cache", "--cache", tmp_path / "cache"]
    answers = [json.loads(run_cli(*ask, *own).out) for own in ([], more, more)]
    assert answers[1] == answers[2]
    assert answers[0]["sources"] == answers[1]["sources"]
    assert len(list((tmp_path / "cache").iterdir())) == len(answers[1]["sources"])
    wrong = run_cli("ask", "--document", notes / "rail.txt", QUESTION, "--approximate-cache").mistake
    assert "is for an index" in wrong or "no such file" in wrong
    assert "keeps nothing" in run_cli(*ask, "--approximate-cache", "--cache-size", 0).mistake
    assert "quoted answer" in run_cli("ask", tmp_path / "my.index", QUESTION, "--approximate-cache").mistake
