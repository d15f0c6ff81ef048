"""``gerund chat``: chat with an instruction-tuned model, interactively, from a pipe or from a JSON file."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import read_json
from gerund.cli import options, text_io
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError, TextError

if TYPE_CHECKING:
    from gerund.inference.generate.config import GenerationKeywords
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec
    from gerund.settings.sampling import Sampling

    # Most tokens, sampling, and other settings of an answer.
    Asked = tuple[int, Sampling | None, GenerationKeywords]


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
    as_json: options.Json = False,
) -> None:
    """Chat with a model, in the form of its own chat template.

    On a terminal, type one message per line, until Ctrl-D. What comes through a pipe is one message, and --messages is
    a whole conversation; both are answered once. With --json there is one JSON object: text, score, finished and usage.

    For example:

        gerund chat ./model

        echo "Name three rivers." | gerund chat ./model --temperature 0.7 --seed 1

        gerund chat ./model --messages conversation.json --json
    """
    from gerund.inference.generate.config import GenerationConfig

    how = (max_new_tokens, options.sampling_of(sampling), asked)
    GenerationConfig.of(*how)
    talks = messages is None and sys.stdin.isatty()
    if talks and as_json:
        raise ConfigError("--json is for one answer; give --messages, or a message through a pipe")
    conversation = _start(messages, system, reads=not talks)
    from gerund.entry import load_writer
    from gerund.inference.generate.prompts import require_chat_template

    lm = load_writer(spec, only_writes=True)
    require_chat_template(lm.tokenizer)
    if talks:
        _talk(lm, conversation, how)
    elif as_json:
        _print_json(lm, conversation, how)
    else:
        _answer(lm, conversation, how)


def _start(file: Path | None, system: str | None, *, reads: bool) -> list[dict[str, Any]]:
    """Return the conversation so far."""
    conversation: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
    if file is not None:
        read = read_json(file)
        if not isinstance(read, list) or not read or not all(isinstance(one, dict) for one in read):
            raise DataError(f"{file} holds no conversation: a list of messages, each with role and content")
        return [*conversation, *read]
    if reads:
        [text] = text_io.one_text("-", "message")[0].texts
        conversation.append({"role": "user", "content": text})
    return conversation


def _answer(lm: "LanguageModel", conversation: list[dict[str, Any]], how: "Asked") -> str:
    """Print the next turn as it comes, and return it."""
    from gerund.inference.generate.prompts import check_conversation

    max_new_tokens, sampling, asked = how
    stream = lm.stream(check_conversation(conversation), max_new_tokens, sampling, **asked)
    text = ""
    for piece in stream:
        typer.echo(piece, nl=False)
        text += piece
    typer.echo()
    return text


def _talk(lm: "LanguageModel", conversation: list[dict[str, Any]], how: "Asked") -> None:
    """Take turns until the user ends it; report and skip messages that can't be answered."""
    typer.echo("Type a message; Ctrl-D ends the conversation.", err=True)
    while True:
        try:
            text = input("> ")
        except EOFError:
            typer.echo()
            return
        if not text.strip():
            continue
        conversation.append({"role": "user", "content": text})
        try:
            answer = _answer(lm, conversation, how)
        except TextError as error:
            tell(f"error: {error}")
            conversation.pop()
            continue
        conversation.append({"role": "assistant", "content": answer})


def _print_json(lm: "LanguageModel", conversation: list[dict[str, Any]], how: "Asked") -> None:
    max_new_tokens, sampling, asked = how
    [result] = lm.chat(conversation, max_new_tokens, sampling, **asked)
    record = {**text_io.as_record(result), "usage": asdict(result.usage)}
    typer.echo(json.dumps(record, ensure_ascii=False))
