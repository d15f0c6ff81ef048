"""What onnxruntime makes of an exported graph is what gerund makes of the model."""

import importlib.util
import json
import re
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import gerund
from gerund import LanguageModel
from gerund.errors import ConfigError, ModelError, OutputExistsError
from gerund.exporting import onnx as exporting
from gerund.exporting.onnx import Prepared
from gerund.exporting.shared import Export, plain_tokenizer
from gerund.models.heads import ProjectionHead, WordVectors
from gerund.models.light_head import HeadConfig
from tests.tiny import save_tiny

TEXTS = ["the cat sat on the mat", "a", "in the beginning there was another thing that", "zürich 数据库"]
FIND_SPEC = importlib.util.find_spec
pytestmark = pytest.mark.skipif(
    any(FIND_SPEC(name) is None for name in ("onnx", "onnxscript", "onnxruntime")), reason="ONNX is not installed"
)


def readme_vectors(folder: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, begin: int | None = None):
    """Run the README's own program on other texts."""
    [program] = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    program = program.replace('["a text", "another one"]', repr(texts))
    if begin is not None:
        program = re.sub(r"begin = \d+", f"begin = {begin}", program)
    names: dict[str, object] = {}
    monkeypatch.chdir(folder)
    exec(program, names)
    return names["vectors"]


def check_vectors(lm: LanguageModel, folder: Path, settings_file: str, monkeypatch: pytest.MonkeyPatch) -> dict:
    """Compare what the README's program computes with gerund's vectors, and return where each prompt ends."""
    begins = json.loads((folder / settings_file).read_text())["pooled_from"]
    for prompt, begin in (("", begins[""]), ("Q:", begins["query"])):
        for texts in (TEXTS, ["a"]):  # one text of one token: no dimension was taken for a constant
            found = readme_vectors(folder, [prompt + text for text in texts], monkeypatch, begin)
            np.testing.assert_allclose(found, lm.encode(texts, prompt=prompt), atol=1e-5)
    return begins


def check_finds_mistakes(
    check: Callable[[Prepared, Path], object], runtime: str, folder: Path, begins: dict[str, int], graph: Path
) -> Prepared:
    """Hold a graph beside a model that is read otherwise, and the model beside a file that is no graph."""
    other = gerund.load(folder, attention="bidir", dtype="float32").runtime
    prepared = Prepared(other, plain_tokenizer(other), {"": begins[""], "Q:": begins["query"]})
    with pytest.raises(ModelError, match=f"{runtime} computes other vectors than gerund"):
        check(prepared, graph)
    broken = graph.with_stem("broken")
    broken.write_bytes(b"x")
    with pytest.raises(ModelError, match=f"{runtime} refuses its graph"):
        check(prepared, broken)
    broken.unlink()
    return prepared


@pytest.mark.slow
def test_vectors(
    two_layers: Path, prompted: LanguageModel, onnx_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, out = prompted, onnx_export.folder
    assert onnx_export.load == f"onnxruntime.InferenceSession({str(out / 'model.onnx')!r})"
    begins = check_vectors(lm, out, "onnx.json", monkeypatch)
    left = {"model.onnx", "onnx.json", "README.md", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == left
    # The same graph in eight bits.
    eight = shutil.copytree(out, tmp_path / "eight")
    exporting.quantize(eight / "model.onnx")
    assert {path.name for path in eight.iterdir()} == left
    found = readme_vectors(eight, TEXTS, monkeypatch, begins[""])
    cosines = (found * lm.encode(TEXTS)).sum(1) / np.linalg.norm(found, axis=1)
    assert 0.98 < cosines.min() < 0.9999999
    assert (eight / "model.onnx").stat().st_size < 0.8 * (out / "model.onnx").stat().st_size
    prepared = check_finds_mistakes(exporting.check, "onnxruntime", two_layers, begins, out / "model.onnx")
    with pytest.raises(ModelError, match="onnxruntime refuses its graph"):
        exporting.check(replace(prepared, begins={"": 0}), out / "model.onnx")


def test_what_torch_cannot_export(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise RuntimeError("no such\noperator")

    monkeypatch.setattr("torch.onnx.export", fail)
    with pytest.raises(ModelError, match=r"cannot export this llama model to ONNX \(RuntimeError: no such operator\)"):
        gerund.load(tiny_folder).export(tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_a_normalization_that_transformers_loses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, architecture: str
) -> None:
    for step in ("require_installed", "write_graph", "check", "translate", "check_openvino"):
        monkeypatch.setattr(exporting, step, lambda *_: None)
    # transformers adds a token to Qwen2's, which needs a row.
    lm = gerund.load(save_tiny(tmp_path / "base", architecture, vocab_size=512))
    lm.export(tmp_path / "out", name)
    # transformers makes Qwen2's tokenizer anew, from the vocabulary alone.
    loses = AutoTokenizer.from_pretrained(tmp_path / "out")("e\ufb01x").input_ids != lm.tokenizer("efix").input_ids
    says = "`AutoTokenizer` reads it without that" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert (loses, says) == (architecture == "qwen2",) * 2


def test_refusals(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'echo' reads a text twice"):
        gerund.load(tiny_folder, attention="echo").export(tmp_path / "out", "onnx")
    lm = gerund.load(tiny_folder, k=2)
    fused = LanguageModel(lm.model, lm.tokenizer, replace(lm.encoder, prompts={"query": "Say t"}))
    doubled = LanguageModel(lm.model, lm.tokenizer, replace(lm.encoder, prompts={"query": "<s>Say: "}))
    with pytest.raises(ConfigError, match="the prompt '<s>Say: ' begins with the token that starts every text"):
        doubled.export(tmp_path / "out", "onnx")
    with pytest.raises(ConfigError, match="the prompt 'Say t' can reach into the text"):
        fused.export(tmp_path / "out", "onnx")
    recurrent = gerund.load(save_tiny(tmp_path / "base", "mamba2"), attention="causal")
    with pytest.raises(ConfigError, match="this mamba2 model has recurrent layers"):
        recurrent.export(tmp_path / "out", "onnx")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    with pytest.raises(OutputExistsError):
        lm.export(tmp_path / "out", "onnx")


@pytest.mark.full  # torch takes a minute for a model of this size; random vectors of words are tried above
def test_the_bundled_model(bundled: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundled.export(tmp_path / "out", "onnx")
    texts = ["The Cameron Hawkes flew over words; the end.", "NAIVE cafe 3.5 times, don't", "unbelievably"]
    found = readme_vectors(tmp_path / "out", texts, monkeypatch)
    assert found.shape == (3, bundled.dimensions)
    np.testing.assert_allclose(found, bundled.encode(texts), atol=5e-3)  # bfloat16 beside float32


@pytest.mark.parametrize("word_bytes", [None, 4])
def test_vectors_of_words(tmp_path: Path, word_bytes: int | None) -> None:
    tokenizer = gerund.load().tokenizer
    words = head_with_words(tokenizer, TEXTS[:3], word_bytes=word_bytes).words
    assert words is not None
    read = tokenizer([*TEXTS[:2], "unknown"], return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = (read.input_ids, read.attention_mask)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(words, inputs, tmp_path / "words.onnx", input_names=["ids", "pooled"], dynamo=True)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(tmp_path / "words.onnx")
    feeds = {name: value.numpy() for name, value in zip(("ids", "pooled"), inputs, strict=True)}
    found, wanted = session.run(None, feeds)[0], words(*inputs).numpy()
    assert np.abs(wanted[:2]).max(1).min() > 0.1
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def head_with_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, word_bytes: int | None = None
) -> ProjectionHead:
    """Return a head that has random vectors of tokens, and of the words of some texts."""
    every = WordVectors(len(tokenizer), 1, 1)
    every.read_tokens(tokenizer)
    rows = [tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids for text in texts]
    keys = torch.cat([every.words(ids, torch.ones_like(ids, dtype=torch.bool))[1] for ids in rows]).unique()
    head = ProjectionHead(
        HeadConfig(32, 16, "linear", vocabulary=len(tokenizer), words=len(keys), word_bytes=word_bytes)
    )
    assert head.tokens is not None
    assert head.words is not None
    head.tokens.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    head.words.read_tokens(tokenizer)
    head.words.keys_W.copy_(keys)
    generator = torch.Generator().manual_seed(2)
    if word_bytes is None:
        head.words.values_WE.random_(-127, 128, generator=generator)
        head.words.scales_W.fill_(0.02)
    else:
        head.words.keep(keys, torch.randn(len(keys), 16, generator=generator))
    return head
