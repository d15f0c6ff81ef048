"""The picture of ``gerund inspect``: its panels are the maps themselves."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gerund.inference.inspection import causal_plan, mean_maps
from gerund.reporting.plots.attention import MOST_LAYERS, attention_figure, pick_layers
from gerund.settings.plan import AttentionPlan
from tests.tiny import N_LAYERS, ready


def maps(plan, lengths=(9,), seed=0):
    model = ready("llama", seed=seed)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
    resolved = AttentionPlan(plan).resolve(N_LAYERS) if plan else causal_plan(N_LAYERS)
    return mean_maps(model, texts, resolved)


def panels(figure):
    """Return the drawn maps from the figure's axes: title and data."""
    axes = [axis for part in figure.subfigs for axis in part.axes]
    return [(axis.get_title(), axis.images[0].get_array()) for axis in axes if axis.images]


def test_panels_show_the_maps_themselves():
    before, after = maps(None), maps("mask0-bidir")
    figure = attention_figure(before, after, title="tiny", even=0.2, labels=["$a_1$"] * 8 + ["日"])
    drawn = panels(figure)
    assert [title for title, _ in drawn[:N_LAYERS]] == [f"layer {i}" for i in range(N_LAYERS)]
    assert [title.split("\n")[0] for title, _ in drawn[N_LAYERS:]] == ["causal"] * 2 + ["bidirectional"] * 2
    for (_, data), item in zip(drawn, [*before, *after], strict=True):
        np.testing.assert_array_equal(data.filled(0), item.weights.numpy())
        np.testing.assert_array_equal(data.mask, item.weights.numpy() == 0)  # what is out of sight stays blank
    for layer in range(2, N_LAYERS):
        assert not np.array_equal(drawn[layer][1].mask, drawn[N_LAYERS + layer][1].mask)


@pytest.mark.parametrize(
    ("plan", "count"), [("inter-back", 4 + 4 + 1), ("extra-bidir", 4 + 4 + 2), ("extend-back", 4 + 4 + 1)]
)
def test_twins_have_panels_of_their_own(plan, count):
    figure = attention_figure(maps(None), maps(plan), title=plan, even=0.2)
    assert len(panels(figure)) == count


def test_layers_on_top_have_columns_of_their_own():
    after = maps("extend-back")
    more = [*after, replace(after[-1], run=2)]
    figure = attention_figure(maps(None), more, title="", even=0.2)
    assert [title for title, _ in panels(figure)][-2:] == ["+1 on top\nbackward", "+2 on top\nbackward"]


@pytest.mark.slow
def test_deep_models_show_twelve_layers_without_names():
    before = [replace(item, layer=index) for index, item in enumerate(maps(None) * 10)]
    figure = attention_figure(before, before, title="deep", even=0.2, labels=["token"] * 9)
    assert len(panels(figure)) == 2 * MOST_LAYERS
    width, height = figure.get_size_inches()
    assert max(width, height) < 16
    assert pick_layers(40) == [0, 4, 7, 11, 14, 18, 21, 25, 28, 32, 35, 39]
    assert pick_layers(3) == [0, 1, 2]
