"""Parse what a model generates into text and tool calls, while it is streamed.

Reading is lenient: keys in another order, a missing closing tag, a code fence or arguments in quotes are all right. A
call is one only if a tool of that name was offered; all else stays text. Arguments are passed on as written, so those
that are no JSON stay as they are.

Knows: formats. Does not know: schemas.
"""

import ast
import json
import re
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gerund.inference.generate.detokenizing import overlap
from gerund.inference.generate.tool_formats import ToolFormat
from gerund.types import Generation, ToolCall

# Up to `arguments`, so that they can be passed on as they come.
_OBJECT = re.compile(
    r'[\s\[,]*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?:"id"\s*:\s*"[^"]*"\s*,\s*)?'
    r'"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OBJECT_END = re.compile(r'(?:[^"{}<]|"(?:[^"\\]|\\.)*")*\}')
_BARE = re.compile(r"(?:```(?:json|tool_call|tool_code)?\s*)?(?=\[?\s*\{)")
_FENCE = re.compile(r"\s*```[a-z_]*\s*|\s*```\s*")
_LONGEST_HEAD = 400
# A Python literal is read only up to here: deep nesting would exhaust Python's parser.
_LONGEST_LITERAL = 20_000


@dataclass(frozen=True)
class CallDelta:
    """A part of a tool call: the first has its name and id, each the next characters of its arguments."""

    index: int
    arguments: str
    name: str | None = None
    id: str | None = None


Event = str | CallDelta


class CallReader:
    """Read one answer. Text is passed on until the first call; what is written between and after calls is dropped."""

    def __init__(self, form: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._format, self._names, self._parallel = form, names, parallel
        self._head = _OBJECT
        if form.style == "named":
            self._head = re.compile(rf"\s*([^\s\[{{]+)(?:\[CALL_ID\]\w+)?\s*{re.escape(form.separator)}\s*(?=\{{)")
        self._buffer, self._opened, self._has_text = "", "", False
        self._depth, self._in_string, self._escaped = 0, False, False
        self._step: Callable[[bool], Sequence[Event]] = self._text
        self.count = 0

    def put(self, text: str) -> list[Event]:
        """Read further characters, and return what is certain."""
        self._buffer += text
        return self._read(last=False)

    def end(self) -> list[Event]:
        """Return what was held back: nothing follows."""
        return self._read(last=True)

    def _read(self, *, last: bool) -> list[Event]:
        events: list[Event] = []
        while True:
            before = (self._step, len(self._buffer))
            for event in self._step(last):
                # Text between calls, such as line breaks, means nothing.
                if event and (isinstance(event, CallDelta) or not self.count):
                    self._has_text = True
                    events.append(event)
            if before == (self._step, len(self._buffer)):
                return events

    # ------------------------------------------------- the states: each takes from the buffer, and returns what it read

    def _text(self, last: bool) -> Sequence[Event]:
        place = self._buffer.find(self._format.opening)
        if place >= 0:
            text = self._buffer[:place].rstrip()
            end = place + len(self._format.opening)
            self._opened, self._buffer = self._buffer[len(text) : end], self._buffer[end:]
            self._step = self._block
            return [text]
        if not self._has_text and self._format.style != "call":
            events = self._bare(last)
            if events is not None:
                return events
        held = 0
        if not last:
            held = overlap(self._buffer, self._format.opening)
            kept = self._buffer[: len(self._buffer) - held]
            held += len(kept) - len(kept.rstrip())
        certain = len(self._buffer) - held
        piece, self._buffer = self._buffer[:certain], self._buffer[certain:]
        return [piece]

    def _bare(self, last: bool) -> Sequence[Event] | None:
        """Begin a call that has no opening, where the text begins with one; None if it does not."""
        stripped = self._buffer.lstrip()
        start = _BARE.match(stripped)
        if start is None:
            # "`" or "[" may become a beginning.
            may_begin = not last and len(stripped) < 20 and re.fullmatch(r"(\[\s*|`{1,3}[a-z_]*\s*)?", stripped)
            return [] if may_begin else None
        head = _OBJECT.match(stripped[start.end() :])
        if head is not None:
            if _read_name(head[1]) not in self._names:
                return None
            self._opened, self._buffer = "", stripped[start.end() :]
            self._step = self._block
            return []
        if not last:
            return [] if len(stripped) < _LONGEST_HEAD else None
        calls = self._parsed(stripped)
        if calls:
            self._buffer = ""
        return calls or None

    def _block(self, last: bool) -> Sequence[Event]:
        if not self._parallel and self.count:
            self._buffer = ""
            return []
        head = None if self._format.style == "call" else self._head.match(self._buffer)
        if head is not None:
            name = head[1] if self._format.style == "named" else _read_name(head[1])
            if name is not None and name in self._names:
                self._buffer = self._buffer[head.end() :]
                self._depth, self._in_string, self._escaped = 0, False, False
                self._step = self._arguments
                return [self._started(name)]
        closing = self._format.closing
        end = self._buffer.find(closing) if closing else -1
        if end < 0 and not last:
            return []
        block = self._buffer if end < 0 else self._buffer[:end]
        self._buffer = "" if end < 0 else self._buffer[end + len(closing) :]
        self._step = self._text
        return self._parsed(block) or [self._opened + block + ("" if end < 0 else closing)]

    def _started(self, name: str, arguments: str = "") -> CallDelta:
        self.count += 1
        # Mistral's templates want nine letters and digits as the id.
        return CallDelta(self.count - 1, arguments, name, uuid.uuid4().hex[:9])

    def _arguments(self, last: bool) -> Sequence[Event]:
        del last
        at, closing = 0, self._format.closing[:1]
        for at, letter in enumerate(self._buffer, 1):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = not self._escaped and letter == "\\"
            elif letter == closing:  # not closed, and yet at its end
                at -= 1
                self._step = self._between
                break
            elif letter == '"':
                self._in_string = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if not self._depth:
                    self._step = self._between if self._format.style == "named" else self._rest
                    break
        piece, self._buffer = self._buffer[:at], self._buffer[at:]
        return [CallDelta(self.count - 1, piece)] if piece else []

    def _rest(self, last: bool) -> Sequence[Event]:
        """Skip what follows the arguments in their object, such as an id."""
        del last
        match = _OBJECT_END.match(self._buffer)
        if match is not None:
            self._buffer = self._buffer[match.end() :]
        if match is not None or "<" in self._buffer or len(self._buffer) > _LONGEST_HEAD:
            self._step = self._between
        return []

    def _between(self, last: bool) -> Sequence[Event]:
        """Find the next call."""
        form = self._format
        self._buffer = self._buffer.lstrip(" \t\r\n,;]`")
        if form.closing and self._buffer.startswith(form.closing):
            self._buffer, self._step = self._buffer[len(form.closing) :], self._text
        elif self._buffer.startswith("{") and form.style != "named":
            self._opened, self._step = "", self._block
        elif self._buffer and (last or not any(mark.startswith(self._buffer) for mark in (form.closing, form.opening))):
            self._step = self._text
        return []

    # --------------------------------------------------------------------------------------------- whole blocks

    def _parsed(self, block: str) -> list[Event]:
        """Return the calls in a block that does not begin as one usually does."""
        if self._format.style == "call":
            call = _call_notation(block, self._format.quote)
            return [] if call is None or call[0] not in self._names else [self._started(*call)]
        calls: list[Event] = []
        for value in _json_values(block):
            for entry in value if isinstance(value, list) else [value]:
                named = _named_call(entry)
                if named is not None and named[0] in self._names and (self._parallel or not self.count):
                    calls.append(self._started(*named))
        return calls


def _read_name(quoted: str) -> str | None:
    """Return a name that is written in JSON; None where its escapes are none of JSON's."""
    try:
        name: str = json.loads(quoted, strict=False)
    except ValueError:
        return None
    return name


def _named_call(value: Any) -> tuple[str, str] | None:
    """Return the name and arguments of a call in any of the usual forms."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = value["function"]
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    if arguments is None:
        return None
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _json_values(block: str) -> list[Any]:
    """Return the values in a text of JSON, or of a Python literal, that follow each other."""
    text, values, at = _FENCE.sub("", block).strip(), [], 0
    decoder = json.JSONDecoder(strict=False)
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        values.append(value)
        at += len(text[at:]) - len(text[at:].lstrip(" \t\r\n,;"))
    if values or len(text) > _LONGEST_LITERAL:
        return values
    try:
        return [json.loads(json.dumps(ast.literal_eval(text)))]
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return []


def _call_notation(block: str, quote: str) -> tuple[str, str] | None:
    """Return the name and arguments in ``call:name{key:value}``; arguments that cannot be read stay as they are.

    >>> _call_notation("call:add{a:1,b:<q>x<q>,c:{d:[true]},e:two words}", "<q>")
    ('add', '{"a": 1, "b": "x", "c": {"d": [true]}, "e": "two words"}')
    """
    head = re.match(r"\s*(?:call:)?([^\s{]+)\s*(?=\{)", block)
    if head is None:
        return None
    body = block[head.end() :].strip()
    pieces, written = body.split(quote), ""
    for number, piece in enumerate(pieces):
        # Every second piece is a text; in the others, keys and names of values are bare.
        written += json.dumps(piece, ensure_ascii=False) if number % 2 else _quoted(piece)
    try:
        return head[1], json.dumps(json.loads(written, strict=False), ensure_ascii=False)
    except (ValueError, RecursionError):
        return head[1], body


def _quoted(piece: str) -> str:
    """Put keys into quotes, and the texts that the model left without them."""
    keyed = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)", r'\1"\2"\3', piece)
    return re.sub(r"([:\[,]\s*)(?!(?:true|false|null)\s*[,\]}])([A-Za-z_][^,{}\[\]\"]*)", r'\1"\2"', keyed)


def with_calls(generation: Generation, reader: CallReader) -> Generation:
    """Return a completion with the tool calls in its text."""
    return _joined(generation, [*reader.put(generation.text), *reader.end()])


def _joined(generation: Generation, events: Sequence[Event]) -> Generation:
    texts: list[str] = []
    calls: list[ToolCall] = []
    arguments: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, str):
            texts.append(event)
            continue
        if event.name is not None:
            calls.append(ToolCall(event.name, "", event.id or ""))
        arguments.setdefault(event.index, []).append(event.arguments)
    complete = (replace(call, arguments="".join(arguments[number])) for number, call in enumerate(calls))
    return replace(generation, text="".join(texts), tool_calls=tuple(complete))
