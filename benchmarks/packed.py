"""Quantized files: gerund's packed network and llama.cpp's server on the same GGUF file, in processor time and memory.

    python benchmarks/packed.py --model model.gguf [--model other.gguf] [--rounds 3]

Each system runs in a process of its own, which opens the file, does all the work, and tells what each part took; they
take turns. `work`: continuing a prompt by greedy tokens, one text and eight at a time; reading a prompt; the mean
vectors of short texts and of long ones. Both get the same tokens. gerund's figures are those of the network, without
the sampler and the tokenizer; llama.cpp's include its server, called in its process, without HTTP.

`memory`: the most memory of such a process, over all its work, and of one that only writes. Mapped files count in it:
gerund maps a graph that it built before; the first start, which builds it, takes more.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import harness
from gerund.jobs.engine import peak_resident_mib
from results import Column, Row, Table, median_of

PACKED, PEER = "gerund, packed", "llama.cpp"
WORK = {
    "write, 1 text": "generated",
    "write, 8 texts": "generated",
    "read a prompt": "read",
    "embed short texts": "read",
    "embed long texts": "read",
}
_BATCH = 16
_ROWS = 8
_COMPARED = 32  # tokens of each text


def packed(case: Mapping[str, Any]) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """Return what each part of the work is, in gerund."""
    from gerund.packed.network import MASKED, KeyValues, PackedNetwork

    network = PackedNetwork.open(Path(case["path"]), threads=case["threads"])

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        ids_BT = np.array(prompts)
        rows, length = ids_BT.shape
        cache = KeyValues(network.shape, rows, -(-(length + count) // 64) * 64)
        places, found = 0, []
        for _ in range(count):
            tokens = ids_BT.shape[1]
            at = np.full((rows, 1), tokens - 1)
            start = np.full(rows, places)
            run = network.run(ids_BT, cache=cache, write_B=start, logits_at=at, outputs=["logits"])
            assert run.logits is not None
            ids_BT = run.logits[:, 0].argmax(-1)[:, None]
            places += tokens
            found.append(ids_BT[:, 0].tolist())
        return [list(row) for row in zip(*found, strict=True)]

    def embed(texts: list[list[int]]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        vectors = np.empty((len(texts), network.shape.width), np.float32)
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            longest = max(len(texts[place]) for place in places)
            ids_BT = np.array([texts[place] + [0] * (longest - len(texts[place])) for place in places])
            real_BT = np.arange(longest) < np.array([[len(texts[place])] for place in places])
            masks, of_layer = network.causal_masks(longest, longest, np.zeros(len(places), np.int64))
            masks = np.where(real_BT[:, None, None, :], masks, MASKED)
            states = network.run(ids_BT, masks_PB1TS=masks, mask_of_layer_L=of_layer).states
            assert states is not None
            vectors[places] = (states * real_BT[..., None]).sum(1) / real_BT.sum(1, keepdims=True)
        return vectors

    def compared() -> list[list[int]]:
        prompts = case["compared"]
        parts = [prompts[start : start + _ROWS] for start in range(0, len(prompts), _ROWS)]
        return [tokens for part in parts for tokens in write(part, _COMPARED)]

    return {
        "write, 1 text": lambda: write([case["prompt"]], case["tokens"]),
        "write, 8 texts": lambda: write(case["prompts"], case["tokens"]),
        "read a prompt": lambda: write([case["long_prompt"]], 1),
        "embed short texts": lambda: embed(case["short"]),
        "embed long texts": lambda: embed(case["long"]),
    }, compared


def peer(case: Mapping[str, Any]) -> tuple[dict[str, Callable[[], object]], Callable[[], object]]:
    """Return what each part of the work is, in llama.cpp's server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(case["path"])
    params.n_parallel, params.n_ctx = _ROWS, _ROWS * 1024
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = case["threads"]
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)

    def write(prompt: list[int], count: int, **more: Any) -> Any:
        asked = {"prompt": prompt, "max_tokens": count, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        return server.handle_completions({**asked, **more})

    def tokens(prompt: list[int]) -> list[int]:
        answer = write(prompt, _COMPARED, logprobs=1)
        return [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]]

    def write_many() -> None:
        threads = [threading.Thread(target=write, args=(prompt, case["tokens"])) for prompt in case["prompts"]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return {
        "write, 1 text": lambda: write(case["prompt"], case["tokens"]),
        "write, 8 texts": write_many,
        "read a prompt": lambda: write(case["long_prompt"], 1),
        "embed short texts": lambda: server.handle_embeddings({"input": case["short"], "model": "model"}),
        "embed long texts": lambda: server.handle_embeddings({"input": case["long"], "model": "model"}),
    }, lambda: [tokens(prompt) for prompt in case["compared"]]


def child(case: Mapping[str, Any]) -> None:
    """Do the work in this process, and answer with what it took."""
    cpu = time.process_time()
    work, written = (packed if case["system"] == PACKED else peer)(case)
    work["write, 1 text"]()
    first = time.process_time() - cpu
    spent = {name: harness.spend(part).cpu for name, part in work.items() if name in case["work"]}
    peak = peak_resident_mib()
    harness.answer({"cpu": spent, "first": first, "peak": peak, "written": written() if case["compare"] else []})
    os._exit(0)  # llama.cpp's server has threads that do not end


def cases_of(path: Path, options: Any) -> dict[str, Any]:
    """Return the texts as tokens of a file's model, cut to lengths that both systems take."""
    from gerund.gguf_file import read_file
    from gerund.models.gguf_tokenizer import read_tokenizer
    from inputs import demo_texts

    tokenizer = read_tokenizer(read_file(path))
    texts = demo_texts(options.texts)

    def ids(text: str, most: int) -> list[int]:
        found: list[int] = tokenizer(text)["input_ids"][:most]
        return found

    everything = " ".join(demo_texts(2 * options.length))
    long = ids(everything, options.length * 5)
    edges = [options.length * number for number in range(1, 5)]
    starts = [ids(text, 12) for text in demo_texts(64)]
    prompts = [start for start in starts if len(start) == len(starts[0])] or starts[:1]
    return {
        "path": str(path),
        "threads": options.threads,
        "tokens": options.tokens,
        "prompt": starts[0],
        "prompts": [prompts[number % len(prompts)] for number in range(_ROWS)],
        "compared": [long[at : at + 12] for at in range(0, 8 * options.compared, 8)],
        "long_prompt": long[: options.length],
        "short": [ids(text, 100) for text in texts],
        "long": [long[start : start + options.length * 3 // 4] for start, _ in pairwise(edges)],
    }


def measure(path: Path, options: Any) -> tuple[list[Row], list[Row]]:
    """Return the rows of both tables for a file."""
    case = cases_of(path, options)
    systems = {name: {**case, "system": name, "compare": False} for name in (PEER, PACKED)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    harness.in_child(__file__, {**systems[PACKED], "work": []})  # builds the graph
    for number in range(options.rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            asked = {**systems[name], "work": list(WORK), "compare": number == 0}
            found[name].append(harness.in_child(__file__, asked))
    writing = {name: harness.in_child(__file__, {**systems[name], "work": ["write, 1 text"]}) for name in systems}
    same = [leading(*pair) for pair in zip(*(found[name][0]["written"] for name in systems), strict=True)]
    counts = {
        "write, 1 text": options.tokens,
        "write, 8 texts": options.tokens * _ROWS,
        "read a prompt": len(case["long_prompt"]),
        "embed short texts": sum(map(len, case["short"])),
        "embed long texts": sum(map(len, case["long"])),
    }
    rows: list[Row] = []
    for work, count in counts.items():
        for name in systems:
            rates = [count / one["cpu"][work] for one in found[name]]
            pairs = zip(found[name], found[PEER], strict=True)
            ratio = None if name == PEER else median_of([other["cpu"][work] / one["cpu"][work] for one, other in pairs])
            rows.append({"file": path.name, "work": work, "system": name, "rate": median_of(rates), "ratio": ratio})
    memory: list[Row] = [
        {
            "file": path.name,
            "system": name,
            "peak": max(one["peak"] for one in found[name]),
            "writing": writing[name]["peak"],
            "first": median_of([one["first"] for one in found[name]]),
            "same": float(np.mean(same)),
            "whole": sum(count == _COMPARED for count in same),
        }
        for name in systems
    ]
    return rows, memory


def leading(one: list[int], other: list[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    return next((place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main(argv: list[str] | None = None) -> None:
    """Measure both systems on each file."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, action="append", help="a GGUF file; may be given more than once")
    parser.add_argument("--tokens", type=int, default=64, help="that are generated of each text")
    parser.add_argument("--texts", type=int, default=32, help="short texts")
    parser.add_argument("--compared", type=int, default=200, help="texts whose tokens are compared")
    parser.add_argument("--length", type=int, default=512, help="of the prompt that is read, in tokens")
    options = harness.parse(parser, argv, quick={"tokens": 8, "texts": 4, "length": 40, "compared": 2})
    if options.child is not None:
        child(options.child)
    with tempfile.TemporaryDirectory() as work:
        models = options.model or [small_file(Path(work))]
        if options.model is None and not options.quick:
            parser.error("--model names a GGUF file")
        found = [measure(path, options) for path in models]
    options.model = [path.name for path in models]
    columns = [
        Column("file", "file"), Column("work", "work"), Column("system", "system"),
        Column("rate", "speed", "tokens per second of the processor", 0),
        Column("ratio", f"times as fast as {PEER}", "", 2),
    ]  # fmt: skip
    caption = (
        f"The same GGUF file in both systems, {options.threads} thread(s): {options.tokens} greedy tokens of each "
        f"text, a prompt of {options.length} tokens, {options.texts} short texts, and 3 of {options.length * 3 // 4}."
    )
    of_memory = [
        Column("file", "file"), Column("system", "system"), Column("peak", "all the work, at most", "MiB", 0),
        Column("writing", "writing alone, at most", "MiB", 0), Column("first", "opening and the first text", "s", 2),
        Column("same", f"equal tokens of the first {_COMPARED} of {options.compared} texts", "", 1),
        Column("whole", f"texts with all {_COMPARED} equal", "", 0),
    ]  # fmt: skip
    tables = [
        Table("work", caption, columns, [row for rows, _ in found for row in rows]),
        Table("memory", "Memory of a new process.", of_memory, [row for _, rows in found for row in rows]),
    ]
    harness.report(options, __file__, tables, libraries=["onnxruntime", "xllamacpp", "gguf"])


def small_file(folder: Path) -> Path:
    """Write a small file of random weights, for `--quick`."""
    import gerund
    from inputs import random_llama, save

    save(random_llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2), folder)
    gerund.load(folder).export(folder / "gguf", "gguf", type="q8_0")
    return folder / "gguf" / "model.gguf"


if __name__ == "__main__":
    main()
