"""Turn texts into model inputs: prompts, templates, truncation, and batches of similar length.

Every token is known to belong to the text, to the prompt or to neither, so that pooling can leave the prompt out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from gerund.checks import check_unicode, one_of
from gerund.errors import ConfigError, TextError
from gerund.inference.text_ids import Frame, TextIds, cut_start, encode_texts, frame_of, prompted, text_ids
from gerund.settings.templates import NO_FRAME, Template
from gerund.text_analysis import Alignment, normalized
from gerund.types import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A text with more characters for each token that there is room for is cut before anything is put around it.
_LONG = 32
# Beyond this fraction of padding a batch is closed, if what it holds is worth a pass of its own.
_MAX_PADDING = 0.04

Empty = Literal["error", "zeros"]
Overflow = Literal["truncate", "error"]


@dataclass(frozen=True)
class Tokens:
    """One text as the model reads it."""

    ids: list[int]  # token ids: special tokens, prompt, text (twice for the echo layout), special tokens
    text_from: int  # index of the first token of the text (of its second copy for the echo layout)
    specials_before: int  # how many special tokens precede prompt and text
    # For each token from ``text_from`` on, its (start, end) characters in the text; empty unless they were asked for.
    offsets: tuple[tuple[int, int], ...] = ()
    # Where the end of a template stands: its first token, and the one after its last; None without one.
    behind: tuple[int, int] | None = None
    # Where the token stands that takes over the last token's state (Token Prepending); None without one.
    placeholder: int | None = None
    # Whether the text was longer than there was room, so that its end is missing.
    is_cut: bool = field(default=False, compare=False)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class InputFormat:
    """How texts are turned into tokens.

    Control tokens in prompt and template are parsed, those in a text are text. ``parses_control`` parses them there
    too, which is for texts that were made of token ids. ``normalizes`` reads texts in their normal form.
    ``template`` stands around the text, behind the prompt; with ``prepends`` a placeholder stands before the text in
    it, and before the quotation mark that opens it. ``follows_sentence_transformers`` takes the prompt to be as long
    as it is alone, where a token holds characters of both.
    """

    prompt: str = ""
    template: Template = NO_FRAME
    prepends: bool = False
    append_eos: bool = False
    repeat_text: bool = False
    max_length: int | None = None
    empty: Empty = "error"
    overflow: Overflow = "truncate"
    parses_control: bool = False
    follows_sentence_transformers: bool = False
    normalizes: bool = False

    @property
    def before(self) -> str:
        """What stands before the text."""
        return self.prompt + self.template.before

    @property
    def has_frame(self) -> bool:
        """Whether anything is put around the text."""
        return bool(self.before or self.template.after or self.template.ends_sentences or self.has_copy)

    @property
    def has_copy(self) -> bool:
        """Whether the template has the text twice."""
        return self.template.between is not None


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    input_format: InputFormat,
    *,
    offsets: bool = False,
    warn: bool = True,
) -> list[Tokens | None]:
    """Turn texts into tokens, in order; an empty text becomes None when ``input_format.empty`` is ``"zeros"``.

    A text is empty when it has no character but white space, or none that the tokenizer has a token for. Tokens of the
    prompt are told from those of the text by their character offsets: a token that holds any character of the text
    belongs to the text. A ``Rendered`` text takes no prompt.
    """
    if input_format.normalizes:
        return _in_normal_form(tokenizer, texts, input_format, offsets=offsets, warn=warn)
    one_of("empty", input_format.empty, ["error", "zeros"])
    one_of("overflow", input_format.overflow, ["truncate", "error"])
    check_unicode("the prompt", input_format.prompt)
    filled = _filled(texts, input_format)
    result: list[Tokens | None] = [None] * len(texts)
    if not filled:
        return result
    room = _room(tokenizer, input_format)
    formatted = [_Formatted.of(tokenizer, texts[index], index, input_format, room) for index in filled]
    encoded = encode_texts(
        tokenizer,
        [rendered.whole for rendered in formatted],
        offsets=offsets or input_format.has_frame,
        parses_control=input_format.parses_control,
        most=None if input_format.template.after or input_format.has_copy else room,
    )
    long = [row for row, ids in enumerate(encoded) if room is not None and len(ids.ids) > room]
    if long and input_format.overflow == "error":
        raise _too_long(filled[long[0]], encoded[long[0]], f"there is room for {room}")
    if long and warn:
        warnings.warn(f"{len(long)} of {len(texts)} texts were longer than {room} tokens and were cut", stacklevel=4)
    if input_format.has_copy:
        # Both copies lose as much.
        for row in long:
            formatted[row], encoded[row] = _shortened(tokenizer, texts[filled[row]], filled[row], input_format, room)
    cut = {filled[row] for row in long}
    for index, ids, rendered in zip(filled, encoded, formatted, strict=True):
        tokens = _tokens(tokenizer, ids, input_format, rendered, offsets, room, is_cut=index in cut)
        if tokens is None and input_format.empty == "error":
            raise TextError.about("text", index, "has no tokens: this model's vocabulary has none of its characters")
        result[index] = tokens
    return result


def _in_normal_form(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], input_format: InputFormat, *, offsets: bool, warn: bool
) -> list[Tokens | None]:
    """Turn texts into tokens, each in its normal form; offsets count in the texts as they are.

    Rendered texts, whose control tokens have places of their own, are left as they are.
    """
    normal = [normalized(text) if isinstance(text, str) and not isinstance(text, Rendered) else text for text in texts]
    tokenized = tokenize(tokenizer, normal, replace(input_format, normalizes=False), offsets=offsets, warn=warn)
    for place, (text, other, tokens) in enumerate(zip(texts, normal, tokenized, strict=True)):
        if tokens is not None and tokens.offsets and other != text:
            aligned = Alignment(text)
            tokenized[place] = replace(tokens, offsets=tuple(aligned.original(*span) for span in tokens.offsets))
    return tokenized


@dataclass(frozen=True)
class _Formatted:
    """A text with what stands around it."""

    whole: str  # all of it
    begin: int  # the character at which the text begins in it
    end: int  # the one behind its last

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, text: str, index: int, input_format: InputFormat, room: int | None
    ) -> _Formatted:
        if not input_format.has_frame:
            return cls(text, 0, len(text))
        if isinstance(text, Rendered):
            raise TextError.about("text", index, "is rendered and takes no prompt; put the prompt into its template")
        before, template = input_format.before, input_format.template
        has_control = _frame(tokenizer, input_format).has_control
        if (has_control or template.after or input_format.has_copy) and room is not None and len(text) > _LONG * room:
            # What isn't cut where the whole is tokenized, because it ends with the template or has control tokens.
            [encoded] = encode_texts(tokenizer, [text], offsets=True, most=room)
            text = text[: max(end for _, end in encoded.offsets)]
        text = template.sentence(text)
        if template.between is not None:
            before += text + template.between
        whole, begin, end = before + text + template.after, len(before), len(before) + len(text)
        if has_control:
            literal = [] if input_format.parses_control else [(begin, end)]
            whole = Rendered(whole, literal=literal, with_specials=True)
        return cls(whole, begin, end)


def _shortened(
    tokenizer: PreTrainedTokenizerBase, text: str, index: int, input_format: InputFormat, room: int | None
) -> tuple[_Formatted, TextIds]:
    """Return a text that is too long to stand twice, cut so that it does, and its tokens."""
    assert room is not None
    [alone] = encode_texts(tokenizer, [text], offsets=True, most=room)
    places = alone.offsets[alone.before : len(alone.ids) - alone.after]
    fixed = _frame(tokenizer, input_format).size
    kept = min(len(places), max(1, (room - fixed) // 2))
    while True:
        formatted = _Formatted.of(tokenizer, text[: places[kept - 1][1]], index, input_format, room)
        [encoded] = encode_texts(tokenizer, [formatted.whole], offsets=True, parses_control=input_format.parses_control)
        # Between other characters a text may have other tokens, and more of them.
        if len(encoded.ids) <= room or kept == 1:
            return formatted, encoded
        kept = max(1, kept - max(1, (len(encoded.ids) - room) // 2))


def _frame(tokenizer: PreTrainedTokenizerBase, input_format: InputFormat) -> Frame:
    """Return what stands around a text and between its copies."""
    template = input_format.template
    return frame_of(tokenizer, input_format.before + (template.between or ""), template.after)


def _too_long(index: int, encoded: TextIds, room: str) -> TextError:
    count = f"{len(encoded.ids)}" if encoded.is_whole else f"at least {len(encoded.ids)}"
    error = TextError.about("text", index, f"has {count} tokens and {room}; shorten it, or set overflow to truncate")
    error.exceeds_context = True
    return error


def _filled(texts: Sequence[str], input_format: InputFormat) -> list[int]:
    """Return which texts are not empty."""
    filled = []
    for index, text in enumerate(texts):
        check_unicode("text", text, index)
        if text.strip():
            filled.append(index)
        elif input_format.empty == "error":
            raise TextError.about("text", index, "is empty; set empty to zeros to get a zero vector for it")
    return filled


def _room(tokenizer: PreTrainedTokenizerBase, input_format: InputFormat) -> int | None:
    """Return how many tokens the tokenizer may yield, special tokens included."""
    if input_format.append_eos and tokenizer.eos_token_id is None:
        raise ConfigError("append_eos needs a tokenizer with an end token, and this one has none")
    if input_format.max_length is None:
        return None
    frame = _frame(tokenizer, input_format)
    fixed = frame.size + int(input_format.prepends)
    room = input_format.max_length - int(input_format.append_eos and frame.last != tokenizer.eos_token_id)
    if input_format.repeat_text:
        room = fixed + (room - fixed) // 2
    if room <= fixed + int(input_format.has_copy):
        raise ConfigError(
            f"max_length={input_format.max_length} leaves no room for text: prompt and special tokens take {fixed}"
        )
    return room - int(input_format.prepends)


def _tokens(
    tokenizer: PreTrainedTokenizerBase,
    encoded: TextIds,
    input_format: InputFormat,
    formatted: _Formatted,
    keep_offsets: bool,
    room: int | None,
    *,
    is_cut: bool,
) -> Tokens | None:
    ids, before = encoded.ids, encoded.before
    last = len(ids) - encoded.after
    end, start = last, before
    if input_format.template.after:
        end = next((i for i in range(before, last) if encoded.offsets[i][0] >= formatted.end), last)
    if formatted.begin:
        start = next((i for i in range(before, end) if encoded.offsets[i][1] > formatted.begin), end)
        if input_format.follows_sentence_transformers and not input_format.has_copy:
            alone = text_ids(tokenizer, prompted(tokenizer, input_format.before))
            # Without a special token that closes it.
            start = min(end, len(alone) - (alone[-1] in tokenizer.all_special_ids))
    # A text that may spell control tokens may consist of them alone; by the conventions of sentence-transformers the
    # prompt may reach into the text's first token.
    is_rendered = isinstance(formatted.whole, Rendered) and not formatted.begin
    may_be_empty = is_rendered or input_format.parses_control or input_format.follows_sentence_transformers
    if start == end and not may_be_empty:
        return None
    behind = last - end
    if room is not None and len(ids) > room:
        cut = end - (len(ids) - room)
        ids, end = ids[:cut] + ids[end:], cut
    text_from = start
    if input_format.repeat_text:
        ids = ids[:end] + ids[start:end] + ids[end:]
        text_from = end
    if input_format.append_eos and ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    places: tuple[tuple[int, int], ...] = ()
    if keep_offsets:
        shift = formatted.begin
        places = tuple((max(0, a - shift), b - shift) for a, b in encoded.offsets[start:end])
    placeholder = None
    if input_format.prepends:
        opening = len(formatted.whole[: formatted.begin].removesuffix('"').rstrip())
        placeholder = next((i for i in range(before, end) if encoded.offsets[i][1] > opening), end)
        # Any token will do: it gets a vector of its own in the place of the token's embedding.
        ids = [*ids[:placeholder], tokenizer.pad_token_id or 0, *ids[placeholder:]]
        text_from, end = text_from + 1, end + 1
    tail = (end, end + behind) if input_format.template.after else None
    return Tokens(ids, text_from, before, places, tail, placeholder, is_cut)


def context_length(config: Any, tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    """Return the longest text in tokens that model and tokenizer are made for; None when neither says."""
    text_config = config.get_text_config(decoder=True)
    known = [getattr(text_config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
    known.append(getattr(tokenizer, "model_max_length", None))
    # Tokenizers without a limit say 10^30.
    limits = [int(value) for value in known if isinstance(value, (int, float)) and 0 < value < 10**9]
    return min(limits, default=None)


def rotary_limit(config: Any) -> int | None:
    """Return the length beyond which a model turns the keys of all texts in a pass otherwise; None without one.

    For rotary embeddings of the kind ``longrope`` transformers takes one of two sets of factors, by the last place in
    the whole pass. So texts of both sides must not be read together, and must not be read on from each other.
    """
    rotary = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    # Some models have settings for each kind of layer.
    each = [rotary, *(part for part in rotary.values() if isinstance(part, dict))]
    return min(
        (part["original_max_position_embeddings"] for part in each if part.get("rope_type") == "longrope"), default=None
    )


def rotary_side(tokens: int, room: int, limit: int | None) -> int:
    """Return a number that is the same for texts that may be written on together, whatever ``rotary_limit`` is.

    A text that grows over the limit shares it only with those that do so at the same token.

    >>> [rotary_side(tokens, 10, 32) for tokens in (5, 22, 23, 32, 33, 90)]
    [0, 0, 23, 32, 33, 33]
    """
    return 0 if limit is None or tokens + room <= limit else min(tokens, limit + 1)


def keep_end(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> str:
    """Return the end of a text that has at most so many tokens, special ones not counted; a short one is unchanged."""
    text = cut_start(tokenizer, text, most)
    [tokens] = tokenize(tokenizer, [text], InputFormat(), offsets=True)
    assert tokens is not None
    excess = len(tokens.offsets) - most
    while excess > 0:
        kept = text[tokens.offsets[excess][0] :].lstrip()
        # Cut anew, a text may have other tokens at its beginning, and more of them.
        [again] = tokenize(tokenizer, [kept], InputFormat(), offsets=True)
        assert again is not None
        if len(again.offsets) <= most:
            return kept
        excess += len(again.offsets) - most
    return text


def token_batches(
    lengths: Sequence[int], budget: int, min_tokens: int = 512, limit: int | None = None, most: int | None = None
) -> list[list[int]]:
    """Group texts, longest first, so that rows times longest row stays within ``budget``.

    Longest first: if memory runs out, it does so at once. A text longer than the budget is a batch of its own.

    >>> token_batches([3, 9, 3, 8, 3], budget=18, min_tokens=1)
    [[1], [3], [0, 2, 4]]
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    batch: list[int] = []
    longest = real = 0
    for index in order:
        length = lengths[index]
        rows = len(batch) + 1
        padded = 1 - (real + length) / max(1, rows * longest)
        too_large = rows * longest > budget or (most is not None and rows > most)
        wasteful = padded > _MAX_PADDING and real >= min_tokens
        other_side = limit is not None and longest > limit >= length
        if batch and (too_large or wasteful or other_side):
            batches.append(batch)
            batch = []
        if not batch:
            longest, real = length, 0
        batch.append(index)
        real += length
    if batch:
        batches.append(batch)
    return batches


def placed_ids(texts: Sequence[Tokens], begin: Sequence[int], longest: int) -> list[list[int]]:
    """Return the tokens of a batch where their states lie, rows of ``longest`` with 0 for padding.

    >>> placed_ids([Tokens([7, 8], 0, 0)], [1], 4)
    [[0, 7, 8, 0]]
    """
    placed = zip(texts, begin, strict=True)
    return [[0] * at + [*ids.ids] + [0] * (longest - at - len(ids)) for ids, at in placed]


@dataclass(frozen=True)
class Split:
    """Token ids, the position at which the text begins (1 or later), and that of its continuation."""

    ids: list[int]
    text_from: int
    split: int
    lost: int


def split_pairs(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]], limit: int | None) -> list[Split]:
    """Return the tokens of prefixes with their continuations, and where these begin.

    ``limit`` is the length of the model's context; see ``likelihood.continuation_logprobs``.
    """
    for index, (_, continuation) in enumerate(pairs):
        if not continuation.strip():
            raise TextError(f"continuation {index} is empty")
    texts = tokenize(tokenizer, [_joined(*pair) for pair in pairs], InputFormat(), offsets=True)
    return [
        _split(tokenizer, tokens, len(prefix), limit)
        for (prefix, _), tokens in zip(pairs, texts, strict=True)
        if tokens is not None
    ]


def _joined(prefix: str, continuation: str) -> str:
    """Join both; after a rendered prefix the control tokens of the continuation are plain text."""
    if not isinstance(prefix, Rendered):
        return prefix + continuation
    end = len(prefix) + len(continuation)
    literal = [*prefix.literal, (len(prefix), end)]
    return Rendered(prefix + continuation, literal=literal, with_specials=prefix.with_specials)


def _split(tokenizer: PreTrainedTokenizerBase, tokens: Tokens, boundary: int, limit: int | None) -> Split:
    """Split a text at a character, and truncate it to the model's context."""
    before = tokens.specials_before
    ids = tokens.ids[: before + len(tokens.offsets)]  # some tokenizers close every text
    place = next(i for i, (start, end) in enumerate(tokens.offsets) if start >= boundary or end > boundary)
    split = before + place
    if not boundary and not before and tokenizer.bos_token_id is not None:
        ids, before, split = [tokenizer.bos_token_id, *ids], 1, 1
    excess = 0 if limit is None else max(0, len(ids) - 1 - limit)
    # Something has to precede the continuation.
    dropped = min(excess, max(0, split - max(1, before)))
    ids = ids[:before] + ids[before + dropped :]
    split -= dropped
    lost = excess - dropped
    ids = ids[: len(ids) - lost]
    return Split(ids, max(1, before), max(1, split), lost)
