"""Folders of sentence-transformers' MultiVectorEncoder and of PyLate: read and exported, with that library's scores."""

import string

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gerund
from gerund import ConfigError, ModelError
from gerund.models.heads import LateHead
from gerund.settings.encoder import LateConfig
from tests.ready_made import write
from tests.tiny import save_tiny

QUERY = "the tin"
DOCUMENTS = ["a cat in the inn.", "there, there", "an in-tin thing, in the rain!"]
WIDTH = 32
DENSE = {"in_features": WIDTH, "out_features": 8, "bias": False,
         "activation_function": "torch.nn.modules.linear.Identity"}  # fmt: skip
IDENTITY_OF_PYLATE = "pylate.models.Dense.Dense"


def pylate(folder, *, dense=DENSE, **settings):
    """Make a folder as PyLate saves it: a decoder and a linear map."""
    save_tiny(folder)
    width = gerund.load(folder).model.config.hidden_size
    dense = {**dense, "in_features": width}
    generator = torch.Generator().manual_seed(3)
    write(folder / "1_Dense" / "config.json", dense)
    weights = {"linear.weight": torch.randn(8, width, generator=generator)}
    save_file(weights, folder / "1_Dense" / "model.safetensors")
    types = ["sentence_transformers.models.Transformer", IDENTITY_OF_PYLATE]
    paths = ["", "1_Dense"]
    write(folder / "modules.json", [{"idx": i, "name": str(i), "path": paths[i], "type": types[i]} for i in range(2)])
    write(folder / "sentence_bert_config.json", {"max_seq_length": 60, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {
        "model_type": "ColBERT", "prompts": {}, "default_prompt_name": None, "similarity_fn_name": "MaxSim",
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 24, "document_length": 40,
        "do_query_expansion": False, "attend_to_expansion_tokens": False, "skiplist_words": list(string.punctuation),
        **settings,
    })  # fmt: skip
    return folder


def their_scores(folder, query=QUERY, documents=DOCUMENTS):
    """Return the mean MaxSim of sentence-transformers."""
    library = pytest.importorskip("sentence_transformers")
    model = library.MultiVectorEncoder(str(folder), device="cpu", local_files_only=True)
    asked = model.encode_query([query], show_progress_bar=False)
    offered = model.encode_document(documents, show_progress_bar=False)
    return (model.similarity(asked, offered, length_normalize=True)[0]).tolist(), asked[0], offered


def our_scores(lm, query=QUERY, documents=DOCUMENTS):
    ranking = lm.rerank(query, documents, by="maxsim")
    return [ranking.scores[ranking.indices.index(place)] for place in range(len(documents))]


@pytest.mark.filterwarnings("ignore:.*were longer than")
def test_a_folder_of_pylate_gives_the_librarys_scores(tmp_path):
    folder = pylate(tmp_path / "colbert")
    lm = gerund.load(folder, dtype="float32")
    assert lm.default_measure() == "maxsim"
    assert (lm.late.config.query, lm.late.config.query_length, lm.late.config.counts) == ("[Q] ", 24, "all")
    theirs, asked, offered = their_scores(folder)
    assert our_scores(lm) == pytest.approx(theirs, abs=1e-4)
    assert lm.encode_multi(QUERY, is_query=True) == pytest.approx(asked.numpy(), abs=1e-4)
    for text, vectors in zip(DOCUMENTS, offered, strict=True):
        own = lm.encode_multi(text)
        assert own.shape == tuple(vectors.shape)
        assert own == pytest.approx(vectors.numpy(), abs=1e-4)
    long = ["in the tin, " * 40, "a"]  # longer than its document_length
    assert our_scores(lm, "the tin " * 20, long) == pytest.approx(
        their_scores(folder, "the tin " * 20, long)[0], abs=1e-4
    )
    # A copy says the same.
    lm.save(tmp_path / "copy")
    assert our_scores(gerund.load(tmp_path / "copy", dtype="float32")) == pytest.approx(theirs, abs=1e-4)


@pytest.mark.filterwarnings("ignore:.*were longer than")
@pytest.mark.parametrize("plan", ["causal", "bidir"])
def test_an_export_gives_the_librarys_scores(tmp_path, plan):
    save_tiny(tmp_path / "base")
    lm = gerund.load(tmp_path / "base", attention=plan, dtype="float32")
    with pytest.raises(ConfigError, match="they were not trained"):
        lm.export(tmp_path / "out", "multi-vector")
    projection_ED = np.random.default_rng(0).standard_normal((6, lm.runtime.state_width)).astype(np.float32)
    lm.late = LateHead(LateConfig(), projection_ED)
    with pytest.raises(ConfigError, match=r"objectives\.late\.counts=all"):
        lm.export(tmp_path / "out", "multi-vector")
    assert not (tmp_path / "out").exists()
    lm.late = LateHead(LateConfig(counts="all", skipped=(".", ","), document_length=20), projection_ED)
    lm.export(tmp_path / "out", "multi-vector")
    assert their_scores(tmp_path / "out")[0] == pytest.approx(our_scores(lm), abs=1e-4)
    assert our_scores(gerund.load(tmp_path / "out", dtype="float32")) == pytest.approx(our_scores(lm), abs=1e-4)


@pytest.mark.parametrize(("change", "message"), [
    ({"do_query_expansion": True}, "query expansion"),
    ({"dense": {**DENSE, "bias": True}}, "linear map alone"),
    ({"query_length": "long"}, "whole number"),
])  # fmt: skip
def test_what_would_change_vectors_is_refused(tmp_path, change, message):
    folder = pylate(tmp_path / "colbert", **change)
    with pytest.raises((ModelError, gerund.DataError), match=message):
        gerund.load(folder)
