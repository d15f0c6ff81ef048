"""Tools in request bodies: definitions, tool choice, and earlier calls in messages."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gerund.inference.generate.tools import MOST_TOOLS, NAME_PATTERN
from gerund.server.schemas.base import ANY, Accepted, Body

MOST_CALLS = 1024

ToolName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class ToolFunction(Body):
    """A function that may be called."""

    # Where a call is required, its arguments match the schema in any case.
    without_effect: ClassVar[Accepted | None] = {"strict": ANY, "cache_control": ANY}
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool in OpenAI's form."""

    without_effect: ClassVar[Accepted | None] = {"cache_control": ANY}
    misplaced: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ToolFunction.model_fields, '"function", as in {"type": "function", "function": {"name": ...}}'
    )
    type: Literal["function"] = "function"
    function: ToolFunction


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class ChosenFunction(Body):
    """The name of a tool."""

    name: ToolName


class ChosenTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


Choice = Literal["none", "auto", "required"]


class CalledFunction(Body):
    """The name and arguments of a call."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: str | dict[str, Any] | None = None


class MessageCall(Body):
    """An earlier call of the model, in its message."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(
        ("index", "extra_content", "provider_specific_fields", "cache_control"), ANY
    )
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


MessageCalls = Annotated[list[MessageCall], Field(max_length=MOST_CALLS, fail_fast=True)]


def plain(models: Sequence[Body] | None) -> list[dict[str, Any]] | None:
    """Return models as dicts, without what was omitted."""
    return None if models is None else [model.model_dump(exclude_none=True) for model in models]
