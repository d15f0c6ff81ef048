"""Tools in a chat: definitions, tool choice, and a prompt for chat templates that don't support tools.

Knows: OpenAI's form of tools and Python functions. Does not know: how any model writes a call (``tool_formats``).
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, get_args

from pydantic import ConfigDict, PydanticSchemaGenerationError, PydanticUserError, ValidationError, create_model

from gerund.checks import flag, is_listing, one_of
from gerund.errors import ConfigError, ModelError, unknown_name
from gerund.inference.generate.config import Constraint, GenerationConfig, RankedKeywords, ToolPrompt, generation_config
from gerund.inference.generate.prompts import (
    NEXT_TURN,
    Prompt,
    TemplateOptions,
    checked_messages,
    is_message,
    render,
    require_chat_template,
    require_tools_in_template,
)
from gerund.inference.generate.sequence import Emit, Piece
from gerund.inference.generate.tool_formats import FORMATS, HERMES, SMOLLM2, ToolFormat, format_of
from gerund.inference.generate.tool_reading import CallReader, with_calls
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Generation, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_TOOLS = 1024
NAME_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.:/\-]{0,127}"
_NAME = re.compile(NAME_PATTERN)
_CHOICES = ("auto", "none", "required")


class ToolKeywords(TypedDict, total=False):
    """Options of a chat with tools; all have defaults."""

    tools: Sequence[Any] | None
    """Tools that the answer may call: Python functions with type hints, or dicts in OpenAI's form. Nothing is run: the
    calls are in ``tool_calls`` of the answer."""

    tool_choice: str | Mapping[str, Any] | None
    """``auto``: the model decides. ``required``: the answer is one call or several. ``none``: it is none. A tool's
    name, also in OpenAI's form: the answer is a call of that tool. Where calls are required, their arguments match the
    tool's JSON schema, which needs llguidance. Default: ``auto``."""

    parallel_tool_calls: bool | None
    """Whether an answer may have several calls. True."""

    tool_prompt: ToolPrompt | None
    """How tools are described to a model whose chat template knows none: ``generic``, or ``smollm2`` in the words that
    SmolLM2 was trained on. None uses the model's own template, and refuses one that knows no tools."""


class ChatKeywords(RankedKeywords, ToolKeywords, total=False):
    """Options of a chat."""


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request, for one model.

    Attributes:
        form: how the model writes calls.
        tools: in OpenAI's form, checked; none if there are only earlier calls in the conversation.
        choice: ``auto``, ``required`` or a tool's name.
        parallel: whether an answer may have several calls.
        prompt: how tools are described, where not by the model's own template.
        ids: the texts in ``form.control`` that are control tokens of the model.
    """

    form: ToolFormat
    tools: tuple[dict[str, Any], ...]
    choice: str
    parallel: bool
    prompt: ToolPrompt | None
    ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Mapping[str, Any]], options: ToolKeywords
    ) -> "ToolUse | None":
        """Return the tools of a chat; None if it neither offers any nor has earlier calls.

        Raises:
            ConfigError: a tool is malformed, or ``tool_choice`` names none of them.
            ModelError: the model's chat template knows no tools, or its format of calls is unknown.
        """
        tools = check_tools(options.get("tools"))
        choice = _choice(options.get("tool_choice"), tools)
        parallel, prompt = options.get("parallel_tool_calls"), options.get("tool_prompt")
        parallel = True if parallel is None else flag("parallel_tool_calls", parallel)
        if prompt is not None:
            one_of("tool_prompt", prompt, get_args(ToolPrompt))
        offered = () if choice == "none" else tuple(tools)
        earlier = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        if not offered and not earlier:
            return None
        if earlier:
            checked_messages(messages)  # a malformed message is the first mistake to mention
        require_chat_template(tokenizer)
        form = _PROMPTS[prompt].form if prompt is not None else _own_format(tokenizer, requires_calls=bool(offered))
        added = tokenizer.added_tokens_decoder.items()
        ids = {
            added_token.content: token
            for token, added_token in added
            if added_token.special and added_token.content in form.control
        }
        return cls(form, offered, choice, parallel and choice in _CHOICES, prompt, ids)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the template is to get them."""
        checked = checked_messages(messages)
        if self.prompt is not None:
            return _described(checked, self.tools, _PROMPTS[self.prompt])
        if self.form.name.startswith("mistral"):
            return [_with_short_ids(message) for message in checked]
        return checked

    def template(self, options: TemplateOptions) -> TemplateOptions:
        """Return the options for rendering the conversation."""
        if self.prompt is not None:
            return options
        return replace(options, tools=self.tools, tools_variable=self.form.variable)

    def settings(self, settings: GenerationConfig) -> GenerationConfig:
        """Return the settings with what the calls need: a grammar where they are required, and their control tokens.

        Raises:
            ConfigError: the text has to match something that no call matches.
        """
        if not self.tools:
            return settings
        constraint = settings.constraint
        if constraint is not None and (self.choice != "auto" or constraint.kind != "schema"):
            how = f"tool_choice={self.choice!r}" if self.choice != "auto" else "tools"
            raise ConfigError(f"`{constraint.kind}` can't be combined with {how}: the answer is either. Remove one.")
        if constraint is not None or self.choice != "auto":
            schema = None if constraint is None else constraint.source
            tools = [tool for tool in self.tools if self.choice in (*_CHOICES, tool["function"]["name"])]
            try:
                grammar = self.form.grammar(tools, parallel=self.parallel, schema=schema, ids=self.ids)
            except RecursionError as error:
                raise ConfigError("`tools` has a schema that is nested too deeply") from error
            constraint = Constraint("tools", grammar)
        stop = tuple(dict.fromkeys([*settings.stop, *self.form.stops]))
        return replace(settings, constraint=constraint, spelled_tokens=tuple(self.ids), stop=stop)

    def reader(self) -> CallReader | None:
        """Return what reads one answer; None if no tools are offered."""
        if not self.tools:
            return None
        names = [tool["function"]["name"] for tool in self.tools]
        return CallReader(self.form, names, parallel=self.parallel)

    def emitting(self, emit: Emit) -> Emit:
        """Return a callback that passes on the text of an answer without its tool calls; they are in the result."""
        reader = self.reader()
        if reader is None:
            return emit

        def put(piece: Piece) -> None:
            parts = [*reader.put(piece.text), *(reader.end() if piece.result is not None else ())]
            text = "".join(part for part in parts if isinstance(part, str))
            result = None if piece.result is None else self.read(piece.result)
            emit(replace(piece, text=text, result=result))

        return put

    def read(self, generation: Generation) -> Generation:
        """Return an answer with its tool calls."""
        reader = self.reader()
        if reader is None:
            return generation
        if generation.stop in self.form.stops:
            generation = replace(generation, stop=None)
        return with_calls(generation, reader)


def chat_settings(
    max_new_tokens: int, sampling: Sampling | None, rerank: Rerank | None, options: ChatKeywords
) -> tuple[GenerationConfig, Rerank | None, ToolKeywords]:
    """Return the settings of a chat's answer, how answers are ranked, and the options of its tools."""
    of_tools: Any = {name: value for name, value in options.items() if name in ToolKeywords.__annotations__}
    of_text: Any = {name: value for name, value in options.items() if name not in of_tools}
    settings, rerank = generation_config(max_new_tokens, sampling, rerank, of_text)
    if rerank is not None and of_tools.get("tools"):
        raise ConfigError("`tools` can't be combined with `rerank`, which ranks texts. Remove one.")
    return settings, rerank, of_tools


def chat_prompt(
    tokenizer: "PreTrainedTokenizerBase", given: Prompt, settings: GenerationConfig, options: ToolKeywords
) -> tuple[Prompt, GenerationConfig, ToolUse | None]:
    """Return a conversation as a prompt, with the settings for its answer, and its tools; other prompts unchanged.

    Raises:
        ConfigError: tools are given with a prompt that is no conversation.
    """
    if isinstance(given, str) or not is_message(given[0]):
        if options.get("tools"):
            raise ConfigError("`tools` are for conversations; give messages, such as [{'role': 'user', ...}]")
        return given, settings, None
    messages: Any = given
    use = ToolUse.of(tokenizer, messages, options)
    if use is None:
        return given, settings, None
    return render(tokenizer, use.conversation(messages), use.template(NEXT_TURN)), use.settings(settings), use


# ------------------------------------------------------------------------------------------------------ validation


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return tools in OpenAI's form.

    Raises:
        ConfigError: a tool has no name, two have the same one, or parameters are no JSON schema.
    """
    if tools is None:
        return []
    if not is_listing(tools):
        raise ConfigError(f"tools is a list of functions, or of dicts in OpenAI's form, not {str(tools)[:100]!r}")
    if len(tools) > MOST_TOOLS:
        raise ConfigError(f"tools has {len(tools)} tools; at most {MOST_TOOLS} are taken")
    checked = [_tool(number, tool) for number, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in checked]
    twice = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if twice is not None:
        raise ConfigError(f"tools has two tools named {twice!r}")
    return checked


def _tool(number: int, tool: Any) -> dict[str, Any]:
    if callable(tool):
        return function_tool(tool)
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise ConfigError(f"tool {number} in tools is of type {str(kind)[:60]!r}; only 'function' is supported")
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = "no name" if name is None else f"the name {str(name)[:60]!r}"
        raise ConfigError(f"tool {number} in tools has {shown}; give letters, digits, _ and -, at most 128")
    description = function.get("description") or ""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(description, str) or not isinstance(parameters, Mapping):
        raise ConfigError(f"tool {name!r} has a description that is no text, or parameters that are no JSON schema")
    if parameters.get("type", "object") != "object":
        raise ConfigError(f"tool {name!r}: its parameters are of type {parameters['type']!r}; a tool's are an object")
    form = {"name": name, "description": description, "parameters": parameters}
    try:
        json.dumps(form, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"tool {name!r} cannot be written as JSON: {error}") from error
    return {"type": "function", "function": form}


def _choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return ``auto``, ``none``, ``required`` or the name of a tool."""
    if choice is None:
        return "auto" if tools else "none"
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        choice = function.get("name") if isinstance(function, Mapping) else None
    elif choice == "any":  # Mistral's and LangChain's name
        choice = "required"
    names = [tool["function"]["name"] for tool in tools]
    if not isinstance(choice, str) or choice not in (*_CHOICES, *names):
        raise unknown_name("`tool_choice`", choice, (*_CHOICES, *names[:20]))
    if choice != "none" and not tools:
        raise ConfigError(f"tool_choice={choice!r} needs tools")
    return choice


def _own_format(tokenizer: "PreTrainedTokenizerBase", *, requires_calls: bool) -> ToolFormat:
    """Return the format that the model's own chat template has."""
    form = format_of(require_tools_in_template(tokenizer))
    if form is None:
        if not requires_calls:
            return HERMES  # nothing is read: the template alone writes the earlier calls
        known = ", ".join(form.name for form in FORMATS)
        raise ModelError(
            f"this model writes tool calls in a format that is unknown here; known are those of {known}. To describe "
            "the tools in the system message instead, set tool_prompt='generic' (--tool-prompt generic)"
        )
    return form


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with ids of nine letters and digits, which Mistral's templates demand."""
    calls = [{**call, "id": _short(call["id"])} for call in message.get("tool_calls", ())]
    changes = {"tool_call_id": _short(message["tool_call_id"])} if "tool_call_id" in message else {}
    return {**message, **changes, **({"tool_calls": calls} if calls else {})}


def _short(given: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", given):
        return given
    from hashlib import sha256

    return sha256(given.encode()).hexdigest()[:9]


# ----------------------------------------------------------------- templates that know no tools: a system message


@dataclass(frozen=True)
class _ToolPrompt:
    form: ToolFormat
    text: str


_PROMPTS = {
    "generic": _ToolPrompt(
        HERMES,
        "You can call functions. These are their signatures, as JSON:\n<tools>\n{tools}\n</tools>\n"
        "To call a function, write nothing but its name and arguments as JSON between tags, and the result is given to "
        'you:\n<tool_call>\n{{"name": "function name", "arguments": {{"argument": "value"}}}}\n</tool_call>\n'
        "If no function is needed, answer in plain words.",
    ),
    # The model card of SmolLM2-1.7B-Instruct, section "Function calling".
    "smollm2": _ToolPrompt(
        SMOLLM2,
        "You are an expert in composing functions. You are given a question and a set of possible functions. \n"
        "Based on the question, you will need to make one or more function/tool calls to achieve the purpose. \n"
        "If none of the functions can be used, point it out and refuse to answer. \n"
        "If the given question lacks the parameters required by the function, also point it out.\n\n"
        "You have access to the following tools:\n<tools>[{tools}]</tools>\n\n"
        "The output MUST strictly adhere to the following format, and NO other text MUST be included.\n"
        "The example format is as follows. Please make sure the parameter type is correct. If no function call is "
        "needed, please make the tool calls an empty list '[]'.\n"
        '<tool_call>[\n{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},\n'
        "... (more tool calls as required)\n]</tool_call>",
    ),
}


def _described(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], prompt: _ToolPrompt
) -> list[dict[str, Any]]:
    """Return a conversation in which tools, calls and results are plain text."""
    plain: list[dict[str, Any]] = []
    is_list = prompt.form.style == "list"
    for message in messages:
        text, role = message["content"], message["role"]
        if role == "tool":
            text, role = f"<tool_response>\n{text}\n</tool_response>", "user"
            if plain and plain[-1].get("holds_results"):
                plain[-1]["content"] += f"\n{text}"
                continue
        elif calls := message.get("tool_calls"):
            written = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            blocks = [f"[{', '.join(written)}]"] if is_list else [f"\n{block}\n" for block in written]
            text = "\n".join([*filter(None, [text]), *(f"<tool_call>{block}</tool_call>" for block in blocks)])
        plain.append({"role": role, "content": text, "holds_results": message["role"] == "tool"})
    if tools:
        signatures = [json.dumps(tool if not is_list else tool["function"], ensure_ascii=False) for tool in tools]
        description = prompt.text.format(tools=(", " if is_list else "\n").join(signatures))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{description}"
        else:
            plain.insert(0, {"role": "system", "content": description})
    return [{"role": message["role"], "content": message["content"]} for message in plain]


# ------------------------------------------------------------------------------------------------ Python functions


def function_tool(function: Callable[..., Any]) -> dict[str, Any]:
    """Return a Python function as a tool in OpenAI's form: the schema from its type hints, the rest from its docstring.

    Raises:
        ConfigError: a parameter has no type hint, or one that no JSON schema describes.

    >>> def weather(city: str, days: int = 1) -> str:
    ...     '''Forecast the weather.'''
    >>> function_tool(weather)["function"]["parameters"]["required"]
    ['city']
    """
    name = getattr(function, "__name__", "")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a tool is a function with a name of letters, digits and _, not {function!r}")
    described, helps = _docstring(inspect.getdoc(function) or "")
    try:
        schema = _arguments_model(function).model_json_schema()
    except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError) as error:
        raise ConfigError(f"the tool {name!r} has a type hint that no JSON schema describes: {error}") from error
    schema.pop("title", None)
    for key, about in schema.get("properties", {}).items():
        about.pop("title", None)
        if helps.get(key):
            about.setdefault("description", " ".join(helps[key].split()))
    form = {"name": name, "description": described, "parameters": schema}
    return {"type": "function", "function": form}


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring in Google's style, and what its ``Args`` section says of each parameter.

    It reads a docstring as transformers does for a model's chat template.
    """
    described = re.split(r"Args:|Returns:|Raises:", text, maxsplit=1)[0].strip()
    section = re.search(r"\n\s*Args:\n(.*?)(?:Returns:|Raises:|\Z)", text, re.DOTALL)
    helps: dict[str, str] = {}
    name, indent = "", 0
    for line in filter(str.strip, section[1].split("\n") if section else []):
        begins = re.match(r"([ \t]*)(\w+):\s*(.*)", line)
        if begins is not None and (not name or len(begins[1]) <= indent):
            name, indent = begins[2], len(begins[1])
            helps[name] = begins[3].strip()
        elif name:
            helps[name] += f" {line.strip()}"
    return described, helps


def _arguments_model(function: Callable[..., Any]) -> Any:
    """Return a model of pydantic with a function's parameters."""
    name = function.__name__
    fields: dict[str, Any] = {}
    hints = inspect.get_annotations(function, eval_str=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"the tool {name!r} takes {parameter}; a tool's parameters are named one by one")
        if parameter.name not in hints:
            raise ConfigError(f"the tool {name!r} has no type hint for {parameter.name!r}, so nothing can describe it")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    return create_model(name, __config__=ConfigDict(arbitrary_types_allowed=False), **fields)


def run_call(functions: Mapping[str, Callable[..., Any]], call: ToolCall) -> str:
    """Run the function that a call names, and return its result as text; an error is a result, for the model to read.

    >>> def add(a: int, b: int = 1) -> int:
    ...     return a + b
    >>> run_call({"add": add}, ToolCall("add", '{"a": 2}', "1")), run_call({"add": add}, ToolCall("add", "{}", "1"))
    ('3', 'error: a: Field required')
    """
    function = functions.get(call.name)
    if function is None or not call.is_valid:
        return (
            f"error: there is no tool {call.name!r}" if function is None else "error: the arguments are no JSON object"
        )
    try:
        arguments = _arguments_model(function).model_validate(json.loads(call.arguments))
        result = function(**{name: getattr(arguments, name) for name in type(arguments).model_fields})
    except ValidationError as error:
        first = error.errors()[0]
        return f"error: {'.'.join(map(str, first['loc']))}: {first['msg']}"
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    try:
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(result)
