"""Inspecting some texts is tokenizing them without the prompt and averaging their maps, by hand."""

import pytest
import torch

import gerund
from gerund.errors import TextError
from gerund.inference.inspection import causal_plan, even_fraction, inspect_attention, mean_maps

TEXTS = ["the cat", "an inn in the rain"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="mask0-bidir", k=2, prompt="never looked at: ")


def test_maps_are_those_of_both_plans(lm):
    found = inspect_attention(lm.runtime, TEXTS)
    ids = [lm.tokenizer(text).input_ids for text in TEXTS]
    assert found.ids == ids
    assert found.cut == 0
    assert found.even == even_fraction([len(item) for item in ids])
    for maps, plan in ((found.before, causal_plan(lm.n_layers)), (found.after, lm.runtime.plan)):
        for item, expected in zip(maps, mean_maps(lm.model, ids, plan), strict=True):
            assert torch.equal(item.weights, expected.weights)
    assert not torch.equal(found.before[-1].weights, found.after[-1].weights)


def test_long_texts_are_cut_and_counted(lm):
    found = inspect_attention(lm.runtime, TEXTS, longest=9)
    assert [len(item) for item in found.ids] == [len(lm.tokenizer(TEXTS[0]).input_ids), 9]
    assert found.cut == 1
    # The model's own limit comes first.
    assert max(map(len, inspect_attention(lm.runtime, ["the rain " * 60]).ids)) == lm.max_length == 64


def test_a_single_token_has_nothing_to_look_at(tiny_folder):
    from tests.tiny import byte_tokenizer

    lm = gerund.load(tiny_folder)
    lm = gerund.LanguageModel(lm.model, byte_tokenizer(bos=False), lm.encoder)
    with pytest.raises(TextError, match="'x' is a single token"):
        inspect_attention(lm.runtime, ["the cat", "x"])
