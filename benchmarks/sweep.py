"""All k of one plan in one pass beside encoding anew for each k: what `gerund tune` saves.

    python benchmarks/sweep.py --data ../shared/data [--layers 22] [--texts 300] [--rounds 3]

A Llama of random weights with the tokenizer of the bundled model; sentences of the STS Benchmark, without `--data`
those of the demo. Both systems encode the same texts with the same weights under k = 1 to n; checks first that the
vectors are the same, then times the systems in turn.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

import harness
from gerund.inference.encode.batches import encode
from gerund.inference.encode.sweep import encode_each
from gerund.inference.tokens import InputFormat, tokenize
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from inputs import bundled_tokenizer, random_llama, texts_of
from results import Column, Table

ANEW, TOGETHER = "every k anew", "all k in one pass"


def sentences(data: Path, count: int) -> list[str]:
    """Return sentences of the STS Benchmark's development set."""
    rows = (data / "sts" / "stsb.dev.tsv").read_text(encoding="utf-8").splitlines()
    return [text for row in rows for text in row.split("\t")[1:]][:count]


def main(argv: list[str] | None = None) -> None:
    """Compare both for every plan."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--plans", default="inplace-back,mask0-bidir,inter-back,extra-back", help="with commas")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--texts", type=int, default=300)
    options = harness.parse(parser, argv, quick={"layers": 4, "texts": 20, "plans": "mask0-bidir,extra-back"})
    model = random_llama(
        hidden_size=256, intermediate_size=704, num_hidden_layers=options.layers, num_attention_heads=4
    )
    lm = LanguageModel(model, bundled_tokenizer(), EncoderConfig(AttentionPlan("causal")))
    texts = texts_of(options.data, options.texts, sentences)
    tokens = tokenize(lm.tokenizer, texts, InputFormat())
    rows, apart = [], 0.0
    for name in options.plans.split(","):
        configs = [replace(lm.encoder, attention=AttentionPlan(name, k=k)) for k in range(1, options.layers + 1)]
        runtimes = [lm.with_encoder(config).runtime for config in configs]

        def anew(runtimes: list = runtimes) -> np.ndarray:
            return np.stack([encode(runtime, tokens, show=False) for runtime in runtimes])

        def together(runtimes: list = runtimes) -> np.ndarray:
            return encode_each(runtimes, tokens, show=False)

        apart = max(apart, harness.largest_difference(anew(), together()))
        rows += harness.alternate({ANEW: anew, TOGETHER: together}, options.rounds).rows(ANEW, plan=f"`{name}`")
    check = harness.require("largest difference of the vectors", apart, 1e-4)
    caption = (
        f"k = 1 to {options.layers} of one plan, a {options.layers}-layer Llama of width 256, {len(texts)} sentences."
    )
    columns = [Column("plan", "plan"), *harness.time_columns(ANEW)]
    harness.report(options, __file__, [Table("all-k", caption, columns, rows, checks=[check])])


if __name__ == "__main__":
    main()
