"""Parts that several export formats share: the result, merged weights, tokenizers and comparisons."""

import copy
import importlib.util
import json
import logging
import string
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers, is_one_graph
from gerund.checks import write_json
from gerund.errors import MissingDependencyError
from gerund.inference.encode.runtime import SAMPLE_TEXTS, EncoderRuntime
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.models import loading
from gerund.models.adapters import merged_state, merging_unties
from gerund.models.encoder_settings import write_settings
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.sources import find
from gerund.settings.model_spec import ModelSpec
from gerund.text_analysis import JOINERS, SHOWN

TEXTS = (*SAMPLE_TEXTS, "zürich 数据库", '"3.5 km," she said.')
"""Texts that every export is verified with."""
_LONG_TEXT_TOKENS = 1024
# How many tokens of the vocabulary are tested as the start of a text.
_STARTS = 4096


@dataclass(frozen=True)
class Export:
    """The result of an export.

    Attributes:
        folder: where it is.
        load: the line of Python that loads it; for GGUF the command.
        why_custom: for ``sentence-transformers``, why the folder needs gerund's own class; empty if plain
            sentence-transformers reads it.
        fingerprint: for ``merged``, the fingerprint of the encoder that was written.
        about: for GGUF, type, size and distance from the original.
    """

    folder: Path
    load: str
    why_custom: str = ""
    fingerprint: str = ""
    about: str = ""


def with_weights(lm: Any) -> Any:
    """Return a ``LanguageModel``; where it is computed from packed weights, the same one with unpacked ones."""
    if not is_one_graph(lm.model) or lm.load_again is None:
        return lm
    return lm.load_again(ModelSpec.of(lm.spec, runtime="torch"))


def require_installed(modules: tuple[str, ...], target: str, extra: str) -> None:
    """Raise ``MissingDependencyError`` for the modules that are absent."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(f"an export to {target} needs {', '.join(absent)}: pip install 'gerund[{extra}]'")


def write_merged(runtime: EncoderRuntime, folder: Path) -> str:
    """Write a plain model with the adapter merged in, and ``gerund.json``; return its encoder's fingerprint."""
    state = merged_state(runtime.model, runtime.adapter)
    hashed = weights_hash(state)
    loading.save_model(runtime.model, runtime.tokenizer, state, folder)
    if merging_unties(runtime.model, runtime.adapter):
        change_json(folder / "config.json", tie_word_embeddings=False)
    head = runtime.head
    identity = fingerprint(hashed, "" if head is None else head.fingerprint, runtime.config, runtime.n_layers)
    write_settings(folder, runtime.config, runtime.n_layers, identity)
    if head is not None:
        head.save(folder)
    return identity


def change_json(path: Path, **values: Any) -> None:
    """Set some fields of a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**data, **values})


def plain_tokenizer(runtime: EncoderRuntime) -> PreTrainedTokenizerBase:
    """Return a tokenizer that does on its own what gerund does: normalize, pad, truncate, append the end token."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(runtime.tokenizer)
    # sentence-transformers gives no positions, nor does ONNX, and with padding on the right none are needed.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        spare = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.unk_token)
        tokenizer.pad_token = next(filter(None, spare), None) or tokenizer.convert_ids_to_tokens(0)
    if runtime.max_length is not None:
        tokenizer.model_max_length = runtime.max_length
    if runtime.config.append_eos and tokenizer("a").input_ids[-1] != tokenizer.eos_token_id:
        end = tokenizer.eos_token
        special = [(end, tokenizer.eos_token_id)]
        closing = processors.TemplateProcessing(single=["$A", end], pair=["$A", "$B", end], special_tokens=special)
        core = tokenizer.backend_tokenizer
        before = core.post_processor
        core.post_processor = closing if before is None else processors.Sequence([before, closing])
    if runtime.config.normalizes_texts and tokenizer.is_fast:
        _normalize(tokenizer.backend_tokenizer)
    return tokenizer


def _normalize(core: Any) -> None:
    """Make a tokenizer normalize its texts as gerund does, except that it doesn't join hyphenated words."""
    from tokenizers import Regex, normalizers

    invisible = Regex(rf"[\p{{Default_Ignorable_Code_Point}}&&[^{JOINERS}{SHOWN}]]")
    steps = [normalizers.Replace(invisible, ""), normalizers.NFKC()]
    core.normalizer = normalizers.Sequence([*steps, *([] if core.normalizer is None else [core.normalizer])])


def keeps_normalization(runtime: EncoderRuntime, folder: Path) -> bool:
    """Return whether transformers reads the written tokenizer with gerund's normalization of texts.

    It makes the tokenizers of some model types (Qwen2's) anew from their vocabulary, and slow ones have none.
    """
    if not runtime.config.normalizes_texts:
        return True
    with loading.quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return bool(tokenizer("e\ufb01x").input_ids == tokenizer("efix").input_ids)


def doubled_start(runtime: EncoderRuntime, prompt: str) -> str:
    """Return why other programs read a prompt that begins with the beginning-of-text token otherwise; else nothing."""
    start = runtime.tokenizer.bos_token_id
    if start is None or plain_tokenizer(runtime)(prompt).input_ids[:2] != [start, start]:
        return ""
    return f"the prompt {prompt!r} begins with the token that starts every text, which other programs add once more"


def is_fused(runtime: EncoderRuntime, prompt: str) -> bool:
    """Return whether a token may contain the end of the prompt and the start of the text."""
    tokenizer = plain_tokenizer(runtime)
    alone = tokenizer(prompt).input_ids
    length = len(alone) - int(alone[-1] in tokenizer.all_special_ids)
    step = max(1, len(tokenizer) // _STARTS)
    starts = tokenizer.batch_decode([[token] for token in range(0, len(tokenizer), step)])
    texts = [*TEXTS, *string.ascii_letters, *string.digits, *(text for text in starts if text[:1].isalnum())]
    tokens = tokenize(runtime.tokenizer, texts, InputFormat(prompt=prompt))
    return any(item is not None and item.text_from != length for item in tokens)


def read_written(folder: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a written model on the CPU, since other devices may have no memory for a second model."""
    model, tokenizer = loading.read(find(folder), dtype)
    attach(model)
    attach_streams(decoder_layers(model))
    return model, tokenizer


def sample_texts(runtime: EncoderRuntime) -> list[str]:
    """Return the texts to verify an export with; one is too long for the model, if it has a limit that is not large."""
    longest = runtime.max_length
    return [*TEXTS, *([" so on" * longest] if longest is not None and longest <= _LONG_TEXT_TOKENS else [])]


def sample_tokens(runtime: EncoderRuntime, texts: Sequence[str], prompt: str) -> list[Tokens | None]:
    """Tokenize texts with a prompt as the encoder does."""
    config = runtime.config
    input_format = InputFormat(
        prompt=prompt,
        append_eos=config.append_eos,
        max_length=runtime.max_length,
        normalizes=config.normalizes_texts,
        follows_sentence_transformers=config.follows_sentence_transformers,
    )
    return tokenize(runtime.tokenizer, texts, input_format)


@contextmanager
def silence(*loggers: str) -> Iterator[None]:
    """Silence other libraries' warnings and log messages."""
    noisy = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in noisy]
    for logger in noisy:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(noisy, levels, strict=True):
            logger.setLevel(level)
