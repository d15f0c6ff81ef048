"""Tool call formats of model families: one table, one entry per format.

A format is recognized by what the model's chat template contains. From its entry come the grammar that constrains a
required call (llguidance's Lark syntax, with each tool's JSON schema in it) and what ``CallReader`` looks for.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gerund.inference.generate.tool_grammar import ArgumentRules

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
