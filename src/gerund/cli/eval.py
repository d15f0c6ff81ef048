"""``gerund eval``: evaluate models, attention plans and BM25 on tasks, and write a report."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import read_sample
from gerund.cli import options
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError, OutputExistsError
from gerund.settings.model_spec import parse_encoder_spec

if TYPE_CHECKING:
    from gerund.evaluation.run import Cost, Evaluation, Result
    from gerund.evaluation.systems.base import SentenceTransformersSystem, System
    from gerund.evaluation.task import Task
    from gerund.settings.model_spec import ModelSpec

Data = Annotated[
    Path | None,
    typer.Option(help="A folder with sts/, retrieval/, classification/, ...; see docs/reference/evaluation.md."),
]
Limit = Annotated[
    int | None,
    typer.Option(
        help="Use at most this many examples of each task, for a quick look; training sets of classifiers stay whole."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of all sampling.")]
Prompts = Annotated[
    str, typer.Option(help="Instructions for each task: none, lbw, magnet, or a YAML file of prompts by task or kind.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="An option of a task, KIND.OPTION=VALUE; may be repeated.")
]


@options.takes(spec=options.model("max_length", "adapter", *options.MACHINE), where=options.machines())
def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folders or hub ids; default for the bundled model; bm25 for BM25, which only ranks; hybrid for "
            "each model once more, its ranking joined with BM25's (hybrid:rrf by places, hybrid:0.4 with that weight "
            "of the vectors); index for each model's index, as gerund search asks it (index:words, index:vectors, "
            "index:rerank, followed by ,whole, ,late, ,float16 or ,binary); st:FOLDER or st:ID for a model of "
            "sentence-transformers, which only encodes.",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks with commas, or one each time: names (sts/stsb), kinds (retrieval), sides (representation, "
            "tokens, generation), all, MTEB15, MTEB names, lm-eval/NAME."
        ),
    ] = None,
    data: Data = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The report's folder.")] = None,
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="An encoder config for every model: PLAN[:NAME=VALUE,...], such as mask0-bidir:k=4,pooling=last; may "
            "be repeated. Left out, the models' own."
        ),
    ] = None,
    sample: options.Sample = None,
    *,
    spec: "ModelSpec",
    limit: Limit = None,
    seed: Seed = 0,
    prompts: Prompts = "none",
    set_: Set = None,
    validation: Annotated[bool, typer.Option("--validation", help="Score the validation splits.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="Print the tasks that a folder holds, and their options.")
    ] = False,
    where: options.Machines,
    pictures: Annotated[bool, typer.Option(help="Draw pictures into the report.")] = True,
    as_json: options.Json = False,
) -> None:
    """Measure what a model is worth as an encoder and as a writer, and compare models and plans side by side.

    Writes a folder with results.json, report.html, every finished score and the embeddings. The same command continues
    where it was interrupted; with other models or tasks it adds to the report. Scores of representation tasks are
    computed by mteb's own evaluators.

    With --workers, or --engine ray, other processes encode whole texts, each with the model; words, rankings by tokens
    and all that is generated stay in this one.

    For example:

        gerund eval default --tasks sts,retrieval --data ./data -o report

        gerund eval ./model bm25 hybrid --tasks retrieval --data ./data --plan causal --plan mask0-bidir:k=6 -o report

        gerund eval ./model --tasks all --data ./data --limit 200 -o report

        gerund eval ./model st:./all-MiniLM-L6-v2 --tasks representation --data ./data -o report

        gerund eval ./model --tasks MTEB15 --prompts lbw -o report

        gerund eval ./model --tasks retrieval --data ./data --workers 8 -o report

        gerund eval --list --data ./data
    """
    from gerund.jobs.engine import runs_in_process

    if list_:
        _list(data)
        return
    if not tasks or output is None:
        raise ConfigError("give --tasks and -o REPORT, or --list to see what a folder of data holds")
    # What is quick to find comes first: to know the tasks takes seconds, and the models more.
    columns = [parse_encoder_spec(text) for text in plan or []]
    texts = [] if sample is None else read_sample(sample)
    demand_data(data)
    lock = report_folder(output)
    from gerund.evaluation.task import EvaluationConfig

    config = EvaluationConfig(seed=seed, limit=limit, split="validation" if validation else "test")
    models = models or [options.DEFAULT_MODEL]
    machines = where.start(usual=1)
    _check_names(models)
    chosen = _tasks(",".join(tasks), data, set_ or [], validation=validation)
    from gerund.evaluation.registry import document_prompts, prompt_set
    from gerund.evaluation.run import cache_in, evaluate
    from gerund.evaluation.systems.language_model import encoded_by
    from gerund.evaluation.systems.selection import systems_of

    names = [task.name for task in chosen]
    config = replace(config, prompts=prompt_set(prompts, names), document_prompts=document_prompts(prompts, names))
    systems = systems_of(_systems(models, spec), columns, cache=cache_in(output), sample=texts)
    with lock, nullcontext() if runs_in_process(machines) else encoded_by(machines, systems, threads=where.threads):
        done = evaluate(systems, chosen, config, folder=output, reporter=ProgressReporter(len(chosen) * len(systems)))
        _write(output, done, pictures=pictures, as_json=as_json)
        _print_costs(done)


def _list(data: Path | None) -> None:
    """Print what a folder holds, a kind a paragraph: its tasks, then its options."""
    from gerund.evaluation.registry import SIDES, option_help, tasks_in, unused_files
    from gerund.evaluation.task import options_of

    if data is None:
        raise ConfigError("--list shows which tasks a folder of data holds; give --data FOLDER")
    ordered = sorted(tasks_in(data), key=lambda task: (SIDES.index(task.side), task.kind))
    if not ordered:
        raise ConfigError(
            f"{data} holds nothing that is known; docs/reference/evaluation.md says what a folder of data looks like"
        )
    typer.echo("* has a validation split\n")
    for kind, group in groupby(ordered, key=lambda task: task.kind):
        tasks = list(group)
        typer.echo(f"{kind} ({tasks[0].side})")
        for task in tasks:
            typer.echo(f"    {task.name}{' *' if task.has_validation else ''}")
        help_of = {name: text for task in tasks for name, text in option_help(task).items()}
        known = {name: value for task in tasks for name, value in options_of(task).items()}
        for name, value in known.items():
            typer.echo(f"    --set {kind}.{name}={value}  {help_of[name]}")
        typer.echo()
    if unused := unused_files(data, ordered):
        typer.echo("No task was found for these files; docs/reference/evaluation.md says how they are called:")
        for path in unused:
            typer.echo(f"    {path.relative_to(data)}")


def _tasks(names: str, data: Path | None, changes: list[str], *, validation: bool) -> list["Task"]:
    from gerund.evaluation.registry import select, with_options

    chosen = with_options(select([name.strip() for name in names.split(",") if name.strip()], data), changes)
    if not chosen:
        raise ConfigError("--tasks names no task")
    without = [task.name for task in chosen if validation and not task.has_validation]
    if without:
        raise ConfigError(f"no validation split: {', '.join(without)}")
    return chosen


def demand_data(data: Path | None) -> None:
    """Refuse a folder of data that is not there, before what is in it is looked at."""
    if data is not None and not data.is_dir():
        raise DataError(f"{data}: no such folder")


def report_folder(output: Path) -> Any:
    """Check that a report's folder is one or may become one; return its lock, which makes it when it is taken."""
    from gerund.jobs.files import lock_folder

    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output} is a file; a report is a folder")
    if output.is_dir() and any(output.iterdir()) and not (output / "scores").is_dir():
        from gerund.evaluation.run import EMBEDDINGS

        # What was interrupted before its first score has left vectors alone.
        if {path.name for path in output.iterdir()} != {EMBEDDINGS}:
            raise OutputExistsError(f"{output} holds other files; choose a new folder or that of an earlier report")
    return lock_folder(output / "scores", output)


def _check_names(names: list[str]) -> None:
    """Find a slip in any of the names before the first model is loaded."""
    from gerund.models.sources import SENTENCE_TRANSFORMERS, find

    for name in names:
        if not _is_search(name) and not name.startswith(SENTENCE_TRANSFORMERS):
            find(name)


def _is_search(name: str) -> bool:
    """Whether a name is no model's, but a way to search."""
    from gerund.evaluation.systems.search import BM25, parse_fusion, parse_index

    return name == BM25 or parse_fusion(name) is not None or parse_index(name) is not None


def _systems(names: list[str], spec: "ModelSpec") -> list["ModelSpec | SentenceTransformersSystem | str"]:
    """Return what the names stand for: for each language model the spec that says which one, and how it is read."""
    from gerund.evaluation.systems.base import SentenceTransformersSystem
    from gerund.models.sources import SENTENCE_TRANSFORMERS

    def system_of(name: str) -> "ModelSpec | SentenceTransformersSystem | str":
        if _is_search(name):
            return name
        if name.startswith(SENTENCE_TRANSFORMERS):
            longest = spec.max_length if isinstance(spec.max_length, int) else None
            return SentenceTransformersSystem(
                name.removeprefix(SENTENCE_TRANSFORMERS), device=spec.device, max_length=longest
            )
        return spec.model_copy(update={"model": name})

    return [system_of(name) for name in names]


class ProgressReporter:
    """Reports on stderr what was measured."""

    def __init__(self, total: int | None = None) -> None:
        self.of = "" if total is None else f"/{total}"
        self.done = 0
        self.begun: set[tuple[str, str]] = set()

    def __call__(self, task: "Task", system: "System", result: "Result | None") -> None:
        """Note what begins, and report what is there."""
        if result is None:
            self.begun.add((task.name, system.label))
            return
        self.done += 1
        from gerund.reporting.comparison import shown

        value = shown(result.score.value, result.unit)
        how = f"{result.seconds:.1f} s" if (task.name, system.label) in self.begun else "known already"
        tell(f"[{self.done}{self.of}] {task.name}, {system.label}: {value} ({how})")


def _print_costs(done: "Evaluation") -> None:
    """Say what was spent on each plan or other system alone, and on what several share."""

    def spent(cost: "Cost") -> str:
        return f"{cost.seconds:.1f} s, {cost.cpu_seconds:.1f} CPU s"

    for label, cost in done.costs.items():
        tell(f"{label} alone: {spent(cost)}")
    if len(done.costs) > 1 and done.shared.cpu_seconds >= 0.1:
        tell(f"layers that plans share, run once for all: {spent(done.shared)}")


def _write(output: Path, done: "Evaluation", *, pictures: bool, as_json: bool) -> None:
    from gerund.reporting.evaluation import write_report

    written = write_report(output, done, pictures=pictures)
    if as_json:
        typer.echo(written.json.read_text(encoding="utf-8"))
    else:
        written.print()
    if written.left_out:
        tell(
            f"warning: {written.left_out} scores in {output} were measured with another seed, limit, split or "
            "prompts; they are kept, and not shown with these"
        )
    tell(f"{written.page}")
