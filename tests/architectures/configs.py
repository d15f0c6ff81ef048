"""A tiny config for every architecture that transformers reads causal language models of.

Most take the values of ``SMALL`` under whatever names they have; ``OWN`` says what an architecture needs beside. Each
has all kinds of layers that it knows among its four.
"""

from importlib.util import find_spec
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.tiny import LATENT, N_LAYERS, RECURRENT

KINDS = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
VOCAB = 276
WINDOW = 3

_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "num_blocks",
    "num_decoder_layers",
)
_WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "embedding_dim", "dim_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads",
          "num_decoder_attention_heads")  # fmt: skip
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "ffn_hidden_size", "dim_ff", "d_inner",
          "feed_forward_size", "dff", "dense_intermediate_size")  # fmt: skip
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length")

SMALL: dict[str, Any] = {
    **dict.fromkeys(_LAYERS, N_LAYERS), **dict.fromkeys(_WIDTHS, 32), **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_INNER, 48), **dict.fromkeys(_LENGTHS, 64),
    "vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "sliding_window": WINDOW, "attention_dropout": 0.0,
    # experts
    "moe_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24,
    "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_num_experts": 4, "shared_intermediate_size": 24,
    # latent attention and indexers
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "index_topk": 4, "index_head_dim": 8, "index_n_heads": 16,
    # sliding layers of another shape, and layers that run in loops
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16,
    "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 2, "loop_gate_rank": 4,
    "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1, "unpadded_vocab_size": VOCAB,
    # recurrent layers
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_chunk_size": 4, "mamba_dt_rank": 4, "chunk_size": 4, "ssm_state_size": 8, "state_size": 8, "n_groups": 1,
    "rotary_dim": 4,
}  # fmt: skip

_MLA = {"num_key_value_heads": 4}
_EVERY_OTHER = ["linear_attention", "full_attention"] * 2
_DECODER = {"is_decoder": True}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
           "image_size": 16, "patch_size": 8}  # fmt: skip

_GEMMA3N = {"intermediate_size": [48] * N_LAYERS, "activation_sparsity_pattern": [0.0] * N_LAYERS, "laurel_rank": 4,
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB,
            "altup_num_inputs": 2}  # fmt: skip
_GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
           "global_head_dim": 16}  # fmt: skip
_QWEN4 = {"layer_types": ["linear_attention", "indexed_attention"] * 2, "hc_count": 2, "hc_lowrank": 4,
          "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
          "indexer_compress_ratio": 2, "ple_layer_ids": [3], "ple_embed_dim": 8, "ngram_vocab_size_base": 50,
          "heads_per_ngram": 2, "make_ngram_vocab_size_divisible_by": 4}  # fmt: skip
_DOTS3 = {name: value for name, value in LATENT["dots3_note_text"].items() if name != "vocab_size"}
_HYBRID = {name: {key: value for key, value in own.items() if key != "vocab_size"} for name, own in RECURRENT.items()}

# What an architecture needs beside; ... leaves a setting of SMALL out.
OWN: dict[str, dict[str, Any]] = {
    **_HYBRID,
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roberta-prelayernorm", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        _DECODER,
    ),
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "bailing_hybrid": {"num_experts_per_token": 2, "num_expert_group": 1, "linear_head_dim": 8, "linear_num_heads": 4,
                       "layer_types": _EVERY_OTHER, "mlp_layer_types": ["dense", "sparse"] * 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4,
                                                              "moe_top_k": 2}},
    "dots3_note_text": _DOTS3,
    "moss_transcribe_diarize": {"audio_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                                 "intermediate_size": 16}},
    "phi4_multimodal": {"vision_config": {**_VISION, "crop_size": 16, "num_hidden_layers": 3},
                        "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 2,
                                         "num_attention_heads": 2, "ext_pw_out_channel": 16,
                                         "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}},
    "emu3": {"text_config": {}},
    "falcon": {"num_kv_heads": 4},
    "falcon_mamba": {"time_step_rank": 4},
    "gemma3": {"vision_config": _VISION, "mm_tokens_per_image": 4},
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": {"architecture": "mobilenetv4_conv_small_035"},
                "audio_config": {"hidden_size": 16, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 2,
                                 "input_feat_size": 16, "sscp_conv_channel_size": [4, 4]}},
    "gemma3n_text": _GEMMA3N,
    "gemma4": {"text_config": _GEMMA4, "vision_config": _VISION},
    "gemma4_text": _GEMMA4,
    "inkling_text": {"sliding_window": ..., "sliding_window_size": 8},
    "inkling2_text": {"sliding_window": ..., "sliding_window_size": 8},
    "inkling2_loop_text": {"sliding_window": ..., "sliding_window_size": 8, "n_layers_per_attn_res_block": 1},
    "prophetnet": {"num_hidden_layers": ..., "num_encoder_layers": 1},
    "roc_bert": {**_DECODER, "pronunciation_vocab_size": 8, "shape_vocab_size": 8, "pronunciation_embed_dim": 8,
                 "shape_embed_dim": 8},
    "got_ocr2": {"vision_config": {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 1,
                                   "num_attention_heads": 2, "image_size": 16, "patch_size": 8, "mlp_dim": 16,
                                   "window_size": 1, "global_attn_indexes": [0]}},
    "git": {"vision_config": _VISION},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "longcat_flash": {"num_hidden_layers": ..., "expert_ffn_hidden_size": 24, "moe_topk": 2,
                      "zero_expert_num": 2, "head_dim": 4},
    "llama4": {"text_config": {"attention_chunk_size": 8}, "vision_config": _VISION},
    "llama4_text": {"attention_chunk_size": 8},
    "mamba": {"time_step_rank": 4},
    "minimax_m3_vl_text": {"index_block_size": 2, "index_topk_blocks": 2, "index_local_blocks": 1, "index_n_heads": 2,
                           "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in
                                                ("sliding_attention", "full_attention")}},
    "mllama": {"text_config": {"cross_attention_layers": [1]}},
    "qwen4_exp": {"text_config": _QWEN4, "vision_config": _VISION},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW, "layers_block_type": ..., "layer_types": ...,
                        "block_types": ["recurrent", "attention"]},
    "reformer": {**_DECODER, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local"] * 4,
                 "attention_head_size": 8, "local_attn_chunk_length": 4},
    "rwkv": {"attention_hidden_size": 32},
    "xlnet": {**dict.fromkeys(_LENGTHS, ...), "d_head": 8, "attn_type": "uni"},
    "xlstm": {"chunk_size": ...},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 64,
              "attention_head_dim": 16, "num_key_value_heads": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_headdim": 16,
               "num_key_value_heads": 4, "adapter_rank": 4, "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": 8, "router_hidden_size": 8,
             "layer_types": ["hybrid_sliding", "hybrid"] * 2},
}  # fmt: skip

# Why one is not tried, for those that a tiny config is no help for.
NOT_TRIED: dict[str, str] = {
    "dots3_note": "has towers around `dots3_note_text`, which is exact, and their config makes no tiny model",
    "blt": "reads bytes in patches that a second model cuts",
    "gemma4_assistant": "drafts for another model and reads that model's states",
    "gemma4_unified_assistant": "drafts for another model and reads that model's states",
    "musicgen": "writes codes of sound, several at a time",
    "musicgen_melody": "writes codes of sound, several at a time",
}
if find_spec("timm") is None:
    NOT_TRIED["gemma3n"] = "has towers that need another library (timm); exact where it is installed"


def small_config(kind: str) -> PreTrainedConfig:
    """Return the tiny config of an architecture.

    Raises:
        ValueError: it cannot be had, with the reason.
    """
    if kind in NOT_TRIED:
        raise ValueError(NOT_TRIED[kind])
    own = dict(OWN.get(kind, {}))
    default = _default(kind)
    text = default.get_text_config(decoder=True)
    whole = type(text) is type(default)  # of an encoder-decoder, its decoder's view of the same
    given = own if whole else own.pop("text_config", {})
    values = {name: value for name, value in SMALL.items() if _takes(text, name) and name not in given}
    if _takes(text, "kv_lora_rank"):
        values |= _MLA
        rotated = text.to_dict().get("head_dim") == text.to_dict().get("qk_rope_head_dim")
        values |= {"head_dim": SMALL["qk_rope_head_dim"]} if rotated else {}
    types = list(dict.fromkeys(getattr(text, "layer_types", None) or [])) if _takes(text, "layer_types") else []
    if len(types) > 1 and "layer_types" not in given:
        values["layer_types"] = (types * N_LAYERS)[:N_LAYERS]
    values |= given
    values = {name: value for name, value in values.items() if value is not ...}
    if whole:
        return AutoConfig.for_model(kind, **values)
    part = next(name for name in default.sub_configs if getattr(default, name) is text)
    return AutoConfig.for_model(kind, **{part: values, **own})


def _takes(config: PreTrainedConfig, name: str) -> bool:
    """Whether a config has such a setting, and it may be set."""
    own = getattr(type(config), name, None)
    if isinstance(own, property) and own.fset is None:
        return False
    try:
        return hasattr(config, name)
    except NotImplementedError:
        return False
    except (ValueError, RuntimeError, TypeError):  # it differs from layer to layer
        return True


def _default(kind: str) -> PreTrainedConfig:
    try:
        return AutoConfig.for_model(kind)
    except ValueError:
        return AutoConfig.for_model(kind, **OWN.get(kind, {}))
