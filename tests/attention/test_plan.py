"""Plans by name: layouts, defaults and refusals."""

import pytest

from gerund import PLAN_NAMES, AttentionPlan, ConfigError
from gerund.attention.plan import Direction, View

C, B, X = View(Direction.CAUSAL), View(Direction.BACKWARD), View(Direction.BIDIRECTIONAL)
C0, X0 = View(Direction.CAUSAL, 1), View(Direction.BIDIRECTIONAL, 1)


@pytest.mark.parametrize(
    ("plan", "views"),
    [
        (AttentionPlan("causal"), [C, C, C, C]),
        (AttentionPlan("bidir"), [X, X, X, X]),
        (AttentionPlan("inplace-back", k=1), [C, C, C, B]),
        (AttentionPlan("inplace-bidir", k=3), [C, X, X, X]),
        (AttentionPlan("mask0-for", k=2), [C, C, C0, C0]),
        (AttentionPlan("mask0-bidir", k=2), [C, C, X0, X0]),
        (AttentionPlan("mask0-all", k=1), [C0, C0, C0, X0]),
        (AttentionPlan("mask0+bidir", k=3, k0=1), [C, X, X, X0]),
        (AttentionPlan("mask0-bidir", k=1, sink_tokens=3), [C, C, C, View(Direction.BIDIRECTIONAL, 3)]),
        (AttentionPlan("mask0-bidir", k=0), [C, C, C, C]),
    ],
)
def test_layouts_of_four_layers(plan, views):
    assert list(plan.resolve(4).views) == views


def test_streams():
    inter = AttentionPlan("inter-back", k=2).resolve(6).stream
    assert (inter.kind, list(inter.layers), inter.view) == ("parallel", [4, 5], B)
    released = AttentionPlan("inter-back", k=2, variant="released").resolve(6).stream
    assert (released.kind, list(released.layers)) == ("stack", [4, 5])
    extra = AttentionPlan("extra-bidir", k=2).resolve(6).stream
    assert (extra.kind, list(extra.layers), extra.view) == ("stack", [0, 1], X)
    extend = AttentionPlan("extend-bidir", k=2).resolve(6).stream
    assert (extend.kind, list(extend.layers), extend.repeats) == ("extend", [5], 2)
    assert AttentionPlan("inter-back", k=0).resolve(6).stream is None


@pytest.mark.parametrize("name", PLAN_NAMES)
@pytest.mark.parametrize("n_layers", [1, 2, 5, 22, 80])
def test_every_plan_has_defaults_for_every_depth(name, n_layers):
    plan = AttentionPlan(name).with_defaults(n_layers)
    assert plan.k is None or 1 <= plan.k <= n_layers
    assert len(AttentionPlan(name).resolve(n_layers).views) == n_layers
    assert AttentionPlan.from_dict(plan.to_dict()) == plan


def test_defaults_are_where_the_papers_curves_peak():
    assert AttentionPlan("mask0-bidir").with_defaults(22).k == 10
    assert AttentionPlan("inplace-back").with_defaults(22).k == 6
    both = AttentionPlan("mask0+bidir").with_defaults(22)
    assert (both.k, both.k0) == (19, 10)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "mask1"}, "unknown attention plan 'mask1'; valid are: causal, bidir"),
        ({"name": "causal", "k": 3}, "takes no k"),
        ({"name": "mask0-bidir", "k": -1}, "negative"),
        ({"name": "mask0-bidir", "k": 1.5}, "whole number"),
        ({"name": "mask0-bidir", "k": True}, "whole number"),
        ({"name": "mask0-bidir", "k0": 1}, "k0 belongs to"),
        ({"name": "mask0+bidir", "k": 2, "k0": 3}, "k0=3 is larger than k=2"),
        ({"name": "bidir", "sink_tokens": 2}, "sink_tokens belongs to"),
        ({"name": "mask0-for", "sink_tokens": 0}, "at least 1"),
        ({"name": "bidir", "combine": "mean"}, "combine belongs to"),
        ({"name": "inter-back", "combine": "max"}, "valid are: sum, mean"),
        ({"name": "inter-back", "variant": "mine"}, "valid are: paper, released"),
    ],
)
def test_refusals_say_why(settings, words):
    with pytest.raises(ConfigError, match=None) as caught:
        AttentionPlan(**settings)
    assert words in str(caught.value)


def test_k_larger_than_the_model():
    with pytest.raises(ConfigError, match="k=9 is larger than the model's 4 layers"):
        AttentionPlan("inplace-back", k=9).resolve(4)
    with pytest.raises(ConfigError, match="k0=4 is larger than k=3"):
        AttentionPlan("mask0+bidir", k0=4).resolve(4)


def test_only_the_untouched_plans_are_causal():
    causal = [name for name in PLAN_NAMES if AttentionPlan(name).resolve(4).is_causal]
    assert causal == ["causal", "echo"]


def test_unknown_field_is_named():
    with pytest.raises(ConfigError, match="'layers'; valid are: name, k, k0"):
        AttentionPlan.from_dict({"name": "causal", "layers": 3})
