"""Trains GUR and its ablations on a T5 and on the embedded default model, and measures both sides of the trade.

    python benchmarks/gur.py --data ../shared/data --work WORK [--seeds 0,1,2] [--only NAME ...]

GUR's Figures 6 to 8 in small: pairs of title and sentence are mined from `lm/wiki.train`; measured are retrieval by
titles on `lm/wiki.test`, retrieval on the collections, zero-shot classification, and the loss of language
modelling, with and without the contrastive half, with pairs that share words and with any. Beside them BM25, the
hybrid of BM25 and GUR, and every model before the training. The T5 is trained from scratch first. Models, pairs and
scores that lie in the work folder already are used again, so the study may be interrupted.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from gerund.data.mining import MiningSettings, mine
from gerund.entry import load
from gerund.evaluation.contender import BM25
from gerund.evaluation.hybrid import HYBRID
from gerund.evaluation.registry import select
from gerund.evaluation.run import contenders_of, evaluate
from gerund.evaluation.task import Settings
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.training.building import CorpusTexts, build_objectives
from gerund.training.corpus.sources import Sources
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.step import TrainingModule, evaluate_batches
from gerund.training.subject import prepare_subject

T5, DEFAULT = "T5", "default"
PAIRS = {"pairs.parquet": "lcs", "pairs-none.parquet": "none"}
# Recipe, the model that it begins with, and settings; "causal LM" is what GUR's half adds nothing to.
ARMS: dict[str, tuple[str, str, list[str]]] = {
    "GUR": ("gur-default", T5, []),
    "GUR-LM": ("gur-lm-default", T5, []),
    "GUR-CL": ("gur-cl-default", T5, []),
    "GUR-LCS": ("gur-lcs-default", T5, []),
    "GUR, causal": ("gur-causal-default", DEFAULT, []),
    "GUR, UniMAE": ("gur-unimae-default", DEFAULT, []),
    "causal LM": ("gur-causal-default", DEFAULT, ["objectives.gur.weight=0"]),
}
TITLES = "title-retrieval/wiki"
COLLECTIONS = ("retrieval/cranfield", "retrieval/medline", "retrieval/cisi")
ZERO_SHOT = ("zero-shot/banking77", "zero-shot/hwu64")
# Columns: the task, its metric, what it is multiplied with.
COLUMNS = (
    *((TITLES, metric, 100.0) for metric in ("recall_at_100", "mrr_at_10")),
    *((task, metric, 100.0) for task in COLLECTIONS for metric in ("recall_at_100", "mrr_at_10")),
    *((task, "accuracy", 100.0) for task in ZERO_SHOT),
    ("perplexity/wiki", "perplexity", 1.0),
    ("span", "loss", 1.0),
)


def base_of(name: str, data: Path, work: Path) -> str:
    """Return where the model lies that an arm begins with; the T5 is trained unless it is there."""
    if name == DEFAULT:
        return "default"
    output = work / "runs" / "T5"
    if not (output / "model").is_dir():
        overrides = [f"data.folder={data / 'lm'}", f"data.cache={work / 'cache'}", f"output={output}"]
        train(load_recipe("t5-default-base", overrides), resume=True)
    return str(output / "model")


def pairs_in(data: Path, work: Path) -> None:
    """Mine the pairs that are not there yet."""
    for name, method in PAIRS.items():
        if not (work / name).is_file():
            settings = MiningSettings(method=method, clean="wikipedia")
            mine([data / "lm" / "wiki.train.jsonl.xz"], work / name, settings, resume=True)


def trained(name: str, seed: int, data: Path, work: Path, more: list[str]) -> Path:
    """Return the folder of an arm's model, trained unless it is there."""
    output = work / "runs" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    recipe, base, own = ARMS[name]
    if not (output / "model").is_dir():
        pairs = work.resolve() / ("pairs-none.parquet" if "lcs" in recipe else "pairs.parquet")
        overrides = [f"model.base={base_of(base, data, work)}", f"objectives.gur.pairs.files=[{pairs}]"]
        overrides += [f"data.folder={data / 'lm'}", f"data.cache={work / 'cache'}", f"output={output}", f"seed={seed}"]
        train(load_recipe(recipe, [*overrides, *own, *more]), resume=True)
    return output / "model"


def measured(model: str | Path, data: Path, work: Path, *, hybrid: bool = False) -> list[dict[str, dict[str, float]]]:
    """Return the metrics of every task, for the model and with ``hybrid`` for BM25 and it together."""
    if model == BM25:
        contenders, names = contenders_of([BM25]), [TITLES, *COLLECTIONS]
    else:
        lm = load(adapter="none", attention="mask0-bidir") if model == "default" else load(model)
        contenders = contenders_of([lm, HYBRID] if hybrid else [lm])
        names = [TITLES, *COLLECTIONS, *ZERO_SHOT, *([] if is_encoder_decoder(lm.model) else ["perplexity/wiki"])]
    found = []
    for contender in contenders:
        wanted = [task for task in select(names, data) if task.takes_bm25 or not hybrid or contender is contenders[0]]
        done = evaluate([contender], wanted, Settings(show_progress=False), folder=work / "scores")
        found.append({result.task: dict(result.score.metrics) for result in done.results})
    if model not in (BM25, "default") and is_encoder_decoder(lm.model):
        found[0]["span"] = {"loss": span_loss(Path(model), data, work)}
    return found


def span_loss(model: Path, data: Path, work: Path) -> float:
    """Return the loss of a T5 on spans of validation texts, nats a token."""
    overrides = ["model.config=null", "tokenizer=null", f"model.base={model}", f"data.folder={data / 'lm'}"]
    overrides += [f"data.cache={work / 'cache'}", "data.validation_tokens=65536", f"output={work / 'none'}"]
    recipe = load_recipe("t5-default-base", overrides)
    subject = prepare_subject(recipe, write=False)
    [objective] = build_objectives(recipe, subject, CorpusTexts(Sources(recipe, subject.tokenizer)))
    module = TrainingModule(subject.model, {objective.name: objective.losses}).eval()
    [(batches, count)] = objective.validation.values()
    rows = objective.config.batch_size
    made = [batches.make(number, number * rows, rows) for number in range(count)]
    return evaluate_batches(module, objective, made)["span_corruption"]


def row(name: str, found: list[dict[str, dict[str, float]]]) -> str:
    """Return a row of the table, mean and standard deviation over seeds."""
    shown = []
    for task, metric, factor in COLUMNS:
        there = [factor * one[task][metric] for one in found if metric in one.get(task, {})]
        digits = 1 if factor > 1 or metric == "perplexity" else 3
        spread = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 else ""
        shown.append(f"{statistics.fmean(there):.{digits}f}{spread}" if there else "")
    return " | ".join(["", name, *shown, ""]).strip()


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", nargs="*", default=list(ARMS))
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the recipes, KEY=VALUE")
    arguments = parser.parse_args()
    data, work = arguments.data, arguments.work
    work.mkdir(parents=True, exist_ok=True)
    pairs_in(data, work)
    print("| | " + " | ".join(f"{task.split('/')[-1]} {metric}" for task, metric, _ in COLUMNS) + " |")
    whole: dict[str, Any] = {}
    bases = {base: base_of(base, data, work) for base in {ARMS[name][1] for name in arguments.only}}
    for name, model in {BM25: BM25, **bases}.items():
        whole[name] = measured(model, data, work)
        print(row(name, whole[name]), flush=True)
    for name in arguments.only:
        folders = [trained(name, int(seed), data, work, arguments.set) for seed in arguments.seeds.split(",")]
        runs = [measured(folder, data, work, hybrid=name.startswith("GUR,") or name == "GUR") for folder in folders]
        whole[name] = runs
        print(row(name, [run[0] for run in runs]), flush=True)
        if len(runs[0]) > 1:
            print(row(f"{name} + BM25", [run[1] for run in runs]), flush=True)
    (work / "gur.json").write_text(json.dumps(whole, indent=1), "utf-8")


if __name__ == "__main__":
    main()
