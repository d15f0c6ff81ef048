"""What embeds without torch gives the vectors of the same packed model under torch."""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gerund
from gerund import ModelSpec, light_entry
from gerund.cli.search import open_existing
from gerund.errors import MissingDependencyError, UnsupportedModelError
from gerund.inference.encode import packed_runtime
from gerund.light_entry import light_model
from gerund.light_model import LightModel
from gerund.retrieval.documents import Document
from tests.packed.test_light import TORCH, run

TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "once upon a time there was a dog in the garden and it barked",
    "naïve café",
]


def light_of(path: Path, **settings: Any) -> LightModel:
    found = light_model(ModelSpec.of(path, runtime="packed", **settings))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention": "causal", "pooling": "last", "append_eos": True},
        {"attention": "bidir", "pooling": "first+max", "prompt": "the cat: "},
        {"attention": "mask0-bidir", "k": 1, "pooling": "weighted-mean", "transform": "truncate-8"},
        {"attention": "echo", "pooling": "mean-sqrt", "max_length": 12},
        {"attention": "bidir", "exit_layer": 1, "normalize": False, "pool_prompt": True, "prompt": "a "},
    ],
)
def test_vectors_are_those_under_torch(file: Path, settings: dict[str, Any]):
    light, lm = light_of(file, **settings), gerund.load(file, runtime="packed", **settings)
    own, other = light.encode_with_usage(TEXTS), lm.encode_with_usage(TEXTS)
    np.testing.assert_allclose(own.vectors, other.vectors, atol=1e-5)
    assert (own.token_counts, own.truncated) == (other.token_counts, other.truncated)
    assert (light.fingerprint(), light.space, light.dimensions) == (lm.fingerprint(), lm.space, lm.dimensions)
    assert light.fingerprint(4) == lm.fingerprint(4)
    assert (light.spec, light.max_length, light.encoder) == (lm.spec, lm.max_length, lm.encoder)
    assert light.fusion_weight == lm.fusion_weight


def test_an_adapter_that_was_trained_to_infill_is_known_without_torch(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    light = light_of(file)
    assert light.fills_gaps is gerund.load(file, runtime="packed").fills_gaps is False
    record = {"recipe": {"objectives": [{"kind": "distill"}, {"kind": "msg"}]}}
    (tmp_path / "training.json").write_text(json.dumps(record), encoding="utf-8")
    bundle = SimpleNamespace(folder=tmp_path, fits_tokens=lambda _: True)
    monkeypatch.setattr(light_entry, "bundled_for", lambda *_: bundle)
    trained = light_of(file)
    assert trained.fills_gaps
    assert light._full is trained._full is None, "neither asked the model of torch"


def test_tokens_words_and_spans_too(file: Path):
    light, lm = light_of(file), gerund.load(file, runtime="packed")
    for own, other in zip(light.encode_tokens(TEXTS), lm.encode_tokens(TEXTS), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    spans = [[(0, 3), (4, 11)], [(0, 5)], [], [(0, 4)]]
    for own, other in zip(light.encode_spans(TEXTS, spans), lm.encode_spans(TEXTS, spans), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    np.testing.assert_allclose(light.similarity(TEXTS, TEXTS[:2]), lm.similarity(TEXTS, TEXTS[:2]), atol=1e-5)
    assert light.encode_query(TEXTS[0], precision="ubinary").dtype == np.uint8


def test_a_text_does_not_depend_on_its_batch(file: Path):
    light = light_of(file, attention="bidir")
    together = light.encode(TEXTS, batch_size=4)
    alone = np.stack([light.encode(text) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_layer_that_reads_otherwise_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch):
    light = light_of(file, attention="bidir")
    real = packed_runtime.moved_by_layer
    monkeypatch.setattr(packed_runtime, "moved_by_layer", lambda *given: real(*given) * np.tri(3))
    with pytest.raises(UnsupportedModelError, match="layer 0 of this llama model"):
        packed_runtime.verify(light.network, light.runtime.plan)


def test_what_needs_torch_is_left_to_it(file: Path):
    for settings in (
        {"layers": "all"},
        {"attention": "inter-bidir"},
        {"dtype": "float32"},
        {"transform": "whitening"},
    ):
        assert light_model(ModelSpec.of(file, **settings)) is None, settings
    light = light_of(file)
    scores = [model.score(["the cat"], [["sat", "ran"]]) for model in (light, gerund.load(file, runtime="packed"))]
    np.testing.assert_allclose(*scores)
    other = light_of(file)
    assert not hasattr(other, "nothing")
    assert copy.copy(other).network is other.network
    assert other._full is None, "neither asked the model of torch"


def test_an_installation_without_torch_works(file: Path, tmp_path: Path):
    light = light_of(file)
    light.generate("the cat", 2)  # its graph and tokenizer are in the cache now, which transformers has made
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    index, ask = tmp_path / "my.index", ["ask", tmp_path / "my.index", "Where was the dog?", "--json"]
    commands = [
        ["generate", "the cat", "-m", file, "--max-new-tokens", 6],
        ["embed", tmp_path / "texts.txt", "-m", file, "-o", tmp_path / "out.npy", "--json"],
        ["index", tmp_path / "texts.txt", "-m", file, "-o", index, "--chunk-tokens", 32],
        ["search", index, "dog", "--json"],
        [*ask, "--extractive"],
        [*ask, "--generate", "--max-new-tokens", 4, "--no-fallback", "-k", 1],
        ["search", index, "dog", "--rerank", 2, "--json"],
        ["search", index, "dog", "--rerank", 2, "--rerank-by", "yesno"],
    ]
    found_by, _, said = run(*((words, "") for words in commands), missing=TORCH)
    written, embedded, _, found, quoted, generated, ranked, _ = found_by
    hits = [hit.to_dict() for hit in gerund.open_index(index).search("dog")]
    assert [json.loads(line)["text"] for line in found.splitlines()] == [hit["text"] for hit in hits]
    assert {json.loads(line)["text"] for line in ranked.splitlines()} == {hit["text"] for hit in hits}
    assert json.loads(quoted)["method"] == "extractive"
    assert json.loads(quoted)["found"]
    assert json.loads(generated)["method"] == "generate"
    assert "this needs torch and transformers, which are not installed" in said
    assert "Traceback" not in said
    assert written == "the cat" + light.generate("the cat", 6)[0].text + "\n"
    assert json.loads(embedded)["fingerprint"] == light.fingerprint()
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), light.encode(TEXTS), atol=1e-6)


def test_an_index_is_searched_by_the_runtime_that_starts_sooner(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    index, given = str(tmp_path / "my.index"), []
    made = gerund.open_index(index, ModelSpec.of(file, runtime="torch"))
    made.add_documents([Document(f"{place}.txt", text) for place, text in enumerate(TEXTS)])
    about = made.store.about()
    assert about is not None
    monkeypatch.setattr("gerund.retrieval.index.load_encoder", lambda spec: given.append(spec.runtime) or made.encoder)

    def runtime(spec: ModelSpec, *, space: str, **how: Any) -> str:
        monkeypatch.setattr("gerund.retrieval.index.demand_index", lambda _: replace(about, space=space))
        assert open_existing(index, spec, **how).encoder is made.encoder
        return given[-1]

    own = ModelSpec()
    assert runtime(own, space="") == "torch", "vectors of two runtimes share no space unless they declare one"
    assert runtime(own, space="of-a-head") == "auto"
    assert runtime(own, space="of-a-head", reads_much=True) == "torch"
    assert runtime(ModelSpec(runtime="packed"), space="of-a-head") == "packed"


def test_torch_that_cannot_be_imported_is_not_called_missing(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(gerund, "entry")
    monkeypatch.setitem(sys.modules, "gerund.entry", None)
    with pytest.raises(MissingDependencyError, match="cannot be imported"):
        light_entry.load(tiny_folder)


def test_what_is_missing_is_said(tiny_folder: Path, tmp_path: Path):
    (tmp_path / "texts.txt").write_text("a\n")
    command = ["embed", tmp_path / "texts.txt", "-m", tiny_folder, "-o", tmp_path / "out.npy"]
    _, _, said = run((command, ""), missing=TORCH)
    assert "torch and transformers, which are not installed" in said
    assert "Traceback" not in said
