"""What a GPU computes is what the CPU computes: vectors, texts, and a training step.

These tests skip themselves where there is no CUDA. ``pytest -m gpu tests/test_gpu.py`` runs them.
"""

import pytest
import torch

import gerund
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model
from tests.test_second_device import TEXTS, moved, recipe_of_a_step

DEVICE = "cuda"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_both(folder, function, **options):
    """Return what a function gives for a model on the CPU and on the GPU."""
    return [function(gerund.load(folder, device=device, dtype="float32", **options)) for device in ("cpu", DEVICE)]


@pytest.mark.parametrize("attention", ["causal", "mask0-bidir", "inter-bidir", "extra-back"])
def test_vectors(tiny_folder, attention):
    here, there = on_both(tiny_folder, lambda lm: torch.as_tensor(lm.encode(TEXTS)), attention=attention)
    torch.testing.assert_close(there, here, rtol=0, atol=1e-4)


def test_texts(tiny_folder):
    def written(lm):
        return [made.token_ids for made in lm.generate(TEXTS, max_new_tokens=8)]

    here, there = on_both(tiny_folder, written)
    assert there == here


def test_a_training_step(tiny_folder, tmp_path):
    read = recipe_of_a_step(tiny_folder, tmp_path)
    prepared = prepare_model(read)
    objectives = prepare_objectives(read, prepared, Sources(read, prepared.tokenizer))
    module = TrainingModule(prepared.model, {objective.name: objective.losses for objective in objectives}).train()
    item = StepData(objectives, steps=2)[0]
    here = step(module, objectives, item)
    there = step(module.to(DEVICE), objectives, moved(item, DEVICE))
    assert there.keys() == here.keys()
    for name, value in here.items():
        near = 1e-3 * max(0.1, float(value.abs().max()))
        torch.testing.assert_close(there[name], value, rtol=1e-3, atol=near)


def step(module, objectives, item):
    """Return the losses and gradients of a step, on the CPU."""
    module.zero_grad()
    losses = run_step(module, objectives, item).losses
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: value.detach().cpu().clone() for name, value in {**losses, **gradients}.items()}
