"""What other runtimes make of the same model, in value and in processor time.

    python benchmarks/runtimes.py [--texts 96] [--tokens 48] [--rounds 5]

`encoders`: the bundled encoder in gerund (float32, as loaded, and in 8 bits), and its graph in onnxruntime (float32,
and weights in 8 bits) and OpenVINO, on the same texts in batches of 16 of similar length. Values are compared with
gerund's in float32.

`writers`: the bundled model, generating in gerund, and as GGUF in llama.cpp (its own type, and weights in 8 bits), one
text at a time.

`long-prompts`: a larger model of random weights, writing behind prompts of several lengths that were read before, in
gerund and in transformers.

`eight-bits`, where torchao is installed: a larger model of random weights in torch, in float32, bfloat16, and with
weights in 8 bits; a text of 256 tokens, and one token behind it.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from transformers import GenerationConfig

import gerund
import harness
from gerund.exporting import llama_cpp, onnx
from gerund.exporting.shared import plain_tokenizer
from gerund.settings.encoder import GgufType
from inputs import demo_texts, random_llama, save
from results import Column, Row, Table

GERUND, HALF = "gerund, float32", "gerund, as loaded"
ORT, ORT_8, OV = "onnxruntime", "onnxruntime, weights in 8 bits", "OpenVINO"
GGUF, GGUF_8 = "llama.cpp, own type", "llama.cpp, weights in 8 bits"
TRANSFORMERS = "transformers"
_BATCH = 16
TOKENS = 8
Vectors = Callable[[], np.ndarray]


def reader(lm: Any, texts: list[str], run: Callable[[Mapping[str, np.ndarray]], np.ndarray]) -> Vectors:
    """Return what reads texts by a graph, as a program of one's own would: batches of similar length."""
    tokenizer = plain_tokenizer(lm.runtime)
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))

    def read() -> np.ndarray:
        found = np.empty((len(texts), lm.dimensions), dtype=np.float32)
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            batch = tokenizer([texts[place] for place in places], padding=True, return_tensors="np")
            found[places] = run({name: np.asarray(batch[name], dtype=np.int64) for name in onnx.INPUTS})
        return found

    return read


def onnx_runner(path: Path, threads: int) -> Callable[[Mapping[str, np.ndarray]], np.ndarray]:
    """Return what asks onnxruntime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda given: session.run([onnx.VECTORS], dict(given))[0]


def smallest_cosine(one_ND: np.ndarray, other_ND: np.ndarray) -> float:
    """Return the smallest cosine of two vectors of the same text."""
    norms_N = np.linalg.norm(one_ND, axis=1) * np.linalg.norm(other_ND, axis=1)
    return float(((one_ND * other_ND).sum(axis=1) / norms_N).min())


def encoders(model: Any, options: Any, folder: Path) -> Table:
    """Compare encoders."""
    texts = demo_texts(options.texts)
    # Without the bundled model's head: OpenVINO cannot look up the vectors of words in it.
    ours = gerund.load(model, adapter="none", attention="bidir", dtype="float32")
    loaded = gerund.load(model, adapter="none", attention="bidir")
    prepared = onnx.prepare(ours.runtime, folder)
    plain, eight, other = folder / "model.onnx", folder / "eight.onnx", folder / "model.xml"
    onnx.write_graph(prepared, plain)
    shutil.copyfile(plain, eight)
    onnx.quantize(eight)
    onnx.translate(plain, other)
    compiled = onnx.compiled(other)
    systems: dict[str, Vectors] = {
        GERUND: lambda: ours.encode(texts, batch_tokens=None, show_progress=False),
        HALF: lambda: loaded.encode(texts, show_progress=False),
        ORT: reader(ours, texts, onnx_runner(plain, options.threads)),
        ORT_8: reader(ours, texts, onnx_runner(eight, options.threads)),
        OV: reader(ours, texts, lambda given: compiled(dict(given))[onnx.VECTORS]),
    }
    expected = systems[GERUND]()
    cosines = {name: smallest_cosine(run(), expected) for name, run in systems.items()}
    checks = [harness.require(f"1 - cosine, {name}", 1 - cosines[name], 1e-4) for name in (ORT, OV)]
    sizes = {ORT: plain, ORT_8: eight, OV: other.with_suffix(".bin")}
    rounds = harness.alternate(systems, options.rounds)
    rows = [
        {**row, "cosine": cosines[str(row["system"])], "size": size_of(sizes.get(str(row["system"])))}
        for row in rounds.rows(GERUND)
    ]
    columns = [
        *harness.time_columns(GERUND, Column("cosine", "smallest cosine to it", "", 5)),
        Column("size", "file", "MB", 1),
    ]  # fmt: skip
    caption = f"Encoding {options.texts} texts with the same weights and plan (`{ours.encoder.attention.name}`)."
    return Table("encoders", caption, columns, rows, checks=checks)


def size_of(path: Path | None) -> float | None:
    """Return a file's size in MB."""
    return None if path is None else path.stat().st_size / 1e6


def writers(model: Any, options: Any, folder: Path) -> Table:
    """Compare what generates."""
    lm = gerund.load(model)
    prompts = [text[:200] for text in demo_texts(4)]
    context = lm.model.config.max_position_embeddings
    systems: dict[str, Callable[[], object]] = {
        "gerund": lambda: [lm.generate(prompt, options.tokens) for prompt in prompts]
    }
    apart: dict[str, float] = {}
    files: dict[str, Path] = {}
    kinds: tuple[tuple[str, GgufType | None], ...] = ((GGUF, None), (GGUF_8, "q8_0"))
    for name, kind in kinds:
        place = folder / f"gguf-{kind}"
        lm.export(place, "gguf", type=kind)
        files[name] = place / "model.gguf"
        apart[name] = llama_cpp.check(lm.model, lm.tokenizer, files[name], quantized=kind is not None)
        systems[name] = asker(llama_cpp.serve(files[name], context), prompts, options.tokens)
    rounds = harness.alternate(systems, options.rounds)
    rows = [
        {**row, "apart": apart.get(str(row["system"])), "size": size_of(files.get(str(row["system"])))}
        for row in rounds.rows("gerund")
    ]
    columns = [
        *harness.time_columns("gerund", Column("apart", "largest difference of log-probabilities", "", 3)),
        Column("size", "file", "MB", 1),
    ]  # fmt: skip
    caption = f"Greedy continuations of {len(prompts)} texts by {options.tokens} tokens, one text at a time."
    return Table("writers", caption, columns, rows)


def long_prompts(options: Any, folder: Path) -> Table:
    """Compare what writes behind a prompt, with the weights and the prompt's keys and values at hand."""
    lengths = [int(one) for one in options.lengths.split(",")]
    heads = options.width // 128
    model = random_llama(
        hidden_size=64 * heads, intermediate_size=170 * heads, num_hidden_layers=12, num_attention_heads=heads,
        max_position_embeddings=max(lengths) + options.tokens, eos_token_id=None,
    )  # fmt: skip
    save(model, folder)
    lm = gerund.load(folder, attention="causal", dtype="float32", device="cpu")
    settings = GenerationConfig(do_sample=False, max_new_tokens=options.tokens, pad_token_id=0)
    rows: list[Row] = []
    checks = []
    for length in lengths:
        ids = [5 + 17 * place % (model.config.vocab_size - 5) for place in range(length)]
        session = lm.prefill(ids)
        ids_BT = torch.tensor([session.token_ids])
        with torch.no_grad():
            kept = lm.model(ids_BT[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

        def theirs(ids_BT: torch.Tensor = ids_BT, kept: Any = kept) -> list[int]:
            real_BT = torch.ones_like(ids_BT)
            written_BT = lm.model.generate(
                ids_BT, attention_mask=real_BT, generation_config=settings, past_key_values=copy.deepcopy(kept)
            )
            found: list[int] = written_BT[0, ids_BT.shape[1] :].tolist()
            return found

        def ours(session: Any = session) -> list[int]:
            return [one.token_id for one in session.generate(options.tokens, logprobs=0).logprobs]

        same = sum(one == other for one, other in zip(ours(), theirs(), strict=True))
        checks.append(harness.require(f"tokens that differ behind {length}", options.tokens - same, 0))
        rounds = harness.alternate({TRANSFORMERS: theirs, "gerund": ours}, options.rounds)
        rows += [{"length": length, **row} for row in rounds.rows(TRANSFORMERS)]
    columns = [Column("length", "tokens of the prompt"), *harness.time_columns(TRANSFORMERS)]
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    caption = (
        f"{options.tokens} greedy tokens behind a prompt that was read before; a Llama of {millions:.0f} million "
        f"random parameters in float32, {heads} heads of 64 with keys and values each."
    )
    return Table("long-prompts", caption, columns, rows, checks=checks)


def eight_bits(options: Any) -> list[Table]:
    """Compare ways to hold weights in torch; no table where torchao is not installed."""
    if find_spec("torchao") is None:
        return []
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

    plain = random_llama(
        hidden_size=options.width, intermediate_size=2 * options.width, num_hidden_layers=4, num_attention_heads=8
    )
    ways = {"weights in 8 bits": Int8WeightOnlyConfig(), "weights and activations in 8 bits": None}
    models = {"float32": plain, "bfloat16": copy.deepcopy(plain).to(torch.bfloat16)}
    for name, config in ways.items():
        models[name] = copy.deepcopy(plain)
        quantize_(models[name], config or Int8DynamicActivationInt8WeightConfig())
    ids_BT = torch.arange(5, 5 + options.length)[None]
    states = {name: logits(model, ids_BT) for name, model in models.items()}
    cosines = {name: smallest_cosine(found, states["float32"]) for name, found in states.items()}
    tables: list[Row] = []
    for what, work in (
        (f"a text of {options.length} tokens", lambda model: logits(model, ids_BT)),
        ("a token behind it", lambda model: next_tokens(model, ids_BT)),
    ):
        systems = {name: (lambda model=model, work=work: work(model)) for name, model in models.items()}
        rounds = harness.alternate(systems, options.rounds)
        tables += [{"what": what, **row, "cosine": cosines[str(row["system"])]} for row in rounds.rows("float32")]
    columns = [
        Column("what", "work"),
        *harness.time_columns("float32", Column("cosine", "smallest cosine to it", "", 5)),
    ]
    millions = sum(weight.numel() for weight in plain.parameters()) / 1e6
    caption = (
        f"Weights in torch: a Llama of {millions:.0f} million random parameters, a pass over a text, and {TOKENS} "
        "tokens behind it one by one; the cosine is that of the logits of a token."
    )
    return [Table("eight-bits", caption, columns, tables)]


@torch.no_grad()
def logits(model: Any, ids_BT: torch.Tensor) -> np.ndarray:
    """Return the logits of a text's tokens ``(T, V)``."""
    found: np.ndarray = model(ids_BT, use_cache=False).logits[0].float().numpy()
    return found


@torch.no_grad()
def next_tokens(model: Any, ids_BT: torch.Tensor) -> None:
    """Run tokens one by one behind a text of which nothing is kept but its last token."""
    cache = None
    for _ in range(TOKENS):
        cache = model(ids_BT[:, -1:], past_key_values=cache, use_cache=True).past_key_values


def asker(server: Any, prompts: list[str], tokens: int) -> Callable[[], object]:
    """Return what has prompts continued by llama.cpp."""
    asked = {"max_tokens": tokens, "temperature": 0.0, "cache_prompt": False}
    return lambda: [server.handle_completions({**asked, "prompt": prompt}) for prompt in prompts]


def main(argv: list[str] | None = None) -> None:
    """Measure both."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--texts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=48, help="that are generated of each text")
    parser.add_argument("--width", type=int, default=1536, help="of `eight-bits`' model; `long-prompts`' has half")
    parser.add_argument("--length", type=int, default=256, help="of its text, in tokens")
    parser.add_argument("--lengths", default="100,1000,4000", help="of the prompts of the table `long-prompts`")
    parser.add_argument(
        "--tables", default="encoders,writers,long-prompts,eight-bits", help="which of them, with commas"
    )
    quick = {"texts": 4, "tokens": 4, "width": 256, "length": 16, "lengths": "20"}
    options = harness.parse(parser, argv, quick=quick)
    with tempfile.TemporaryDirectory() as work:
        folder, model = Path(work), None
        if options.quick:
            model = folder / "model"
            save(random_llama(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2), model)
        wanted = options.tables.split(",")
        tables = [
            *([encoders(model, options, folder)] if "encoders" in wanted else []),
            *([writers(model, options, folder)] if "writers" in wanted else []),
            *([long_prompts(options, folder / "long")] if "long-prompts" in wanted else []),
            *(eight_bits(options) if "eight-bits" in wanted else []),
        ]
    harness.report(options, __file__, tables, libraries=["onnxruntime", "openvino", "xllamacpp", "gguf", "torchao"])


if __name__ == "__main__":
    main()
