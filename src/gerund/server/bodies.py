"""Base classes of request bodies: strict types, unknown fields are errors that name the field.

A field that a class doesn't declare is an error, since ignoring it could give another answer than the client asked for.
Two kinds of fields are accepted nevertheless, per route (``without_effect``):

* fields that change no answer anywhere, such as ``user`` or ``cache_prompt``, with any value (``ANY``);
* fields that change answers of the server they come from, with the values that mean "as usual" there, which is what
  gerund does.

``null`` is always the same as omitting a field and is in no list.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

ANY: Final = object()
"""Accepts any value of a field."""

Accepted = Mapping[str, Any]
"""The accepted values by the field's name, or ``ANY``."""

# Bookkeeping, billing, caching and scheduling: what every client library may add to every request.
EVERYWHERE: Accepted = {
    # OpenAI
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), ANY),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), ANY),
    # vLLM; Cohere has priority as well
    **dict.fromkeys(("request_id", "session_id", "priority", "cache_salt"), ANY),
    # Ollama
    "keep_alive": ANY,
    # What the Python SDKs merge into a body; some clients send it as it is.
    "extra_body": ({},),
}


def is_accepted(accepted: Accepted, name: str, value: Any) -> bool:
    """Whether a field that is not declared may be ignored.

    >>> is_accepted({"mirostat": (0,)}, "mirostat", 0), is_accepted({"mirostat": (0,)}, "mirostat", 2)
    (True, False)
    """
    if value is None:
        return True
    values = accepted.get(name, EVERYWHERE.get(name, ()))
    return values is ANY or value in values


# Longest lists in a body. Each list reports only its first error: describing two million numbers in the place of texts
# would take minutes and gigabytes.
MOST_TEXTS = 2048
MOST_IDS = 65536

Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
ModelName = Annotated[str, Field(max_length=200)]


# A letter or two of ten may differ; names of other servers' fields differ by more.
_ALIKE = 0.88
_LONGEST_NAME = 64
_UNKNOWN = "unknown_field"
_TEXTS_OR_IDS = "a text, a list of texts, a list of token ids, or a list of such lists"
_TEXT_OR_TEXTS = "a text, or a list of texts"
# Descriptions of fields of several types; pydantic's message would describe only one of the types.
_FORMS = {
    "input": _TEXTS_OR_IDS,
    "prompt": _TEXTS_OR_IDS,
    "stop": _TEXT_OR_TEXTS,
    "text_1": _TEXT_OR_TEXTS,
    "text_2": _TEXT_OR_TEXTS,
    "documents": "a list of texts, or of objects with a text",
    "lengths": "a whole number, or a list of them",
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
}


class Body(BaseModel):
    """The body of a request, or an object in it."""

    # Not "forbid": that describes every field of millions, and does not know what is accepted without effect.
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())

    without_effect: ClassVar[Accepted | None] = {}
    """Fields that are accepted and ignored; None accepts all."""

    misplaced: ClassVar[Mapping[str, str]] = {}
    """Fields that belong elsewhere, with the place."""

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, body: Any) -> Any:
        """Raise an error for the first unknown field."""
        if not isinstance(body, dict) or cls.without_effect is None:
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in body.items():
            if name in known or is_accepted(cls.without_effect, name, value):
                continue
            shown = name[:_LONGEST_NAME].encode("utf-8", "backslashreplace").decode() or "''"
            close = get_close_matches(shown, sorted(known - body.keys()), 1, _ALIKE)
            message = f"{shown} is not supported here; leave it out"
            if close:
                message = f"there is no field {shown!r}; did you mean {close[0]!r}?"
            elif name in cls.misplaced:
                message = f"{shown} belongs in {cls.misplaced[name]}"
            elif cls.without_effect.get(name, ANY) is not ANY:
                message = f"{shown} is supported with its usual value alone; leave it out"
            raise not_supported(shown, message)
        return body


def not_supported(field: str, message: str) -> PydanticCustomError:
    """Return the error for a field, or a value of it, that is not supported."""
    shown = message.encode("utf-8", "backslashreplace").decode()
    return PydanticCustomError(_UNKNOWN, "{message}", {"message": shown, "field": field})


class RequestBody(Body):
    """The body of a request."""

    model: ModelName | None = None
    """The model's name as ``/v1/models`` lists it; default: the served model."""


def place_of(error: dict[str, Any], body: Any) -> str:
    """Return the path of a pydantic error in a body, such as ``input.2``, without pydantic's names for unions.

    >>> place_of({"loc": ("body", "input", "list[constrained-str]", 0), "type": "string_type"}, {"input": [5]})
    'input.0'
    >>> place_of({"loc": ("body", "query"), "type": "missing"}, {})
    'query'
    >>> place_of({"loc": ("body", "RerankRequest", "documents"), "type": "missing"}, {"query": "a"})
    'documents'
    >>> place_of({"loc": ("body", "documents", 0, "Document", "text"), "type": "missing"}, {"documents": [{}]})
    'documents.0.text'
    """
    parts, here, loc = [], body, error["loc"][1:]
    for number, part in enumerate(loc):
        is_index = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_index or (isinstance(here, dict) and part in here):
            here = here[part]
        elif error["type"] == "missing" and number == len(loc) - 1:
            here = None  # all other parts that the body does not have are names of the forms that a value may have
        else:
            continue
        parts.append(str(part))
    if error["type"] == _UNKNOWN:
        parts.append(error["ctx"]["field"])
    return ".".join(parts)


def worst(errors: list[dict[str, Any]], body: Any) -> tuple[str, str, str | None]:
    """Return the path, message and code of the most specific error.

    In a union that is the deepest error about a value, which had the right type. If no type was right, the message
    names all types.

    >>> worst([{"loc": ("body", "stop", "str"), "type": "string_type", "msg": ""},
    ...        {"loc": ("body", "stop", "list", 0), "type": "string_type", "msg": ""}], {"stop": [5]})
    ('stop.0', 'stop.0: stop is a text, or a list of texts', None)
    """
    placed = [(place_of(error, body), error) for error in errors]
    first = placed[0][0].split(".")[0]
    of_field = [item for item in placed if item[0].split(".")[0] == first]
    of_types = ("_type", "literal_error") if first in _FORMS else ("_type",)
    of_values = [item for item in of_field if not item[1]["type"].endswith(of_types)]
    place, error = max(of_values or of_field, key=lambda item: item[0].count("."))
    if error["type"] == _UNKNOWN:
        return place, error["msg"], "not_supported"
    message = error["msg"].removeprefix("Value error, ")
    if not of_values and len(of_field) > 1 and first in _FORMS:
        message = f"{first} is {_FORMS[first]}"
    return place, f"{place}: {message}" if place else message, None
