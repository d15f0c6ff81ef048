"""Tiny random folders in the layouts in which sentence-transformers, old and new, writes ready-made encoders."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

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
    with_head: bool = False,
    **changes: Any,
) -> Path:
    """Write such a folder in the layout ``old`` (to 5.3) or ``new`` (from 5.4).

    ``behind`` are modules between pooling and normalisation, and ``changes`` are of the model's config. Without a
    ``max_seq_length`` there is no file of it. The usual tokenizer closes each text.
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
        write(folder / "sentence_bert_config.json", limit)
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


PAIR_TEMPLATE = (
    "{% for m in messages if m.role == 'system' %}<s>{{ m.content }}\n{% endfor %}"
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}</s>\n"
    "{% if add_generation_prompt %}answer:{% endif %}"
)
"""A chat template with the roles of a reranker."""


def answering(*, bos: bool = True, template: str | None = None, context: int = 100) -> PreTrainedTokenizerFast:
    """Return a tokenizer that has the answers of yes/no rerankers as tokens."""
    tokenizer = byte_tokenizer(bos=bos)
    tokenizer.add_tokens(["yes", "no", "Yes", "<|im_end|>"])
    tokenizer.chat_template = template
    tokenizer.model_max_length = context
    return tokenizer


def reranker(
    folder: Path,
    model_type: str = "qwen3",
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    layout: str | None = None,
    activation: str | None = None,
    old_activation: str | None = None,
    false: str | None = "no",
    instruction: str | None = None,
    processing: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Write a tiny reranker.

    Its layout is ``LogitScore``, ``CrossEncoder`` (with modules.json), ``classifier`` (transformers' files alone) or
    None, a plain language model. An activation is a class of ``torch.nn`` in sentence-transformers' settings (in
    config.json for ``classifier``), ``old_activation`` the same under the key of versions before 4, and ``false`` the
    token whose logit is subtracted.
    """
    tokenizer = tokenizer or answering()
    changes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512, "pad_token_id": 0, **changes}
    if layout in ("CrossEncoder", "classifier"):
        changes = {"num_labels": 1, **changes}
    model = tiny(model_type, **changes)
    if layout in ("CrossEncoder", "classifier"):
        body, model = model.base_model, AutoModelForSequenceClassification.from_config(model.config)
        model.base_model.load_state_dict(body.state_dict())
        torch.nn.init.normal_(model.score.weight, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kind = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}.{activation}"
    if layout == "classifier" and activation is not None:
        change(folder / "config.json", sentence_transformers={"activation_fn": kind, "version": "5.0.0"})
    if old_activation is not None:
        change(folder / "config.json", sbert_ce_default_activation_function=old_activation)
    if layout not in ("LogitScore", "CrossEncoder"):
        return folder
    types = [NEW["Transformer"], "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"]
    listed = [("", types[0]), ("1_LogitScore", types[1])][: 2 if layout == "LogitScore" else 1]
    write(
        folder / "modules.json", [{"idx": i, "name": str(i), "path": p, "type": t} for i, (p, t) in enumerate(listed)]
    )
    forward = {"method": "forward", "method_output_name": "logits"}
    message = {"message": {**forward, "format": "flat"}} if tokenizer.chat_template else {}
    generates = layout == "LogitScore"
    text: dict[str, Any] = {"transformer_task": "text-generation" if generates else "sequence-classification"}
    text |= {"modality_config": {"text": forward, **message}}
    text |= {"module_output_name": "causal_logits" if generates else "scores"}
    write(folder / "sentence_bert_config.json", {**text, **({"processing_kwargs": processing} if processing else {})})
    if generates:
        ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) if token else None
               for name, token in (("true", "yes"), ("false", false))}  # fmt: skip
        write(folder / "1_LogitScore" / "config.json", {**ids, "module_input_name": "causal_logits"})
    prompts = {} if instruction is None else {"query": instruction}
    settings: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": prompts}
    settings |= {"default_prompt_name": "query" if prompts else None}
    write(folder / "config_sentence_transformers.json", {**settings, **({"activation_fn": kind} if activation else {})})
    return folder
