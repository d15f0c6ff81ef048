"""``gerund chat``, and ``gerund ask`` as a conversation."""

import json
import sys

import pytest

import gerund
from tests.cli.helpers import no_loading, run_cli
from tests.inference.generate.test_prompts import HELLO, chat_tokenizer
from tests.tiny import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer()
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_file_is_a_conversation_and_a_pipe_one_message(folder, tmp_path):
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(HELLO))
    ran = run_cli("chat", folder, "--messages", path, "--max-new-tokens", 6, "--json")
    [expected] = gerund.load(folder).chat(HELLO, 6)
    record = json.loads(ran.out)
    assert (record["text"], record["finished"]) == (expected.text, expected.finished)
    assert record["usage"]["completion_tokens"] == expected.usage.completion_tokens
    same = run_cli("chat", folder, "--system", "Be kind.", "--max-new-tokens", 6, stdin="the cat\n")
    assert (same.code, same.out, same.err) == (0, expected.text + "\n", "")


@pytest.fixture
def toolbox(tmp_path, monkeypatch):
    """A module with a function, which the working folder has."""
    (tmp_path / "toolbox_of_test_chat.py").write_text(
        'def double(number: int) -> int:\n    """Double a number."""\n    return 2 * number\n\nx = 5\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("toolbox")
def test_tools_are_run_until_the_model_answers(folder, monkeypatch):
    plain = run_cli("chat", folder, "--tools", "toolbox_of_test_chat:double", stdin="a")
    assert (plain.code, "--tool-prompt generic" in plain.err) == (2, True), "its template knows no tools"
    seen, choices = [], []

    class Stream(list):
        """A stream whose text is known before."""

    def stream(self, messages, max_new_tokens, sampling, **options):
        seen.append([dict(message) for message in messages])
        choices.append(options["tool_choice"])
        calls = (gerund.types.ToolCall("double", '{"number": 21}', "1"),) if len(messages) == 1 else ()
        found = Stream([] if calls else ["It is", " 42."])
        found.result = gerund.types.Generation("".join(found), [], 0.0, True, tool_calls=calls)
        return found

    monkeypatch.setattr(gerund.LanguageModel, "stream", stream)
    ran = run_cli("chat", folder, "--tools", "toolbox_of_test_chat:double", "--tool-prompt", "generic", stdin="21?")
    assert (ran.code, ran.out) == (0, "It is 42.\n")
    assert 'double({"number": 21}) -> 42' in ran.err
    assert seen[1][-1] == {"role": "tool", "content": "42", "tool_call_id": "1", "name": "double"}
    for choice in ("double", "none"):
        options = ("--tools", "toolbox_of_test_chat:double", "--tool-prompt", "generic", "--tool-choice", choice)
        assert run_cli("chat", folder, *options, stdin="21?").code == 0
    assert choices == [None, "auto", "double", "auto", "none", "none"]
    with no_loading():
        ran = run_cli("chat", folder, "--tools", "toolbox_of_test_chat:double", "--tool-choice", "treble", stdin="a")
        alone = run_cli("chat", folder, "--tool-choice", "required", stdin="a")
    assert (ran.code, "valid are: auto, none, required, double" in ran.err) == (2, True)
    assert (alone.code, "--tool-choice needs --tools" in alone.err) == (2, True)
    for named, words in (
        ("double", "MODULE:FUNCTION"), ("nowhere:double", "No module named"),
        ("toolbox_of_test_chat:x", "not a function"), ("toolbox_of_test_chat:y", "no attribute"),
    ):  # fmt: skip
        with no_loading():
            ran = run_cli("chat", folder, "--tools", named, stdin="a")
        assert (ran.code, words in ran.err) == (2, True), ran.err


def test_turns_on_a_terminal(folder):
    ran = run_cli("chat", folder, "--max-new-tokens", 4, typed=["the cat", "", "x" * 600, "in"])
    lm = gerund.load(folder)
    talk = [{"role": "user", "content": "the cat"}]
    [first] = lm.chat(talk, 4)
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "in"}]
    [second] = lm.chat(talk, 4)
    assert ran.code == 0, ran.err
    assert ran.out == f"{first.text}\n{second.text}\n\n"
    assert "context ends at 512" in ran.err


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (["--messages", "{missing}"], "", "cannot be read"), ([], "", "standard input has no message"),
        (["--logit-bias", "x"], "a", None), (["--temperature", "-1"], "a", "temperature must be at least 0"),
        (["--max-new-tokens", "0"], "a", "must be at least 1"), (["--stop", ""], "a", "stop has an empty string"),
    ],
)  # fmt: skip
def test_mistakes_before_the_model_is_loaded(folder, tmp_path, arguments, stdin, words):
    arguments = [str(one).format(missing=tmp_path / "missing.json") for one in arguments]
    with no_loading():
        ran = run_cli("chat", folder, *arguments, stdin=stdin)
    assert ran.code == 2
    if words:
        assert words in ran.mistake


def test_a_file_that_is_no_conversation_and_a_model_without_a_template(folder, tiny_folder, tmp_path):
    path = tmp_path / "talk.json"
    for content in ("{}", "[]", "[1]", "nonsense"):
        path.write_text(content)
        assert str(path) in run_cli("chat", folder, "--messages", path).mistake
    assert "has no chat template" in run_cli("chat", tiny_folder, stdin="a").mistake


@pytest.mark.slow
def test_questions_on_a_terminal(folder, tmp_path):
    lm = gerund.load(folder)
    index = gerund.open_index(tmp_path / "my.index", lm, chunking=gerund.Chunking(tokens=100))
    index.add_documents([gerund.Document("rail", "The railway opened in 1825.")])
    lines = ["railway?", "", "zebra quarks?", "railway " * 45, "And opened when?"]
    asked = ("--generate", "--context", "chunks", "--no-fallback", "--max-new-tokens", 6, "--sources")
    ran = run_cli("ask", tmp_path / "my.index", *asked, typed=lines)
    assert ran.code == 0, ran.err
    settings = {"method": "generate", "context": "chunks", "fallback": False, "max_new_tokens": 6}
    first = index.ask("railway?", **settings)
    history = [{"role": "user", "content": "railway?"}, {"role": "assistant", "content": first.text}]
    second = index.ask("And opened when?", **settings, history=history)
    assert ran.out.startswith(f"{first.text}\n\n[1] rail:0-27")
    assert "Nothing was found about this question.\n" in ran.out
    assert f"{second.text}\n" in ran.out
    assert second.text != first.text
    assert "the question is too long" in ran.err
    assert ran.err.count("the answer was cut off") == 2
    assert "--json is for one answer" in run_cli("ask", tmp_path / "my.index", "--json", typed=()).mistake
