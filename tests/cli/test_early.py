"""What is wrong with a command's files is told before torch, which takes seconds, is imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# torch cannot be imported here: a command that looks at its files too late fails otherwise.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stderr
sys.modules["torch"] = None
from gerund.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["gerund", *words]
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            main()
    except SystemExit as end:
        print(json.dumps([end.code, said.getvalue()]))
"""


@pytest.mark.slow
def test_files_are_looked_at_first(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("A text.")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text('{"query": "a"}\n')
    (tmp_path / "blank.jsonl").write_text('{"query": " ", "documents": ["a"]}\n')
    adapt = ["adapt", "-o", "out", "--texts"]
    wanted = {
        ("adapt", "-o", "out", "--texts", "nowhere"): "nowhere: no such file or folder",
        (*adapt, "empty"): "empty: there is no file to read",
        (*adapt, "notes", "--minutes", "0"): "minutes=0 leaves no time to train",
        (*adapt, "notes", "--questions", "q.jsonl"): "q.jsonl: no such file",
        (*adapt, "notes", "--recipe", "gur-adopt"): "gur-adopt: no such recipe",
        (*adapt, "notes", "--recipe", "my.yaml"): "my.yaml: no such file",
        ("ask", "--document", "nowhere.txt", "Why?"): "nowhere.txt: no such file",
        ("ask", "nowhere", "Why?"): "nowhere: no such index; gerund index PATHS -o nowhere makes one",
        ("rerank", "-f", "nowhere.jsonl"): "nowhere.jsonl",
        ("rerank", "-f", "bad.jsonl"): "bad.jsonl, line 1",
        ("rerank", "-f", "blank.jsonl"): "blank.jsonl, line 1: the query is empty",
        ("rerank", "a", "b", "--by", "magic"): "unknown measure of relevance 'magic'",
        ("serve", "--index", "nowhere"): "nowhere: no such index; gerund index PATHS -o nowhere makes one",
        ("serve", "--index", "notes"): "notes is not an index: it contains a.txt; an index is a folder of its own",
        ("search", "notes", "x"): "notes is not an index: it contains a.txt; an index is a folder of its own",
    }
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([list(words) for words in wanted])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) == len(wanted), ran.stderr
    for (code, said), (words, sentence) in zip(found, wanted.items(), strict=True):
        assert code == 2, (words, said)
        assert sentence in said, words
        assert said.count("\n") == 1, said
