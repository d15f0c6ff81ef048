"""Encoding speed beside sentence-transformers and llm2vec: same weights, same texts, same type.

    python benchmarks/encode.py --data ../shared/data [--rounds 5] [--threads 2] [--llm2vec PYTHON]

Makes a 6-layer, d=384 Llama of random weights with the tokenizer of the bundled model, takes 2000 real texts of mixed
length (without `--data` those of the demo), checks that both systems give the same vectors, and times them in turn.
``--llm2vec`` names the interpreter of an environment that has llm2vec 0.2.3, which needs an older transformers; it then
runs in a process of its own, in turn with ours, timed from inside.
"""

import json
import random
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

import gerund
import harness
from gerund.inference.encode.runtime import default_batch_tokens
from gerund.inference.tokens import token_batches
from inputs import random_llama, save, texts_of
from results import Column, Row, Table

PEER, PEER_2 = "sentence-transformers, causal", "llm2vec, bidirectional"
CAUSAL, MASK0 = "gerund, `causal`", "gerund, `mask0-bidir`"
AUTO = 'gerund, `mask0-bidir`, `dtype="auto"`'
Encode = Callable[[list[str]], np.ndarray]
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
    model = SentenceTransformer(modules=[body, Pooling(384, "mean")], device="cpu")

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


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--llm2vec", metavar="PYTHON")
    options = harness.parse(parser, argv, quick={"texts": 64})
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
    lengths = {key: value for key, value in padded.items() if "tokens" in key}
    harness.report(options, __file__, tables, libraries=("sentence-transformers",), **lengths)


if __name__ == "__main__":
    main()
