"""Declare each setting once, and derive checks, partial models, keywords and help from its declaration.

A setting is declared once, in a generic dataclass such as ``EncoderSettings[Auto, Unset]``, by its kind, default and
help. Two type variables say what stands in it elsewhere: ``Auto`` for "the model's own" (None in a config, "auto" in a
spec), ``Unset`` for "not given" (None in a spec, nothing in a config).
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field as DataclassField
from dataclasses import field, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Never, ParamSpec, TypeVar, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
)

from gerund.checks import demand_number, demand_unicode, whole_number
from gerund.errors import ConfigError, GerundError, unknown_name

Auto = TypeVar("Auto")
Unset = TypeVar("Unset")
P = ParamSpec("P")
R = TypeVar("R")

NO_ADAPTER = "none"
"""Given for an adapter, it leaves the model's own aside; a folder of that name is ``./none``."""
AUTO_ADAPTER = "auto"
"""Given for an adapter, it takes the model's own, or what comes with gerund for the model; as a rule the default."""
MOST = 2**31 - 1
"""Largest number of layers or tokens that a plan takes."""
_UNIONS = (Union, UnionType)
_LIMITS = {"ge": "at least", "le": "at most", "gt": "above", "lt": "below"}
_IN_WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Mapping: "a mapping",
}


def setting(default: Any, help: str, **more: Any) -> Any:
    """Declare a setting: its default in a config, its help wherever it is documented, and more for ``field``."""
    default = {"default_factory": dict} if isinstance(default, dict) else {"default": default}
    return field(**default, metadata={"help": help}, **more)


def checked(check: Callable[[str, Any], Any]) -> Callable[[Any, ValidationInfo], Any]:
    """Return a validator from a function that takes a name and a value; None from it leaves the value."""

    def validate(value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return value
        try:
            result = check(str(info.field_name), value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value if result is None else result

    return validate


def _whole(name: str, value: Any) -> Any:
    return value if isinstance(value, str) else whole_number(name, value)  # "auto" is for the next check to judge


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value
    demand_number(name, value)
    return value if isinstance(value, int) else float(value)


def _text(name: str, value: Any) -> None:
    demand_unicode(f"the {name}" if name in ("prompt", "template") else name, value)


def _named_text(value: Any) -> Any:
    """Return a path, or one of torch's types and devices, as a text; a path is never taken for a hub id."""
    if isinstance(value, Path):
        return str(value) if value.is_absolute() or len(value.parts) > 1 else f"./{value}"
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _texts(_: str, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        demand_unicode(f"the prompt {name!r}", text)


def named(check: Callable[[str], Any]) -> AfterValidator:
    """Return a validator from a function that refuses texts that name nothing."""

    def validate(value: str) -> str:
        try:
            check(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    return AfterValidator(validate)


Whole = Annotated[int, BeforeValidator(checked(_whole))]
"""A whole number, also one of numpy's."""
Layers = Annotated[Whole, Field(ge=0, le=MOST)]
Count = Annotated[Whole, Field(ge=1)]  # unlimited: tokenizers without a limit say 10**30
Number = Annotated[float, BeforeValidator(checked(_number))]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Text = Annotated[str, AfterValidator(checked(_text))]
Texts = Annotated[
    Mapping[str, str],
    BeforeValidator(lambda value: dict(value) if isinstance(value, Mapping) else value),
    AfterValidator(checked(_texts)),
]
Name = Annotated[str, BeforeValidator(_named_text)]
AdapterName = Annotated[str, BeforeValidator(lambda value: NO_ADAPTER if value is False else _named_text(value))]


def settings_in(*declarations: Any) -> dict[str, tuple[Any, "DataclassField[Any]"]]:
    """Return the kind and the declaration of each setting, by name.

    Declarations are dataclasses whose type variables have a value, such as ``EncoderSettings[None, Never]``; ``Never``
    takes what the variable stands for away.
    """
    settings: dict[str, tuple[Any, DataclassField[Any]]] = {}
    for declaration in declarations:
        origin = get_origin(declaration) or declaration
        values = dict(zip(getattr(origin, "__parameters__", ()), get_args(declaration), strict=True))
        annotations = inspect.get_annotations(origin)
        settings |= {
            field.name: (_kind(field.type, values), field) for field in fields(origin) if field.name in annotations
        }
    return settings


def settings_of(config: type) -> dict[str, tuple[Any, "DataclassField[Any]"]]:
    """Return the kind and the declaration of each setting that a dataclass has from others and of its own."""
    return settings_in(*reversed(getattr(config, "__orig_bases__", ())), config)


def help_of(settings: Mapping[str, tuple[Any, "DataclassField[Any]"]]) -> dict[str, str]:
    """Return the help of each setting."""
    return {name: declared.metadata["help"] for name, (_, declared) in settings.items()}


def _kind(declared: Any, values: Mapping[Any, Any]) -> Any:
    """Return a declared kind with its type variables replaced."""
    parts = [values.get(part, part) for part in get_args(declared)] if get_origin(declared) in _UNIONS else []
    if not parts:
        return values.get(declared, declared)
    return Union[tuple(part for part in parts if part is not Never)]  # noqa: UP007


def model_fields(*declarations: Any, may_be_left_out: bool = False) -> dict[str, Any]:
    """Return fields for ``pydantic.create_model``; those that may be left out are None then."""
    return {
        name: (
            kind,
            Field(default=None if may_be_left_out else declared.default, description=declared.metadata["help"]),
        )
        for name, (kind, declared) in settings_in(*declarations).items()
    }


@cache
def _checker(config: type) -> type[BaseModel]:
    kinds = {name: (kind, ...) for name, (kind, _) in settings_of(config).items()}
    return create_model(config.__name__, __config__=ConfigDict(strict=True, arbitrary_types_allowed=True), **kinds)  # type: ignore[call-overload]


def check(config: Any) -> None:
    """Check each setting of a config (a frozen dataclass) by its kind, and make it of that kind."""
    checker = _checker(type(config))  # type: ignore[arg-type]
    names = checker.model_fields
    with plainly(checker):
        checked = checker.model_validate({name: getattr(config, name) for name in names})
    for name in names:
        object.__setattr__(config, name, getattr(checked, name))


@contextmanager
def plainly(model: type[BaseModel]) -> Iterator[None]:
    """Turn what pydantic finds wrong in the block into one plain sentence."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(_sentence(error, model)) from None


def _sentence(error: ValidationError, model: type[BaseModel]) -> str:
    first = error.errors(include_url=False, include_input=True)[0]
    name, context, value = str(first["loc"][0]) if first["loc"] else "", first.get("ctx", {}), first["input"]
    cause = context.get("error")
    if first["type"] == "extra_forbidden":
        cause = unknown_name("setting of a model", name, list(model.model_fields))
    if isinstance(cause, (ValueError, GerundError)):
        return str(cause)
    if name == "model":
        return f"a model is given by its name or its folder, not as {_short(value)}"
    kinds = plain_kinds(model.model_fields[name].annotation) if name in model.model_fields else []
    if [Mapping] == [get_origin(kind) for kind in kinds] and len(first["loc"]) > 1:
        name, kinds = f"{name}[{first['loc'][1]!r}]", plain_kinds(get_args(kinds[0])["[key]" not in first["loc"]])
    limits = [f"{phrase} {context[limit]}" for limit, phrase in _LIMITS.items() if limit in context]
    if limits or first["type"] == "finite_number":
        return f"{name} must be {limits[0] if limits else 'finite'}, got {value!r}"
    if isinstance(value, str) and all(isinstance(kind, str) for kind in kinds):
        return str(unknown_name(name, value, kinds))
    words = [
        kind if isinstance(kind, str) else _IN_WORDS.get(get_origin(kind) or kind, f"an {kind.__name__}")
        for kind in kinds
    ]
    return f"{name} is {' or '.join(words)}, not {_short(value)}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain_kinds(annotation: Any) -> list[Any]:
    """Return what a setting takes: classes, and the texts of ``Literal``; without None.

    >>> plain_kinds(Count | Literal["auto"] | None)
    [<class 'int'>, 'auto']
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_kinds(parts[0])
    if origin is Literal:
        return list(parts)
    if parts and origin is not Mapping:
        return [kind for part in parts for kind in plain_kinds(part)]
    return [] if annotation is type(None) else [annotation]


def plain_type(annotation: Any) -> Any:
    """Return a kind as signatures show it, without its checks.

    >>> plain_type(Fraction | Literal["auto"])
    typing.Union[float, typing.Literal['auto']]
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return plain_type(parts[0])
    if origin in _UNIONS:
        return Union[tuple(map(plain_type, parts))]  # noqa: UP007
    return origin[tuple(map(plain_type, parts))] if origin is Mapping else annotation


def listed(help_by_name: Mapping[str, str], title: str) -> str:
    """Return settings with their help as a section of a docstring."""
    lines = [
        textwrap.fill(f"{name}: {text}", 110, initial_indent="    ", subsequent_indent="        ")
        for name, text in help_by_name.items()
    ]
    return "\n".join([f"{title}:", *lines])


def documented(config: type[R]) -> type[R]:
    """List a dataclass's settings with their help in its docstring."""
    config.__doc__ = f"{inspect.cleandoc(config.__doc__ or '')}\n\n{listed(help_of(settings_of(config)), 'Attributes')}"
    return config
