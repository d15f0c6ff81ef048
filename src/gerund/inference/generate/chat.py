"""Conversations as the prompt that a model's own chat template makes of them.

A template writes control tokens such as ``<|im_start|>``; what a user typed must not. So where one is spelled in a
message, the texts of the messages go through the template between marks, in which they come out as the literal parts of
a ``Rendered`` text: control tokens there are text. All other conversations go through it as they are, since a template
may look at what was said. Where a template cuts up a text, so that its marks no longer pair, the control tokens in it
are still known: they go through the template as letters that nobody uses.

Knows: messages, chat templates. Does not know: models, token ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypedDict

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from gerund.checks import demand_unicode, is_listing
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.tokens import check_unicode
from gerund.types import Rendered

# Letters for private use, of a plane in which nothing is printed: the marks, and then one a control token.
_PRIVATE = range(0x10_0000, 0x10_FFFD)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_KEYS = ("role", "content", "name")


class Message(TypedDict):
    """One turn of a conversation: ``role`` is ``system``, ``user`` or ``assistant``, ``content`` its text."""

    role: str
    content: str


def is_message(value: Any) -> bool:
    """Whether a value is meant as a message."""
    return isinstance(value, Mapping)


@dataclass(frozen=True)
class TemplateOptions:
    """How a chat template renders a conversation.

    Attributes:
        add_generation_prompt: end with what begins the next turn.
        continue_final_message: end with the last message, whose text is to be continued.
        variables: further variables of the template, such as ``{"enable_thinking": False}``.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)


NEXT_TURN = TemplateOptions()
"""Renders a conversation so that the model writes the next turn."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions = NEXT_TURN,
    *,
    parses_control: bool = False,
) -> Rendered:
    """Return what a model continues to write the next turn of a conversation.

    Args:
        tokenizer: the tokenizer, with the chat template.
        messages: the conversation so far.
        options: how the template renders it.
        parses_control: let control tokens in the messages steer the model, instead of being text.

    Raises:
        ModelError: the model has no chat template.
        TextError: a message is malformed, or the template refuses the conversation.
        ConfigError: a variable has a name that the template uses otherwise, or spells a control token.
    """
    demand_template(tokenizer)
    checked = [_checked(number, message) for number, message in enumerate(messages)]
    tokens = _control_tokens(tokenizer)
    _check_variables(tokenizer, options.variables, tokens)
    if parses_control or not any(one in text for one in tokens for message in checked for text in message.values()):
        return Rendered(_filled(tokenizer, checked, options))
    every = "".join(text for message in checked for text in message.values()) + str(tokenizer.chat_template)
    free = (chr(code) for code in _PRIVATE if chr(code) not in every)
    start, end = next(free), next(free)
    letters = {token: next(free) for token in tokens if token in every}
    marked = [
        {key: text if key == "role" else _marked(text, start, end, letters) for key, text in message.items()}
        for message in checked
    ]
    return _unmarked(_filled(tokenizer, marked, options), start, end, letters)


def demand_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a model that was not trained to chat, before anybody types a message.

    Raises:
        ModelError: it has no chat template.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            "this model has no chat template, so how it reads a conversation is not known; take one that was trained "
            "to chat, or give a prompt as text"
        )


def conversation_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what was said, a message a line: for scorers, which know no templates."""
    return "\n".join(_checked(number, message)["content"] for number, message in enumerate(messages))


def _checked(number: int, message: Any) -> dict[str, str]:
    """Return a message with its content as one text."""
    if not isinstance(message, Mapping):
        raise TextError.about("message", number, f"has no role and content but is {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise TextError.about("message", number, f"has no role, such as 'user', but {role!r}")
    for key, value in message.items():
        if key not in _KEYS and value is not None:
            raise TextError.about("message", number, f"has {key!r}, which this version does not read; leave it out")
    texts = {"content": _content(number, message.get("content"))}
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise TextError.about("message", number, f"has a name that is no text: {message['name']!r}")
        texts["name"] = message["name"]
    for key, text in texts.items():
        check_unicode(f"the {key} of message", text, number)
    return {"role": role, **texts}


def _content(number: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not is_listing(content):
        raise TextError.about("message", number, f"has no content that is a text, but {content!r}")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise TextError.about("message", number, f"has a part of type {kind!r}, and this version reads text alone")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_variables(
    tokenizer: PreTrainedTokenizerBase, variables: Mapping[str, Any], control_tokens: Sequence[str]
) -> None:
    """Refuse variables that would replace what the template is given anyway, or let a control token in.

    Raises:
        ConfigError: there is one.
    """
    if not variables:
        return
    taken = {"messages", *tokenizer.special_tokens_map, *signature(tokenizer.apply_chat_template).parameters}
    for name, value in variables.items():
        if not isinstance(name, str) or not name.isidentifier() or name in taken:
            raise ConfigError(f"chat_template_kwargs has {name!r}, which cannot be set there; leave it out")
        try:
            spelled = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"chat_template_kwargs: the value of {name!r} is not JSON: {error}") from error
        demand_unicode(f"chat_template_kwargs: {name!r}", spelled)
        if any(token in spelled for token in control_tokens):
            raise ConfigError(f"chat_template_kwargs: the value of {name!r} spells a control token of the model")


def _filled(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: TemplateOptions) -> str:
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **options.variables,
        )
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise TextError(f"the model's chat template does not take this conversation: {error}") from error
    return text


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return how control tokens are spelled, longest first."""
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    return sorted((token for token in {*special, *tokenizer.all_special_tokens} if token.strip()), key=len)[::-1]


def _marked(text: str, start: str, end: str, letters: Mapping[str, str]) -> str:
    """Put marks around a text, inside the white space that templates like to strip."""
    for token, letter in letters.items():
        text = text.replace(token, letter)
    core = text.strip()
    if not core:
        return text
    before, _, after = text.partition(core)
    return f"{before}{start}{core}{end}{after}"


def _unmarked(text: str, start: str, end: str, letters: Mapping[str, str]) -> Rendered:
    """Take the marks out again and note where the messages stand."""
    spelled = {letter: token for token, letter in letters.items()}
    pieces: list[str] = []
    literal: list[tuple[int, int]] = []
    length, opened = 0, None
    for piece in re.split(f"([{start}{end}{''.join(spelled)}])", text):
        if piece == start:
            opened = length
        elif piece == end:
            if opened is not None and length > opened:
                literal.append((opened, length))
            opened = None
        else:
            written = spelled.get(piece, piece)
            if piece in spelled and opened is None:
                literal.append((length, length + len(written)))
            pieces.append(written)
            length += len(written)
    return Rendered("".join(pieces), literal=literal)
