"""The body of ``/v1/responses``, and how it becomes a chat."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from gerund.inference.generate.tools import MOST_TOOLS
from gerund.server.errors import ApiError
from gerund.server.schemas.base import ANY, Accepted, Body, Count, not_supported
from gerund.server.schemas.generation import ChatRequest, ResponseFormat, Sampled, StreamOptions, translated
from gerund.server.schemas.tools import MOST_CALLS, Choice, ToolFunction, ToolName

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesTool(ToolFunction):
    """A function that may be called: OpenAI's form without an object around it."""

    without_effect: ClassVar[Accepted | None] = {"strict": ANY, "defer_loading": (False,), "async": (False,)}
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, body: Any) -> Any:
        """Raise an error for tools that OpenAI runs itself."""
        kind = body.get("type") if isinstance(body, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise not_supported(
                "type", f"tools of type {kind[:60]!r} are not supported; only those of type 'function' are"
            )
        return body


class ResponsesToolChoice(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    name: ToolName


class InputPart(Body):
    """A part of a message or of a tool's result."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(("annotations", "logprobs", "cache_control"), ANY)
    type: str
    text: str | None = None
    # Declared, so that the error names the part's type and not this field.
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


Parts = str | Annotated[list[InputPart], Field(fail_fast=True)]


class InputItem(Body):
    """A message, a call of a tool, or its result."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(("id", "status", "phase"), ANY)
    type: Annotated[str, Field(max_length=64)] | None = None
    role: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    content: Parts | None = None
    call_id: Annotated[str, Field(max_length=200)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    arguments: str | None = None
    output: Parts | None = None


class TextConfig(Body):
    """The form of the text."""

    without_effect: ClassVar[Accepted | None] = {"verbosity": ("medium",)}
    format: ResponseFormat | None = None


class ResponsesRequest(Sampled):
    """A conversation to be answered, in the form of OpenAI's Responses API."""

    without_effect: ClassVar[Accepted | None] = {
        "background": (False,),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),  # of models that reason
        "reasoning": ({}, {"effort": None}, {"summary": None}, {"effort": None, "summary": None}, {"effort": "none"}),
    }
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Choice | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """Return the request as a chat."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ApiError(
                    f"{name} is not supported: nothing is stored; send the whole conversation as input",
                    param=name,
                    code="not_supported",
                )
        form = None if self.text is None or self.text.format is None else self.text.format.model_dump(by_alias=True)
        if form is not None and form["type"] == "json_schema" and form["json_schema"] is None:
            form = {"type": "json_schema", "json_schema": {"schema": form["schema"]}}
        choice: Any = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools or ()]
        fields = {
            **{name: getattr(self, name) for name in Sampled.model_fields if name != "model"},
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "response_format": form,
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "stream": self.stream,
        }
        return translated(ChatRequest, {"model": self.model, **fields})

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        for number, item in enumerate(items):
            where = f"input.{number}"
            if item.type == "function_call":
                _add_call(messages, item, where)
            elif item.type == "function_call_output":
                output = _text(item.output, f"{where}.output")
                messages.append({"role": "tool", "content": output, "tool_call_id": item.call_id})
            elif item.type in (None, "message"):
                if item.role is None:
                    raise ApiError(f"{where}.role: a message needs a role, such as user", param=f"{where}.role")
                messages.append({"role": item.role, "content": _text(item.content, f"{where}.content")})
            else:
                raise ApiError(
                    f"{where} is of type {item.type!r}; supported are message, function_call, function_call_output",
                    param=f"{where}.type",
                    code="not_supported",
                )
        return messages


def _add_call(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Append a call; those that follow each other, and the text before them, are one message."""
    if not item.name:
        raise ApiError(f"{where}.name: a call needs the name of a tool", param=f"{where}.name")
    call = {
        "type": "function",
        "id": item.call_id,
        "function": {"name": item.name, "arguments": item.arguments or "{}"},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    calls = messages[-1].setdefault("tool_calls", [])
    if len(calls) >= MOST_CALLS:
        raise ApiError(f"{where}: at most {MOST_CALLS} calls may follow each other", param=where)
    calls.append({name: value for name, value in call.items() if value is not None})


def _text(content: Parts | None, where: str) -> str | list[dict[str, str]]:
    if content is None:
        raise ApiError(f"{where} is missing; give a text", param=where)
    if isinstance(content, str):
        return content
    for place, part in enumerate(content):
        if part.type not in _TEXT_PARTS or part.text is None:
            raise ApiError(
                f"{where}.{place} is of type {part.type[:60]!r}, and this server reads text alone",
                param=f"{where}.{place}",
                code="not_supported",
            )
    return [{"type": "text", "text": part.text or ""} for part in content]
