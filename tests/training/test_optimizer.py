"""The joint optimizer is torch's Muon and AdamW, number for number; schedules have the shape they promise."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gerund.training.recipe import OptimizerConfig, ScheduleConfig
from gerund.training.step import MuonWithAdamW, build_optimizer, learning_rate_factor, split_parameters


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.hidden = nn.Linear(4, 6)
        self.out = nn.Linear(6, 4, bias=False)


def parts(model):
    return [model.hidden.weight, model.out.weight], [model.embed.weight, model.hidden.bias]


def set_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_equals_torch_muon_and_adamw_apart():
    torch.manual_seed(0)
    ours = Small()
    theirs = copy.deepcopy(ours)
    joint = MuonWithAdamW(*parts(ours), lr=0.02, weight_decay=0.1, betas=(0.8, 0.9))
    matrices, others = parts(theirs)
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=0.02, weight_decay=0.0, betas=(0.8, 0.9))
    for step in range(4):
        for model in (ours, theirs):
            set_gradients(model, step)
        for optimizer in (joint, muon, adamw):
            optimizer.step()
        for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, reference)


def test_state_round_trip_goes_on_bit_equal(tmp_path):
    torch.manual_seed(0)
    one = Small()
    first = MuonWithAdamW(*parts(one), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1 / (step + 1))
    for step in range(3):
        set_gradients(one, step)
        first.step()
        schedule.step()
    torch.save(first.state_dict(), tmp_path / "state.pt")

    other = copy.deepcopy(one)
    second = MuonWithAdamW(*parts(other), lr=0.5, weight_decay=0.0)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert [group["lr"] for group in second.param_groups] == [group["lr"] for group in first.param_groups]
    for model, optimizer in ((one, first), (other, second)):
        set_gradients(model, 9)
        optimizer.step()
    for mine, reference in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, reference)


def test_a_scheduler_reaches_both_parts_also_after_loading():
    model = Small()
    joint = MuonWithAdamW(*parts(model), lr=1.0, weight_decay=0.1)
    joint.load_state_dict(joint.state_dict())
    schedule = torch.optim.lr_scheduler.LambdaLR(joint, lambda step: 0.5**step)
    set_gradients(model, 0)
    joint.step()
    schedule.step()
    assert joint.muon.param_groups[0]["lr"] == joint.adamw.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_head_and_norms_stay_with_adamw(tied):
    config = LlamaConfig(vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    config.tie_word_embeddings = tied
    model = LlamaForCausalLM(config)
    wrapper = nn.Module()
    wrapper.model = model
    matrices, others = split_parameters(wrapper)
    assert len(matrices) == 2 * 7
    assert all(parameter.ndim == 2 and 40 not in parameter.shape for parameter in matrices)
    assert len(others) == (1 if tied else 2) + 2 * 2 + 1
    model.model.layers[0].requires_grad_(False)
    assert len(split_parameters(wrapper)[0]) == 7


def test_adamw_decays_matrices_only():
    model = Small()
    optimizer = build_optimizer(model, OptimizerConfig(name="adamw", weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert isinstance(build_optimizer(model, OptimizerConfig(name="muon")), MuonWithAdamW)


class TestSchedules:
    def test_wsd(self):
        factor = learning_rate_factor(ScheduleConfig(name="wsd", warmup_steps=4, decay_steps=10), 50)
        values = [factor(step) for step in range(51)]
        assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
        assert set(values[4:41]) == {1.0}
        assert all(a > b for a, b in pairwise(values[40:]))
        assert values[50] == 0

    def test_the_stable_phase_does_not_depend_on_the_end(self):
        config = ScheduleConfig(name="wsd", warmup_steps=4, decay_steps=10)
        short, long = learning_rate_factor(config, 30), learning_rate_factor(config, 90)
        assert [short(step) for step in range(21)] == [long(step) for step in range(21)]

    def test_cosine_and_constant(self):
        factor = learning_rate_factor(ScheduleConfig(name="cosine", warmup_steps=2, floor=0.1), 12)
        assert factor(2) == pytest.approx(1.0)
        assert factor(7) == pytest.approx(0.55)
        assert factor(12) == pytest.approx(0.1)
        assert learning_rate_factor(ScheduleConfig(), 12)(11) == 1.0


def test_adafactor_is_that_of_torch_with_a_rate_for_the_heads():
    torch.manual_seed(0)
    module = nn.Module()
    module.model, module.losses = Small(), nn.Linear(4, 3)
    other = copy.deepcopy(module)
    config = OptimizerConfig(name="adafactor", learning_rate=0.05, head_learning_rate=0.2, weight_decay=0.01)
    ours = build_optimizer(module, config)
    theirs = [
        torch.optim.Adafactor(parameters, lr=rate, weight_decay=decay)
        for parameters, rate, decay in (
            ([other.model.hidden.weight, other.model.out.weight], 0.05, 0.01),
            ([other.model.embed.weight, other.model.hidden.bias], 0.05, 0.0),
            ([other.losses.weight], 0.2, 0.01),
            ([other.losses.bias], 0.2, 0.0),
        )
    ]
    for step in range(3):
        set_gradients(module, step)
        set_gradients(other, step)
        for optimizer in (ours, *theirs):
            optimizer.step()
    for mine, reference in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, reference)
    # A row and a column for a matrix, in the place of two numbers for each weight.
    held = ours.state[module.model.hidden.weight]
    assert sum(value.numel() for value in held.values() if value.ndim) < module.model.hidden.weight.numel()


def test_muon_of_an_adapter_has_matrices_alone():
    joint = MuonWithAdamW([nn.Parameter(torch.ones(3, 2))], [], lr=0.1, weight_decay=0.0)
    [weight] = joint.param_groups[0]["params"]
    weight.grad = torch.ones_like(weight)
    joint.step()
    assert float(weight.detach().max()) < 1.0
    again = MuonWithAdamW([nn.Parameter(torch.ones(3, 2))], [], lr=0.1, weight_decay=0.0)
    again.load_state_dict(joint.state_dict())
    assert again.state_dict()["adamw"] is None
