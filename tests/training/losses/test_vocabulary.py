"""Chunked cross-entropy equals one position at a time on whole logits, in value and in every gradient."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gerund.errors import ModelError
from gerund.training.losses import vocabulary
from gerund.training.losses.vocabulary import head_of, token_loss, trained_leaves
from tests.adapters import PEFT_WARNINGS
from tests.inference.test_likelihood import SCALED
from tests.tiny import CONFIGS, REFUSED, VOCAB, tiny

TIED = [(name, {"tie_word_embeddings": tied}) for name in ("llama", "gpt2") for tied in (True, False)]
N, D, V = 11, 6, 13


def slow(logits_NV, targets_N):
    total = torch.zeros((), dtype=torch.float64)
    for logits_V, target in zip(logits_NV.double(), targets_N.tolist(), strict=True):
        total = total + (logits_V.exp().sum().log() - logits_V[target])
    return total


def gradients(loss, module):
    module.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def assert_same(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


def linear_case(seed=0, dtype=torch.float64, n=N):
    torch.manual_seed(seed)
    head = nn.Linear(D, V).to(dtype)
    states = torch.randn(n, D, dtype=dtype, requires_grad=True)
    return head, states, torch.randint(0, V, (n,))


def assert_a_model_learns_the_same(model, base, chunk=4):
    ids = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(2))
    targets = ids[0, 1:]
    plain = slow(model(ids).logits[0, :-1], targets)
    expected = gradients(plain, model)
    head, parameters = head_of(model)
    states = base.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
    loss = token_loss(head, states, targets, parameters=parameters, chunk=chunk)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert_same(gradients(loss, model), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name, changes", [*[(name, {}) for name in [*CONFIGS, *REFUSED]], *SCALED, *TIED])
def test_every_architecture_learns_as_from_its_whole_logits(name, changes):
    model = tiny(name, **changes).double()
    if name in ("qwen2_moe", "gpt_oss"):
        model.set_experts_implementation("eager")  # the grouped product knows no float64
    assert_a_model_learns_the_same(model, model)


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_an_adapter_learns_as_from_whole_logits(targets, wrapped):
    base = tiny("llama")
    config = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(base, config) if wrapped else inject_adapter_in_model(config, base)
    model = model.double().eval()
    _, parameters = head_of(model)
    assert len(parameters) == (2 if "lm_head" in targets else 0)
    assert_a_model_learns_the_same(model, base)


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 4, 10, 11, 12, 99])
@pytest.mark.parametrize("frozen", ["nothing", "head", "weight", "states"])
def test_chunks_of_any_size(chunk, frozen):
    head, states, targets = linear_case()
    head.requires_grad_(frozen != "head")
    head.weight.requires_grad_(frozen not in ("head", "weight"))
    states.requires_grad_(frozen != "states")
    expected = gradients(slow(head(states), targets) * 3, head)
    states_expected, states.grad = states.grad, None
    loss = token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=chunk)
    assert loss.item() == pytest.approx(slow(head(states), targets).item(), rel=1e-12)
    assert_same(gradients(loss * 3, head), expected, rtol=1e-12, atol=1e-12)
    if frozen == "states":
        assert states.grad is None
    else:
        torch.testing.assert_close(states.grad, states_expected, rtol=1e-12, atol=1e-12)


def test_a_second_backward_pass_adds_the_same_again():
    head, states, targets = linear_case()
    loss = token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=4)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone(), states.grad.clone()
    loss.backward()
    torch.testing.assert_close(head.weight.grad, 2 * once[0])
    torch.testing.assert_close(states.grad, 2 * once[1])


@pytest.mark.parametrize("chunk", [4, 99])
def test_without_gradients_there_is_the_value_alone(chunk):
    head, states, targets = linear_case()
    expected = slow(head(states), targets).item()
    with torch.no_grad():
        loss = token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=chunk)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    frozen = token_loss(head.requires_grad_(False), states.detach(), targets, chunk=chunk)
    assert not frozen.requires_grad
    assert frozen.item() == pytest.approx(expected, rel=1e-12)


def test_no_positions_are_a_zero_that_reaches_everything():
    head, states, targets = linear_case(n=0, dtype=torch.float32)
    loss = token_loss(head, states, targets, parameters=tuple(head.parameters()))
    assert (loss.item(), loss.dtype) == (0.0, torch.float32)
    loss.backward()
    assert states.grad.shape == (0, D)
    assert torch.equal(head.weight.grad, torch.zeros(V, D))
    assert torch.equal(head.bias.grad, torch.zeros(V))
    with torch.no_grad():
        assert token_loss(head, states, targets).item() == 0.0


def as_if_exact(head, states, targets):
    """Gradients in float64 of a head whose weights are those numbers."""
    exact, exact_states = copy.deepcopy(head).double(), states.detach().double().requires_grad_()
    found = gradients(slow(exact(exact_states), targets), exact)
    return found, exact_states.grad


@pytest.mark.parametrize("chunk", [4, 99])
def test_the_loss_of_bfloat16_logits_is_exact(chunk):
    head, states, targets = linear_case(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(states)
        loss = token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=chunk)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(slow(logits.detach(), targets).item(), rel=1e-6)
    found = gradients(loss, head)
    expected, states_expected = as_if_exact(head, states, targets)
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), expected[name], rtol=0.02, atol=0.02)
    torch.testing.assert_close(states.grad.double(), states_expected, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_gradients_of_bfloat16_weights_are_summed_up_in_float32():
    head, states, targets = linear_case(dtype=torch.bfloat16, n=1500)
    expected, _ = as_if_exact(head, states, targets)
    found = gradients(token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=1), head)
    for name, gradient in found.items():
        assert gradient.dtype == torch.bfloat16
        # Summed up in bfloat16 the error is ten times as large.
        assert (gradient.double() - expected[name]).norm() < 0.01 * expected[name].norm()


def test_autocast_does_not_take_a_look_at_the_head_for_the_real_thing():
    # What is cast under no_grad while autocast is on stays cut off from the weights: neither the proof of the head
    # nor the look at the size of the vocabulary may leave such weights behind.
    model = tiny("llama")
    ids = torch.randint(3, VOCAB, (1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        head, parameters = head_of(model)
        states = model.base_model(ids).last_hidden_state[0]
        loss = token_loss(head, states, ids[0], parameters=parameters)
    assert gradients(loss, model).keys() == {name for name, _ in model.named_parameters()}


def test_a_model_in_training_is_proved_without_its_dropout_and_left_in_training():
    model = tiny("gpt2").train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    head, parameters = head_of(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert parameters[0] is model.get_input_embeddings().weight
    assert head(torch.randn(3, 32)).shape == (3, VOCAB)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return out


@pytest.mark.parametrize("trains", [True, False])
def test_the_logits_of_all_positions_never_exist(monkeypatch, trains):
    monkeypatch.setattr(vocabulary, "_SMALLEST_CHUNK", 1)
    monkeypatch.setattr(vocabulary, "_LOGITS_AT_ONCE", {"cpu": 5 * V + 3})
    head, states, targets = linear_case(n=60)
    with Largest() as seen, torch.set_grad_enabled(trains):
        loss = token_loss(head, states, targets, parameters=tuple(head.parameters()))
        if trains:
            loss.backward()
    # The states' gradients and the weights are the largest; the logits of a chunk are 5 V.
    assert seen.numbers == (60 * D if trains else D * V)
    # What fits goes in one piece, and so do as many rows as a matrix product wants.
    monkeypatch.setattr(vocabulary, "_SMALLEST_CHUNK", 60)
    with Largest() as seen:
        token_loss(head, states, targets, parameters=tuple(head.parameters()))
    assert seen.numbers == 60 * V


def test_forgotten_and_needless_parameters_are_told():
    head, states, targets = linear_case()
    with pytest.raises(ModelError, match="trained parameters that the loss was not told of"):
        token_loss(head, states, targets, parameters=[head.weight], chunk=4)
    other = nn.Parameter(torch.zeros(2))
    with pytest.raises(ModelError, match="no part in the logits"):
        token_loss(head, states, targets, parameters=[*head.parameters(), other], chunk=4)


@pytest.mark.parametrize("chunk", [4, 99])
@pytest.mark.parametrize("target", [-100, V])
def test_ids_outside_the_vocabulary_are_errors(chunk, target):
    head, states, targets = linear_case()
    targets[5] = target
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        token_loss(head, states, targets, parameters=tuple(head.parameters()), chunk=chunk)


def test_the_leaves_are_those_that_backward_reaches():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Linear(2, 2))
    net[2].bias.requires_grad_(False)
    unused = nn.Parameter(torch.zeros(2))
    start = torch.randn(5, 3, requires_grad=True)
    middle = net[0](start)
    result = (net[2](middle.relu()) + middle[:, :2].detach() * unused.detach()).sum()
    leaves = trained_leaves(result)
    result.backward()
    reached = [leaf for leaf in (start, unused, *net.parameters()) if leaf.grad is not None]
    assert {id(leaf) for leaf in leaves} == {id(leaf) for leaf in reached}
    assert len(leaves) == 4


def test_no_graph_no_leaves():
    assert trained_leaves(torch.ones(2)) == []


def test_a_deep_graph_is_no_matter():
    start = torch.ones((), requires_grad=True)
    result = start
    for _ in range(3000):
        result = result + 1
    assert trained_leaves(result) == [start]
