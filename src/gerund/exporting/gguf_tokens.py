"""A tokenizer in the terms of GGUF: tokens, their types, and how llama.cpp cuts a text before it merges.

Knows: what a tokenizer's own file says. Does not know: weights, llama.cpp itself.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from gerund.errors import ConfigError

# How llama.cpp calls what a byte-level tokenizer cuts a text by.
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {_LETTERS % "": "qwen2", _LETTERS % "{1,3}": "llama-bpe"}
_PLAIN_CUT = "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TokenTable:
    """What GGUF says of a tokenizer.

    Attributes:
        model: ``gpt2`` for merges of bytes, ``llama`` for merges of characters as sentencepiece has them.
        cut: how a text is cut before it is merged.
        tokens: as they are written, one for each row of the embeddings.
        types: of each.
        merges: of ``gpt2``: two tokens with a space between them, the first merge first.
        scores: of ``llama``: the higher, the earlier a token is merged.
        space_before: of ``llama``: whether a text begins with a space.
    """

    model: str
    cut: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    space_before: bool


def token_table(tokenizer: PreTrainedTokenizerBase, rows: int) -> TokenTable:
    """Return the tokens of a tokenizer.

    Args:
        tokenizer: a fast one.
        rows: how many embeddings the model has; what is left over is filled up.

    Raises:
        ConfigError: llama.cpp has no tokenizer of this kind, or not by a name that is known here.
    """
    if not tokenizer.is_fast:
        raise ConfigError("only fast tokenizers are written as GGUF, and this model's is none")
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    model = said["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"a tokenizer of the kind {model.get('type')} is not written as GGUF; byte-pair encoding is")
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    added = {one["id"]: one for one in said["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id.update({number: one["content"] for number, one in added.items()})
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    types = [_type(by_id.get(number), added.get(number), model) for number in range(rows)]
    if model.get("byte_fallback"):
        scores = _scores(tokens, merges)
        return TokenTable("llama", "default", tokens, types, [], scores, _begins_with_space(said))
    return TokenTable("gpt2", _cut(said), tokens, types, merges, [], False)


def _type(token: str | None, added: dict[str, Any] | None, model: dict[str, Any]) -> int:
    if token is None:
        return UNUSED
    if token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token) else NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return what makes llama.cpp, which merges the best token first, merge in the tokenizer's order."""
    rank: dict[str, int] = {}
    for place, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), place)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _begins_with_space(said: dict[str, Any]) -> bool:
    """Return whether sentencepiece's mark is put before a text.

    Raises:
        ConfigError: the text is changed in another way too.
    """
    steps = _steps(said.get("normalizer"), "normalizers")
    kinds = [step["type"] for step in steps]
    before = _steps(said.get("pre_tokenizer"), "pretokenizers")
    if kinds in (["Prepend", "Replace"], ["Replace"]) and not before:
        return kinds[0] == "Prepend"
    if not kinds and [step["type"] for step in before] == ["Metaspace"] and before[0].get("prepend_scheme") != "never":
        return True
    raise _other(kinds + [step["type"] for step in before])


def _cut(said: dict[str, Any]) -> str:
    """Return how llama.cpp calls the way in which a byte-level tokenizer cuts a text.

    Raises:
        ConfigError: it has no name here.
    """
    normalizers = [step["type"] for step in _steps(said.get("normalizer"), "normalizers")]
    steps = _steps(said.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    plain = all(not step.get("add_prefix_space") for step in steps)
    if normalizers in ([], ["NFC"]) and plain:
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return _PLAIN_CUT
        pattern = steps[0].get("pattern", {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        if pattern in _CUTS and not steps[1].get("use_regex", True):
            return _CUTS[pattern]
    raise _other(normalizers + kinds)


def _steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[several]) if part["type"] == "Sequence" else [part]


def _other(kinds: list[str]) -> ConfigError:
    return ConfigError(
        f"how this tokenizer cuts a text ({', '.join(kinds) or 'not at all'}) has no name in llama.cpp that is known "
        "here; tokenizers as GPT-2, Llama 2, Llama 3 and Qwen 2 have them are written as GGUF"
    )
