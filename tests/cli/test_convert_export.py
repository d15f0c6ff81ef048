"""``gerund convert`` and ``gerund export``."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, EncoderConfig
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
IDS = torch.arange(3, 20)[None]


def load(folder: Path, **options) -> gerund.LanguageModel:
    return gerund.load(folder, **{"dtype": "float32", **options})


@torch.no_grad()
def plain_logits(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder)(IDS).logits


def test_convert(tiny_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "my encoder"
    ran = run_cli("convert", tiny_folder, out)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        f"{out}: llama, 4 layers, mask0-bidir k=2, mean pooling",
        f"try: gerund embed texts.txt -m '{out}' -o vectors.parquet",
    ]
    assert (out / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
    assert torch.equal(plain_logits(out), plain_logits(tiny_folder))
    assert np.array_equal(load(out).encode(TEXTS), load(tiny_folder).encode(TEXTS))


def test_convert_with_a_fitted_transform_and_a_template(tiny_folder: Path, tmp_path: Path) -> None:
    sample = tmp_path / "texts.txt"
    sample.write_text("\n".join(f"{one} {other}" for one in "abcdefgh" for other in "stuvwxyz"), encoding="utf-8")
    how = ["--attention", "causal", "--template", "Say {text}!", "--layers", "2-4", "--pool-bos", "never"]
    ran = run_cli("convert", tiny_folder, tmp_path / "out", *how, "--transform", "whitening-8", "--sample", sample)
    assert (ran.code, ran.err) == (0, "")
    lm = load(tmp_path / "out")
    assert (lm.encoder.template, lm.encoder.layers, lm.encoder.pool_bos) == ("Say {text}!", "2-4", "never")
    settings = dict(attention="causal", template="Say {text}!", layers="2-4", pool_bos="never", transform="whitening-8")
    own = load(tiny_folder, **settings).fitted(sample.read_text(encoding="utf-8").splitlines())
    assert np.array_equal(lm.encode(TEXTS), own.encode(TEXTS))
    assert lm.encode(TEXTS).shape == (3, 8)
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(tiny_folder))


def test_convert_with_every_option(tiny_folder: Path, tmp_path: Path) -> None:
    plan = ["--attention", "mask0+bidir", "--k", 3, "--k0", 1, "--sink-tokens", 2]
    encoder = ["--pooling", "last", "--prompt", "Represent this: ", "--max-length", 33, "--append-eos"]
    ran = run_cli("convert", tiny_folder, tmp_path / "out", *plan, *encoder, "--json")
    found = json.loads(ran.out)
    lm = load(tmp_path / "out")
    assert found == {
        "folder": str(tmp_path / "out"),
        "attention": "mask0+bidir",
        "k": 3,
        "k0": 1,
        "pooling": "last",
        "fingerprint": lm.fingerprint(),
    }
    wanted = AttentionPlan("mask0+bidir", k=3, k0=1, sink_tokens=2)
    assert lm.encoder == EncoderConfig(
        wanted, pooling="last", prompt="Represent this: ", max_length=33, append_eos=True
    )


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_convert_and_export_with_an_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "lora")
    wanted = load(tiny_folder, adapter=adapter).encode(TEXTS)
    assert run_cli("convert", tiny_folder, tmp_path / "out", "--adapter", adapter).code == 0
    shutil.rmtree(adapter)
    assert np.array_equal(load(tmp_path / "out").encode(TEXTS), wanted)
    assert torch.equal(plain_logits(tmp_path / "out"), plain_logits(tiny_folder))
    ran = run_cli("export", tmp_path / "out", tmp_path / "merged", "--format", "merged")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[-1] == f"load it with: gerund.load({str(tmp_path / 'merged')!r})"
    np.testing.assert_allclose(load(tmp_path / "merged").encode(TEXTS), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_merging_the_adapter_of_a_converted_folder(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "lora")
    run_cli("convert", tiny_folder, tmp_path / "out", "--adapter", adapter, "--k", 1)
    wanted = load(tmp_path / "out").encode(TEXTS)
    ran = run_cli("convert", tmp_path / "out", tmp_path / "out", "--merge", "--force")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[0] == f"{tmp_path / 'out'}: llama, 4 layers, mask0-bidir k=1, mean pooling"
    assert not (tmp_path / "out" / "adapter").exists()
    np.testing.assert_allclose(load(tmp_path / "out").encode(TEXTS), wanted, atol=1e-5)


def test_merging_without_an_adapter(tiny_folder: Path, tmp_path: Path) -> None:
    ran = run_cli("convert", tiny_folder, tmp_path / "out", "--merge")
    assert ran.mistake == "--merge writes an adapter into the weights and this model has none; give --adapter FOLDER"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_export_for_sentence_transformers(tiny_folder: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    plain, own = tmp_path / "plain", tmp_path / "own"
    ran = run_cli("export", tiny_folder, plain, "--format", "sentence-transformers", "--attention", "bidir")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines() == [
        f"{plain}: sentence-transformers",
        f"load it with: sentence_transformers.SentenceTransformer({str(plain)!r})",
    ]
    vectors = library.SentenceTransformer(str(plain), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(vectors, load(tiny_folder, attention="bidir").encode(TEXTS), atol=1e-5)

    ran = run_cli("export", tiny_folder, own, "--format", "sentence-transformers", "--k", 1)
    assert ran.out.splitlines() == [
        f"{own}: sentence-transformers",
        "plain sentence-transformers cannot read it: sentence-transformers has no attention plan 'mask0-bidir'",
        f"load it with: gerund.integrations.sentence_transformers.load({str(own)!r})",
    ]
    ran = run_cli("export", tiny_folder, own, "--format", "sentence-transformers", "--k", 1, "--force", "--json")
    assert json.loads(ran.out)["why"].startswith("sentence-transformers has no attention plan")


@pytest.mark.parametrize("command", [["convert"], ["export", "--format", "merged"]])
def test_existing_output(tiny_folder: Path, tmp_path: Path, command: list[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    assert "exists already" in run_cli(*command, tiny_folder, out).mistake
    assert (out / "mine").exists()
    assert run_cli(*command, tiny_folder, out, "--force").code == 0
    assert not (out / "mine").exists()
    assert "not a folder" in run_cli(*command, tiny_folder, out / "config.json", "--force").mistake


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--attention", "both"], "unknown attention plan 'both'; valid are: causal, bidir"),
        (["--attention", "hybrid"], "hybrid"),
        (["--k", "5"], "k=5 is larger than the model's 4 layers"),
        (["--adapter", "absent"], "is not an adapter folder"),
    ],
)
@pytest.mark.parametrize("command", [["convert"], ["export", "--format", "merged"]])
def test_mistakes(tiny_folder: Path, tmp_path: Path, command: list[str], arguments: list[str], says: str) -> None:
    assert says in run_cli(*command, tiny_folder, tmp_path / "out", *arguments).mistake
    assert list(tmp_path.iterdir()) == []


def test_a_transform_without_a_sample(tiny_folder: Path, tmp_path: Path) -> None:
    found = run_cli("convert", tiny_folder, tmp_path / "out", "--transform", "whitening").mistake
    assert found.startswith("the transform 'whitening' is fitted on texts like those that will be encoded")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_a_model_named_by_its_hub_id(tiny_folder: Path, tmp_path: Path, monkeypatch) -> None:
    """From a cache as the hub client keeps it, without a network."""
    adapter = make_adapter(tiny_folder, tmp_path / "lora")
    run_cli("convert", tiny_folder, tmp_path / "one", "--attention", "inplace-back", "--adapter", adapter)
    repository = tmp_path / "hub" / "models--some--model"
    shutil.copytree(tmp_path / "one", repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    ran = run_cli("convert", "some/model", tmp_path / "two", "--json")
    assert (ran.code, ran.err) == (0, "")
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert two.encoder == one.encoder
    assert two.encoder.attention.name == "inplace-back"
    assert json.loads(ran.out)["fingerprint"] == one.fingerprint() == two.fingerprint()
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (tiny_folder / "model.safetensors").read_bytes()
