"""``gerund generate``: one prompt as text, many as JSON lines."""

import json

import pytest

import gerund
from gerund.settings.sampling import Rerank, Sampling
from tests.cli.helpers import no_loading, run_cli


@pytest.fixture(scope="module")
def lm(tiny_folder):
    """The tiny model as it is read to generate."""
    return gerund.load(tiny_folder, attention="causal")


def records(text):
    return [json.loads(line) for line in text.splitlines()]


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
    for empty in (["-"], ["--file", "-"]):
        assert run_cli("generate", *empty, "-m", tiny_folder).mistake.startswith("standard input has no prompt")


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


def test_models_that_no_plan_reaches_write_too(tmp_path):
    from tests.tiny import save_tiny

    folder = save_tiny(tmp_path / "stablelm", "stablelm")
    assert run_cli("generate", "one", "-m", folder, "--max-new-tokens", 2).out.startswith("one")


def test_everything_that_may_be_asked(tiny_folder):
    ran = run_cli(
        *("generate", "the cat", "-m", tiny_folder, "--max-new-tokens", 9, "--temperature", 1, "--seed", 3),
        *("--min-p", 0.01, "--repetition-penalty", 1.1, "--frequency-penalty", 0.2, "--presence-penalty", 0.1),
        *("--logit-bias", "5=1", "-n", 2, "--stop", "q", "--logprobs", 1, "--json"),
    )
    found = records(ran.out)
    penalties = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    sampling = Sampling(1.0, min_p=0.01, **penalties, logit_bias={5: 1.0}, seed=3)
    expected = gerund.load(tiny_folder).generate("the cat", 9, sampling, n=2, stop="q", logprobs=1)
    assert [one["text"] for one in found] == [one.text for one in expected]
    assert [[token["id"] for token in one["logprobs"]] for one in found] == [one.token_ids for one in expected]
    assert found[0]["usage"]["completion_tokens"] == expected[0].usage.completion_tokens


@pytest.mark.slow
def test_forms(tiny_folder, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["a", "b"]}')
    for arguments in (["--schema", f"@{schema}"], ["--schema", schema.read_text()], ["--regex", '"[ab]"']):
        ran = run_cli("generate", "x", "-m", tiny_folder, *arguments)
        assert ran.out in ('x"a"\n', 'x"b"\n')
    chosen = run_cli("generate", "x", "-m", tiny_folder, "--choice", "yes", "--choice", "no").out
    assert chosen in ("xyes\n", "xno\n")


def test_the_best_of_a_search_is_printed(tiny_folder, lm):
    options = ["--rerank", "overlap", "--samples", 3, "--beams", 2, "--every", 2, "--seed", 1]
    ran = run_cli("generate", "the cat", "-m", tiny_folder, "--max-new-tokens", 6, *options)
    rerank = Rerank(3, beams=2, every=2, scorer="overlap")
    [one] = lm.generate("the cat", 6, Sampling(temperature=1.0, top_p=0.9, seed=1), rerank=rerank)
    assert (ran.code, ran.out) == (0, f"the cat{one.text}\n")


def test_many_prompts_are_ranked(tiny_folder, lm, tmp_path):
    source = tmp_path / "prompts.txt"
    source.write_text("the cat\nan inn\n")
    options = ["--rerank", "pmi", "--samples", 3, "--temperature", 1, "--seed", 1, "--max-new-tokens", 5]
    ran = run_cli("generate", "-f", source, "-m", tiny_folder, *options)
    found = records(ran.out)
    expected = lm.generate(["the cat", "an inn"], 5, Sampling(temperature=1.0, seed=1), rerank=Rerank(3))
    assert [record["text"] for record in found] == [one.text for one in expected]
    assert [record["rank_score"] for record in found] == pytest.approx([one.rank_score for one in expected], abs=1e-5)


def test_best_of_by_consensus(tiny_folder):
    lm = gerund.load(tiny_folder)  # with its vectors, not as a model that only generates
    options = ["--best-of", 4, "--rank", "consensus", "--seed", 1, "--max-new-tokens", 5]
    ran = run_cli("generate", "the cat", "-m", tiny_folder, *options)
    [one] = lm.generate("the cat", 5, seed=1, best_of=4, rank="consensus")
    assert (ran.code, ran.out) == (0, f"the cat{one.text}\n")
    options = ["--rerank", "overlap", "--samples", 3, "--max-new-tokens", 4, "--seed", 1, "--json", "--candidates"]
    [record] = records(run_cli("generate", "x", "-m", tiny_folder, *options).out)
    assert [one["text"] for one in record["candidates"]].count(record["text"]) == 1
    assert record["candidates"][0]["rank_score"] == record["rank_score"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a prompt or --file"),
        (["a", "--file", "b.txt"], "not both"),
        (["a", "--seed", "1"], "--seed is for sampling and greedy decoding samples nothing"),
        (["a", "--top-p", "1.5"], "top_p must be at most 1, got 1.5"),
        (["a", "--temperature", "0", "--top-p", "0.9"], "--top-p chooses among sampled tokens"),
        (["a", "--batch-size", "0"], "batch_size=0"),
        (["a", "--column", "x"], "--column says how a file is read; it belongs to --file"),
        (["--file", "absent.txt"], "absent.txt: no such file"),
        (["a", "-n", "2", "--temperature", "1"], "are for JSON"),
        (["a", "--candidates", "--json"], "belongs to --best-of"),
        (["a", "--logit-bias", "a=b"], "ID=NUMBER"),
        (["a", "--schema", "@nowhere.json"], "cannot be read"),
        (["a", "--schema", "{"], "not valid JSON"),
        (["a", "--rerank", "pmii"], "unknown scorer 'pmii'"),
        (["a", "--rerank", "./absent"], "there is no folder"),
        (["a", "--rerank", "overlap", "--stop", "a"], "`stop` can't be combined with `rerank`"),
        (["a", "--rerank", "pmi", "--temperature", "0"], "nothing to rank. Set a temperature above 0, such as 1"),
        (["a", "--beams", "3"], "--beams belongs to --rank SCORER"),
        (["a", "--fraction", "0"], "--fraction belongs to --expand N"),
        (["a", "--expand", "0"], "--expand 0 is not at least 1"),
        (["a", "--expand", "1", "--batch-size", "4"], "--batch-size is of no use with --expand"),
        (["", "--expand", "1"], "the query is empty"),
        (["a cat", "--expand", "1", "--keep", "dog"], "'dog' is to be kept and is not in the query 'a cat'"),
        (["a [blank]", "--expand", "1", "--keep", "a"], "there is nothing to keep"),
        (["--from-vector", "x.npy", "--keep", "a"], "--keep belongs to another use"),
    ],
)  # fmt: skip
def test_mistakes(tiny_folder, arguments, message):
    with no_loading():
        assert message in run_cli("generate", "-m", tiny_folder, *arguments).mistake


def test_a_prompt_beyond_the_context(tiny_folder, tmp_path):
    said = "the text has 100 tokens and the model's context ends at 64"
    for more in ([], ["--json"]):
        assert f"the prompt: {said}" in run_cli("generate", "-m", tiny_folder, "x" * 99, *more).mistake
    (tmp_path / "a.txt").write_text("one\n" + "x" * 99)
    refused = run_cli("generate", "-f", tmp_path / "a.txt", "-m", tiny_folder, "-o", tmp_path / "out.jsonl")
    assert f"a.txt, line 2: {said}" in refused.mistake
    assert not (tmp_path / "out.jsonl").exists()
    (tmp_path / "a.txt").write_text("")
    assert "a.txt has no prompts" in run_cli("generate", "-f", tmp_path / "a.txt", "-m", tiny_folder).mistake


class TestExpanding:
    """With the bundled model: a random one writes halves of characters."""

    def expanded(self, *arguments):
        return run_cli("generate", "--max-new-tokens", 2, "--seed", 1, *arguments)

    @pytest.mark.slow
    def test_one_query_as_lines(self, bundled):
        ran = self.expanded("--expand", 3, "the cat in the rain", "--keep", "cat", "--keep", "in the")
        assert (ran.code, ran.err) == (0, "")
        how = {"keep": ["cat", "in the"], "max_tokens": 2, "sampling": Sampling(temperature=1.0, top_p=0.9, seed=1)}
        assert ran.out.splitlines() == bundled.expand("the cat in the rain", 3, **how)

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

    def test_a_mistake_in_a_file_names_its_line(self, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("the cat\nthe dog\n")
        ran = self.expanded("--expand", 1, "-f", source, "--keep", "cat", "-o", tmp_path / "out.jsonl")
        assert "in.txt, line 2: 'cat' is to be kept" in ran.mistake
        source.write_text("the cat\n\n")
        assert "in.txt, line 2: the query is empty" in self.expanded("--expand", 1, "-f", source).mistake
