"""What the bundled model's vectors, likelihoods and scores are worth, and what each attention plan makes of two models.

    python benchmarks/quality.py --data ../shared/data --work runs/quality [--tables vectors,likelihoods]

`vectors`: the bundled model, its base (the same weights without adapters, causal, mean pooling), BM25, and both joined.
`--peer FOLDER` is a model of sentence-transformers beside them.

`likelihoods`: perplexity of text, of what is missing between two sides, and how often the true continuation is found.

`plans`: the base, and every `--models NAME=FOLDER`, under all plans of *Look Both Ways and No Sink* without training:
each plan with the k that is best on the STS Benchmark's development set, the default plan with its usual k too.

`fine-tuning`: the base and the bundled encoder, fine-tuned on Banking77 with few examples a class (GUR's Figure 9).

`expansions`: queries written anew by the bundled model (GUR's Table II).

`seeds`, only when asked for: the bundled model beside every `--models NAME=FOLDER`, whose adapters were trained with
other seeds.

`answers`, only when asked for: questions in SQuAD's layout, `--data` holding `ask/NAME.test.json`.

Scores in the work folder are used again, so an interrupted run goes on.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gerund
import harness
from gerund import Sampling
from gerund.evaluation.registry import select, with_options
from gerund.evaluation.run import Result, cache_in, evaluate
from gerund.evaluation.search_space import PLANS
from gerund.evaluation.systems.base import SentenceTransformersSystem, System
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System, HybridSystem
from gerund.evaluation.systems.selection import label_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tuning import tune
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import parse_encoder_spec
from results import Column, Row, Table, mean_of

VECTORS = {
    "sts/stsb": "STS Benchmark, Spearman", "sts/sts12": "STS 2012", "sts/sts13": "STS 2013", "sts/sts14": "STS 2014",
    "pair-classification/mqp": "MQP, average precision",
    "retrieval/cranfield": "Cranfield, nDCG@10", "retrieval/medline": "Medline", "retrieval/cisi": "CISI",
    "title-retrieval/wiki": "Wikipedia's articles by title",
    "classification/banking77": "Banking77, 8 examples a class, accuracy",
    "zero-shot/banking77": "Banking77, nearest of 77 labels", "zero-shot/hwu64": "HWU64, nearest of 64 labels",
    "clustering/stackoverflow": "StackOverflow, V-measure", "clustering/twentynewsgroups": "Twenty Newsgroups",
    "ner/conll2003": "names (CoNLL-2003), F1", "chunking/conll2003": "chunks, F1",
    "pos/conll2003": "parts of speech, accuracy",
}  # fmt: skip
PLAN_TASKS = {
    "sts/stsb": "STS-B", "sts/sts12": "12", "sts/sts13": "13", "sts/sts14": "14", "pair-classification/mqp": "MQP",
    "retrieval/cranfield": "Cranfield", "retrieval/medline": "Medline", "classification/banking77": "Banking77",
    "clustering/stackoverflow": "StackOverflow", "ner/conll2003": "NER", "chunking/conll2003": "chunks",
    "pos/conll2003": "POS",
}  # fmt: skip
# By task: what of its metrics is shown, how it is called, in which unit, times what.
LIKELIHOODS: dict[str, dict[str, tuple[str, str, float]]] = {
    "perplexity": {"bits_per_byte": ("bits per byte", "", 1), "perplexity": ("perplexity a token", "", 1)},
    "infilling": {
        "left_only": ("what is missing, from the left side", "perplexity", 1),
        "infill": ("what is missing, from both sides", "perplexity", 1),
    },
    "suffix-identification": {
        "avg_cll": ("the true continuation, by mean likelihood", "%", 100),
        "overlap": ("by shared words", "%", 100),
        "content_overlap": ("by shared words without stop words", "%", 100),
        "pmi": ("by PMI", "%", 100),
        "scorer": ("by its own scorer", "%", 100),
    },
}
LEARNT = {
    "infilling/storycloze2016": "a gap in a story, below the left side alone",
    "infilling/books": "a gap in a book, below the left side alone",
    "infilling/wiki": "a gap in Wikipedia, below the left side alone",
    "suffix-identification/books": "the continuation of eleven by its own scorer, books",
    "suffix-identification/wiki": "the same, Wikipedia",
}  # fmt: skip
ANSWERS = {
    "contains": "a right answer is in it", "f1": "F1", "citation_precision": "precision of what is cited",
    "citation_recall": "recall", "unanswerable": "unanswerable ones not answered",
}  # fmt: skip
OPTIONS = tuple(
    f"suffix-identification/{corpus}.{option}"
    for corpus in ("books", "wiki")
    for option in ("prefix_words=96", "continuation_words=64")
)
DEV = "sts/stsb"
QUERIES = (
    *("how to dry damp walls", "the history of the railway in Scotland"),
    *("what [blank] walls are dry", "the history of [blank] in Scotland"),
)


def percent(results: Sequence[Result]) -> dict[tuple[str, str], float]:
    """Return the main metrics in percent, by system and task."""
    return {(one.system, one.task): round(100 * one.score.value, 1) for one in results}


def vectors(options: argparse.Namespace) -> list[Table]:
    """Compare the bundled model with its base and with words."""
    folder = options.work / "vectors"
    cache = cache_in(folder)
    base = gerund.load(adapter="none", attention="causal", pooling="mean", dtype=options.dtype)
    bundled = language_model_system("bundled", gerund.load(dtype=options.dtype), cache)
    systems: list[System] = [language_model_system("base", base, cache), bundled, BM25System("bm25")]
    systems.append(HybridSystem(bundled))
    titles = ["base", "bundled model", "BM25", "bundled model and BM25"]
    if options.peer:
        peer = SentenceTransformersSystem(options.peer)
        systems.append(peer.called("peer", cache=cache))
        titles.append(Path(options.peer).name)
    tasks = select(list(VECTORS), options.data)
    found = percent(evaluate(systems, tasks, settings(options), folder=folder, reporter=progress).results)
    rows: list[Row] = [
        {"task": title, **{system.label: found.get((system.label, task)) for system in systems}}
        for task, title in VECTORS.items()
    ]
    heads = [Column(one.label, title, "%", 1) for one, title in zip(systems, titles, strict=True)]
    caption = (
        f"Vectors of the bundled model ({millions(base)} million parameters) beside its base: the same weights without "
        "adapters, causal, mean."
    )
    return [Table("vectors", caption, [Column("task", "task"), *heads], rows)]


def likelihoods(options: argparse.Namespace) -> list[Table]:
    """Measure what the untouched model and the adapters for gaps and scores are worth."""
    cache = cache_in(options.work / "likelihoods")
    models = {"bundled": gerund.load(dtype=options.dtype)}
    models |= {name: gerund.load(folder, dtype=options.dtype) for name, folder in named(options.models).items()}
    untrained = gerund.load(adapter="none", infill_adapter="none", dtype=options.dtype)
    systems: list[System] = [language_model_system(name, lm, cache) for name, lm in models.items()]
    tasks = with_options(select(list(LIKELIHOODS), options.data), OPTIONS)
    folder, config = options.work / "likelihoods", settings(options)
    results = evaluate(systems, tasks, config, folder=folder, reporter=progress).results
    gaps = [task for task in tasks if task.kind == "infilling"]
    alone = [language_model_system("untrained", untrained, cache)]
    results += evaluate(alone, gaps, config, folder=folder, reporter=progress).results
    found = {(one.system, one.task): one.score.metrics for one in results}
    columns = ["bundled", "untrained", *named(options.models)]
    rows: list[Row] = []
    for task in tasks:
        for metric, (title, unit, scale) in LIKELIHOODS[task.kind].items():
            values = {name: found.get((name, task.name), {}).get(metric) for name in columns}
            if any(value is not None for value in values.values()):
                shown = {name: None if value is None else round(scale * value, 3) for name, value in values.items()}
                rows.append({"task": task.name, "what": title, "unit": unit, **shown})
    heads = [Column("task", "task"), Column("what", "measure"), Column("unit", "unit"),
             Column("bundled", "bundled model", "", 2), Column("untrained", "without adapters", "", 2),
             *(Column(name, name, "", 2) for name in named(options.models))]  # fmt: skip
    caption = (
        "Likelihoods: of held-out text, of what is missing in it, and how often the true continuation is found: among "
        "eleven in books and Wikipedia (prefixes of 96 words, continuations of 64), four in HellaSwag, two in Story "
        "Cloze."
    )
    return [Table("likelihoods", caption, heads, rows)]


def seeds(options: argparse.Namespace) -> list[Table]:
    """Measure how much of each figure of the bundled model is its adapters' seed."""
    folder = options.work / "seeds"
    cache = cache_in(folder)
    models = {"bundled": None, **named(options.models)}
    systems: list[System] = [
        language_model_system(name, gerund.load(place, dtype=options.dtype), cache) for name, place in models.items()
    ]
    titles = VECTORS | LEARNT
    tasks = with_options(select(list(titles), options.data), OPTIONS)
    results = evaluate(systems, tasks, settings(options), folder=folder, reporter=progress).results
    found = {(one.system, one.task): 100 * value_of(one) for one in results}
    rows: list[Row] = []
    for task in tasks:
        values = [found[name, task.name] for name in models]
        rows.append({"task": titles[task.name], "bundled": round(values[0], 1), "mean": mean_of(values)})
    heads = [Column("task", "task"), Column("bundled", "bundled model", "%", 1), Column("mean", "all seeds", "%", 1)]
    caption = f"The bundled model, and the mean of {len(models)} whose adapters were trained with other seeds."
    return [Table("seeds", caption, heads, rows)]


def value_of(result: Result) -> float:
    """Return what of a result is shown of all seeds: what the adapter for gaps saves, what its own scorer finds."""
    metrics = result.score.metrics
    if "left_only" in metrics:
        return 1 - float(metrics["infill"]) / float(metrics["left_only"])
    return float(metrics["scorer"]) if "scorer" in metrics else result.score.value


def plans(options: argparse.Namespace) -> list[Table]:
    """Measure every plan on every model, without training."""
    models = {"default": gerund.load(adapter="none", dtype=options.dtype, max_length=options.max_length)}
    models |= {
        name: gerund.load(folder, dtype=options.dtype, max_length=options.max_length)
        for name, folder in named(options.models).items()
    }
    return [plan_table(name, lm, options) for name, lm in models.items() if name in options.plan_models.split(",")]


def plan_table(name: str, lm: LanguageModel, options: argparse.Namespace) -> Table:
    """Choose k on development data, and score each plan on test sets."""
    folder = options.work / f"plans-{name}"
    lm = lm.with_encoder(EncoderConfig(max_length=options.max_length))
    dev = EvaluationConfig(split="validation", limit=options.limit, show_progress=False)
    plain = [plan for plan in PLANS if plan != "echo"]
    done = tune(lm, select([DEV], options.data), dev, plans=plain, budget=options.budget, folder=folder / "validation")
    best: dict[str, tuple[EncoderConfig, float | None]] = {}
    for trial in sorted(done.trials, key=lambda trial: (-trial.mean, trial.converted)):
        best.setdefault(trial.config.attention.name, (trial.config, round(100 * trial.mean, 1)))
    usual = parse_encoder_spec("mask0-bidir").applied_to(lm.encoder).with_defaults(lm.n_layers)
    last = parse_encoder_spec("causal:pooling=last").applied_to(lm.encoder)
    echo = parse_encoder_spec("echo").applied_to(lm.encoder)
    tried = {label_of(config, lm.n_layers): (config, value) for config, value in best.values()}
    for config, title in ((usual, " (usual k)"), (last, ""), (echo, "")):
        tried.setdefault(label_of(config, lm.n_layers) + title, (config, None))
    cache = cache_in(folder)
    readers = {label: lm.with_encoder(config) for label, (config, _) in tried.items()}
    systems: list[System] = [language_model_system(label, reader, cache) for label, reader in readers.items()]
    tasks = select(options.plan_tasks.split(","), options.data)
    found = percent(evaluate([*systems, BM25System("BM25")], tasks, settings(options), folder=folder,
                             reporter=progress).results)  # fmt: skip
    rows: list[Row] = [
        {"plan": f"`{label}`", "dev": value, **{task: found.get((label, task)) for task in PLAN_TASKS}}
        for label, (_, value) in tried.items()
    ]
    rows.append({"plan": "BM25", "reference": True, **{task: found.get(("BM25", task)) for task in PLAN_TASKS}})
    heads = [Column("plan", "plan"), Column("dev", "dev", "%", 1, "higher"),
             *(Column(task, title, "%", 1, "higher") for task, title in PLAN_TASKS.items())]  # fmt: skip
    caption = (
        f"{name} ({lm.n_layers} layers, {millions(lm)} million parameters), mean pooling, no prompt, texts cut at "
        f"{options.max_length} tokens: each plan at the k that is best on the STS Benchmark's development set (dev). "
        "STS Spearman, MQP average precision, nDCG@10, Banking77 accuracy from 8 examples a class, V-measure, NER and "
        "chunks F1, POS accuracy."
    )
    return Table(f"plans-{name}", caption, heads, rows)


def fine_tuning(options: argparse.Namespace) -> list[Table]:
    """Compare how much a few examples of each class are worth to the base and to the bundled encoder."""
    folder = options.work / "fine-tuning"
    models = {
        "base": gerund.load(adapter="none", attention="causal", pooling="mean", dtype=options.dtype),
        "bundled": gerund.load(dtype=options.dtype),
    }
    rows: list[Row] = []
    for shots in options.shots:
        tasks = with_options(select(["fine-tuning/banking77"], options.data), [f"fine-tuning.shots={shots}"])
        found: dict[str, list[float]] = {name: [] for name in models}
        for seed in range(options.seeds):
            systems: list[System] = [language_model_system(name, lm, cache_in(folder)) for name, lm in models.items()]
            config = settings(options, seed=seed)
            for one in evaluate(systems, tasks, config, folder=folder, reporter=progress).results:
                found[one.system].append(100 * one.score.value)
        rows.append({"shots": shots, **{name: mean_of(values) for name, values in found.items()}})
    heads = [
        Column("shots", "examples a class"),
        Column("base", "base", "%", 1),
        Column("bundled", "bundled model", "%", 1),
    ]
    return [Table("fine-tuning", "Fine-tuned on Banking77 (GUR's Figure 9), accuracy.", heads, rows)]


def expansions(options: argparse.Namespace) -> list[Table]:
    """Write queries anew, as GUR's Table II has them."""
    lm = gerund.load(dtype=options.dtype)
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=1)
    rows: list[Row] = [
        {"query": query, "expansions": " \u00b7 ".join(lm.expand(query, 4, sampling=sampling))} for query in QUERIES
    ]
    caption = (
        "GUR's Table II with the bundled model: all fillings, best first. The first two queries have words masked at "
        "random; in the others the gap is marked."
    )
    return [Table("expansions", caption, [Column("query", "query"), Column("expansions", "fillings")], rows)]


def answers(options: argparse.Namespace) -> list[Table]:
    """Ask questions in SQuAD's layout: what the bundled model answers, and what it cites."""
    systems: list[System] = [language_model_system("bundled", gerund.load(dtype=options.dtype))]
    tasks = with_options(select(["ask"], options.data), [f"ask.method={options.method}"])
    found = evaluate(systems, tasks, settings(options), folder=options.work / "answers", reporter=progress)
    rows: list[Row] = [
        {"task": one.task.removeprefix("ask/"), "questions": one.score.size,
         **{metric: round(100 * one.score.metrics[metric], 1) for metric in ANSWERS}}
        for one in found.results
    ]  # fmt: skip
    heads = [Column("task", "questions of"), Column("questions", "questions"),
             *(Column(metric, title, "%", 1) for metric, title in ANSWERS.items())]  # fmt: skip
    return [Table("answers", "Questions about paragraphs, answered by the bundled model's default.", heads, rows)]


def settings(options: argparse.Namespace, seed: int = 0) -> EvaluationConfig:
    """Return how everything is measured on test sets."""
    return EvaluationConfig(limit=options.limit, seed=seed, show_progress=False)


def millions(lm: LanguageModel) -> str:
    """Return how many million parameters a model without adapters has."""
    return f"{sum(one.numel() for one in lm.model.parameters()) / 1e6:.1f}"


def named(models: Sequence[str]) -> Mapping[str, str]:
    """Return folders by name, from `NAME=FOLDER`."""
    return dict(one.split("=", 1) for one in models)


def progress(task: Any, system: System, result: Result | None) -> None:
    """Say what was measured."""
    if result is not None:
        print(f"{task.name}, {system.label}: {result.score.value:.4f}", flush=True)


TABLES = {
    "vectors": vectors,
    "likelihoods": likelihoods,
    "plans": plans,
    "fine-tuning": fine_tuning,
    "expansions": expansions,
    "seeds": seeds,
    "answers": answers,
}
_ASKED_FOR = ("seeds", "answers")  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="scores, used again where they are")
    usual = [one for one in TABLES if one not in _ASKED_FOR]
    parser.add_argument("--tables", default=",".join(usual), help="which of them, with commas")
    parser.add_argument(
        "--models", nargs="*", default=[], help="NAME=FOLDER: more models for likelihoods, plans, seeds"
    )
    parser.add_argument("--plan-models", default="default", help="whose plans are measured, with commas")
    parser.add_argument("--plan-tasks", default=",".join(PLAN_TASKS), help="on which of its tasks, with commas")
    parser.add_argument("--peer", help="a model of sentence-transformers, for the table `vectors`")
    parser.add_argument("--limit", type=int, help="at most so many examples a task")
    parser.add_argument("--max-length", type=int, default=256, help="of the table `plans` (%(default)s)")
    parser.add_argument("--budget", type=int, default=60, help="settings tried on development data (%(default)s)")
    parser.add_argument("--shots", nargs="+", type=int, default=[10], help="examples a class to fine-tune on")
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each (%(default)s)")
    parser.add_argument("--method", default="auto", help="of the table `answers`: extractive, generate or auto")
    parser.add_argument("--dtype", default="auto", help="of the model's weights (%(default)s)")
    quick = {"limit": 8, "budget": 4, "tables": "plans", "plan_tasks": f"{DEV},chunking/conll2003", "max_length": 16}
    options = harness.parse(parser, argv, quick=quick)
    harness.report(options, __file__, [table for one in options.tables.split(",") for table in TABLES[one](options)])


if __name__ == "__main__":
    main()
