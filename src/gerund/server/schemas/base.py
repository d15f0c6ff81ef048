"""What all bodies have in common: strict types, unknown fields ignored but for mistyped ones, explicit nulls accepted.

Knows: pydantic. Does not know: routes, models.
"""

from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

# What a list in a body holds at most. Each list says of its first error only: of two million numbers in the place of
# texts, all would be described, which takes minutes and gigabytes.
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
_LONGEST_NAME, _MOST_UNKNOWN = 50, 20
_TEXTS_OR_IDS = "a text, a list of texts, a list of token ids, or a list of such lists"
_TEXT_OR_TEXTS = "a text, or a list of texts"
# What a field of several forms takes, in words: pydantic would say of one of the forms that it is not that one.
_FORMS = {
    "input": _TEXTS_OR_IDS,
    "prompt": _TEXTS_OR_IDS,
    "stop": _TEXT_OR_TEXTS,
    "text_1": _TEXT_OR_TEXTS,
    "text_2": _TEXT_OR_TEXTS,
    "documents": "a list of texts, or of objects with a text",
    "lengths": "a whole number, or a list of them",
}


class Body(BaseModel):
    """The body of a request, or an object in it; a field that is not known is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


class RequestBody(Body):
    """The body of a request; a field that is a known one mistyped is refused, other unknown ones are ignored."""

    model: ModelName | None = None
    """The model's name as ``/v1/models`` lists it; left out, the one that is served."""

    @model_validator(mode="before")
    @classmethod
    def refuse_mistyped(cls, body: Any) -> Any:
        """Refuse ``dimension`` for ``dimensions``: ignored, it would give another answer than was meant."""
        if not isinstance(body, dict):
            return body
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in body if name not in known]
        if len(unknown) <= _MOST_UNKNOWN:  # comparing takes a while, and nobody mistypes so many
            left = sorted(known - body.keys())
            for name in unknown:
                close = get_close_matches(name[:_LONGEST_NAME], left, 1, _ALIKE)
                if close:
                    raise ValueError(f"there is no field {name!r}; did you mean {close[0]!r}?")
        return body


def place_of(error: dict[str, Any], body: Any) -> str:
    """Return where in a body an error of pydantic's is, such as ``input.2``, without pydantic's own names for unions.

    >>> place_of({"loc": ("body", "input", "list[constrained-str]", 0), "type": "string_type"}, {"input": [5]})
    'input.0'
    >>> place_of({"loc": ("body", "query"), "type": "missing"}, {})
    'query'
    >>> place_of({"loc": ("body", "RerankRequest", "documents"), "type": "missing"}, {"query": "a"})
    'documents'
    """
    parts, here = [], body
    for part in error["loc"][1:]:
        if isinstance(part, str) and part.endswith("Request"):  # one of the forms that a body may have
            continue
        is_index = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_index or (isinstance(here, dict) and part in here):
            here = here[part]
        elif error["type"] == "missing" and isinstance(here, dict):
            here = None
        else:
            continue
        parts.append(str(part))
    return ".".join(parts)


def worst(errors: list[dict[str, Any]], body: Any) -> tuple[str, str]:
    """Return the place and the message of the error that says most.

    Of those of a union it is one about a value, which was of the right type, and the deepest one of these. Where
    nothing was of a right type, it is said what all the types are.

    >>> worst([{"loc": ("body", "stop", "str"), "type": "string_type", "msg": ""},
    ...        {"loc": ("body", "stop", "list", 0), "type": "string_type", "msg": ""}], {"stop": [5]})
    ('stop.0', 'stop is a text, or a list of texts')
    """
    placed = [(place_of(error, body), error) for error in errors]
    first = placed[0][0].split(".")[0]
    own = [one for one in placed if one[0].split(".")[0] == first]
    of_values = [one for one in own if not one[1]["type"].endswith("_type")]
    place, error = max(of_values or own, key=lambda one: one[0].count("."))
    if not of_values and len(own) > 1 and first in _FORMS:
        return place, f"{first} is {_FORMS[first]}"
    return place, error["msg"].removeprefix("Value error, ")
