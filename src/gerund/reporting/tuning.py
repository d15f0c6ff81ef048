"""Write the report of `gerund tune`: score curves, all trials as JSON, and ``gerund.json``."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gerund.evaluation.systems.language_model import adapter_facts
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tuning import Trial, Tuned, TunedWeight
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models.saved_settings import settings_text
from gerund.reporting.comparison import PERCENTS, shown, trained_under
from gerund.reporting.plots import scores, style
from gerund.reporting.rendering import Picture, Wanted, bare_name, drawn, versions, write_html
from gerund.settings.encoder import CONFIG_FILE
from gerund.settings.model_spec import EncoderSpec
from gerund.version import __version__

FORMAT = 2


def write_tuning(
    folder: str | Path, done: Tuned, lm: LanguageModel, tasks: Sequence[Task], config: EvaluationConfig
) -> Path:
    """Write ``tuning.html``, ``tuning.json`` and ``gerund.json``; return the path of the page.

    Args:
        folder: of the report.
        done: what was tried.
        lm: the model.
        tasks: what the choice was made on.
        config: of the evaluation.

    Raises:
        ResourceError: the disk is full or refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    best = done.chosen(lm)
    settings = EncoderSpec.of_config(best.encoder, lm.n_layers)
    write_atomic(folder / CONFIG_FILE, settings_text(settings, best.fingerprint()))
    document = json.dumps(tuned_dict(done, lm, config), indent=1, ensure_ascii=False)
    write_atomic(folder / "tuning.json", document + "\n")
    gallery = drawn(_wanted(done, tasks))
    return write_html(
        folder / "tuning.html",
        "tuning.html.jinja",
        title=f"How to read {bare_name(lm.name)}",
        chosen=chosen_sentence(done, tasks),
        cautions=[caution for caution in (_caution(tasks, config), adapter_sentence(lm)) if caution],
        pictures=gallery.pictures,
        missing=gallery.missing,
        columns=[*(["mean"] if len(tasks) > 1 else []), *(task.name for task in tasks)],
        rows=_rows(done, tasks),
        facts_told=_facts(done, lm, tasks, config),
    )


def write_weight(
    folder: Path, name: str, done: TunedWeight, chosen: LanguageModel, config: EvaluationConfig
) -> dict[str, Any]:
    """Write a file of this name and ``gerund.json``; return the content of the former."""
    settings, best = EncoderSpec.of_config(chosen.encoder, chosen.n_layers), done.best
    write_atomic(folder / CONFIG_FILE, settings_text(settings, chosen.fingerprint()))
    document = {
        "format": FORMAT,
        "gerund": __version__,
        "packages": versions(),
        "model": bare_name(chosen.name),
        "fingerprint": chosen.fingerprint(),
        "config": config.to_dict(),
        "chosen": {"by": best.by, "weight": best.weight} if best.by else best.weight,
        "trials": [
            {
                **({"by": trial.by} if trial.by else {}),
                "weight": trial.weight,
                "mean": trial.mean,
                "scores": dict(trial.scores),
            }
            for trial in done.trials
        ],
    }
    write_atomic(folder / name, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return document


def tuned_dict(done: Tuned, lm: LanguageModel, config: EvaluationConfig) -> dict[str, Any]:
    """Return what was chosen and everything that was tried: the content of ``tuning.json``."""
    return {
        "format": FORMAT,
        "gerund": __version__,
        "packages": versions(),
        "model": bare_name(lm.name),
        "weights": lm.weights_hash,
        **adapter_facts(lm),
        "adapter_note": adapter_sentence(lm),
        "n_layers": done.n_layers,
        "config": config.to_dict(),
        "budget": done.budget,
        "passes": done.passes,
        "chosen": _trial_dict(done.best, done.n_layers),
        "baseline": _trial_dict(done.baseline, done.n_layers),
        "trials": [_trial_dict(trial, done.n_layers) for trial in done.trials],
        "refused": {label: str(error) for label, error in done.refused.items()},
        "not_tried": list(done.untried),
    }


def _trial_dict(trial: Trial, n_layers: int) -> dict[str, Any]:
    return {
        "label": trial.label,
        "mean": trial.mean,
        "scores": dict(trial.scores),
        "limit": trial.limit,
        "attention": trial.config.with_defaults(n_layers).attention.to_dict(),
        "pooling": trial.config.pooling,
        **{name: getattr(trial.config, name) for name in trial.config.methods},
    }


def chosen_sentence(done: Tuned, tasks: Sequence[Task]) -> str:
    """Say which setting won, and by how much over the causal model."""
    best, baseline = done.best, done.baseline
    unit = _unit(tasks)
    on = tasks[0].name if len(tasks) == 1 else f"the mean of {len(tasks)} tasks"
    score, before = shown(best.mean, unit), shown(baseline.mean, unit)
    tried = len({trial.label for trial in done.trials})
    if best is baseline:
        return f"None of {tried} settings is better than {baseline.label}: {before} on {on}."
    gain = shown(best.mean - baseline.mean, unit)
    return (
        f"{best.label} won: {score} on {on}, {gain} more than {baseline.label} ({before}). "
        f"{tried} settings were tried{_in_passes(done)}."
    )


def _in_passes(done: Tuned) -> str:
    """Say in how many passes, and on how many examples what was not among the best was measured."""
    limits = list(dict.fromkeys(trial.limit for trial in done.trials if trial.rung < done.best.rung))
    on = f", all of them on {limits[0]} examples a task and the best ones on more" if limits else ""
    passes = done.passes
    return f" in {passes} passes{on}" if passes < len(done.trials) else on


def _unit(tasks: Sequence[Task]) -> str:
    """Return the unit of the mean: that of all tasks, or bits where they differ, which are shown as they are."""
    units = {task.unit for task in tasks}
    return units.pop() if len(units) == 1 else "bits"


def _caution(tasks: Sequence[Task], config: EvaluationConfig) -> str:
    if config.split == "validation":
        return ""
    names = ", ".join(task.name for task in tasks)
    return f"The choice was made on the test split of {names}: the winner's score there is flattered."


def adapter_sentence(lm: LanguageModel) -> str:
    """Say what an adapter, which one plan was trained for, means for a choice among plans; empty without one."""
    facts = adapter_facts(lm)
    if not facts:
        return ""
    begin = trained_under(facts) if "adapter_plan" in facts else f"The adapter {facts['adapter_name']} was trained"
    if lm.bundled is not None:
        return f"{begin} and is used in that setting alone; in all others the weights alone were tried."
    return (
        f"{begin}, and is active under every plan that was tried, so that the choice favours its own; --adapter none "
        "tunes the weights alone."
    )


def _rows(done: Tuned, tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return every trial, the best first."""
    rows = []
    order = {id(trial): (trial is not done.best, -trial.rung, -trial.mean, trial.converted) for trial in done.trials}
    for trial in sorted(done.trials, key=lambda trial: order[id(trial)]):
        numbers = [(shown(trial.mean, _unit(tasks)), trial.mean)] if len(tasks) > 1 else []
        numbers += [(shown(trial.scores[task.name], task.unit), trial.scores[task.name]) for task in tasks]
        smaller = f" (on {trial.limit} examples)" if trial.rung < done.best.rung else ""
        rows.append({"label": f"{trial.label}{smaller}", "chosen": trial is done.best, "numbers": numbers})
    return rows


def _facts(done: Tuned, lm: LanguageModel, tasks: Sequence[Task], config: EvaluationConfig) -> list[tuple[str, str]]:
    prompts = [f"{task.name}: {prompt!r}" for task in tasks if (prompt := task.prompt(config)) is not None]
    files = dict.fromkeys(path.name for task in tasks for path in task.files)
    return [
        ("Model", f"{bare_name(lm.name)}, {lm.n_layers} layers, {lm.dimensions} dimensions"),
        ("Hash of the weights", lm.weights_hash),
        ("Computed in", str(lm.compute_dtype).removeprefix("torch.")),
        ("Longest text (tokens)", "no limit" if lm.max_length is None else str(lm.max_length)),
        ("Tasks", ", ".join(task.name for task in tasks)),
        ("Data files", ", ".join(files) or "none"),
        ("Split", config.split),
        ("Limit", "none, all examples" if config.limit is None else f"at most {config.limit} examples a task"),
        ("Seed", str(config.seed)),
        ("Prompts", "; ".join(prompts) or "none by task"),
        ("Poolings", ", ".join(dict.fromkeys(trial.config.pooling for trial in done.trials))),
        ("Settings tried", str(len({trial.label for trial in done.trials}))),
        ("Passes of the model", f"{done.passes} of at most {done.budget}"),
        *(("Left out", f"{label}: {error}") for label, error in done.refused.items()),
        *([("Not tried within the budget", "; ".join(done.untried))] if done.untried else []),
        ("gerund", __version__),
        ("Packages", ", ".join(f"{name} {number}" for name, number in versions().items())),
    ]


def _wanted(done: Tuned, tasks: Sequence[Task]) -> Iterator[Wanted]:
    """Yield curves over k of the winner's pooling: of the mean, of ``mask0+bidir`` by k0, and of every task."""
    pooling = done.best.config.pooling
    mean = tasks[0].name if len(tasks) == 1 else f"Mean of {len(tasks)} tasks"
    percent = _unit(tasks) in PERCENTS
    alike = (trial for trial in done.first if trial.plan.name == "causal" and trial.is_plain_with(pooling))
    causal = next(alike, done.baseline)
    if curves := done.curves(pooling):
        yield f"{mean} against k", partial(_curves, curves, mean, causal.mean, percent)
    if curves := done.k0_curves(pooling):
        yield "mask0+bidir against k", partial(_curves, curves, f"{mean}: mask0+bidir", causal.mean, percent)
    for task in tasks if len(tasks) > 1 else ():
        if curves := done.curves(pooling, task.name):
            baseline, percent = causal.scores[task.name], task.unit in PERCENTS
            yield f"{task.name} against k", partial(_curves, curves, task.name, baseline, percent)


def _curves(curves: dict[str, list[tuple[int, float]]], title: str, baseline: float, percent: bool) -> Picture:
    figure = scores.k_curves(curves, title=title, ylabel="score", baseline=baseline, percent=percent)
    best = {name: max(points, key=lambda point: point[1]) for name, points in curves.items()}
    return Picture(
        title,
        "Score against the number of converted layers; the best of every curve is ringed, the dotted line is the "
        "causal model with the same pooling.",
        "Curves of "
        + "; ".join(f"{name}, best {points[1]:.4f} at k={points[0]}" for name, points in best.items())
        + f". Causal {baseline:.4f}.",
        style.picture(figure),
        "Curves",
    )
