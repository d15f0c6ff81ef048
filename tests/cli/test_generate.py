"""``gerund generate``: one prompt as text, many as JSON lines."""

import json

import pytest

import gerund
from tests.cli.helpers import no_loading, run_cli

OPENING = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def test_a_real_checkpoint_tells_its_story(stories_folder):
    ran = run_cli("generate", "", "-m", stories_folder)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith(OPENING)
    assert ran.out.endswith("\n")


@pytest.mark.slow
def test_the_prompt_comes_first_in_text_and_apart_in_json(stories_folder):
    text = run_cli("generate", "Once upon a time", "-m", stories_folder, "--max-new-tokens", 30).out
    assert text.startswith("Once upon a time, there was")
    ran = run_cli("generate", "Once upon a time", "-m", stories_folder, "--max-new-tokens", 30, "--json")
    [record] = records(ran.out)
    assert list(record) == ["prompt", "text", "score", "finished", "usage"]
    assert record["prompt"] + record["text"] == text.rstrip("\n")
    assert record["score"] < 0
    assert record["finished"] is False


def test_standard_input_is_one_prompt(tiny_folder):
    ran = run_cli("generate", "-", "-m", tiny_folder, "--json", "--max-new-tokens", 2, stdin="two\nlines\n")
    assert records(ran.out)[0]["prompt"] == "two\nlines"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.txt", "one\nand the other\n"),
        ("a.jsonl", '{"prompt": "one"}\n{"prompt": "and the other"}'),
        ("a.csv", "n,prompt\n1,one\n2,and the other\n"),
    ],
)
def test_many_prompts(tiny_folder, tmp_path, name, content):
    source = tmp_path / name
    source.write_text(content)
    ran = run_cli("generate", "--file", source, "-m", tiny_folder, "--max-new-tokens", 5)
    assert (ran.code, ran.err) == (0, "")
    found = records(ran.out)
    expected = gerund.load(tiny_folder).generate(["one", "and the other"], max_new_tokens=5)
    assert [record["prompt"] for record in found] == ["one", "and the other"]
    assert [record["text"] for record in found] == [result.text for result in expected]
    piped = run_cli("generate", "-f", "-", "-m", tiny_folder, "--max-new-tokens", 5, stdin="one\nand the other\n")
    assert piped.out == ran.out


def test_into_a_file(tiny_folder, tmp_path):
    out = tmp_path / "new" / "out.jsonl"
    source = tmp_path / "in.jsonl"
    source.write_text('{"q": "one"}')
    arguments = ["generate", "-f", source, "--column", "q", "-m", tiny_folder, "--max-new-tokens", 3, "-o", out]
    ran = run_cli(*arguments)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    [record] = records(out.read_text())
    assert record["prompt"] == "one"
    assert f"{out} exists already" in run_cli(*arguments).mistake
    assert run_cli(*arguments, "--force").code == 0
    assert [path.name for path in out.parent.iterdir()] == ["out.jsonl"]


@pytest.mark.slow
def test_a_seeded_line_does_not_depend_on_the_other_lines(tiny_folder, tmp_path):
    arguments = ["-m", tiny_folder, "--max-new-tokens", 8, "--top-k", 50, "--seed", 3]
    source = tmp_path / "in.txt"
    texts = {}
    for lines in (["one", "two"], ["two", "three", "one"], ["one"]):
        source.write_text("\n".join(lines))
        for record in records(run_cli("generate", "-f", source, *arguments).out):
            texts.setdefault(record["prompt"], set()).add(record["text"])
    [alone] = records(run_cli("generate", "two", "--json", *arguments).out)
    assert texts["two"] == {alone["text"]}
    assert [len(found) for found in texts.values()] == [1, 1, 1]


@pytest.mark.slow
def test_samples_are_repeatable_and_equal_lines_differ(tiny_folder, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("same\n" * 140)
    arguments = ["generate", "-f", source, "-m", tiny_folder, "--max-new-tokens", 8, "--top-k", 50]
    one = run_cli(*arguments, "--seed", 3, "--batch-size", 64).out
    assert run_cli(*arguments, "--seed", 3, "--batch-size", 140).out == one
    texts = [record["text"] for record in records(one)]
    assert len(set(texts)) > 130


def test_models_that_no_plan_reaches_write_too(tmp_path):
    from tests.tiny import save_tiny

    folder = save_tiny(tmp_path / "stablelm", "stablelm")
    assert run_cli("generate", "one", "-m", folder, "--max-new-tokens", 2).out.startswith("one")


@pytest.mark.parametrize("name", [["-"], ["--file", "-"]])
def test_empty_standard_input_is_no_prompt(tiny_folder, name):
    assert run_cli("generate", *name, "-m", tiny_folder).mistake.startswith("standard input has no prompt")


@pytest.mark.slow
def test_default_is_the_bundled_model():
    with no_loading():
        assert "did you mean default?" in run_cli("generate", "a", "-m", "defualt").mistake
    ran = run_cli("generate", "The old", "-m", "default", "--max-new-tokens", 3)
    assert ran.out == run_cli("generate", "The old", "--max-new-tokens", 3).out != ""


class TestMistakes:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["--max-new-tokens", "0"],
            ["--max-new-tokens", "0", "--rerank", "pmi"],
            ["--expand", "2", "--max-new-tokens", "0"],
            ["--expand", "2", "--fraction", "2"],
            ["--rerank", "pmii"],
            ["--rerank", "./absent"],
            ["--rerank", "pmi", "--temperature", "0"],
        ],
    )
    def test_known_before_a_model_is_loaded(self, tiny_folder, arguments):
        with no_loading():
            assert run_cli("generate", "a cat", "-m", tiny_folder, *arguments).mistake

    @pytest.mark.parametrize(
        "arguments, message",
        [
            ([], "give either a prompt or --file"),
            (["a", "--file", "b.txt"], "not both"),
            (["a", "--temperature", "-1"], "temperature must be at least 0, got -1.0"),
            (["a", "--seed", "1"], "--seed is for sampling and greedy decoding samples nothing"),
            (["a", "--top-p", "1.5"], "top_p must be at most 1, got 1.5"),
            (["a", "--top-k", "0"], "top_k must be at least 1, got 0"),
            (["a", "--typical-p", "0"], "typical_p must be above 0, got 0.0"),
            (["a", "--temperature", "0", "--top-p", "0.9"], "--top-p chooses among sampled tokens"),
            (["a", "--batch-size", "0"], "batch_size=0"),
            (["a", "--max-new-tokens", "0"], "`max_new_tokens` must be at least 1, got 0"),
            (["a", "-m", "./absent"], "there is no folder"),
            (["a", "--column", "x"], "--column says how a file is read; it belongs to --file"),
            (["a", "--format", "txt"], "--format says how a file is read; it belongs to --file"),
            (["a", "--device", "abacus"], "cannot be used here"),
            (["x" * 99], "the prompt: the text has 100 tokens and the model's context ends at 64"),
            (["x" * 99, "--json"], "the prompt: the text has 100 tokens and the model's context ends at 64"),
            (["--file", "absent.txt"], "absent.txt: no such file"),
            (["a", "--fraction", "0"], "--fraction belongs to --expand"),
            (["--from-vector", "x.npy", "--keep", "a"], "--keep belongs to another use"),
            (["--from-vector", "x.npy", "--fraction", "0"], "--fraction belongs to another use"),
            (["--from-vector", "x.npy", "--batch-size", "3"], "--batch-size belongs to another use"),
            (["--from-vector", "x.npy", "--candidates"], "--candidates belongs to another use"),
            (["--from-vector", "x.npy", "--column", "c"], "--column belongs to another use"),
        ],
    )
    def test_arguments(self, tiny_folder, arguments, message):
        assert message in run_cli("generate", "-m", tiny_folder, *arguments).mistake

    @pytest.mark.parametrize(
        "name, content, message",
        [
            ("a.txt", b"", "a.txt has no prompts"),
            ("a.txt", b"one\n\xff", "a.txt, line 2: not valid UTF-8"),
            ("a.jsonl", b'{"prompt": "one"}\n{', "a.jsonl, line 2: not valid JSON"),
            ("a.jsonl", b'{"text": "one"}', "a.jsonl, line 1: no column 'prompt'; present are: text"),
            ("a.txt", b"one\n" + b"x" * 99, "a.txt, line 2: the text has 100 tokens and the model's context"),
        ],
    )
    def test_files(self, tiny_folder, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        out = tmp_path / "out.jsonl"
        assert message in run_cli("generate", "-f", tmp_path / name, "-m", tiny_folder, "-o", out).mistake
        assert not out.exists()


class TestExpanding:
    """With the bundled model: a random one writes halves of characters."""

    def expanded(self, *arguments):
        return run_cli("generate", "--max-new-tokens", 2, "--seed", 1, *arguments)

    @pytest.mark.slow
    def test_one_query_as_lines(self, bundled):
        ran = self.expanded("--expand", 3, "the cat in the rain", "--keep", "cat", "--keep", "in the")
        assert (ran.code, ran.err) == (0, "")
        sampling = gerund.Sampling(temperature=1.0, top_p=0.9, seed=1)
        keep = ["cat", "in the"]
        assert ran.out.splitlines() == bundled.expand(
            "the cat in the rain", 3, keep=keep, max_tokens=2, sampling=sampling
        )

    @pytest.mark.slow
    def test_many_queries_as_json(self, tmp_path):
        source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
        source.write_text("the cat in the rain\nthe cat in the rain\n")
        ran = self.expanded("--expand", 2, "-f", source, "-o", out, "--fraction", 0.5)
        assert (ran.code, ran.out, ran.err) == (0, "", "")
        first, second = records(out.read_text())
        assert list(first) == ["prompt", "expansions"]
        assert len(first["expansions"]) == len(second["expansions"]) == 2
        assert first["expansions"] != second["expansions"]
        one = self.expanded("--expand", 2, "the cat in the rain", "--fraction", 0.5, "--json")
        assert records(one.out) == [first]

    @pytest.mark.slow
    @pytest.mark.filterwarnings("always:.*expansions of:UserWarning")
    def test_fewer_than_asked_are_told(self):
        ran = run_cli("generate", "--expand", 3, "the [blank] rain", "--temperature", 0)
        assert ran.code == 0
        assert len(ran.out.splitlines()) == 1
        assert ran.err == "gerund: warning: 1 of 3 expansions of 'the [blank] rain' were found\n"

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["a", "--keep", "a"], "--keep belongs to --expand N"),
            (["a", "--fraction", "0.5"], "--fraction belongs to --expand N"),
            (["a", "--expand", "0"], "--expand 0 is not at least 1"),
            (["a", "--expand", "1", "--rerank", "pmi"], "--best-of is of no use with --expand"),
            (["a", "--expand", "1", "--batch-size", "4"], "--batch-size is of no use with --expand"),
            (["", "--expand", "1"], "the query is empty"),
            (["a cat", "--expand", "1", "--keep", "dog"], "'dog' is to be kept and is not in the query 'a cat'"),
            (["a cat", "--expand", "1", "--fraction", "2"], "lies between 0 and 1, and is 2.0"),
            (["a [blank]", "--expand", "1", "--keep", "a"], "there is nothing to keep"),
        ],
    )
    def test_mistakes(self, tiny_folder, arguments, message):
        assert message in run_cli("generate", "-m", tiny_folder, *arguments).mistake

    def test_a_mistake_in_a_file_names_its_line(self, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("the cat\nthe dog\n")
        ran = self.expanded("--expand", 1, "-f", source, "--keep", "cat", "-o", tmp_path / "out.jsonl")
        assert "in.txt, line 2: 'cat' is to be kept" in ran.mistake
        source.write_text("the cat\n\n")
        assert "in.txt, line 2: the query is empty" in self.expanded("--expand", 1, "-f", source).mistake
