"""What one set of weights takes in memory: generation and encoding at once, and an encoder-decoder's encoder alone.

    python benchmarks/memory.py [--hidden 768 --layers 12] [--t5-width 512 --t5-layers 8]

First a random Llama: the peak resident size of generating, and of generating while another thread encodes. Then a
random T5 with a projection head: the resident size above that of the process before it was loaded, of
the whole model and of what `for_representation` keeps (GUR, section V-A), with equal vectors. Each
runs in a process of its own.
"""

import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from transformers import T5Config, T5ForConditionalGeneration

import gerund
import harness
from gerund.jobs.engine import peak_resident_mib
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from inputs import bundled_tokenizer, random_llama, save, size_of
from results import Column, Table, median_of

PROMPT = "The history of the lighthouse begins in the year"
ALONE, BOTH = "generating", "generating and encoding at once"
WHOLE, ENCODER = "the whole encoder-decoder", "its encoder and head alone"


def sentences(count: int) -> list[str]:
    """Return sentences of several lengths."""
    return [f"Sentence {i} is about the sea, the wind and a ship with {i} sails." * (1 + i % 9) for i in range(count)]


def make_t5(folder: Path, width: int, layers: int) -> None:
    """Write a random T5 with a head."""
    config = T5Config(
        vocab_size=len(bundled_tokenizer()), d_model=width, d_ff=4 * width, num_layers=layers,
        num_decoder_layers=layers, num_heads=width // 64, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    save(T5ForConditionalGeneration(config), folder)
    ProjectionHead(HeadConfig(width)).save(folder)


def at_work(case: dict[str, Any]) -> dict[str, Any]:
    """Generate, and perhaps encode at the same time; return the peak."""
    lm = gerund.load(case["folder"], dtype="auto", device="cpu")
    texts = sentences(case["texts"])
    encoder = threading.Thread(target=lambda: lm.encode(texts, show_progress=False))
    if case["system"] == BOTH:
        encoder.start()
    lm.generate([PROMPT] * 8, case["new_tokens"])
    if case["system"] == BOTH:
        encoder.join()
    return {"memory": peak_resident_mib()}


def taken_apart(case: dict[str, Any]) -> dict[str, Any]:
    """Load, take the encoder out, and return both sizes."""
    texts = sentences(32)
    # What a first model brings along once and for all is there before anything is measured.
    gerund.load().encode(texts)
    before = harness.resident_memory()
    lm = gerund.load(case["folder"], dtype="float32", device="cpu")
    expected = lm.encode(texts)
    # Weights are read from the disk as they are used.
    lm.generate(texts[0], 4)
    whole, weights = harness.resident_memory() - before, size_of(lm.model)
    encoder = lm.for_representation()
    del lm
    alone = harness.resident_memory() - before
    apart = float(np.abs(encoder.encode(texts) - expected).max())
    return {"whole": whole, "weights": weights, "alone": alone, "own": size_of(encoder.model), "apart": apart}


def one_set_of_weights(options: Any, folder: Path) -> Table:
    """Measure a decoder that generates, and that encodes at the same time."""
    sizes = {"hidden_size": options.hidden, "intermediate_size": 4 * options.hidden}
    model = random_llama(**sizes, num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64)
    save(model, folder)
    case = {"kind": "at work", "folder": str(folder), "texts": options.texts, "new_tokens": options.new_tokens}
    peaks: dict[str, list[float]] = {ALONE: [], BOTH: []}
    for _ in range(options.rounds):
        for name, found in peaks.items():
            found.append(harness.in_child(__file__, {**case, "system": name})["memory"])
    rows = [
        {"system": name, "memory": median_of(found),
         "ratio": median_of([own / base for own, base in zip(found, peaks[ALONE], strict=True)])}
        for name, found in peaks.items()
    ]  # fmt: skip
    columns = [
        Column("system", "a decoder"),
        Column("memory", "peak resident size", "MiB", 0), Column("ratio", "ratio", "", 3),
    ]  # fmt: skip
    caption = (
        f"A random Llama of {options.layers} layers and width {options.hidden} ({size_of(model):.0f} MiB of weights): "
        f"eight prompts continued by {options.new_tokens} tokens, {options.texts} texts encoded in another thread."
    )
    return Table("one-set-of-weights", caption, columns, rows)


def encoder_alone(options: Any, folder: Path) -> Table:
    """Measure an encoder-decoder, whole and without its decoder."""
    make_t5(folder, options.t5_width, options.t5_layers)
    found = harness.in_child(__file__, {"kind": "taken apart", "folder": str(folder)})
    rows = [
        {"system": WHOLE, "memory": found["whole"], "weights": found["weights"], "ratio": 1.0},
        {
            "system": ENCODER,
            "memory": found["alone"],
            "weights": found["own"],
            "ratio": found["alone"] / found["whole"],
        },
    ]
    columns = [
        Column("system", "an encoder-decoder"), Column("memory", "resident size", "MiB", 0),
        Column("weights", "weights", "MiB", 0), Column("ratio", "ratio", "", 2),
    ]  # fmt: skip
    caption = (
        f"A random T5 of {options.t5_layers} and {options.t5_layers} layers, width {options.t5_width}, with a head."
    )
    check = harness.require("difference of the vectors", found["apart"], 0)
    return Table("encoder-alone", caption, columns, rows, checks=[check])


def main(argv: list[str] | None = None) -> None:
    """Measure both."""
    parser = harness.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--t5-width", type=int, default=512)
    parser.add_argument("--t5-layers", type=int, default=8)
    quick = {"hidden": 128, "layers": 2, "texts": 16, "new_tokens": 8, "t5_width": 128, "t5_layers": 2}
    options = harness.parse(parser, argv, quick=quick)
    if options.child:
        harness.answer((at_work if options.child["kind"] == "at work" else taken_apart)(options.child))
        return
    with tempfile.TemporaryDirectory() as folder:
        tables = [one_set_of_weights(options, Path(folder) / "llama"), encoder_alone(options, Path(folder) / "t5")]
    harness.report(options, __file__, tables)


if __name__ == "__main__":
    main()
