"""Recipes train models with recurrent layers, read causally and both ways, and what they write is read the same."""

from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from tests.tiny import save_tiny
from tests.training.conftest import sentences
from tests.training.outcomes import read_log

TEXTS = [sentences(i, 1) for i in range(3)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Return the folder of a small random LFM 2: convolutions among attention layers."""
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "lfm2")


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("recurrent", ["causal", "both"])
@pytest.mark.parametrize("objective", ["simcse", "unimae"])
def test_an_adapter_is_trained_and_read_again(hybrid, adapting, write_recipe, tmp_path, objective, recurrent):
    adapting["model"]["base"] = str(hybrid)
    plan = {"name": "bidir", "recurrent": recurrent}
    pooling = {"pooling": "last", "append_eos": True} if objective == "unimae" else {"pooling": "mean"}
    plan = {"name": "causal"} if objective == "unimae" else plan
    adapting["encoder"] = {"attention": plan, **pooling}
    dropout = {"dropout": 0} if objective == "simcse" else {}  # LFM 2 has none in attention; the adapter's is enough
    adapting["model"]["lora"]["dropout"] = 0.1
    adapting["objectives"] = [{"kind": objective, "length": 16, "batch_size": 4, **dropout}]
    model = train(load_recipe(write_recipe(adapting), [f"output={tmp_path / 'out'}", "steps=6"]))
    log = read_log(tmp_path / "out")
    assert all(np.isfinite(line["loss"]) for line in log if "loss" in line)

    base, lm = gerund.load(hybrid, attention="causal", dtype="float32"), gerund.load(model, dtype="float32")
    assert lm.encoder.attention.name == plan["name"]
    assert lm.generate(TEXTS, 5) == base.generate(TEXTS, 5)  # the adapter takes no part in it
    if objective == "simcse":
        assert lm.encoder.attention.recurrent == recurrent
    read = replace(lm.encoder, attention=gerund.AttentionPlan("bidir", recurrent=recurrent))
    lm, base = lm.with_encoder(read), base.with_encoder(read)
    way = "both" if recurrent == "causal" else "causal"
    other = lm.with_encoder(replace(read, attention=gerund.AttentionPlan("bidir", recurrent=way)))
    assert not np.allclose(lm.encode(TEXTS), other.encode(TEXTS), atol=1e-3)
    assert not np.allclose(lm.encode(TEXTS), base.encode(TEXTS), atol=1e-3)
