"""``gerund tune``: choose an encoder config, fusion weight or rerank measure on validation data."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import read_sample
from gerund.cli import options
from gerund.cli.eval import Limit, Prompts, Seed, Set
from gerund.cli.text_io import tell
from gerund.errors import ConfigError
from gerund.settings.ranking import MOST_HITS

if TYPE_CHECKING:
    from gerund.evaluation.task import EvaluationConfig, Task
    from gerund.evaluation.tuning import Tuned
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec

# What is chosen on when nobody says: cheap for every setting that is tried, and about both what texts mean and
# what kind they are.
_DEFAULT_KINDS = ("sts", "classification")
_RANKING_KINDS = ("retrieval",)
_BUDGET = 150
_METHODS = "recurrent,skips,layers,states,poolings,templates,prepend,reroute"


@options.takes(spec=options.model("MODEL", "max_length", "adapter", *options.TORCH))
def command(
    data: Annotated[Path, typer.Option(help="A folder with sts/, classification/, ...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The report's folder.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks with commas, or one each time, as in gerund eval. Default: sentence similarity and "
            "classification where they have a validation split."
        ),
    ] = None,
    plans: Annotated[str | None, typer.Option(help="Plans to try, with commas. [default: all]")] = None,
    pooling: Annotated[
        str | None, typer.Option(help="Poolings to try, with commas. [default: the model's own]")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods without training to try after the plans, with commas: recurrent (recurrent layers read both "
            "ways, where there are any), skips, layers, states, poolings, templates, prepend, reroute, and with "
            "--sample transforms; none for none."
        ),
    ] = _METHODS,
    sample: options.Sample = None,
    budget: Annotated[
        int, typer.Option(help="Most passes of the model to try; readings of a pass come with it.")
    ] = _BUDGET,
    fusion: Annotated[
        bool,
        typer.Option(
            "--fusion", help="Leave the plan, and choose what its vectors count where a search joins them with words."
        ),
    ] = False,
    rerank: Annotated[
        bool,
        typer.Option(
            "--rerank", help="Leave the plan, and choose the measure by which it re-ranks, and what that counts."
        ),
    ] = False,
    candidates: Annotated[
        int | None, typer.Option(help="With --rerank: documents of each query, BM25's first. [default: 20]")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the model with what was chosen here, as gerund convert does.")
    ] = None,
    limit: Limit = None,
    seed: Seed = 0,
    prompts: Prompts = "none",
    set_: Set = None,
    *,
    spec: "ModelSpec",
    as_json: options.Json = False,
) -> None:
    """Choose how to read a model as an encoder by scores on validation data.

    On 64 examples of each task: first the best k of every plan, then k and k0 of mask0+bidir around what did best,
    then one template or other method of each kind after the other. Each pass of the model is read in several ways:
    layers, states, poolings. The best passes go on to four times as many examples, with every reading and its
    transforms, and so on; the winner is the best on all examples, or on --limit. Layers that settings share are run
    once.

    Writes tuning.html with a curve for every plan, tuning.json with all that was tried, and gerund.json with the best
    setting. The same command continues where it was interrupted.

    With --fusion the model is used as it is, and 11 weights of its vectors relative to BM25 are compared on
    retrieval tasks; every text is encoded once. Writes fusion.json and gerund.json, in which gerund search finds the
    weight.

    With --rerank BM25's first documents for each query of retrieval tasks are ranked anew by every measure of gerund
    rerank, and 11 weights beside BM25's scores are compared; each document is read once. Writes rerank.json and
    gerund.json, in which gerund rerank and searches find measure and weight.

    For example:

        gerund tune default --data ./data -o tuned

        gerund tune ./model --data ./data --tasks sts/stsb -o tuned --save ./encoder

        gerund tune ./model --data ./data --limit 200 --sample texts.txt --budget 40 -o tuned

        gerund tune ./model --data ./data --plans mask0-bidir,inplace-bidir,mask0+bidir --budget 60 -o tuned

        gerund tune ./model --data ./data --tasks retrieval --fusion -o fused --save ./encoder

        gerund tune ./model --data ./data --tasks retrieval --rerank -o ranked --save ./ranker
    """
    from gerund.cli.eval import ProgressReporter, demand_data, report_folder
    from gerund.evaluation.search_space import PLANS, plans_named, require_settings
    from gerund.jobs.files import require_new_folder
    from gerund.models.sources import find

    # What is quick to find comes first: to know the tasks takes seconds, and the model more.
    if save is not None:
        require_new_folder(save, overwrite=False)
    for_plan = {"plans": plans, "pooling": pooling, "sample": sample, "methods": methods, "budget": budget}
    tune_weight = _weight_tuner(for_plan, candidates, fusion=fusion, rerank=rerank)
    kinds = _DEFAULT_KINDS if tune_weight is None else _RANKING_KINDS
    texts = [] if sample is None else read_sample(sample)
    names, more = plans_named(_names(plans)) or PLANS, [] if methods == "none" else _names(methods)
    if texts and "transforms" not in more:
        more.append("transforms")
    require_settings(names, _names(pooling), more, texts, budget)
    demand_data(data)
    lock = report_folder(output)
    find(spec.model)
    chosen, config = _chosen(
        ",".join(tasks) if tasks else None, data, set_ or [], kinds, limit=limit, seed=seed, prompts=prompts
    )
    if tune_weight is not None:
        with lock:
            model, report, line = tune_weight(spec, chosen, config, output)
        _save(model, spec.model, save)
        typer.echo(json.dumps(report, ensure_ascii=False) if as_json else line)
        return
    from gerund.entry import load
    from gerund.evaluation.tuning import require_tunable_tasks, tune

    require_tunable_tasks(chosen)
    lm = load(spec, runtime="torch")
    from gerund.reporting.tuning import adapter_sentence, write_tuning

    if (sentence := adapter_sentence(lm)) and not as_json:
        tell(f"{sentence}")
    with lock:
        # Settings share layers: many are encoded before the first score is there, and off a terminal no bar says so.
        n_texts = sum(len(set(task.texts(config))) for task in chosen)
        tell(f"{n_texts:,} texts in at most {budget} passes, the first of them on a part of the texts")
        done = tune(
            lm,
            chosen,
            config,
            plans=names,
            poolings=_names(pooling),
            methods=more,
            sample=texts,
            budget=budget,
            folder=output,
            reporter=ProgressReporter(),
        )
        page = write_tuning(output, done, lm, chosen, config)
    _save(done.chosen(lm), spec.model, save)
    if as_json:
        typer.echo((output / "tuning.json").read_text(encoding="utf-8"), nl=False)
    else:
        _print_choice(done, spec, page)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _chosen(
    names: str | None,
    data: Path,
    changes: list[str],
    default: tuple[str, ...],
    *,
    limit: int | None,
    seed: int,
    prompts: str,
) -> tuple[list["Task"], "EvaluationConfig"]:
    """Return what is chosen on: validation splits, or what there is where no task has one."""
    from gerund.evaluation.registry import prompt_set, select, tasks_in, with_options
    from gerund.evaluation.task import EvaluationConfig

    if names is None:
        tasks = [task for task in tasks_in(data) if task.kind in default and task.has_validation]
        if not tasks:
            kinds = " or ".join(default)
            raise ConfigError(f"{data} has no {kinds} task with a validation split; give --tasks")
    else:
        tasks = select(_names(names), data)
    fixed = [task.name for task in tasks if not task.reads_plan]
    if fixed:
        raise ConfigError(f"no plan improves the score of {', '.join(fixed)}")
    with_split = [task.name for task in tasks if task.has_validation]
    without = [task.name for task in tasks if not task.has_validation]
    if with_split and without:
        raise ConfigError(
            f"{', '.join(without)}: no validation split, while {with_split[0]} has one; leave the others out: --tasks "
            f"{','.join(with_split)}"
        )
    if without:
        tell(
            f"warning: {', '.join(without)}: no validation split, so the choice is made on the test set, "
            "and the chosen setting's score on it is flattered"
        )
    by_task = prompt_set(prompts, [task.name for task in tasks])
    config = EvaluationConfig(seed=seed, limit=limit, prompts=by_task, split="validation" if with_split else "test")
    return with_options(tasks, changes), config


# The model with what was chosen, what the report says, and a line of it.
Choice = tuple["LanguageModel", dict[str, Any], str]


def _weight_tuner(
    for_plan: dict[str, Any], candidates: int | None, *, fusion: bool, rerank: bool
) -> Callable[..., Choice] | None:
    """Return what chooses a weight, after refusing what it has no use for; None in a search for a plan."""
    if fusion and rerank:
        raise ConfigError("--fusion and --rerank choose different things; run one after the other")
    if candidates is not None and not (rerank and 1 < candidates <= MOST_HITS):
        raise ConfigError(f"--candidates is for --rerank, from 2 to {MOST_HITS}")
    if not fusion and not rerank:
        return None
    usual = {"methods": _METHODS, "budget": _BUDGET}
    for name, value in for_plan.items():
        if value != usual.get(name):
            option = "--fusion" if fusion else "--rerank"
            raise ConfigError(f"--{name} is for a search for a plan; with {option} the model is read as it is")
    return _tune_fusion if fusion else partial(_tune_rerank, candidates=candidates)


def _tune_fusion(spec: "ModelSpec", tasks: list["Task"], config: "EvaluationConfig", output: Path) -> Choice:
    """Choose the weight of the vectors, and write it down."""
    from gerund.cli.eval import ProgressReporter
    from gerund.entry import load
    from gerund.evaluation.tuning import require_retrieval_tasks, tune_fusion
    from gerund.reporting.tuning import write_weight

    require_retrieval_tasks(tasks)
    lm = load(spec, runtime="torch")
    done = tune_fusion(lm, tasks, config, folder=output, reporter=ProgressReporter())
    chosen = lm.with_encoder(replace(lm.encoder, fusion=done.best.weight))
    words, vectors = done.trials[0], done.trials[-1]
    line = (
        f"fusion {done.best.weight:g}: {100 * done.best.mean:.2f} (words alone {100 * words.mean:.2f}, vectors alone "
        f"{100 * vectors.mean:.2f})"
    )
    tell(f"{output / 'fusion.json'}")
    return chosen, write_weight(output, "fusion.json", done, chosen, config), line


def _tune_rerank(
    spec: "ModelSpec", tasks: list["Task"], config: "EvaluationConfig", output: Path, candidates: int | None
) -> Choice:
    """Choose the measure by which the model re-ranks, and its weight, and write them down."""
    from gerund.entry import load
    from gerund.evaluation.tuning import CANDIDATES, require_retrieval_tasks, tune_rerank
    from gerund.reporting.tuning import write_weight

    require_retrieval_tasks(tasks)
    lm = load(spec, runtime="torch")
    done = tune_rerank(lm, tasks, config, candidates=candidates or CANDIDATES, folder=output)
    best, base = done.best, done.baseline
    chosen = lm.with_encoder(replace(lm.encoder, rerank_by=best.by, rerank_weight=best.weight))  # type: ignore[arg-type]
    line = f"{best.by} {best.weight:g}: {100 * best.mean:.2f} (BM25's own order {100 * base.mean:.2f})"
    if best.mean <= base.mean:
        tell("no measure ranks BM25's documents better than BM25; leave re-ranking off")
    tell(f"{output / 'rerank.json'}")
    return chosen, write_weight(output, "rerank.json", done, chosen, config), line


def _save(chosen: "LanguageModel", model: str, folder: Path | None) -> None:
    if folder is None:
        return
    from gerund.exporting.formats import convert
    from gerund.models.sources import find

    convert(find(model), chosen, folder)


def _print_choice(done: "Tuned", spec: "ModelSpec", page: Path) -> None:
    best, baseline = done.best, done.baseline
    tried = len({trial.label for trial in done.trials})
    typer.echo(
        f"{best.label}: {100 * best.mean:.2f} (causal {100 * baseline.mean:.2f}), of {tried} settings tried in "
        f"{done.passes} passes"
    )
    plan, config = best.plan, best.config
    numbers = [(name, getattr(plan, name)) for name in ("k", "k0", "skips") if getattr(plan, name) is not None]
    numbers += [("recurrent", plan.recurrent)] if plan.recurrent != "causal" else []
    numbers += [(name, value) for name in ("adapter", "max_length") if (value := getattr(spec, name)) is not None]
    numbers += [("pooling", config.pooling), *((name, getattr(config, name)) for name in config.methods)]
    words = "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in numbers)
    sample = " --sample FILE" if "transform" in config.methods else ""
    typer.echo(f"try: gerund convert {shlex.quote(spec.model)} OUT --attention {plan.name}{words}{sample}")
    if done.untried:
        tell(f"{len(done.untried)} passes were not tried within the budget of {done.budget}: {_some(done.untried)}")
    by_reason: dict[str, list[str]] = {}
    for label, error in done.refused.items():
        by_reason.setdefault(str(error), []).append(label)
    for reason, labels in by_reason.items():
        settings = "1 setting was" if len(labels) == 1 else f"{len(labels)} settings were"
        tell(f"{settings} left out ({_some(labels)}): {reason}")
    tell(f"{page}")


def _some(labels: list[str], most: int = 3) -> str:
    """Return the first labels, and how many more there are.

    >>> _some(["a", "b", "c", "d", "e"])
    'a; b; c; and 2 more'
    """
    more = [f"and {len(labels) - most} more"] if len(labels) > most else []
    return "; ".join([*labels[:most], *more])
