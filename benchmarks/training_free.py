"""Every method without training in one table: plans, skips, mixed layers, templates, prepending, rerouting, transforms.

    python benchmarks/training_free.py --data ../shared/data --work runs/training-free --models default [--limit 300]

For each model, first `gerund tune` on three validation splits: plans, then the other methods on the best plan and on
the causal model; transforms are fitted on training texts, without their labels. Of each family the setting with the
best mean over the three splits is taken, and scored once on the test sets. Which form of skips is best is decided by
validation too: skips of one to four layers with and without converted layers, the mean of several layers' states, and
weights of the layers that are learnt on the development set of STS-B. Scores in the work folder are used again.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

import gerund
import harness
from gerund.evaluation.data_files import read_scored_pairs
from gerund.evaluation.registry import select, with_options
from gerund.evaluation.run import evaluate
from gerund.evaluation.search_space import METHODS, PLANS
from gerund.evaluation.systems.base import EmbeddingCache
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.selection import label_of, read_as
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tuning import Trial, Tuned, tune
from gerund.language_model import LanguageModel
from gerund.settings.encoder import METHODS as METHOD_FIELDS
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import parse_encoder_spec
from gerund.settings.plan import AttentionPlan
from results import Column, Row, Table

VALIDATION = ("sts/stsb", "linear-probe/hwu64", "linear-probe/financial_phrasebank")
GROUPS = {
    "sts": ("sts/stsb", "sts/sts12", "sts/sts13", "sts/sts14"),
    "pairs": ("pair-classification/mqp",),
    "probe": (
        *("linear-probe/banking77", "linear-probe/chemprot", "linear-probe/financial_phrasebank"),
        *("linear-probe/hwu64", "linear-probe/pubmedqa"),
    ),
    "clustering": ("clustering/stackoverflow", "clustering/twentynewsgroups"),
    "retrieval": ("retrieval/cranfield", "retrieval/medline", "retrieval/cisi"),
    "tokens": ("ner/conll2003", "pos/conll2003", "chunking/conll2003"),
}
TITLES = {
    "sts": "STS (4 sets, Spearman)", "pairs": "MQP (max AP)", "probe": "linear probe (5 sets, accuracy)",
    "clustering": "clustering (2 sets, V-measure)", "retrieval": "retrieval (3 sets, nDCG@10)",
    "tokens": "words of CoNLL-2003 (names F1, parts of speech, chunks F1)",
}  # fmt: skip
SETS = ("stsb.dev", "stsb.test", "sts12.test", "sts13.test", "sts14.test")
OPTIONS = ("linear-probe.smote=never",)
# Unlabelled training texts that transforms are fitted on: of each file so many, the first ones.
SAMPLES = {"sts/stsb.train.tsv": 1000, "classification/hwu64/train.jsonl": 1000,
           "classification/financial_phrasebank/train.jsonl": 1000}  # fmt: skip


def _is_plain(config: EncoderConfig) -> bool:
    return config.attention.skips is None and not config.methods


def _mixes(config: EncoderConfig) -> bool:
    return config.layers != "last" and not config.templates


def families(n_layers: int) -> dict[str, Callable[[EncoderConfig], bool]]:
    """Return what settings each family is made of, for a model of so many layers."""
    usual = AttentionPlan("mask0-bidir").with_defaults(n_layers)
    return {
        "causal, mean": lambda config: config.attention.name == "causal" and _is_plain(config),
        "echo": lambda config: config.attention.name == "echo" and not config.templates,
        "echo, in its template": lambda config: config.template == "rewrite",
        "mask0-bidir, best k": lambda config: config.attention.name == "mask0-bidir" and _is_plain(config),
        "mask0-bidir, usual k": lambda config: config.attention == usual and _is_plain(config),
        "best plan": lambda config: config.attention.name != "echo" and _is_plain(config),
        "skips, causal": lambda config: config.attention.skips is not None and config.attention.name == "causal",
        "skips, best plan": lambda config: config.attention.skips is not None and config.attention.name != "causal",
        "layers, causal": lambda config: _mixes(config) and config.attention.name == "causal",
        "layers, best plan": lambda config: _mixes(config) and config.attention.name != "causal",
        "whitening": lambda config: config.transform.startswith("whitening"),
        "all-but-the-top": lambda config: config.transform.startswith("all-but"),
        "PromptEOL": lambda config: config.template == "prompteol" and not config.prepend,
        "PromptEOL, one example": lambda config: config.template == "prompteol-few-shot",
        "PromptEOL, chain of thought": lambda config: config.template == "prompteol-cot",
        "PromptEOL, knowledge": lambda config: config.template == "prompteol-knowledge",
        "MetaEOL": lambda config: config.template == "metaeol",
        "Token Prepending": lambda config: bool(config.prepend),
        "KV-Embedding's template alone": lambda config: config.template == "kv-embedding" and config.reroute == "none",
        "KV-Embedding": lambda config: config.template == "kv-embedding" and config.reroute != "none",
    }


def sample_of(data: Path) -> list[str]:
    """Return the texts that transforms are fitted on."""
    found: list[str] = []
    for name, count in SAMPLES.items():
        with (data / name).open(encoding="utf-8") as file:
            for line in islice(file, count):
                found += line.rstrip("\n").split("\t")[1:] if name.endswith(".tsv") else [json.loads(line)["text"]]
    return found


def tasks_of(names: Sequence[str], data: Path) -> list[Task]:
    """Return tasks by name, with the options of this script where there is one for their kind."""
    found = select(list(names), data)
    kinds = {task.kind for task in found}
    return with_options(found, [option for option in OPTIONS if option.partition(".")[0] in kinds])


def tuned(lm: LanguageModel, name: str, options: argparse.Namespace, sample: Sequence[str]) -> Tuned:
    """Choose on validation data, under every pooling that counts with the plans."""
    config = EvaluationConfig(limit=options.limit, split="validation", show_progress=False)
    return tune(
        lm,
        tasks_of(VALIDATION, options.data),
        config,
        plans=options.plans.split(",") if options.plans else PLANS,
        methods=METHODS,
        sample=sample,
        budget=options.budget,
        folder=options.work / name / "validation",
    )


def told(lm: LanguageModel, name: str, options: argparse.Namespace, sample: Sequence[str]) -> list[Trial]:
    """Measure the settings that the command names, on validation data."""
    configs = [parse_encoder_spec(text).applied_to(lm.encoder) for text in options.also]
    if not configs:
        return []
    labels = [label_of(config, lm.n_layers) for config in configs]
    readers = [read_as(lm, config, sample) for config in configs]
    systems = [language_model_system(*both, EmbeddingCache()) for both in zip(labels, readers, strict=True)]
    settings = EvaluationConfig(limit=options.limit, split="validation", show_progress=False)
    tasks = tasks_of(VALIDATION, options.data)
    found = evaluate(systems, tasks, settings, folder=options.work / name / "validation").results
    scores = {label: {one.task: one.score.value for one in found if one.system == label} for label in labels}
    return [Trial(config, label, scores[label]) for config, label in zip(configs, labels, strict=True)]


def best_of(done: Tuned, fits: Callable[[EncoderConfig], bool]) -> Trial | None:
    """Return the trial of a family with the best mean over the validation splits."""
    own = [trial for trial in done.trials if fits(trial.config)]
    return max(own, key=lambda trial: (trial.mean, -trial.converted)) if own else None


def scored(lm: LanguageModel, name: str, config: EncoderConfig, options: Any, sample: Sequence[str]) -> None:
    """Score a setting on the test sets; the scores lie in the work folder."""
    # A template, what is put in front and a transform say nothing of a text's tokens.
    of_texts = not {"template", "prepend", "reroute", "transform"}.isdisjoint(config.methods)
    groups = [group for group in options.groups if not (of_texts and group == "tokens")]
    tasks = tasks_of([task for group in groups for task in GROUPS[group]], options.data)
    system = language_model_system(label_of(config, lm.n_layers), read_as(lm, config, sample), EmbeddingCache())
    settings = EvaluationConfig(limit=options.limit, show_progress=False)
    evaluate([system], tasks, settings, folder=options.work / name / "test")


def finished(folder: Path, n_layers: int) -> tuple[dict[str, EncoderConfig], dict[str, dict[str, float]]]:
    """Return the settings in a folder of scores, and the main metric in percent by setting and task."""
    configs: dict[str, EncoderConfig] = {}
    scores: dict[str, dict[str, float]] = {}
    for path in sorted((folder / "scores").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        described, score = found["description"], found["score"]
        methods = {name: described[name] for name in METHOD_FIELDS if name in described}
        config = EncoderConfig(AttentionPlan.from_dict(described["attention"]), pooling=described["pooling"], **methods)
        label = label_of(config, n_layers)
        configs[label] = config
        scores.setdefault(label, {})[found["task"]] = 100 * score["metrics"][score["main"]]
    return configs, scores


def tables_of(name: str, n_layers: int, options: Any) -> list[Table]:
    """Return the tables of a model, of what is finished: of each family its best setting, and all that was tried."""
    configs, tried = finished(options.work / name / "validation", n_layers)
    _, tested = finished(options.work / name / "test", n_layers)
    means = {label: fmean(own.values()) for label, own in tried.items() if len(own) == len(VALIDATION)}
    rows: list[Row] = []
    for family, fits in families(n_layers).items():
        able = [label for label in means if fits(configs[label])]
        if not able:
            continue
        best = max(able, key=lambda label: (means[label], label in tested))  # of several equal ones one is tested
        row: Row = {"family": family, "setting": best, "validation": round(means[best], 2)}
        for group in options.groups:
            own = [tested.get(best, {}).get(task) for task in GROUPS[group]]
            known = [value for value in own if value is not None]
            row[group] = round(fmean(known), 2) if len(known) == len(own) else None
        rows.append(row)
    columns = [Column("family", "family"), Column("setting", "chosen on validation data"),
               Column("validation", "validation (3 splits)", "%", 1, "higher"),
               *(Column(group, TITLES[group], "%", 1, "higher") for group in options.groups)]  # fmt: skip
    known = sorted(means, key=lambda label: -means[label])
    validation: list[Row] = [
        {
            "setting": label,
            "mean": round(means[label], 2),
            **{task: round(tried[label][task], 2) for task in VALIDATION},
        }
        for label in known
    ]
    shown = [Column("setting", "setting"), Column("mean", "mean", "%", 1, "higher"),
             *(Column(task, task, "%", 1, "higher") for task in VALIDATION)]  # fmt: skip
    return [
        Table(f"test-{name}", f"{name}: methods without training on test sets.", columns, rows),
        Table(f"validation-{name}", f"{name}: what was tried on three validation splits.", shown, validation),
        *weight_table(name, options),
    ]


def weight_table(name: str, options: Any) -> list[Table]:
    """Return the table of learnt weights, where they were measured."""
    path = options.work / name / "weights.json"
    if not path.is_file():
        return []
    heads = [Column("start", "start"), Column("setting", "setting"), Column("weights", "weights of layers"),
             *(Column(one, one, "%", 1, "higher") for one in SETS)]  # fmt: skip
    caption = f"{name}: weights of the layers' states, learnt on STS-B's development set, on other sets (Spearman)."
    return [Table(f"weights-{name}", caption, heads, json.loads(path.read_text(encoding="utf-8")))]


def rank(values: np.ndarray) -> np.ndarray:
    """Return ranks, equal values at their mean rank."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    _, places = np.unique(values, return_inverse=True)
    sums = np.bincount(places, ranks)
    return sums[places] / np.bincount(places)[places]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's rank correlation."""
    return float(np.corrcoef(rank(one), rank(other))[0, 1])


def learnt_weights(layers_LND: np.ndarray, layers_LMD: np.ndarray, gold: np.ndarray, steps: int = 300) -> np.ndarray:
    """Return weights of the layers, learnt by gradient on Pearson's correlation of cosines with ratings."""
    import torch

    left, right = torch.from_numpy(layers_LND), torch.from_numpy(layers_LMD)
    wanted = torch.from_numpy(gold).float()
    weight_L = torch.full((len(left),), 1 / len(left), requires_grad=True)
    optimizer = torch.optim.Adam([weight_L], lr=0.02)
    for _ in range(steps):
        both = [torch.einsum("l,lnd->nd", weight_L, side) for side in (left, right)]
        cosine = torch.nn.functional.cosine_similarity(*both)
        loss = -torch.corrcoef(torch.stack([cosine, wanted]))[0, 1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weight_L.detach().numpy()


def layer_vectors(lm: LanguageModel, config: EncoderConfig, texts: Sequence[str]) -> np.ndarray:
    """Return each layer's pooled vectors ``(L, N, D)``, the embeddings' first."""
    readers = [lm.with_encoder(replace(config, layers=str(layer))) for layer in range(lm.n_layers + 1)]
    return np.stack([one.encode(list(texts), normalize=False, empty="zeros") for one in readers])


def weight_rows(lm: LanguageModel, starts: dict[str, EncoderConfig], options: Any) -> list[Row]:
    """Return what learnt weights of the layers are worth on STS sets that they were not learnt on."""
    rows: list[Row] = []
    for family, config in starts.items():
        sides: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        for name in SETS:
            pairs = read_scored_pairs(options.data / "sts" / f"{name}.tsv")
            count = options.limit or len(pairs.left)
            both = [layer_vectors(lm, config, side[:count]) for side in (pairs.left, pairs.right)]
            sides[name] = (*both, np.array(pairs.ratings[:count]))
        weight_L = learnt_weights(*sides["stsb.dev"])
        last_L = np.eye(lm.n_layers + 1)[-1].astype(np.float32)
        even_L = np.r_[0, np.full(lm.n_layers, 1 / lm.n_layers)].astype(np.float32)
        known = {"last layer": last_L, "mean of all layers": even_L, "learnt on STS-B dev": weight_L}
        for what, weights in known.items():
            found: Row = {"start": family, "setting": label_of(config, lm.n_layers), "weights": what}
            for name, (left, right, gold) in sides.items():
                one, other = (np.einsum("l,lnd->nd", weights, side) for side in (left, right))
                size = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
                found[name] = round(100 * spearman((one * other).sum(1) / np.maximum(size, 1e-12), gold), 2)
            rows.append(found)
    return rows


def measured(lm: LanguageModel, name: str, options: Any) -> None:
    """Choose on validation data and score what was chosen; everything goes into the work folder."""
    sample = sample_of(options.data)
    done = tuned(lm, name, options, sample)
    done.trials += told(lm, name, options, sample)
    known = families(lm.n_layers)
    for family in options.families:
        if (trial := best_of(done, known[family])) is not None:
            scored(lm, name, trial.config, options, sample)
    if not options.no_weights:
        best = best_of(done, known["best plan"])
        starts = {"causal": done.baseline.config, **({} if best is None else {"best plan": best.config})}
        rows = weight_rows(lm, starts, options)
        (options.work / name / "weights.json").write_text(json.dumps(rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Choose, measure, write the tables."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="scores, used again where they are")
    parser.add_argument("--models", nargs="+", default=["default"], help="NAME=FOLDER, or default")
    parser.add_argument("--limit", type=int, help="at most so many examples a task")
    parser.add_argument("--max-length", type=int, help="longest text in tokens")
    parser.add_argument("--budget", type=int, default=100, help="settings tried on validation data (%(default)s)")
    parser.add_argument("--plans", help="plans to try, with commas (all)")
    parser.add_argument("--also", nargs="*", default=[], help="further settings to try, as columns of `gerund eval`")
    parser.add_argument("--families", nargs="+", default=list(families(1)), help="which are scored on test sets (all)")
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--no-weights", action="store_true", help="leave the weights of layers out")
    parser.add_argument("--tables-only", action="store_true", help="make the tables of what is finished")
    quick = {"limit": 20, "budget": 12, "plans": "causal,mask0-bidir", "groups": ["sts"], "no_weights": True}
    options = harness.parse(parser, argv, quick=quick)
    tables = []
    for given in options.models:
        name, _, folder = given.partition("=")
        lm = gerund.load(folder or name, adapter="none", max_length=options.max_length, dtype="float32")
        lm = lm.with_encoder(EncoderConfig(max_length=options.max_length))
        if not options.tables_only:
            measured(lm, name, options)
        tables += tables_of(name, lm.n_layers, options)
    harness.report(options, __file__, tables)


if __name__ == "__main__":
    main()
