"""Random GGUF files, and what transformers computes from their unpacked weights."""

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, PreTrainedModel

from gerund.gguf_file import read_file
from gerund.models.gguf_model import read_config, read_weights

WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS, VOCABULARY = 64, 4, 2, 16, 96, 2, 50


def write_llama(path: Path, kind: Type = Type.Q4_1, *, output: bool = False, seed: int = 0) -> Path:
    """Write a random file of architecture llama, with matrices of this type."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100.0)

    def add(name: str, rows: int, columns: int, stored: Type = kind) -> None:
        values = generator.normal(size=(rows, columns), scale=columns**-0.5).astype(np.float32)
        if stored == Type.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)

    add("token_embd.weight", VOCABULARY, WIDTH, Type.Q8_0)
    if output:
        add("output.weight", VOCABULARY, WIDTH)
    writer.add_tensor("output_norm.weight", generator.normal(size=WIDTH, loc=1).astype(np.float32))
    for layer in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            weights = generator.normal(size=WIDTH, loc=1, scale=0.2).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{norm}.weight", weights)
        add(f"blk.{layer}.attn_q.weight", HEADS * HEAD, WIDTH)
        add(f"blk.{layer}.attn_k.weight", KV_HEADS * HEAD, WIDTH)
        add(f"blk.{layer}.attn_v.weight", KV_HEADS * HEAD, WIDTH)
        add(f"blk.{layer}.attn_output.weight", WIDTH, HEADS * HEAD)
        add(f"blk.{layer}.ffn_gate.weight", INNER, WIDTH)
        add(f"blk.{layer}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def unpacked(path: Path) -> PreTrainedModel:
    """Return the model of a file in float32."""
    file = read_file(path)
    config = read_config(file)
    config.dtype = torch.float32  # Gemma rounds the scale of its embeddings to the model's type
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    read_weights(file, skeleton, torch.float32)
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(skeleton.state_dict())
    return model.eval()


@torch.no_grad()
def logits(path: Path, ids: np.ndarray, *, both_ways: bool = False) -> np.ndarray:
    """Return the logits (T, V) of one text."""
    mask = torch.zeros(1, 1, len(ids), len(ids)) if both_ways else None
    return unpacked(path)(torch.tensor(ids)[None], attention_mask=mask, use_cache=False).logits[0].numpy()
