"""gerund's class inside sentence-transformers: loading, sending, saving, and odd inputs."""

import json
import pickle
import shutil
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny, save_tiny_t5

pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer

from gerund.integrations.sentence_transformers import Transformer, load

TEXTS = ["the cat sat on the mat", "a", "in the beginning there was another thing that", "zürich 数据库"]
FLOAT32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> gerund.LanguageModel:
    return gerund.load(tiny_folder, k=2, prompt="Query:", dtype="float32")


@pytest.fixture(scope="module")
def folder(lm: gerund.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "out"
    lm.export(folder, "sentence-transformers")
    return folder


@pytest.fixture
def model(folder: Path) -> SentenceTransformer:
    return load(folder, device="cpu", model_kwargs=FLOAT32)


def assert_same(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=3), lm.encode(TEXTS), atol=1e-5)
    np.testing.assert_allclose(model.encode(TEXTS, prompt="the "), lm.encode(TEXTS, prompt="the "), atol=1e-5)


def test_without_the_flag(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    assert isinstance(model[0], Transformer)
    assert_same(lm, model)
    assert model.similarity_fn_name == "cosine"
    assert model.default_prompt_name == "default"
    assert model.get_embedding_dimension() == lm.dimensions
    assert model.dtype == torch.float32
    assert "mask0-bidir" in str(model)


def test_with_the_flag(lm: gerund.LanguageModel, folder: Path) -> None:
    model = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True, model_kwargs=FLOAT32)
    assert_same(lm, model)


def refused(folder: Path) -> bool:
    """Whether plain sentence-transformers refuses a folder, and names the module that opens it."""
    with pytest.raises(ValueError, match=r"'gerund\.integrations\.sentence_transformers\.Transformer'"):
        SentenceTransformer(str(folder), device="cpu")
    return True


@pytest.mark.slow
def test_every_folder_is_refused_without_the_flag(
    lm: gerund.LanguageModel, folder: Path, tiny_folder, tmp_path
) -> None:
    """Taken for a plain checkpoint, each of them would be read from left to right, without a word."""
    lm.save(tmp_path / "saved")
    lm.export(tmp_path / "merged", "merged")
    gave = run_cli("convert", tiny_folder, tmp_path / "converted", "--k", "2", "--prompt", "Query:")
    assert gave.code == 0
    for one in (folder, *(tmp_path / name for name in ("saved", "merged", "converted"))):
        assert refused(one)
        model = load(one, device="cpu", model_kwargs=FLOAT32)
        assert_same(lm, model)
        assert len(model) == 2
        np.testing.assert_allclose(model.encode_query(TEXTS), lm.encode(TEXTS), atol=1e-5)
        np.testing.assert_allclose(model.encode_document(TEXTS), lm.encode(TEXTS), atol=1e-5)


def test_without_gerund_it_is_named(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("sentence_transformers.util.environment.get_installed_version", lambda name: None)
    with pytest.raises(ImportError, match=r"(?s)gerund>=0\.1, but it is not installed.*sentence_transformers\.load"):
        SentenceTransformer(str(folder), device="cpu")


def test_a_folder_of_an_earlier_version(lm: gerund.LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "old")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (tmp_path / "old" / name).unlink()
    model = load(tmp_path / "old", device="cpu", model_kwargs=FLOAT32)
    assert_same(lm, model)
    assert model.default_prompt_name == "default"


@pytest.mark.slow
def test_a_projection_head(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "base")
    base = gerund.load(folder, k=2, dtype="float32")
    head = ProjectionHead(HeadConfig(width=base.dimensions, dimensions=8))
    lm = gerund.LanguageModel(base.model, base.tokenizer, base.encoder, head=head)
    lm.save(tmp_path / "headed")
    assert refused(tmp_path / "headed")
    model = load(tmp_path / "headed", device="cpu", model_kwargs=FLOAT32)
    assert model.get_embedding_dimension() == 8
    assert_same(lm, model)


def test_the_encoder_of_a_t5(tmp_path: Path) -> None:
    lm = gerund.load(save_tiny_t5(tmp_path / "base"), dtype="float32", prompt="Query:")
    lm.save(tmp_path / "out")
    assert refused(tmp_path / "out")
    assert_same(lm, load(tmp_path / "out", device="cpu", model_kwargs=FLOAT32))


def test_the_bundled_model() -> None:
    assert refused(files("gerund") / "assets" / "default")


def test_methods_that_have_no_place_there(tiny_folder: Path, tmp_path: Path) -> None:
    gerund.load(tiny_folder, template="prompteol").save(tmp_path / "out")
    assert refused(tmp_path / "out")
    with pytest.raises(ConfigError, match="sentence-transformers takes no template"):
        load(tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_broken_modules(folder: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(folder, tmp_path / "out")
    (tmp_path / "out" / "modules.json").write_text(text)
    with pytest.raises(DataError, match=r"modules\.json (is no JSON|does not hold)"):
        load(tmp_path / "out")


def test_options(folder: Path, lm: gerund.LanguageModel) -> None:
    model = load(folder, device="cpu", model_kwargs=FLOAT32, truncate_dim=8, prompts={"query": "Q:"})
    assert model.encode(TEXTS).shape == (4, 8)
    assert model.prompts["query"] == "Q:"


def test_max_seq_length_can_be_changed(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    assert model.max_seq_length == lm.max_length == 64
    model.max_seq_length = 10
    with pytest.warns(UserWarning, match="longer than 10 tokens"):
        features = model.preprocess(TEXTS)
    assert features["input_ids"].shape == (4, 10)


def test_an_empty_text_is_a_zero_vector(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    vectors = model.encode(["", "a cat", " "])
    np.testing.assert_allclose(vectors, lm.encode(["", "a cat", " "], empty="zeros"), atol=1e-5)
    assert not vectors[0].any()
    assert not model.encode([""]).any()


def test_token_embeddings(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    found = model.encode(TEXTS, prompt="", output_value="token_embeddings")
    for one, two in zip(found, lm.encode_tokens(TEXTS, prompt=""), strict=True):
        np.testing.assert_allclose(one.numpy(), two, atol=1e-4)


def test_a_single_text_and_tensors(lm: gerund.LanguageModel, model: SentenceTransformer) -> None:
    np.testing.assert_allclose(model.encode("a cat"), lm.encode("a cat"), atol=1e-5)
    assert isinstance(model.encode("a cat", convert_to_tensor=True), torch.Tensor)


def test_it_can_be_sent_to_other_processes(lm: gerund.LanguageModel, folder: Path, model: SentenceTransformer) -> None:
    again = pickle.loads(pickle.dumps(load(folder, device="cpu")[0]))
    assert isinstance(again, Transformer)
    assert again.source == str(folder)
    assert again.lm.fingerprint() == model[0].lm.fingerprint()


def test_saving_through_sentence_transformers(lm: gerund.LanguageModel, model: SentenceTransformer, tmp_path) -> None:
    model.save_pretrained(str(tmp_path / "again"), create_model_card=False)
    kinds = [item["type"] for item in json.loads((tmp_path / "again" / "modules.json").read_text())]
    assert kinds[0] == "gerund.integrations.sentence_transformers.Transformer"
    assert_same(lm, load(tmp_path / "again", device="cpu", model_kwargs=FLOAT32))
    assert gerund.load(tmp_path / "again", dtype="float32").fingerprint() == lm.fingerprint()


def test_a_model_in_memory_however_it_pads(tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, k=2, prompt="Query:", dtype="float32")
    wanted = lm.encode(TEXTS, normalize=False)
    for lm.tokenizer.padding_side in ("right", "left"):
        found = SentenceTransformer(modules=[Transformer(lm)], device="cpu").encode(TEXTS, prompt="Query:")
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_folders_of_another_kind(tiny_folder: Path, tmp_path: Path) -> None:
    for folder in (tiny_folder, tmp_path / "absent"):
        with pytest.raises(DataError, match="is no folder of gerund's"):
            load(folder)


def test_a_folder_that_is_called_like_the_bundled_model(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(tiny_folder, tmp_path / "default")
    monkeypatch.chdir(tmp_path)
    assert Transformer.load("default").lm.fingerprint() == gerund.load(tiny_folder).fingerprint()
