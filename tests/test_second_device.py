"""Every verb, and a training step, with the model on a second device: no tensor is made on the wrong one.

The numbers are those of the CPU, so that what is compared has gone all the way. See ``tests/second_device.py`` for
what plays the second device.
"""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund.engine.batching import Stepwise
from gerund.engine.engine import Engine
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.scoring.dual_encoder import DualScorer, ScorerConfig
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.step import StepData, TrainingModule, run_step
from gerund.training.trainable_model import prepare_model
from tests.second_device import DEVICE, Elsewhere, SecondDevice, WrongDeviceError
from tests.tiny import save_tiny, save_tiny_t5

TEXTS = ["a quiet harbour", "the old man looked at the sea", "rain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("second") / "model", "llama")


@pytest.fixture
def open_model(folder, monkeypatch):
    # The CPU's own arithmetic would be compared with bfloat16, for which the second device has no autocast.
    monkeypatch.setattr("gerund.language_model.choose_autocast", lambda runtime: None)
    return lambda device, **options: gerund.load(folder, device=device, **options)


SAMPLED = gerund.Sampling(
    temperature=1.0, seed=3, top_k=20, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5
)
VERBS = {
    "encode": lambda lm: torch.as_tensor(lm.encode(TEXTS)),
    "encode_tokens": lambda lm: torch.as_tensor(lm.encode_tokens(TEXTS)[1]),
    "encode_words": lambda lm: torch.as_tensor(lm.encode_words([["old", "men"], ["sea"]])[0]),
    "similarity": lambda lm: torch.as_tensor(lm.similarity("harbour", TEXTS)),
    "generate": lambda lm: [made.token_ids for made in lm.generate(TEXTS, max_new_tokens=5)],
    "sample": lambda lm: [made.token_ids for made in lm.generate(TEXTS, max_new_tokens=6, sampling=SAMPLED)],
    "infill": lambda lm: lm.infill("the old man [blank] the sea", max_tokens=4).text,
    "score": lambda lm: torch.as_tensor(lm.score(["the old man"], [[" slept", " ran away"]])[0]),
    "rerank": lambda lm: list(lm.rerank("harbour", TEXTS).indices),
}


# Each kind of plan, and what a pass does beyond its plan.
READINGS = {
    **{name: {"attention": name} for name in ("mask0-bidir", "inter-bidir", "extra-back", "echo")},
    "skips": {"attention": "mask0-bidir", "skips": 1},
    "layers": {"layers": "2-4"},
    "prepend": {"template": "prompteol", "prepend": 3},
    "kv-embedding": {"template": "kv-embedding"},
    "truncated": {"transform": "truncate-8"},
    "last": {"pooling": "last"},
    "whitening": {"transform": "whitening-4"},
}


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("name", READINGS)
def test_encoding_in_every_way(open_model, name):
    sample = [f"{text} {number}" for text in TEXTS for number in range(4)]

    def vectors(device):
        lm = open_model(device, **READINGS[name])
        return VERBS["encode"](lm.fitted(sample) if name == "whitening" else lm)

    expected = vectors("cpu")
    with SecondDevice() as device:
        found = vectors(DEVICE.type)
    assert device.operations > 100
    # Whitening divides by small spreads.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 if name == "whitening" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "bundled"])
def test_verbs(open_model, model, request):
    """The bundled model has an adapter for each job."""
    verbs, near = VERBS, 1e-5
    if model == "bundled":
        request.getfixturevalue("bundled")
        verbs, near = {name: VERBS[name] for name in ("encode", "generate", "infill", "score")}, 1e-4

    def loaded(device):
        return open_model(device) if model == "tiny" else gerund.load(device=device, dtype="float32")

    here = loaded("cpu")
    expected = {name: verb(here) for name, verb in verbs.items()}
    with SecondDevice() as device:
        lm = loaded(DEVICE.type)
        assert all(isinstance(tensor, Elsewhere) for tensor in (*lm.model.parameters(), *lm.model.buffers()))
        found = {}
        for name, verb in verbs.items():
            before = device.operations
            found[name] = verb(lm)
            assert device.operations > before + 50, name
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=near)
        else:
            assert found[name] == value


@pytest.mark.slow
def test_a_head(folder, open_model, tmp_path):
    lm = gerund.load(folder, dtype="float32")
    torch.manual_seed(3)
    lm.save(tmp_path)
    ProjectionHead(HeadConfig(width=lm.dimensions, dimensions=8)).save(tmp_path)
    expected = torch.as_tensor(gerund.load(tmp_path, device="cpu").encode(TEXTS))
    assert expected.shape == (3, 8)
    with SecondDevice():
        found = torch.as_tensor(gerund.load(tmp_path, device=DEVICE.type).encode(TEXTS))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_trained_scorer(open_model):
    def scores(device):
        encoder = open_model(device, attention="causal", pooling="last")
        matrix = np.random.default_rng(0).normal(size=(encoder.dimensions, encoder.dimensions)).astype(np.float32)
        scorer = DualScorer(encoder, ScorerConfig(), matrix)
        grown = scorer.incremental()
        return torch.tensor([
            one.score(["the old man"], [[" slept", " ran away"]])[0] for one in (scorer, grown)
        ])  # fmt: skip

    expected = scores("cpu")
    with SecondDevice():
        found = scores(DEVICE.type)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def same_there(monkeypatch, place, more, near):
    """Compare vectors, and what else a function of the model gives, on the processor and there."""
    monkeypatch.setattr("gerund.language_model.choose_autocast", lambda runtime: None)

    def results(device):
        lm = gerund.load(place, device=device)
        return VERBS["encode"](lm), VERBS["generate"](lm), more(lm)

    vectors, *others = results("cpu")
    with SecondDevice():
        found, *written = results(DEVICE.type)
    torch.testing.assert_close(found, vectors, rtol=0, atol=near)
    assert written == others


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "bamba", "mamba2"])
def test_recurrent_layers(tmp_path, monkeypatch, kind):
    same_there(monkeypatch, save_tiny(tmp_path, kind), lambda lm: None, 1e-4)


@pytest.mark.slow
def test_an_encoder_decoder(tmp_path, monkeypatch):
    def filled(lm):
        return lm.infill("the old man [blank] the sea", max_tokens=4).text

    same_there(monkeypatch, save_tiny_t5(tmp_path), filled, 1e-5)


@pytest.mark.slow
def test_the_engine(open_model, monkeypatch):
    def on_the_device(run):  # a block counts in its own thread only
        def inside(self):
            with SecondDevice():
                run(self)

        return inside

    def results(device):
        with Engine(open_model(device)) as engine:
            asked = [engine.submit_generate(text, gerund.GenerationConfig(max_new_tokens=5)) for text in TEXTS]
            vectors = engine.submit_encode(TEXTS)
            return [made.token_ids for one in asked for made in one.result()], torch.as_tensor(vectors.result().vectors)

    texts, vectors = results("cpu")
    for one in (Engine, Stepwise):
        monkeypatch.setattr(one, "_run", on_the_device(one._run))
    with SecondDevice():
        written, found = results(DEVICE.type)
    assert written == texts
    torch.testing.assert_close(found, vectors, rtol=0, atol=1e-5)


def recipe_of_a_step(folder, tmp_path):
    """Return a recipe that trains an adapter of a model by three objectives."""
    line = json.dumps({"text": " ".join(60 * TEXTS)})
    (tmp_path / "texts.jsonl").write_text(4 * f"{line}\n", "utf-8")
    (tmp_path / "recipe.yaml").write_text(
        f"""
model: {{base: {folder}, lora: {{rank: 2, alpha: 4}}, gradient_checkpointing: true}}
data: {{folder: {tmp_path}, sources: [{{name: texts, files: [texts.jsonl]}}]}}
objectives:
  - {{kind: mntp, batch_size: 2, micro_batch_size: 1, length: 16}}
  - {{kind: sscl, batch_size: 2, micro_batch_size: 1, length: 16, unit: documents, projection: 4}}
  - {{kind: causal, batch_size: 2, length: 16}}
output: {tmp_path / "out"}
steps: 2
precision: fp32
""",
        "utf-8",
    )
    return load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.slow
def test_a_training_step(folder, tmp_path):
    check_step(recipe_of_a_step(folder, tmp_path))


def check_step(recipe):
    """Take a training step here and on the second device; losses are there, and gradients the same."""
    prepared = prepare_model(recipe)
    objectives = prepare_objectives(recipe, prepared, Sources(recipe, prepared.tokenizer))
    module = TrainingModule(prepared.model, {objective.name: objective.losses for objective in objectives})
    item = StepData(objectives, steps=2)[0]
    run_step(module.train(), objectives, item)
    expected = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    with SecondDevice() as device:
        module.to(DEVICE)
        if hasattr(prepared.model, "tie_weights"):
            prepared.model.tie_weights()  # to a GPU they move as one
        result = run_step(module, objectives, moved(item))
        found = {name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None}
        assert all(isinstance(value, Elsewhere) for value in result.losses.values())
    assert device.operations > 500
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():  # sums of thousands of terms, in another order there
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * max(0.1, float(gradient.abs().max())))


def moved(item, device=DEVICE):
    if isinstance(item, torch.Tensor):
        return item.to(device)
    return {name: moved(value, device) for name, value in item.items()} if isinstance(item, dict) else item


class TestTheDeviceItself:
    """What it refuses and allows, as CUDA does."""

    def test_numbers_survive_and_come_back(self):
        with SecondDevice():
            there = torch.arange(6, device=DEVICE).view(2, 3)[:, 1:] * 2
            assert (there.device.type, there.tolist()) == (DEVICE.type, [[2, 4], [8, 10]])
            assert there.sum().item() == 24
            assert not isinstance(there.cpu(), Elsewhere)

    def test_two_devices_do_not_meet(self):
        with SecondDevice():
            there, here = torch.ones(2, device=DEVICE), torch.ones(2)
            for wrong in (lambda: there + here, lambda: here @ there, lambda: torch.cat([there, here])):
                with pytest.raises(WrongDeviceError, match="two devices"):
                    wrong()
            with pytest.raises(WrongDeviceError, match="generator"):
                torch.rand(2, device=DEVICE, generator=torch.Generator())
            # A single number, and places, may come from the CPU.
            assert (there * torch.tensor(3.0)).tolist() == [3.0, 3.0]
            assert there[torch.tensor([0])].tolist() == [1.0]

    def test_gradients_lie_where_the_tensors_do(self):
        with SecondDevice():
            there = torch.tensor([1.0, 2.0], device=DEVICE).requires_grad_()
            there.square().sum().backward()
            assert isinstance(there.grad, Elsewhere)
            assert there.grad.tolist() == [2.0, 4.0]
