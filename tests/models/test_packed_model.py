"""A packed network does everything that torch does with the unpacked weights of the same file, or says that it cannot.

The tiny file's weights are float32, so results agree to rounding; those of the real file are rounded to 8 bits on the
way, as llama.cpp does.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import gerund
from gerund import AttentionPlan, EncoderConfig, GenerationConfig, Sampling
from gerund.attention.probe import verify
from gerund.engine.engine import Engine
from gerund.entry import load_writer
from gerund.errors import ConfigError, FingerprintError, ModelError
from gerund.inference.generate import packed_decoder
from gerund.inference.inspection import attention_maps
from gerund.models import light_runtime
from gerund.models.light_runtime import for_many_texts
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.models.test_gguf_files import write

pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.filterwarnings(warning) for warning in PEFT_WARNINGS]

TEXTS = ["The old man looked at the sea.", "Prices rose.", "naïve café, in the rain"]
ONCE = [
    name for name in gerund.PLAN_NAMES if name != "hybrid" and name.split("-")[0] not in ("inter", "extra", "extend")
]
TWICE = [name for name in gerund.PLAN_NAMES if name.split("-")[0] in ("inter", "extra", "extend")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write(gerund.load(tiny_folder), tmp_path_factory.mktemp("packed") / "tiny.gguf")


@pytest.fixture(scope="module")
def packed(file: Path) -> gerund.LanguageModel:
    return gerund.load(file, attention="mask0-bidir", k=1, runtime="packed")


@pytest.fixture(scope="module")
def torch_(file: Path) -> gerund.LanguageModel:
    return gerund.load(file, attention="mask0-bidir", k=1, runtime="torch", dtype="float32")


def planned(lm: gerund.LanguageModel, name: str, **settings: Any) -> gerund.LanguageModel:
    return lm.with_encoder(EncoderConfig(AttentionPlan(name), **settings))


def test_parameters_are_those_of_the_unpacked_model(packed: gerund.LanguageModel, torch_: gerund.LanguageModel):
    assert packed.n_parameters == torch_.n_parameters
    assert packed.model.num_parameters(only_trainable=True) == 0


def test_taken_by_itself_where_it_can_be(tmp_path: Path, file: Path, tiny_folder: Path):
    plain, file = file, write(gerund.load(tiny_folder), tmp_path / "quantized.gguf", type="q8_0")
    assert load_writer(gerund.ModelSpec.of(file)).spec.runtime == "packed"
    packed = gerund.load(file)
    assert packed.spec.runtime == "packed"
    assert gerund.load(packed.spec).fingerprint() == packed.fingerprint()
    assert gerund.load(plain).spec.runtime == "torch"
    for settings in ({"dtype": "float32"}, {"runtime": "torch"}, {"attention": "extend-back"}, {"skips": 1}):
        assert gerund.load(file, **settings).spec.runtime == "torch"
    assert gerund.load(tiny_folder).spec.runtime == "auto"


@pytest.mark.parametrize("has_bfloat16", [False, True])
def test_many_texts_are_read_by_torch_where_the_processor_has_bfloat16(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
):
    monkeypatch.setattr(light_runtime, "may_have_bfloat16", lambda: has_bfloat16)
    spec = gerund.ModelSpec(model="a.gguf")
    assert for_many_texts(spec).runtime == ("torch" if has_bfloat16 else "auto")
    for given in ({"runtime": "packed"}, {"weights": "int8"}, {"device": "cuda"}):
        chosen = gerund.ModelSpec.of(spec, **given)
        assert for_many_texts(chosen) == chosen


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": "bfloat16"}, "it has no dtype bfloat16"),
        ({"attention": "extra-bidir"}, "plans that run layers twice"),
        ({"attention": "mask0-bidir", "skips": 1}, "plans with skips"),
        ({"attention": "causal", "states": "values"}, r"the attention's parts \(states=values\) are computed by"),
        ({"attention": "causal", "generated": 2}, "states of generated tokens"),
        ({"runtime": "onnx"}, "unknown runtime 'onnx'"),
    ],
)
def test_refused_in_one_sentence(file: Path, settings: dict, why: str):
    with pytest.raises(ConfigError, match=why):
        gerund.load(file, **{"runtime": "packed", **settings})


@pytest.mark.parametrize(("weights", "cosine"), [("int8", 0.999), ("int4", 0.9)])
def test_a_folder_is_quantized_on_loading(
    file: Path, tiny_folder: Path, torch_: gerund.LanguageModel, tmp_path: Path, weights: str, cosine: float
):
    plan = {"attention": "mask0-bidir", "k": 1}
    lm = gerund.load(tiny_folder, weights=weights, **plan)
    assert gerund.load(lm.spec).fingerprint() == lm.fingerprint() != torch_.fingerprint()
    vectors_ND = lm.encode(TEXTS)
    # The same weights in an unquantized file become the same blocks.
    np.testing.assert_allclose(vectors_ND, gerund.load(file, weights=weights, **plan).encode(TEXTS), atol=1e-5)
    exact_ND = torch_.encode(TEXTS)
    assert cosine < (vectors_ND * exact_ND).sum(axis=1).min() < 1 - 1e-7
    assert lm.generate("The old man", max_new_tokens=4)[0].text
    assert (gerund.load(tiny_folder, runtime="packed", **plan).fingerprint() == lm.fingerprint()) == (weights == "int8")
    lm.save(tmp_path / "saved")
    np.testing.assert_allclose(gerund.load(tmp_path / "saved", dtype="float32").encode(TEXTS), exact_ND, atol=1e-4)


def test_a_folders_own_files_are_read(tiny_folder: Path, tmp_path: Path):
    plan = {"attention": "mask0-bidir", "k": 1}
    lm = gerund.load(tiny_folder, weights="int8", **plan)
    copied = shutil.copytree(tiny_folder, tmp_path / "copied")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "transformers_version": "5.99"}))
    assert gerund.load(copied, weights="int8", **plan).fingerprint() == lm.fingerprint()
    (copied / "model.safetensors").rename(copied / "other.safetensors")
    shutil.copy(copied / "other.safetensors", copied / "model.safetensors")
    tensors = load_file(copied / "other.safetensors")
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, copied / "model.safetensors", {"format": "pt"})
    (copied / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    np.testing.assert_array_equal(gerund.load(copied, weights="int8", **plan).encode(TEXTS), lm.encode(TEXTS))
    assert gerund.load(lm.spec, runtime="torch").spec.weights is None
    body = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(body, copied / "model.safetensors", {"format": "pt"})
    untied = {**config, "architectures": ["LlamaModel"], "tie_word_embeddings": False}
    (copied / "config.json").write_text(json.dumps(untied))
    with pytest.raises(ConfigError, match=r"cannot be used for .*: it was saved without an output head"):
        gerund.load(copied, weights="int8", **plan)


def test_weights_that_cannot_be_quantized(tiny_folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="weights int8 are for runtime packed"):
        gerund.load(tiny_folder, weights="int8", runtime="torch")
    with pytest.raises(ConfigError, match="int3"):
        gerund.load(tiny_folder, weights="int3")
    quantized = write(gerund.load(tiny_folder), tmp_path / "quantized.gguf", type="q8_0")
    with pytest.raises(ConfigError, match="its weights are quantized already; leave out weights int4"):
        gerund.load(quantized, weights="int4")


@pytest.mark.parametrize("name", ONCE)
def test_vectors_under_each_plan(packed: gerund.LanguageModel, torch_: gerund.LanguageModel, name: str):
    own, other = planned(packed, name), planned(torch_, name)
    vectors = own.encode(TEXTS)
    np.testing.assert_allclose(vectors, other.encode(TEXTS), atol=1e-4)
    np.testing.assert_allclose(vectors, np.concatenate([own.encode([text]) for text in TEXTS]), atol=1e-6)


@pytest.mark.parametrize("settings", [{"exit_layer": 2}, {"exit_layer": 3, "layers": "1+3"}, {"layers": "1+2"}])
@pytest.mark.parametrize("name", ["causal", "mask0-all"])
def test_vectors_of_the_lower_layers(
    packed: gerund.LanguageModel, torch_: gerund.LanguageModel, name: str, settings: dict
):
    own, other = planned(packed, name, **settings), planned(torch_, name, **settings)
    np.testing.assert_allclose(own.encode(TEXTS), other.encode(TEXTS), atol=1e-4)
    maps, others = (attention_maps(lm.model, [1, 5, 9], lm.runtime.pass_plan) for lm in (own, other))
    assert len(maps) == len(others) == len(own.runtime.pass_plan.views)
    for one, two in zip(maps, others, strict=True):
        np.testing.assert_allclose(one.weights, two.weights, atol=1e-4)


@pytest.mark.parametrize("name", TWICE)
def test_plans_that_run_layers_twice_are_refused(packed: gerund.LanguageModel, name: str):
    with pytest.raises(ConfigError, match="runtime='torch'"):
        planned(packed, name).encode(TEXTS)


@pytest.mark.parametrize(
    "work",
    [
        lambda lm: [one.text for one in lm.generate(TEXTS, 8)],
        lambda lm: [lm.generate(text, 8)[0].text for text in TEXTS],
        lambda lm: [one.text for one in lm.generate("The old", 8, Sampling(temperature=1.0, seed=3), n=3)],
        lambda lm: "".join(lm.stream("The old man", 8)),
        lambda lm: lm.generate("The", 8, choice=["a sea", "the rain"])[0].text,
        lambda lm: lm.infill("The old [blank] looked at the sea.", lengths=[1, 2, 3]).text,
        lambda lm: lm.infill("The old [blank] looked.", lengths=[2], method="left-only").text,
        lambda lm: lm.prefill("The old man").generate(8).text,
        lambda lm: lm.prefill("The old man").prefill([5, 6, 7]).generate(8).text,
        lambda lm: planned(lm, "causal").encode_and_prefill("The old man")[1].generate(8).text,
        lambda lm: lm.rerank("the sea", TEXTS, by="likelihood").indices,
        lambda lm: lm.generate("The old man", 6, rerank=gerund.Rerank(samples=3), seed=1)[0].text,
    ],
)
def test_same_texts(packed: gerund.LanguageModel, torch_: gerund.LanguageModel, work: Callable[[Any], Any]):
    assert work(packed) == work(torch_)


@pytest.mark.parametrize(
    "work",
    [
        lambda lm: [one.logprob for one in lm.generate("The old man", 6, logprobs=2)[0].logprobs],
        lambda lm: np.concatenate(lm.encode_tokens(TEXTS)),
        lambda lm: np.concatenate(lm.encode_words([["The", "old", "man"]])),
        lambda lm: lm.score(["The old"], [[" man", " sea"]])[0],
        lambda lm: planned(lm, "causal", layers="1+2").encode(TEXTS),
        lambda lm: planned(lm, "causal", reroute="1").encode(TEXTS),
        lambda lm: [one.weights.mean(0).numpy() for one in attention_maps(lm.model, [1, 5, 9, 7], lm.runtime.plan)],
    ],
)
def test_same_numbers(packed: gerund.LanguageModel, torch_: gerund.LanguageModel, work: Callable[[Any], Any]):
    np.testing.assert_allclose(work(packed), work(torch_), atol=1e-3)


def test_a_session_is_saved_and_loaded_by_its_runtime_alone(
    packed: gerund.LanguageModel, torch_: gerund.LanguageModel, tmp_path: Path
):
    session = packed.prefill("The old man")
    session.save(tmp_path / "kept")
    assert gerund.Session.load(tmp_path / "kept", packed).generate(8).text == session.generate(8).text
    with pytest.raises(FingerprintError):
        gerund.Session.load(tmp_path / "kept", torch_)


def test_an_engine_gives_the_same_texts_under_any_load(packed: gerund.LanguageModel):
    prompts = [*TEXTS, "The old man looked at the", "x" * 40]
    with Engine(packed, gerund.EngineConfig(slots=3)) as engine:
        found = [engine.submit_generate(prompt, GenerationConfig(6)) for prompt in prompts]
        assert [one.result()[0].text for one in found] == [packed.generate(prompt, 6)[0].text for prompt in prompts]
        assert engine.state().guarantee != "none"
        assert engine.state().context, "sequences are decoded together, in slots"


def test_slots_that_shrink_and_grow_again(packed: gerund.LanguageModel, monkeypatch: pytest.MonkeyPatch):
    for name in ("_SLOTS", "_SLOTS_MORE"):
        monkeypatch.setattr(packed_decoder, name, 8)
    prompts = [
        "The old",
        "The old man looked at the sea, and then he",
        "A cat",
        "Bread is made of flour and salt and yeast",
    ]
    with Engine(packed, gerund.EngineConfig(slots=2)) as engine:
        assert engine.state().guarantee != "none"
        for prompt in prompts * 2:
            [found] = engine.submit_generate(prompt, GenerationConfig(6)).result()
            assert found.text == packed.generate(prompt, 6)[0].text


def test_the_probe_finds_a_graph_that_ignores_a_mask(file: Path, monkeypatch: pytest.MonkeyPatch):
    lm = gerund.load(file, attention="causal", runtime="packed")
    network = lm.model.base_model.network
    run = network.run

    def ignoring(*args: Any, mask_of_layer_L: Any = None, **kwargs: Any) -> Any:
        if mask_of_layer_L is not None:
            mask_of_layer_L = [*mask_of_layer_L[:-1], 0]
        return run(*args, mask_of_layer_L=mask_of_layer_L, **kwargs)

    monkeypatch.setattr(network, "run", ignoring)
    with pytest.raises(ModelError, match="layer 3"):
        verify(lm.model, AttentionPlan("bidir").resolve(lm.n_layers))


def test_weights_are_unpacked_to_be_saved(packed: gerund.LanguageModel, tmp_path: Path):
    packed.save(tmp_path / "saved")
    saved = gerund.load(tmp_path / "saved", dtype="float32")
    np.testing.assert_allclose(saved.encode(TEXTS), packed.encode(TEXTS), atol=1e-4)
    with pytest.raises(ConfigError, match="load it with runtime='torch'"):
        packed.model.state_dict()


def test_an_adapter_is_computed_or_left_to_torch(file: Path, tiny_folder: Path, tmp_path: Path):
    adapter = make_adapter(tiny_folder, tmp_path / "adapter")
    own = gerund.load(file, adapter=adapter, runtime="packed")
    other = gerund.load(file, adapter=adapter, runtime="torch", dtype="float32")
    assert np.abs(own.encode(TEXTS) - gerund.load(file, runtime="packed").encode(TEXTS)).max() > 0.01
    np.testing.assert_allclose(own.encode(TEXTS), other.encode(TEXTS), atol=1e-4)
    filled = [lm.infill("The old [blank] looked.", lengths=[2]).text for lm in (own, other)]
    assert filled[0] == filled[1]
    both = {"adapter": adapter, "infill_adapter": make_adapter(tiny_folder, tmp_path / "b", target_modules=["o_proj"])}
    own = gerund.load(file, **both, runtime="packed")
    other = gerund.load(file, **both, runtime="torch", dtype="float32")
    np.testing.assert_allclose(own.encode(TEXTS), other.encode(TEXTS), atol=1e-4)
    span = ("The old", " man", " looked.")
    np.testing.assert_allclose(own.span_logprobs(*span), other.span_logprobs(*span), atol=1e-4)
    plain = gerund.load(file, runtime="packed")
    assert np.abs(np.subtract(own.span_logprobs(*span), plain.span_logprobs(*span))).max() > 1e-3
    assert own.generate("The old", max_new_tokens=8)[0].text == plain.generate("The old", max_new_tokens=8)[0].text
    dora = make_adapter(tiny_folder, tmp_path / "dora", use_dora=True)
    with pytest.raises(ConfigError, match="use_dora, which is not run packed"):
        gerund.load(file, adapter=dora, runtime="packed")
