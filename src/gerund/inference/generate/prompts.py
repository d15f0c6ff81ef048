"""What generation continues: a text, token ids or a conversation, as the token ids that the model reads.

Knows: prompts of all kinds, the model's context. Does not know: how anything is continued.
"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.checks import is_listing
from gerund.errors import TextError
from gerund.inference.generate.chat import NEXT_TURN, TemplateOptions, conversation_text, is_message, render
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import check_unicode, context_length
from gerund.models.architectures import is_encoder_decoder

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, in which control tokens are text unless it is ``Rendered``; token ids, which are read as they are; or the
messages of a conversation, which the model's chat template turns into a text."""


def check_prompts(prompts: Any) -> list[Prompt]:
    """Return prompts as a list; a list of token ids or of messages is one prompt.

    Raises:
        TextError: something in there is no prompt; the message names its index.

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
    """Return the messages of one conversation as a list.

    Raises:
        TextError: it is no list of messages.
    """
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
    own = _listed(prompt)
    if own and (all(map(_is_id, own)) or all(map(is_message, own))):
        return own
    if own is not None:
        raise TextError.about("prompt", index, f"is a list of neither token ids nor messages: {prompt!r}")
    raise TextError.about("text", index, f"is not a string but {type(prompt).__name__}: {str(prompt)[:40]!r}")


def _listed(value: Any) -> list[Any] | None:
    """Return what a list, an array or a tensor of numbers holds; None for what is none of them."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if is_listing(value) else None


def _is_id(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def prompt_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, template: TemplateOptions = NEXT_TURN) -> str:
    """Return what a prompt says, as a text for scorers of continuations; a conversation as its template renders it."""
    if isinstance(prompt, str):
        return prompt
    if is_message(prompt[0]):
        return render(tokenizer, prompt, template)  # type: ignore[arg-type]
    text: str = tokenizer.decode(list(prompt), skip_special_tokens=True)
    return text


def plain_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    """Return what a prompt says, without any template."""
    if isinstance(prompt, str) or not is_message(prompt[0]):
        return str(prompt_text(tokenizer, prompt))
    return conversation_text(prompt)  # type: ignore[arg-type]


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
    """Return the token ids that generation continues.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prompt: the text to continue: plain, in which control tokens are text, or ``Rendered``; or token ids; or
            messages.
        what: what to call it in messages.
        index: its number, where there are several.
        template: how a conversation is rendered.
        last: keep so many tokens of its end at most; None refuses a prompt that is too long.
        is_read_only: whether nothing is written behind it, so that it may fill the model's context.

    Raises:
        TextError: it fills the model's context, is empty for a model without a beginning token, holds a token id that
            the model does not have, or a message that is none.
        ModelError: it is a conversation, and the model has no chat template.
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
    [found] = encode_texts(tokenizer, [text], most=limit if last is None else None)
    ids, end = found.ids, tokenizer.eos_token_id
    if is_encoder_decoder(model):
        if not text.strip():
            raise refused("is empty, and the encoder of this model needs a text to read")
    elif len(ids) > 1 and found.after and ids[-1] == end and end != tokenizer.bos_token_id:
        ids = ids[:-1]  # some tokenizers close every text; a prompt is to go on
    if not ids:
        if tokenizer.bos_token_id is None:
            raise refused("is empty and this model has no beginning token to start from")
        ids = [tokenizer.bos_token_id]
    count = f"{len(ids)}" if found.is_whole else f"at least {len(ids)}"
    return _fitting(model, ids if last is None else ids[-last:], count, limit, too_long, 1 - is_read_only)


def _fitting(
    model: PreTrainedModel, ids: list[int], count: str, limit: int | None, too_long: Any, least: int
) -> list[int]:
    """Return a prompt after checking that ``least`` tokens can follow it."""
    if limit is None or len(ids) + least <= limit or (is_encoder_decoder(model) and len(ids) == limit):
        return ids
    if is_encoder_decoder(model):
        raise too_long(f"has {count} tokens and the model reads {limit}")
    raise too_long(f"has {count} tokens and the model's context ends at {limit}")
