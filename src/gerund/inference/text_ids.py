"""Tokenize text without letting it inject control tokens.

Control tokens such as ``<|im_start|>`` or ``</s>`` steer a model. In a text that a user gives they are plain text: they
are tokenized as the characters that they are spelled with, as ``split_special_tokens`` of transformers does. In a
``Rendered`` text, such as a filled chat template, they are parsed, and the tokenizer's own special tokens (BOS, EOS)
are not added, since the template has them; so a rendered text has no second BOS. So it is with the prompt before a text
that is encoded, but special tokens are added there. Parts of a rendered text may be marked as literal: there they are
plain text again. Added tokens that are not special always keep their meaning.

``split_special_tokens`` is a switch of the tokenizer itself, which all threads share. It is never touched: a text
that turns out to contain a control token is tokenized again by a copy of the tokenizer that has it switched on.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from gerund.errors import ModelError
from gerund.models.library_calls import without_panics
from gerund.types import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# What a piece is tokenized behind, so that its first token is one that occurs inside a text.
_ANCHORS = ("a", ".", "1", "\n", ")")

# Characters that are tokenized first for each token that is wanted, and how many tokens more have to come out of them.
_CHARACTERS = 8
_MARGIN = 32
_BOUNDARY = re.compile(r"\S(?= \S)")


@dataclass(frozen=True)
class TextIds:
    """The tokens of one text.

    Attributes:
        ids: token ids.
        before: how many special tokens the tokenizer put in front of the text.
        after: how many it put behind it.
        offsets: (start, end) characters of each token; empty unless they were asked for.
        is_whole: False where the end of a long text was left out, behind the tokens that were asked for.
    """

    ids: list[int]
    before: int
    after: int
    offsets: Sequence[tuple[int, int]] = ()
    is_whole: bool = True

    @property
    def text_ids(self) -> list[int]:
        """The tokens of the text alone."""
        return self.ids[self.before : len(self.ids) - self.after]


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, specials: bool = True) -> list[int]:
    """Return the token ids of one text; see ``encode_texts``."""
    [encoded] = encode_texts(tokenizer, [text], specials=specials)
    return encoded.ids


def encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    specials: bool = True,
    offsets: bool = False,
    parses_control: bool = False,
    most: int | None = None,
) -> list[TextIds]:
    """Tokenize texts; a ``Rendered`` one by the rule of this module."""
    if not texts:
        return []
    if offsets and not tokenizer.is_fast:
        raise ModelError("prompts and words need a fast tokenizer (tokenizer.json): this model has none")
    plain = [place for place, text in enumerate(texts) if not isinstance(text, Rendered)]
    encoded: dict[int, TextIds] = {}
    if plain:
        plain_ids = _encode_plain(tokenizer, [texts[place] for place in plain], specials, offsets, parses_control, most)
        encoded.update(zip(plain, plain_ids, strict=True))
    for place, text in enumerate(texts):
        if isinstance(text, Rendered):
            # A beginning token that is written out is the only one.
            begun = bool(tokenizer.bos_token) and text.startswith(str(tokenizer.bos_token))
            encoded[place] = _encode_rendered(tokenizer, text, offsets, specials and text.with_specials and not begun)
    return [encoded[place] for place in range(len(texts))]


def prompted(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str = "") -> str:
    """Return a text behind its prompt: the prompt's control tokens are parsed, those in the text are plain text."""
    if not prompt:
        return text
    whole = prompt + text
    if not frame_of(tokenizer, prompt, "").has_control:
        return whole
    return Rendered(whole, literal=[(len(prompt), len(whole))] if text else [], with_specials=True)


def pair_ids(tokenizer: PreTrainedTokenizerBase, first: str, second: str, most: int | None) -> list[int]:
    """Return the token ids of two texts in the tokenizer's layout of pairs, special tokens included.

    Where there are more than ``most`` tokens, the longer text loses tokens at its end until both are equally long, and
    then both do (``longest_first`` of transformers).
    """
    if not tokenizer.is_fast:
        raise ModelError("a pair of texts needs a fast tokenizer (tokenizer.json): this model has none")
    core = _of(tokenizer, _literal_copy).backend_tokenizer
    pair = [core.encode(text, add_special_tokens=False) for text in (first, second)]
    sizes = [len(encoding.ids) for encoding in pair]
    if most is not None:
        room = max(0, most - core.num_special_tokens_to_add(True))
        short, long = sorted(sizes)
        if short + long > room:
            short = min(short, room // 2)
            long = room - short
            sizes = [long, short] if sizes[0] > sizes[1] else [short, long]
    for encoding, size in zip(pair, sizes, strict=True):
        encoding.truncate(size)
    return list(core.post_process(*pair, True).ids)


def beginnings(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most: int) -> list[str]:
    """Return as much of each text's beginning as has at most so many tokens, special ones not counted."""
    encoded = encode_texts(tokenizer, texts, specials=False, offsets=True, most=most + 1)
    return [
        text[: ids.offsets[most - 1][1]] if len(ids.ids) > most else text
        for text, ids in zip(texts, encoded, strict=True)
    ]


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many tokens, or other items, two sequences have in common at their beginnings.

    >>> common_prefix_length([5, 6, 7], [5, 6, 8, 9])
    2
    """
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def ids_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that stands inside another one, without special tokens.

    Tokenizers of the SentencePiece kind put a space before whatever begins a text, and a space more before
    " home". So the text is read behind a short one from which a token boundary divides it.
    """
    if not text:
        return []
    if not tokenizer.is_fast:
        raise ModelError("infilling needs a fast tokenizer (tokenizer.json): this model has none")
    return _inside(tokenizer, text).ids


def _inside(tokenizer: PreTrainedTokenizerBase, text: str) -> TextIds:
    """Return the tokens of a text that stands inside another one, with their characters in it."""
    for anchor in _ANCHORS:
        [encoded] = encode_texts(tokenizer, [anchor + text], specials=False, offsets=True)
        size = len(anchor)
        if not any(start < size < end for start, end in encoded.offsets):
            first = next((place for place, (_, end) in enumerate(encoded.offsets) if end > size), len(encoded.ids))
            offsets = [(max(0, start - size), end - size) for start, end in encoded.offsets[first:]]
            return TextIds(encoded.ids[first:], 0, 0, offsets)
    [encoded] = encode_texts(tokenizer, [text], specials=False, offsets=True)
    return encoded


def cut_start(tokenizer: PreTrainedTokenizerBase, text: str, most: int) -> str:
    """Return the end of a text that surely has more than ``most`` tokens, of the same words; a short text unchanged.

    It saves the work on what is thrown away. Where the tokenizer allows no such cut the text is unchanged too.
    """
    size = _CHARACTERS * (most + _MARGIN)
    while len(text) > 2 * size and _cuts_at_spaces(tokenizer):
        match = _BOUNDARY.search(text, len(text) - size)
        end = "" if match is None else text[match.end() + 1 :]
        if len(end) > size // 2 and len(text_ids(tokenizer, end)) > most + _MARGIN:
            return end
        size *= 4
    return text


def _encode_plain(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    specials: bool,
    offsets: bool,
    parses_control: bool,
    most: int | None,
) -> list[TextIds]:
    size = None if most is None else _CHARACTERS * (most + _MARGIN)
    kept = [text if size is None else _cut_end(tokenizer, text, size) for text in texts]
    encoded = _call(tokenizer, kept, specials, offsets)
    if not parses_control:
        control = _of(tokenizer, _control_ids)
        again = [place for place, ids in enumerate(encoded) if not control.isdisjoint(ids.text_ids)]
        if again:
            literal = _call(_of(tokenizer, _literal_copy), [kept[place] for place in again], specials, offsets)
            for place, ids in zip(again, literal, strict=True):
                encoded[place] = _spelled(tokenizer, ids, control)
    for place, (text, part) in enumerate(zip(texts, kept, strict=True)):
        if len(part) == len(text):
            continue
        ids = encoded[place]
        if most is not None and len(ids.ids) > most + _MARGIN:
            encoded[place] = TextIds(ids.ids, ids.before, ids.after, ids.offsets, is_whole=False)
        else:  # longer tokens than expected: take more characters for each
            [encoded[place]] = _encode_plain(
                tokenizer, [text], specials, offsets, parses_control, None if most is None else 4 * most + _MARGIN
            )
    return encoded


def _spelled(tokenizer: PreTrainedTokenizerBase, encoded: TextIds, control: frozenset[int]) -> TextIds:
    """Return a text's tokens with the control tokens that a model of pieces (Unigram) made by itself spelled out."""
    end = len(encoded.ids) - encoded.after
    left = {place for place in range(encoded.before, end) if encoded.ids[place] in control - {tokenizer.unk_token_id}}
    if not left:
        return encoded
    vocabulary = tokenizer.get_vocab()
    ids: list[int] = []
    offsets: list[tuple[int, int]] = []
    for place, token in enumerate(encoded.ids):
        letters: Sequence[str] = tokenizer.convert_ids_to_tokens(token) if place in left else ()
        spelled = [vocabulary.get(letter, tokenizer.unk_token_id) for letter in letters]
        ids += [letter_id for letter_id in spelled if letter_id is not None] if letters else [token]
        if encoded.offsets:
            start, stop = encoded.offsets[place]
            letter_offsets = [
                (start + at, min(stop, start + at + 1)) for at, letter_id in enumerate(spelled) if letter_id is not None
            ]
            offsets += letter_offsets if letters else [(start, stop)]
    return TextIds(ids, encoded.before, encoded.after, offsets)


def _call(tokenizer: PreTrainedTokenizerBase, texts: list[str], specials: bool, offsets: bool) -> list[TextIds]:
    # No truncation: it is a setting of the tokenizer itself, which other threads would see.
    with without_panics("the model's tokenizer fails on a text"):
        batch = tokenizer(
            texts,
            add_special_tokens=specials,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_special_tokens_mask=True,
            return_offsets_mapping=offsets,
            verbose=False,
        )
    encoded = []
    for row, (ids, special) in enumerate(zip(batch["input_ids"], batch["special_tokens_mask"], strict=True)):
        before = next((i for i, flag in enumerate(special) if not flag), len(ids))
        after = next((i for i, flag in enumerate(reversed(special)) if not flag), 0)
        encoded.append(TextIds(ids, before, after, batch["offset_mapping"][row] if offsets else ()))
    return encoded


def _encode_rendered(tokenizer: PreTrainedTokenizerBase, text: Rendered, offsets: bool, specials: bool) -> TextIds:
    """Parse the control tokens of a text, but not those that stand where it is literal."""
    [encoded] = _call(tokenizer, [str(text)], specials, offsets or bool(text.literal))
    if not text.literal:
        return encoded
    control = _of(tokenizer, _control_ids)
    meant: list[tuple[int, int, int]] = []
    is_intruded = False
    for place in range(encoded.before, len(encoded.ids) - encoded.after):
        start, end = encoded.offsets[place]
        if encoded.ids[place] in control:
            if any(start < stop and end > first for first, stop in text.literal):
                is_intruded = True
            elif text[start:end].strip():
                meant.append((encoded.ids[place], start, end))
    if not is_intruded:
        return encoded
    # Rare enough to be tokenized piece by piece between the control tokens that are meant.
    ids, places, begin = encoded.ids[: encoded.before], list(encoded.offsets[: encoded.before]), 0
    for token, start, end in [*meant, (-1, len(text), len(text))]:
        piece = str(text)[begin:start]
        if piece:
            [literal] = (
                [_inside(tokenizer, piece)] if begin else encode_texts(tokenizer, [piece], specials=False, offsets=True)
            )
            ids += literal.ids
            places += [(begin + first, begin + behind) for first, behind in literal.offsets]
        if token >= 0:
            ids.append(token)
            places.append((start, end))
        begin = end
    behind = len(encoded.ids) - encoded.after
    return TextIds(
        ids + encoded.ids[behind:],
        encoded.before,
        encoded.after,
        [*places, *encoded.offsets[behind:]] if offsets else (),
    )


Fact = TypeVar("Fact")
_facts: WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, Any]] = WeakKeyDictionary()
# Prompts of one tokenizer that are kept in mind.
_FRAMES = 100
_lock = Lock()


class Frame(NamedTuple):
    """What stands around a text: prompt, template and special tokens."""

    size: int  # its number of tokens
    last: int  # the last token of all
    has_control: bool  # whether prompt or template have control tokens such as <|im_start|>


def frame_of(tokenizer: PreTrainedTokenizerBase, before: str, after: str) -> Frame:
    """Return what stands around a text, its control tokens parsed.

    What was found is kept: a request of a short text would spend as long on its frame as on the text.
    """
    frames = _of(tokenizer, _frames)
    key = (tokenizer.num_special_tokens_to_add(), before, after)
    frame = frames.get(key)
    if frame is None:
        if len(frames) >= _FRAMES:
            frames.clear()
        has_control = False
        if before + after:
            [parsed] = _call(tokenizer, [before + after], False, False)
            has_control = not _of(tokenizer, _control_ids).isdisjoint(parsed.ids)
        texts = [before + after, f"{before}a{after}"]
        if has_control:
            texts = [Rendered(text, with_specials=True) for text in texts]
        alone, with_letter = encode_texts(tokenizer, texts)
        frame = frames[key] = Frame(len(alone.ids), with_letter.ids[-1], has_control)
    return frame


def _of(tokenizer: PreTrainedTokenizerBase, find: Callable[[PreTrainedTokenizerBase], Fact]) -> Fact:
    """Return what ``find`` says of a tokenizer, found out once and again when it gets more tokens."""
    key = (find.__name__, len(tokenizer))
    with _lock:
        known = _facts.setdefault(tokenizer, {})
    if key not in known:
        known[key] = find(tokenizer)
    fact: Fact = known[key]
    return fact


def _frames(_: PreTrainedTokenizerBase) -> dict[tuple[int, str, str], Frame]:
    """Return where frames are kept: nothing is known of a tokenizer yet."""
    return {}


def _control_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    special = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*special, *tokenizer.all_special_ids))


def _literal_copy(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer to which control tokens are text."""
    duplicate = copy.deepcopy(tokenizer)
    duplicate.split_special_tokens = True
    if duplicate.is_fast:
        duplicate.backend_tokenizer.encode_special_tokens = True
    return duplicate


def _cut_end(tokenizer: PreTrainedTokenizerBase, text: str, size: int) -> str:
    """Return the beginning of a long text up to the end of a word, where that leaves its tokens as they are."""
    if len(text) <= 2 * size or not _cuts_at_spaces(tokenizer):
        return text
    match = _BOUNDARY.search(text, size)
    return text if match is None else text[: match.end()]


def _cuts_at_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a text may be cut before a space without changing a token of what stands on the left."""
    return tokenizer.is_fast and _of(tokenizer, _is_local)


def _is_local(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether no token holds the end of a word and the space behind it, and nothing looks further ahead than a word.

    Then merges (BPE) and the best segmentation (Unigram) of one word do not depend on the next ones.
    """
    core = tokenizer.backend_tokenizer
    kind, model = type(core.model).__name__, core.model
    if kind == "BPE" and (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix):
        return False
    if kind not in ("BPE", "Unigram"):
        return False
    vocabulary = core.get_vocab(with_added_tokens=True)
    crossing = re.compile(r"[^\s\u0120\u2581][ \u0120\u2581]")
    if not any(mark in vocabulary for mark in (" ", "\u0120", "\u2581")):
        return False
    if any(crossing.search(token) for token in vocabulary):
        return False
    # All the usual normalizers and pre-tokenizers treat every word by itself.
    parts = [part for part in (core.normalizer, core.pre_tokenizer) if part is not None]
    return all(_is_local_state(json.loads(part.__getstate__())) for part in parts)


# fmt: off
_LOCAL = frozenset((
    "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Precompiled", "Prepend", "Strip", "ByteLevel",
    "Metaspace", "Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "BertPreTokenizer",
))
# fmt: on


def _is_local_state(state: dict[str, Any]) -> bool:
    kind = state.get("type")
    if kind == "Sequence":
        return all(map(_is_local_state, state.get("normalizers") or state.get("pretokenizers") or []))
    if kind in ("Replace", "Split"):
        pattern = state["pattern"]
        # A single character of lookahead behind white space is in all patterns since GPT-2's.
        regex = re.sub(r"\(\?!\\S\)|\(\?i:|\(\?:", "", pattern.get("Regex", ""))
        return not re.search(r"\(\?|\\[bBzZAGK]|\$", regex)
    return kind in _LOCAL


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a text."""
    configured = getattr(model.generation_config, "eos_token_id", None)  # an encoder has no config for that
    ends = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    ends.append(tokenizer.eos_token_id)
    return list(dict.fromkeys(end for end in ends if end is not None))
