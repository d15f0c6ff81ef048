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
from gerund.models.adapters import Adapters, merged_state, merging_unties
from gerund.models.encoder_settings import settings_text
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.sentence_transformers_folder import MODULES_FILE, OWN_CLASS, SETTINGS_FILE
from gerund.normalization import JOINERS, SHOWN
from gerund.settings.encoder import CONFIG_FILE, EncoderConfig
from gerund.settings.model_spec import EncoderSpec


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


def write_settings(
    folder: Path, encoder: EncoderConfig, n_layers: int, identity: str, *, adapters: Adapters | None = None
) -> None:
    """Write ``gerund.json``, with k worked out, and copy adapters into folders of their own.

    sentence-transformers is told that only gerund's own class reads the folder as it is meant.

    Args:
        folder: a model's folder.
        encoder: how the model is read.
        n_layers: how many layers it has.
        identity: the encoder's fingerprint.
        adapters: those of its jobs.
    """
    places = (adapters or Adapters()).copy_into(folder)
    text = settings_text(EncoderSpec.of_config(encoder, n_layers), identity, places)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    write_own_modules(folder, encoder)


def change_json(path: Path, **values: Any) -> None:
    """Set some fields of a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**data, **values})


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file as transformers writes its own."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_NORMALIZE = "sentence_transformers.models.Normalize"
# The prompts that sentence-transformers looks up by itself.
_JOBS = ("query", "document")
_NEEDS = {
    "gerund": {
        "specifier": ">=0.1",
        "reason": "Its attention plan is gerund's; open it with gerund.integrations.sentence_transformers.load(FOLDER)",
    }
}


def write_own_modules(folder: Path, config: EncoderConfig) -> None:
    """Say that gerund's own class reads this folder."""
    write_modules(folder, config, [("", OWN_CLASS)], needs=_NEEDS)


def write_modules(
    folder: Path,
    config: EncoderConfig,
    modules: list[tuple[str, str]],
    *,
    needs: dict[str, dict[str, str]] | None = None,
) -> None:
    """Write both files.

    Args:
        folder: where to.
        config: prompts, and whether vectors get length 1.
        modules: folder and class of each module but the normalisation, which needs no folder of its own.
        needs: packages without which it is not read: a ``specifier`` of versions, and a ``reason``.
    """
    if config.normalize:
        modules = [*modules, (f"{len(modules)}_Normalize", _NORMALIZE)]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / MODULES_FILE, listed)
    prompts, default = prompt_settings(config)
    settings = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": config.similarity}
    required = {"requirements": needs} if needs else {}
    write_json(folder / SETTINGS_FILE, {"model_type": "SentenceTransformer", **settings, **required})


def prompt_settings(config: EncoderConfig) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one.

    A default prompt is that of queries and documents too, where these have none of their own: ``encode_query`` and
    ``encode_document`` would otherwise put nothing before a text.

    >>> prompt_settings(EncoderConfig(prompt="Query: ", prompts={"document": "Text: "}))
    ({'default': 'Query: ', 'query': 'Query: ', 'document': 'Text: '}, 'default')
    >>> prompt_settings(EncoderConfig(prompts={"document": "Text: "}))
    ({'document': 'Text: '}, None)
    """
    prompts = dict(config.prompts)
    if not config.prompt:
        return prompts, None
    name = next((name for name, text in prompts.items() if text == config.prompt), None)
    if name is None:
        name = "default" if "default" not in prompts else "gerund-default"
    return {name: config.prompt, **dict.fromkeys(_JOBS, config.prompt), **prompts}, name


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
