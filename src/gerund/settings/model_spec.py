"""``ModelSpec``: which model, and how it is read, as one value that can be stored, sent and compared.

``gerund.load``, the command line, recipes, evaluation and whatever runs elsewhere make one and hand it on. What it
leaves out (``None``) is the model's own: what stands in its ``gerund.json``, or else the library's default.

Knows: names, ranges, JSON, which setting wins. Does not know: torch, files of weights.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator

from gerund.checks import whole_number
from gerund.errors import ConfigError, GerundError, unknown_name
from gerund.poolings import canonical_pooling
from gerund.settings.encoder import DEFAULT_MODEL, METHODS, READING, EncoderConfig, Job
from gerund.settings.plan import AttentionPlan, spelled_out
from gerund.settings.templates import PLACE, settings_of_template

NO_ADAPTER = "none"
"""Given for an adapter, it leaves the model's own aside; a folder of that name is ``./none``."""

Auto = Literal["auto"]
_TAKES_ALL_NUMBERS = "mask0+bidir"
_PLAN_FIELDS = ("k", "k0", "sink_tokens", "combine", "variant", "skips", "recurrent")


def _number(value: Any, info: ValidationInfo) -> Any:
    """Return a whole number, also one of numpy's; what else is there is for the next check to judge."""
    if value is None or isinstance(value, str):
        return value
    try:
        return whole_number(str(info.field_name), value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _name_of(value: Any) -> Any:
    """Return a path, or one of torch's types and devices, as a text; a path is never taken for a hub id."""
    if isinstance(value, Path):
        return str(value) if value.is_absolute() or len(value.parts) > 1 else f"./{value}"
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


Count = Annotated[int, BeforeValidator(_number)]
Name = Annotated[str, BeforeValidator(_name_of)]
AdapterName = Annotated[str, BeforeValidator(lambda value: NO_ADAPTER if value is False else _name_of(value))]
PoolingName = Annotated[str, BeforeValidator(lambda value: canonical_pooling(value) if type(value) is str else value)]
ByName = Annotated[dict[str, str], BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value)]


def _spelled_out(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one of the paper's spellings says in the library's terms; an unknown name is left as it is."""
    try:
        said = spelled_out(name, data)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return {"attention": said.pop("name"), **said}


class EncoderSpec(BaseModel):
    """What is said about how a model is read as an encoder; ``None`` leaves the model's own.

    >>> EncoderSpec(attention="mask0-bidir", k=3).applied_to(EncoderConfig(pooling="last")).pooling
    'last'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    attention: str | None = None
    """Name of an attention plan; an :class:`AttentionPlan` sets all of its fields."""
    k: Count | Auto | None = None
    """Number of converted layers; ``auto`` for the plan's own fraction of the layers."""
    k0: Count | Auto | None = None
    """For ``mask0+bidir``, how many of them hide the first token; ``auto`` for the plan's own fraction."""
    sink_tokens: Count | None = None
    """How many first tokens a ``mask0`` plan hides."""
    combine: Literal["sum", "mean"] | None = None
    """How ``inter`` and ``extra`` plans join their two outputs."""
    variant: Literal["paper", "released"] | None = None
    """The paper's layout, or that of the authors' code where it differs."""
    skips: Count | None = None
    """Residual connections across so many layers; 0 for none."""
    recurrent: Literal["causal", "both"] | None = None
    """Whether converted layers without attention stay causal or run in both directions."""
    pooling: PoolingName | None = None
    """``mean``, ``weighted-mean``, ``last``, ``first``, ``last-mean``, ``max`` or ``mean-sqrt``; of several, such as
    ``first+mean``, the vectors are concatenated. sentence-transformers' names, such as ``cls``, are taken too."""
    prompt: str | None = None
    """Text put before every text unless another prompt is given."""
    prompts: ByName | None = None
    """Prompts by name."""
    pool_prompt: bool | None = None
    """Whether the prompt's tokens are pooled as well."""
    append_eos: bool | None = None
    """Whether an end token is put after every text."""
    normalize: bool | None = None
    """Whether vectors have length 1."""
    max_length: Count | Auto | None = None
    """Longest text in tokens; ``auto`` for what the model was made for."""
    template: str | None = None
    """What is put around a text: ``prompteol``, ``metaeol``, ... or a text with ``{text}``; ``none``. A named one is
    pooled by its last token where nothing else is said, ``kv-embedding`` by that and all tokens' mean."""
    layers: str | None = None
    """Whose states are averaged: ``last``, ``all``, ``6``, ``4-8`` or ``1+8``."""
    prepend: Count | None = None
    """Token Prepending below this layer; 0 for none."""
    reroute: str | None = None
    """The layers in which the last token's key and value stand before the text; ``none``."""
    transform: str | None = None
    """``whitening`` or ``all-but-the-top``, fitted on a sample of texts; ``none``."""
    fusion: float | Auto | None = None
    """What the vectors count where a search joins them with words, 0 to 1; ``auto`` for what is usual."""
    pool_bos: str | None = None
    """Whether special tokens before a text without a prompt are pooled: ``always``, ``never`` or ``auto``."""
    conventions: str | None = None
    """Whose conventions hold where libraries differ: ``gerund`` or ``sentence-transformers``."""
    similarity: str | None = None
    """How ``similarity`` compares vectors: ``cosine``, ``dot``, ``euclidean`` or ``manhattan``."""
    text_normalization: str | None = None
    """What is done to a text before it is encoded: ``nfkc`` or ``none``."""

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, data: Any) -> Any:
        """Take a whole plan in the place of its name."""
        plan = data.get("attention") if isinstance(data, Mapping) else None
        if isinstance(plan, Mapping):
            plan = AttentionPlan.from_dict(plan)
        if isinstance(plan, str):
            return {**data, **_spelled_out(plan, data)}
        if not isinstance(plan, AttentionPlan):
            return data
        fields = {"attention": plan.name, "combine": plan.combine, "variant": plan.variant, "recurrent": plan.recurrent}
        numbers = {"k": plan.k if plan.k is not None else "auto", "k0": plan.k0 if plan.k0 is not None else "auto"}
        said = {name: value for name, value in data.items() if name != "attention" and value is not None}
        return {**fields, **numbers, "sink_tokens": plan.sink_tokens, "skips": plan.skips or 0, **said}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        # Whether numbers fit a plan that is not named here is known when the model's own plan is; their range is now.
        others = self.model_copy(update=dict.fromkeys(_PLAN_FIELDS)) if self.attention is None else self
        numbers: dict[str, Any] = {
            name: value
            for name in ("k", "k0", "sink_tokens", "skips")
            if isinstance(value := getattr(self, name), int) and (name, value) != ("skips", 0)
        }
        try:
            AttentionPlan(_TAKES_ALL_NUMBERS, **numbers)
            others.applied_to(EncoderConfig())
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def plan(self, own: AttentionPlan) -> AttentionPlan:
        """Return the attention plan that is meant for a model whose own is ``own``.

        Another plan than the model's starts from its own defaults.

        Raises:
            ConfigError: a setting that the plan has no use for.

        >>> EncoderSpec(k=3).plan(AttentionPlan("mask0-bidir", k=5)).k
        3
        """
        if self.attention is not None and self.attention != own.name:
            own = AttentionPlan(self.attention)
        said = {name: value for name in _PLAN_FIELDS if (value := getattr(self, name)) is not None}
        changes: dict[str, Any] = {name: None if value == "auto" else value for name, value in said.items()}
        if self.skips == 0:
            changes["skips"] = None
        return replace(own, **changes)

    def applied_to(self, own: EncoderConfig) -> EncoderConfig:
        """Return the encoder config of a model whose own is ``own``, with what is said here put in.

        Raises:
            ConfigError: a setting that the plan has no use for, or an impossible value.
        """
        said = self.model_dump(exclude_none=True, include=_CONFIG_FIELDS)
        said |= {name: None for name in ("max_length", "fusion") if said.get(name) == "auto"}
        brought = settings_of_template(said.get("template", ""))
        if said.get("template", own.template) != own.template or "prompts" in brought:
            # The prompts that a template has brought go with it.
            before = settings_of_template(own.template).get("prompts", {}).items()
            kept = {name: text for name, text in own.prompts.items() if (name, text) not in before}
            brought["prompts"] = {**kept, **brought.get("prompts", {})}
        return replace(own, attention=self.plan(own.attention), **{**brought, **said})

    @classmethod
    def of_config(cls, config: EncoderConfig, n_layers: int | None = None) -> "EncoderSpec":
        """Return settings that say all of an encoder config, worked out for ``n_layers`` layers where these are given.

        >>> config = EncoderConfig(pooling="last")
        >>> EncoderSpec.of_config(config).applied_to(EncoderConfig(prompt="another")) == config
        True
        """
        fields: dict[str, Any] = {name: getattr(config, name) for name in _CONFIG_FIELDS}
        fields |= {name: "auto" for name in ("max_length", "fusion") if fields[name] is None}
        fields["prompts"] = dict(config.prompts)
        plan = config.attention if n_layers is None else config.attention.with_defaults(n_layers)
        return EncoderSpec.model_validate({"attention": plan, **fields})

    def said(self) -> dict[str, Any]:
        """Return the fields that are not left out."""
        return self.model_dump(exclude_none=True)


_CONFIG_FIELDS = {"pooling", "prompt", "prompts", "pool_prompt", "append_eos", "normalize", "max_length", "fusion"}
_CONFIG_FIELDS |= METHODS.keys() | READING.keys()
_FLAGS = ("append_eos", "pool_prompt", "normalize")
_COUNTS = ("k", "k0", "sink_tokens", "skips", "max_length", "prepend")
_ON_ONE_LINE = (
    *(*_PLAN_FIELDS, "pooling", *_FLAGS, "max_length", "fusion"),
    *(*(name for name in METHODS if name != "template"), "template", "prompt"),
)


def parse_encoder_spec(text: str) -> EncoderSpec:
    """Return the settings that ``PLAN[:NAME=VALUE,...]`` means, the form of the command line and of tables.

    ``prompt=`` comes last, since a prompt may hold commas, and so does a template that is no name.

    Raises:
        ConfigError: an unknown plan or setting, or a value that does not fit.

    >>> parse_encoder_spec("causal:pooling=last,append_eos=true").said()
    {'attention': 'causal', 'pooling': 'last', 'append_eos': True}
    """
    name, _, rest = text.partition(":")
    values: dict[str, Any] = {"attention": name.strip()}
    for setting, value in _pairs(rest, text):
        if setting in values:
            raise ConfigError(f"{text!r} says {setting} twice")
        values[setting] = _value(setting, value, text)
    with plainly():
        return EncoderSpec(**values)


def _pairs(rest: str, text: str) -> Iterable[tuple[str, str]]:
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: {name!r} has no value; write NAME=VALUE")
        name = name.strip()
        if name not in _ON_ONE_LINE:
            raise unknown_name(f"setting in {text!r}", name, _ON_ONE_LINE)
        if name == "prompt" or (name == "template" and PLACE in rest.partition(",")[0]):
            yield name, rest
            return
        value, _, rest = rest.partition(",")
        yield name, value.strip()


def _value(name: str, value: str, text: str) -> Any:
    if name in _FLAGS:
        if value not in ("true", "false"):
            raise ConfigError(f"{text!r}: {name} is true or false, not {value!r}")
        return value == "true"
    if name == "fusion" and value != "auto":
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"{text!r}: fusion is a number from 0 to 1, not {value!r}") from None
    if name not in _COUNTS or value == "auto":
        return value
    if not value.isdecimal():
        raise ConfigError(f"{text!r}: {name} is a whole number, not {value!r}")
    return int(value)


class ModelSpec(EncoderSpec):
    """Which model, and how it is read: what ``gerund.load`` takes, and what every part of the library hands on.

    Frozen, compared by value, hashable; it goes through JSON (``model_dump_json``, ``model_validate_json``) and pickle.
    ``lm.spec`` is a loaded model's own, with every setting of its encoder worked out.

    Raises:
        ConfigError: an unknown name, an impossible value, or settings that contradict each other.

    >>> spec = ModelSpec(model="default", attention="mask0-bidir", k=3)
    >>> ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    True
    """

    model: Name = DEFAULT_MODEL
    """A folder, a hub id, or ``default`` for the bundled model."""
    revision: str | None = None
    """Which version of a model on the hub: a branch, a tag or a commit. Only for hub ids."""
    adapter: AdapterName | None = None
    """A PEFT folder, active while encoding and infilling and never while generating; ``none``, or False, leaves the
    folder's own ones aside, and with them the head and the scorer that were trained with them."""
    infill_adapter: AdapterName | None = None
    """Another one to infill with: a PEFT folder, or a model trained from the same weights, whose adapter is taken, also
    ``default``; ``none`` infills with the untouched model."""
    scorer: AdapterName | None = None
    """A model trained from the same weights to score continuations, whose adapter and encoder config are taken; also
    ``default``."""
    sample: Name | None = None
    """A file of texts, one a line, on which ``transform`` is fitted when the model is loaded; a folder that was saved
    has a fitted one and needs none."""
    dtype: Name = "auto"
    """``auto`` keeps the checkpoint's type and encodes float32 weights in bfloat16 where the processor computes in it
    and the vectors' cosine to float32 is at least 0.999; or a type by name, for both. ``int8`` keeps the checkpoint's
    type and encodes in 8 bits, on a processor with instructions for that."""
    device: Name = "auto"
    """``auto``, ``cpu``, ``cuda``, ``cuda:1``, ..."""

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, data: Any, handler: Any) -> Any:
        with plainly():
            return handler(data)

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def of(cls, model: "str | Path | ModelSpec | None" = None, **settings: Any) -> "ModelSpec":
        """Return a spec, with the settings that are given (that are not ``None``) put in.

        Raises:
            ConfigError: as the constructor.

        >>> ModelSpec.of("default", attention=None, k=2) == ModelSpec(k=2)
        True
        """
        given = {name: value for name, value in settings.items() if value is not None}
        if isinstance(model, ModelSpec):
            if isinstance(attention := given.get("attention"), str) and attention != model.attention:
                given = {**dict.fromkeys(_PLAN_FIELDS), **given}  # another plan starts from its own defaults
            return cls.model_validate({**dict(model), **given}) if given else model
        return cls.model_validate(given if model is None else {"model": model, **given})

    def with_encoder(self, encoder: EncoderConfig, n_layers: int) -> "ModelSpec":
        """Return the same model read under ``encoder``, with every setting worked out for ``n_layers`` layers."""
        worked_out = EncoderSpec.of_config(encoder, n_layers)
        return type(self).model_validate({**dict(self), **dict(worked_out)})

    def adapter_of(self, job: Job) -> str | None:
        """Return what is said of the adapter for a job; None where nothing is."""
        return {"encode": self.adapter, "infill": self.infill_adapter, "score": self.scorer}[job]

    @property
    def leaves_adapters(self) -> bool:
        """Whether the model's own adapters are left aside."""
        return self.adapter == NO_ADAPTER


@contextmanager
def plainly() -> Iterator[None]:
    """Turn what pydantic finds in the block into one plain sentence.

    Raises:
        ConfigError: with what pydantic found first.
    """
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    """Return the first thing that is wrong."""
    found = error.errors(include_url=False, include_input=True)[0]
    place = ".".join(str(part) for part in found["loc"] if part not in ("constrained-int", "int", "function-before"))
    name = found["loc"][0] if found["loc"] else ""
    cause = found.get("ctx", {}).get("error")
    if found["type"] == "extra_forbidden":
        return str(unknown_name("setting of a model", place, list(ModelSpec.model_fields)))
    if isinstance(cause, (ValueError, GerundError)):
        return str(cause)
    if name == "model":
        return f"a model is given by its name or its folder, not as {_short(found['input'])}"
    field = ModelSpec.model_fields.get(str(name))
    kind = "" if field is None else _kind_of(field.annotation)
    return f"{name} is {kind}, not {_short(found['input'])}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _kind_of(annotation: Any) -> str:
    """Return what a field takes, in words."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    words = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
    said: list[str] = []
    for kind in kinds:
        inner = get_args(kind)
        if kind in words:
            said.append(words[kind])
        elif str(kind).startswith("typing.Literal"):
            said += [str(item) for item in inner]
        elif inner and inner[0] in words:
            said.append(words[inner[0]])
        else:
            said.append("texts by name")
    return " or ".join(dict.fromkeys(said))
