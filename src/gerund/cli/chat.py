"""``gerund chat``: chat with an instruction-tuned model, interactively, from a pipe or from a JSON file."""

import json
import sys
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from gerund.checks import one_of, read_json
from gerund.cli import options, text_io
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from gerund.inference.generate.config import GenerationKeywords
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec
    from gerund.settings.sampling import Sampling
    from gerund.types import Generation

    # Most tokens, sampling, and other settings of an answer.
    Asked = tuple[int, Sampling | None, GenerationKeywords]

# Answers with tool calls after which a question is given up.
_MOST_ROUNDS = 10


@options.takes(
    spec=options.model("MODEL", *options.MACHINE),
    sampling=options.sampling(
        *("temperature", "top_p", "top_k", "typical_p", "min_p", "repetition_penalty", "frequency_penalty"),
        *("presence_penalty", "seed"),
    ),
    asked=options.text_settings("stop", "schema", "regex", "choice"),
)
def command(
    *,
    spec: "ModelSpec",
    messages: Annotated[
        Path | None, typer.Option(help="A JSON file: a list of messages, each with role and content.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate in a turn.")] = 256,
    sampling: dict[str, Any],
    asked: "GenerationKeywords",
    tools: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="A Python function with type hints that the model may call; may be repeated. It is run, and the model "
            "gets its result.",
        ),
    ] = None,
    tool_prompt: Annotated[
        str | None,
        typer.Option(
            help="How tools are described to a model whose chat template knows none: generic, or smollm2 in the words "
            "that SmolLM2 was trained on. [default: the model's own template]"
        ),
    ] = None,
    tool_choice: Annotated[
        str | None,
        typer.Option(
            help="Whether a function is called first: auto, none, required, or the function's name. [default: auto]"
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Chat with a model, in the form of its own chat template.

    On a terminal, type one message per line, until Ctrl-D. What comes through a pipe is one message, and --messages is
    a whole conversation; both are answered once. With --json there is one JSON object: text, score, finished and usage.
    Calls of --tools are shown on standard error.

    For example:

        gerund chat ./model

        echo "What is the weather in Bonn?" | gerund chat ./model --tools weather:forecast

        echo "Name three rivers." | gerund chat ./model --temperature 0.7 --seed 1

        gerund chat ./model --messages conversation.json --json
    """
    from gerund.inference.generate.config import GenerationConfig, ToolPrompt

    how = (max_new_tokens, options.sampling_of(sampling), asked)
    GenerationConfig.of(*how)
    if tool_prompt is not None:
        one_of("tool_prompt", tool_prompt, get_args(ToolPrompt))
    functions = _functions(tools or [])
    if tool_choice is not None:
        if not functions:
            raise ConfigError("--tool-choice needs --tools")
        one_of("tool_choice", tool_choice, ("auto", "none", "required", *functions))
    talks = messages is None and sys.stdin.isatty()
    if talks and as_json:
        raise ConfigError("--json is for one answer; give --messages, or a message through a pipe")
    conversation = _start(messages, system, reads=not talks)
    from gerund.inference.generate.prompts import require_chat_template
    from gerund.light_entry import load_writer

    lm = load_writer(spec, only_writes=True)
    require_chat_template(lm.tokenizer)
    answers = _Answers(lm, how, functions, tool_prompt, tool_choice)
    if talks:
        _talk(answers, conversation)
    elif as_json:
        result = answers.generate(conversation)
        record = {**text_io.as_record(result), "usage": asdict(result.usage)}
        typer.echo(json.dumps(record, ensure_ascii=False))
    else:
        answers.show(conversation)


def _functions(named: list[str]) -> dict[str, "Callable[..., Any]"]:
    """Return the functions named MODULE:FUNCTION by their own names; modules may lie in the current folder."""
    functions: dict[str, Callable[..., Any]] = {}
    if named and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for item in named:
        module, colon, name = item.partition(":")
        if not module or not colon or not name:
            raise ConfigError(f"--tools is MODULE:FUNCTION, such as weather:forecast, not {item!r}")
        try:
            function = getattr(import_module(module), name)
        except (Exception, SystemExit) as error:
            hint = "" if not module.endswith(".py") else f"; name the module without .py: {module[:-3]}:{name}"
            raise ConfigError(f"--tools {item}: {type(error).__name__}: {error}{hint}") from error
        from gerund.inference.generate.tools import function_tool

        if not callable(function):
            raise ConfigError(f"--tools {item}: {name} is not a function")
        functions[function_tool(function)["function"]["name"]] = function
    return functions


def _start(file: Path | None, system: str | None, *, reads: bool) -> list[dict[str, Any]]:
    conversation: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if file is not None:
        read = read_json(file)
        if not isinstance(read, list) or not read or not all(isinstance(message, dict) for message in read):
            raise DataError(f"{file} holds no conversation: a list of messages, each with role and content")
        return [*conversation, *read]
    if reads:
        [text] = text_io.one_text("-", "message")[0].texts
        conversation.append({"role": "user", "content": text})
    return conversation


@dataclass(frozen=True)
class _Answers:
    """Answers of a model that may call functions."""

    lm: "LanguageModel"
    how: "Asked"
    functions: dict[str, "Callable[..., Any]"]
    tool_prompt: str | None
    tool_choice: str | None

    def show(self, conversation: list[dict[str, Any]]) -> str:
        """Print the next turn as it comes, and return it."""
        text = self.generate(conversation, lambda piece: typer.echo(piece, nl=False)).text
        typer.echo()
        return text

    def generate(
        self, conversation: list[dict[str, Any]], show: "Callable[[str], object]" = lambda _: None
    ) -> "Generation":
        """Return the next turn; calls before it, and their results, are added to the conversation."""
        from gerund.inference.generate.prompts import check_conversation
        from gerund.inference.generate.tools import run_call

        max_new_tokens, sampling, asked = self.how
        of_tools: Any = {"tools": list(self.functions.values()), "tool_prompt": self.tool_prompt}
        for number in range(_MOST_ROUNDS):
            # A call that is required in every turn would leave no turn for the answer.
            of_tools["tool_choice"] = "auto" if number and self.tool_choice != "none" else self.tool_choice
            stream = self.lm.stream(check_conversation(conversation), max_new_tokens, sampling, **asked, **of_tools)
            for piece in stream:
                show(piece)
            result = stream.result
            assert result is not None  # the stream was read to its end
            if not result.tool_calls:
                return result
            conversation.append(result.message)
            for call in result.tool_calls:
                outcome = run_call(self.functions, call)
                tell(f"{call.name}({call.arguments}) -> {outcome}")
                conversation.append({"role": "tool", "content": outcome, "tool_call_id": call.id, "name": call.name})
        raise DataError(f"the model called tools {_MOST_ROUNDS} times and gave no answer")


def _talk(answers: _Answers, conversation: list[dict[str, Any]]) -> None:
    """Take turns until the user ends it; report and skip messages that can't be answered."""
    for text in text_io.typed_lines("Type a message; Ctrl-D ends the conversation."):
        before = len(conversation)
        conversation.append({"role": "user", "content": text})
        try:
            answer = answers.show(conversation)
        except InputError as error:
            tell(f"error: {error}")
            del conversation[before:]
            continue
        conversation.append({"role": "assistant", "content": answer})
