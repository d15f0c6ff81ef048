"""A tiny model in float64, a copy of it in eager attention, and texts of many lengths."""

import copy

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.training.corpus.tokenizer import InputFormatter
from tests.training.conftest import sentences


class Rows:
    """Texts by number, over and over; in the place of ``Texts``."""

    def __init__(self, rows, skipped=0):
        self.rows, self.skipped = [np.array(row) for row in rows], skipped

    def row(self, number):
        return self.rows[number % len(self.rows)]


@pytest.fixture(scope="session")
def ids_of(tokenizer):
    """Return a function from lengths to as many texts of so many tokens, without special ones."""

    def ids_of(*lengths, seed=0):
        found = []
        for number, length in enumerate(lengths):
            text = sentences(f"{seed}-{number}", 2 + length // 4)
            found.append(tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:length])
            assert len(found[-1]) == length
        return found

    return ids_of


@pytest.fixture
def model(tokenizer):
    """Return a GPT-2: it computes in float64 throughout, where others drop to float32 in their norms."""
    return gpt2(len(tokenizer))


def gpt2(vocabulary, **changes):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **{**sizes, **ids, **rates, **changes})).double()
    for parameter in model.parameters():
        # Large enough that who sees whom shows, and no bias or scale is at rest.
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    attach(model)
    attach_streams(decoder_layers(model))
    return model.train()


@pytest.fixture
def eager(model):
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


@pytest.fixture(params=[False, True], ids=["no-eos", "eos"])
def formatter(tokenizer, request):
    return InputFormatter(tokenizer, append_eos=request.param)


def doubled(losses):
    """Return losses whose heads are in float64."""
    losses.heads.double()
    return losses


def assert_equal_losses(found, expected, model, eager, heads=()):
    """Compare every loss and its gradient for all trained parameters."""
    assert found.keys() == expected.keys()
    shared = [p for head in heads for p in head.parameters()]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    ends = [p for p in model.parameters() if p.requires_grad] + shared
    others = [p for p in eager.parameters() if p.requires_grad] + shared
    for name, loss in found.items():
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, expected[name], rtol=1e-11, atol=1e-11)
        own, their = (
            torch.autograd.grad(value, at, retain_graph=True, allow_unused=True, materialize_grads=True)
            for value, at in ((loss, ends), (expected[name], others))
        )
        assert any(gradient.abs().max() > 1e-3 for gradient in own), name
        for place, (mine, theirs) in enumerate(zip(own, their, strict=True)):
            where = names[place] if place < len(names) else f"head {place - len(names)}"
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=lambda m: f"{name}, {where}: {m}")  # noqa: B023


def assert_same_rows(batch, first, part):
    """Demand that the rows of ``part`` are those of ``batch`` from ``first`` on, up to the padding."""
    assert batch.keys() == part.keys()
    for name, rows in part.items():
        for place, row in enumerate(rows):
            other = batch[name][first + place]
            if row.ndim == 0:
                assert row == other, name
                continue
            cut = tuple(slice(0, min(a, b)) for a, b in zip(row.shape, other.shape, strict=True))
            assert torch.equal(row[cut], other[cut]), (name, first + place)
    for name in ("real", "text_real"):
        if name in part:
            for place, row in enumerate(part[name]):
                assert row.sum() == batch[name][first + place].sum()
