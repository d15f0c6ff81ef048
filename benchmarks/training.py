"""Trains the embedded default model in the papers' ways and measures what each way brings, several seeds each.

    python benchmarks/training.py unimae --data ../shared/data --work /tmp/study [--seeds 0,1,2] [--only NAME ...]

Studies: `unimae` (UniMAE and SimCSE beside mean, last token, echo, MNTP, MNTP + SimCSE), `perplexity` (what each
costs when it is merged), `mask-ratio` (UniMAE's Figure 3a), `magnet` (infilling, word tasks, similarity),
`objectives` (MAGNET's Table 6), `repetition` (its Figure 6) and `mtp` (its Figure 7). Trainings and scores that lie
in the work folder already are used again, so a study may be interrupted. Texts to train on are in DATA/lm; what is
measured was not trained on.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gerund.attention.plan import AttentionPlan
from gerund.config import EncoderConfig
from gerund.entry import load
from gerund.evaluation.registry import select, with_options
from gerund.evaluation.run import cache_in, contenders_of, evaluate
from gerund.evaluation.task import Settings
from gerund.language_model import LanguageModel
from gerund.training.recipe import load_recipe
from gerund.training.run import train

REPRESENTATION = (
    "sts/stsb", "sts/sts12", "retrieval/medline", "retrieval/cranfield", "linear-probe/banking77",
    "clustering/stackoverflow",
)  # fmt: skip
WORDS = ("ner/conll2003", "pos/conll2003", "chunking/conll2003")
INFILLING = ("infilling/storycloze2016", "infilling/wiki")


@dataclass(frozen=True)
class Arm:
    """One way that is measured.

    Attributes:
        name: what the table calls it.
        recipes: trained one after the other, each on the former's folder, with their overrides.
        reading: for an untrained model, how it is read.
        merged: measure the model with the adapter in its weights.
    """

    name: str
    recipes: tuple[tuple[str, tuple[str, ...]], ...] = ()
    reading: Callable[[EncoderConfig], EncoderConfig] | None = None
    merged: bool = False


def read_as(name: str, pooling: str = "mean", **changes: Any) -> Callable[[EncoderConfig], EncoderConfig]:
    """Return a reading of an untrained model."""
    return lambda config: replace(config, attention=AttentionPlan(name), pooling=pooling, **changes)


MEAN = Arm("mean", reading=read_as("causal"))
LAST = Arm("last token", reading=read_as("causal", "last", append_eos=True))
ECHO = Arm("echo", reading=read_as("echo"))
UNIMAE = Arm("UniMAE", (("unimae-default", ()),))
UNIMAE_CAUSAL = Arm("UniMAE + causal", (("unimae-causal-default", ()),))
UNIMAE_SIMCSE = Arm("UniMAE + SimCSE", (("unimae-simcse-default", ()),))
# The default recipe's rate pulls a small model away from what its own head reads; this one hardly does.
UNIMAE_SLOW = Arm("UniMAE, rate 1e-4", (("unimae-default", ("optimizer.learning_rate=1e-4",)),))
MNTP = Arm("MNTP", (("llm2vec-mntp-default", ()),))
MNTP_SIMCSE = Arm("MNTP + SimCSE", (("llm2vec-mntp-default", ()), ("llm2vec-simcse-default", ())))
MAGNET = Arm("MAGNET", (("magnet-default", ()),))


# Shorter runs where many are compared; MAGNET's switch stays at four fifths of the steps (Appendix A: 3400 of 4200).
SHORT_STEPS = 100


def _of_magnet(*kinds: str) -> tuple[str, ...]:
    """Return the overrides for a short training by some of MAGNET's objectives."""
    weights = {"mntp": "1", "msg": "1", "sscl": f"[[0, 0], [{SHORT_STEPS * 4 // 5}, 0.3]]"}
    if kinds == ("sscl",):
        weights["sscl"] = "1"
    chosen = [f"objectives.{kind}.weight={weight if kind in kinds else 0}" for kind, weight in weights.items()]
    return (f"steps={SHORT_STEPS}", *chosen)


@dataclass(frozen=True)
class Study:
    """What is compared, and on what."""

    arms: tuple[Arm, ...]
    tasks: tuple[str, ...]
    options: tuple[str, ...] = ()


STUDIES = {
    "unimae": Study(
        (MEAN, LAST, ECHO, UNIMAE, UNIMAE_SLOW, UNIMAE_CAUSAL, UNIMAE_SIMCSE, MNTP, MNTP_SIMCSE), REPRESENTATION
    ),
    "perplexity": Study(
        (
            MEAN,
            *(
                replace(arm, merged=True)
                for arm in (UNIMAE, UNIMAE_SLOW, UNIMAE_CAUSAL, UNIMAE_SIMCSE, MNTP, MNTP_SIMCSE, MAGNET)
            ),
        ),
        ("perplexity/wiki", "perplexity/books"),
    ),
    "mask-ratio": Study(
        tuple(
            Arm(f"p_mar {ratio}", (("unimae-default", (f"steps={SHORT_STEPS}", f"objectives.unimae.p_mar={ratio}")),))
            for ratio in (0.0, 0.2, 0.4, 0.6, 0.8)
        ),
        ("sts/stsb", "sts/sts12", "retrieval/medline"),
    ),
    "magnet": Study((MEAN, LAST, MNTP, MAGNET), (*INFILLING, *WORDS, "sts/stsb", "sts/sts12")),
    "objectives": Study(
        tuple(
            Arm(" + ".join(kinds).upper(), (("magnet-default", _of_magnet(*kinds)),))
            for kinds in (("mntp",), ("msg",), ("sscl",), ("mntp", "msg"), ("sscl", "msg"), ("mntp", "msg", "sscl"))
        ),
        (*WORDS, "sts/stsb", "sts/sts12", *INFILLING),
    ),
    "repetition": Study(
        (MEAN, *(replace(arm, merged=True) for arm in (MNTP, MAGNET))), ("writing/wiki",), ("writing.samples=64",)
    ),
}


def trained(arm: Arm, seed: int, data: Path, work: Path) -> Path:
    """Return the folder of an arm's model, trained unless it lies there already."""
    folder = Path()
    for number, (name, overrides) in enumerate(arm.recipes):
        key = "-".join([name, *(text.replace("objectives.", "") for text in overrides), f"seed{seed}"])
        output = work / "runs" / key.replace("/", "_")
        if not (output / "model").is_dir():
            settings = [f"data.folder={data / 'lm'}", f"data.cache={work / 'cache'}", f"output={output}"]
            settings += [f"seed={seed}", *overrides, *([f"model.base={folder}"] if number else [])]
            train(load_recipe(name, settings), resume=True)
        folder = output / "model"
    return folder


def measured(arm: Arm, seed: int, study: Study, data: Path, work: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of every task for one arm and seed."""
    lm: LanguageModel = (
        load(trained(arm, seed, data, work)) if arm.recipes else load(adapter="none", attention="mask0-bidir")
    )
    if arm.merged:
        merged = work / "merged" / f"{arm.name}-{seed}"
        if not merged.is_dir():
            lm.export(merged, "merged")
        lm = load(merged)
    if arm.reading is not None:
        lm = lm.with_encoder(arm.reading(lm.encoder))
    tasks = with_options(select(list(study.tasks), data), list(study.options))
    [contender] = contenders_of([lm], cache=cache_in(work / "scores"))
    settings = Settings(show_progress=False)
    done = evaluate([contender], tasks, settings, folder=work / "scores")
    return {result.task: dict(result.score.metrics) for result in done.results}


def rows(study: Study, seeds: list[int], only: list[str], data: Path, work: Path) -> Iterator[tuple[str, list[Any]]]:
    """Yield each arm's name with its metrics by seed."""
    for arm in study.arms:
        if only and arm.name not in only:
            continue
        # An untrained model is the same under every seed.
        found = [measured(arm, seed, study, data, work) for seed in (seeds if arm.recipes else seeds[:1])]
        yield arm.name, found


def spread(values: list[float]) -> str:
    """Return the mean and the standard deviation of a few numbers."""
    mean = statistics.fmean(values)
    return f"{mean:.4g} ± {statistics.stdev(values):.2g}" if len(values) > 1 else f"{mean:.4g}"


def main() -> None:
    """Run a study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=[*STUDIES, "mtp"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", nargs="*", default=[])
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.study == "mtp":
        masked_prediction(seeds, arguments.data, arguments.work)
        return
    study = STUDIES[arguments.study]
    whole = {}
    for name, found in rows(study, seeds, arguments.only, arguments.data, arguments.work):
        whole[name] = found
        print(name, flush=True)
        for task in found[0]:
            metrics = {key: spread([one[task][key] for one in found]) for key in found[0][task]}
            print(f"    {task:32} " + "  ".join(f"{key} {value}" for key, value in metrics.items()), flush=True)
    (arguments.work / f"{arguments.study}.json").write_text(json.dumps(whole, indent=1), "utf-8")


def masked_prediction(seeds: list[int], data: Path, work: Path) -> None:
    """Print the validation loss of masked tokens by step, predicted from the position before and from their own."""
    for predict in ("next", "same"):
        overrides = (f"objectives.mntp.predict={predict}", f"steps={SHORT_STEPS}", "eval_steps=10")
        arm = Arm(predict, (("llm2vec-mntp-default", overrides),))
        curves = []
        for seed in seeds:
            log = trained(arm, seed, data, work).parent / "log.jsonl"
            lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
            curves.append({line["step"]: line["val_mntp"] for line in lines if "val_mntp" in line})
        print(f"predict: {predict}")
        for step in curves[0]:
            print(f"    step {step:5}  validation loss {spread([curve[step] for curve in curves])}")


if __name__ == "__main__":
    sys.exit(main())
