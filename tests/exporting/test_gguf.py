"""What llama.cpp makes of an exported model is what gerund makes of it."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

import gerund
from gerund.errors import ConfigError, ModelError
from gerund.exporting import llama_cpp
from gerund.exporting.gguf import BYTE, CONTROL, FILE_TYPES, UNKNOWN, UNUSED, packed, token_table, type_of
from gerund.settings.encoder import GgufType
from tests.cli.helpers import run_cli
from tests.tiny import byte_tokenizer, save_tiny, tiny

FIND_SPEC = importlib.util.find_spec
STORIES = Path(__file__).resolve().parents[3] / "shared" / "models" / "stories260k"
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
pytestmark = pytest.mark.skipif(
    any(FIND_SPEC(name) is None for name in ("gguf", "xllamacpp")), reason="gguf or xllamacpp is not installed"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10.0, "original_max_position_embeddings": 16}}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("gemma3_text", {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]}),
    ],
)
def test_architectures(tmp_path: Path, kind: str, changes: dict) -> None:
    lm = gerund.load(save_tiny(tmp_path / "base", kind, **changes), dtype="float32")
    done = lm.export(tmp_path / "out", "gguf")
    assert done.load == f"llama-cli -m {tmp_path / 'out' / 'model.gguf'}"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.gguf", "README.md"}
    # The check is one: of a model with other weights it finds something else.
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[5:].mul_(-1)
    with pytest.raises(ModelError, match="finds other continuations probable"):
        llama_cpp.check(lm.model, lm.tokenizer, tmp_path / "out" / "model.gguf")


@pytest.mark.slow
def test_half_precision_keeps_its_type(tmp_path: Path) -> None:
    from gguf import GGUFReader

    lm = gerund.load(save_tiny(tmp_path / "base"), dtype="bfloat16")
    lm.export(tmp_path / "out", "gguf")
    found = {one.name: one for one in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    kinds = {name: one.tensor_type.name for name, one in found.items()}
    assert {kinds["token_embd.weight"], kinds["blk.1.ffn_down.weight"]} == {"BF16"}
    assert kinds["output_norm.weight"] == "F32"
    stored = torch.from_numpy(np.array(found["blk.1.ffn_down.weight"].data)).view(torch.bfloat16)
    assert torch.equal(stored, lm.model.model.layers[1].mlp.down_proj.weight)


@pytest.mark.slow
def test_a_checkpoint_in_half_precision_whose_logits_are_large(tmp_path: Path) -> None:
    """Rounding in bfloat16 moves such logits by more than the file does, which llama.cpp reads with float32 states."""
    from gguf import GGUFReader

    model, tokenizer = tiny("llama", vocab_size=266), byte_tokenizer()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    kinds = {"auto": "BF16", "float16": "F16", "float32": "F32"}
    for dtype, kind in kinds.items():
        ran = run_cli("export", tmp_path / "base", tmp_path / dtype, "--format", "gguf", "--dtype", dtype)
        assert (ran.code, ran.err) == (0, "")
        assert GGUFReader(tmp_path / dtype / "model.gguf").tensors[1].tensor_type.name == kind
    lm = gerund.load(tmp_path / "base", attention="causal", dtype="bfloat16")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        rounded = lm.model(ids).logits.float()
        exact = llama_cpp._with_float32_states(lm.model)(ids).logits
        widened = gerund.load(tmp_path / "base", attention="causal", dtype="float32").model(ids).logits
    assert exact.dtype == torch.float32
    torch.testing.assert_close(exact, widened, atol=1e-4, rtol=1e-5)
    assert float((rounded - exact).abs().max()) > llama_cpp._NEAR_HALF
    assert {one.dtype for one in lm.model.parameters()} == {torch.bfloat16}
    refused = run_cli("export", tmp_path / "base", tmp_path / "out", "--format", "gguf", "--dtype", "int8").mistake
    assert "--format gguf --type q8_0" in refused


@pytest.mark.parametrize(
    ("type", "attention", "early_down", "late_down", "narrow"),
    [
        ("f16", "F16", "F16", "F16", "F16"),
        ("q8_0", "Q8_0", "Q8_0", "Q8_0", "Q8_0"),
        ("q4_0", "Q4_0", "Q4_0", "Q4_0", "Q4_0"),
        ("q4_k_m", "Q4_K", "Q6_K", "Q4_K", "Q5_0"),
        ("q5_k_m", "Q5_K", "Q6_K", "Q5_K", "Q5_1"),
        ("q6_k", "Q6_K", "Q6_K", "Q6_K", "Q8_0"),
    ],
)
def test_mixtures(type: GgufType, attention: str, early_down: str, late_down: str, narrow: str) -> None:
    """Which tensor gets which type, as llama-quantize has it."""

    def of(name: str, *shape: int, tied: bool = True) -> str:
        return type_of(name, shape, FILE_TYPES[type], tied=tied, n_layers=16)

    assert of("blk.3.attn_q.weight", 256, 512) == attention
    assert of("blk.1.ffn_down.weight", 256, 512) == early_down
    assert of("blk.2.ffn_down.weight", 256, 512) == late_down
    assert of("blk.2.attn_q.weight", 576, 576) == narrow
    assert of("blk.2.attn_norm.weight", 256) == of("blk.2.attn_q.bias", 256) == "F32"
    output = {"f16": "F16", "q8_0": "Q8_0"}.get(type, "Q6_K")
    assert of("token_embd.weight", 300, 512) == of("output.weight", 300, 512, tied=False) == output
    assert of("token_embd.weight", 300, 512, tied=False) == attention
    # A row that no block fits.
    assert of("blk.2.attn_q.weight", 48, 48) == "F16"


def test_rows_that_llama_cpp_packs() -> None:
    import gguf

    values = torch.randn(1500, 512, generator=torch.Generator().manual_seed(0))
    for name, error in {"Q6_K": 0.02, "Q5_K": 0.04, "Q4_K": 0.08}.items():
        blocks = packed(values, name, "weights")
        again = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]))
        assert 0 < float((again - values).norm() / values.norm()) < error
    with pytest.raises(ConfigError, match="float16 cannot hold the values of weights"):
        packed(values * 1e6, "F16", "weights")


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("type", ["q8_0", "q4_k_m"])
def test_quantized(tmp_path: Path, type: str) -> None:
    from gguf import GGUFReader

    lm = gerund.load(save_tiny(tmp_path / "base", hidden_size=64, intermediate_size=256), dtype="float32")
    ran = run_cli("export", tmp_path / "base", tmp_path / "out", "--format", "gguf", "--type", type)
    assert ran.err == ""
    assert f"gguf, {type}, 0." in ran.out
    assert "nats per token" in (tmp_path / "out" / "README.md").read_text()
    kinds = {one.name: one.tensor_type.name for one in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == {"q8_0": "Q8_0", "q4_k_m": "Q4_K"}[type]
    again = gerund.load(tmp_path / "out", attention="causal", dtype="float32")
    cosines = (again.encode(["a dog", "an owl"]) * lm.with_encoder(again.encoder).encode(["a dog", "an owl"])).sum(-1)
    assert (cosines > 0.9).all()


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize(("attention", "pooling"), [("causal", "last"), ("bidir", "mean")])
def test_an_encoder(tmp_path: Path, attention: str, pooling: str) -> None:
    settings = {"attention": attention, "pooling": pooling, "append_eos": True, "prompts": {"query": "Find: "}}
    lm = gerund.load(save_tiny(tmp_path / "base"), dtype="float32", pool_prompt=True, **settings)
    done = lm.export(tmp_path / "out", "gguf-embedding")
    assert done.load.startswith("llama-server --embedding -m ")
    assert "smallest cosine of llama.cpp's vectors to the original's 1.0000" in done.about
    readme = (tmp_path / "out" / "README.md").read_text()
    assert readme.startswith("---\npipeline_tag: feature-extraction\n")
    assert '- query: `"Find: "`' in readme
    again = gerund.load(tmp_path / "out", dtype="float32")
    assert (again.encoder.attention.name, again.encoder.pooling) == (attention, pooling)
    assert abs(again.encode(["a dog", "an owl"]) - lm.encode(["a dog", "an owl"])).max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "type", "says"),
    [
        ({"attention": "mask0-bidir"}, None, "has no attention plan 'mask0-bidir'; causal and bidir are"),
        ({"attention": "causal", "pooling": "weighted-mean"}, None, "has no pooling 'weighted-mean'; it has mean"),
        ({"attention": "causal", "prompt": "Q: "}, None, r"pools the prompt's tokens as well.*pool_prompt=True"),
        ({"attention": "causal", "layers": "all"}, None, "takes no layers"),
        ({"attention": "causal"}, "q3", "unknown type 'q3'; valid are: f32"),
    ],
)
def test_encoders_that_llama_cpp_does_not_have(tiny_folder: Path, tmp_path: Path, settings, type, says: str) -> None:
    lm = gerund.load(tiny_folder, **settings)
    with pytest.raises(ConfigError, match=says):
        lm.export(tmp_path / "out", "gguf-embedding", type=type)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="the type of weights is for GGUF, not for merged"):
        lm.export(tmp_path / "out", "merged", type="q8_0")


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.is_dir(), reason="the model is not there")
def test_merges_of_characters(tmp_path: Path) -> None:
    lm = gerund.load(STORIES, attention="causal")
    lm.export(tmp_path / "out", "gguf")
    asked = llama_cpp._ask(llama_cpp.serve(tmp_path / "out" / "model.gguf", 512), "Once upon a time", 40)
    assert asked["choices"][0]["text"] == lm.generate("Once upon a time", 40)[0].text
    table = token_table(lm.tokenizer, 514)
    assert (table.model, table.space_before, table.types[:4], table.types[-1]) == (
        "llama", True, [UNKNOWN, CONTROL, CONTROL, BYTE], UNUSED,
    )  # fmt: skip


@pytest.mark.slow
def test_the_bundled_model(tmp_path: Path) -> None:
    """It tokenizes as Qwen does; and what it encodes by is no matter."""
    ran = run_cli("export", "default", tmp_path / "out", "--format", "gguf", "--attention", "echo", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert json.loads(ran.out)["load"] == f"llama-cli -m {tmp_path / 'out' / 'model.gguf'}"


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("gpt2", {}, "a gpt2 model is not written as GGUF; llama, mistral, qwen2, qwen3, gemma3_text are"),
        ("mistral", {}, "does not know the sliding window of 3 tokens"),
        ("gemma3_text", {}, "computes a Gemma 3 with other layer_types than this model"),
        ("llama", {"hidden_act": "gelu"}, "computes a llama model with silu, not gelu"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "scaled by 'linear'"),
    ],
)
def test_refusals(tmp_path: Path, kind: str, changes: dict, says: str) -> None:
    lm = gerund.load(save_tiny(tmp_path / "base", kind, **changes), attention="causal")
    with pytest.raises(ConfigError, match=says):
        lm.export(tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_tokenizers_that_llama_cpp_has_no_name_for() -> None:
    tokenizer = byte_tokenizer()
    assert token_table(tokenizer, len(tokenizer)).pre_tokenizer == "gpt-2"
    core = tokenizer.backend_tokenizer
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    core.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    assert token_table(tokenizer, len(tokenizer)).pre_tokenizer == "smollm"
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), bytes_])
    with pytest.raises(ConfigError, match=r"how this tokenizer cuts a text \(Split, ByteLevel\) has no name"):
        token_table(tokenizer, len(tokenizer))


def test_a_file_that_is_none(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    lm = gerund.load(tiny_folder)
    with pytest.raises(ModelError, match=r"llama\.cpp refuses the file"):
        llama_cpp.check(lm.model, lm.tokenizer, tmp_path / "model.gguf")
