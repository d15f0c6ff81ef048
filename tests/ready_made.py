"""Tiny random folders in the layouts in which sentence-transformers, old and new, writes ready-made encoders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import byte_tokenizer, tiny

OLD = {name: f"sentence_transformers.models.{name}" for name in ("Transformer", "Pooling", "Dense", "Normalize")}
NEW = {
    "Transformer": "sentence_transformers.base.modules.transformer.Transformer",
    "Pooling": "sentence_transformers.sentence_transformer.modules.pooling.Pooling",
    "Dense": "sentence_transformers.base.modules.dense.Dense",
    "Normalize": "sentence_transformers.base.modules.normalize.Normalize",
    "LayerNorm": "sentence_transformers.sentence_transformer.modules.layer_norm.LayerNorm",
    "Dropout": "sentence_transformers.sentence_transformer.modules.dropout.Dropout",
}
SWITCHES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}
PROMPTS = {"query": "Instruct: find the text\nQuery: ", "document": ""}
TEXT_ONLY = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
WIDTH = 32


def write(path: Path, data: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data, indent=2))


def change(path: Path, **values: Any) -> None:
    write(path, {**json.loads(path.read_text()), **values})


def closed(tokenizer: PreTrainedTokenizerFast, *, begins: bool = True) -> PreTrainedTokenizerFast:
    """Let the tokenizer's post-processor put an end token behind every text."""
    single = "<s> $A </s>" if begins else "$A </s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


def dense(width: int, dimensions: int, *, weights: Mapping[str, Any] | None = None, **config: Any) -> dict[str, Any]:
    """Return a Dense module: its config, and random weights."""
    torch.manual_seed(width + dimensions)
    given = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity", **config}
    own: dict[str, Any] = {"linear.weight": torch.randn(dimensions, width) / 4}
    if given["bias"]:
        own["linear.bias"] = torch.randn(dimensions)
    if given.get("use_residual") and width != dimensions:
        own["residual.weight"] = torch.randn(dimensions, width) / 4
    named = {name: value for name, value in given.items() if value is not ...}
    return {
        "kind": "Dense",
        "config": {"in_features": width, "out_features": dimensions, **named},
        "weights": weights or own,
    }


def ready_made(
    folder: Path,
    model_type: str = "qwen3",
    *,
    layout: str = "old",
    pooling: str | Sequence[str] = "lasttoken",
    include_prompt: bool = True,
    behind: Sequence[dict[str, Any]] = (),
    normalize: bool = True,
    prompts: Mapping[str, str] | None = PROMPTS,
    default_prompt_name: str | None = None,
    similarity: str | None = "cosine",
    truncate_dim: int | None = None,
    max_seq_length: int | None = 48,
    tokenizer: PreTrainedTokenizerFast | None = None,
    text_config: Mapping[str, Any] | None = None,
    with_head: bool = False,
    **changes: Any,
) -> Path:
    """Write such a folder.

    Args:
        folder: where to.
        model_type: of the language model.
        layout: ``old`` (to 5.3) or ``new`` (from 5.4).
        pooling: one mode or several.
        include_prompt: whether the prompt is pooled.
        behind: modules between pooling and normalisation.
        normalize: whether there is one.
        prompts: by name.
        default_prompt_name: the default's.
        similarity: how vectors are compared.
        truncate_dim: how many numbers are kept.
        max_seq_length: longest text in tokens; None writes no file.
        tokenizer: None takes one that closes each text.
        text_config: further entries of ``sentence_bert_config.json``.
        with_head: whether the language model's head is saved as well.
        **changes: of the model's config.
    """
    tokenizer = tokenizer or closed(byte_tokenizer())
    if layout == "new" and max_seq_length is not None:
        tokenizer.model_max_length = max_seq_length
    model = tiny(model_type, **{"vocab_size": len(tokenizer), **changes})
    (model if with_head else model.base_model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    types = OLD if layout == "old" else NEW
    modes = [pooling] if isinstance(pooling, str) else list(pooling)
    if layout == "old":
        switches = {f"pooling_mode_{switch}": mode in modes for mode, switch in SWITCHES.items()}
        pooled = {"word_embedding_dimension": WIDTH, **switches, "include_prompt": include_prompt}
        limit = {"max_seq_length": max_seq_length, "do_lower_case": False}
    else:
        pooled = {"embedding_dimension": WIDTH, "pooling_mode": pooling, "include_prompt": include_prompt}
        limit = {"transformer_task": "feature-extraction", "modality_config": TEXT_ONLY}
        limit["module_output_name"] = "token_embeddings"
    if max_seq_length is not None or layout == "new":
        write(folder / "sentence_bert_config.json", {**limit, **(text_config or {})})
    last = [{"kind": "Normalize", "config": None}] if normalize else []
    listed = [("", types["Transformer"])]
    for place, own in enumerate([{"kind": "Pooling", "config": pooled}, *behind, *last], start=1):
        name = f"{place}_{own['kind']}"
        listed.append((name, types.get(own["kind"], NEW.get(own["kind"]))))
        if own["config"] is not None:
            write(folder / name / "config.json", own["config"])
        if "weights" in own:
            save_file(own["weights"], folder / name / "model.safetensors")
    modules = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(listed)]
    write(folder / "modules.json", modules)
    if prompts is not None:
        settings = {"prompts": dict(prompts), "default_prompt_name": default_prompt_name}
        settings |= {"similarity_fn_name": similarity, "model_type": "SentenceTransformer"}
        settings |= {} if truncate_dim is None else {"truncate_dim": truncate_dim}
        write(folder / "config_sentence_transformers.json", settings)
    return folder
