"""Trains the bundled model in the papers' ways and measures what each way brings, several seeds each.

    python benchmarks/training.py unimae --data ../shared/data --work /tmp/study [--seeds 0,1,2] [--only NAME ...]

Studies: `unimae` (UniMAE and SimCSE beside mean, last token, echo, MNTP, MNTP + SimCSE), `perplexity` (what each costs
when it is merged), `mask-ratio` (UniMAE's Figure 3a), `magnet` (infilling, word tasks, similarity), `objectives`
(MAGNET's Table 6), `positives` (section 3.2.2), `repetition` (Figure 6) and `mtp` (Figure 7). Trainings and scores that
lie in the work folder already are used again. Texts to train on are in DATA/lm; what is measured was not trained on.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from typing import Any

import harness
import study
from gerund.entry import load
from gerund.evaluation.registry import select, with_options
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from results import Column, Row, Table, mean_of

REPRESENTATION = (
    "sts/stsb", "sts/sts12", "retrieval/medline", "retrieval/cranfield", "linear-probe/banking77",
    "clustering/stackoverflow",
)  # fmt: skip
WORDS = ("ner/conll2003", "chunking/conll2003", "pos/conll2003")
INFILLING = ("infilling/storycloze2016", "infilling/wiki")
# The metrics of a task that the table shows: their titles where not the data's, unit, digits, which end is better.
METRICS: dict[str, tuple[tuple[str, str, str, int, str], ...]] = {
    "sts": (("cosine_spearman", "", "%", 1, "higher"),),
    "retrieval": (("ndcg_at_10", "", "%", 1, "higher"),),
    "linear-probe": (("accuracy", "", "%", 1, "higher"),),
    "clustering": (("v_measure", "", "%", 1, "higher"),),
    "ner": (("f1", "names", "%", 1, "higher"),),
    "chunking": (("f1", "chunks", "%", 1, "higher"),),
    "pos": (("accuracy", "parts of speech", "%", 1, "higher"),),
    "infilling": (("infill", "", "", 1, "lower"),),
    "perplexity": (("perplexity", "", "", 1, "lower"),),
    "writing": (("rep_4", "repeated 4-grams", "%", 1, "lower"), ("rep_sen", "repeated sentences", "%", 1, "lower")),
}


@dataclass(frozen=True)
class Arm:
    """One way that is measured.

    Attributes:
        name: what the table calls it.
        recipes: trained one after the other, each on the former's folder, with their overrides.
        encoder: for an untrained model, its encoder config.
        merged: measure the model with the adapter in its weights.
    """

    name: str
    recipes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    encoder: Callable[[EncoderConfig], EncoderConfig] | None = None
    merged: bool = False


def untrained(name: str, plan: str, pooling: str = "mean", **changes: Any) -> Arm:
    """Return an arm without training."""
    attention = AttentionPlan(plan)
    return Arm(name, encoder=lambda config: replace(config, attention=attention, pooling=pooling, **changes))


MEAN = untrained("mean, untrained", "causal")
LAST = untrained("last token, untrained", "causal", "last", append_eos=True)
ECHO = untrained("echo, untrained", "echo")
UNIMAE = Arm("UniMAE", (("unimae-default", ()),))
UNIMAE_CAUSAL = Arm("UniMAE + causal", (("unimae-causal-default", ()),))
UNIMAE_SIMCSE = Arm("UniMAE + SimCSE", (("unimae-simcse-default", ()),))
# The default recipe's rate pulls a small model away from what its own head takes; this one hardly does.
UNIMAE_SLOW = Arm("UniMAE, rate 1e-4", (("unimae-default", ("optimizer.learning_rate=1e-4",)),))
MNTP = Arm("MNTP", (("llm2vec-mntp-default", ()),))
MNTP_SIMCSE = Arm("MNTP + SimCSE", (("llm2vec-mntp-default", ()), ("llm2vec-simcse-default", ())))
MAGNET = Arm("MAGNET", (("magnet-default", ()),))
TRAINED = (UNIMAE, UNIMAE_SLOW, UNIMAE_CAUSAL, UNIMAE_SIMCSE, MNTP, MNTP_SIMCSE)

# Shorter runs where many are compared; MAGNET's switch stays at four fifths of the steps (Appendix A: 3400 of 4200).
SHORT_STEPS = 100
# Studies whose tasks are all in percent, so that their mean says something.
AVERAGED = ("unimae", "mask-ratio", "positives")


def _of_magnet(*kinds: str) -> Arm:
    """Return a short training by some of MAGNET's objectives."""
    weights = {"mntp": "1", "msg": "1", "sscl": f"[[0, 0], [{SHORT_STEPS * 4 // 5}, 0.3]]"}
    if kinds == ("sscl",):
        weights["sscl"] = "1"
    chosen = [f"objectives.{kind}.weight={weight if kind in kinds else 0}" for kind, weight in weights.items()]
    return Arm(" + ".join(kinds).upper(), (("magnet-default", (f"steps={SHORT_STEPS}", *chosen)),))


def _by_positives(name: str, *settings: str) -> Arm:
    """Return a short training by MAGNET's contrastive objective alone, with other positives."""
    [(recipe, alone)] = _of_magnet("sscl").recipes
    return Arm(name, ((recipe, (*alone, *(f"objectives.sscl.{setting}" for setting in settings))),))


@dataclass(frozen=True)
class Study:
    """What is compared, and on what."""

    caption: str
    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    options: tuple[str, ...] = ()


STUDIES = {
    "unimae": Study(
        "UniMAE and SimCSE beside MNTP and no training: Spearman for STS, nDCG@10 for retrieval, accuracy of a linear "
        "probe, V-measure.",
        (MEAN, LAST, ECHO, *TRAINED),
        REPRESENTATION,
    ),
    "perplexity": Study(
        "Perplexity of the test sets with the adapter merged into the weights; with the adapter inactive it is the "
        "base's to the last bit.",
        (replace(MEAN, name="base"), *(replace(arm, merged=True) for arm in (*TRAINED, MAGNET))),
        ("perplexity/wiki", "perplexity/books"),
    ),
    "mask-ratio": Study(
        f"UniMAE with other fractions of the input masked, {SHORT_STEPS} steps each (UniMAE's Figure 3a).",
        tuple(
            Arm(f"p_mar {ratio}", (("unimae-default", (f"steps={SHORT_STEPS}", f"objectives.unimae.p_mar={ratio}")),))
            for ratio in (0.0, 0.2, 0.4, 0.6, 0.8)
        ),
        ("sts/stsb", "sts/sts12", "retrieval/medline"),
    ),
    "magnet": Study(
        "MAGNET: perplexity of hidden story sentences and Wikipedia spans, F1 of names and of chunks, accuracy of "
        "parts of speech, Spearman.",
        (MEAN, LAST, MNTP, MAGNET),
        (*INFILLING, *WORDS, "sts/stsb", "sts/sts12"),
    ),
    "objectives": Study(
        f"MAGNET's objectives alone and together, {SHORT_STEPS} steps each (MAGNET's Table 6).",
        tuple(
            _of_magnet(*kinds)
            for kinds in (("mntp",), ("msg",), ("sscl",), ("mntp", "msg"), ("sscl", "msg"), ("mntp", "msg", "sscl"))
        ),
        (*WORDS, "sts/stsb", "sts/sts12", *INFILLING),
    ),
    "positives": Study(
        f"MAGNET's contrastive objective alone by what its positives are, {SHORT_STEPS} steps each: Spearman, nDCG@10, "
        "V-measure.",
        (
            LAST,
            _by_positives("words left out, swapped and cropped"),
            _by_positives("three words of ten written anew", "rewritten=0.3", "deletion=0", "swap=0", "crop=1"),
            _by_positives("written anew, then left out, swapped and cropped", "rewritten=0.3"),
        ),
        ("sts/stsb", "sts/sts12", "sts/sts13", "sts/sts14", "retrieval/medline", "clustering/stackoverflow"),
    ),
    "repetition": Study(
        "Repetition in 64 continuations of Wikipedia articles by merged models (MAGNET's Figure 6).",
        (replace(MEAN, name="base"), *(replace(arm, merged=True) for arm in (MNTP, MAGNET))),
        ("writing/wiki",),
        ("writing.samples=64",),
    ),
}


def trained(arm: Arm, seed: int, options: argparse.Namespace) -> Path:
    """Return the folder of an arm's model, trained unless it lies there already."""
    folder, data, work = Path(), options.data / "lm", options.work
    for number, (name, overrides) in enumerate(arm.recipes):
        # What is set beside a study's own settings may be long, so that a folder's name has only its digest.
        more = [blake2b(" ".join(options.set).encode(), digest_size=6).hexdigest()] if options.set else []
        key = "-".join([name, *(text.replace("objectives.", "") for text in overrides), *more, f"seed{seed}"])
        settings = [f"data.folder={data}", f"data.cache={work / 'cache'}", f"seed={seed}"]
        settings += [*overrides, *options.set, *([f"model.base={folder}"] if number else [])]
        folder = study.trained(name, settings, work / "runs" / key.replace("/", "_"))
    return folder


def measured(arm: Arm, seed: int, chosen: Study, options: argparse.Namespace) -> study.Metrics:
    """Return the metrics of every task for one arm and seed."""
    lm: LanguageModel = (
        load(trained(arm, seed, options)) if arm.recipes else load(adapter="none", attention="mask0-bidir")
    )
    if arm.merged:
        merged = options.work / "merged" / f"{arm.name}-{seed}"
        if not merged.is_dir():
            lm.export(merged, "merged")
        lm = load(merged)
    if arm.encoder is not None:
        lm = lm.with_encoder(arm.encoder(lm.encoder))
    tasks = with_options(select(list(chosen.tasks), options.data), list(chosen.options))
    return study.measured([lm], tasks, options)


def table_of(name: str, chosen: Study, options: argparse.Namespace) -> Table:
    """Train and measure every arm of a study."""
    rows: list[Row] = []
    everything = {}
    columns = shown(chosen)
    for arm in chosen.arms:
        if options.only and arm.name not in options.only:
            continue
        # An untrained model is the same under every seed.
        seeds = options.seeds if arm.recipes else options.seeds[:1]
        found = everything[arm.name] = [measured(arm, seed, chosen, options) for seed in seeds]
        row: Row = {"arm": arm.name, "seeds": len(seeds) if arm.recipes else None}
        for column, task, metric in columns:
            row[column.key] = study.over_seeds(found, task, metric, 100 if column.unit == "%" else 1)
            if row[column.key] is None:
                raise KeyError(f"{task} has no {metric}, but {', '.join(found[0][task])}")
        if name in AVERAGED:
            row["mean"] = mean_of([100 * fmean(one[task][metric] for _, task, metric in columns) for one in found])
        rows.append(row)
    (options.work / f"{name}.json").write_text(json.dumps(everything, indent=1), encoding="utf-8")
    last = [Column("mean", "mean", "%", 1, "higher"), Column("seeds", "seeds")]
    return Table(
        name, chosen.caption, [Column("arm", "trained by"), *(column for column, _, _ in columns), *last], rows
    )


def shown(chosen: Study) -> list[tuple[Column, str, str]]:
    """Return each column with its task and metric."""
    found = []
    for task in chosen.tasks:
        kind, _, data = task.partition("/")
        for metric, title, unit, digits, better in METRICS[kind]:
            found.append((Column(f"{task} {metric}", title or data, unit, digits, better), task, metric))
    return found


def masked_prediction(options: argparse.Namespace) -> Table:
    """Compare masked tokens predicted from the position before with those predicted from their own."""
    steps: set[int] = set()
    rows: list[Row] = []
    for predict, name in (("next", "by the output before (MNTP)"), ("same", "by their own (MTP)")):
        overrides = (f"objectives.mntp.predict={predict}", f"steps={SHORT_STEPS}", "eval_steps=10")
        curves = []
        for seed in options.seeds:
            log = trained(Arm(predict, (("llm2vec-mntp-default", overrides),)), seed, options).parent / "log.jsonl"
            lines = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n") if line]
            curves.append({line["step"]: line["val_mntp"] for line in lines if "val_mntp" in line})
        steps |= set(curves[0])
        rows.append({"arm": name, **{str(step): mean_of([one[step] for one in curves]) for step in curves[0]}})
    columns = [
        Column("arm", "masked tokens are predicted"),
        *(Column(str(s), f"step {s}", "", 2) for s in sorted(steps)),
    ]
    return Table("mtp", "Validation loss of masked tokens by step, nats a token (MAGNET's Figure 7).", columns, rows)


def main(argv: list[str] | None = None) -> None:
    """Run a study."""
    parser = study.parser(__doc__)
    parser.add_argument("study", choices=[*STUDIES, "mtp"])
    quick = {"seeds": [0], "set": [*study.QUICK_RECIPE, *study.QUICK_TEXTS], "only": [MEAN.name, UNIMAE.name]}
    options = harness.parse(parser, argv, quick=quick)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.study == "mtp":
        table = masked_prediction(options)
    else:
        chosen = STUDIES[options.study]
        if options.quick:
            chosen = replace(chosen, tasks=chosen.tasks[:1])
        table = table_of(options.study, chosen, options)
    harness.report(options, __file__, [table])


if __name__ == "__main__":
    main()
