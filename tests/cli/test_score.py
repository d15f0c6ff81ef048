"""``gerund score``: continuations of a prefix, and of many in a file."""

import json

import pytest

import gerund
from gerund.errors import TextError
from tests.cli.helpers import no_loading, run_cli


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="causal")


def test_lists_the_best_first(tiny_folder, lm):
    ran = run_cli("score", "the cat", "in the rain", " an end", "-m", tiny_folder)
    assert (ran.code, ran.err) == (0, "")
    [scores] = lm.score(["the cat"], [[" in the rain", " an end"]])
    expected = sorted(zip(scores, ["in the rain", "an end"], strict=True), reverse=True)
    assert [line.split(maxsplit=1) for line in ran.out.splitlines()] == [[f"{s:.4f}", text] for s, text in expected]


@pytest.mark.parametrize("scorer", ["avg_cll", "overlap"])
def test_json(tiny_folder, lm, scorer):
    ran = run_cli("score", "the cat ", "sat", "the", "-m", tiny_folder, "--json", "--scorer", scorer)
    [scores] = lm.score(["the cat "], [["sat", "the"]], scorer)
    record = json.loads(ran.out)
    assert record["scores"] == pytest.approx(scores, abs=1e-6)
    assert record["best"] == scores.index(max(scores))


def test_file(tiny_folder, lm, tmp_path):
    rows = [{"prefix": f"the cat {n}", "continuations": [" sat", "in a tin"]} for n in range(40)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out" / "scores.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run_cli("score", "--file", source, "-m", tiny_folder, "-o", target).code == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    expected = lm.score([row["prefix"] for row in rows], [[" sat", " in a tin"]] * 40)
    assert [record["prefix"] for record in found] == [row["prefix"] for row in rows]
    for record, scores in zip(found, expected, strict=True):
        assert record["scores"] == pytest.approx(scores, abs=1e-4)
    assert "exists already" in run_cli("score", "--file", source, "-m", tiny_folder, "-o", target).mistake


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prefix": "a"}', "line 1: needs 'continuations', a list of texts"),
        ('{"prefix": "a", "continuations": []}', "needs 'continuations', a list of texts"),
        ('{"prefix": "a", "continuations": [" "]}', "line 1: continuation 0 is empty"),
        ('{"prefix": "a", "continuations": [3]}', "line 1"),
        ('{"continuations": ["b"]}', "no field 'prefix'"),
        ("", "the file is empty"),
    ],
)
def test_bad_files(tmp_path, line, message):
    source = tmp_path / "in.jsonl"
    source.write_text(line)
    assert message in run_cli("score", "-f", source).mistake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either a prefix with its continuations or --file"),
        (["a"], "give at least one continuation"),
        (["a", "b", ""], "continuation 1 is empty"),
        (["a", "b", "--scorer", "pmy"], "unknown scorer 'pmy'"),
        (["-f", "absent.jsonl"], "absent.jsonl: no such file"),
    ],
)
def test_mistakes(arguments, message):
    with no_loading():
        assert message in run_cli("score", *arguments).mistake


@pytest.mark.slow
def test_default_is_the_scorer_inside(tiny_folder):
    texts = ["The old man looked at the sea.", "The waves were high.", "Interest rates rose."]
    ran = run_cli("score", *texts, "-m", tiny_folder, "--scorer", "default")
    assert (ran.code, ran.out) == (0, run_cli("score", *texts).out)


@pytest.mark.slow
def test_an_empty_prefix_has_no_vector(tmp_path):
    assert run_cli("score", "", "b").mistake.startswith("the prefix is empty, and this scorer compares it")
    rows = [{"prefix": "" if n == 34 else "a", "continuations": ["b"]} for n in range(36)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = run_cli("score", "--file", source, "-o", tmp_path / "out.jsonl")
    assert "in.jsonl, line 35: the prefix is empty, and this scorer" in ran.err
    assert run_cli("score", "", "b", "--scorer", "avg_cll").code == 0


def test_a_prefix_beyond_the_context_is_refused_as_generate_does(lm, tiny_folder, tmp_path):
    limit = lm.model.config.max_position_embeddings
    prefix = "x" * limit
    with pytest.raises(TextError) as generated:
        lm.generate([prefix], 1)
    with pytest.raises(TextError) as scored:
        lm.score(["a", prefix], [[" b"], [" b"]], "avg_cll")
    assert str(scored.value) == str(generated.value).replace("prompt 0", "prefix 1").replace("the prompt", "prefix 1")
    assert lm.score([prefix, ""], [[" x"], [" b"]], "overlap")[1] == [0.0]
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prefix": prefix, "continuations": ["b"]}) + "\n")
    told = run_cli("score", "--file", path, "-m", tiny_folder).mistake
    assert told.startswith(f"{path}, line 1: the prefix has ")
    assert told.endswith(f"the model's context ends at {limit}")
