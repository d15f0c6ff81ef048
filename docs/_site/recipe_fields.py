"""The settings of a recipe as tables, made from the classes that check them.

Knows: pydantic's fields, docstrings below fields. Does not know: which objectives there are.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from docstrings import as_markdown
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

_WORDS = {"int": "number", "float": "number", "bool": "true, false", "str": "text", "Path": "path"}
_HEAD = ["| setting | value | default | meaning |", "|---|---|---|---|"]


def recipe_tables() -> str:
    """Return a table for the recipe, and for each of its sections in the order of its fields."""
    from gerund.training.recipe import Recipe

    lines = []
    for heading, section in (("Top level", Recipe), *_sections(Recipe, "")):
        lines += [f"## {heading}", "", _summary(section), "", *_table(section), ""]
    return "\n".join(lines)


def objective_tables() -> str:
    """Return a table for what all objectives have, and for each objective what is its own."""
    from gerund.training.objectives.sections import ObjectiveConfig
    from gerund.training.objectives.settings import OBJECTIVES

    kinds = {section.name(): section for section in OBJECTIVES}
    lines = ["## Every objective", "", *_table(ObjectiveConfig), ""]
    for kind, section in sorted(kinds.items()):
        shared = {
            name
            for name, field in ObjectiveConfig.model_fields.items()
            if section.model_fields[name].default == field.default
        }
        lines += [f"## {kind}", "", _summary(section), "", *_table(section, without={*shared, "kind"}), ""]
        for name, field in section.model_fields.items():
            if inner := _section_in(field.annotation):
                lines += [f"`{name}` has the settings:", "", *_table(inner), ""]
    return "\n".join(lines)


def _sections(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        if inner is not None and name != "objectives":
            mark = "[]" if get_origin(field.annotation) is list else ""
            yield f"{prefix}{name}{mark}", inner
            yield from _sections(inner, f"{prefix}{name}{mark}.")


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds, perhaps or several times; None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = [inner for part in get_args(annotation) if (inner := _section_in(part)) is not None]
    return found[0] if len(found) == 1 else None


def _table(section: type[BaseModel], without: set[str] | frozenset[str] = frozenset()) -> list[str]:
    said = _meanings(section)
    rows = [
        f"| `{name}` | {_values(field.annotation)} | {_default(field)} | {said.get(name, '')} |"
        for name, field in section.model_fields.items()
        if name not in without
    ]
    return [*_HEAD, *rows] if rows else ["It has no settings of its own."]


def _summary(section: type[BaseModel]) -> str:
    return as_markdown(inspect.cleandoc(section.__doc__ or ""))


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if _section_in(annotation) is not None:
        return "settings" if get_origin(annotation) is not list else "list of settings"
    if get_origin(annotation) in (list, tuple):
        return "list"
    if get_origin(annotation) is dict:
        return "settings"
    parts = [_values(part) for part in get_args(annotation) if part is not type(None)]
    return " or ".join(dict.fromkeys(parts)) or _WORDS.get(getattr(annotation, "__name__", ""), "value")


def _default(field: Any) -> str:
    if field.is_required():
        return "*required*"
    value = field.default
    if value is PydanticUndefined or value is None or isinstance(value, BaseModel):
        return ""
    text = json.dumps(value, default=str) if not isinstance(value, str) else value
    return f"`{text}`" if text.strip() else ""


def _meanings(section: type[BaseModel]) -> dict[str, str]:
    """Return what stands below each field of a class and of those that it is made from."""
    said: dict[str, str] = {}
    for own in reversed(section.__mro__):
        if not issubclass(own, BaseModel) or own is BaseModel:
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(own))).body[0].body
        for field, below in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(as_markdown(ast.literal_eval(below.value)).split())
                said[ast.unparse(field.target)] = re.sub(r"(?<!\\)\|", r"\\|", text)
    return said
