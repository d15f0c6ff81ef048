"""All k of one plan in one go beside encoding anew for each k: what ``gerund tune`` saves.

    python benchmarks/sweep.py --data ../shared/data [--layers 22] [--texts 300] [--rounds 3]

A Llama of random weights with the tokenizer of the embedded default, real sentences. Both sides encode the same texts
with the same weights under k = 1 to n; checks first that the vectors are the same, then times the sides in turn.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gerund.attention.plan import AttentionPlan
from gerund.config import EncoderConfig
from gerund.entry import load
from gerund.inference.encode.runtime import encode
from gerund.inference.encode.sweep import encode_each
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel

PLANS = ("inplace-back", "mask0-bidir", "inter-back", "extra-back")


def model(layers: int) -> LanguageModel:
    """Return a model of random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=704, num_hidden_layers=layers, num_attention_heads=4
    )
    tokenizer = load().tokenizer
    return LanguageModel(LlamaForCausalLM(config).eval(), tokenizer, EncoderConfig(AttentionPlan("causal")))


def timed(work: Callable[[], np.ndarray], rounds: int) -> float:
    """Return the median seconds."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--texts", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = (arguments.data / "sts" / "stsb.dev.tsv").read_text(encoding="utf-8").splitlines()
    texts = [text for row in rows for text in row.split("\t")[1:]][: arguments.texts]
    lm = model(arguments.layers)
    tokens = tokenize(lm.tokenizer, texts, InputFormat())
    n = arguments.layers
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {n} layers, d=256, {len(texts)} sentences")
    for name in PLANS:
        configs = [replace(lm.encoder, attention=AttentionPlan(name, k=k)) for k in range(1, n + 1)]
        runtimes = [lm.with_encoder(config).runtime for config in configs]

        def anew(runtimes: list = runtimes) -> np.ndarray:
            return np.stack([encode(runtime, tokens, show=False) for runtime in runtimes])

        def together(runtimes: list = runtimes) -> np.ndarray:
            return encode_each(runtimes, tokens, show=False)

        difference = float(np.abs(anew() - together()).max())
        if difference > 1e-4:
            sys.exit(f"{name}: the vectors differ by {difference}")
        slow, fast = timed(anew, arguments.rounds), timed(together, arguments.rounds)
        print(f"{name}: anew {slow:.2f} s, together {fast:.2f} s, ratio {fast / slow:.3f}, difference {difference:.1e}")


if __name__ == "__main__":
    main()
