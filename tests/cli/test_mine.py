"""``gerund mine`` from the command line: what it says, what it refuses, killed and resumed."""

import json

import pyarrow.parquet as pq
import pytest

from gerund.data.mining import job
from tests.cli.helpers import run_cli
from tests.data.mining.test_job import articles, write_jsonl


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", articles(40))


def test_says_what_was_found(corpus, tmp_path):
    out = tmp_path / "pairs.parquet"
    ran = run_cli("mine", corpus, "-o", out, "-j", 1)
    assert (ran.code, ran.err) == (0, "")
    pairs = pq.read_table(out).num_rows
    first, second, third = ran.out.splitlines()
    assert first == f"{pairs} pairs of 40 documents in {out}"
    assert second.endswith(" duplicates dropped")
    assert third.endswith(" MB/s)")


def test_json_says_the_same(corpus, tmp_path):
    out = tmp_path / "pairs.jsonl"
    with corpus.open("a") as file:
        file.write('{"text": 3}\n')
    ran = run_cli("mine", corpus, "-o", out, "-j", 1, "--json")
    told = json.loads(ran.out)
    assert (told["output"], told["pairs"]) == (str(out), len(out.read_text().splitlines()))
    assert told["first_errors"] == [{"file": str(corpus), "line": 41, "reason": "'text' is not a text but int"}]
    assert ran.err.splitlines() == [
        f"gerund: warning: {corpus}, line 41: 'text' is not a text but int",
        f"gerund: warning: 1 document not used: {tmp_path / 'pairs.errors.jsonl'}",
    ]


def test_many_errors_are_not_all_shown(corpus, tmp_path):
    with corpus.open("a") as file:
        file.write("{\n" * 30)
    ran = run_cli("mine", corpus, "-o", tmp_path / "pairs.parquet", "-j", 1)
    assert len(ran.err.splitlines()) == 6
    assert "30 documents not used; the first 5 are above: " in ran.err
    assert len((tmp_path / "pairs.errors.jsonl").read_text().splitlines()) == 30


def test_folders_and_options(tmp_path):
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "one.txt").write_text("北京大学很大。北京大学很老。我不知道。")
    (folder / "below" / "two.txt").write_text("北京大学在北京。没有人知道。")
    out = tmp_path / "pairs.jsonl"
    options = ["--pairs", "all", "--language", "zh", "--threshold", 8, "--wide-weight", 2, "--max-uses", 0, "--seed", 3]
    assert run_cli("mine", folder, "-o", out, "-j", 1, *options).code == 0
    [row] = map(json.loads, out.read_text().splitlines())
    assert {row["text_a"], row["text_b"]} == {"北京大学很大。", "北京大学很老。"}
    assert (row["span"], row["weight"]) == ("北京大学很", 10)


def test_another_method(corpus, tmp_path):
    out = tmp_path / "pairs.parquet"
    assert run_cli("mine", corpus, "-o", out, "-j", 1, "--method", "crops", "--context", 200).code == 0
    assert pq.read_table(out).column("span").null_count == pq.read_table(out).num_rows > 0


def test_interrupted_says_how_to_go_on(corpus, tmp_path, monkeypatch):
    own, calls = job.make_part, []

    def make_part(*given):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return own(*given)

    monkeypatch.setattr(job, "_MOST_DOCUMENTS", 10)
    with monkeypatch.context() as patch:
        patch.setattr(job, "make_part", make_part)
        ran = run_cli("mine", corpus, "-o", tmp_path / "out.parquet", "-j", 1)
    assert ran.code == 130
    assert "gerund: interrupted; finished parts are kept in" in ran.err
    assert run_cli("mine", corpus, "-o", tmp_path / "out.parquet", "-j", 1, "--resume").code == 0
    made = (tmp_path / "out.parquet").read_bytes()
    again = run_cli("mine", corpus, "-o", tmp_path / "out.parquet", "-j", 1, "--resume", "--json")
    assert (again.code, json.loads(again.out)["finished"]) == (0, True)
    assert "out.parquet is finished already, and nothing is left to resume" in again.err
    assert (tmp_path / "out.parquet").read_bytes() == made
    command = ("mine", corpus, "-o", tmp_path / "out.parquet", "-j", 1)
    assert "exists already; choose another name or give --force to replace it" in run_cli(*command).mistake
    assert run_cli(*command, "--force").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-uses", "-1"], "max_uses=-1 is below 1; for any number None, or --max-uses 0"),
        (["--workers", "0"], "workers must be from 1 to 100000, got 0"),
        (["--method", "ict", "--threshold", "40"], "threshold means nothing to the method ict; leave it out"),
        (["--text-column", "body"], "no field 'body'; present are: title, text"),
    ],
)
def test_mistakes(corpus, tmp_path, options, message):
    assert run_cli("mine", corpus, "-o", tmp_path / "pairs.parquet", "-j", 1, *options).mistake.endswith(message)
    assert list(tmp_path.iterdir()) == [corpus]
