"""The grammar of arguments as Gemma writes them, from a JSON schema: ``{city:<escape>Bonn<escape>,days:3}``.

Keys are bare and in alphabetical order, texts stand between quote tokens. The keywords of JSON schema that have no
counterpart here, such as ``minimum`` or ``pattern``, are not enforced.
"""

import json
from collections.abc import Mapping
from typing import Any

_PLAIN = {
    "integer": '/-?(0|[1-9][0-9]{0,17})/',
    "number": '/-?(0|[1-9][0-9]{0,17})(\\.[0-9]{1,17})?/',
    "boolean": '("true" | "false")',
    "null": '"null"',
}  # fmt: skip
_TEXT = "/[^<]*/"


class ArgumentRules:
    """The rules of one tool's arguments.

    ``name`` is that of the first rule, and begins those of the others; ``quote`` is the token around texts, as the
    grammar spells it.
    """

    def __init__(self, name: str, quote: str, schema: Mapping[str, Any]) -> None:
        self._name, self._quote, self._root = name, quote, schema
        self._by_reference: dict[str, str] = {}
        self._count = 0
        self.rules: list[str] = []
        self._add(name, self._object(schema))

    def _add(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def _new(self, body: str | None = None) -> str:
        self._count += 1
        name = f"{self._name}_{self._count}"
        return name if body is None else self._add(name, body)

    def _object(self, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return '"{}"'
        required = schema.get("required")
        needed = set(required) if isinstance(required, list) else set()
        items = [
            (key, self._new(f"{json.dumps(key + ':')} {self._value(properties[key])}")) for key in sorted(properties)
        ]
        # From behind: `rests[i]` are the keys from i on, each after a comma.
        rests, rest = [], '""'
        for key, item in reversed(items):
            rests.append(rest)
            pair = f'("," {item})' + ("" if key in needed else "?")
            rest = self._new(pair if rest == '""' else f"{pair} {rest}")
        starts = []
        for (key, item), rest in zip(items, reversed(rests), strict=True):
            starts.append(item if rest == '""' else f"{item} {rest}")
            if key in needed:
                break
        else:
            starts.append('""')
        return f'"{{" ({" | ".join(starts)}) "}}"'

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._text()
        if isinstance(reference := schema.get("$ref"), str):
            return self._referred(reference)
        if options := self._options(schema):
            return f"({' | '.join(options)})"
        kind = schema.get("type")
        if kind == "object":
            return self._new(self._object(schema))
        if kind == "array":
            item = self._new(self._value(schema.get("items")))
            return f'("[" ({item} ("," {item})*)? "]")'
        return _PLAIN.get(str(kind)) or self._text()

    def _options(self, schema: Mapping[str, Any]) -> list[str]:
        """Return what a value may be one of; none if the schema is no choice."""
        if "const" in schema:
            return [self._constant(schema["const"])]
        if isinstance(values := schema.get("enum"), list):
            return list(map(self._constant, values))
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(schemas := schema.get(key), list):
                return list(map(self._value, schemas))
        kinds = schema.get("type")
        return [self._value({**schema, "type": kind}) for kind in kinds] if isinstance(kinds, list) else []

    def _referred(self, reference: str) -> str:
        if reference not in self._by_reference:
            schema: Any = self._root
            for part in reference.removeprefix("#").strip("/").split("/"):
                schema = schema.get(part, {}) if part and isinstance(schema, Mapping) else schema
            name = self._by_reference[reference] = self._new()
            self._add(name, self._value(schema))
        return self._by_reference[reference]

    def _text(self) -> str:
        return f"({self._quote} {_TEXT} {self._quote})"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"({self._quote} {json.dumps(value)} {self._quote})" if value else f"({self._quote} {self._quote})"
        return json.dumps(json.dumps(value))
