"""Merged models, converted checkpoints, and what every format has in common."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund.errors import ConfigError, MissingDependencyError, ModelError, OutputExistsError, ResourceError
from gerund.exporting.formats import convert
from gerund.exporting.shared import Export
from gerund.jobs import files
from gerund.models import loading
from gerund.models.sources import find
from gerund.scoring.dual_encoder import DualScorer, ScorerConfig
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
IDS = torch.arange(3, 20)[None]
# What a converted folder has beside the checkpoint's own files.
OURS = {"README.md", "gerund.json", "modules.json", "config_sentence_transformers.json"}


def load(folder: Path, **options) -> gerund.LanguageModel:
    return gerund.load(folder, **{"dtype": "float32", **options})


def converted(source: Path, target: Path, **options) -> gerund.LanguageModel:
    lm = gerund.load(source, **{"dtype": loading.own_dtype(find(source)), **options})
    convert(find(source), lm, target)
    return lm


@torch.no_grad()
def plain_logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_merged_without_an_adapter_is_the_model_itself(tiny_folder: Path, tmp_path: Path) -> None:
    lm = load(tiny_folder, k=2, prompt="Q: ")
    done = lm.export(tmp_path / "out", "merged")
    assert done == Export(tmp_path / "out", f"gerund.load({str(tmp_path / 'out')!r})", fingerprint=lm.fingerprint())
    again = load(tmp_path / "out")
    assert again.encoder == lm.encoder
    assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(tiny_folder))
    assert again.fingerprint() == lm.fingerprint()


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_merged_for_tools_that_know_no_adapters(tmp_path: Path) -> None:
    from peft import PeftModel

    base = save_tiny(tmp_path / "base", tie_word_embeddings=True)
    adapter = make_adapter(base, tmp_path / "lora", target_modules=["q_proj", "embed_tokens"])
    load(base, adapter=adapter).export(tmp_path / "out", "merged")
    with torch.no_grad():
        wanted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()(IDS).logits
    torch.testing.assert_close(plain_logits(tmp_path / "out"), wanted, atol=1e-4, rtol=0)
    # The adapter parted two weights that were one.
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    assert not (tmp_path / "out" / "adapter").exists()


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
@pytest.mark.parametrize(("wrong", "what"), [("norm", "vectors"), ("lm_head", "logits")])
def test_a_merged_model_that_computes_something_else_is_not_kept(tmp_path: Path, monkeypatch, wrong, what) -> None:
    from gerund.exporting import shared as written

    base = save_tiny(tmp_path / "base", tie_word_embeddings=False)
    adapter = make_adapter(base, tmp_path / "lora", target_modules=["q_proj"])
    right = written.merged_state

    def spoilt(model, name):
        state = dict(right(model, name))
        key = next(one for one in state if one.endswith(f"{wrong}.weight") and "layers" not in one)
        return state | {
            key: state[key] * torch.linspace(0.5, 2, len(state[key])).reshape(-1, *[1] * (state[key].ndim - 1))
        }

    monkeypatch.setattr(written, "merged_state", spoilt)
    with pytest.raises(ModelError, match=f"loaded again, gives other {what} than the model with its adapter"):
        load(base, adapter=adapter).export(tmp_path / "out", "merged")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_the_scorer_goes_along(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "lora", target_modules=["q_proj"])
    lm = load(tiny_folder, attention="bidir", adapter=adapter)
    projection_DD = np.random.default_rng(0).normal(size=(lm.dimensions, lm.dimensions)).astype(np.float32)
    lm.scorer = DualScorer(lm, ScorerConfig(prefix="p ", similarity="cosine"), projection_DD)
    lm.save(tmp_path / "scorer")
    wanted = lm.score(["the cat"], [[" sat", " in"]], scorer="own")
    lm.export(tmp_path / "merged", "merged")
    converted(tmp_path / "scorer", tmp_path / "converted")
    converted(tmp_path / "scorer", tmp_path / "other", attention="causal")
    for name in ("merged", "converted"):
        found = load(tmp_path / name).score(["the cat"], [[" sat", " in"]], scorer="own")
        assert found[0] == pytest.approx(wanted[0], abs=1e-4), name
    # It was trained for another encoder config.
    assert load(tmp_path / "other").scorer is None


def count_layers(lm: gerund.LanguageModel, folder: Path) -> str:
    """Export the number of layers, as a format of another package."""
    (folder / "layers").write_text(str(lm.n_layers))
    return "open('layers').read()"


def test_a_format_of_another_package(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[gerund.exporters]\nlayers = {__name__}:count_layers\n")
    monkeypatch.syspath_prepend(tmp_path)
    lm = load(tiny_folder)
    assert lm.export(tmp_path / "out", "layers").load == "open('layers').read()"
    assert (tmp_path / "out" / "layers").read_text() == str(lm.n_layers)
    with pytest.raises(ConfigError, match="layers"):
        lm.export(tmp_path / "other", "lay")


@pytest.mark.parametrize("format", ["merged", "sentence-transformers"])
def test_existing_output(tiny_folder: Path, tmp_path: Path, format: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    lm = load(tiny_folder, k=2)
    with pytest.raises(OutputExistsError):
        lm.export(tmp_path / "out", format)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    lm.export(tmp_path / "out", format, overwrite=True)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "mine").exists()


@pytest.mark.parametrize("format", ["merged", "sentence-transformers"])
def test_full_disk(tiny_folder: Path, tmp_path: Path, format: str, monkeypatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "flush_folder", full)
    with pytest.raises(ResourceError, match="No space left on device"):
        load(tiny_folder, k=2).export(tmp_path / "out", format)
    assert list(tmp_path.iterdir()) == []


def test_unknown_format(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="unknown format 'tflite'; valid are: sentence-transformers, multi-vector, merged, onnx, ",
    ):
        load(tiny_folder).export(tmp_path / "out", "tflite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["onnx", "openvino", "gguf"])
def test_without_its_library(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == format else find(name, *a))
    with pytest.raises(MissingDependencyError, match=rf"needs {format}.*pip install 'gerund\[{format}\]'"):
        load(tiny_folder).export(tmp_path / "out", format)
    assert f"'gerund[{format}]'" in run_cli("export", tiny_folder, tmp_path / "out", "--format", format).mistake


@pytest.mark.sweep(quick=2, check=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_converting_copies_every_byte(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    base = save_tiny(tmp_path / "base", tie_word_embeddings=tied)
    AutoModelForCausalLM.from_pretrained(base, dtype=dtype).save_pretrained(base)
    lm = converted(base, tmp_path / "out", attention="mask0+bidir", k=3, k0=1, prompt="Q: ")
    for path in base.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*(p.name for p in base.iterdir()), *OURS}
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(base))
    again = gerund.load(tmp_path / "out")
    assert again.encoder == lm.encoder
    assert again.fingerprint() == lm.fingerprint()
    assert again.fingerprint() in (tmp_path / "out" / "gerund.json").read_text()


def test_converting_a_model_in_several_files(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(base)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="40KB")
    shards = {path.name for path in base.glob("*.safetensors")}
    assert len(shards) > 1
    converted(base, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == shards
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(base))


@pytest.mark.slow
def test_converting_twice_keeps_what_is_not_changed(tiny_folder: Path, tmp_path: Path) -> None:
    converted(tiny_folder, tmp_path / "one", attention="bidir", pooling="last", prompt="Q: ")
    converted(tmp_path / "one", tmp_path / "two", prompt="R: ")
    one, two = (load(tmp_path / name).encoder for name in ("one", "two"))
    assert two == replace(one, prompt="R: ")


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_converting_with_an_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "lora")
    lm = converted(tiny_folder, tmp_path / "one", adapter=adapter)
    shutil.rmtree(adapter)
    converted(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        again = load(tmp_path / name)
        assert np.array_equal(again.encode(TEXTS), lm.encode(TEXTS))
        assert again.fingerprint() == lm.fingerprint()
        assert torch.equal(plain_logits(tmp_path / name), plain_logits(tiny_folder))
