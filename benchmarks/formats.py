"""GGUF files as gerund reads them, compared with llama.cpp on the same file and with the model's folder.

    python benchmarks/formats.py [--models FOLDER --data ../shared/data] [--lines 10000 --positions 400]

`FOLDER` holds the GGUF files and the folders of the same models that `PAIRS` names. `tokens`: lines of many scripts,
cut into tokens by both programs. `likelihood`: bits per byte of Wikipedia articles by gerund from the file and from the
folder, and by llama.cpp from the file, which rounds activations to 8 bits. `loading`: CPU time and peak memory from the
start of a process to the first token.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import harness
from harness import spend
from results import Column, Row, Table, median_of

# The file, the folder of the same model, and what both are called.
PAIRS = (
    ("SmolLM2 135M, Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2"),
    ("Gemma 3 270M, Q4_K_M", "gemma-3-270m-q4_k_m.gguf", "gemma3"),
)
FILE, FOLDER, TRANSFORMERS, LLAMA = (
    "gerund, the file",
    "gerund, the folder",
    "transformers, the file",
    "llama.cpp, the file",
)
PROMPT = "The first public railway"
# Blocks of Unicode whose letters make lines, beside the lines of real files.
SCRIPTS = (
    (0x41, 0x7B), (0xC0, 0x180), (0x370, 0x400), (0x400, 0x500), (0x531, 0x588), (0x5D0, 0x5EB), (0x620, 0x64B),
    (0x904, 0x93A), (0x985, 0x9B9), (0xE01, 0xE31), (0x10D0, 0x10FB), (0x3041, 0x3097), (0x30A1, 0x30FB),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0x1F300, 0x1F600), (0x20, 0x40), (0x2000, 0x2070),
)  # fmt: skip


def lines(data: Path, count: int) -> list[str]:
    """Return lines of real files and of many scripts, the same ones each time."""
    files = (path for path in sorted(data.rglob("*")) if path.suffix in {".txt", ".tsv", ".jsonl", ".csv"})
    real = itertools.chain.from_iterable(itertools.islice(_read(path), 400) for path in files)
    made = list(itertools.islice(real, count * 3 // 4))
    choose = random.Random(1)
    while len(made) < count:
        low, high = choose.choice(SCRIPTS)
        words = ("".join(chr(choose.randrange(low, high)) for _ in range(choose.randint(1, 9))) for _ in range(8))
        made.append(choose.choice(["", " ", "  "]) + choose.choice([" ", ", ", "\t", "-"]).join(words))
    return made


def _read(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="ignore") as file:
        yield from (line.rstrip("\n")[:400] for line in file if line.strip())


def llama_server(path: Path, threads: int) -> Any:
    """Return llama.cpp's server for a file, with a context of 2,048 tokens."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.offline = True
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 2048, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = False
    params.verbosity = -1
    return xllamacpp.Server(params)


class Peer:
    """llama.cpp's server for a file, asked over HTTP on this machine."""

    def __init__(self, path: Path, threads: int) -> None:
        self._server = llama_server(path, threads)  # it stops when nothing refers to it
        self._client = httpx.Client(base_url=self._server.listening_address, timeout=60)

    def post(self, route: str, **body: Any) -> dict[str, Any]:
        """Return the answer to a request."""
        answered: dict[str, Any] = self._client.post(route, json=body).json()
        return answered


def tokens(options: Any, texts: list[str]) -> Table:
    """Cut lines into tokens by both programs."""
    import gerund

    rows: list[Row] = []
    for name, file, _ in PAIRS:
        tokenizer = gerund.load(options.models / file, attention="causal").tokenizer
        peer = Peer(options.models / file, options.threads)
        same = total = 0
        for text in texts:
            ours = tokenizer(text, add_special_tokens=True)["input_ids"]
            theirs = peer.post("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
            same, total = same + (ours == theirs), total + len(ours)
        rows.append({"model": name, "lines": len(texts), "tokens": total, "same": same})
    columns = [
        Column("model", "model"),
        Column("lines", "lines", "", 0),
        Column("tokens", "tokens", "", 0),
        Column("same", "lines with the same tokens", "", 0),
    ]
    return Table("tokens", "Lines of real files and of many scripts, cut into tokens by both programs.", columns, rows)


def likelihood(options: Any) -> Table:
    """Score the tokens of articles one after the other by each program."""
    import torch

    import gerund

    with (options.data / "lm" / "wiki.test.jsonl").open(encoding="utf-8") as file:
        text = json.loads(next(file))["text"]
    rows: list[Row] = []
    for name, file, folder in PAIRS:
        peer = Peer(options.models / file, options.threads)
        found: dict[str, list[float]] = {}
        for system, source in ((FILE, file), (FOLDER, folder)):
            lm = gerund.load(options.models / source, attention="causal", dtype="float32", device="cpu")
            ids = lm.tokenizer(text)["input_ids"][: options.positions + 1]
            with torch.no_grad():
                chances_TV = lm.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found[system] = chances_TV.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        found[LLAMA] = [_theirs(peer, ids[:end], ids[end]) for end in range(1, len(ids))]
        # Rounded activations put a rare token below those that llama.cpp lists: these count in no column.
        kept = [place for place, chance in enumerate(found[LLAMA]) if math.isfinite(chance)]
        size = len(lm.tokenizer.decode([ids[place + 1] for place in kept]).encode())
        bits = {
            system: -sum(chances[place] for place in kept) / math.log(2) / size for system, chances in found.items()
        }
        furthest = max(abs(found[FILE][place] - found[LLAMA][place]) for place in kept)
        harness.require(
            f"bits per byte of {name}, relative to llama.cpp's",
            abs(bits[FILE] / bits[LLAMA] - 1),
            0.005 if options.positions > 100 else 0.1,
        )
        rows.append({"model": name, "positions": len(kept), "furthest": furthest, **bits})
    columns = [
        Column("model", "model"),
        Column("positions", "tokens", "", 0),
        Column(FILE, f"bits per byte: {FILE}", "", 4),
        Column(LLAMA, LLAMA, "", 4),
        Column(FOLDER, FOLDER, "", 4),
        Column("furthest", "largest difference of a token's log-probability to llama.cpp's", "", 3),
    ]
    return Table("likelihood", "Articles of Wikipedia, token by token.", columns, rows)


def _theirs(peer: Peer, before: list[int], token: int) -> float:
    """Return llama.cpp's log-probability of a token after others; infinity where its list ends before the token."""
    written = peer.post("/completion", prompt=before, n_predict=1, n_probs=5000, temperature=0.0, cache_prompt=True)
    listed = written["completion_probabilities"][0]["top_logprobs"]
    return next((float(entry["logprob"]) for entry in listed if entry["id"] == token), math.inf)


def start(case: dict[str, Any]) -> dict[str, Any]:
    """Load a model and generate one token; return CPU seconds and the peak of this process."""
    from gerund.jobs.engine import peak_resident_mib

    return {"cpu": spend(lambda: _START[case["system"]](case)).cpu, "memory": peak_resident_mib()}


def _start_gerund(case: dict[str, Any]) -> None:
    import gerund

    gerund.load(case["path"], device="cpu").generate(PROMPT, 1)


def _start_transformers(case: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = str(Path(case["path"]).parent), Path(case["path"]).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=1)


def _start_llama(case: dict[str, Any]) -> None:
    llama_server(Path(case["path"]), 1).handle_completions({"prompt": PROMPT, "max_tokens": 1})


_START = {FILE: _start_gerund, FOLDER: _start_gerund, TRANSFORMERS: _start_transformers, LLAMA: _start_llama}


def loading(options: Any) -> Table:
    """Start each program in processes of its own."""
    rows: list[Row] = []
    for name, file, folder in PAIRS:
        for system in (LLAMA, FILE, FOLDER, TRANSFORMERS):
            case = {"system": system, "path": str((options.models / (folder if system == FOLDER else file)).resolve())}
            runs = [harness.in_child(__file__, case) for _ in range(options.rounds)]
            cells = {key: median_of([run[key] for run in runs]) for key in ("cpu", "memory")}
            rows.append({"model": name, "system": system, **cells})
    columns = [
        Column("model", "model"),
        Column("system", "system"),
        Column("cpu", "CPU time to the first token", "s", 2, "lower"),
        Column("memory", "peak memory", "MiB", 0, "lower"),
    ]
    caption = "From the start of a process, imports included, to the first token; weights unpacked but for llama.cpp."
    return Table("loading", caption, columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument(
        "--models", type=Path, default=Path("../real"), help="files and folders of models (%(default)s)"
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="real text (%(default)s)")
    parser.add_argument("--lines", type=int, default=10_000, help="lines that are cut into tokens (%(default)s)")
    parser.add_argument("--positions", type=int, default=400, help="tokens that are scored (%(default)s)")
    options = harness.parse(parser, argv, quick={"lines": 200, "positions": 20})
    if options.child:
        harness.answer(start(options.child))
        return
    tables = [tokens(options, lines(options.data, options.lines)), likelihood(options), loading(options)]
    harness.report(options, __file__, tables, libraries=("transformers", "xllamacpp", "gguf"))


if __name__ == "__main__":
    main()
