"""Options that several commands share, made from the settings that they set.

A group of options is one argument of a command: ``spec``, ``sampling``, ``limits``. Names, kinds and help texts come
from the declarations in ``gerund.settings``.

Knows: options and what they make together. Does not know: what a command does.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import read_json
from gerund.errors import ConfigError
from gerund.settings import encoder, model_spec
from gerund.settings.fields import help_of, plain_kinds, settings_of
from gerund.settings.plan import PlanSettings
from gerund.settings.ranking import TRAINED_FUSION, UNTRAINED_FUSION, SecondStage
from gerund.settings.sampling import Rerank, Sampling

if TYPE_CHECKING:
    from gerund.inference.generate.config import GenerationKeywords
    from gerund.jobs.engine import JobEngine
    from gerund.retrieval.document_reader import ReadLimits

FILTERS = ("top_p", "top_k", "typical_p", "min_p")
"""Options that choose among sampled tokens, so that they imply a temperature."""
DEFAULT_MODEL = encoder.DEFAULT_MODEL
PLAN = ("attention", *(field.name for field in fields(PlanSettings)))
METHODS = (*encoder.METHODS, "sample")
ENCODER = (
    *(*PLAN, "pooling", "prompt", "pool_prompt", "append_eos", "normalize"),
    *(*METHODS, "max_length", "adapter"),
)
TORCH = ("dtype", "device")
MACHINE = (*TORCH, "runtime", "weights")
# Searches have options of their own, prompts by name come from a folder, and what the author of a ready-made encoder
# decided is in its folder.
OPTIONS = tuple(
    name
    for name in model_spec.HELP
    if name not in ("prompts", *encoder.RANKING, "conventions", "similarity", "revision")
)
"""The settings of :class:`gerund.ModelSpec` that are options."""

Output = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")]
Sample = Annotated[Path | None, typer.Option(help=model_spec.HELP["sample"])]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output.")]
Lines = Annotated[Path | None, typer.Option("--output", "-o", help="Write JSON lines to this file.")]
Texts = Annotated[
    str | None,
    typer.Option(
        "--file",
        "-f",
        help="File of texts: .txt (one per line), .jsonl, .csv, .tsv, .parquet, or - for standard input.",
    ),
]
Column = Annotated[str | None, typer.Option(help="Column with the texts. [default: text]")]
Format = Annotated[str | None, typer.Option(help="txt, jsonl, csv, tsv or parquet. [default: by the file's ending]")]
Work = Annotated[
    Path | None,
    typer.Option("--work", help="Folder for unfinished parts, shared by all machines. [default: next to OUT]"),
]
_ARGUMENT_HELP = f"{model_spec.HELP['model'].partition('; default')[0]}."
_Argument = Annotated[str, typer.Argument(metavar="MODEL", help=_ARGUMENT_HELP)]


@dataclass(frozen=True)
class Group:
    """Options that make one argument of a command."""

    options: list[inspect.Parameter]
    make: Callable[[dict[str, Any]], Any]


def option(name: str, kind: Any, help: str, *flags: str, default: Any = None) -> inspect.Parameter:
    """Return an option; without flags it is ``--NAME``."""
    shown = default is not None and type(default) is not bool
    annotation = Annotated[kind, typer.Option(*flags, help=help, show_default=shown)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each group in the place of its argument of that name; ``MODEL`` comes first."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function).parameters.values():
            group = groups.get(parameter.name)
            parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if group is None else group.options
        parameters.sort(key=lambda parameter: parameter.annotation is not _Argument)

        @wraps(function)
        def command(**given: Any) -> None:
            made = {
                name: group.make({option.name: given.pop(option.name) for option in group.options})
                for name, group in groups.items()
            }
            function(**given, **made)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": None}
        return command

    return decorate


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != []}


def cli_type(annotation: Any) -> Any:
    """Return what the command line takes for a setting: one plain type."""
    kinds = plain_kinds(annotation)
    return next((kind for kind in (bool, int, float) if kind in kinds), str)


def model(
    *names: str, helps: Mapping[str, str] | None = None, also: tuple[str, ...] = (), **defaults: str | None
) -> Group:
    """Return options that make a ``ModelSpec``.

    Args:
        names: in ``OPTIONS``; ``MODEL`` for an argument that names the model, instead of the option ``model``.
            Without either, the command says itself which models are meant, and the spec is how each of them is used.
        helps: other help texts than the declared ones, where an option means less or something else to a command.
        also: more names of the option ``model``.
        defaults: other defaults than the declared ones (and none for ``MODEL``).
    """

    def parameter_of(name: str) -> inspect.Parameter:
        if name == "MODEL":
            default = defaults.get(name, inspect.Parameter.empty)
            return inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_Argument)
        field = model_spec.ModelSpec.model_fields[name]
        default = None if name == "model" else defaults.get(name, field.default)
        flags = ("--model", "-m", *also) if name == "model" else ()
        kind = cli_type(field.annotation)
        help_ = (helps or {}).get(name, model_spec.HELP[name])
        return option(name, kind if default is not None else kind | None, help_, *flags, default=default)

    def make(values: dict[str, Any]) -> model_spec.ModelSpec:
        return model_spec.ModelSpec.of(values.pop("model", None), **values)

    return Group([parameter_of(name) for name in names], make)


def _options_of(settings: type, *names: str, before: str = "") -> list[inspect.Parameter]:
    """Return options for settings of a config; what is not given is left to the config, whose defaults are shown."""
    made = []
    for name in names:
        kind, declared = settings_of(settings)[name]
        text = declared.metadata["help"]
        text = f"{before}{text[0].lower()}{text[1:]}" if before else text
        shown = f" [default: {declared.default}]" if isinstance(declared.default, int | float) else ""
        made.append(option(name, cli_type(kind) | None, f"{text}{shown}"))
    return made


def sampling(*names: str) -> Group:
    """Return options for settings of ``Sampling``; the command gets a dict of those that are given."""
    options, helps = {option.name: option for option in _options_of(Sampling, *names)}, help_of(settings_of(Sampling))
    if "temperature" in options:
        text = f"{helps['temperature']} [default: 0, or 1 with --top-p and the like]"
        options["temperature"] = option("temperature", float | None, text)
    if "logit_bias" in options:
        text = f"ID=NUMBER, may be repeated. {helps['logit_bias']}"
        options["logit_bias"] = option("logit_bias", list[str] | None, text)
    return Group(list(options.values()), _given)


def sampling_of(given: dict[str, Any], default: Sampling | None = None) -> Sampling:
    """Return the settings that options of ``sampling`` make; ``default`` where none is given."""
    if default is not None and not given:
        return default
    settings = dict(given)
    filters = [name for name in FILTERS if name in settings]
    temperature = settings.setdefault("temperature", 1.0 if filters else 0.0)
    if temperature == 0 and filters:
        name = filters[0].replace("_", "-")
        raise ConfigError(f"--{name} chooses among sampled tokens, and --temperature 0 samples none")
    if temperature == 0 and "seed" in settings:
        raise ConfigError("--seed is for sampling and greedy decoding samples nothing; give --temperature, such as 0.8")
    if "logit_bias" in settings:
        settings["logit_bias"] = dict(map(_bias, settings["logit_bias"]))
    return Sampling(**settings)


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise ConfigError(f"--logit-bias is ID=NUMBER, such as 42=-100, not {text!r}") from None


_TEXT_OPTIONS = {
    "n": option("n", int | None, "Number of completions per prompt. [default: 1]", "-n", "--n"),
    "stop": option("stop", list[str] | None, "End the text before this string; may be repeated."),
    "logprobs": option(
        "logprobs", int | None, "With JSON: log-probabilities of the tokens, and of this many alternatives for each."
    ),
    "schema": option("schema", str | None, "The text is JSON that this JSON schema allows: JSON, or @FILE."),
    "regex": option("regex", str | None, "The text matches this regular expression."),
    "choice": option("choice", list[str] | None, "The text is one of these; may be repeated."),
}


def text_settings(*names: str) -> Group:
    """Return options for keywords of ``generate`` about the text as a whole; the command gets them as a dict."""

    def make(values: dict[str, Any]) -> "GenerationKeywords":
        keywords = _given(values)
        if (schema := keywords.get("schema")) is not None and schema.startswith("@"):
            keywords["schema"] = read_json(Path(schema[1:]))
        return keywords  # type: ignore[return-value]

    return Group([_TEXT_OPTIONS[name] for name in names], make)


def rerank() -> Group:
    """Return options that make a ``Rerank``, or None."""

    def make(values: dict[str, Any]) -> Rerank | None:
        keywords = _given(values)
        scorer = keywords.pop("rerank", None)
        if scorer is None and keywords and "samples" not in keywords:
            raise ConfigError(f"--{next(iter(keywords))} belongs to --rank SCORER, such as --rank pmi")
        return Rerank(**keywords, scorer=scorer) if keywords or scorer is not None else None

    scorers = (
        "Generate several continuations and keep the best by this scorer: consensus (nearest to the others), pmi, "
        "avg_cll, cll, avg_ull, self_certainty, overlap, content_overlap, random, model (the model's own), mixed (pmi "
        "and the model's own), default (the bundled model's), or a scorer's folder or hub id. [default with --best-of: "
        "the model's own, else pmi]"
    )
    samples = "Continuations that are sampled, of which the best is kept; with --beams this many of each beam."
    samples += f" [default with --rank: {Rerank.samples}]"
    return Group(
        [
            option("rerank", str | None, scorers, "--rank", "--rerank"),
            option("samples", int | None, samples, "--best-of", "--samples"),
            *_options_of(Rerank, "beams", "every", before="With --rank: "),
        ],
        make,
    )


def read_limits() -> Group:
    """Return options for how much time and memory reading one document may take."""

    def make(values: dict[str, Any]) -> "ReadLimits":
        from gerund.jobs.disk_cache import parse_size
        from gerund.retrieval.document_reader import ReadLimits

        return ReadLimits(seconds=values["read_seconds"], memory=parse_size(values["read_memory"]))

    return Group(
        [
            option(
                "read_seconds", float, "Longest time to parse one HTML, Word, EPUB, PDF or Parquet file.", default=60.0
            ),
            option(
                "read_memory",
                str,
                "Most memory to parse one such file; a quarter of it is what the file may unpack to.",
                default="1GB",
            ),
        ],
        make,
    )


def search() -> Group:
    """Return options for how an index is searched; the command gets them as keywords of ``Index.search``."""
    return Group(
        [
            option(
                "filter",
                str | None,
                "A condition in SQL on source, file, title, heading, text, start, stop and tokens, such as "
                "\"source LIKE 'notes/%'\".",
            ),
            option(
                "weight",
                float | None,
                "Weight of the vectors, 0 (keywords alone) to 1 (vectors alone). [default: the index's or the tuned "
                f"one, else {TRAINED_FUSION}, or {UNTRAINED_FUSION} for a model that was not trained to embed]",
            ),
            *_options_of(SecondStage, "rerank", "rerank_by", "rerank_weight", "rerank_deadline"),
        ],
        _given,
    )


@dataclass(frozen=True)
class Machines:
    """Where bulk work runs: this machine's processes, or a Ray cluster."""

    engine: str
    workers: int | None
    address: str | None
    threads: int | None = None

    def start(self, usual: int | None = None) -> "JobEngine":
        """Return the engine; ``usual`` is how many processes there are when nothing is given.

        Where it works in this process, this one computes with the given number of threads.
        """
        from gerund.jobs.engine import make_engine, runs_in_process

        engine = make_engine(self.engine, self.workers, self.address, usual=usual)
        if self.threads is not None and runs_in_process(engine):
            from gerund.worker_model import use_threads

            use_threads(self.threads)
        return engine


def machines(*, with_model: bool = True) -> Group:
    """Return options for where bulk work runs; ``with_model``: each process loads the model."""
    workers = ", each with the model. [default: this one" if with_model else ". [default: one per core"
    options = [
        option("engine", str, "Where the work runs: local (this machine) or ray.", default="local"),
        option("workers", int | None, f"Processes{workers}, or all of a cluster]", "--workers", "-j"),
        option(
            "address",
            str | None,
            "The Ray cluster: auto, HOST:PORT, or local to start one here. [default: RAY_ADDRESS]",
        ),
    ]
    if with_model:
        text = "Threads per process. [default: 1, or all if it is this one alone]"
        options.append(option("threads", int | None, text))
    return Group(options, lambda values: Machines(**values))
