"""What studies share: scripts that train arms with several seeds, evaluate each, and compare means over seeds.

Trainings and scores that lie in the work folder already are used again, so a study may be interrupted. A cell of a
study's table is the mean and the standard deviation over seeds. Knows recipes and tasks by name only; what is trained
and measured is each script's own.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from gerund.evaluation.run import cache_in, evaluate
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from results import Cell, mean_of

# How much of every task it scores.
QUICK_LIMIT = 16
# And to every recipe that reads texts: a few of them.
QUICK_TEXTS = ("data.sources=[{name: wiki, files: [wiki.test.jsonl], validation: [wiki.valid.jsonl], limit: 50}]",)
Metrics = dict[str, dict[str, float]]
# What `--quick` adds to every recipe: enough to see that trainings and tasks still fit together.
QUICK_RECIPE = ("steps=2", "schedule.warmup_steps=0", "data.validation_tokens=2048")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all studies."""
    made = harness.parser(doc)
    made.add_argument("--data", type=Path, required=True, help="the data folder; texts to train on are in its lm/")
    made.add_argument("--work", type=Path, required=True, help="trained models and scores, used again where they are")
    made.add_argument("--seeds", type=_numbers, default="0,1,2", help="with commas (%(default)s)")
    made.add_argument("--only", nargs="*", default=[], help="names of arms")
    made.add_argument("--set", nargs="*", default=[], help="more settings of the recipes, KEY=VALUE")
    return made


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def trained(recipe: str, overrides: Sequence[str], output: Path, more: Sequence[str] = ()) -> Path:
    """Return the folder of a model, trained unless it is there."""
    if not (output / "model").is_dir():
        train(load_recipe(recipe, [*overrides, f"output={output}", *more]), resume=True)
    return output / "model"


def measured(systems: Sequence[Any], tasks: Sequence[Any], options: argparse.Namespace) -> Metrics:
    """Return all metrics of one system by task: the last one; a hybrid is behind the one that it joins."""
    work, limit = options.work, QUICK_LIMIT if options.quick else getattr(options, "limit", None)
    system = systems_of(list(systems), cache=cache_in(work / "scores"))[-1]
    done = evaluate([system], tasks, EvaluationConfig(show_progress=False, limit=limit), folder=work / "scores")
    return {result.task: dict(result.score.metrics) for result in done.results}


def over_seeds(found: Sequence[Mapping[str, Mapping[str, float]]], task: str, metric: str, scale: float = 1) -> Cell:
    """Return one cell: a metric over the seeds that were measured on the task and have it, or None without any."""
    values = [scale * one[task][metric] for one in found if metric in one.get(task, {})]
    return mean_of(values) if values else None
