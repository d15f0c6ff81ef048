"""One set of weights: peak memory of generating and encoding in one process against generating alone.

    python benchmarks/memory.py [--hidden 768 --layers 12]

Each side runs in a process of its own; the figure is the operating system's peak resident size.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gerund
from gerund.models.loading import find

PROMPT = "The history of the lighthouse begins in the year"


def make_model(folder: Path, hidden: int, layers: int) -> float:
    """Write a random model and return the size of its weights in MiB."""
    tokenizer = AutoTokenizer.from_pretrained(find(None).folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20


def work(folder: str, encodes: bool) -> None:
    """Generate, and perhaps encode at the same time; print the peak resident size in MiB."""
    lm = gerund.load(folder, dtype="auto", device="cpu")
    texts = [f"Sentence {i} is about the sea, the wind and a ship with {i} sails." * (1 + i % 9) for i in range(400)]
    encoder = threading.Thread(target=lambda: lm.encode(texts, show_progress=False))
    if encodes:
        encoder.start()
    lm.generate([PROMPT] * 8, 96)
    if encodes:
        encoder.join()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--encodes", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work, arguments.encodes)
        return
    with tempfile.TemporaryDirectory() as name:
        size = make_model(Path(name), arguments.hidden, arguments.layers)
        print(f"torch {torch.__version__}; weights {size:.0f} MiB in float32")
        peaks = {}
        for label, flags in (("generate", []), ("generate and encode", ["--encodes"])):
            command = [sys.executable, __file__, "--work", name, *flags]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peaks[label] = float(output.splitlines()[-1])
            print(f"  {label}: peak {peaks[label]:.0f} MiB")
        print(f"  ratio {peaks['generate and encode'] / peaks['generate']:.3f}")


if __name__ == "__main__":
    main()
