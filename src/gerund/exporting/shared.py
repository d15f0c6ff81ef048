"""Parts that several export formats share: merged weights, JSON files, tokenizers, sentence-transformers' files."""

import copy
import json
import string
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from gerund.inference.encode.runtime import SAMPLE_TEXTS, EncoderRuntime
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models import loading
from gerund.models.adapters import merged_state, merging_unties
from gerund.models.encoder_settings import write_settings
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.sentence_transformers_folder import write_json
from gerund.normalization import JOINERS, SHOWN


def write_merged(runtime: EncoderRuntime, folder: Path) -> str:
    """Write a plain model whose weights are what the runtime's adapter makes of them, with ``gerund.json``.

    Returns:
        The encoder's fingerprint, which the merged weights have a part in.
    """
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
