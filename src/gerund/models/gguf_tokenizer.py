"""Build the tokenizer of a GGUF file, so that it cuts texts as llama.cpp does.

transformers builds it; this module corrects what transformers does otherwise: pre-tokenizers, the tokens that begin and
end a text, words that are taken whole, runs of spaces.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile, read_texts
from gerund.models.library_calls import guarded
from gerund.models.tokenizer_cache import StoredTokenizer, settings_of

# Tokens at which llama.cpp always ends a text, in addition to those that the file names.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

# Tokens of a vocabulary from which on a tokenizer is cached: a smaller one is made in no time.
_WORTH_KEEPING = 4096

# Special tokens, and what GGUF calls their ids.
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_BYTE_LEVEL = "gpt2"
_MODELS = (_BYTE_LEVEL, "llama")  # the second is SentencePiece's
_USER_DEFINED = 4  # type of a token
SPACE = "\u2581"
"""SentencePiece's space."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
_SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CJK = r"[一-龥\u3040-ゟ゠-ヿ]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How llama.cpp cuts a text into words before it merges bytes within each.

    Attributes:
        names: llama.cpp's names; None for files without one.
        splits: regular expressions, one after the other, or transformers' name of one.
        whole: whether a word that is a token is taken whole, whatever its merges.
        begins: whether a text begins with the begin token, unless the file says otherwise.
    """

    names: tuple[str | None, ...]
    splits: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
PRE_TOKENIZERS = (
    PreTokenizer(
        ("gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "gigachat", "jais", "mellum", "exaone4", "a.x-4.0",
         "trillion", "roberta-bpe", "granite-docling"),
        (_GPT2,),
    ),
    PreTokenizer(
        ("smollm", "codeshell", "refact", "command-r", "starcoder", "exaone", "minerva-7b"), (_DIGIT, _GPT2)
    ),
    PreTokenizer(("default", None), (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    PreTokenizer(_LLAMA3, ("llama-bpe",), whole=True, begins=True),
    PreTokenizer(("glm4",), ("llama-bpe",), whole=True),
    PreTokenizer(("dbrx", "smaug-bpe", "chatglm-bpe"), ("llama-bpe",)),
    PreTokenizer(("tekken",), ("tekken",), whole=True, begins=True),
    PreTokenizer(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "stablelm2", "bailingmoe", "grok-2",
         "solar-open"),
        ("qwen2",),
    ),
    PreTokenizer(("qwen35",), ("qwen35",)),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), ("gpt-4o",)),
    PreTokenizer(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (_DIGITS, _CJK, _DEEPSEEK)),
    PreTokenizer(("seed-coder",), (_SEED,)),
)  # fmt: skip
"""The pre-tokenizers of byte-level vocabularies, each compared with llama.cpp on random texts.

Mistral's (``tekken``) and OpenAI's (``gpt-4o``) tell upper from lower case in all scripts; llama.cpp does so in ASCII.
"""


def read_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Return a file's tokenizer, which produces the same tokens as llama.cpp; that of a large vocabulary is cached."""
    if file.metadata.get("tokenizer.ggml.tokens") != file.vocabulary or file.vocabulary < _WORTH_KEEPING:
        return made_tokenizer(file)[0]
    stored = StoredTokenizer(file.path)
    if (cached := stored.read()) is not None:
        return PreTrainedTokenizerFast(tokenizer_object=cached[0], **cached[1].keywords)
    tokenizer, keywords = made_tokenizer(file)
    stored.keep(tokenizer.backend_tokenizer, settings_of(tokenizer, ends_of(file, tokenizer), keywords))
    return tokenizer


def made_tokenizer(file: GgufFile) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    """Make a file's tokenizer; return it and the keywords of its class."""
    made: tuple[PreTrainedTokenizerBase, dict[str, Any]] = guarded(
        f"cannot load the tokenizer of {file.path}", _tokenizer, file
    )
    return made


def _tokenizer(file: GgufFile) -> tuple[PreTrainedTokenizerBase, dict[str, Any]]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    if (count := file.metadata.get("tokenizer.ggml.tokens")) is None:
        raise ModelError(f"cannot load {file.path}: it has no tokenizer")
    if type(count) is not int or count > file.vocabulary:
        raise ModelError(
            f"cannot load {file.path}: its tokenizer has other tokens than the {file.vocabulary} of its embeddings"
        )
    pre_tokenizer = _pre_tokenizer_of(file)
    parts, settings = _stored(file)
    like_gemma = file.architecture.startswith("gemma")
    backend, _ = convert_gguf_tokenizer("gemma3" if like_gemma else file.architecture, parts)
    backend = _without_strange_tokens(backend, len(parts["tokens"]))
    begins = True
    if pre_tokenizer is not None:
        _cut(backend, pre_tokenizer)
        begins = pre_tokenizer.begins
    elif not like_gemma:
        _mark_spaces(backend, begin=_flag(file, "add_space_prefix", default=True))
        # llama.cpp's, of files that name none.
        for name, number in (("bos_token", 1), ("eos_token", 2)):
            settings[name] = settings[name] or parts["tokens"][number]
    settings["add_bos_token"] = _flag(file, "add_bos_token", default=begins)
    settings["add_eos_token"] = _flag(file, "add_eos_token", default=False)
    _keep_runs_of_spaces(backend, parts)
    if settings["pad_token"] is None:
        settings["pad_token"] = settings["eos_token"]
    keywords = {
        "model_max_length": file.number("context_length"),
        "clean_up_tokenization_spaces": False,
        **settings,
    }
    return PreTrainedTokenizerFast(tokenizer_object=backend, **keywords), keywords


def _stored(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a file stores of its tokenizer, and settings, by transformers' names.

    transformers' own ``get_gguf_tokenizer`` needs torch.
    """
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    metadata = read_texts(file.path)
    parts, settings = (
        {
            name: metadata[f"tokenizer.{key}"]
            for key, name in GGUF_TOKENIZER_MAPPING[group].items()
            if f"tokenizer.{key}" in metadata
        }
        for group in ("tokenizer", "tokenizer_config")
    )
    for name, key in _SPECIAL.items():
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[name] = None if number is None else parts["tokens"][number]
    return parts, settings


def _flag(file: GgufFile, name: str, *, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ModelError(f"cannot load {file.path}: its {name} is {value!r}, neither true nor false")
    return value


def _mark_spaces(backend: Any, *, begin: bool) -> None:
    """Mark spaces as SentencePiece does, with one more before a text and behind a special token if ``begin``."""
    before = [normalizers.Prepend(SPACE)] if begin else []
    backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", SPACE)])
    backend.pre_tokenizer = None
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if begin else steps)


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


def _pre_tokenizer_of(file: GgufFile) -> PreTokenizer | None:
    """Return the pre-tokenizer of a file; None for a vocabulary of SentencePiece, which has none."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model not in _MODELS:
        raise ModelError(
            f"cannot load {file.path}: its tokenizer is of the kind {model!r}, which is not read; give the folder of "
            "the model in safetensors"
        )
    if model != _BYTE_LEVEL:
        return None
    name = file.metadata.get("tokenizer.ggml.pre")
    kind = next((known for known in PRE_TOKENIZERS if name in known.names), None)
    if kind is None:
        raise ModelError(
            f"cannot load {file.path}: how texts are cut into tokens there ({name!r}) is not known; "
            "give the folder of the model in safetensors"
        )
    return kind


def _cut(backend: Any, kind: PreTokenizer) -> None:
    """Set the pre-tokenizer, and whether words that are tokens are taken whole."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    splits = [GGUF_PRE_TOKENIZER_SPLITS.get(split, split) for split in kind.splits]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = kind.whole


def ends_of(file: GgufFile, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a text: those in the file, and those at which llama.cpp always ends."""
    named = [file.token_id(name) for name in ("eos", "eot")]
    known = tokenizer.get_vocab()
    return list(dict.fromkeys(number for number in (*named, *map(known.get, _ENDS)) if number is not None))
