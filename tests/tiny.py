"""Tiny random models of every architecture that the attention plans are tested on."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

import gerund
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.language_model import LanguageModel
from gerund.settings.encoder import EncoderConfig

VOCAB = 97
N_LAYERS = 4

_SMALL = dict(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_hidden_layers=N_LAYERS,
              intermediate_size=48, max_position_embeddings=64,
              pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
_GQA = dict(_SMALL, num_key_value_heads=2)
_HEADED = dict(_GQA, head_dim=8)
_GPT = dict(vocab_size=VOCAB, n_embd=32, n_head=4, n_layer=N_LAYERS, n_positions=64, bos_token_id=1, eos_token_id=2)
_MOE = dict(_GQA, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, shared_expert_intermediate_size=24)
_LAYER_TYPES = ["sliding_attention", "full_attention"] * (N_LAYERS // 2)

CONFIGS: dict[str, dict] = {
    "llama": _GQA,
    "qwen2": _GQA,
    "qwen3": _HEADED,
    "mistral": dict(_GQA, sliding_window=3),
    "gemma2": dict(_HEADED, sliding_window=3, layer_types=_LAYER_TYPES, query_pre_attn_scalar=8),
    "gemma3_text": dict(_HEADED, sliding_window=3, layer_types=_LAYER_TYPES, query_pre_attn_scalar=8),
    "gpt2": _GPT,
    "gpt_neox": _SMALL,
    "olmo": _GQA,
    "olmo2": _GQA,
    "olmo3": dict(_GQA, sliding_window=3, layer_types=_LAYER_TYPES),
    "phi": _GQA,
    "phi3": dict(_GQA, sliding_window=3),
    "smollm3": _GQA,
    "opt": dict(vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_attention_heads=4, num_hidden_layers=N_LAYERS,
                max_position_embeddings=64, word_embed_proj_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "granite": _GQA,
    "cohere": _GQA,
    "starcoder2": dict(_GQA, sliding_window=3),
    "qwen2_moe": _MOE,
    "gpt_oss": dict(_HEADED, sliding_window=3, num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip

# How a batch is padded; one padded on both sides holds the rows of the two that are padded on one.
SIDES = ["both", "none", "left", "right"]

_EVERY_OTHER = ["linear_attention", "full_attention"] * (N_LAYERS // 2)
_LINEAR = dict(_HEADED, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
               linear_value_head_dim=8, layer_types=_EVERY_OTHER)  # fmt: skip
_CONV = dict(_GQA, layer_types=["conv", "full_attention", "conv", "full_attention"], block_auto_adjust_ff_dim=False)
_MAMBA2 = dict(_GQA, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=4)
_FEW_EXPERTS = dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2)

# With recurrent layers among those that attend, in their place, or in one layer with them.
RECURRENT: dict[str, dict] = {
    "qwen3_next": dict(_LINEAR, **_FEW_EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": dict(_LINEAR, **_FEW_EXPERTS, shared_expert_intermediate_size=24),
    "olmo_hybrid": _LINEAR,
    "kimi_linear": dict(_SMALL, num_key_value_heads=4, layer_types=_EVERY_OTHER, q_lora_rank=None,
                        linear_attn_config=dict(head_dim=8, num_heads=4, short_conv_kernel_size=3),
                        kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
                        mlp_layer_types=["dense"] * N_LAYERS),
    "minimax": dict(_HEADED, layer_types=_EVERY_OTHER, num_local_experts=2, num_experts_per_tok=2,
                    block_size=4),
    "lfm2": _CONV,
    "lfm2_moe": dict(_CONV, **_FEW_EXPERTS, num_dense_layers=1),
    "lfm3": _CONV,
    "bamba": dict(_MAMBA2, attn_layer_indices=[1, 3]),
    "granitemoehybrid": dict(_MAMBA2, layer_types=["mamba", "attention"] * 2, num_local_experts=2,
                             num_experts_per_tok=2, shared_intermediate_size=24),
    "falcon_h1": dict(_MAMBA2, mamba_d_ssm=64),
    "jamba": dict(_GQA, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
                  num_experts=2, mamba_d_state=8, mamba_dt_rank=4),
    "nemotron_h": dict(_HEADED, layers_block_type=["mamba", "attention", "mlp", "mamba"], mamba_num_heads=4,
                       mamba_head_dim=16, n_groups=1, ssm_state_size=8, chunk_size=4),
    "bailing_hybrid": dict(_SMALL, num_key_value_heads=4, layer_types=_EVERY_OTHER,
                           mlp_layer_types=["dense"] * N_LAYERS, linear_head_dim=8, linear_num_heads=4,
                           kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, head_dim=4),
    "mamba": dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=N_LAYERS, state_size=8, time_step_rank=4,
                  pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "mamba2": dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=N_LAYERS, num_heads=4, head_dim=16, n_groups=1,
                   state_size=8, chunk_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}  # fmt: skip

# Attention that takes its mask as an argument, and computes by itself or hands keywords on no further.
GIVEN: dict[str, dict] = {
    "stablelm": _GQA,
    "nemotron": _HEADED,
    "bloom": dict(vocab_size=VOCAB, hidden_size=32, n_head=4, n_layer=N_LAYERS),
    "gptj": dict(_GPT, rotary_dim=4),
    "codegen": dict(_GPT, rotary_dim=4),
    "falcon": dict(_SMALL, alibi=False, new_decoder_architecture=False, multi_query=True),
    "mpt": dict(vocab_size=VOCAB, d_model=32, n_heads=4, n_layers=N_LAYERS, max_seq_len=64),
    "xglm": dict(vocab_size=VOCAB, d_model=32, ffn_dim=48, attention_heads=4, num_layers=N_LAYERS,
                 max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
                 layerdrop=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "gpt_neox_japanese": dict(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_hidden_layers=N_LAYERS,
                              max_position_embeddings=64),
}  # fmt: skip

_MLA = dict(_SMALL, num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4,
            v_head_dim=8, moe_intermediate_size=24, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=1)  # fmt: skip
# An indexer with few ties, that chooses fewer keys than a text of the tests has.
_DSA = dict(_MLA, index_topk=3, index_head_dim=8, index_n_heads=16)
_SPARSE_MLP = ["dense", "sparse"] * (N_LAYERS // 2)

# Latent attention: keys and values come out of one small state a token; the last four choose keys by an indexer.
LATENT: dict[str, dict] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "minicpm3": {key: value for key, value in _MLA.items() if key not in _FEW_EXPERTS},
    "glm4_moe_lite": dict(_MLA, mlp_layer_types=_SPARSE_MLP),
    "youtu": {key: value for key, value in _MLA.items() if key not in _FEW_EXPERTS},
    "axk1": dict(_MLA, mlp_layer_types=_SPARSE_MLP),
    "longcat_flash": {**{key: value for key, value in _MLA.items() if key != "num_hidden_layers"},
                      "num_layers": N_LAYERS, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "moe_topk": 2,
                      "zero_expert_num": 2, "head_dim": 4},
    "deepseek_v32": dict(_DSA, mlp_layer_types=_SPARSE_MLP),
    "glm_moe_dsa": dict(_DSA, mlp_layer_types=_SPARSE_MLP),
    "axk2": dict(_DSA, mlp_layer_types=_SPARSE_MLP),
    "dots3_note_text": dict(_DSA, mlp_layer_types=_SPARSE_MLP, sliding_window=3, head_dim=12,
                            layer_types=["indexed_attention", "sliding_attention"] * 2, n_shared_experts=1,
                            moe_shared_expert_intermediate_size=24, swa_num_attention_heads=4,
                            swa_num_key_value_heads=4, swa_q_lora_rank=8, swa_kv_lora_rank=8, swa_head_dim=12,
                            swa_qk_nope_head_dim=8, swa_v_head_dim=8),
}  # fmt: skip

# Habits of their own: parts of a text, keys and values of lower layers, streams of states, masks with more in them.
ODD: dict[str, dict] = {
    "llama4_text": dict(_HEADED, attention_chunk_size=4, intermediate_size_mlp=48, num_local_experts=2,
                        num_experts_per_tok=1, layer_types=["chunked_attention", "full_attention"] * 2),
    "gemma3n_text": dict(_HEADED, sliding_window=3, layer_types=_LAYER_TYPES, intermediate_size=[48] * N_LAYERS,
                         activation_sparsity_pattern=[0.0] * N_LAYERS, laurel_rank=4, num_kv_shared_layers=2,
                         hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, altup_num_inputs=2),
    "gemma4_text": dict(_HEADED, sliding_window=3, layer_types=_LAYER_TYPES, global_head_dim=16,
                        num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB),
    "diffllama": _GQA,
    "doge": _GQA,
    "phimoe": dict(_GQA, num_local_experts=4, num_experts_per_tok=2, sliding_window=3),
    "exaone4": dict(_HEADED, sliding_window=3, layer_types=_LAYER_TYPES),
}  # fmt: skip

REFUSED: dict[str, dict] = {
    "gpt_neo": dict(vocab_size=VOCAB, hidden_size=32, num_heads=4, num_layers=N_LAYERS, window_size=3,
                    attention_types=[[["global", "local"], 2]], max_position_embeddings=64),
}  # fmt: skip


def tiny(
    model_type: str, seed: int = 0, *, attn_implementation: str | None = None, **changes: object
) -> PreTrainedModel:
    """Build a tiny random fp32 model of ``model_type`` in evaluation mode."""
    torch.manual_seed(seed)
    settings = {**CONFIGS, **RECURRENT, **GIVEN, **LATENT, **ODD, **REFUSED}[model_type]
    config = AutoConfig.for_model(model_type, **{**settings, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    _spread(model)
    return model.eval()


def ready(model_type: str, **changes: object) -> PreTrainedModel:
    """Build a tiny random model whose layers take plans, with second passes too."""
    model = tiny(model_type, **changes)
    attach(model)
    attach_streams(decoder_layers(model))
    return model


def tiny_lm(
    model_type: str = "llama",
    tokenizer: PreTrainedTokenizerFast | None = None,
    *,
    changes: Mapping[str, object] | None = None,
    **settings: Any,
) -> LanguageModel:
    """Put a tiny random model together with a tokenizer, by default the byte-level one.

    Args:
        model_type: of the language model.
        tokenizer: whose size the model's vocabulary has.
        changes: of the model's config.
        **settings: of the encoder.
    """
    tokenizer = tokenizer or byte_tokenizer()
    model = tiny(model_type, **{"vocab_size": len(tokenizer), **(changes or {})})
    return LanguageModel(model, tokenizer, EncoderConfig(**settings))


def _spread(model: PreTrainedModel) -> None:
    """Make the random weights large enough that who sees whom shows clearly in the states."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)


def batch(side: str, lengths: tuple[int, ...] = (7, 5, 3), seed: int = 1) -> dict[str, torch.Tensor]:
    """Build random ids, attention mask and positions, padded on ``side`` (left, right, both or none).

    With both, the texts padded on the left are followed by the same texts padded on the right.
    """
    if side == "both":
        left, right = batch("left", lengths, seed), batch("right", lengths, seed)
        return {name: torch.cat([left[name], right[name]]) for name in left}
    generator = torch.Generator().manual_seed(seed)
    if side == "none":
        lengths = (max(lengths),) * len(lengths)
    longest = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=generator)
    real = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        real[row, longest - length :] = 1 if side == "left" else 0
        if side != "left":
            real[row, :length] = 1
    return {"input_ids": ids * real, "attention_mask": real, "position_ids": (real.cumsum(1) - 1).clamp(min=0)}


def byte_tokenizer(bos: bool = True) -> PreTrainedTokenizerFast:
    """Build a tokenizer with a token a byte and a few whole words, beginning every text with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    merges = []
    for left, right in ["th", "in", "er", "an", ("Ġ", "th"), ("Ġth", "e"), ("Ġ", "a")]:
        merges.append((left, right))
        vocabulary.setdefault(left + right, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if bos:
        core.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]),
        ])  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=64
    )


def save_tiny(folder: Path, model_type: str = "llama", *, bos: bool = True, room: int = 64, **changes: object) -> Path:
    """Save a tiny random model with the byte-level tokenizer, as plain transformers does, with room for some tokens."""
    tokenizer = byte_tokenizer(bos)
    tokenizer.model_max_length = room
    changes |= {"max_position_embeddings": room} if room != 64 else {}
    model = tiny(model_type, **{"vocab_size": len(tokenizer), **changes})
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_t5(folder: Path, *, sentinels: int = 8, seed: int = 0, **changes: object) -> Path:
    """Save a tiny random T5 with a byte-level tokenizer that closes every text and has sentinels."""
    tokenizer = byte_tokenizer(bos=False)
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]),
    ])  # fmt: skip
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<extra_id_{i}>" for i in range(sentinels)]})
    torch.manual_seed(seed)
    small = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0)
    ends = dict(pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(T5Config(**{**small, **ends, "vocab_size": len(tokenizer), **changes}))
    _spread(model)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LanguageModel:
    """Load a saved model in float32, so that two ways to compute something agree."""
    return gerund.load(folder, **{"dtype": "float32", **options})


def long_rotary(limit: int) -> dict[str, Any]:
    """Return what makes ``tiny("phi3")`` turn keys otherwise beyond so many tokens, as Phi-3 with 128k does."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 6.0, 12.0])
    return dict(
        sliding_window=None,
        max_position_embeddings=256,
        original_max_position_embeddings=limit,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=limit, **factors
        ),
    )
