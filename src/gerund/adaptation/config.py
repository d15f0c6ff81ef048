"""Settings of ``gerund adapt``, and the recipe for them: batch, LoRA rank, learning rate, steps by model and time."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from gerund.checks import demand_number, flag, one_of, place, whole_number
from gerund.errors import ConfigError, ResourceError
from gerund.jobs.files import write_atomic
from gerund.training.objectives.sections import ENCODER_DECODER, Purpose
from gerund.training.objectives.settings import INSTRUCTION, class_of
from gerund.training.recipe import Recipe, find_recipe, load_recipe, read_settings

MINUTES = 10.0
"""How long is trained when nobody says."""

ASKED = ("titles", "sentences")

LEAST_QUERIES, MOST_QUERIES = 30, 500
"""How many queries are measured on: fewer tell nothing, and more cost time without telling much more."""

MOST_SEARCHED = 5000
"""How many documents are searched at most when it is measured, which is done twice."""

PAIRS, TEXTS = "pairs.jsonl", "texts.jsonl"
"""The files, in a folder, of what is trained on."""

LEAST_DOCUMENTS = 30
"""How many documents there have to be to train on."""

LEAST_PAIRS = 50
"""How many pairs there have to be to train on."""


@dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """How a model is adapted.

    Raises:
        ConfigError: an option that cannot be.

    >>> AdaptConfig(minutes=0)
    Traceback (most recent call last):
    gerund.errors.ConfigError: minutes=0 leaves no time to train; give a number above 0
    """

    held_out: float = 0.2
    """Fraction of the documents that is held out for evaluation; at least 30 and at most 500 documents."""
    questions: str | Path | None = None
    """A .jsonl file of questions with the documents that answer them (``question``, ``source``), instead of titles and
    first sentences."""
    ask: str = "titles"
    """What queries are made from: ``titles``, and first sentences where there is none; or ``sentences``, first
    sentences alone, for documents that contain their titles word for word, which keyword search finds by itself."""
    write_questions: bool = False
    """Let the model write questions to the documents that it is trained on, and train on those that find their
    document, with hard negatives (the recipe ``questions-adapt``). The model must generate well enough to ask."""
    reranker: bool = False
    """Train a reranker too, after the encoder and for as long (the recipe ``reranker``), and measure it as the second
    stage of a search. With ``write_questions`` it learns from questions that the model writes."""
    recipe: str | Path | None = None
    """Another recipe than ``gur-adapt``: a file, or the name of a bundled one."""
    minutes: float | None = None
    """Training time at most; default: 10, or with another recipe its number of steps."""
    steps: int | None = None
    """Number of training steps, instead of ``minutes``."""
    language: str = "en"
    """Language code of the documents: how sentences end."""
    seed: int = 0
    """Determines which documents are held out, the order of the pairs, and the training."""

    def __post_init__(self) -> None:
        one_of("way to ask", self.ask, ASKED)
        if self.questions is not None:
            object.__setattr__(self, "questions", place("questions", self.questions))
        demand_number("held_out", self.held_out)
        if not 0 < self.held_out <= 0.5:
            raise ConfigError(f"held_out={self.held_out} is not a fraction above 0 and at most 0.5")
        if self.minutes is not None:
            demand_number("minutes", self.minutes)
            if not 0 < self.minutes < float("inf"):
                raise ConfigError(f"minutes={self.minutes:g} leaves no time to train; give a number above 0")
        if self.steps is not None:
            if self.minutes is not None:
                raise ConfigError("pass either minutes or steps, not both")
            if whole_number("steps", self.steps) < 1:
                raise ConfigError(f"steps={self.steps} trains nothing; give 1 or more")
        flag("write_questions", self.write_questions)
        flag("reranker", self.reranker)
        if whole_number("seed", self.seed) < 0:
            raise ConfigError(f"seed={self.seed} is below 0")
        if not isinstance(self.language, str) or not (self.language.isascii() and self.language.isalpha()):
            raise ConfigError(f"language is a code such as en or zh, not {self.language!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict; of files the names, as they were given."""
        files = {name: None if (path := getattr(self, name)) is None else str(path) for name in ("questions", "recipe")}
        return asdict(self) | files


RECIPE = "gur-adapt"
RERANKER_RECIPE = "reranker"
RECIPE_WITH_QUESTIONS = "questions-adapt"

# Of the pairs: beyond that a model learns them by heart.
_MOST_EPOCHS = 10
_FEWEST_STEPS = 10
# What a step may take of the memory that is free, so that something is left for everything else.
_FRACTION = 0.7
_USUAL_MIB = 8192


@dataclass(frozen=True)
class Base:
    """What a recipe depends on in the model."""

    name: str  # folder or hub id, as it was given
    parameters: int  # how many it has
    layers: int  # how many layers
    width: int  # numbers of a hidden state
    vocabulary: int  # how many tokens
    adapter: bool  # whether it has an adapter for encoding, which is trained further
    longest: int | None  # its context in tokens; None where it has no limit


@dataclass(frozen=True)
class Machine:
    """What a recipe depends on in the machine."""

    device: str  # ``cuda`` or ``cpu``
    free_mib: int  # memory that is free, in MiB: of the GPU where there is one

    @classmethod
    def this(cls) -> "Machine":
        """Return this machine."""
        import torch

        if torch.cuda.is_available():
            return cls("cuda", torch.cuda.mem_get_info()[0] // 2**20)
        return cls("cpu", _free_mib())


@dataclass(frozen=True)
class Choice:
    """A recipe as it will be carried out, and what it takes."""

    recipe: Recipe
    seconds: float | None  # estimated seconds of the training; None where nobody measured it
    memory_mib: int | None  # memory at the peak of a step, in MiB; None where nobody measured it
    bound: str  # what decided the number of steps: ``minutes``, ``pairs``, ``steps`` or ``recipe``
    epochs: float | None  # how often the pairs are read; None for a recipe that reads no pairs

    def to_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps({"steps": self.recipe.steps, **self.reasons(), "recipe": self.recipe.plain()})

    def reasons(self) -> dict[str, Any]:
        """Return everything but the recipe, JSON-ready."""
        return {name: getattr(self, name) for name in ("seconds", "memory_mib", "bound", "epochs")}


def shape_of(base: Base, machine: Machine) -> dict[str, Any]:
    """Return what depends on size and machine: rank, rate, batch, and how much of it is read at once.

    A small model needs a large rank and rate to change at all, a large one is spoilt by them. An adapter that is
    trained further is near its place already.

    >>> base = Base("default", 8_000_000, 7, 256, 8192, True, 1024)
    >>> shape_of(base, Machine("cpu", 8000)) == {"rank": 64, "rate": 0.0003, "batch": 64, "micro": 64}
    True
    """
    gpu = machine.device == "cuda"
    if base.parameters < 50_000_000:
        rank, rate, batch = 64, 1e-3, 128 if gpu else 64
    elif base.parameters < 700_000_000:
        rank, rate, batch = 32, 5e-4, 128 if gpu else 32
    else:
        rank, rate, batch = 16, 2e-4, 64 if gpu else 16
    # Weights, and the states of every layer for the tokens of both texts of each pair, some thirty numbers of the
    # hidden width each.
    weights = base.parameters * (2 if gpu else 4)
    a_pair = 2 * 128 * (base.layers * base.width * 30 * 4 + base.width * 16)
    room = max(_FRACTION * machine.free_mib * 2**20 - weights, a_pair)
    micro = batch
    while micro > 1 and micro * a_pair > room:
        micro //= 2
    return {"rank": rank, "rate": round(rate * (0.3 if base.adapter else 1.0), 6), "batch": batch, "micro": micro}


def recipe_of(options: AdaptConfig) -> str | Path:
    """Return the recipe that is asked for, or the one for the pairs that are made."""
    return options.recipe or (RECIPE_WITH_QUESTIONS if options.write_questions else RECIPE)


def settings_for(base: Base, machine: Machine, options: AdaptConfig, data: Path, run: Path) -> dict[str, Any]:
    """Return the settings of the recipe, with the model, the data and the run put in."""
    is_default = options.recipe is None
    settings = read_settings(find_recipe(recipe_of(options)), [])
    shape = shape_of(base, machine)
    model_settings = settings.get("model") if isinstance(settings.get("model"), Mapping) else {}
    assert isinstance(model_settings, Mapping)
    fresh = not base.adapter or (not is_default and model_settings.get("adapter") == "none")
    lora = {"rank": shape["rank"], "alpha": 2 * shape["rank"]} if is_default else model_settings.get("lora")
    settings["model"] = {
        "base": base.name,
        "gradient_checkpointing": bool(model_settings.get("gradient_checkpointing")),
    }
    if fresh:
        # Always an adapter, so that the model goes on generating what it did.
        settings["model"] |= {"adapter": "none", "lora": lora or {"rank": shape["rank"], "alpha": 2 * shape["rank"]}}
    settings.pop("tokenizer", None)
    settings |= {"output": str(run), "seed": options.seed}
    settings["data"] = {"folder": str(data)}
    objectives = settings.get("objectives")
    for item in objectives if isinstance(objectives, list) else []:
        if isinstance(item, dict):
            _check_purpose(item, str(options.recipe))
            _on_own_data(item, settings["data"], has_negatives=options.write_questions)
    if is_default:
        [objective] = settings["objectives"]
        length = 128 if base.longest is None else min(128, base.longest)
        objective |= {"batch_size": shape["batch"], "micro_batch_size": shape["micro"], "length": length}
        settings["optimizer"]["learning_rate"] = shape["rate"]
    return settings


def _check_purpose(objective: dict[str, Any], name: str) -> None:
    """Refuse an objective that trains no vectors for a search, or that needs a T5's decoder."""
    kind = class_of(objective.get("kind"))
    if kind is None:  # which is told where the recipe is read
        return
    if kind.purpose is Purpose.SCORE:
        raise ConfigError(
            f"{name} trains a scorer of continuations, and adapting trains vectors for a search: take a recipe that "
            "`gerund recipes` lists under Embed, or make passages by gerund negatives for gerund train"
        )
    if kind.purpose is Purpose.RANK:
        raise ConfigError(
            f"{name} trains how documents are ranked, and adapting trains one vector for each text: "
            f"gerund train {name} --texts trains it, and gerund adapt --reranker a reranker after the encoder"
        )
    if not kind.trains_base:
        raise ConfigError(
            f"{name} leaves the model as it is and trains answer tokens behind it, and adapting trains an adapter: "
            f"gerund train {name} --texts trains it"
        )
    # Of a T5's recipes these are what needs its decoder; GUR without it is contrastive training, which any model has.
    writes = ENCODER_DECODER in kind.models and kind.purpose_of(objective) is Purpose.WRITE
    if writes or objective.get("lm"):
        raise ConfigError(
            f"{name} trains the decoder of a T5, and adapting is for decoder-only models: take another recipe, such as "
            f"{RECIPE}, or train a T5 whole by gerund train"
        )


def _on_own_data(objective: dict[str, Any], data: dict[str, Any], *, has_negatives: bool) -> None:
    """Let an objective read the pairs where it reads any, and else the texts; pairs may have hard negatives."""
    kind = class_of(objective.get("kind"))
    reads_pairs = (kind is not None and kind.reads_pairs) or objective.get("pairs") is not None
    objective.pop("sources", None)
    if reads_pairs:
        objective["pairs"] = {"files": [PAIRS], "query": "text_a", "positive": "text_b"}
        if INSTRUCTION in str(objective.get("query_prompt")):
            # Pairs have no instruction of their own: queries are read with the encoder's prompt.
            del objective["query_prompt"]
        # The base's head is trained further, whose form the recipe does not know.
        for name in ("dimensions", "variant", *(() if has_negatives else ("hard_negatives",))):
            objective.pop(name, None)
    else:
        data["sources"] = [{"name": "texts", "files": [TEXTS]}]


def choose(
    settings: dict[str, Any], options: AdaptConfig, pairs: int, machine: Machine, file: Path, *, measured: bool = True
) -> Choice:
    """Find out how many steps there is time for, by taking a few, and write the recipe down.

    With ``measured`` steps are timed although their number is given.
    """
    recipe = _read(settings, file)
    by_minutes = options.steps is None and (options.minutes is not None or options.recipe is None)
    steps, bound = (options.steps, "steps") if options.steps is not None else (recipe.steps, "recipe")
    if not by_minutes and not measured:
        return Choice(_with_steps(settings, steps, file), None, None, bound, _epochs(recipe, steps, pairs))
    from gerund.training.estimate import estimate
    from gerund.training.processes import peak_memory_mib

    before = peak_memory_mib()
    result = estimate(_with_steps(settings, max(steps, 3), file))
    if machine.device == "cpu" and result.memory_mib - before > machine.free_mib:
        raise ResourceError(
            f"a step needs {result.memory_mib:,} MiB and {machine.free_mib:,} MiB are free; free some and give "
            "--resume, or take, with another output, a smaller model or a recipe with a smaller micro_batch_size"
        )
    if by_minutes:
        minutes = MINUTES if options.minutes is None else options.minutes
        steps, bound = int(60 * minutes / result.seconds_per_step), "minutes"
        most = _MOST_EPOCHS * pairs // recipe.objectives[0].batch_size if _reads_pairs(recipe) else steps
        if options.recipe is None and max(most, _FEWEST_STEPS) < steps:
            steps, bound = max(most, _FEWEST_STEPS), "pairs"
        if steps < _FEWEST_STEPS:
            needed = _FEWEST_STEPS * result.seconds_per_step / 60
            raise ConfigError(
                f"{minutes:g} minutes are enough for {steps} steps, and {_FEWEST_STEPS} are the least: give minutes of "
                f"{needed:.2g} or more, or a smaller model"
            )
    recipe = _with_steps(settings, steps, file)
    seconds = result.seconds_per_step * steps
    return Choice(recipe, seconds, result.memory_mib, bound, _epochs(recipe, steps, pairs))


def reranker_settings(base: Base, machine: Machine, options: AdaptConfig, data: Path, run: Path) -> dict[str, Any]:
    """Return the settings of the recipe that trains a reranker on the texts."""
    settings = read_settings(find_recipe(RERANKER_RECIPE), [])
    [objective] = settings["objectives"]
    objective["questions"] = "written" if options.write_questions else "mined"
    if base.longest is not None:
        objective["length"] = min(objective["length"], base.longest)
    settings["model"]["base"] = base.name
    settings["data"] = {"folder": str(data), "sources": [{"name": "texts", "files": [TEXTS]}]}
    settings["optimizer"]["learning_rate"] = shape_of(replace(base, adapter=False), machine)["rate"]
    return settings | {"output": str(run), "seed": options.seed}


def _reads_pairs(recipe: Recipe) -> bool:
    [first, *_] = recipe.objectives
    return not first.reads_sources or first.trains_reranker


def _epochs(recipe: Recipe, steps: int, pairs: int) -> float | None:
    return steps * recipe.objectives[0].batch_size / pairs if _reads_pairs(recipe) and pairs else None


def _with_steps(settings: dict[str, Any], steps: int, file: Path) -> Recipe:
    """Return the recipe with so many steps, and what depends on their number."""
    log = max(1, min(10, steps // 5))
    usual = int(settings["steps"])
    schedule = dict(settings.get("schedule") or {})
    warmup = schedule["warmup_steps"] = min(int(schedule.get("warmup_steps") or 0), steps // 5)
    if schedule.get("decay_steps"):
        # The same fraction of the training, as far as the warm-up leaves room.
        schedule["decay_steps"] = min(max(1, int(schedule["decay_steps"]) * steps // usual), steps - warmup)
    objectives = [
        setting | {"weight": _stretched(setting["weight"], steps, usual)}
        if isinstance(setting.get("weight"), list)
        else setting
        for setting in settings["objectives"]
    ]
    changes = {"steps": steps, "log_steps": log, "eval_steps": steps, "save_steps": 2 * log, "schedule": schedule}
    return _read(settings | changes | {"objectives": objectives}, file)


def _stretched(weights: list[list[Any]], steps: int, usual: int) -> list[list[Any]]:
    """Return weights that change after the same fraction of the training; of two at one step the later one.

    >>> _stretched([[0, 1], [200, 0]], 30, 300)
    [[0, 1], [20, 0]]
    """
    return [[step, weight] for step, weight in {int(step) * steps // usual: item for step, item in weights}.items()]


def _read(settings: dict[str, Any], file: Path) -> Recipe:
    write_atomic(file, yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return load_recipe(file)


def _free_mib() -> int:
    """Return the memory that is free for processes, in MiB; of a container what it is allowed.

    Where the system does not say, as much as most machines have.
    """
    free = _USUAL_MIB
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except (OSError, StopIteration, ValueError):  # no limit, or no such system
        return free
    return min(free, (limit - used) // 2**20)
