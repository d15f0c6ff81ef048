"""Aliases: keywords by the names of sentence-transformers, transformers and openai, each declared once.

A method lists its aliases as the type of its ``**keywords``; ``takes_aliases`` puts each in the place of its original.

Knows: names. Does not know: what any setting does.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ParamSpec, TypedDict, TypeVar, get_args, get_origin

from gerund.checks import flag
from gerund.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class _LeftOut:
    """The default of a keyword that may be left out, as ``help`` shows it."""

    def __repr__(self) -> str:
        return "..."


@dataclass(frozen=True)
class Alias:
    """What a keyword is another name for."""

    of: str  # the keyword itself
    # From the alias's value to that of the keyword; None for what says nothing.
    convert: Callable[[Any], Any] | None = None


def _tensor(value: Any) -> str:
    return "torch" if flag("convert_to_tensor", value) else "numpy"


def _array(value: Any) -> str:
    return "numpy" if flag("convert_to_numpy", value) else "torch"


class TokenAliases(TypedDict, total=False):
    """Other names of what every method that encodes takes."""

    normalize_embeddings: Annotated[bool | None, Alias("normalize")]
    show_progress_bar: Annotated[bool | None, Alias("show_progress")]


class VectorAliases(TokenAliases, total=False):
    """Other names of what is said of vectors of whole texts."""

    truncate_dim: Annotated[int | None, Alias("dimensions")]


class EncodeAliases(VectorAliases, total=False):
    """Other names of what ``encode`` takes."""

    convert_to_tensor: Annotated[bool | None, Alias("output", _tensor)]
    convert_to_numpy: Annotated[bool | None, Alias("output", _array)]


class TopK(TypedDict, total=False):
    """Another name of the number of results."""

    top_k: Annotated[int | None, Alias("k")]


def names_of(keywords: Any) -> list[str]:
    """Return the keywords of a ``TypedDict`` that are no aliases.

    >>> names_of(TopK)
    []
    """
    return [name for name in keywords.__annotations__ if name not in _aliases_of(keywords)]


def takes_aliases(function: F) -> F:
    """Let a function take the aliases in the type of its ``**keywords``, and show all of that type's names in ``help``.

    The function itself is called with the originals only. Unknown keywords are a ``TypeError`` where that type has
    aliases alone; else the function checks them.

    >>> from typing import Unpack
    >>> @takes_aliases
    ... def search(query: str, k: int = 10, **aliases: Unpack[TopK]) -> int:
    ...     return k
    >>> search("bread", top_k=3), search("bread", 3)
    (3, 3)
    >>> search("bread", 3, top_k=3)
    Traceback (most recent call last):
    gerund.errors.ConfigError: `top_k` is another name for `k`; pass one of them, not both
    """
    signature = inspect.signature(function)
    *named, rest = signature.parameters.values()
    [keywords] = get_args(rest.annotation)
    aliases, names = _aliases_of(keywords), [alias.name for alias in named]
    may_be_unknown = bool(names_of(keywords))
    unknown = {alias.of for alias in aliases.values()} - {*names, *names_of(keywords)}
    if unknown:
        raise TypeError(f"{function.__qualname__} has aliases for what it does not take: {sorted(unknown)}")

    def resolved(arguments: tuple[Any, ...], given: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        if not may_be_unknown:
            for name in given:
                if name not in names and name not in aliases:
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}")
        if aliases.keys().isdisjoint(given):
            return arguments, given
        placed = dict(zip(names, arguments, strict=False))
        plain = _resolved(aliases, placed, given)
        # What is given by its place and is None makes way for its alias.
        moved = {name: plain.pop(name) for name in placed if name in plain and name not in given}
        return [*{**placed, **moved}.values(), *arguments[len(placed) :]], plain

    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def wrapper(*arguments: Any, **given: Any) -> Any:
            by_place, by_name = resolved(arguments, given)
            return await function(*by_place, **by_name)
    else:

        @wraps(function)
        def wrapper(*arguments: Any, **given: Any) -> Any:
            by_place, by_name = resolved(arguments, given)
            return function(*by_place, **by_name)

    wrapper.__signature__ = signature.replace(parameters=[*named, *_shown(keywords)])  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]


def same_keywords(other: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Let a function take what another one takes, for type checkers and in ``help``."""

    def decorate(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
        return function

    return decorate


def _aliases_of(keywords: Any) -> dict[str, Alias]:
    """Return the aliases in a ``TypedDict`` by name."""
    aliases = {}
    for name, kind in keywords.__annotations__.items():
        for mark in get_args(kind)[1:] if get_origin(kind) is Annotated else ():
            if isinstance(mark, Alias):
                aliases[name] = mark
    return aliases


def _resolved(aliases: Mapping[str, Alias], placed: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with every alias replaced by its original; None counts as left out."""
    plain = {name: value for name, value in given.items() if name not in aliases}
    from_alias: dict[str, str] = {}
    for name, alias in aliases.items():
        value = given.get(name)
        if value is not None and alias.convert is not None:
            value = alias.convert(value)
        if value is None:
            continue
        other = from_alias.get(alias.of)
        if other is not None and plain[alias.of] != value:
            raise ConfigError(f"`{other}` and `{name}` contradict each other; pass one of them")
        if other is None and (placed.get(alias.of) is not None or plain.get(alias.of) is not None):
            raise ConfigError(f"`{name}` is another name for `{alias.of}`; pass one of them, not both")
        from_alias[alias.of], plain[alias.of] = name, value
    return plain


def _shown(keywords: Any) -> list[inspect.Parameter]:
    """Return the keywords of a ``TypedDict`` as ``help`` shows them; ``...`` stands for what is left out."""
    shown = []
    for name, kind in keywords.__annotations__.items():
        plain = get_args(kind)[0] if get_origin(kind) is Annotated else kind
        shown.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_LeftOut(), annotation=plain))
    return shown
