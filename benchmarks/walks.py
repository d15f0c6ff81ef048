"""How much code five everyday calls touch: files and functions of gerund, from the call to its result.

    python benchmarks/walks.py [--before FOLDER]

The walks are loading a model and encoding a text, training two steps, answering one chat request over HTTP, indexing
two documents and searching them, and evaluating one task. Each runs in a process of its own under `sys.setprofile`,
with the bundled model. `--before` names the source of an earlier version, its folder `src`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from results import Column, Row, Table

SOURCE = Path(__file__).resolve().parent.parent / "src"
COUNTING = """
import json, sys, threading
folder, called = sys.argv.pop(1), set()
def count(frame, event, _):
    code = frame.f_code
    # CO_OPTIMIZED: bodies of modules and classes run once at import, and are not functions.
    if event == "call" and code.co_flags & 1 and code.co_filename.startswith(folder):
        called.add((code.co_filename, code.co_qualname, code.co_firstlineno))
def mark(walk):
    print("WALK", json.dumps([walk, len({name for name, *_ in called}), len(called)]), flush=True)
    called.clear()
threading.setprofile(count)
sys.setprofile(count)
"""
COMMAND = """
from gerund.cli.main import main
sys.argv[0] = "gerund"
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""
ENCODE = "import gerund\nlm = gerund.load()\nmark('load')\nlm.encode('Bread is made of flour.')\nmark('encode')"
CHAT = """
import httpx, os, signal, time
def ask():
    while True:
        time.sleep(0.5)
        try:
            if httpx.get("http://127.0.0.1:8765/health").is_success:
                break
        except httpx.TransportError:
            pass
    called.clear()
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    httpx.post("http://127.0.0.1:8765/v1/chat/completions", json=body, timeout=300).raise_for_status()
    mark("chat")
    os.kill(os.getpid(), signal.SIGTERM)
asking = threading.Thread(target=ask)
asking.start()
"""
RECIPE = """
model: {base: default, adapter: none, lora: {rank: 4, alpha: 8}}
encoder: {attention: mask0-bidir, pooling: mean}
objectives:
  - kind: contrastive
    pairs: {files: [pairs.jsonl], query: text_a, positive: text_b}
    batch_size: 2
    length: 32
output: run
steps: 2
log_steps: 1
eval_steps: 2
save_steps: 2
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
WALKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "load and encode": (ENCODE, ()),
    "train two steps": (f"{COMMAND}\nmark('train')", ("train", "recipe.yaml")),
    "one chat request": (CHAT + COMMAND, ("serve", "chatty", "--port", "8765")),
    "index": (f"{COMMAND}\nmark('index')", ("index", "texts.txt", "other.txt", "-o", "my.index")),
    "search": (f"{COMMAND}\nmark('search')", ("search", "my.index", "flour")),
    "evaluate one task": (
        f"{COMMAND}\nmark('evaluate')",
        ("eval", "default", "--tasks", "sts/small", "--data", "data", "-o", "report"),
    ),
}


def prepare(folder: Path) -> None:
    """Write what the walks read."""
    import gerund

    (folder / "texts.txt").write_text("Bread is made of flour.\n")
    (folder / "other.txt").write_text("Trains need rails.\n")
    pair = {"text_a": "Bread is made of flour.", "text_b": "Flour makes bread."}
    (folder / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 16)
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "data" / "sts").mkdir(parents=True)
    (folder / "data" / "sts" / "small.test.tsv").write_text("5.0\ta cat\ta kitten\n0.0\ta cat\ta tax\n3.0\ta\tb\n")
    lm = gerund.load(adapter="none", attention="causal")
    lm.tokenizer.chat_template = TEMPLATE
    lm.save(folder / "chatty")


def count(source: Path, folder: Path, code: str, arguments: tuple[str, ...]) -> list[list[Any]]:
    """Run a walk, and return its name, files and functions."""
    command = [sys.executable, "-c", COUNTING + code, str(source / "gerund"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    counts = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("WALK ")]
    if not counts:
        raise SystemExit(f"{arguments}: {done.stderr[-800:]}")
    return counts


def walks(options: Any) -> Table:
    """Count each walk of each version."""
    versions = {**({"before": options.before.resolve()} if options.before else {}), "now": SOURCE}
    rows: list[Row] = []
    for version, source in versions.items():
        with tempfile.TemporaryDirectory() as name:
            prepare(Path(name))
            for walk, (code, arguments) in WALKS.items():
                if walk in options.walks.split(";"):
                    for step, files, functions in count(source, Path(name), code, arguments):
                        rows.append({"walk": step, "version": version, "files": files, "functions": functions})
    columns = [
        Column("walk", "walk"),
        Column("version", "version"),
        Column("files", "files", "", 0, "lower"),
        Column("functions", "functions", "", 0, "lower"),
    ]
    order = list(dict.fromkeys(row["walk"] for row in rows))
    rows.sort(key=lambda row: order.index(row["walk"]))
    return Table("walks", "Files and functions of gerund that five everyday calls touch.", columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Count."""
    parser = harness.parser(__doc__, rounds=1)
    parser.add_argument("--before", type=Path, help="the source of an earlier version, its folder src")
    parser.add_argument("--walks", default=";".join(WALKS), help="which, with semicolons (all)")
    options = harness.parse(parser, argv, quick={"walks": "load and encode"})
    harness.report(options, __file__, [walks(options)])


if __name__ == "__main__":
    main()
