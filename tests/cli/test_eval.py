"""`gerund eval`: a report, gone on with, added to; and every mistake in one sentence."""

import json
import re

import pytest

from gerund.cli import eval as eval_command
from tests.cli.helpers import no_loading, run_cli
from tests.evaluation.tables import write_data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def scores(report):
    """Return the main scores of results.json by task and system."""
    found = json.loads((report / "results.json").read_text())
    return {(row["task"], row["system"]): row["score"]["metrics"][row["score"]["main"]] for row in found["scores"]}


@pytest.mark.slow
def test_a_second_command_goes_on_and_adds(tiny_folder, data, tmp_path):
    report = tmp_path / "report"
    base = ["eval", tiny_folder, "--data", data, "-o", report, "--no-pictures", "--plan"]
    first = run_cli(*base, "causal", "--tasks", "sts")
    assert first.code == 0, first.err
    before = scores(report)
    files = {path: path.stat().st_mtime_ns for path in (report / "scores").glob("*.json")}
    second = run_cli(*base, "echo", "--plan", "causal", "--tasks", "sts,zero-shot", "--json")
    assert second.code == 0, second.err
    assert json.loads(second.out)["scores"]
    alone = re.findall(r"^gerund: (.+) alone: \d+\.\d s, \d+\.\d CPU s$", second.err, re.MULTILINE)
    assert sorted(alone) == ["causal", "echo"]
    after = scores(report)
    assert before.items() <= after.items()
    assert {("sts/small", "echo"), ("zero-shot/fruit", "causal"), ("zero-shot/fruit", "echo")} <= set(after)
    assert all(path.stat().st_mtime_ns == time for path, time in files.items())


@pytest.mark.slow
def test_what_was_measured_otherwise_is_not_dropped_in_silence(tiny_folder, data, tmp_path):
    base = ["eval", tiny_folder, "--data", data, "-o", tmp_path / "r", "--no-pictures", "--tasks", "sts"]
    assert "warning" not in run_cli(*base).err
    again = run_cli(*base, "--limit", 4)
    assert "warning: 1 scores in" in again.err
    assert len(scores(tmp_path / "r")) == 1
    assert "(known already)" in run_cli(*base).err


@pytest.mark.slow
def test_models_of_two_commands_are_told_apart(tiny_folder, data, tmp_path):
    for model in ([tiny_folder], []):  # without a name it is the bundled one
        base = ["--data", data, "-o", tmp_path / "r", "--no-pictures", "--tasks", "sts", "--plan", "causal"]
        ran = run_cli("eval", *model, *base)
        assert ran.code == 0, ran.err
    assert {system for _, system in scores(tmp_path / "r")} == {
        "tiny-llama: causal",
        "the bundled model: causal",
    }


def test_an_interruption_says_what_becomes_of_the_work(tiny_folder, data, tmp_path, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    command = ["eval", tiny_folder, "--data", data, "-o", tmp_path / "r", "--tasks", "sts"]
    with monkeypatch.context() as patch:
        patch.setattr("gerund.evaluation.systems.selection.systems_of", interrupt)
        ran = run_cli(*command)
    assert ran.code != 0
    assert "gerund: interrupted; nothing new was done yet; run the same command again\n" in ran.err
    monkeypatch.setattr("gerund.evaluation.run._measure", interrupt)
    assert "nothing new was done yet" in run_cli(*command).err
    (tmp_path / "r" / "embeddings").mkdir(parents=True)
    message = f"0 finished scores and the embeddings so far are saved in {tmp_path / 'r'}"
    assert f"gerund: interrupted; {message}: run the same command again to continue\n" in run_cli(*command).err


def test_what_was_interrupted_before_its_first_score_goes_on(tiny_folder, data, tmp_path):
    (tmp_path / "r" / "embeddings").mkdir(parents=True)
    command = ["eval", tiny_folder, "--data", data, "-o", tmp_path / "r", "--tasks", "sts", "--no-pictures"]
    assert run_cli(*command).code == 0
    (tmp_path / "other" / "embeddings").mkdir(parents=True)
    (tmp_path / "other" / "notes.txt").write_text("mine")
    command[5] = tmp_path / "other"
    assert "holds other files" in run_cli(*command).mistake


def test_options_prompts_and_the_validation_split(tiny_folder, data, tmp_path):
    prompts = tmp_path / "prompts.yaml"
    prompts.write_text("sts: 'Say: '\nfew-shot/fruit: 'Name: '\n")
    ran = run_cli(
        "eval", tiny_folder, "--tasks", "sts,few-shot", "--data", data, "-o", tmp_path / "r", "--no-pictures",
        "--prompts", prompts, "--set", "few-shot.runs=2", "--validation", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    found = json.loads(ran.out)
    assert found["config"]["split"] == "validation"
    [few] = [row for row in found["scores"] if row["task"] == "few-shot/fruit"]
    assert few["options"]["runs"] == 2


def test_list(data):
    ran = run_cli("eval", "--list", "--data", data)
    assert ran.code == 0, ran.err
    for name in ("sts/small", "retrieval/small", "reranking/small", "few-shot/fruit", "runs=5"):
        assert name in ran.out


def test_list_tells_what_it_cannot_place(tmp_path):
    folder = write_data(tmp_path / "data")
    (folder / "sts" / "mine.tsv").write_text("1\ta\tb\n")
    ran = run_cli("eval", "--list", "--data", folder)
    assert "No task was found for these files" in ran.out
    assert ran.out.rstrip().endswith("mine.tsv")
    assert "mine.tsv" not in run_cli("eval", "--list", "--data", write_data(tmp_path / "whole")).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "sts"], "give --tasks and -o REPORT, or --list"),
        (["hybrid", "--tasks", "retrieval", "-o", "{out}", "--data", "{data}"], "hybrid joins the ranking of a model"),
        (["{out}/none", "--tasks", "sts", "-o", "{out}", "--data", "{data}"], "none"),
        (["--list"], "--list shows which tasks a folder of data holds; give --data FOLDER"),
        (["--tasks", "stsb", "-o", "{out}"], "give --data FOLDER for tasks on local data, or an MTEB name; did you"),
        (["--tasks", "sts", "-o", "{out}", "--data", "{empty}"], "holds no data of any task"),
        (["--tasks", "stsb", "-o", "{out}", "--data", "{empty}"], "looks like; did you mean mteb/STSB"),
        (["default", "defualt", "--tasks", "sts", "-o", "{out}", "--data", "{data}"], "did you mean default?"),
        (["--tasks", "stss", "-o", "{out}", "--data", "{data}"], "unknown task 'stss'; did you mean sts"),
        (["--tasks", "small", "-o", "{out}", "--data", "{data}"], "'small' may be sts/small, retrieval/small"),
        (["--tasks", " , ", "-o", "{out}", "--data", "{data}"], "--tasks names no task"),
        (["--tasks", "sts", "-o", "{out}", "--data", "{out}/none"], "none: no such folder"),
        (["--tasks", "sts", "-o", "{data}/sts", "--data", "{data}"], "holds other files"),
        (["--tasks", "sts", "-o", "{data}/sts/small.test.tsv", "--data", "{data}"], "is a file; a report is a folder"),
        (["--tasks", "sts", "-o", "{out}", "--data", "{data}", "--limit", "0"], "limit=0 leaves nothing to score"),
        (["--tasks", "sts", "-o", "{out}", "--data", "{data}", "--prompts", "lbv"], "lbv"),
        (["--tasks", "few-shot", "-o", "{out}", "--data", "{data}", "--set", "few-shot.run=2"], "valid are: runs"),
        (["--tasks", "few-shot", "-o", "{out}", "--data", "{data}", "--set", "few-shot.runs=x"], "not 'x'"),
        (["--tasks", "few-shot", "-o", "{out}", "--data", "{data}", "--set", "sts.runs=2"], "a kind among: few-shot"),
        (["--tasks", "retrieval", "-o", "{out}", "--data", "{data}", "--validation"], "no validation split: retr"),
    ],
)  # fmt: skip
def test_mistakes(data, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    places = {"out": tmp_path / "out", "data": data, "empty": tmp_path / "empty"}
    with no_loading():
        ran = run_cli("eval", *(str(argument).format(**places) for argument in arguments))
    assert message in ran.mistake
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mistake", [["--plan", "foo"], ["--limit", "0"], ["-o", "{data}"], ["defualt"]])
def test_what_is_quick_to_find_comes_before_the_tasks(data, tmp_path, monkeypatch, mistake):
    monkeypatch.setattr(eval_command, "_tasks", None)
    arguments = ["--tasks", "STSB", "-o", tmp_path / "out", *(word.format(data=data) for word in mistake)]
    assert run_cli("eval", "default", *arguments).mistake


@pytest.mark.slow
def test_a_malformed_row_is_named_and_earlier_scores_are_kept(tiny_folder, data, tmp_path):
    folder = write_data(tmp_path / "data")
    (folder / "sts" / "small.test.tsv").write_text("1\ta\tb\nhigh\tc\td\n")
    report = tmp_path / "report"
    base = ["eval", tiny_folder, "--data", folder, "-o", report, "--no-pictures", "--tasks"]
    assert run_cli(*base, "retrieval").code == 0
    ran = run_cli(*base, "sts,retrieval")
    assert ran.code == 2
    assert "small.test.tsv, line 2: 'score' is not a number: 'high'" in ran.err
    assert len(list((report / "scores").glob("retrieval*.json"))) == 1


@pytest.mark.slow
def test_models_plans_bm25_and_both_together_stand_side_by_side(tiny_folder, data, tmp_path):
    report = tmp_path / "report"
    base = ["--data", data, "-o", report]
    asked = ["--tasks", "sts", "--tasks", "retrieval/small", "--plan", "causal", "--plan", "mask0-bidir:k=2"]
    ran = run_cli("eval", tiny_folder, "bm25", "hybrid", *asked, *base)
    assert ran.code == 0, ran.err
    assert all(name in ran.out for name in ("sts", "retrieval", "small", "causal", "mask0-bidir k=2", "bm25"))
    plans = ["causal", "mask0-bidir k=2"]
    assert set(scores(report)) == {
        *(("sts/small", plan) for plan in plans), ("retrieval/small", "bm25"),
        *(("retrieval/small", f"{plan}{more}") for plan in plans for more in ("", " + BM25")),
    }  # fmt: skip
    found = json.loads((report / "results.json").read_text())
    of_retrieval = [row for row in found["scores"] if row["task"] == "retrieval/small"]
    assert all({"recall_at_100", "mrr_at_10"} <= set(row["score"]["metrics"]) for row in of_retrieval)
    page = (report / "report.html").read_text()
    assert all(part in page for part in ("mask0-bidir k=2", "<img", "recall_<wbr>at_<wbr>100"))
    assert "[7/" in ran.err
    # It is known again, and generation, which is the model's, is not given to it.
    again = run_cli("eval", tiny_folder, "hybrid", "--tasks", "retrieval,perplexity", *base, "--plan", "causal")
    assert again.code == 0, again.err
    assert "causal + BM25" in again.err
    assert "(known already)" in again.err
    assert ("perplexity/small", "causal + BM25") not in scores(report)
