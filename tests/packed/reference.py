"""A decoder in plain numpy over the unpacked blocks of a GGUF file, slow and obvious; and random files for it."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from gerund.gguf_file import GgufFile, read_file

WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS, VOCABULARY = 64, 4, 2, 16, 96, 2, 50


def write_llama(path: Path, kind: Type = Type.Q4_1, *, output: bool = False, seed: int = 0) -> GgufFile:
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
    return read_file(path)


def logits(file: GgufFile, ids: list[int], visible: np.ndarray) -> np.ndarray:
    """Return the logits (T, V) of one text under a mask (T, T), in float64, of a file of architecture llama."""

    def weight(name: str) -> np.ndarray:
        return file.tensors.read(f"{name}.weight").astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        epsilon = file.fraction("attention.layer_norm_rms_epsilon") or 0.0
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight(name)

    def rotated(x_THd: np.ndarray) -> np.ndarray:
        # llama.cpp rotates neighbours: dimensions 2i and 2i + 1.
        size = x_THd.shape[-1]
        angle = np.arange(len(x_THd))[:, None] * (file.fraction("rope.freq_base") or 0.0) ** (
            -np.arange(0, size, 2) / size
        )
        turned = (x_THd[..., 0::2] + 1j * x_THd[..., 1::2]) * np.exp(1j * angle)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x_THd.shape)

    heads, kv_heads = file.number("attention.head_count"), file.number("attention.head_count_kv")
    x = weight("token_embd")[ids]
    for layer in range(file.number("block_count")):
        block = f"blk.{layer}"
        y = norm(x, f"{block}.attn_norm")
        query, key, value = (
            (y @ weight(f"{block}.attn_{name}").T).reshape(len(ids), count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = rotated(query), rotated(key)
        key, value = (np.repeat(part, heads // kv_heads, 1) for part in (key, value))
        scores = np.einsum("thd,shd->hts", query, key) / np.sqrt(query.shape[-1])
        scores = np.exp(np.where(visible, scores, -np.inf))
        mixed = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), value)
        x = x + mixed.reshape(len(ids), -1) @ weight(f"{block}.attn_output").T
        y = norm(x, f"{block}.ffn_norm")
        gate = y @ weight(f"{block}.ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ weight(f"{block}.ffn_up").T)) @ weight(f"{block}.ffn_down").T
    head = "output" if "output.weight" in file.tensors.infos else "token_embd"
    return norm(x, "output_norm") @ weight(head).T
