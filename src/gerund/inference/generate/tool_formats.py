"""Tool call formats of model families: one table, one entry per format.

A format is recognized by what the model's chat template contains. From its entry come the grammar that constrains a
required call (llguidance's Lark syntax, with each tool's JSON schema in it) and what ``CallReader`` looks for.

Gemma writes arguments in a form of its own, ``{city:<escape>Bonn<escape>,days:3}``: keys are bare and in alphabetical
order, texts stand between quote tokens. The keywords of JSON schema that have no counterpart there, such as ``minimum``
or ``pattern``, are not enforced.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

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


NO_IDS: Mapping[str, int] = MappingProxyType({})
Style = Literal["object", "list", "named", "call"]


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls.

    Attributes:
        name: the format's name in messages.
        marks: texts that all occur in the chat templates that use it; none for formats that no template uses.
        style: ``object``: each call is ``{"name": ..., "arguments": {...}}`` between ``opening`` and ``closing``.
            ``list``: all calls are one list of such objects. ``named``: ``opening``, the name, ``separator`` and the
            arguments. ``call``: ``call:name{key:value}``, with texts between ``quote``.
        opening: what precedes a call, or the list.
        closing: what follows it.
        key: the key of the arguments in the object.
        line: what separates opening, object and closing.
        starts_bare: whether ``opening`` is omitted where the answer is nothing but a call.
        unmarked: texts of which none occurs in the chat templates that use it.
        parallel: whether an answer may have several calls.
        separator: what separates the name from the arguments.
        quote: the token around texts.
        stops: control tokens that end an answer after its calls.
        variable: what the chat template calls the tools.
    """

    name: str
    marks: tuple[str, ...]
    style: Style
    opening: str
    closing: str = ""
    key: str = "arguments"
    line: str = ""
    starts_bare: bool = False
    unmarked: tuple[str, ...] = ()
    parallel: bool = True
    separator: str = ""
    quote: str = ""
    stops: tuple[str, ...] = ()
    variable: str = "tools"

    @property
    def control(self) -> tuple[str, ...]:
        """Texts that may be control tokens, and have to stay in the answer."""
        return tuple(filter(None, (self.opening, self.closing, self.separator, self.quote)))

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        parallel: bool,
        schema: str | None = None,
        ids: Mapping[str, int] = NO_IDS,
    ) -> str:
        """Return a grammar of one or several calls of these tools; with ``schema``, or of a JSON that it allows.

        ``ids`` has the texts in ``control`` that are control tokens of the model.
        """

        def literal(text: str) -> str:
            parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
            return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)

        several, line = parallel and self.parallel, self.line
        opening = "" if self.starts_bare else self.opening
        rules = ["start: calls" if schema is None else f"start: calls | answer\nanswer: %json {schema}"]
        if self.style == "list":
            more = '(", " call)*' if several else ""
            rules.append(f"calls: {literal(opening + line + '[')} call {more} {literal(']' + self.closing)}")
        else:
            rules.append("calls: one" + (f" ({literal(line)} one)*" if several else ""))
            rules.append(f"one: {literal(opening + line)} call {literal(line + self.closing)}")
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
        for number, tool in enumerate(tools):
            rules += self._call(f"args_{number}", f"call_{number}", tool["function"], literal)
        return "\n".join(rules) + "\n"

    def _call(self, arguments: str, call: str, function: Mapping[str, Any], literal: Callable[[str], str]) -> list[str]:
        """Return the rules for calls of one tool, by the names of the rules."""
        name, parameters = function["name"], function["parameters"]
        if self.style == "call":
            rules = ArgumentRules(arguments, literal(self.quote), parameters)
            return [f"{call}: {literal(f'call:{name}')} {arguments}", *rules.rules]
        # Small models invent keys; a schema that says nothing of others means none.
        closed = {"additionalProperties": False} if "properties" in parameters or not parameters else {}
        schema = json.dumps({"type": "object", **closed, **parameters, "x-guidance": _SPACING})
        written, after = literal(name + self.separator), ""
        if self.style != "named":
            written, after = literal(f'{{"name": {json.dumps(name)}, "{self.key}": '), '"}"'
        return [f"{call}: {written} {arguments} {after}", f"{arguments}: %json {schema}"]


# As JSON is spaced in what models are trained on; free spacing lets a small model write spaces without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

FORMATS = (
    # Gemma 4 and functiongemma: https://ai.google.dev/gemma/docs
    ToolFormat("gemma", ("<|tool_call>",), "call", "<|tool_call>", "<tool_call|>", quote='<|"|>',
               stops=("<|tool_response>",)),
    ToolFormat("functiongemma", ("<start_function_call>",), "call", "<start_function_call>", "<end_function_call>",
               quote="<escape>", stops=("<start_function_response>",)),
    # Mistral from 2025 on, and before.
    ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]"), "named", "[TOOL_CALLS]", separator="[ARGS]"),
    ToolFormat("mistral-list", ("[TOOL_CALLS]",), "list", "[TOOL_CALLS]", line=" ", unmarked=("[ARGS]",)),
    # SmolLM3 has the format of Hermes, and takes the tools as `xml_tools`.
    ToolFormat("smollm", ("<tool_call>", "xml_tools"), "object", "<tool_call>", "</tool_call>", line="\n",
               variable="xml_tools"),
    # Hermes, Qwen 2.5 and 3; not Qwen's coders, whose arguments are XML.
    ToolFormat("hermes", ("<tool_call>",), "object", "<tool_call>", "</tool_call>", line="\n",
               unmarked=("<function=", "<arg_key>")),
    # Llama 3.1 to 3.3: the template refuses several calls.
    ToolFormat("llama", ("ipython", "<|start_header_id|>"), "object", "<|python_tag|>", key="parameters",
               starts_bare=True, parallel=False),
)  # fmt: skip

HERMES = next(form for form in FORMATS if form.name == "hermes")
# What SmolLM2 was trained on; its template has no tools.
SMOLLM2 = ToolFormat("smollm2", (), "list", "<tool_call>", "</tool_call>")


def format_of(template: str) -> ToolFormat | None:
    """Return the format of the models with a chat template; None if it is unknown.

    >>> format_of("{% for tool in tools %} ... <tool_call>").name
    'hermes'
    """
    for form in FORMATS:
        if all(mark in template for mark in form.marks) and not any(mark in template for mark in form.unmarked):
            return form
    return None
