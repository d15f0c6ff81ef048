"""Plans by name: layouts, defaults and refusals."""

import pytest

from gerund import PLAN_NAMES, AttentionPlan, ConfigError
from gerund.settings.plan import Direction, View

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


@pytest.mark.parametrize(
    ("spelled", "plan"),
    [
        ("MASK0-BIDIR", AttentionPlan("mask0-bidir")),
        ("mask0&bidir", AttentionPlan("mask0+bidir")),
        ("MASK0&BIDIR", AttentionPlan("mask0+bidir")),
        ("mask3-bidir", AttentionPlan("mask0-bidir", sink_tokens=3)),
        ("MASK7&BIDIR", AttentionPlan("mask0+bidir", sink_tokens=7)),
        ("INPLACE-BACK", AttentionPlan("inplace-back")),
        (" Causal ", AttentionPlan("causal")),
        ("MASK0 & BIDIR", AttentionPlan("mask0+bidir")),
        ("MASK0-1", AttentionPlan("mask0+bidir", k0=1)),
    ],
)
def test_the_papers_spellings(spelled, plan):
    assert AttentionPlan(spelled) == plan


def test_a_spelling_and_a_number_that_disagree():
    with pytest.raises(ConfigError, match="'mask3-bidir' says sink_tokens=3, and sink_tokens=2 is given beside it"):
        AttentionPlan("mask3-bidir", sink_tokens=2)
    with pytest.raises(ConfigError, match="'MASK0-2' says k0=2, and k0=1 is given beside it"):
        AttentionPlan("MASK0-2", k0=1)


@pytest.mark.parametrize(
    ("spelled", "said"),
    [
        ("MASK0-MID", r"is 'mask0\+bidir' with k0 = half of the best k of 'mask0-bidir': give that number"),
        ("mask0-last", r"is 'mask0\+bidir' with k0 = the best k of 'mask0-bidir': give that number"),
        ("MASK5", "there are mask5-bidir, mask5-for, mask5-all"),
    ],
)
def test_spellings_that_leave_something_open(spelled, said):
    with pytest.raises(ConfigError, match=said):
        AttentionPlan(spelled)


def test_more_passes_of_the_last_layer_than_anybody_waits_for():
    with pytest.raises(ConfigError, match="k must be at most 1000 for 'extend-bidir', got 1001"):
        AttentionPlan("extend-bidir", k=1001)


def test_more_extended_layers_than_layers():
    assert AttentionPlan("extend-bidir", k=7).resolve(4).stream.repeats == 7


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


@pytest.mark.parametrize(
    ("plan", "skips"),
    [
        (AttentionPlan("mask0-bidir", k=10, skips=3), (12, 15, 18, 21)),
        (AttentionPlan("mask0-bidir", k=10, skips=3, variant="released"), (10, 13, 16, 19)),
        (AttentionPlan("mask0+bidir", k=18, k0=10, skips=3), (4, 7, 10, 13, 16, 19)),
        (AttentionPlan("mask0+bidir", k=18, k0=10, skips=3, variant="released"), (10, 13, 16, 19)),
        (AttentionPlan("bidir", skips=10), (0, 10, 20)),
        (AttentionPlan("causal", skips=7), (0, 7, 14, 21)),
        (AttentionPlan("mask0-bidir", k=10), ()),
    ],
)
def test_where_skips_begin(plan, skips):
    resolved = plan.resolve(22)
    assert resolved.skips == skips
    added = [resolved.added_after(layer) for layer in range(22)]
    assert added[-1] == (skips[-1] if skips else None)
    assert [one for one in added if one is not None] == list(skips)


def test_plans_without_skips_are_written_as_before_there_were_any():
    assert "skips" not in AttentionPlan("mask0-bidir", k=2).to_dict()
    with_skips = AttentionPlan("mask0-bidir", k=2, skips=3)
    assert AttentionPlan.from_dict(with_skips.to_dict()) == with_skips


def test_a_plan_with_skips_is_neither_causal_nor_an_encoders_own():
    assert not AttentionPlan("causal", skips=3).resolve(6).is_causal
    assert not AttentionPlan("bidir", skips=3).resolve(6).is_bidirectional


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
        ({"name": "mask-1"}, "unknown attention plan 'mask-1'; valid are: causal, bidir"),
        ({"name": "causal", "k": 3}, "takes no k"),
        ({"name": "mask0-bidir", "k": -1}, "k must be at least 0, got -1"),
        ({"name": "mask0-bidir", "k": 1.5}, "whole number"),
        ({"name": "mask0-bidir", "k": True}, "whole number"),
        ({"name": "mask0-bidir", "k0": 1}, "k0 belongs to"),
        ({"name": "mask0+bidir", "k": 2, "k0": 3}, "k0=3 is larger than k=2"),
        ({"name": "bidir", "sink_tokens": 2}, "sink_tokens belongs to"),
        ({"name": "mask0-for", "sink_tokens": 0}, "at least 1"),
        ({"name": "bidir", "combine": "mean"}, "combine belongs to"),
        ({"name": "inter-back", "combine": "max"}, "valid are: sum, mean"),
        ({"name": "bidir", "skips": 0}, "skips must be at least 1, got 0"),
        ({"name": "inter-back", "skips": 3}, "skips belong to plans that run each layer once"),
        ({"name": "hybrid", "skips": 3}, "skips belong to plans that run each layer once"),
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
