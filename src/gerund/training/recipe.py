"""The recipe: every setting of a training, read from a YAML file and checked before anything starts.

Knows: which fields there are, what they mean and what contradicts what. Does not know: torch, or how a
training is carried out. An unknown field is refused with the valid ones listed.
"""

import re
import typing
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from gerund.errors import ConfigError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(_Section):
    """The model, built from scratch from an architecture."""

    config: dict[str, Any]
    """Fields of a Hugging Face config with its ``model_type``; the vocabulary and the ids of the special
    tokens come from the tokenizer."""


class TokenizerConfig(_Section):
    """The tokenizer: an existing folder, or one trained on the data."""

    path: Path | None = None
    """Folder of an existing tokenizer; left out, one is trained."""
    vocab_size: int = Field(default=8192, ge=272)
    """Number of tokens of a trained tokenizer."""
    sample_mb: float = Field(default=36.0, gt=0)
    """Megabytes of text to train it on, shared between the sources by weight."""
    max_length: int = Field(default=1024, ge=1)
    """What a trained tokenizer reports as ``model_max_length``."""


class SourceConfig(_Section):
    """One source of documents."""

    name: str
    """What logs and reports call it."""
    files: list[Path] = Field(min_length=1)
    """Files to train on, relative to ``data.folder``."""
    validation: list[Path] = []
    """Files for the validation loss."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the training tokens, relative to the other sources."""
    text_column: str = "text"
    """Column or field that holds the text."""
    clean: Literal["none", "gutenberg", "wikipedia"] = "none"
    """Known quirks to remove; see :func:`gerund.data.corpus.clean_text`."""


class DataConfig(_Section):
    """What is read."""

    folder: Path = Path()
    """Folder that the sources' files are relative to."""
    cache: Path | None = None
    """Folder for the tokenised corpus; left out, ``cache`` inside the output folder."""
    sources: list[SourceConfig] = Field(min_length=1)
    """Where documents come from."""
    sequence_length: int = Field(default=512, ge=2)
    """Tokens in a block."""
    batch_tokens: int = Field(default=8192, ge=2)
    """Tokens of one optimizer step."""
    micro_batch_tokens: int | None = Field(default=None, ge=2)
    """Tokens that go through the model at once; left out, the whole batch."""
    validation_tokens: int = Field(default=131072, ge=1)
    """Upper bound of validation tokens per source."""


class OptimizerConfig(_Section):
    """How weights are changed."""

    name: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for hidden matrices and AdamW for the rest."""
    learning_rate: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of matrices; embeddings, norms and biases are not decayed."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second decay rate."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 for no clipping."""


class ScheduleConfig(_Section):
    """How the learning rate moves."""

    name: Literal["wsd", "cosine", "constant"] = "constant"
    """``wsd``: warm up, stay, decay over the last ``decay_steps``."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int | None = Field(default=None, ge=1)
    """Steps of decay; for ``wsd`` only."""
    decay_sequence_length: int | None = Field(default=None, ge=2)
    """Tokens in a block during the decay; left out, ``data.sequence_length``. Long blocks only at the end
    keep most steps cheap, and the model still learns to use its whole context."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak that is left at the end."""


class Recipe(_Section):
    """A whole training."""

    model: ModelConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    output: Path
    """Folder of the run: checkpoints, log, and the finished model in ``model``."""
    steps: int = Field(ge=1)
    """Optimizer steps."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Arithmetic of the forward pass; weights and optimizer are always fp32. ``auto`` takes bf16 where
    the device has it."""
    compile: bool = False
    """Compile the model: faster steps after a start of about a minute."""
    seed: int = Field(default=0, ge=0)
    """Decides the initial weights and the order of the data."""
    log_steps: int = Field(default=10, ge=1)
    """A line in the log every so many steps."""
    eval_steps: int = Field(default=500, ge=1)
    """Validation every so many steps, and at the end."""
    save_steps: int = Field(default=500, ge=1)
    """A checkpoint every so many steps, and at the end."""
    keep_checkpoints: int = Field(default=2, ge=2)
    """How many checkpoints stay; two at least, since the newest may be the one that a crash cut short."""

    @property
    def rows(self) -> int:
        """Blocks in a micro-batch."""
        return (self.data.micro_batch_tokens or self.data.batch_tokens) // self.data.sequence_length

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step."""
        return self.data.batch_tokens // (self.data.micro_batch_tokens or self.data.batch_tokens)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        data, schedule = self.data, self.schedule
        micro = data.micro_batch_tokens or data.batch_tokens
        if micro % data.sequence_length:
            name = "micro_batch_tokens" if data.micro_batch_tokens else "batch_tokens"
            raise ValueError(f"data.{name} {micro} is no multiple of data.sequence_length {data.sequence_length}")
        if data.batch_tokens % micro:
            raise ValueError(f"data.batch_tokens {data.batch_tokens} is no multiple of data.micro_batch_tokens {micro}")
        if (schedule.name == "wsd") != (schedule.decay_steps is not None):
            raise ValueError("schedule.decay_steps belongs to the schedule wsd, and wsd needs it")
        if schedule.decay_sequence_length and (schedule.name != "wsd" or micro % schedule.decay_sequence_length):
            raise ValueError("schedule.decay_sequence_length belongs to wsd, and must divide the micro-batch")
        if schedule.warmup_steps + (schedule.decay_steps or 0) > self.steps:
            raise ValueError(f"warm-up and decay together are longer than steps {self.steps}")
        if self.save_steps % self.log_steps:
            # Otherwise the first loss that is logged after a resume would cover half a window.
            raise ValueError(f"save_steps {self.save_steps} is no multiple of log_steps {self.log_steps}")
        names = [source.name for source in data.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"data.sources has a name twice: {', '.join(names)}")
        longest = self.model.config.get("max_position_embeddings")
        length = max(data.sequence_length, schedule.decay_sequence_length or 0)
        if isinstance(longest, int) and length > longest:
            raise ValueError(f"sequences of {length} tokens exceed max_position_embeddings {longest}")
        return self


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe and apply ``key=value`` overrides.

    Args:
        path: The YAML file.
        overrides: Such as ``optimizer.learning_rate=0.001``; a number picks an item of a list, as in
            ``data.sources.0.weight=2``. Values are read as YAML.

    Raises:
        ConfigError: The file is missing or no YAML, a field is unknown, or settings contradict each other.
    """
    path = Path(path)
    try:
        content = _parse(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of settings")
    for override in overrides or []:
        _apply(content, override)
    try:
        return Recipe.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(_explain(problem) for problem in error.errors())}") from None


def _apply(content: dict[str, Any], override: str) -> None:
    key, sign, raw = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} has not the form key=value")
    try:
        value = _parse(raw)
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


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, except that ``1e-3`` is a number, as it is everywhere but in YAML 1.1."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506  # a subclass of SafeLoader


def _child(place: Any, name: str, override: str) -> Any:
    child = place[_index(place, name, override)] if isinstance(place, list) else place.setdefault(name, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"override {override!r}: {name!r} has no fields")
    return child


def _index(place: list[Any], name: str, override: str) -> int:
    if not name.isdigit() or int(name) >= len(place):
        raise ConfigError(f"override {override!r}: {name!r} is no index of a list of {len(place)}")
    return int(name)


def _explain(problem: Any) -> str:
    """Return one of pydantic's findings as a sentence; for an unknown field with the valid ones listed."""
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        section = _section_at(problem["loc"][:-1])
        return f"unknown field {where!r}; valid are: {', '.join(section.model_fields)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


def _section_at(location: tuple[int | str, ...]) -> type[BaseModel]:
    section: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = (typing.get_args(annotation) or (annotation,))[0]
    return section
