"""Recipes: every setting of a training, read from YAML with ``key=value`` overrides and checked before anything starts.

No torch is imported here. An unknown field is refused with the valid ones listed.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, WrapValidator, field_validator, model_validator

from gerund.checks import read_input
from gerund.data.corpus import corpus_files, part_of
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError
from gerund.settings.model_spec import EncoderSpec
from gerund.training.objectives import settings as objective_settings
from gerund.training.objectives.sections import ObjectiveConfig, Purpose, Section, TextConfig, changed_fields
from gerund.training.objectives.settings import class_of, parse_objective

_FOLDER = Path(__file__).parent.parent / "assets" / "recipes"

AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], WrapValidator(lambda value, _: parse_objective(value))]


class LoraConfig(Section):
    """Low-rank adapters (LoRA) instead of all weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of the update of each matrix."""
    alpha: float = Field(default=32.0, gt=0)
    """The update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the update."""
    target_modules: str | list[str] = "all-linear"
    """Names of the layers that get an update; ``all-linear`` is every linear layer that text goes through."""
    lowest_layer: int = Field(default=0, ge=0)
    """The lowest decoder layer, counted from 0, that gets an update; a step needs no gradients below it."""


class ModelConfig(Section):
    """The model: an existing one, or one built from scratch."""

    base: str | None = None
    """Folder or hub id of the model to start from; ``default`` is the bundled one. Where the folder has an adapter
    of its own, that adapter is trained further."""
    adapter: Literal["none"] | None = None
    """``none`` leaves the base's own adapter aside: a new one, or all weights, start from the base model."""
    config: dict[str, Any] | None = None
    """From scratch: fields of a Hugging Face config with its ``model_type``; the vocabulary and the ids of the
    special tokens come from the tokenizer."""
    lora: LoraConfig | None = None
    """Train an adapter and leave the weights alone; left out, all weights are trained."""
    gradient_checkpointing: bool = False
    """Keep the states of few layers and compute the others again in the backward pass: less memory, more time."""
    cache_below: bool = False
    """Compute the layers below ``lora.lowest_layer`` once for each text that is made into a vector, and keep their
    states in memory (at most 4 GiB): for training that sees its texts several times."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.base is None) == (self.config is None):
            raise ValueError("a model has either a base or a config, the one to start from or the one to build")
        if self.lora is not None and self.base is None:
            raise ValueError("lora adapts a base; a model from scratch trains all its weights")
        if self.cache_below and self.lora is None:
            raise ValueError("cache_below is for training an adapter, so it needs lora")
        if self.adapter is not None and self.base is None:
            raise ValueError("adapter says what becomes of a base's own one; a model from scratch has none")
        return self


class TokenizerConfig(Section):
    """The tokenizer of a model from scratch: an existing folder, or one trained on the data."""

    path: Path | None = None
    """Folder of an existing tokenizer, or ``default`` for the bundled model's; left out, one is trained."""
    vocab_size: int = Field(default=8192, ge=272)
    """Number of tokens of a trained tokenizer."""
    sample_mb: float = Field(default=36.0, gt=0)
    """Megabytes of text to train it on, divided between the sources by weight."""
    max_length: int = Field(default=1024, ge=1)
    """What a trained tokenizer reports as ``model_max_length``."""

    @model_validator(mode="after")
    def _trained_or_existing(self) -> Self:
        unused = changed_fields(self, set(type(self).model_fields) - {"path"})
        if self.path is not None and unused:
            raise ValueError(
                f"{', '.join(sorted(unused))}: this is about a tokenizer that is trained, and path names one"
            )
        return self


class EncoderSection(EncoderSpec, frozen=True):
    """How the model is read as an encoder, while contrastive objectives train it and afterwards.

    What is left out comes from the base's ``gerund.json``, or else is the library's default.
    """


class SourceConfig(Section):
    """One source of documents."""

    name: str
    """What logs and reports call it."""
    files: list[Path] = Field(min_length=1)
    """Files to train on, relative to ``data.folder``."""
    validation: list[Path] = Field(default_factory=list)
    """Files for the validation loss."""
    weight: float = Field(default=1.0, gt=0)
    """Fraction of the training texts, relative to the other sources."""
    part: str = "1/1"
    """Train on one of several parts of the documents: ``1/2`` is the first, third, fifth, ... document."""
    limit: int | None = Field(default=None, ge=1)
    """Read only the first ``limit`` documents of the part. Default: all."""
    text_column: str = "text"
    """Column or field that holds the text."""
    clean: Literal["none", "gutenberg", "wikipedia", "pandoc"] = "none"
    """Known quirks to remove; see :func:`gerund.data.corpus.clean_text`."""

    @field_validator("part")
    @classmethod
    def _names_a_part(cls, value: str) -> str:
        try:
            part_of(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value


class DataConfig(Section):
    """What is read."""

    folder: Path = Path()
    """Folder that all files are relative to."""
    cache: Path | None = None
    """Folder for the tokenised corpus; left out, ``cache`` inside the output folder."""
    sources: list[SourceConfig] = Field(default_factory=list)
    """Where documents come from."""
    validation_tokens: int = Field(default=131072, ge=1)
    """Upper bound of validation tokens for each objective (for ``causal`` for each source)."""


class OptimizerConfig(Section):
    """How weights are changed."""

    name: Literal["adamw", "muon", "adafactor"] = "adamw"
    """``muon``: Muon for hidden matrices and AdamW for the rest. ``adafactor``: RankGen's, whose state is a row and a
    column for each matrix; its step is the learning rate times the size of the weights, so the rate is larger.
    It has no use for beta1, beta2 and epsilon."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    head_learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate of parts that serve the training only, such as UniMAE's decoder; left out, the same."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices; embeddings, norms and biases are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second decay rate."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 for no clipping."""

    @model_validator(mode="after")
    def _one_rate_for_muon(self) -> Self:
        if self.name == "muon" and self.head_learning_rate is not None:
            raise ValueError("head_learning_rate belongs to adamw and adafactor; muon has one learning rate")
        return self


class ScheduleConfig(Section):
    """How the learning rate moves."""

    name: Literal["wsd", "cosine", "linear", "constant"] = "constant"
    """``wsd``: warm up, stay, decay over the last ``decay_steps``. ``cosine`` and ``linear`` fall all the way."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of decay; for ``wsd`` only."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the peak that is left at the end."""


class Recipe(Section):
    """A whole training."""

    model: ModelConfig
    tokenizer: TokenizerConfig | None = None
    encoder: EncoderSection = EncoderSection()
    data: DataConfig = DataConfig()
    objectives: list[AnyObjective] = Field(min_length=1)
    """What the model is trained for; their losses are summed by weight."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    output: Path
    """Folder of the run: checkpoints, log, and the finished model in ``model``."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of the forward pass; trained weights and the optimizer are always fp32. ``auto`` takes bf16 where
    the device has it."""
    compile: bool = False
    """Compile the decoder's layers, and for ``causal`` the whole loss: steps take half as long on a CPU, after a start
    of about a minute. A T5 is not compiled."""
    sharding: Literal["none", "fsdp2"] = "none"
    """How several processes hold the model. ``none``: each all of it, and gradients are averaged (DDP); the way for
    adapters. ``fsdp2``: each a shard of every weight, gradient and optimizer state; for training all weights of a model
    that is too large for one GPU. Both take the same steps as one process."""
    seed: int = Field(default=0, ge=0)
    """Determines the initial weights, the order of the data, masks, spans and dropout."""
    log_steps: int = Field(default=10, ge=1)
    """A line in the log every ``log_steps`` steps."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = Field(default_factory=list)
    """Where else the log goes, beside the terminal and ``log.jsonl``."""
    eval_steps: int = Field(default=500, ge=1)
    """Validation every ``eval_steps`` steps, and at the end."""
    save_steps: int = Field(default=500, ge=1)
    """A checkpoint every ``save_steps`` steps, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=2)
    """How many checkpoints stay; two at least, since the newest may be the one that a crash cut short."""
    snapshot_steps: int | None = Field(default=None, ge=1)
    """Save the model to ``snapshots/step-N`` every ``snapshot_steps`` steps, to measure how it develops."""

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON has them; paths may have bytes that are no UTF-8, which JSON must escape."""
        result: dict[str, Any] = json.loads(json.dumps(self.model_dump(), default=os.fspath))
        return result

    def published(self) -> dict[str, Any]:
        """Return it without folders, which say something about a machine and nothing about the model."""
        result = self.plain()
        del result["output"], result["data"]["folder"], result["data"]["cache"]
        return result

    @property
    def batch_tokens(self) -> int:
        """Upper bound of the tokens of one optimizer step, when every objective takes part and no text is short."""
        return sum(objective.batch_size * objective.length for objective in self.objectives)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for check in (_check_schedule, _check_sources, _check_objectives):
            check(self)
        if self.tokenizer is not None and self.model.base is not None:
            raise ValueError("tokenizer is for a model from scratch; a base brings its own")
        if self.save_steps % self.log_steps:
            # Otherwise the first loss that is logged after a resume would cover half a window.
            raise ValueError(f"save_steps {self.save_steps} is no multiple of log_steps {self.log_steps}")
        if self.model.cache_below and (self.compile or self.sharding != "none"):
            raise ValueError("model.cache_below goes with neither compile nor sharding")
        return self


def _check_schedule(recipe: Recipe) -> None:
    schedule = recipe.schedule
    if (schedule.name == "wsd") != (schedule.decay_steps is not None):
        raise ValueError("schedule.decay_steps belongs to the schedule wsd, and wsd needs it")
    if schedule.floor and schedule.name == "constant":
        raise ValueError("schedule.floor is what is left at the end of a fall, and the schedule constant does not fall")
    if schedule.warmup_steps + (schedule.decay_steps or 0) > recipe.steps:
        raise ValueError(
            f"schedule.warmup_steps {schedule.warmup_steps} and decay_steps {schedule.decay_steps or 0} together are "
            f"longer than steps {recipe.steps}"
        )


def _check_sources(recipe: Recipe) -> None:
    names = [source.name for source in recipe.data.sources]
    if len(set(names)) < len(names):
        raise ValueError(f"data.sources has a name twice: {', '.join(names)}")
    for objective in recipe.objectives:
        if not objective.reads_sources:
            continue
        if not names:
            raise ValueError(f"the objective {objective.kind} reads texts, and data.sources has none")
        for name in getattr(objective, "sources", []):
            if name not in names:
                raise ValueError(f"the objective {objective.kind} reads {name!r}; data.sources has {', '.join(names)}")


def _check_objectives(recipe: Recipe) -> None:
    kinds = [objective.kind for objective in recipe.objectives]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"objectives has a kind twice: {', '.join(kinds)}")
    changes = {step for objective in recipe.objectives for step, _ in objective.weight if step < recipe.steps}
    for step in sorted(changes):
        if not any(objective.weight_at(step) for objective in recipe.objectives):
            raise ValueError(f"no objective has a weight above 0 from step {step} on")
    longest = (recipe.model.config or {}).get("max_position_embeddings")
    for objective in recipe.objectives:
        if isinstance(longest, int) and objective.longest_text > longest:
            raise ValueError(f"texts of {objective.longest_text} tokens exceed max_position_embeddings {longest}")
    for objective in recipe.objectives:
        objective.check(recipe)


def load_recipe(
    recipe: str | Path,
    overrides: list[str] | None = None,
    *,
    texts: list[Path] | None = None,
    teacher: str | None = None,
) -> Recipe:
    """Read a recipe and apply ``key=value`` overrides.

    Args:
        recipe: A YAML file, or the name of a bundled recipe, such as ``unimae-default``.
        overrides: Such as ``optimizer.learning_rate=0.001``. In a list a number, or the item's ``kind`` or ``name``,
            says which item is meant, as in ``data.sources.0.weight=2`` or ``objectives.mntp.rate=0.3``. Values are
            read as YAML.
        texts: Files and folders of texts to train on, in the place of the recipe's sources.
        teacher: Whose vectors are learned, in the place of the one that the recipe names.

    Raises:
        ConfigError: The file is missing or no YAML, a field is unknown, or settings contradict each other.
    """
    path = find_recipe(recipe)
    content = read_settings(path, overrides or [], texts=corpus_files(texts or []))
    if teacher is not None:
        _take_teacher(content, teacher, str(recipe))
    try:
        result = Recipe.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{recipe}: {'; '.join(map(_explained, error.errors()))}") from None
    if texts:
        _check_texts(result, texts, str(recipe))
    return result


def recipes_by_purpose() -> dict[str, dict[str, str]]:
    """Return the bundled recipes under what they are for, each with its sentence; the papers stand in brackets.

    >>> [purpose for purpose, recipes in recipes_by_purpose().items() if "magnet-default" in recipes]
    ['Infill (MAGNET)']
    """
    recipes: dict[Purpose, dict[str, str]] = {purpose: {} for purpose in Purpose}
    for name, summary in bundled_recipes().items():
        objectives = parse_yaml((_FOLDER / f"{name}.yaml").read_text("utf-8"))["objectives"]
        purposes = {kind.purpose_of(item) for item in objectives if (kind := class_of(item["kind"]))}
        # The first purpose that any objective has: the others keep the model what it was.
        recipes[next(purpose for purpose in Purpose if purpose in purposes)][name] = summary
    return {purpose.value: names for purpose, names in recipes.items() if names}


def _take_teacher(content: dict[str, Any], teacher: str, name: str) -> None:
    """Put another teacher into a recipe that distils."""
    objectives = content.get("objectives")
    listed = [item for item in objectives if isinstance(item, dict)] if isinstance(objectives, list) else []
    distilling = [item for item in listed if (kind := class_of(item.get("kind"))) and "teacher" in kind.model_fields]
    if not distilling:
        raise ConfigError(f"{name} learns from no teacher; --teacher is for recipes that distil, such as align-default")
    data = content.get("data")
    if teacher.lower().endswith(".parquet"):
        # Named from where the command is given, as texts are, and not from the folder of all files.
        teacher = str(Path(teacher).absolute())
        if isinstance(data, dict) and len(objectives or []) == 1:
            data.pop("sources", None)  # the file has the texts as well
        for item in distilling:  # and all of them are read
            for setting in TextConfig.settings_of_sources:
                item.pop(setting, None)
    for item in distilling:
        item["teacher"] = teacher


def _explained(problem: Any) -> str:
    """Return one of pydantic's errors as a sentence; for an unknown field with the valid ones listed."""
    section, names = _section_of(problem["loc"])
    where = ".".join(names)
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(names[-1], section.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown field {where!r}; valid are: {', '.join(section.model_fields)}{hint}"
    if problem["type"] == "union_tag_invalid":
        return f"{where}: unknown kind {problem['ctx']['tag']!r}; valid are: {problem['ctx']['expected_tags']}"
    if problem["type"] == "union_tag_not_found":
        return f"{where}: needs a kind, the name of an objective"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


def _section_of(location: tuple[int | str, ...]) -> tuple[type[BaseModel], list[str]]:
    """Return the innermost section on the way to an error, and the way in the user's words."""
    section: type[BaseModel] = Recipe
    here: Any = Recipe
    names = []
    for part in location:
        if isinstance(part, int):
            names.append(str(part))
            continue
        candidates = list(_sections(here))
        objective = next((item for item in candidates if part in get_args(_annotation(item, "kind"))), None)
        if objective is not None and part not in candidates[0].model_fields:
            # pydantic puts the kind of the objective into the way; the user has not written it there.
            section = here = objective
            continue
        names.append(part)
        owner = next((item for item in candidates if part in item.model_fields), None)
        if owner is not None:
            here = _annotation(owner, part)
            inner = list(_sections(here))
            section = inner[0] if len(inner) == 1 and part != location[-1] else owner
    return section, names


def _annotation(section: type[BaseModel], field: str) -> Any:
    info = section.model_fields.get(field)
    return None if info is None else info.annotation


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's annotation names; for any objective, all of them."""
    if annotation is ObjectiveConfig:
        yield from objective_settings.OBJECTIVES
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _sections(part)


def _check_texts(recipe: Recipe, texts: list[Path], name: str) -> None:
    """Refuse texts that the recipe does not read, and an output that would be taken for texts the next time."""
    if not any(objective.reads_sources for objective in recipe.objectives):
        raise ConfigError(
            f"{name} reads pairs, or a file of texts with their vectors, and no other texts; give data.folder or its "
            "objective's own files, not --texts"
        )
    output = recipe.output.resolve()
    for path in texts:
        if path.is_dir() and output.is_relative_to(path.resolve()):
            raise ConfigError(f"the output {recipe.output} lies in the texts' folder {path}; choose another one")


def bundled_recipes() -> dict[str, str]:
    """Return the bundled recipes by name, each with what it says of itself in one sentence.

    >>> bundled_recipes()["magnet-default"]
    'Fill gaps, and embed tokens and sentences read both ways: one adapter of the bundled default model (MAGNET).'
    """
    paths = sorted(_FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: _first_sentence(path.read_text("utf-8")) for path in paths}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of a bundled one, of which ``-default`` may be left out.

    >>> find_recipe("align").name
    'align-default.yaml'
    """
    path, bundled = Path(recipe), _FOLDER / f"{recipe}.yaml"
    if path.is_file() or path.name != str(recipe) or path.suffix in (".yaml", ".yml"):
        # A path that leads nowhere is refused where the file is read.
        return path
    for item in (bundled, _FOLDER / f"{recipe}-default.yaml"):
        if item.is_file():
            return item
    names = [file.stem for file in sorted(_FOLDER.glob("*.yaml"))]
    spelled = {name: name for name in names} | {name.removesuffix("-default"): name for name in names}
    close = list(dict.fromkeys(map(spelled.__getitem__, difflib.get_close_matches(str(recipe), spelled, n=3))))
    hint = f"did you mean {' or '.join(close)}?" if close else "`gerund recipes` lists those inside"
    raise ConfigError(f"{recipe}: no such recipe, neither a file nor one of those inside; {hint}")


def made_by(model: str | Path) -> str:
    """Return what makes a model that is not there, as the end of a sentence; empty where no bundled recipe does.

    >>> made_by("runs/default-base/model")
    '; `gerund train default-base output=runs/default-base` makes it'
    """
    run = Path(model).parent
    return f"; `gerund train {run.name} output={run}` makes it" if run.name in bundled_recipes() else ""


def read_settings(path: Path, overrides: list[str], texts: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the settings in a YAML file with other files of texts, if any are given, and the overrides put in."""
    try:
        content = parse_yaml(read_input(path))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings")
    data = content.get("data") or {}
    if texts and isinstance(data, dict):  # anything else is refused where the recipe is checked
        sources = data.get("sources")
        listed = [item for item in sources if isinstance(item, dict)] if isinstance(sources, list) else []
        # A generator that reads one half of the documents does so whosever they are.
        parts = {str(item["part"]) for item in listed if item.get("part") is not None}
        part = {"part": parts.pop()} if len(parts) == 1 else {}
        content["data"] = {**data, "sources": [{"name": "texts", "files": list(texts), **part}]}
    for override in overrides:
        _apply(content, override)
    return content


def _apply(content: dict[str, Any], override: str) -> None:
    key, sign, raw = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} has not the form key=value")
    try:
        value = parse_yaml(raw)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML") from error
    place: Any = content
    *parents, last = key.split(".")
    for name in parents:
        place = _child(place, name, override)
    if isinstance(place, list):
        place[_index(place, last, override)] = value
    else:
        place[last] = value


def _child(place: Any, name: str, override: str) -> Any:
    child = place[_index(place, name, override)] if isinstance(place, list) else place.setdefault(name, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {name!r} has no fields")
    return child


def _index(place: list[Any], name: str, override: str) -> int:
    """Return which item of a list is meant: a number, or the ``name`` or ``kind`` of an item."""
    for index, item in enumerate(place):
        if isinstance(item, dict) and name in (item.get("kind"), item.get("name")):
            return index
    # No list has an index of ten digits, and other scripts' digits are no number to int.
    if not re.fullmatch("[0-9]{1,9}", name) or int(name) >= len(place):
        known = [str(item.get("kind") or item.get("name")) for item in place if isinstance(item, dict)]
        there = f"; there are {', '.join(known)}" if known else ""
        raise ConfigError(f"override {override!r}: {name!r} is no index of a list of {len(place)}{there}")
    return int(name)


def _first_sentence(text: str) -> str:
    comments = takewhile(lambda line: re.match(r"#\s*\S", line), text.split("\n"))
    # The full stop of "et al. 2024" ends no sentence.
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(line.removeprefix("#").strip() for line in comments))[0]
