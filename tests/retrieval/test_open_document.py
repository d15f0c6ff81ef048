"""One document, read once: the second question is answered from what the first has read, and says the same."""

import json
import os

import pytest

import gerund
from gerund import ConfigError, DataError, TextError
from gerund.inference.generate.session import TENSORS
from gerund.jobs.disk_cache import DiskCache
from gerund.retrieval.answer_generation import OF_A_DOCUMENT, Prompter, common_start
from tests.cli.helpers import run_cli
from tests.retrieval.test_question_answering import chat_model
from tests.tiny import tiny

TEXT = "The first public railway was opened in 1825. It ran to Darlington. Steam moved it." * 3
QUESTION = "When was the railway opened?"


@pytest.fixture(scope="module")
def lm():
    return chat_model()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "rail.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def reads(lm, monkeypatch):
    """What the model has read from the beginning."""
    found = []
    plain = type(lm).prefill
    monkeypatch.setattr(type(lm), "prefill", lambda self, ids: found.append(list(ids)) or plain(self, ids))
    return found


def test_the_answer_is_that_of_a_fresh_prefill(lm, path, tmp_path, reads):
    prompter = Prompter(lm.model, lm.tokenizer)
    document = gerund.open_document(path, lm, cache=tmp_path / "cache")
    answer = document.ask(QUESTION, max_new_tokens=12, fallback=False)
    wanted = prompter.of_document([QUESTION], [], "", TEXT)
    assert wanted[0]["content"] == OF_A_DOCUMENT
    [fresh] = lm.chat(wanted, 12)
    assert (answer.text, answer.usage.prompt_tokens) == (fresh.text.strip(), fresh.usage.prompt_tokens)
    assert (answer.method, answer.cited, answer.sources[0].text) == ("generate", [1], TEXT)
    history = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": answer.text}]
    more = document.ask("And to where?", history=history, max_new_tokens=8, fallback=False)
    [fresh] = lm.chat(prompter.of_document([QUESTION, "And to where?"], [answer.text], "", TEXT), 8)
    assert (more.text, more.usage.prompt_tokens) == (fresh.text.strip(), fresh.usage.prompt_tokens)
    again = gerund.open_document(path, lm, cache=tmp_path / "cache")
    assert again.ask(QUESTION, max_new_tokens=12, fallback=False) == answer
    [ids] = reads  # of two documents and three questions
    assert lm.tokenizer.decode(ids).rstrip().endswith("\n\nQuestion:")
    stream = again.stream(QUESTION, max_new_tokens=12, fallback=False)
    assert "".join(stream) == answer.text


def test_what_the_document_does_not_support_is_replaced_by_a_quotation(lm, path):
    document = gerund.open_document(path, lm)
    written = document.ask(QUESTION, max_new_tokens=12, fallback=False)  # noise, of untrained weights
    assert not any(check.sources for check in written.checks)
    quoted = document.ask(QUESTION, max_new_tokens=12)
    assert (quoted.method, quoted.text) == ("extractive", "The first public railway was opened in 1825.")
    assert (quoted.rejected, quoted.checks) == (written.text, written.checks)
    stream = document.stream(QUESTION, max_new_tokens=12)
    assert ("".join(stream), stream.result) == (quoted.text, quoted)


def test_instructions_come_before_its_own(lm, path, reads):
    document = gerund.open_document(path, lm)
    prompter = Prompter(lm.model, lm.tokenizer)
    for more in ("Answer in rhyme.", "Answer in rhyme.", ""):
        answer = document.ask(QUESTION, instructions=more, max_new_tokens=8, fallback=False)
        wanted = prompter.adding(more).of_document([QUESTION], [], "", TEXT)
        assert wanted[0]["content"] == (f"{more}\n\n{OF_A_DOCUMENT}" if more else OF_A_DOCUMENT)
        [fresh] = lm.chat(wanted, 8)
        assert (answer.text, answer.usage.prompt_tokens) == (fresh.text.strip(), fresh.usage.prompt_tokens)
    assert len(reads) == 2  # once for each text of instructions


def test_a_name_that_is_not_utf8(lm, tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.txt")
    path.write_text(TEXT)
    assert gerund.open_document(path, lm).ask(QUESTION, method="extractive").sources[0].source.endswith("caf\\xe9.txt")


def test_what_is_damaged_is_read_anew(lm, path, tmp_path, reads):
    cache = tmp_path / "cache"
    answer = gerund.open_document(path, lm, cache=cache).ask(QUESTION, max_new_tokens=8)
    [folder] = cache.iterdir()
    content = bytearray((folder / TENSORS).read_bytes())
    content[-1] ^= 1
    (folder / TENSORS).write_bytes(content)
    assert gerund.open_document(path, lm, cache=cache).ask(QUESTION, max_new_tokens=8) == answer
    assert len(reads) == 2
    assert gerund.open_document(path, lm, cache=cache).ask(QUESTION, max_new_tokens=8) == answer
    assert len(reads) == 2  # and was put there again


def test_another_document_and_another_model_are_other_entries(lm, path, tmp_path, reads):
    cache = tmp_path / "cache"
    gerund.open_document(path, lm, cache=cache).ask(QUESTION, max_new_tokens=2)
    path.write_text(TEXT + "!")
    gerund.open_document(path, lm, cache=cache).ask(QUESTION, max_new_tokens=2)
    assert len(list(cache.iterdir())) == len(reads) == 2
    other = chat_model()
    other.model.get_input_embeddings().weight.data[5] += 1
    gerund.open_document(path, other, cache=cache).ask(QUESTION, max_new_tokens=2)
    assert len(list(cache.iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_a_warning_and_no_answer(lm, path, tmp_path):
    (tmp_path / "file").write_text("")
    document = gerund.open_document(path, lm, cache=tmp_path / "file")
    with pytest.warns(UserWarning, match="could not cache .*: the cache .* cannot be written"):
        answer = document.ask(QUESTION, max_new_tokens=4, fallback=False)
    assert answer == gerund.open_document(path, lm).ask(QUESTION, max_new_tokens=4, fallback=False)
    small = DiskCache(tmp_path / "small", most_bytes=10)
    gerund.open_document(path, lm, cache=small).ask(QUESTION, max_new_tokens=4)
    assert small.sizes() == {}


@pytest.mark.slow
def test_a_model_without_a_template_quotes_and_writes_on_request(bundled, path, tmp_path):
    document = gerund.open_document(path, bundled, cache=tmp_path / "cache")
    quoted = document.ask(QUESTION)
    assert (quoted.method, quoted.text) == ("extractive", "The first public railway was opened in 1825.")
    assert not (tmp_path / "cache").exists()
    written = document.ask(QUESTION, method="generate", max_new_tokens=8, fallback=False)
    prompt = Prompter(bundled.model, bundled.tokenizer).of_document([QUESTION], [], "rail", TEXT)
    assert written.text == bundled.generate(prompt, 8, stop=["\nQuestion:"])[0].text.strip()
    assert not document.ask("Which zebra quarks fly?").found


def test_documents_that_cannot_be_asked(lm, path, tmp_path):
    with pytest.raises(ConfigError, match="read completely, without a search"):
        gerund.open_document(path, lm).ask(QUESTION, filter="tokens > 1")
    path.write_text(TEXT * 20)
    with pytest.raises(TextError, match=r"does not fit: the model's context has 1400 tokens.*gerund index"):
        gerund.open_document(path, lm).ask(QUESTION)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match="holds 2 documents"):
        gerund.open_document(rows, lm)
    (tmp_path / "empty.txt").write_text(" ")
    with pytest.raises(DataError, match="there is no text in it"):
        gerund.open_document(tmp_path / "empty.txt", lm)


@pytest.mark.slow
def test_old_turns_go_where_there_is_no_room(lm, path):
    turns = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": "y" * 300}]
    answer = gerund.open_document(path, lm).ask(QUESTION, history=turns * 3, max_new_tokens=100)
    assert answer.usage.prompt_tokens <= 1300
    alone = gerund.open_document(path, lm).ask(QUESTION, max_new_tokens=100)
    assert answer.usage.prompt_tokens >= alone.usage.prompt_tokens


def test_architectures_that_cannot_be_read_on_from_are_read_whole(path, tmp_path):
    lm = chat_model()
    lm = type(lm)(tiny("lfm2", vocab_size=len(lm.tokenizer), max_position_embeddings=1400), lm.tokenizer, lm.encoder)
    document = gerund.open_document(path, lm, cache=tmp_path / "cache")
    answer = document.ask(QUESTION, max_new_tokens=4, fallback=False)
    [fresh] = lm.chat(Prompter(lm.model, lm.tokenizer).of_document([QUESTION], [], "", TEXT), 4)
    assert answer.text == fresh.text.strip()
    assert not (tmp_path / "cache").exists()


def test_numbers_only_tell_several_sources_apart(tmp_path):
    long = tmp_path / "long.txt"
    others = " ".join(f"Line {number} of the coast carries grain and stone." for number in range(40))
    long.write_text(f"{TEXT} {others}", encoding="utf-8")
    ask = ["ask", "--document", long, "--cache-size", "0", QUESTION]
    quoted = run_cli(*ask)
    assert quoted.out.startswith("The first public railway was opened in 1825.\n\n"), quoted.out + quoted.err
    assert "[1]" not in quoted.out
    assert f"{long}:0-" in quoted.out
    every = run_cli(*ask, "--sources").out
    assert every.startswith("The first public railway was opened in 1825. [1]\n\n")
    assert "\n[2] " in every
    written = run_cli(*ask, "--generate", "--no-fallback", "--max-new-tokens", 4, "--verify")
    assert written.code == 0, written.err
    assert f"{long}:0-{len(long.read_text())}" in written.out
    assert "[1]" not in written.out


@pytest.mark.slow
def test_on_the_command_line(path, tmp_path):
    ask = ["ask", "--document", path, "--cache", tmp_path / "cache"]
    ran = run_cli(*ask, QUESTION)
    assert (ran.code, ran.out.splitlines()[0]) == (0, "The first public railway was opened in 1825.")
    ran = run_cli(*ask, "--generate", "--max-new-tokens", 4, "--json", stdin=QUESTION)
    assert ran.code == 0, ran.err
    assert "was not trained to answer questions" in ran.err
    record = json.loads(ran.out)
    assert (record["method"], record["cited"], record["finished"]) == ("generate", [1], False)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    ran = run_cli("ask", "--document", path, "--generate", "--cache-size", "0", "--max-new-tokens", 2, QUESTION)
    assert ran.code == 0, ran.err


def test_what_two_prompts_begin_with():
    assert common_start([1, 2], [1, 2, 3]) == common_start([1, 2, 3], [1, 2]) == [1, 2]
    assert common_start([1], [2]) == []
