"""Adapters that come with gerund are taken by their base in all its forms, and by no other model."""

import json
import logging
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gerund
from gerund import light_entry, progress
from gerund.models import bundled
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.scoring.dual_encoder import ScorerConfig, write_scorer
from gerund.scoring.registry import for_scoring
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli
from tests.models.test_gguf_files import write

pytestmark = [pytest.mark.filterwarnings(warning) for warning in PEFT_WARNINGS]

TEXTS = ["The old man looked at the sea.", "Prices rose.", "naïve café, in the rain"]
DIMENSIONS = 5
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bundle_adapters.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """What a training has saved: an adapter and a head, read by an early exit."""
    folder = tmp_path_factory.mktemp("saved")
    adapter = make_adapter(tiny_folder, folder / "lora")
    lm = gerund.load(tiny_folder, adapter=adapter, attention="mask0-bidir", k=1, exit_layer=2)
    lm.save(folder / "model")
    torch.manual_seed(0)
    ProjectionHead(HeadConfig(lm.runtime.state_width, DIMENSIONS, "linear")).save(folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, saved: Path) -> Path:
    folder = tmp_path_factory.mktemp("assets") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bundle_adapters.py", str(saved), str(tiny_folder), str(folder)])
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return folder


@pytest.fixture
def scorer(tmp_path: Path, tiny_folder: Path, folder: Path) -> Path:
    """A folder of adapters with one to score with too."""
    both = shutil.copytree(folder, tmp_path / "both")
    settings = json.loads((both / "gerund.json").read_text())
    (both / "gerund.json").write_text(json.dumps({**settings, "adapters": {"infill": None, "score": "adapter-score"}}))
    make_adapter(tiny_folder, both / "adapter-score", target_modules=["o_proj"])
    config = gerund.load(tiny_folder, attention="bidir", adapter=False).encoder
    write_scorer(both, ScorerConfig(similarity="cosine"), None, config)
    return both


@pytest.fixture(autouse=True)
def _bundled(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(bundled, "bundled_folders", lambda: [folder])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write(gerund.load(tiny_folder, adapter=False), tmp_path_factory.mktemp("gguf") / "tiny.gguf", type="q8_0")


def test_the_folder_has_no_weights_of_the_base(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter", "base.json", "base.safetensors", "gerund.json", "head.json", "head.safetensors",
    ]  # fmt: skip


def test_it_is_taken_and_said_once(tiny_folder: Path, saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        lm, again = gerund.load(tiny_folder), gerund.load(tiny_folder)
    assert sum("comes with gerund" in record.message for record in caplog.records) == 1
    assert lm.dimensions == DIMENSIONS
    assert lm.encoder.exit_layer == 2
    np.testing.assert_allclose(lm.encode(TEXTS), gerund.load(saved).encode(TEXTS), atol=0.03)  # bfloat16
    assert again.fingerprint() == gerund.load(lm.spec).fingerprint() == lm.fingerprint()
    assert lm.spec.adapter == "auto"
    progress.say_once.cache_clear()
    caplog.clear()
    gerund.load(tiny_folder, adapter="auto")
    assert not any("comes with gerund" in record.message for record in caplog.records)


def test_whoever_says_how_to_read_gets_the_model_alone(tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, dtype="float32")
    bare = gerund.load(tiny_folder, adapter=False, dtype="float32")
    assert bare.runtime.adapter is None
    assert bare.dimensions == bare.runtime.state_width
    for settings in ({"attention": "causal"}, {"pooling": "last"}, {"k": 1}, {"exit_layer": 2}, {"layers": "1"}):
        assert gerund.load(tiny_folder, **settings).runtime.adapter is None
    for settings in ({"prompt": "query: "}, {"max_length": 9}, {"normalize": False}, {"adapter": "auto", "k": 2}):
        assert gerund.load(tiny_folder, **settings).runtime.adapter == "encode"
    assert gerund.load(bare.spec).fingerprint() == bare.fingerprint()
    other = lm.with_encoder(bare.encoder)
    assert other.fingerprint() == bare.fingerprint()
    np.testing.assert_array_equal(other.encode(TEXTS), bare.encode(TEXTS))
    assert lm.fingerprint() != bare.fingerprint()


def test_generation_is_the_base_models(tiny_folder: Path, file: Path) -> None:
    for model, settings in ((tiny_folder, {}), (file, {"runtime": "packed"}), (file, {"runtime": "torch"})):
        lm, bare = gerund.load(model, **settings), gerund.load(model, adapter=False, **settings)
        assert lm.runtime.adapter == "encode"
        lm.encode(TEXTS)
        ids = torch.tensor([[5, 9, 7]])
        assert torch.equal(lm.model(ids).logits, bare.model(ids).logits)
        assert [one.token_ids for one in lm.generate(TEXTS, 5)] == [one.token_ids for one in bare.generate(TEXTS, 5)]


def test_a_packed_network_takes_it_too(tiny_folder: Path, file: Path) -> None:
    own, other = gerund.load(file, runtime="packed"), gerund.load(tiny_folder, dtype="float32")
    assert own.spec.runtime == "packed"
    assert own.dimensions == DIMENSIONS
    assert (own.encode(TEXTS) * other.encode(TEXTS)).sum(axis=1).min() > 0.99
    assert own.fingerprint() != other.fingerprint()
    assert gerund.load(own.spec).fingerprint() == own.fingerprint()


def test_a_scorer_is_taken_by_either_runtime(
    tiny_folder: Path, file: Path, scorer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["The old man"], [[" looked at the sea.", " rose."]]
    for model in (tiny_folder, file):
        assert not gerund.load(model).has_scorer
        assert for_scoring(gerund.ModelSpec.of(model), None).attention == "causal"
    monkeypatch.setattr(bundled, "bundled_folders", lambda: [scorer])
    exact = gerund.load(tiny_folder, dtype="float32").score(*texts)
    light = light_entry.light_model(gerund.ModelSpec.of(file, runtime="packed"))
    assert light is not None
    assert (light.has_scorer, light._full) == (True, None)
    assert light.rerank("sea", TEXTS[:1], by="vectors").read == 1
    assert light._full is None
    for lm in (gerund.load(file, runtime="packed"), gerund.load(file, runtime="torch"), light):
        np.testing.assert_allclose(lm.score(*texts), exact, atol=0.03)
        np.testing.assert_allclose(lm.scorer.score(*texts), exact, atol=0.03)
    for model in (tiny_folder, file):
        assert for_scoring(gerund.ModelSpec.of(model), "mixed").attention is None
    lm = gerund.load(tiny_folder)
    other = lm.with_encoder(replace(lm.encoder, pooling="last"))
    assert not other.has_scorer
    assert not gerund.load(other.spec).has_scorer


@pytest.mark.parametrize("part", ["v_proj", "layernorm", "embed_tokens"])
def test_a_model_that_was_trained_further_is_another(tiny_folder: Path, tmp_path: Path, part: str) -> None:
    shutil.copytree(tiny_folder, tmp_path / "tuned")
    path = tmp_path / "tuned" / "model.safetensors"
    tensors = load_file(path)
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if part in name:
            tensors[name] = tensor + 0.05 * tensor.float().std().clamp(min=0.2) * torch.randn_like(tensor)
    save_file(tensors, path, metadata={"format": "pt"})
    assert gerund.load(tmp_path / "tuned").runtime.adapter is None


def test_another_tokenizer_is_another_model(tiny_folder: Path, folder: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(folder, tmp_path / "other")
    base = json.loads((folder / "base.json").read_text("utf-8"))
    (tmp_path / "other" / "base.json").write_text(json.dumps({**base, "ids": [1, 2, 3]}))
    monkeypatch.setattr(bundled, "bundled_folders", lambda: [tmp_path / "other"])
    lm = gerund.load(tiny_folder)
    assert (lm.runtime.adapter, lm.spec.adapter) == (None, "none")


def test_an_index_of_the_model_alone_goes_on(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "a.txt").write_text("Swallows nest in barns.\n\nBread is made of flour.\n")
    with monkeypatch.context() as before:
        before.setattr(bundled, "bundled_folders", list)
        made = run_cli(
            "index", tmp_path / "a.txt", "-o", tmp_path / "old.index", "-m", tiny_folder, "--chunk-tokens", 40
        )
        assert made.code == 0
    ran = run_cli("search", tmp_path / "old.index", "bread")
    assert (ran.code, ran.err) == (0, "")
    refused = run_cli("search", tmp_path / "old.index", "bread", "-m", tiny_folder)
    assert "open it with that model, or migrate it" in refused.err
