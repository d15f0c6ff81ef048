"""Recipes as files: where a name leads, YAML and ``key=value`` overrides as plain data, mistakes as sentences.

Knows: bundled recipes, YAML, dotted keys, pydantic's errors, files of texts. Does not know: which fields a recipe has.
"""

import difflib
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from gerund.checks import read_input
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError

_FOLDER = Path(__file__).parent.parent / "assets" / "recipes"

# For each base class whose place several classes may take, those classes.
Unions = Mapping[type[BaseModel], Sequence[type[BaseModel]]]


def bundled_recipes() -> dict[str, str]:
    """Return the bundled recipes by name, each with what it says of itself in one sentence.

    >>> bundled_recipes()["magnet-default"]
    'Fill gaps, and embed tokens and sentences read both ways: one adapter of the bundled default model (MAGNET).'
    """
    paths = sorted(_FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: _first_sentence(path.read_text("utf-8")) for path in paths}


def bundled_contents() -> dict[str, dict[str, Any]]:
    """Return what the bundled recipes hold, by name, as plain data."""
    return {path.stem: parse_yaml(path.read_text("utf-8")) for path in _FOLDER.glob("*.yaml")}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of a bundled one, of which ``-default`` may be left out.

    >>> find_recipe("align").name
    'align-default.yaml'

    Raises:
        ConfigError: There is neither such a file nor such a name.
    """
    path, bundled = Path(recipe), _FOLDER / f"{recipe}.yaml"
    if path.is_file() or path.name != str(recipe) or path.suffix in (".yaml", ".yml"):
        # A path that leads nowhere is refused where the file is read.
        return path
    for own in (bundled, _FOLDER / f"{recipe}-default.yaml"):
        if own.is_file():
            return own
    names = [file.stem for file in sorted(_FOLDER.glob("*.yaml"))]
    spelled = {name: name for name in names} | {name.removesuffix("-default"): name for name in names}
    close = list(dict.fromkeys(spelled[one] for one in difflib.get_close_matches(str(recipe), list(spelled), n=3)))
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
    """Return the settings in a YAML file with other files of texts, if any are given, and the overrides put in.

    Raises:
        ConfigError: the file is missing or no YAML, or an override has no place.
    """
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
    if texts:
        data = content.get("data") or {}
        # A generator that reads one half of the documents does so whosever they are.
        parts = {one.get("part") for one in data.get("sources") or () if isinstance(one, dict)} - {None}
        part = {"part": parts.pop()} if len(parts) == 1 else {}
        content["data"] = {**data, "sources": [{"name": "texts", "files": list(texts), **part}]}
    for override in overrides:
        _apply(content, override)
    return content


def explain(problem: Any, root: type[BaseModel], unions: Unions) -> str:
    """Return one of pydantic's errors as a sentence; for an unknown field with the valid ones listed.

    Args:
        problem: The error.
        root: The model that was validated.
        unions: For each base class whose place several classes may take, those classes.
    """
    section, names = _walk(root, problem["loc"], unions)
    where = ".".join(names)
    if problem["type"] == "extra_forbidden" and section is not None:
        now = getattr(section, "renamed", {}).get(names[-1])
        if now is not None:
            return f"field {where!r} is called {now!r} now"
        close = difflib.get_close_matches(names[-1], section.model_fields, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown field {where!r}; valid are: {', '.join(section.model_fields)}{hint}"
    if problem["type"] == "union_tag_invalid":
        return f"{where}: unknown kind {problem['ctx']['tag']!r}; valid are: {problem['ctx']['expected_tags']}"
    if problem["type"] == "union_tag_not_found":
        return f"{where}: needs a kind, the name of an objective"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {message[:1].lower()}{message[1:]}" if where else message


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


def _walk(
    root: type[BaseModel], location: tuple[int | str, ...], unions: Unions
) -> tuple[type[BaseModel] | None, list[str]]:
    """Return the innermost section on the way to an error, and the way in the user's words."""
    section: type[BaseModel] | None = root
    here: Any = root
    names = []
    for part in location:
        sections = list(_sections(here, unions))
        if isinstance(part, int):
            names.append(str(part))
            continue
        tagged = [one for one in sections if part in typing.get_args(_annotation(one, "kind"))]
        if tagged and part not in sections[0].model_fields:
            # pydantic puts the kind of the objective into the way; the user has not written it there.
            section = here = tagged[0]
            continue
        names.append(str(part))
        owners = [one for one in sections if part in one.model_fields]
        if owners:
            section = owners[0]
            here = section.model_fields[str(part)].annotation
            inner = list(_sections(here, unions))
            section = inner[0] if len(inner) == 1 and part != location[-1] else section
    return section, names


def _annotation(section: type[BaseModel], field: str) -> Any:
    found = section.model_fields.get(field)
    return None if found is None else found.annotation


def _sections(annotation: Any, unions: Unions) -> Iterator[type[BaseModel]]:
    """Yield the sections that a field's annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from unions.get(annotation, (annotation,))
    for part in typing.get_args(annotation):
        yield from _sections(part, unions)


def _first_sentence(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        if not line.removeprefix("#").strip() or not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    whole = " ".join(lines)
    # The full stop of "et al. 2024" ends no sentence.
    return re.split(r"(?<=\.) (?=[A-Z])", whole)[0]
