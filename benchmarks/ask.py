"""Questions with known answers over files of three kinds: how many `ask` answers, cites and refuses rightly.

    python benchmarks/ask.py --data ../shared/data [--handbook FILE.html] [--model default SmolLM2.gguf]

The questions are in ask_questions.tsv: over ten articles of an encyclopedia (the test articles of --data), over pages
of `man` as this machine has them, and over a program's manual (that of Ninja, from Debian's ninja-build-doc), where
--handbook names it. An answer is right where it holds one of the right ones. Where the files don't answer a question,
it is right to say that nothing was found. `--split dev` asks the other questions, to choose settings on.
"""

import csv
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gerund
import harness
from gerund.data.corpus import read_documents
from gerund.evaluation.tasks.question_answering import contains
from results import Column, Row, Table

QUESTIONS = Path(__file__).with_name("ask_questions.tsv")
ARTICLES = {"test": "lm/wiki.test.jsonl", "dev": "lm/wiki.valid.jsonl"}


def read_questions(split: str) -> list[dict[str, str]]:
    """Return the questions of a split."""
    with QUESTIONS.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if row["split"] == split]


def write_files(questions: list[dict[str, str]], options: Any, folder: Path) -> list[dict[str, str]]:
    """Write the files that are asked about, and return the questions over those that there are."""
    names = {row["file"] for row in questions if row["file"]}
    for document in read_documents([options.data / ARTICLES[options.split]]):
        name = f"{document.title.replace(' ', '_')}.txt"
        if name in names:
            (folder / name).write_text(f"# {document.title}\n\n{document.text}", "utf-8")
    for name in sorted(name for name in names if name.endswith(".1.txt") and shutil.which("man")):
        page = subprocess.run(
            ["man", "--nh", "--nj", "-P", "cat", "1", name.removesuffix(".1.txt")], check=False, capture_output=True,
            text=True, env={"MANWIDTH": "100", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
        ).stdout  # fmt: skip
        if page:
            (folder / name).write_text(page, "utf-8")
    if options.handbook:
        [name] = {row["file"] for row in questions if row["kind"] == "handbook" and row["file"]}
        shutil.copyfile(options.handbook, folder / name)
    there = {path.name for path in folder.iterdir()}
    kinds = {row["kind"] for row in questions if row["file"] in there}
    return [row for row in questions if row["kind"] in kinds and (not row["file"] or row["file"] in there)]


def asked(index: gerund.Index, row: dict[str, str], method: str) -> dict[str, Any]:
    """Ask a question, and return how well it was answered."""
    begin = time.process_time()
    answer = index.ask(row["question"], method=method)
    right = [option for option in row["answers"].split("|") if option]
    cited = {Path(answer.sources[number - 1].source).name for number in answer.cited}
    return {
        "kind": row["kind"], "method": method, "question": row["question"], "text": answer.text,
        "answerable": bool(right), "found": answer.found,
        "right": bool(answer.found and contains(" ".join(answer.text.split()), right)),
        "cited": row["file"] in cited, "replaced": bool(answer.rejected), "rejected": answer.rejected,
        "unsupported": sum(check.support == "unsupported" for check in answer.checks),
        "sentences": len(answer.checks), "seconds": time.process_time() - begin,
    }  # fmt: skip


def row_of(model: str, kind: str, results: Iterable[dict[str, Any]]) -> Row:
    """Return one line of the table."""
    results = list(results)
    answerable = [result for result in results if result["answerable"]]
    return {
        "model": model, "method": results[0]["method"], "kind": kind,
        "right": sum(result["right"] for result in answerable), "answerable": len(answerable),
        "cited": sum(result["cited"] for result in answerable),
        "refused": sum(not result["found"] for result in results if not result["answerable"]),
        "unanswerable": len(results) - len(answerable),
        "replaced": sum(result["replaced"] for result in results),
        "seconds": sum(result["seconds"] for result in results) / len(results),
    }  # fmt: skip


def measured(options: Any, stored: dict[str, Any]) -> list[Row]:
    """Ask all models; answers are stored as they come, and those of an earlier run aren't asked for again."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        questions = write_files(read_questions(options.split), options, folder)[: options.questions]
        for model in options.model:
            called, index = Path(model).name, None
            for method in options.methods:
                results = []
                for question in questions:
                    key = f"{called}|{method}|{question['question']}"
                    if key not in stored:
                        if index is None:
                            index = gerund.open_index(None, gerund.load(model))
                            index.add(folder)
                        stored[key] = asked(index, question, method)
                        if options.work:
                            options.work.write_text(json.dumps(stored, indent=1), "utf-8")
                    results.append(stored[key])
                for kind in dict.fromkeys(result["kind"] for result in results):
                    rows.append(row_of(called, kind, [result for result in results if result["kind"] == kind]))
                rows.append(row_of(called, "all", results))
    return rows


def main(argv: list[str] | None = None) -> None:
    """Ask."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--data", type=Path, required=True, help="the folder that holds lm/")
    parser.add_argument("--handbook", type=Path, help="Ninja's manual as HTML; bzip2's with --split dev")
    parser.add_argument("--model", nargs="+", default=["default"], help="folders, GGUF files or names")
    parser.add_argument("--methods", nargs="+", default=["extractive", "generate"])
    parser.add_argument("--split", choices=list(ARTICLES), default="test")
    parser.add_argument("--questions", type=int, help="at most so many")
    parser.add_argument("--work", type=Path, help="stores the answers, so that the same command continues")
    options = harness.parse(parser, argv, quick={"questions": 2, "methods": ["extractive"]})
    stored = json.loads(options.work.read_text("utf-8")) if options.work and options.work.is_file() else {}
    columns = [
        Column("model", "model"), Column("method", "method"), Column("kind", "files"),
        Column("right", "right", "", 0, "higher"), Column("answerable", "of", "", 0),
        Column("cited", "right file cited", "", 0, "higher"),
        Column("refused", "nothing found, rightly", "", 0, "higher"), Column("unanswerable", "of", "", 0),
        Column("replaced", "generated text replaced by a quotation", "", 0),
        Column("seconds", "processor time a question", "s", 2, "lower"),
    ]  # fmt: skip
    caption = "Questions over an encyclopedia, manual pages and a handbook, answered by ask."
    harness.report(options, __file__, [Table("ask", caption, columns, measured(options, stored))])


if __name__ == "__main__":
    main()
