"""Each architecture is read from GGUF as the model that was written, and llama.cpp computes the same from that file."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gerund.errors import ModelError
from gerund.exporting.llama_cpp import serve
from gerund.gguf_architectures import LAYOUTS
from gerund.gguf_file import read_file
from gerund.models.gguf_model import read_config, read_weights
from tests.models.gguf_writer import llama_cpp_logprobs, tensors, write_gguf
from tests.tiny import CONFIGS, RECURRENT, byte_tokenizer

TOKENIZER = byte_tokenizer()
SMALL = {**CONFIGS["llama"], "num_hidden_layers": 2, "vocab_size": len(TOKENIZER)}
PLAIN = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
HEADED = {**SMALL, "head_dim": 16}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SLIDING, FULL = "sliding_attention", "full_attention"
EVERY_FOURTH = {"num_hidden_layers": 4, "sliding_window": 3, "layer_types": [SLIDING] * 3 + [FULL]}
FOUR_VALUES = {**RECURRENT["qwen3_5_text"], "head_dim": 16, "linear_num_value_heads": 4, "vocab_size": len(TOKENIZER)}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
         "mrope_interleaved": True}  # fmt: skip
SCALES = {"attention_multiplier": 0.3, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}
MAMBA = {
    key: value for key, value in RECURRENT["falcon_h1"].items() if key.startswith("mamba_") and key != "mamba_d_ssm"
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 4.0, 8.0, 9.0], "original_max_position_embeddings": 256}  # fmt: skip

# By a name: llama.cpp's architecture, transformers' one, and its config.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", dict(SMALL, head_dim=16, attention_bias=True, mlp_bias=True)),
    "llama, llama3": ("llama", "llama", dict(SMALL, rope_parameters=LLAMA3)),
    "llama, yarn": ("llama", "llama", dict(SMALL, rope_parameters=YARN)),
    "llama, linear": ("llama", "llama", dict(SMALL, rope_parameters=LINEAR)),
    "mixtral": ("llama", "mixtral", dict(SMALL, **EXPERTS)),
    "mistral3": ("mistral3", "ministral3", dict(HEADED, rope_parameters={
        **YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0})),
    "mistral3, plain yarn": ("mistral3", "ministral3", dict(
        HEADED, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1})),
    "qwen2": ("qwen2", "qwen2", SMALL),
    "qwen2, yarn": ("qwen2", "qwen2", dict(SMALL, rope_parameters=YARN)),
    "qwen2moe": ("qwen2moe", "qwen2_moe", dict(SMALL, **MOE, shared_expert_intermediate_size=40)),
    "qwen3": ("qwen3", "qwen3", HEADED),
    "qwen3moe": ("qwen3moe", "qwen3_moe", dict(HEADED, **MOE, norm_topk_prob=True)),
    "qwen3next": (
        "qwen3next", "qwen3_next",
        dict(FOUR_VALUES, **MOE, norm_topk_prob=True, shared_expert_intermediate_size=40),
    ),
    "qwen35": ("qwen35", "qwen3_5_text", dict(FOUR_VALUES, rope_parameters=MROPE)),
    "qwen35moe": (
        "qwen35moe", "qwen3_5_moe_text",
        dict(FOUR_VALUES, **MOE, shared_expert_intermediate_size=40, rope_parameters=MROPE),
    ),
    "gemma": ("gemma", "gemma", HEADED),
    "gemma2": (
        "gemma2", "gemma2",
        dict(HEADED, sliding_window=3, query_pre_attn_scalar=16, attn_logit_softcapping=2.0,
             final_logit_softcapping=5.0),
    ),
    "gemma3": (
        "gemma3", "gemma3_text",
        dict(HEADED, num_hidden_layers=7, sliding_window=3, query_pre_attn_scalar=16,
             layer_types=[*[SLIDING] * 5, FULL, SLIDING]),
    ),
    "phi2": ("phi2", "phi", SMALL),
    "phi3": ("phi3", "phi3", dict(SMALL, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                          "partial_rotary_factor": 0.75})),
    "phi3, longrope": ("phi3", "phi3", dict(
        SMALL, rope_parameters=LONG, max_position_embeddings=512, original_max_position_embeddings=256)),
    "olmo": ("olmo", "olmo", dict(SMALL, clip_qkv=0.5)),
    "olmo2": ("olmo2", "olmo2", SMALL),
    "olmo3": ("olmo2", "olmo3", dict(SMALL, **EVERY_FOURTH, rope_parameters={
        FULL: YARN, SLIDING: {"rope_type": "default", "rope_theta": 1e4}})),
    "olmoe": ("olmoe", "olmoe", dict(SMALL, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2)),
    "smollm3": ("smollm3", "smollm3", dict(SMALL, num_hidden_layers=4, rope_parameters=YARN)),
    "granite": ("granite", "granite", dict(SMALL, **SCALES, attention_bias=True, mlp_bias=True)),
    "granitemoe": ("granitemoe", "granitemoe", dict(SMALL, **SCALES, **EXPERTS)),
    "granitemoe, shared": (
        "granitemoe", "granitemoeshared", dict(SMALL, **SCALES, **EXPERTS, shared_intermediate_size=40),
    ),
    "granitehybrid": (
        "granitehybrid", "granitemoehybrid",
        dict(SMALL, **SCALES, **MAMBA, **EXPERTS, shared_intermediate_size=40, layer_types=["mamba", "attention"]),
    ),
    "granitehybrid, dense": (
        "granitehybrid", "granitemoehybrid",
        dict(SMALL, **SCALES, **MAMBA, num_local_experts=0, num_experts_per_tok=0, shared_intermediate_size=40,
             layer_types=["attention", "mamba"], position_embedding_type="rope"),
    ),
    "falcon-h1": (
        "falcon-h1", "falcon_h1",
        dict(SMALL, **MAMBA, mamba_d_ssm=64, mamba_rms_norm=True, mamba_norm_before_gate=False),
    ),
    "falcon-h1, without a norm": ("falcon-h1", "falcon_h1", dict(HEADED, **MAMBA, mamba_d_ssm=64)),
    "lfm2": ("lfm2", "lfm2", dict(RECURRENT["lfm2"], vocab_size=len(TOKENIZER))),
    "lfm2moe": ("lfm2moe", "lfm2_moe", dict(RECURRENT["lfm2_moe"], vocab_size=len(TOKENIZER))),
    "command-r": ("command-r", "cohere", dict(SMALL, logit_scale=0.5)),
    "cohere2": ("cohere2", "cohere2", dict(SMALL, **EVERY_FOURTH, logit_scale=0.5)),
    "gpt2": ("gpt2", "gpt2", dict(CONFIGS["gpt2"], vocab_size=len(TOKENIZER), n_layer=2)),
    "gptneox": ("gptneox", "gpt_neox", dict(PLAIN, use_parallel_residual=True)),
    "gptneox, in a row": ("gptneox", "gpt_neox", dict(PLAIN, use_parallel_residual=False)),
    "starcoder2": ("starcoder2", "starcoder2", SMALL),
    "stablelm": ("stablelm", "stablelm", SMALL),
    "stablelm, parallel": ("stablelm", "stablelm", dict(SMALL, use_parallel_residual=True, use_qkv_bias=True)),
    "gpt-oss": ("gpt-oss", "gpt_oss", dict(
        HEADED, **EXPERTS, sliding_window=3, rope_parameters={"rope_type": "default", "rope_theta": 1e4})),
    "exaone4": ("exaone4", "exaone4", dict(
        SMALL, sliding_window=None, layer_types=[FULL] * 2, rope_parameters=LLAMA3)),
    "exaone4, 64 layers": ("exaone4", "exaone4", dict(
        SMALL, num_hidden_layers=64, sliding_window=3, layer_types=([SLIDING] * 3 + [FULL]) * 16)),
    "seed_oss": ("seed_oss", "seed_oss", HEADED),
    "arcee": ("arcee", "arcee", SMALL),
    "glm4": ("glm4", "glm4", HEADED),
    "ernie4_5": ("ernie4_5", "ernie4_5", HEADED),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan_v1_dense", HEADED),
}  # fmt: skip


def built(kind: str, config: dict[str, Any]) -> PreTrainedModel:
    """Build a random model whose logits show every part of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
            elif not name.endswith(("A_log", "dt_bias")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def opened(path: Path) -> PreTrainedModel:
    file = read_file(path)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(read_config(file))
    read_weights(file, model, torch.float32)
    return model.eval()


def logprobs(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1).numpy()


def ids_of(length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@pytest.mark.parametrize("case", CASES)
def test_read_as_written(tmp_path: Path, case: str) -> None:
    arch, kind, config = CASES[case]
    model = built(kind, config)
    again = opened(write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch))
    assert type(again) is type(model)
    np.testing.assert_allclose(logprobs(again, ids_of(40)), logprobs(model, ids_of(40)), atol=2e-5)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    arch, kind, config = CASES["qwen3moe"]
    model = built(kind, config)
    weights = {name: tensor for name, tensor in tensors(model, arch).items() if "gate_exps" not in name}
    for layer in range(2):
        joined = model.model.layers[layer].mlp.experts.gate_up_proj
        del weights[f"blk.{layer}.ffn_up_exps.weight"]
        weights[f"blk.{layer}.ffn_gate_up_exps.weight"] = joined
    again = opened(write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch, weights))
    np.testing.assert_allclose(logprobs(again, ids_of(9)), logprobs(model, ids_of(9)), atol=2e-5)


def test_a_weight_without_a_place(tmp_path: Path) -> None:
    arch, kind, config = CASES["qwen3"]
    model = built(kind, config)
    bias = {"blk.1.attn_q.bias": torch.ones(64)}
    path = write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch, {**tensors(model, arch), **bias})
    with pytest.raises(ModelError, match=r"blk.1.attn_q.bias, which gerund does not know .* architecture qwen3"):
        opened(path)


@pytest.mark.sweep(quick=0, check=5)
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(tmp_path: Path, case: str) -> None:
    arch, kind, config = CASES[case]
    model = built(kind, config)
    server = serve(write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch), 64)
    # Its tables of GELU are in half precision.
    near = 5e-3 if arch in ("gemma", "gemma2", "gemma3", "gpt2", "gptneox", "phi2", "starcoder2") else 1e-4
    for length in (1, 3, 30):
        ids = ids_of(length)
        found = llama_cpp_logprobs(server, ids, len(TOKENIZER))
        np.testing.assert_allclose(found, logprobs(model, ids)[-1], atol=near)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
def test_long_texts_of_phi3(tmp_path: Path) -> None:
    _, kind, config = CASES["phi3, longrope"]
    rope = {**LONG, "original_max_position_embeddings": 32}
    model = built(kind, dict(config, rope_parameters=rope, original_max_position_embeddings=32))
    server = serve(write_gguf(model, TOKENIZER, tmp_path / "model.gguf", "phi3"), 64)
    found = llama_cpp_logprobs(server, ids_of(40), len(TOKENIZER))
    np.testing.assert_allclose(found, logprobs(model, ids_of(40))[-1], atol=1e-4)


def test_every_architecture_is_tested_and_documented() -> None:
    assert {arch for arch, _, _ in CASES.values()} == set(LAYOUTS)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "get-a-model.md").read_text(encoding="utf-8")
    for layout in LAYOUTS.values():
        assert f"| `{layout.name}` | {layout.models} |\n" in page
