"""MTEB's description of a gerund encoder, and the encoder that MTEB loads by it."""

from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, FingerprintError

pytest.importorskip("mteb")
import mteb

from gerund.integrations.mteb import model_meta

TEXTS = ["the cat sat on the mat", "a", "in the beginning there was another thing that"]


def test_what_it_says(tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, k=2, prompt="Query:")
    meta = model_meta(lm)
    assert meta.name == f"gerund/{tiny_folder.name}"
    assert (meta.revision, meta.embed_dim, meta.max_tokens) == (lm.fingerprint(), lm.dimensions, lm.max_length)
    assert meta.use_instructions
    assert meta.n_parameters == sum(weight.numel() for weight in lm.model.parameters())
    assert meta.n_embedding_parameters == lm.model.get_input_embeddings().weight.numel()
    assert model_meta(tiny_folder, name="me/mine").name == "me/mine"
    assert not model_meta(tiny_folder).use_instructions


def test_what_it_loads(tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, k=2, dtype="float32")
    meta = model_meta(lm)
    encoder = meta.load_model(device="cpu")
    assert encoder.mteb_model_meta.revision == lm.fingerprint()
    found = encoder.encode([{"text": TEXTS}], task_metadata=mteb.get_task("STSBenchmark").metadata)
    np.testing.assert_allclose(found, lm.encode(TEXTS, normalize=False), atol=1e-5)
    spec = gerund.ModelSpec(model=str(tiny_folder), k=1).model_dump_json()
    other = meta.model_copy(update={"loader_kwargs": {"spec": spec}})
    with pytest.raises(FingerprintError, match="no longer the encoder"):
        other.load_model()


def test_a_model_in_memory_cannot_be_loaded_again(tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder)
    with pytest.raises(ConfigError, match="save it first"):
        model_meta(gerund.LanguageModel(lm.model, lm.tokenizer))
