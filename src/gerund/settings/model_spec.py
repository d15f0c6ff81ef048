"""``ModelSpec``: an immutable model specification as JSON; its parser, and the keywords of ``gerund.load``.

``gerund.load``, the command line, recipes, evaluation and workers make one and hand it on. What it leaves out
(``None``) is the model's own: what its ``gerund.json`` says, or else the library's default.

Knows: names, ranges, JSON, which setting wins. Does not know: torch, files of weights.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Never, ParamSpec, Self, TypeVar

from pydantic import BaseModel, ConfigDict, create_model, model_validator

from gerund.errors import ConfigError, unknown_name
from gerund.settings.encoder import DEFAULT_MODEL, FREE, MAY_BE_AUTO, EncoderConfig, EncoderSettings, Job, PlanChoice
from gerund.settings.fields import (
    AUTO_ADAPTER,
    NO_ADAPTER,
    AdapterName,
    Name,
    Unset,
    help_of,
    listed,
    model_fields,
    named,
    plain_kinds,
    plain_type,
    plainly,
    setting,
    settings_in,
    settings_of,
)
from gerund.settings.plan import AttentionPlan, PlanSettings, spelled_out
from gerund.settings.ranking import FAMILIES, check_reranker, reranker_folder
from gerund.settings.templates import NAMED, NO_TEMPLATE, PLACE, settings_of_template

Given = TypeVar("Given")
Model = TypeVar("Model")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class ModelSettings(Generic[Model, Given, Unset]):
    """What a model is made of and where it runs, each setting declared here alone.

    ``Model`` and ``Given`` say what is accepted in the place of a text.
    """

    model: Name | Model | Unset = setting(
        DEFAULT_MODEL,
        "A folder, GGUF file, short name (see gerund models) or hub id; default: the index's model where there is an "
        "index, else the bundled model.",
    )
    revision: str | None = setting(None, "Version of a model on the hub: a branch, tag or commit.")
    adapter: AdapterName | Given | None = setting(
        None,
        "PEFT folder, active while the model encodes and infills and never while it generates; or a model's folder "
        "from `gerund train gen`, whose answer tokens encode. none (or False): no adapter, and no head or scorer that "
        "was trained with the model's own. auto: the model's own, or the one that comes with gerund for it (SmolLM2); "
        "this is the default, unless a plan, a pooling or another way to read is given.",
    )
    infill_adapter: AdapterName | Given | None = setting(
        None,
        "Another adapter to infill with: a PEFT folder, or a model trained from the same weights, such as default, "
        "whose adapter is taken; none infills with the unmodified model.",
    )
    scorer: AdapterName | Given | None = setting(
        None,
        "A model trained from the same weights, such as default, whose adapter and encoder settings score "
        "continuations.",
    )
    reranker: Annotated[AdapterName, named(check_reranker)] | Given | None = setting(
        None,
        f"How a reranker is asked about a query and a document: {', '.join(FAMILIES)}; own: as its folder or its "
        "name says; none: not at all. Default: own, unless a plan or a pooling is given. Or the folder of a reranker "
        "that was trained from the same weights (gerund train reranker), whose adapter re-ranks.",
    )
    sample: Name | Given | None = setting(
        None, "File of texts, one per line, to fit the transform on. A saved model has a fitted one and needs none."
    )
    dtype: Name | Unset = setting(
        "auto",
        "auto keeps the checkpoint's type, and encodes float32 weights in bfloat16 where the processor computes in it "
        "and vectors keep a cosine of 0.999. float32, bfloat16, float16: for everything.",
    )
    device: Name | Unset = setting("auto", "auto, cpu, cuda, cuda:1, ...")
    runtime: Literal["auto", "torch", "packed"] | Unset = setting(
        "auto",
        "packed: compute quantized weights as they are, on a CPU by ONNX Runtime: those of a GGUF file, or those of a "
        "folder, which are quantized on loading (see weights). torch: unpack them. auto: packed for a quantized GGUF "
        "file where that is possible; where the processor computes in bfloat16, commands that read many texts (index, "
        "embed, eval, rerank) take torch.",
    )
    weights: Literal["int8", "int4"] | Given | None = setting(
        None,
        "Quantize the weights of a folder or an unquantized GGUF file to so many bits on loading, for runtime packed. "
        "The first loading does it; later ones find them in the cache. Default: of a folder int8 with runtime packed.",
    )


_ENCODER = (PlanChoice[str | None], PlanSettings[Literal["auto"], None], EncoderSettings[Literal["auto"], None])
_PLAN_FIELDS, _CONFIG_FIELDS = (tuple(settings_in(kind)) for kind in _ENCODER[1:])
_READING = ("attention", *_PLAN_FIELDS, *(name for name in _CONFIG_FIELDS if name not in FREE))

if TYPE_CHECKING:

    class _EncoderFields(
        EncoderSettings[Literal["auto"], None],
        PlanSettings[Literal["auto"], None],
        PlanChoice[str | None],
        BaseModel,
        frozen=True,
    ):
        """What pydantic makes of the declarations at run time, for type checkers."""
else:
    _EncoderFields = create_model("_EncoderFields", **model_fields(*_ENCODER, may_be_left_out=True))


def _spelled_out(name: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one of the paper's spellings says in the library's terms; an unknown name is left as it is."""
    try:
        named = spelled_out(name, data)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return {"attention": named.pop("name"), **named}


def _replaced_by(attention: Any, stored: str | None) -> Iterable[str]:
    """Return the settings of a spec's plan that give way to ``attention``: another plan starts from its defaults."""
    if attention is None:
        return ()
    if isinstance(attention, str):
        with suppress(ConfigError):  # the spec that is made reports it
            named = spelled_out(attention, {})
            if named.pop("name") == stored:
                return named
    return _PLAN_FIELDS


class EncoderSpec(_EncoderFields, frozen=True):
    """Encoder settings of which some may be left out; ``None`` leaves the model's own.

    >>> EncoderSpec(attention="mask0-bidir", k=3).applied_to(EncoderConfig(pooling="last")).pooling
    'last'
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

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
        given = {name: value for name, value in data.items() if name != "attention" and value is not None}
        return {**fields, **numbers, "sink_tokens": plan.sink_tokens, "skips": plan.skips or 0, **given}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        # Whether numbers fit a plan that is not named here is known when the model's own plan is.
        others = self.model_copy(update=dict.fromkeys(_PLAN_FIELDS)) if self.attention is None else self
        try:
            others.applied_to(EncoderConfig())
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    def plan(self, stored: AttentionPlan) -> AttentionPlan:
        """Return the attention plan that is meant for a model whose own is ``own``.

        Another plan than the model's starts from its own defaults.

        Raises:
            ConfigError: a setting that the plan has no use for.

        >>> EncoderSpec(k=3).plan(AttentionPlan("mask0-bidir", k=5)).k
        3
        """
        if self.attention is not None and self.attention != stored.name:
            stored = AttentionPlan(self.attention)
        given = {name: value for name in _PLAN_FIELDS if (value := getattr(self, name)) is not None}
        changes: dict[str, Any] = {name: None if value == "auto" else value for name, value in given.items()}
        if self.skips == 0:
            changes["skips"] = None
        return replace(stored, **changes)

    def applied_to(self, stored: EncoderConfig) -> EncoderConfig:
        """Return the encoder config of a model whose own is ``own``, with what is said here put in.

        Raises:
            ConfigError: a setting that the plan has no use for, or an impossible value.
        """
        given = self.model_dump(exclude_none=True, include=set(_CONFIG_FIELDS))
        given |= {name: None for name in MAY_BE_AUTO if given.get(name) == "auto"}
        brought = settings_of_template(given.get("template", ""))
        if given.get("template", stored.template) != stored.template or "prompts" in brought:
            # The prompts that a template has brought go with it.
            before = settings_of_template(stored.template).get("prompts", {}).items()
            kept = {name: text for name, text in stored.prompts.items() if (name, text) not in before}
            brought["prompts"] = {**kept, **brought.get("prompts", {})}
        return replace(stored, attention=self.plan(stored.attention), **{**brought, **given})

    @classmethod
    def of_config(cls, config: EncoderConfig, n_layers: int | None = None) -> "EncoderSpec":
        """Return settings that say all of an encoder config, worked out for ``n_layers`` layers where these are given.

        >>> config = EncoderConfig(pooling="last")
        >>> EncoderSpec.of_config(config).applied_to(EncoderConfig(prompt="another")) == config
        True
        """
        fields: dict[str, Any] = {name: getattr(config, name) for name in _CONFIG_FIELDS}
        fields |= {name: "auto" for name in MAY_BE_AUTO if fields[name] is None}
        fields["prompts"] = dict(config.prompts)
        plan = config.attention if n_layers is None else config.with_defaults(n_layers).attention
        return EncoderSpec.model_validate({"attention": plan, **fields})

    @property
    def says_reading(self) -> bool:
        """Whether anything is said about how texts are read: by which plan, pooling, template or layers."""
        return any(getattr(self, name) is not None for name in _READING)

    def said(self) -> dict[str, Any]:
        """Return the fields that are not left out."""
        return self.model_dump(exclude_none=True)


# A prompt or a template may hold commas.
_ON_ONE_LINE = (
    *(name for name in (*_PLAN_FIELDS, *_CONFIG_FIELDS) if name not in ("template", "prompt", "prompts")),
    "template",
    "prompt",
)


def parse_encoder_spec(text: str) -> EncoderSpec:
    """Return the settings that ``PLAN[:NAME=VALUE,...]`` means, the form of the command line and of tables.

    ``prompt=`` comes last, since a prompt may hold commas, and so does a template that is no name.

    Raises:
        ConfigError: an unknown plan or setting, or a value that does not fit.

    >>> parse_encoder_spec("causal:pooling=last,append_eos=true").said()
    {'attention': 'causal', 'pooling': 'last', 'append_eos': True}
    """
    plan, _, rest = text.partition(":")
    values: dict[str, Any] = {"attention": plan.strip()}
    for name, value in _pairs(rest, text):
        if name in values:
            raise ConfigError(f"{text!r} says {name} twice")
        values[name] = _typed(name, value)
    with plainly(EncoderSpec):
        return EncoderSpec(**values)


def _pairs(rest: str, text: str) -> Iterable[tuple[str, str]]:
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ConfigError(f"{text!r}: {name!r} has no value; write NAME=VALUE")
        name = name.strip()
        if name not in _ON_ONE_LINE:
            raise unknown_name(f"setting in {text!r}", name, _ON_ONE_LINE)
        if name == "prompt" or (name == "template" and _is_own_template(rest)):
            yield name, rest
            return
        value, _, rest = rest.partition(",")
        yield name, value.strip()


def _is_own_template(text: str) -> bool:
    """Whether a line goes on with a template of the user's own, which may hold commas."""
    return PLACE in text and text.partition(",")[0].strip() not in (NO_TEMPLATE, *NAMED)


def _typed(name: str, text: str) -> Any:
    """Return a value as its setting takes it; what is none of it is left for the spec to judge."""
    kinds = plain_kinds(EncoderSpec.model_fields[name].annotation)
    if bool in kinds:
        return {"true": True, "false": False}.get(text, text)
    if int in kinds and text.isdecimal():
        return int(text)
    if float in kinds:
        with suppress(ValueError):
            return float(text)
    return text


if TYPE_CHECKING:

    class _ModelFields(EncoderSpec, ModelSettings[Never, Never, Never], frozen=True):
        """What pydantic makes of the declarations at run time, for type checkers."""
else:
    _ModelFields = create_model(
        "_ModelFields", __base__=EncoderSpec, **model_fields(ModelSettings[Never, Never, Never])
    )


class ModelSpec(_ModelFields, frozen=True):
    """Which model, and how it is used: what ``gerund.load`` takes, and what every part of the library hands on.

    Frozen, compared by value, hashable; it goes through JSON (``model_dump_json``, ``model_validate_json``) and pickle.
    ``lm.spec`` is a loaded model's own, with every setting of its encoder worked out. ``None`` leaves a setting to the
    model.

    Raises:
        ConfigError: an unknown name, an impossible value, or settings that contradict each other.

    >>> spec = ModelSpec(model="default", attention="mask0-bidir", k=3)
    >>> ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    True
    """

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_sentence(cls, data: Any, handler: Any) -> Any:
        with plainly(cls):
            return handler(data)

    def __hash__(self) -> int:
        return hash(json.dumps(self.model_dump(mode="json"), sort_keys=True))

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
            given = {**dict.fromkeys(_replaced_by(given.get("attention"), model.attention)), **given}
            if given.get("runtime") == "torch":
                given = {"weights": None, **given}  # which torch doesn't quantize
            said = {name: getattr(model, name) for name in model.model_fields_set}
            return cls.model_validate({**said, **given}) if given else model
        return cls.model_validate(given if model is None else {"model": model, **given})

    def with_encoder(self, encoder: EncoderConfig, n_layers: int) -> "ModelSpec":
        """Return the same model read under ``encoder``, with every setting worked out for ``n_layers`` layers."""
        worked_out = EncoderSpec.of_config(encoder, n_layers)
        return type(self).model_validate({**dict(self), **dict(worked_out)})

    def adapter_of(self, job: Job) -> str | None:
        """Return what is said of the adapter for a job; None where nothing is."""
        reranker = None if reranker_folder(self.reranker) is None else self.reranker
        return {"encode": self.adapter, "infill": self.infill_adapter, "score": self.scorer, "rerank": reranker}[job]

    def without_auto(self) -> "ModelSpec":
        """The spec with nothing said about the adapter where ``auto`` is."""
        return self.model_copy(update={"adapter": None}) if self.adapter == AUTO_ADAPTER else self

    @property
    def leaves_adapters(self) -> bool:
        """Whether the model's own adapters are left aside."""
        return self.adapter == NO_ADAPTER


HELP = {
    name: declared.metadata["help"]
    for name, (_, declared) in settings_in(ModelSettings[Never, Never, Never], *_ENCODER).items()
}
"""What each setting is for, in words that the docs, ``help()`` and the command line show."""
ModelSpec.__doc__ = f"{inspect.cleandoc(ModelSpec.__doc__ or '')}\n\n{listed(HELP, 'Attributes')}"


@dataclass(frozen=True)
class LoadKeywords(
    EncoderSettings[Literal["auto"], None],
    PlanSettings[Literal["auto"], None],
    PlanChoice[str | AttentionPlan | None],
    ModelSettings[Path | ModelSpec, Path | Literal[False], None],
):
    """What ``gerund.load`` takes."""

    token: str | bool | None = setting(
        None,
        "Token of the hub for a private or gated model, or True for the one that `hf auth login` has stored. It is "
        "saved nowhere, so a spec and other processes do without it.",
    )


def parameters_of(keywords: type) -> list[inspect.Parameter]:
    """Return a dataclass's settings as keywords that may be None; the first may also be given by its place."""
    first, *others = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=plain_type(kind))
        for name, (kind, _) in settings_of(keywords).items()
    )
    return [first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD), *others]


def with_arguments(docstring: str, keywords: type) -> str:
    """Return a docstring with a dataclass's settings before its section of returns."""
    before, returns, after = inspect.cleandoc(docstring).partition("Returns:")
    return f"{before}{listed(help_of(settings_of(keywords)), 'Args')}\n\n{returns}{after}"


def takes(keywords: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Let a function take the settings of a dataclass: for type checkers, in its signature and in ``help``."""
    assert isinstance(keywords, type)

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        signature = inspect.signature(function).replace(parameters=parameters_of(keywords))
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__doc__ = with_arguments(function.__doc__ or "", keywords)
        return function

    return decorate
