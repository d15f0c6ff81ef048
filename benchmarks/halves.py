"""What a T5 takes in memory whole, and what its encoder and head alone take (GUR, section V-A).

    python benchmarks/halves.py [--width 512 --layers 8]

A random T5 with a projection head is loaded; then the encoder is taken out of it and the rest let go of. The
figures are the operating system's resident size above that of the process before the model was loaded; the vectors
of both are compared first.
"""

import argparse
import ctypes
import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import gerund
from gerund.models.heads import HeadSettings, ProjectionHead
from gerund.models.loading import find

TEXTS = [f"Sentence {i} is about the sea, the wind and a ship with {i} sails." for i in range(32)]


def make_model(folder: Path, width: int, layers: int) -> None:
    """Write a random model with a head."""
    tokenizer = AutoTokenizer.from_pretrained(find(None).folder)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_ff=4 * width, num_layers=layers, num_decoder_layers=layers,
        num_heads=width // 64, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ProjectionHead(HeadSettings(width)).save(folder)


def resident() -> float:
    """Return the resident size of this process in MiB, after what was freed has been given back."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text("utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def work(folder: str) -> None:
    """Load, take the encoder out, and print both sizes."""
    # What a first model brings along once and for all is there before anything is measured.
    gerund.load().encode(TEXTS)
    before = resident()
    lm = gerund.load(folder, dtype="float32", device="cpu")
    expected = lm.encode(TEXTS)
    # Weights are read from the disk as they are used.
    lm.generate(TEXTS[0], 4)
    whole, weights = resident() - before, sum(p.numel() * p.element_size() for p in lm.model.parameters())
    half = lm.for_representation()
    del lm
    alone, own = resident() - before, sum(p.numel() * p.element_size() for p in half.model.parameters())
    if not np.array_equal(half.encode(TEXTS), expected):
        raise SystemExit("the encoder alone gives other vectors")
    print(
        f"whole {whole:.0f} MiB (weights {weights / 2**20:.0f}), encoder and head {alone:.0f} MiB ({own / 2**20:.0f})"
    )
    print(f"ratio {alone / whole:.2f}")


def main() -> None:
    """Measure in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), arguments.width, arguments.layers)
        subprocess.run([sys.executable, __file__, "--work", folder], check=True)


if __name__ == "__main__":
    main()
