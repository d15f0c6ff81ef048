"""Adapters of mixtures of experts, whose experts lie in tensors of their own: inactive, active, merged and saved."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import gerund
from gerund.models.adapters import active_adapter, base_state, load_adapters, merged_state
from tests.tiny import batch, save_tiny, tiny

# PEFT's, about settings for experts that it has made up itself, and about an old name of transformers'.
pytestmark = pytest.mark.filterwarnings("ignore:The following:RuntimeWarning", "ignore:.*checkpointing:FutureWarning")


@pytest.fixture(params=["qwen2_moe", "deepseek_v3"])
def adapted(request, tmp_path):
    torch.manual_seed(0)
    wrapped = get_peft_model(tiny(request.param, vocab_size=266), LoraConfig(r=2, target_modules="all-linear"))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.1)
    wrapped.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    return request.param, tmp_path / "adapter"


@torch.no_grad()
def test_merging_gives_what_the_active_adapter_gives(adapted):
    name, folder = adapted
    inputs = batch("none")
    plain = tiny(name, vocab_size=266)
    model = tiny(name, vocab_size=266)
    load_adapters(model, {"encode": folder})
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    own = base_state(model)
    assert own.keys() == plain.state_dict().keys()
    assert all(torch.equal(own[key], value) for key, value in plain.state_dict().items())
    with active_adapter("encode"):
        active = model(**inputs).logits
    assert (active - plain(**inputs).logits).abs().max() > 1e-3
    merged = tiny(name, vocab_size=266)
    merged.load_state_dict(merged_state(model, "encode"))
    torch.testing.assert_close(merged(**inputs).logits, active, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_saved_folder_reads_again(adapted, tmp_path):
    name, folder = adapted
    base = save_tiny(tmp_path / "base", name)
    lm = gerund.load(base, attention="bidir", adapter=str(folder), dtype="float32")
    lm.save(tmp_path / "saved")
    again = gerund.load(tmp_path / "saved", dtype="float32")
    assert abs(again.encode(["an owl"]) - lm.encode(["an owl"])).max() < 1e-6
