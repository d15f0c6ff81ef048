"""Attention in products against the fused kernel in float32, and where each of them is taken."""

import pytest
import torch
from torch.nn import functional

from gerund.attention import interface
from gerund.attention.bound_plan import BoundPlan
from gerund.settings.plan import AttentionPlan
from tests.tiny import N_LAYERS, tiny

# Twice the rounding of bfloat16, of which scores and their softmax have one each, and the result a third.
NEAR = 2**-6


def rounded(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16()


def padded(lengths, width, side):
    place_T = torch.arange(width)
    rows = [place_T < n if side == "right" else place_T >= width - n for n in lengths]
    return torch.stack(rows)


def kernel(query, key, value, seen=None, scale=None):
    """Return what SDPA computes in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (one.float().repeat_interleave(groups, dim=1) for one in (key, value))
    found = functional.scaled_dot_product_attention(query.float(), key, value, attn_mask=seen, scale=scale)
    return found.transpose(1, 2)


@pytest.fixture(params=[2**20, 300], ids=["together", "in parts"])
def cut(request, monkeypatch):
    monkeypatch.setattr(interface, "_TOGETHER", request.param)


@pytest.mark.usefixtures("cut")
class TestValues:
    @pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
    @pytest.mark.parametrize("scale", [None, 0.3])
    def test_without_padding(self, heads, key_heads, scale):
        query = rounded(3, heads, 17, 16, seed=0)
        key, value = (rounded(3, key_heads, 17, 16, seed=seed) for seed in (1, 2))
        found = interface.bidirectional_attention(query, key, value, scale=scale)
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.float(), kernel(query, key, value, scale=scale), atol=NEAR, rtol=NEAR)

    @pytest.mark.parametrize("alone", [1, 1000], ids=["alone", "with padding"])
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_is_never_seen(self, monkeypatch, alone, side):
        monkeypatch.setattr(interface, "_ALONE", alone)
        real_BT = padded([9, 4, 1], 9, side)
        query = rounded(3, 6, 9, 16, seed=0)
        key, value = (rounded(3, 2, 9, 16, seed=seed) for seed in (1, 2))
        found = interface.bidirectional_attention(query, key, value, real_BT=real_BT)
        wanted = kernel(query, key, value, real_BT[:, None, None])
        assert torch.allclose(found[real_BT].float(), wanted[real_BT], atol=NEAR, rtol=NEAR)
        assert found.isfinite().all()

    def test_tokens_with_padding_between_them(self, monkeypatch):
        monkeypatch.setattr(interface, "_ALONE", 1)
        real_BT = torch.tensor([[True, False, True, True], [False, True, True, False]])
        query, key, value = (rounded(2, 2, 4, 16, seed=seed) for seed in range(3))
        found = interface.bidirectional_attention(query, key, value, real_BT=real_BT)
        assert torch.allclose(found.float(), kernel(query, key, value, real_BT[:, None, None]), atol=NEAR, rtol=NEAR)

    @pytest.mark.parametrize("rows", [1, 3])
    def test_any_mask(self, rows):
        seen = torch.rand((rows, 1, 8, 8), generator=torch.Generator().manual_seed(3)) < 0.5
        seen |= torch.eye(8, dtype=torch.bool)
        query = rounded(3, 6, 8, 16, seed=0)
        key, value = (rounded(3, 2, 8, 16, seed=seed) for seed in (1, 2))
        added = torch.where(seen, 0.0, torch.finfo(torch.bfloat16).min).bfloat16()
        found = interface.bidirectional_attention(query, key, value, added=added)
        assert torch.allclose(found.float(), kernel(query, key, value, seen), atol=NEAR, rtol=NEAR)


@pytest.fixture
def calls(monkeypatch):
    """Count the layers that are computed by matmuls, as on a processor with bfloat16."""
    found, original = [], interface.bidirectional_attention

    def bidirectional_attention(*args, **kwargs):
        found.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr(interface, "bidirectional_attention", bidirectional_attention)
    return found


def states(model, plan, real_BT):
    ids_BT = torch.arange(3, 3 + real_BT.numel()).view(real_BT.shape)
    bound = BoundPlan(AttentionPlan(plan).resolve(model.config.num_hidden_layers), real_BT)
    with torch.inference_mode():
        return model.model(ids_BT, attention_mask=real_BT.long(), attention_plan=bound).last_hidden_state[real_BT]


class TestInAModel:
    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize(("plan", "layers"), [("bidir", N_LAYERS), ("mask0-bidir", 2), ("causal", 0)])
    def test_is_as_near_to_float32_as_the_kernel(self, calls, monkeypatch, plan, layers, side):
        model = tiny("llama")
        interface.attach(model)
        model = model.bfloat16().eval()
        real_BT = padded([12, 7], 12, side)
        found = states(model, plan, real_BT)
        assert len(calls) == layers
        monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: False)
        by_kernel = states(model, plan, real_BT)
        assert len(calls) == layers
        exact = states(model.float(), plan, real_BT)
        assert (found - exact).norm() < 2 * (by_kernel - exact).norm()

    def test_is_left_to_the_kernel_with_gradients_in_float32_and_in_long_texts(self, calls, monkeypatch):
        model = tiny("llama")
        interface.attach(model)
        real_BT = padded([12, 7], 12, "right")
        states(model, "bidir", real_BT)
        model = model.bfloat16()
        bound = BoundPlan(AttentionPlan("bidir").resolve(model.config.num_hidden_layers), real_BT)
        model.model(torch.ones_like(real_BT).long(), attention_mask=real_BT.long(), attention_plan=bound)
        monkeypatch.setattr(interface, "_LONGEST", 11)
        states(model, "bidir", real_BT)
        assert calls == []
