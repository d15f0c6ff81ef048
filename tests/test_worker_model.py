"""A worker has the driver's model, or none."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, FingerprintError, GerundError
from gerund.language_model import LanguageModel
from gerund.models.sources import with_absolute_paths
from gerund.settings.model_spec import ModelSpec
from gerund.worker_model import WorkerModel, checked_threads, use_threads


@pytest.fixture
def lm(tiny_folder):
    return gerund.load(tiny_folder, pooling="last", dtype="float32")


@pytest.fixture(autouse=True)
def threads_as_before():
    yield
    torch.set_num_threads(1)


def test_it_is_the_same_model(lm):
    again = WorkerModel.of(lm, threads=2).load()
    assert torch.get_num_threads() == 2
    assert again.fingerprint() == lm.fingerprint()
    np.testing.assert_array_equal(again.encode(["the cat"]), lm.encode(["the cat"]))


def test_a_folder_is_found_from_another_one(lm, tiny_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_folder.parent)
    named = WorkerModel.of(gerund.load(f"./{tiny_folder.name}", dtype="float32"))
    monkeypatch.chdir(tmp_path)
    assert named.load().weights_hash == lm.weights_hash


def test_paths_are_those_of_the_driver(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trained").mkdir()
    spec = with_absolute_paths(ModelSpec(adapter="trained", reranker="trained"))
    assert spec.adapter == spec.reranker == str(tmp_path / "trained")
    (tmp_path / "own").mkdir()
    assert with_absolute_paths(ModelSpec(reranker="own")).reranker == "own"


def test_another_model_is_refused(lm):
    with pytest.raises(FingerprintError, match="has another model at"):
        replace(WorkerModel.of(lm), fingerprint="0123456789abcdef").load()


def test_another_type_is_refused(lm):
    with pytest.raises(ConfigError, match="computes in float32 and this machine in bfloat16; give --dtype"):
        replace(WorkerModel.of(lm), dtype="bfloat16").load()


def test_a_model_that_is_not_there_is_a_plain_error(lm, tmp_path):
    model = WorkerModel.of(lm)
    with pytest.raises(GerundError):
        replace(model, spec=model.spec.model_copy(update={"model": str(tmp_path / "none")})).load()


def test_a_model_made_in_memory_has_no_worker(lm):
    with pytest.raises(ConfigError, match="save it first"):
        WorkerModel.of(LanguageModel(lm.model, lm.tokenizer))


def test_threads(lm):
    assert checked_threads(None) is None
    use_threads(None)
    for refused in (checked_threads, use_threads, lambda threads: WorkerModel.of(lm, threads=threads)):
        with pytest.raises(ConfigError, match="threads=0 leaves nothing to compute with"):
            refused(0)
    with pytest.raises(ConfigError, match="threads=5000 is more than the 1024"):
        use_threads(5000)
