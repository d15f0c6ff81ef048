"""Tokenizers that do by themselves what gerund does around a text, for programs that know nothing of gerund.

Knows: padding, cutting, end tokens, where a prompt ends. Does not know: formats, models.
"""

import copy
import string
from typing import Any

from transformers import PreTrainedTokenizerBase

from gerund.inference.encode.precision_check import SAMPLE_TEXTS
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.tokens import InputFormat, tokenize
from gerund.normalization import JOINERS, SHOWN

TEXTS = (*SAMPLE_TEXTS, "zürich 数据库", '"3.5 km," she said.')
"""What an export is tried on."""

# How many of the vocabulary's tokens are tried as the beginning of a text.
_BEGINNINGS = 4096


def plain_tokenizer(runtime: EncoderRuntime) -> PreTrainedTokenizerBase:
    """Return a tokenizer that by itself does what gerund does: normalize, pad, cut, and append the end token."""
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
    """Let a tokenizer read a text in its normal form, but for words that are divided at a line's end."""
    from tokenizers import Regex, normalizers

    invisible = Regex(rf"[\p{{Default_Ignorable_Code_Point}}&&[^{JOINERS}{SHOWN}]]")
    own = [normalizers.Replace(invisible, ""), normalizers.NFKC()]
    core.normalizer = normalizers.Sequence([*own, *([] if core.normalizer is None else [core.normalizer])])


def is_fused(runtime: EncoderRuntime, prompt: str) -> bool:
    """Tell whether the line between a prompt and a text may be elsewhere than where the prompt alone ends."""
    tokenizer = plain_tokenizer(runtime)
    alone = tokenizer(prompt).input_ids
    length = len(alone) - int(alone[-1] in tokenizer.all_special_ids)
    step = max(1, len(tokenizer) // _BEGINNINGS)
    begins = tokenizer.batch_decode([[token] for token in range(0, len(tokenizer), step)])
    texts = [*TEXTS, *string.ascii_letters, *string.digits, *(text for text in begins if text[:1].isalnum())]
    tokens = tokenize(runtime.tokenizer, texts, InputFormat(prompt=prompt))
    return any(item is not None and item.text_from != length for item in tokens)
