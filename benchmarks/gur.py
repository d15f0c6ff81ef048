"""Trains GUR and its ablations on a T5 and on the bundled model, and measures both sides of the trade.

    python benchmarks/gur.py --data ../shared/data --work WORK [--seeds 0,1,2] [--only NAME ...]

GUR's Figures 6 to 8 in small: pairs of title and sentence are mined from `lm/wiki.train`; measured are retrieval by
titles on `lm/wiki.test`, retrieval on the collections, zero-shot classification, and the loss of language
modelling, with and without the contrastive half, with pairs that share words and with any. Beside them BM25, the
hybrid of BM25 and GUR, and every model before the training. The T5 is trained from scratch first. Models, pairs and
scores that lie in the work folder already are used again, so the study may be interrupted.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import study
from gerund.data.mining.candidates import MiningConfig
from gerund.data.mining.job import mine
from gerund.entry import load
from gerund.evaluation.registry import select
from gerund.evaluation.systems.base import Ranks
from gerund.evaluation.systems.search import BM25, HYBRID
from gerund.models.kinds import is_encoder_decoder
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.step import TrainingModule, evaluate_batches
from gerund.training.trainable_model import prepare_model
from results import Cell, Column, Row, Table

T5, DEFAULT = "T5", "default"
PAIRS = {"pairs.parquet": "lcs", "pairs-none.parquet": "none"}
# Recipe, the model that it begins with, and settings; "causal LM" is what GUR's half adds nothing to.
ARMS: dict[str, tuple[str, str, list[str]]] = {
    "GUR": ("gur-default", T5, []),
    "GUR-LM": ("gur-lm-default", T5, []),
    # Without hidden spans either: what leaving out the loss and what leaving out the spans does are told apart.
    "GUR-LM, whole texts": ("gur-lm-default", T5, ["objectives.gur.rate=0"]),
    "GUR-CL": ("gur-cl-default", T5, []),
    "GUR-LCS": ("gur-lcs-default", T5, []),
    "GUR, causal": ("gur-causal-default", DEFAULT, []),
    "GUR, UniMAE": ("gur-unimae-default", DEFAULT, []),
    "causal LM": ("gur-causal-default", DEFAULT, ["objectives.gur.weight=0"]),
}
QUICK_BASE = ["steps=2", "schedule.warmup_steps=0", "schedule.decay_steps=1"]
TITLES = "title-retrieval/wiki"
COLLECTIONS = ("retrieval/cranfield", "retrieval/medline", "retrieval/cisi")
ZERO_SHOT = ("zero-shot/banking77", "zero-shot/hwu64")
CAPTIONS = {
    DEFAULT: "GUR on the bundled model: titles, three collections, zero-shot labels, perplexity.",
    T5: "GUR and its ablations on a T5 from scratch: titles, three collections, labels, loss on hidden spans.",
}
# Each column with its task and metric.
COLUMNS = (
    *(
        (Column(f"{task} {metric}", f"{title} {short}", "%", 1, "higher"), task, metric)
        for task, title in ((TITLES, "titles"), *((task, task.split("/")[1].title()) for task in COLLECTIONS))
        for metric, short in (("recall_at_100", "R@100"), ("mrr_at_10", "MRR@10"))
    ),
    *((Column(task, task.split("/")[1], "%", 1, "higher"), task, "accuracy") for task in ZERO_SHOT),
    (Column("perplexity", "perplexity", "", 1, "lower"), "perplexity/wiki", "perplexity"),
    (Column("span", "spans", "nats a token", 3, "lower"), "span", "loss"),
)


def base_of(name: str, data: Path, work: Path, more: list[str]) -> str:
    """Return where the model lies that an arm begins with; the T5 is trained unless it is there."""
    if name == DEFAULT:
        return "default"
    overrides = [f"data.folder={data / 'lm'}", f"data.cache={work / 'cache'}"]
    return str(study.trained("t5-default-base", overrides, work / "runs" / "T5", more))


def pairs_of(recipe: str) -> str:
    """Return the file of pairs that a recipe is trained on."""
    return "pairs-none.parquet" if "lcs" in recipe else "pairs.parquet"


def pairs_in(data: Path, work: Path, arms: Sequence[str], *, quick: bool) -> None:
    """Mine the pairs that some arms need and that are not there yet."""
    corpus = data / "lm" / ("wiki.test.jsonl" if quick else "wiki.train.jsonl.xz")
    needed = {pairs_of(ARMS[arm][0]) for arm in arms}
    for name, method in PAIRS.items():
        if name in needed and not (work / name).is_file():
            settings = MiningConfig(method=method, clean="wikipedia")
            mine([corpus], work / name, settings, resume=True)


def trained(name: str, seed: int, options: Any) -> Path:
    """Return the folder of an arm's model, trained unless it is there."""
    recipe, base, own = ARMS[name]
    data, work = options.data, options.work
    output = work / "runs" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    if (output / "model").is_dir():
        return output / "model"
    pairs = work.resolve() / pairs_of(recipe)
    start = base_of(base, data, work, QUICK_BASE if options.quick else [])
    overrides = [f"model.base={start}", f"objectives.gur.pairs.files=[{pairs}]"]
    overrides += [f"data.folder={data / 'lm'}", f"data.cache={work / 'cache'}", f"seed={seed}", *own]
    return study.trained(recipe, overrides, output, options.set)


def measured(model: str | Path, options: Any, *, hybrid: bool = False) -> list[study.Metrics]:
    """Return the metrics of every task, for the model and with ``hybrid`` for BM25 and it together."""
    retrieval = [COLLECTIONS[0]] if options.quick else [TITLES, *COLLECTIONS]
    if model == BM25:
        return [study.measured([BM25], select(retrieval, options.data), options)]
    lm = load(adapter="none", attention="mask0-bidir") if model == "default" else load(model)
    apart = is_encoder_decoder(lm.model)
    names = retrieval if options.quick else [*retrieval, *ZERO_SHOT, *([] if apart else ["perplexity/wiki"])]
    found = [study.measured([lm], select(names, options.data), options)]
    if hybrid:
        joined = [task for task in select(retrieval, options.data) if task.requires is Ranks]
        found.append(study.measured([lm, HYBRID], joined, options))
    if apart:
        found[0]["span"] = {"loss": span_loss(Path(model), options.data, options.work)}
    return found


def span_loss(model: Path, data: Path, work: Path) -> float:
    """Return the loss of a T5 on spans of validation texts, nats a token."""
    overrides = ["model.config=null", "tokenizer=null", f"model.base={model}", f"data.folder={data / 'lm'}"]
    overrides += [f"data.cache={work / 'cache'}", "data.validation_tokens=65536", f"output={work / 'none'}"]
    recipe = load_recipe("t5-default-base", overrides)
    trainable = prepare_model(recipe, write=False)
    [objective] = prepare_objectives(recipe, trainable, Sources(recipe, trainable.tokenizer))
    module = TrainingModule(trainable.model, {objective.name: objective.losses}).eval()
    [(batches, count)] = objective.validation.values()
    rows = objective.config.batch_size
    made = [batches.make(number, number * rows, rows) for number in range(count)]
    return evaluate_batches(module, objective, made)["span_corruption"]


def row(name: str, found: list[study.Metrics], **more: Any) -> Row:
    """Return a row of the table."""
    cells: dict[str, Cell] = {
        column.key: study.over_seeds(found, task, metric, 100 if column.unit == "%" else 1)
        for column, task, metric in COLUMNS
    }
    return {"arm": name, **cells, **more}


def table_of(base: str, options: Any) -> Table:
    """Train and measure every arm that begins with one model."""
    whole: dict[str, Any] = {BM25: measured(BM25, options)}
    rows = [row("BM25", whole[BM25], reference=True)]
    start = base_of(base, options.data, options.work, QUICK_BASE if options.quick else [])
    whole[base] = measured(start, options)
    rows.append(row("before", whole[base]))
    for name in options.only or list(ARMS):
        if ARMS[name][1] != base:
            continue
        hybrid = name.partition(",")[0] == "GUR"
        runs = whole[name] = [measured(trained(name, seed, options), options, hybrid=hybrid) for seed in options.seeds]
        rows.append(row(name, [run[0] for run in runs]))
        if hybrid:
            rows.append(row(f"{name} and BM25 (`hybrid`)", [run[1] for run in runs], reference=True))
    (options.work / f"gur-{base}.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    columns = [Column("arm", "trained by"), *(column for column, _, _ in COLUMNS)]
    return Table(base.lower(), CAPTIONS[base], columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and report a table for each model that is begun with."""
    parser = study.parser(__doc__)
    quick = {"seeds": [0], "only": ["GUR, causal"], "set": [*study.QUICK_RECIPE, *study.QUICK_TEXTS]}
    options = harness.parse(parser, argv, quick=quick)
    options.work.mkdir(parents=True, exist_ok=True)
    pairs_in(options.data, options.work, options.only or list(ARMS), quick=options.quick)
    bases = {ARMS[name][1] for name in options.only or ARMS}
    harness.report(options, __file__, [table_of(base, options) for base in (DEFAULT, T5) if base in bases])


if __name__ == "__main__":
    main()
