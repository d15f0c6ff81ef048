"""Encoding speed beside sentence-transformers and llm2vec: same weights, same texts, same type.

    python benchmarks/encode.py --data ../shared/data [--rounds 5] [--threads 2] [--llm2vec PYTHON]
    python benchmarks/encode.py --tables bundled --data ../shared/data [--small FOLDER]

Makes a 6-layer, d=384 Llama of random weights with the tokenizer of the bundled model, takes 2000 real texts of mixed
length (without `--data` those of the demo), checks that both systems give the same vectors, and times them in turn.
``--llm2vec`` names the interpreter of an environment that has llm2vec 0.2.3, which needs an older transformers; it then
runs in a process of its own, in turn with ours, timed from inside. The table `bundled` is of the bundled model as it is
shipped, on Wikipedia's texts cut to 380 tokens; ``--small`` names a folder of all-MiniLM-L6-v2 to time beside it. The
table `types` is of larger Llamas of random weights in every type that `dtype` can name for encoding.
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import gerund
import harness
from gerund.data.corpus import read_documents
from gerund.inference.encode.batches import default_batch_tokens
from gerund.inference.tokens import token_batches
from gerund.models.sources import find
from inputs import bundled_tokenizer, random_llama, save, texts_of
from results import Column, Row, Table, median_of

PEER, PEER_2 = "sentence-transformers, causal", "llm2vec, bidirectional"
CAUSAL, MASK0 = "gerund, `causal`", "gerund, `mask0-bidir`"
AUTO = 'gerund, `mask0-bidir`, `dtype="auto"`'
SHIPPED, BASE = "the bundled model, as shipped", "the bundled model without its adapter, `causal`"
PEER_BASE, SMALL = "sentence-transformers, the same without its adapter", "sentence-transformers, all-MiniLM-L6-v2"
LONG = 380
Encode = Callable[[list[str]], np.ndarray]
SIZES = {
    "97 million": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1.0 billion": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
                    "num_key_value_heads": 4},
}  # fmt: skip
TYPES = (("float32", torch.float32, 1e-5), ("bfloat16", torch.bfloat16, None))

LLM2VEC = """
import json, sys, time, torch
from llm2vec import LLM2Vec
from transformers import AutoModel, PreTrainedTokenizerFast
folder, texts, threads = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
torch.set_num_threads(threads)
tokenizer = PreTrainedTokenizerFast(  # the older AutoTokenizer does not know today's class name
    tokenizer_file=folder + "/older-tokenizer.json",
    bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", padding_side="left",
    model_input_names=["input_ids", "attention_mask"])
model = AutoModel.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="sdpa")
encoder = LLM2Vec(model, tokenizer, pooling_mode="mean", max_length=512, skip_instruction=True)
pairs = [["", text] for text in texts]
if not torch.isfinite(encoder.encode(pairs[:8], show_progress_bar=False, device="cpu")).all():
    sys.exit("llm2vec gives no finite vectors")
wall, cpu = time.perf_counter(), time.process_time()
encoder.encode(pairs, batch_size=32, show_progress_bar=False, device="cpu")
print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}))
"""


def real_texts(data: Path, n: int) -> list[str]:
    """Take equal parts of sentences, questions and titles from six sets, and a tenth of whole posts and abstracts."""

    def column(name: str, key: str = "text") -> list[str]:
        rows = (data / name).read_text("utf-8").splitlines()
        return [text for text in (json.loads(row)[key] for row in rows) if text.strip()]

    stsb = [line.split("\t")[1] for line in (data / "sts/stsb.test.tsv").read_text("utf-8").splitlines()]
    short = [
        stsb,
        column("classification/banking77/test.jsonl"),
        column("clustering/stackoverflow.jsonl"),
        column("classification/chemprot/test.jsonl"),
        column("classification/financial_phrasebank/test.jsonl"),
        column("pairs/mqp.jsonl", "text1"),
    ]
    long = [column("clustering/twentynewsgroups.jsonl"), column("retrieval/cranfield/corpus.jsonl")]
    random.seed(0)
    chosen = [text for texts in short for text in random.sample(texts, n * 3 // 20)]
    chosen += [text for texts in long for text in random.sample(texts, n // 20)]
    random.shuffle(chosen)
    return chosen


def sentence_transformers(folder: Path, dtype: torch.dtype) -> Encode:
    """Return the peer: its own Transformer and mean pooling on the same weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(str(folder), max_seq_length=512, model_kwargs={"dtype": dtype})
    return _peer(SentenceTransformer(modules=[body, Pooling(body.get_embedding_dimension(), "mean")], device="cpu"))


def _peer(model: Any) -> Encode:
    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, normalize_embeddings=True, convert_to_tensor=True).float().numpy()

    return encode


def ours(folder: Path, attention: str, dtype: str) -> Encode:
    """Return our side."""
    lm = gerund.load(folder, attention=attention, dtype=dtype, max_length=512, device="cpu")
    return lambda texts: lm.encode(texts, show_progress=False)


def padding(folder: Path, texts: list[str]) -> dict[str, float]:
    """Return padded over real tokens of both systems' batches, and how long the texts are."""
    lengths = [min(512, len(ids)) for ids in AutoTokenizer.from_pretrained(folder)(texts, verbose=False).input_ids]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    peer = [order[i : i + 32] for i in range(0, len(order), 32)]  # batches of 32, sorted by characters
    own = token_batches(lengths, default_batch_tokens("cpu", 384))
    found = {"median_tokens": float(np.median(lengths)), "p95_tokens": float(np.percentile(lengths, 95))}
    for name, batches in (("gerund", own), (PEER, peer)):
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        found[name] = padded / sum(lengths)
    return found


def in_type(folder: Path, texts: list[str], options: Any, kind: int) -> tuple[list[Row], str]:
    """Check and time all systems in one type of numbers."""
    dtype, torch_dtype, limit = TYPES[kind]
    systems = {PEER: sentence_transformers(folder, torch_dtype)}
    systems |= {CAUSAL: ours(folder, "causal", dtype), MASK0: ours(folder, "mask0-bidir", dtype)}
    if dtype == "float32":
        systems[AUTO] = ours(folder, "mask0-bidir", "auto")
    peer, causal = systems[PEER](texts), systems[CAUSAL](texts)
    for name in list(systems)[2:]:
        systems[name](texts[:64])  # a warm-up; the others had theirs
    cosine = float((peer * causal).sum(axis=1).min())
    check = f"smallest cosine of causal vectors, {dtype}, {cosine:.5f}"
    if limit is not None:
        check = harness.require(
            f"largest difference of causal vectors, {dtype},", harness.largest_difference(peer, causal), limit
        )
    work = {name: (lambda encode=encode: encode(texts)) for name, encode in systems.items()}
    return harness.alternate(work, options.rounds).rows(PEER, dtype=dtype), check


def llm2vec(python: str, folder: Path, texts: list[str], options: Any) -> Table:
    """Time llm2vec in its own environment, in turn with ours."""
    listing = folder / "texts.json"
    listing.write_text(json.dumps(texts), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    # The older tokenizers library wants each merge as one string.
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "older-tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    command = [python, "-c", LLM2VEC, str(folder), str(listing), str(options.threads)]
    encode = ours(folder, "mask0-bidir", "float32")
    encode(texts[:64])
    spent: dict[str, list[harness.Spent]] = {PEER_2: [], MASK0: []}
    for _ in range(options.rounds):
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        spent[PEER_2].append(harness.Spent(**json.loads(output.splitlines()[-1])))
        spent[MASK0].append(harness.spend(lambda: encode(texts)))
    caption = f"The same beside llm2vec 0.2.3 in its own environment (transformers 4.44), {len(texts)} texts, float32."
    return harness.Rounds(spent).table("llm2vec", caption, base=PEER_2)


def articles(data: Path, n: int) -> list[str]:
    """Return the beginnings of Wikipedia's texts, each of so many tokens."""
    tokenizer = bundled_tokenizer()
    documents = read_documents([data / "lm" / "wiki.test.jsonl"])
    cut = (tokenizer(one.text, truncation=True, max_length=LONG).input_ids for one in documents)
    return list(islice((tokenizer.decode(ids, skip_special_tokens=True) for ids in cut if len(ids) == LONG), n))


def bundled(options: Any) -> Table:
    """Time the bundled model as it is shipped, its base in both libraries, and a small encoder."""
    texts = texts_of(options.data, options.texts // 16, articles)
    folder = find(None).folder
    shipped, base = gerund.load(device="cpu"), gerund.load(adapter="none", attention="causal", device="cpu")
    systems: dict[str, Encode] = {
        PEER_BASE: sentence_transformers(folder, torch.bfloat16),
        BASE: lambda texts: base.encode(texts, show_progress=False),
        SHIPPED: lambda texts: shipped.encode(texts, show_progress=False),
    }
    if options.small:
        systems[SMALL] = _small(options.small, torch.bfloat16)
        options.small = "all-MiniLM-L6-v2"
    found = {name: encode(texts) for name, encode in systems.items()}
    closest = float((found[PEER_BASE] * found[BASE]).sum(axis=1).min())
    checks = [harness.require("causal vectors of both libraries in bfloat16, one less the cosine,", 1 - closest, 1e-2)]
    timed = harness.alternate(
        {name: (lambda encode=encode: encode(texts)) for name, encode in systems.items()}, options.rounds
    )
    tokens = sum(map(len, bundled_tokenizer()(texts).input_ids))
    rows = [
        {**row, "rate": median_of([tokens / one.cpu for one in timed.spent[str(row["system"])]])}
        for row in timed.rows(PEER_BASE)
    ]
    rate = Column("rate", "tokens in a second of processor time", "", 0, "higher")
    caption = (
        f"{len(texts)} beginnings of Wikipedia articles, {tokens} tokens of the bundled model's tokenizer, bfloat16."
    )
    return Table("bundled", caption, harness.time_columns(PEER_BASE, rate), rows, checks=checks)


def types(options: Any) -> Table:
    """Time models of random weights in every type that encoding can compute in."""
    texts = texts_of(options.data, options.texts // 250, articles)
    tokens = sum(map(len, bundled_tokenizer()(texts).input_ids))
    rows: list[Row] = []
    for size in options.sizes:
        with tempfile.TemporaryDirectory() as name:
            save(random_llama(**SIZES[size]).bfloat16(), Path(name))
            # One after the other: together they need not fit the memory.
            for dtype in ("float32", "bfloat16"):
                encode = ours(Path(name), "bidir", dtype)
                encode(texts[:1])  # weights are laid out for the processor when they are first used
                spent = [harness.spend(lambda encode=encode: encode(texts)) for _ in range(options.rounds)]
                rate = median_of([tokens / one.cpu for one in spent])
                rows.append({"size": size, "dtype": dtype, "rate": rate})
    columns = [Column("size", "parameters"), Column("dtype", "`dtype`"),
               Column("rate", "tokens in a second of processor time", "", 0, "higher")]  # fmt: skip
    caption = f"{len(texts)} texts, {tokens} tokens, Llamas of random weights, plan `bidir`, mean pooling."
    return Table("types", caption, columns, rows)


def _small(folder: Path, dtype: torch.dtype) -> Encode:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": dtype})
    model.max_seq_length = 512  # as long as its positions go: it reads the texts whole, too
    return _peer(model)


def random_model(options: Any) -> tuple[list[Table], dict[str, Any]]:
    """Time a model of random weights in all systems; with the lengths of the texts."""
    texts = texts_of(options.data, options.texts, real_texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
        save(random_llama(**sizes, num_key_value_heads=6), folder)
        padded = padding(folder, texts)
        rows, checks = [], []
        for kind in range(len(TYPES)):
            found, check = in_type(folder, texts, options, kind)
            rows += [{**row, "padded": padded[PEER if row["system"] == PEER else "gerund"]} for row in found]
            checks.append(check)
        columns = harness.time_columns(
            PEER, Column("dtype", "weights"), Column("padded", "padded / real tokens", "", 3)
        )
        caption = f"{len(texts)} texts, a random 6-layer Llama of width 384, mean pooling, the same weights."
        tables = [Table("encode", caption, columns, rows, checks=checks)]
        if options.llm2vec:
            tables.append(llm2vec(options.llm2vec, folder, texts, options))
            options.llm2vec = "0.2.3"
    return tables, {key: value for key, value in padded.items() if "tokens" in key}


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--tables", nargs="+", choices=["random", "bundled", "types"], default=["random"])
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES), help="for the table `types`")
    parser.add_argument("--small", type=Path, metavar="FOLDER", help="all-MiniLM-L6-v2, for the table `bundled`")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--llm2vec", metavar="PYTHON")
    options = harness.parse(parser, argv, quick={"texts": 64, "tables": ["random", "bundled"]})
    tables, lengths = random_model(options) if "random" in options.tables else ([], {})
    if "bundled" in options.tables:
        tables.append(bundled(options))
    if "types" in options.tables:
        tables.append(types(options))
    harness.report(options, __file__, tables, libraries=("sentence-transformers",), **lengths)


if __name__ == "__main__":
    main()
