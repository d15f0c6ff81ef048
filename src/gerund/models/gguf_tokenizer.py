"""Build the tokenizer of a GGUF file, so that it cuts texts as llama.cpp does.

transformers builds it; this module corrects what transformers does otherwise: pre-tokenizers, the tokens that begin and
end a text, words that are taken whole, runs of spaces.
"""

import json
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile
from gerund.models.library_calls import guarded

# Tokens at which llama.cpp always ends a text, in addition to those that the file names.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

_USER_DEFINED = 4  # type of a token
SPACE = "\u2581"
"""SentencePiece's space."""

# llama.cpp's pre-tokenizers that transformers doesn't know.
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGITS_APART = ("smollm", "codeshell", "refact", "command-r", "starcoder")
_LIKE_GPT2 = ("gpt-2", "default", "phi-2", "jina-es", "jina-de", "gigachat", "olmo", "mpt")


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Return a file's tokenizer, which produces the same tokens as llama.cpp."""
    return guarded(f"cannot load the tokenizer of {file.path}", _tokenizer, file)


def _tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    if (count := file.metadata.get("tokenizer.ggml.tokens")) is None:
        raise ModelError(f"cannot load {file.path}: it has no tokenizer")
    if type(count) is not int or count > file.vocabulary:
        raise ModelError(
            f"cannot load {file.path}: its tokenizer has other tokens than the {file.vocabulary} of its embeddings"
        )
    architecture, parts, settings = get_gguf_tokenizer(str(file.path))
    backend, _ = convert_gguf_tokenizer(architecture, parts)
    backend = _without_strange_tokens(backend, len(parts["tokens"]))
    _cut_as_llama_cpp(file, backend, parts)
    _keep_runs_of_spaces(backend, parts)
    if settings["pad_token"] is None:
        settings["pad_token"] = settings["eos_token"]
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=file.number("context_length"),
        clean_up_tokenization_spaces=False,
        **settings,
    )


def _without_strange_tokens(backend: Tokenizer, size: int) -> Tokenizer:
    """Remove tokens beyond the vocabulary, which transformers' tokenizer classes add."""
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
    return Tokenizer.from_str(json.dumps(state))


def _keep_runs_of_spaces(backend: Any, parts: Mapping[str, Any]) -> None:
    """Match runs of spaces that are tokens, the longest first, as SentencePiece does.

    Gemma's files list them as user-defined tokens spelled with plain spaces, under which transformers does not find
    them in its vocabulary.
    """
    kinds = parts.get("token_type") or ()
    runs = [
        SPACE * len(token)
        for token, kind in zip(parts["tokens"], kinds, strict=False)
        if kind == _USER_DEFINED and len(token) > 1 and not token.strip(" ")
    ]
    vocabulary = backend.get_vocab(with_added_tokens=False)
    backend.add_tokens([AddedToken(run, normalized=True, special=False) for run in runs if run in vocabulary])


def _cut_as_llama_cpp(file: GgufFile, backend: Any, parts: Mapping[str, Any]) -> None:
    """Set the file's pre-tokenizer, where transformers doesn't know it and would use GPT-2's."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    name = parts.get("pre_tokenizer_type")
    if parts.get("tokenizer_type") != "gpt2" or name in GGUF_PRE_TOKENIZER_SPLITS or name in _LIKE_GPT2:
        return
    if name not in _DIGITS_APART:
        raise ModelError(
            f"cannot load {file.path}: how texts are cut into tokens there ({name!r}) is not known; "
            "give the folder of the model in safetensors"
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(_GPT2_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def ends_of(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a text: those in the file, and those at which llama.cpp always ends."""
    named = [file.token_id(name) for name in ("eos", "eot")]
    known = tokenizer.get_vocab()
    return list(dict.fromkeys(number for number in (*named, *map(known.get, _ENDS)) if number is not None))
