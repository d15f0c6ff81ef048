"""``gerund mine`` from the command line: what it says, what it refuses, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from gerund.data.mining import job
from tests.cli.helpers import run_cli
from tests.data.mining.corpora import articles, write_jsonl


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


@pytest.mark.parametrize(
    "options", [["--method", "none"], ["--method", "ict"], ["--method", "crops", "--context", 200]]
)
def test_other_methods(corpus, tmp_path, options):
    out = tmp_path / "pairs.parquet"
    assert run_cli("mine", corpus, "-o", out, "-j", 1, *options).code == 0
    assert pq.read_table(out).column("span").null_count == pq.read_table(out).num_rows > 0


@pytest.mark.slow
def test_killed_and_resumed(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(4_000))
    out, whole = tmp_path / "out.parquet", tmp_path / "whole.parquet"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SMALL_PARTS, "mine", str(corpus), "-o", str(out), "-j", "2"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    folder = tmp_path / "out.parquet.parts"
    while len(list(folder.glob("part-*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    assert not out.exists()
    refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "unfinished work; give --resume to continue it" in refused.stderr
    resumed = subprocess.run(
        [*command, "--resume", "--json"], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(resumed.stdout)["resumed_parts"] >= 3
    assert not folder.exists()
    subprocess.run([*command[:5], "-o", str(whole), "-j", "1"], env=environment, check=True, capture_output=True)
    assert whole.read_bytes() == out.read_bytes()


# The command with parts so small that it can be killed between them.
_SMALL_PARTS = """
if __name__ == "__main__":
    from gerund.data.mining import candidates
    from dataclasses import field
    own = candidates.MiningConfig.__init__
    def init(self, **more):
        own(self, **{**more, "part_size": 50_000})
    candidates.MiningConfig.__init__ = init
    from gerund.cli.main import run
    run()
"""


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
    assert "exists already" in run_cli("mine", corpus, "-o", tmp_path / "out.parquet", "-j", 1).mistake


class TestMistakes:
    @pytest.fixture
    def refuse(self, corpus, tmp_path):
        def run(*more, corpus=corpus, output=tmp_path / "pairs.parquet"):
            before = sorted(tmp_path.rglob("*"))
            mistake = run_cli("mine", corpus, "-o", output, "-j", 1, *more).mistake
            assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing behind"
            return mistake

        return run

    def test_files(self, refuse, tmp_path):
        absent = tmp_path / "absent.jsonl"
        assert refuse(corpus=absent) == f"{absent}: no such file or folder"
        (tmp_path / "a.docx").write_text("x")
        assert "a.docx: unknown file format" in refuse(corpus=tmp_path / "a.docx")
        (tmp_path / "empty").mkdir()
        assert "no file of texts in it" in refuse(corpus=tmp_path / "empty")
        (tmp_path / "empty.jsonl").touch()
        assert refuse(corpus=tmp_path / "empty.jsonl") == "there is no document to mine"
        assert "ends in .parquet or .jsonl" in refuse(output=tmp_path / "pairs.csv")

    def test_an_output_that_is_there(self, refuse, corpus, tmp_path):
        out = tmp_path / "pairs.parquet"
        out.touch()
        assert refuse() == f"{out} exists already; choose another name or give --force to replace it"
        assert run_cli("mine", corpus, "-o", out, "-j", 1, "--force").code == 0

    @pytest.mark.parametrize(
        "options, message",
        [
            (["--method", "lsc"], "unknown method 'lsc'; valid are: lcs, none, ict, crops"),
            (["--pairs", "some"], "unknown enumeration of pairs 'some'; valid are: title, all"),
            (["--threshold", "0"], "threshold=0 would make a pair of any two sentences; 1 is the least"),
            (["--letter-weight", "0"], "the weight of a symbol is a whole number from 1 to 1,000,000, and letter=0"),
            (["--max-uses", "-1"], "max_uses=-1 is below 1; for any number None, or --max-uses 0"),
            (["--language", "?"], "language='?' is not a language code such as en, zh or de"),
            (["--workers", "0"], "workers must be from 1 to 100000, got 0"),
            (["--method", "ict", "--threshold", "40"], "threshold means nothing to the method ict; leave it out"),
            (["--threshold", "5000"], "no two sentences of 40 documents are a pair by these settings"),
            (["--text-column", "body"], None),
        ],
    )
    def test_settings(self, refuse, options, message):
        if message is None:
            assert "the first: " in (told := refuse(*options))
            assert told.endswith("no field 'body'; present are: title, text")
        else:
            assert refuse(*options) == message
