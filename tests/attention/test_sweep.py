"""Many plans in one pass give what each gives alone, and run fewer layers."""

import pytest
import torch

from gerund.errors import ConfigError
from gerund.inference.encode.sweep import Sweep
from gerund.settings.plan import PLAN_NAMES, AttentionPlan
from tests.attention.reference import assert_near, read
from tests.tiny import CONFIGS, N_LAYERS, SIDES, batch, ready

ENCODING = [name for name in PLAN_NAMES if name not in ("echo", "hybrid")]
PLANS = [
    AttentionPlan(name, k=k) if AttentionPlan(name).takes_k else AttentionPlan(name)
    for name in ENCODING
    for k in (range(N_LAYERS + 1) if AttentionPlan(name).takes_k and name != "mask0+bidir" else [None])
]
PLANS += [AttentionPlan("mask0+bidir", k=k, k0=k0) for k in range(N_LAYERS + 1) for k0 in range(k + 1)]
PLANS += [
    AttentionPlan("mask0-bidir", k=2, sink_tokens=2),
    AttentionPlan("inter-back", k=2, combine="mean"),
    AttentionPlan("extra-bidir", k=3, combine="mean"),
    *(AttentionPlan("inter-bidir", k=k, variant="released") for k in (1, 2, 4)),
    *(AttentionPlan("mask0-bidir", k=k, skips=skips) for k in (1, 2, 4) for skips in (1, 2, 3)),
    *(AttentionPlan("mask0-bidir", k=k, skips=2, variant="released") for k in (1, 3)),
    AttentionPlan("causal", skips=2),
    AttentionPlan("mask0+bidir", k=3, k0=1, skips=1),
]


def layers_of(name, ks):
    """Return how many layers a sweep over ``ks`` runs."""
    model = ready("llama")
    sweep = Sweep([AttentionPlan(name, k=k).resolve(N_LAYERS) for k in ks])
    model.base_model(batch("none")["input_ids"], use_cache=False, attention_plan=sweep.bound)
    return sweep.layers_run


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_sweep_equals_each_plan_alone(name, side):
    inputs = batch(side)
    model = ready(name)
    real = inputs["attention_mask"].bool()
    sweep = Sweep([plan.resolve(N_LAYERS) for plan in PLANS], inputs["attention_mask"])
    together = model.base_model(**inputs, use_cache=False, attention_plan=sweep.bound).last_hidden_state
    rows = len(inputs["input_ids"])
    assert len(together) == rows * len(PLANS)
    for plan, ours in zip(PLANS, together.split(rows), strict=True):
        assert_near(ours[real], read(model, plan, inputs)[real], plan, rounding=1e-6)


@torch.no_grad()
def test_shared_layers_run_once():
    n = N_LAYERS
    every_k = range(1, n + 1)
    assert layers_of("inplace-back", every_k) == n + n * (n + 1) // 2
    assert layers_of("inter-back", every_k) == n + n * (n + 1)  # twice in each converted layer
    assert layers_of("extra-back", every_k) == 2 * n
    assert layers_of("extend-back", every_k) == 2 * n
    assert layers_of("mask0-bidir", [0]) == n  # nothing but the causal pass


@pytest.mark.parametrize("name", ["echo", "hybrid"])
def test_plans_that_read_something_else_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        Sweep([AttentionPlan(name).resolve(N_LAYERS)])
