"""Does it help to read recurrent layers both ways? A hybrid and a pure-attention base, before and after training.

    python benchmarks/hybrids.py --data ../shared/data --work WORK [--seeds 0,1,2] [--size 8m] [--base-steps 2000]

Two bases of about 8 million parameters (or 2, in a quarter of the time) are trained from scratch by `small-base`, on
the same tokens: one with attention in every layer, one with convolutions in five of eight (LFM 2). Each is read by
every plan, the hybrid with recurrent layers causal and both ways; then each is trained by UniMAE and by GUR, several
seeds, and measured again. Bases, pairs, trainings and scores that lie in the work folder already are used again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import study
from gerund.data.mining.candidates import MiningConfig
from gerund.data.mining.job import mine
from gerund.entry import load
from gerund.errors import GerundError
from gerund.evaluation.registry import select
from gerund.evaluation.search_space import PLANS
from gerund.settings.model_spec import parse_encoder_spec
from results import Column, Row, Table

ATTENTION, HYBRID = "attention", "hybrid"


@dataclass(frozen=True)
class Size:
    """How large both bases are, and the batches that they are trained with."""

    words: str
    width: int
    feed_forward: int
    vocabulary: int
    length: int

    def settings(self, base: str) -> list[str]:
        """Return what a recipe for a base changes."""
        config = (
            f"hidden_size: {self.width}, intermediate_size: {self.feed_forward}, num_hidden_layers: 8, "
            "num_attention_heads: 4, num_key_value_heads: 2, max_position_embeddings: 1024, rope_theta: 10000.0, "
            f"tie_word_embeddings: true, initializer_range: 0.02, {_KINDS[base].format(head=self.width // 4)}"
        )
        lengths = (f"objectives.causal.length={self.length}", f"objectives.causal.decay_length={2 * self.length}")
        return [f"model.config={{{config}}}", f"tokenizer.vocab_size={self.vocabulary}", *lengths]


# LFM 2's own layout at this size: attention in three layers of eight.
_KINDS = {
    ATTENTION: "model_type: llama, head_dim: {head}",
    HYBRID: "model_type: lfm2, full_attn_idxs: [2, 5, 7], conv_L_cache: 3, block_auto_adjust_ff_dim: false",
}
SIZES = {"8m": Size("8 million", 256, 704, 8192, 512), "2m": Size("2 million", 128, 352, 4096, 256)}
# Recipes on any base, short enough for one core: the objective's own settings stay, its batches are smaller.
RECIPES = {
    "UniMAE": ("unimae-domain-default", ("objectives.unimae.batch_size=16", "objectives.unimae.length=64")),
    "GUR": (
        "gur-causal-default",
        ("objectives.gur.batch_size=24", "objectives.gur.length=64", "objectives.gur.short_factor=1",
         "objectives.causal.batch_size=4", "objectives.causal.length=128"),
    ),
}  # fmt: skip
STEPS = 200
LENGTH = 128
QUICK_BASE = (
    *("schedule.decay_steps=1", "tokenizer.sample_mb=1", "tokenizer.vocab_size=1000", "compile=false"),
    *("objectives.causal.batch_size=2", "objectives.causal.length=64", "objectives.causal.decay_length=64"),
)
TASKS = (
    *("sts/stsb", "sts/sts12", "retrieval/medline"),
    *("clustering/twentynewsgroups", "clustering/stackoverflow"),
)
METRICS = {"sts": "cosine_spearman", "retrieval": "ndcg_at_10", "clustering": "v_measure"}
# Plans that read a text twice, one after the other, need no layer to look to the right.
ONE_WAY = ("causal", "echo", "mask0-for")


@dataclass(frozen=True)
class Case:
    """A base and how it is read."""

    base: str
    plan: str
    recurrent: str = "causal"
    pooling: str = "mean"

    @property
    def settings(self) -> str:
        """The encoder's settings, as a column of `gerund eval`."""
        last = [f"pooling={self.pooling}", f"append_eos={'true' if self.pooling == 'last' else 'false'}"]
        last.append(f"max_length={LENGTH}")
        return f"{self.plan}:" + ",".join([*([] if self.plan in ONE_WAY else [f"recurrent={self.recurrent}"]), *last])

    @property
    def cells(self) -> Row:
        """What a table says of it."""
        return {"base": self.base, "plan": self.plan, "recurrent": self.recurrent if self.base == HYBRID else None}


# What is trained by GUR: both ways of reading recurrent layers, and the base without any. UniMAE compresses a text into
# a causal state, so each base is trained once, and then read in that way and by the plans.
BOTH_WAYS = (Case(ATTENTION, "bidir"), Case(HYBRID, "bidir"), Case(HYBRID, "bidir", "both"))
COMPRESSED = (Case(ATTENTION, "causal", pooling="last"), Case(HYBRID, "causal", pooling="last"))
READ_AS = {"UniMAE": (*COMPRESSED, *BOTH_WAYS), "GUR": BOTH_WAYS}


def cases(plans: Sequence[str]) -> Iterator[Case]:
    """Yield every base with every plan."""
    for plan in plans:
        yield Case(ATTENTION, plan)
        yield Case(HYBRID, plan)
        if plan not in ONE_WAY:
            yield Case(HYBRID, plan, "both")


def base_of(name: str, options: Any) -> Path:
    """Return the folder of a base, trained unless it is there."""
    own = SIZES[options.size].settings(name)
    settings = [*own, f"data.folder={options.data / 'lm'}", f"data.cache={options.work / 'cache'}"]
    steps = [f"steps={options.base_steps}", f"schedule.decay_steps={options.base_steps // 5}", "precision=auto"]
    quick = [*options.set, *QUICK_BASE] if options.quick else []
    return study.trained("small-base", [*settings, *steps], options.work / "bases" / f"{name}-{options.size}", quick)


def trained(case: Case, kind: str, seed: int, options: Any) -> Path:
    """Return the folder of a trained model, trained unless it is there."""
    recipe, own = RECIPES[kind]
    settings = [f"model.base={base_of(case.base, options)}", f"seed={seed}", f"steps={STEPS}", *own]
    settings += [f"data.folder={options.data / 'lm'}", f"data.cache={options.work / 'cache'}"]
    name = f"{kind}-{case.base}-{options.size}"
    if kind == "GUR":
        settings.append(f"objectives.gur.pairs.files=[{pairs_in(options)}]")
        settings.append(f"encoder.attention={{name: {case.plan}, recurrent: {case.recurrent}}}")
        name += f"-{case.recurrent}"
    output = options.work / "runs" / f"{name}-{seed}"
    return study.trained(recipe, settings, output, options.set)


def pairs_in(options: Any) -> Path:
    """Return the file of pairs, mined unless it is there."""
    path: Path = options.work.resolve() / "pairs.parquet"
    if not path.is_file():
        corpus = options.data / "lm" / ("wiki.test.jsonl" if options.quick else "wiki.train.jsonl.xz")
        mine([corpus], path, MiningConfig(clean="wikipedia"), resume=True)
    return path


def measured(model: Path, case: Case, options: Any) -> study.Metrics:
    """Return the metrics of every task."""
    lm = load(model)
    lm = lm.with_encoder(parse_encoder_spec(case.settings).applied_to(lm.encoder))
    return study.measured([lm], select(list(options.tasks), options.data), options)


def columns_of(options: Any) -> list[tuple[Column, str, str]]:
    """Return each column with its task and metric."""
    return [
        (Column(task, task, "%", 1, "higher"), task, METRICS[task.partition("/")[0]]) for task in options.tasks
    ]  # fmt: skip


def row(found: Sequence[study.Metrics], options: Any) -> Row:
    """Return a row's figures: of each task, and the mean of all."""
    shown = {
        column.key: study.over_seeds(found, task, metric, 100) for column, task, metric in columns_of(options)
    }  # fmt: skip
    means = [{"mean": {"of all": sum(one[t][m] for _, t, m in columns_of(options)) / len(shown)}} for one in found]
    return {**shown, "mean": study.over_seeds(means, "mean", "of all", 100)}


FIRST = (Column("base", "base"), Column("plan", "plan"), Column("recurrent", "recurrent layers"))
MEAN = Column("mean", "mean", "%", 1, "higher")


def untrained_table(options: Any) -> Table:
    """Measure each base under every plan, converted layers as many as a plan has by default."""
    rows: list[Row] = []
    for case in cases(options.plans):
        try:
            found = measured(base_of(case.base, options), case, options)
        except GerundError:  # a plan that has no meaning in this model is refused by name
            rows.append({**case.cells, **dict.fromkeys(options.tasks), "mean": None})
        else:
            rows.append({**case.cells, **row([found], options)})
    size = SIZES[options.size].words
    caption = f"Two bases of {size} parameters under every plan, untrained: Spearman, nDCG@10, V-measure."
    return Table("untrained", caption, [*FIRST, *(column for column, _, _ in columns_of(options)), MEAN], rows)


def trained_table(options: Any) -> Table:
    """Measure what the same training brings to each case."""
    rows: list[Row] = []
    for kind in RECIPES:
        for case in READ_AS[kind]:
            if options.only and f"{kind}-{case.base}" not in options.only:
                continue
            found = [measured(trained(case, kind, seed, options), case, options) for seed in options.seeds]
            rows.append(
                {
                    "trained": kind,
                    **case.cells,
                    "pooling": case.pooling,
                    **row(found, options),
                    "seeds": len(found),
                }
            )
    caption = f"The same bases after {STEPS} steps of UniMAE (trained causally) and of GUR (trained as it is read)."
    first = [Column("trained", "trained by"), *FIRST, Column("pooling", "pooling")]
    columns = [*first, *(column for column, _, _ in columns_of(options))]
    return Table("trained", caption, [*columns, MEAN, Column("seeds", "seeds")], rows)


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and report both tables."""
    parser = study.parser(__doc__)
    parser.add_argument("--limit", type=int, default=500, help="at most so many examples a task (%(default)s)")
    parser.add_argument("--size", default="8m", choices=SIZES, help="parameters of each base (%(default)s)")
    parser.add_argument("--base-steps", type=int, default=2000, help="steps of each base (%(default)s)")
    parser.add_argument("--plans", nargs="+", default=list(PLANS), help="plans of the untrained table (all)")
    parser.add_argument("--tables", nargs="+", default=["untrained", "trained"], choices=["untrained", "trained"])
    parser.set_defaults(tasks=TASKS)
    quick = {"seeds": [0], "plans": ["bidir"], "only": ["UniMAE-hybrid"], "tasks": TASKS[:1],
             "set": [*study.QUICK_RECIPE, *study.QUICK_TEXTS]}  # fmt: skip
    options = harness.parse(parser, argv, quick=quick)
    options.work.mkdir(parents=True, exist_ok=True)
    tables = {"untrained": untrained_table, "trained": trained_table}
    harness.report(options, __file__, [tables[name](options) for name in options.tables])


if __name__ == "__main__":
    main()
