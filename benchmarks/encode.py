"""Encoding speed beside sentence-transformers and llm2vec: same weights, same texts, same type.

    python benchmarks/encode.py --data ../shared/data [--rounds 5] [--llm2vec PYTHON]

Makes a 6-layer, d=384 Llama of random weights with the tokenizer of the embedded default, takes 2000 real
texts of mixed length, checks that both sides give the same vectors, and prints median seconds and ratios.
``--llm2vec`` names the interpreter of an environment that has llm2vec 0.2.3, which needs an older
transformers; it then runs in a process of its own, timed from inside.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gerund
from gerund.inference.encode.batching import token_batches
from gerund.inference.encode.runtime import default_batch_tokens
from gerund.models.loading import find

LLM2VEC = """
import json, sys, time, torch
from llm2vec import LLM2Vec
from transformers import AutoModel, PreTrainedTokenizerFast
folder, texts, rounds, threads = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
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
seconds = []
for _ in range(rounds + 1):
    start = time.perf_counter()
    encoder.encode(pairs, batch_size=32, show_progress_bar=False, device="cpu")
    seconds.append(time.perf_counter() - start)
print(json.dumps(seconds[1:]))
"""


def make_model(folder: Path) -> None:
    """Write the random model; its tokenizer is the embedded default's."""
    tokenizer = AutoTokenizer.from_pretrained(find(None).folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, intermediate_size=1024, num_hidden_layers=6,
        num_attention_heads=6, num_key_value_heads=6, max_position_embeddings=1024,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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


def sentence_transformers(folder: Path, dtype: torch.dtype) -> Callable[[list[str]], np.ndarray]:
    """Return the peer: its own Transformer and mean pooling on the same weights."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    body = Transformer(str(folder), max_seq_length=512, model_kwargs={"dtype": dtype})
    model = SentenceTransformer(modules=[body, Pooling(384, "mean")], device="cpu")

    def encode(texts: list[str]) -> np.ndarray:
        return model.encode(texts, normalize_embeddings=True, convert_to_tensor=True).float().numpy()

    return encode


def ours(folder: Path, attention: str, dtype: str) -> Callable[[list[str]], np.ndarray]:
    """Return our side."""
    lm = gerund.load(folder, attention=attention, dtype=dtype, max_length=512, device="cpu")
    return lambda texts: lm.encode(texts, show_progress=False)


def timed(sides: dict[str, Callable[[list[str]], np.ndarray]], texts: list[str], rounds: int) -> dict[str, float]:
    """Run the sides in turn, after one warm-up each, and return median seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(texts[:64])
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side(texts)
            seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        print(f"  {name:34} {statistics.median(values):7.2f} s   (min {min(values):.2f}, max {max(values):.2f})")
    return {name: statistics.median(values) for name, values in seconds.items()}


def padding(folder: Path, texts: list[str]) -> None:
    """Print padded over real tokens of both sides' batches."""
    lengths = [min(512, len(ids)) for ids in AutoTokenizer.from_pretrained(folder)(texts, verbose=False).input_ids]
    lengths_sorted = sorted(lengths)
    print(f"  tokens: median {lengths_sorted[len(lengths) // 2]}, p95 {lengths_sorted[int(len(lengths) * 0.95)]}")
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    peer = [order[i : i + 32] for i in range(0, len(order), 32)]  # batches of 32, sorted by characters
    own = token_batches(lengths, default_batch_tokens("cpu", 384))
    for name, batches in (("gerund", own), ("sentence-transformers", peer)):
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
        print(f"  padded / real tokens, {name}: {padded / sum(lengths):.3f}")


def llm2vec(python: str, folder: Path, texts: list[str], rounds: int) -> float:
    """Time llm2vec in its own environment and return its median seconds."""
    listing = folder / "texts.json"
    listing.write_text(json.dumps(texts), encoding="utf-8")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    # The older tokenizers library wants each merge as one string.
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (folder / "older-tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    command = [python, "-c", LLM2VEC, str(folder), str(listing), str(rounds), str(torch.get_num_threads())]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return statistics.median(json.loads(output.splitlines()[-1]))


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--llm2vec", metavar="PYTHON")
    arguments = parser.parse_args()
    texts = real_texts(arguments.data, arguments.texts)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder)
        print(f"{len(texts)} texts, torch {torch.__version__}, {torch.get_num_threads()} threads")
        padding(folder, texts)
        for dtype, torch_dtype, limit in (("float32", torch.float32, 1e-5), ("bfloat16", torch.bfloat16, None)):
            print(dtype)
            sides = {
                "sentence-transformers (causal)": sentence_transformers(folder, torch_dtype),
                "gerund causal": ours(folder, "causal", dtype),
                "gerund mask0-bidir": ours(folder, "mask0-bidir", dtype),
            }
            peer, causal = sides["sentence-transformers (causal)"](texts), sides["gerund causal"](texts)
            difference = float(np.abs(peer - causal).max())
            cosine = float((peer * causal).sum(axis=1).min())
            print(f"  causal against the peer: largest difference {difference:.1e}, smallest cosine {cosine:.5f}")
            if limit is not None and difference > limit:
                sys.exit("the two sides do not give the same vectors")
            medians = timed(sides, texts, arguments.rounds)
            base = medians["sentence-transformers (causal)"]
            for side in ("gerund causal", "gerund mask0-bidir"):
                print(f"  {side}: {base / medians[side]:.2f} x sentence-transformers")
        auto = timed({"gerund mask0-bidir, dtype auto": ours(folder, "mask0-bidir", "auto")}, texts, arguments.rounds)
        print(f"  dtype auto from float32 weights: {auto['gerund mask0-bidir, dtype auto']:.2f} s")
        if arguments.llm2vec:
            peer_seconds = llm2vec(arguments.llm2vec, folder, texts, arguments.rounds)
            again = timed({"gerund mask0-bidir": ours(folder, "mask0-bidir", "float32")}, texts, arguments.rounds)
            print(f"  llm2vec 0.2.3: {peer_seconds:.2f} s, {peer_seconds / again['gerund mask0-bidir']:.2f} x ours")


if __name__ == "__main__":
    main()
