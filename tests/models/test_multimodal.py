"""Language models with towers around them: the text half is read, the towers neither run nor get lost."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import gerund
from gerund.attention.layouts import decoder_layers
from gerund.settings.plan import AttentionPlan
from tests.architectures.slow import SlowModel
from tests.tiny import N_LAYERS, _spread, byte_tokenizer

VOCAB = len(byte_tokenizer()) + 2  # a tokenizer that is read again may bring tokens of its kind
_TEXT = dict(vocab_size=VOCAB, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             num_hidden_layers=N_LAYERS, intermediate_size=48, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)  # fmt: skip
# As many layers as the text half has, so that nothing is told by their number.
_TOWER = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=N_LAYERS, num_attention_heads=2, image_size=16,
              patch_size=8)  # fmt: skip
_QWEN = dict(depth=N_LAYERS, embed_dim=32, hidden_size=32, num_heads=2, patch_size=8, intermediate_size=32,
             out_hidden_size=32, fullatt_block_indexes=[0], deepstack_visual_indexes=[0],
             num_position_embeddings=16)  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_LINEAR = dict(layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2,
               linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
_IDS = dict(image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)

KINDS = {
    "llava": dict(text_config=dict(_TEXT, model_type="llama"), image_token_index=3,
                  vision_config=dict(_TOWER, model_type="clip_vision_model", projection_dim=32)),
    "mistral3": dict(text_config=dict(_TEXT, model_type="mistral", sliding_window=None), image_token_index=3,
                     vision_config=dict(_TOWER, model_type="pixtral", head_dim=16)),
    "gemma3": dict(text_config=dict(_TEXT, sliding_window=3, layer_types=["sliding_attention", "full_attention"] * 2),
                   vision_config=_TOWER, mm_tokens_per_image=4, image_token_index=3),
    "qwen2_5_vl": dict(text_config=dict(_TEXT, rope_parameters=_MROPE), vision_config=_QWEN, **_IDS),
    "qwen3_vl": dict(text_config=dict(_TEXT, rope_parameters=_MROPE), vision_config=_QWEN, **_IDS),
    "qwen3_5": dict(text_config=dict(_TEXT, **_LINEAR), vision_config=_QWEN, **_IDS),
}  # fmt: skip
TEXTS = ["a dog in the garden", "an owl", "the end"]


def build(kind, **settings):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(kind, **KINDS[kind]), **settings)
    _spread(model)
    return model.eval()


@pytest.fixture(params=KINDS)
def saved(request, tmp_path):
    model = build(request.param)
    model.save_pretrained(tmp_path / "base")
    byte_tokenizer().save_pretrained(tmp_path / "base")
    return request.param, tmp_path / "base"


def towers(model):
    return [part for name, part in model.named_modules() if name.split(".")[-1] in ("vision_tower", "visual")]


@pytest.mark.sweep(quick=1, check=3)
def test_the_text_half_is_exact_and_the_towers_stand_still(saved, tmp_path):
    kind, folder = saved
    plan = AttentionPlan("mask0-bidir", k=3)
    lm = gerund.load(folder, attention=plan, dtype="float32")
    assert towers(lm.model)
    for tower in towers(lm.model):
        tower.register_forward_pre_hook(lambda *_: pytest.fail("a tower has run"))
        assert not set(decoder_layers(lm.model)) & set(tower.modules())
    slow = SlowModel(build(kind, attn_implementation="eager"))
    for side in ("left", "right"):
        lm.tokenizer.padding_side = side
        for states, text in zip(lm.encode_tokens(TEXTS), TEXTS, strict=True):
            with torch.no_grad():
                expected = slow.states(lm.tokenizer(text).input_ids, plan)
            assert float((torch.from_numpy(states) - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    plain = build(kind).generate(torch.tensor([lm.tokenizer(TEXTS[0]).input_ids]), max_new_tokens=4, do_sample=False)
    written = lm.model.generate(torch.tensor([lm.tokenizer(TEXTS[0]).input_ids]), max_new_tokens=4, do_sample=False)
    assert torch.equal(plain, written)
    assert len(lm.generate(TEXTS, 4)) == 3


@pytest.mark.sweep(quick=0, check=3)
def test_the_towers_are_not_lost_on_saving(saved, tmp_path):
    _, folder = saved
    lm = gerund.load(folder, attention="mask0-bidir", k=3, dtype="float32")
    lm.save(tmp_path / "saved")
    before = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    after = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved").state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = gerund.load(tmp_path / "saved", dtype="float32")
    assert again.encoder.attention == AttentionPlan("mask0-bidir", k=3)
    assert abs(again.encode(TEXTS) - lm.encode(TEXTS)).max() < 1e-6
