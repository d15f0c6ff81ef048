"""Convert prompts (text, token ids or chat messages) to token ids; control tokens in messages stay plain text.

A template writes control tokens such as ``<|im_start|>``; what a user typed must not. So where a message spells one,
the texts of the messages go through the template between marks, and come out as the literal parts of a ``Rendered``
text: control tokens there are plain text. All other conversations go through it unchanged, since a template may look at
the text. Where a template cuts a text, so that its marks no longer pair, the control tokens in it are still known: they
go through the template as private-use characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from jinja2 import TemplateError

from gerund.checks import demand_unicode, is_listing
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode, context_length
from gerund.models.kinds import is_encoder_decoder
from gerund.types import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Private-use characters that are never printed: the marks, and one per control token.
_PRIVATE = range(0x10_0000, 0x10_FFFD)
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


class Message(TypedDict):
    """One turn of a conversation: ``role`` is ``system``, ``user``, ``assistant`` or ``tool``, ``content`` its text."""

    role: str
    content: str


def is_message(value: Any) -> bool:
    """Whether a value is a message."""
    return isinstance(value, Mapping)


@dataclass(frozen=True)
class TemplateOptions:
    """How a chat template renders a conversation."""

    add_generation_prompt: bool = True  # end with the beginning of the next turn
    continue_final_message: bool = False  # end with the last message, to continue its text
    variables: Mapping[str, Any] = field(default_factory=dict)  # such as ``{"enable_thinking": False}``
    tools: Sequence[Mapping[str, Any]] = ()  # in OpenAI's form
    tools_variable: str = "tools"  # what the template calls them


NEXT_TURN = TemplateOptions()


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: TemplateOptions = NEXT_TURN,
    *,
    parses_control: bool = False,
) -> Rendered:
    """Render a conversation with the model's chat template.

    ``parses_control`` lets control tokens in the messages steer the model, instead of being plain text.
    """
    require_chat_template(tokenizer)
    checked = checked_messages(messages)
    if options.tools or any(message["role"] == "tool" or "tool_calls" in message for message in checked):
        require_tools_in_template(tokenizer)
    tokens = _control_tokens(tokenizer)
    _check_variables(tokenizer, options.variables, tokens)
    # Tools and their calls are nested, so their texts are searched and replaced as JSON.
    nested = [json.dumps(options.tools), *(json.dumps(message.get("tool_calls")) for message in checked)]
    texts = [text for message in checked for text in message.values() if isinstance(text, str)]
    typed = [token for token in tokens if any(token in text for text in texts)]
    typed += [token for token in tokens if token not in typed and any(_in_json(token) in text for text in nested)]
    if parses_control or not typed:
        return Rendered(_filled(tokenizer, checked, options))
    every = "".join([*texts, str(tokenizer.chat_template), json.dumps(options.tools, ensure_ascii=False)])
    every += "".join(json.dumps(message.get("tool_calls"), ensure_ascii=False) for message in checked)
    free = (chr(code) for code in _PRIVATE if chr(code) not in every)
    start, end = next(free), next(free)
    letters = {token: next(free) for token in tokens if token in typed or token in every}

    def hidden(key: str, value: Any) -> Any:
        if key in ("role", "tool_call_id"):
            return value
        return _marked(value, start, end, letters) if isinstance(value, str) else _replaced(value, letters)

    marked = [{key: hidden(key, value) for key, value in message.items()} for message in checked]
    options = replace(options, tools=_replaced(options.tools, letters))
    return _unmarked(_filled(tokenizer, marked, options), start, end, letters)


def _in_json(token: str) -> str:
    """Return a token as a JSON string spells it."""
    return json.dumps(token)[1:-1]


def _replaced(value: Any, letters: Mapping[str, str]) -> Any:
    """Replace control tokens by private-use characters in all texts of a JSON value."""
    spelled = json.dumps(value)
    for token, letter in letters.items():
        spelled = spelled.replace(_in_json(token), letter)
    return json.loads(spelled)


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ModelError`` for a model without a chat template."""
    if not tokenizer.chat_template:
        raise ModelError(
            "this model has no chat template. Load an instruction-tuned model, or continue plain text: `generate`."
        )


def has_tools_in_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template knows tools."""
    return bool(re.search(r"\b(xml_)?tools\b|\btool_calls\b", _template_text(tokenizer)))


def _template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    named = tokenizer.chat_template
    return "".join(named.values()) if isinstance(named, Mapping) else str(named)


def require_tools_in_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the chat template; raise ``ModelError`` for one that knows no tools."""
    if not has_tools_in_template(tokenizer):
        raise ModelError(
            "this model's chat template knows no tools. To describe them in the system message, set "
            "tool_prompt='generic' in Python, or start the command or server with --tool-prompt generic"
        )
    return _template_text(tokenizer)


def checked_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the messages of a conversation as templates take them.

    The content is joined to one text, arguments of tool calls are objects, and a tool's message has the tool's name.

    Raises:
        TextError: a message is malformed.
    """
    names: dict[str, str] = {}
    checked = []
    for number, message in enumerate(messages):
        valid = _checked(number, message)
        names |= {call["id"]: call["function"]["name"] for call in valid.get("tool_calls", ())}
        if valid["role"] == "tool" and "name" not in valid and valid.get("tool_call_id") in names:
            valid["name"] = names[valid["tool_call_id"]]
        checked.append(valid)
    return checked


def _checked(number: int, message: Any) -> dict[str, Any]:
    """Validate a message, and join its content."""
    if not isinstance(message, Mapping):
        raise TextError.about("message", number, f"has no role and content but is {message!r}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise TextError.about("message", number, f"has no role, such as 'user', but {role!r}")
    for key, value in message.items():
        if key not in _KEYS and value is not None:
            raise TextError.about("message", number, f"has {key!r}, which this version does not read; leave it out")
    calls = _tool_calls(number, role, message.get("tool_calls"))
    content = message.get("content")
    texts = {"content": "" if calls and content is None else _content(number, content)}
    for key in ("name", "tool_call_id"):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise TextError.about("message", number, f"has a {key} that is no text: {message[key]!r}")
            texts[key] = message[key]
    for key, text in texts.items():
        check_unicode(f"the {key} of message", text, number)
    return {"role": role, **texts, **({"tool_calls": calls} if calls else {})}


def _tool_calls(number: int, role: str, calls: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a message in the form of templates; arguments that are no JSON object stay text."""
    if calls is None:
        return []
    if not is_listing(calls) or (len(calls) and role != "assistant"):
        raise TextError.about(
            "message", number, f"has tool_calls, which are a list in an assistant's message: {calls!r}"
        )
    checked = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if function is None or not isinstance(name, str) or not name:
            raise TextError.about("message", number, f"has a tool call without a function's name: {str(call)[:100]}")
        arguments = _arguments(number, function.get("arguments"))
        check_unicode("the tool calls of message", name + json.dumps(arguments, ensure_ascii=False), number)
        form = {"name": name, "arguments": arguments}
        checked.append({"id": str(call.get("id") or ""), "type": "function", "function": form})
    return checked


def _arguments(number: int, given: Any) -> Any:
    """Return the arguments of a tool call as an object, or as text where they are no JSON object."""
    if isinstance(given, str):
        try:
            read = json.loads(given or "{}")
        except (ValueError, RecursionError):
            return given
        return read if isinstance(read, dict) else given
    try:
        return json.loads(json.dumps({} if given is None else given))
    except (TypeError, ValueError, RecursionError) as error:
        raise TextError.about("message", number, f"has a tool call whose arguments are no JSON: {error}") from error


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
    """Raise ``ConfigError`` for variables that the template gets anyway, or that spell a control token."""
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


def _filled(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], options: TemplateOptions) -> str:
    tools = {options.tools_variable: list(options.tools)} if options.tools else {}
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            **tools,
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
    """Return the control tokens, longest first."""
    special = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    return sorted((token for token in {*special, *tokenizer.all_special_tokens} if token.strip()), key=len)[::-1]


def _marked(text: str, start: str, end: str, letters: Mapping[str, str]) -> str:
    """Put marks around a text, inside its outer white space, which many templates strip."""
    for token, letter in letters.items():
        text = text.replace(token, letter)
    core = text.strip()
    if not core:
        return text
    before, _, after = text.partition(core)
    return f"{before}{start}{core}{end}{after}"


def _unmarked(text: str, start: str, end: str, letters: Mapping[str, str]) -> Rendered:
    """Remove the marks, and return the messages between them as literal parts."""
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
            text = spelled.get(piece, piece)
            if piece in spelled and opened is None:
                literal.append((length, length + len(text)))
            pieces.append(text)
            length += len(text)
    return Rendered("".join(pieces), literal=literal)


Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, in which control tokens are text unless it is ``Rendered``; token ids, which are read as they are; or the
messages of a conversation, which the model's chat template turns into a text."""


def check_prompts(prompts: Any) -> list[Prompt]:
    """Return prompts as a list; a list of token ids or of messages is one prompt.

    >>> check_prompts("a text"), check_prompts([5, 7]), check_prompts(["a", [5, 7]])
    (['a text'], [[5, 7]], ['a', [5, 7]])
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise TextError("a conversation is a list of messages, such as [{'role': 'user', 'content': ...}]")
    listed = _listed(prompts)
    if listed is None:
        raise TextError(f"prompts are strings or a list of strings, not {type(prompts).__name__}")
    if listed and (all(map(_is_id, listed)) or all(map(is_message, listed))):
        return [listed]
    return [_one(index, prompt) for index, prompt in enumerate(listed)]


def check_conversation(messages: Any) -> Sequence[Mapping[str, Any]]:
    """Return the messages of one conversation as a list."""
    listed = _listed(messages) if not isinstance(messages, Mapping) else None
    if listed is None or not all(map(is_message, listed)):
        raise TextError(
            f"a conversation is a list of messages, such as [{{'role': 'user', 'content': 'Hello'}}], not {messages!r}"
        )
    if not listed:
        raise TextError("the conversation has no messages; give at least one, such as {'role': 'user', 'content': ...}")
    return listed


def _one(index: int, prompt: Any) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    listed = _listed(prompt)
    if listed and (all(map(_is_id, listed)) or all(map(is_message, listed))):
        return listed
    if listed is not None:
        raise TextError.about("prompt", index, f"is a list of neither token ids nor messages: {prompt!r}")
    raise TextError.about("text", index, f"is not a string but {type(prompt).__name__}: {str(prompt)[:40]!r}")


def _listed(value: Any) -> list[Any] | None:
    """Return a list, array or tensor as a list; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if is_listing(value) else None


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template: TemplateOptions = NEXT_TURN) -> str:
    """Return a prompt as text; a conversation as its template renders it."""
    if isinstance(prompt, str):
        return prompt
    if is_message(prompt[0]):
        return render(tokenizer, prompt, template)  # type: ignore[arg-type]
    text: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
    return text


def plain_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return a prompt as text, a conversation without its template."""
    if isinstance(prompt, str) or not is_message(prompt[0]):
        return str(prompt_text(tokenizer, prompt))
    return "\n".join(message["content"] for message in checked_messages(prompt))


def prompt_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    what: str = "prompt",
    index: int | None = None,
    *,
    template: TemplateOptions = NEXT_TURN,
    last: int | None = None,
    is_read_only: bool = False,
) -> list[int]:
    """Return the token ids that generation continues; errors call the prompt ``what``.

    ``last`` truncates it to so many tokens at its end; None raises ``TextError`` for a prompt that is too long. With
    ``is_read_only`` it may fill the model's context, as nothing is generated after it.
    """

    def refused(reason: str) -> TextError:
        return TextError(f"{what} {reason}") if index is None else TextError.about(what, index, reason)

    def too_long(reason: str) -> TextError:
        error = refused(reason)
        error.exceeds_context = True
        return error

    limit = context_length(model.config, tokenizer)
    if not isinstance(prompt, str) and not is_message(prompt[0]):
        ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        size = int(model.get_input_embeddings().weight.shape[0])
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise refused(f"has the token id {wrong}, and this model's are 0 to {size - 1}; are they another model's?")
        return _fitting(model, ids if last is None else ids[-last:], f"{len(ids)}", limit, too_long, 1 - is_read_only)
    text: str = prompt if isinstance(prompt, str) else render(tokenizer, prompt, template)  # type: ignore[arg-type]
    check_unicode(what, text, index)
    [encoded] = encode_texts(tokenizer, [text], most=limit if last is None else None)
    ids, end = encoded.ids, tokenizer.eos_token_id
    if is_encoder_decoder(model):
        if not text.strip():
            raise refused("is empty, and the encoder of this model needs a text to read")
    elif len(ids) > 1 and encoded.after and ids[-1] == end and end != tokenizer.bos_token_id:
        ids = ids[:-1]  # some tokenizers close every text
    if not ids:
        if tokenizer.bos_token_id is None:
            raise refused("is empty and this model has no beginning token to start from")
        ids = [tokenizer.bos_token_id]
    count = f"{len(ids)}" if encoded.is_whole else f"at least {len(ids)}"
    return _fitting(model, ids if last is None else ids[-last:], count, limit, too_long, 1 - is_read_only)


def _fitting(
    model: PreTrainedModel, ids: list[int], count: str, limit: int | None, too_long: Any, least: int
) -> list[int]:
    """Check that ``least`` tokens can follow a prompt."""
    if limit is None or len(ids) + least <= limit or (is_encoder_decoder(model) and len(ids) == limit):
        return ids
    if is_encoder_decoder(model):
        raise too_long(f"has {count} tokens and the model reads {limit}")
    raise too_long(f"has {count} tokens and the model's context ends at {limit}")
