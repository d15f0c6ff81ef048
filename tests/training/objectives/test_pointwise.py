"""Training of a reranker: its loss against one list at a time, its scores against single passes, and what it leaves."""

import json
import random

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.training.objectives.ranking import PointwiseLosses, read_lists
from gerund.training.objectives.settings import PointwiseConfig
from gerund.training.recipe import Recipe
from gerund.training.run import train
from tests.training.conftest import WORDS, adapter_settings, plain_settings


def test_the_loss_is_that_of_one_list_at_a_time():
    settings = PointwiseConfig(kind="pointwise", files=["lists.jsonl"], candidates=3)
    teacher = torch.tensor([[2.0, 0.1, 0.4], [1.0, 0.5, -1.0]])
    scores = torch.tensor([0.3, -0.2, 0.1, 0.5, -1.0, 0.2])[:, None]
    losses = PointwiseLosses.__new__(PointwiseLosses)
    losses.config = settings
    loss, right = losses.compare(scores, {"query": {"teacher": teacher}}, gather=False)
    total = 0.0
    for own, wanted in (([0.3, 0.1, 0.5], teacher[0]), ([-0.2, -1.0, 0.2], teacher[1])):
        z = (wanted - wanted.mean()) / wanted.std(correction=0)
        target = np.exp(z.numpy() / settings.teacher_temperature)
        target /= target.sum()
        predicted = np.exp(own) / np.exp(own).sum()
        total += float((target * np.log(target / predicted)).sum())
    assert float(loss) == pytest.approx(total / 2, abs=1e-6)
    assert right == 0


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    """Lists in which the document about a river is relevant."""
    rng = random.Random(0)
    rows = []
    for _ in range(40):
        names = rng.sample(["cat", "dog", "house", "stone"], 3)
        names.insert(1, "river")
        documents = [" ".join(rng.choices(WORDS[4:12], k=5)) + f" {name}" for name in names]
        rows.append({"query": f"the {names[0]}", "documents": documents, "scores": [0.1, 3.0, 0.2, 0]})
    path = tmp_path_factory.mktemp("lists") / "lists.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ranking(corpus, tmp_path_factory, base, lists):
    recipe = adapter_settings(plain_settings(corpus, tmp_path_factory), base)
    recipe["data"] = {"folder": str(lists.parent)}
    recipe["objectives"] = [
        {"kind": "pointwise", "files": [lists.name], "batch_size": 8, "length": 48, "candidates": 4}
    ]
    recipe["model"]["adapter"] = "none"
    return recipe


@pytest.fixture
def settings(corpus, tmp_path_factory, base, lists):
    return ranking(corpus, tmp_path_factory, base, lists)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory, base, lists):
    """Return the folder of a model whose reranker has learned."""
    recipe = ranking(corpus, tmp_path_factory, base, lists)
    recipe |= {"steps": 60, "save_steps": 60, "eval_steps": 60, "schedule": {"name": "constant"}}
    return train(Recipe.model_validate(recipe))


def single(lm, query, document):
    """The score of one pair in a pass of its own, by the files of the folder."""
    ids = [token for piece in lm.reranker.settings.pieces for token in piece_ids(lm, piece, query, document)]
    with torch.no_grad(), gerund.models.adapters.active_adapter("rerank"):
        states = lm.model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state
    layer = lm.reranker._layer
    return float(states[0, -1] @ layer.weight_1D[0] + layer.bias_1[0])


def piece_ids(lm, piece, query, document):
    whole = piece.replace("{bos}", lm.tokenizer.bos_token).replace("{query}", query).replace("{document}", document)
    return lm.tokenizer(whole, add_special_tokens=False).input_ids


@pytest.mark.slow
def test_a_run_adds_a_reranker_to_the_model(trained, base):
    folder = trained
    lm, plain = gerund.load(folder, dtype="float32"), gerund.load(base, dtype="float32")
    assert {path.name for path in folder.iterdir()} >= {"reranker.json", "reranker.safetensors", "adapter-rerank"}
    assert lm.adapters.folders.keys() == {"rerank"}
    # Long and short documents, so that there is padding.
    documents = ["the cat", "a dog runs under the house and", "river"]
    ranking = lm.rerank("the cat", documents)
    assert ranking.by == "model"
    expected = [single(lm, "the cat", document) for document in documents]
    assert max(expected) - min(expected) > 1e-6
    scores = dict(ranking)
    np.testing.assert_allclose([scores[place] for place in range(3)], expected, atol=1e-5)
    assert lm.generate("the cat", 5)[0].text == plain.generate("the cat", 5)[0].text
    np.testing.assert_array_equal(lm.encode("the cat"), plain.encode("the cat"))
    assert lm.fingerprint() == plain.fingerprint()


@pytest.mark.slow
def test_a_reranker_goes_with_the_model_that_it_was_trained_from(trained, base, tmp_path):
    folder, lm = trained, gerund.load(trained, dtype="float32")
    scores = lm.rerank("the cat", ["the dog", "the cat runs"]).scores
    for other in (
        gerund.load(base, reranker=str(folder), dtype="float32"),
        gerund.load(gerund.load(base, reranker=folder, dtype="float32").spec),
        gerund.load(folder, attention="causal", dtype="float32"),
        lm.with_encoder(gerund.load(base, attention="bidir").encoder),
    ):
        assert other.rerank("the cat", ["the dog", "the cat runs"]).scores == pytest.approx(scores, abs=1e-6)
    lm.save(tmp_path / "saved")
    assert gerund.load(tmp_path / "saved").rerank("the cat", ["the dog", "the cat runs"]).scores == pytest.approx(
        scores, abs=1e-6
    )
    assert gerund.load(folder, adapter="none").reranker is None
    assert gerund.load(folder, reranker="none").reranker is None
    with pytest.raises(DataError, match="has no reranker with an adapter of its own"):
        gerund.load(base, reranker=str(base))


@pytest.mark.slow
def test_a_reranker_goes_with_a_quantized_file_of_its_model(trained, base, tmp_path):
    documents = ["the dog", "a cat runs under the house and", "river"]
    plain = gerund.load(base, adapter="none", dtype="float32")
    for name, lm in (("same", plain), ("other", further_trained(plain))):
        lm.export(tmp_path / name, "gguf", type="q8_0")
    file = tmp_path / "same" / "model.gguf"
    # In torch the expected scores are those of the file's own weights.
    gerund.load(file, runtime="torch", adapter="none", dtype="float32").save(tmp_path / "unpacked")
    expected = gerund.load(tmp_path / "unpacked", reranker=trained, dtype="float32").rerank("the cat", documents)
    for runtime, close in (("torch", 1e-6), ("packed", 2e-3)):
        lm = gerund.load(file, reranker=trained, runtime=runtime)
        assert dict(lm.rerank("the cat", documents)) == pytest.approx(dict(expected), abs=close)
        with pytest.raises(DataError, match="was not trained from the weights"):
            gerund.load(tmp_path / "other" / "model.gguf", reranker=trained, runtime=runtime)


def further_trained(lm):
    """The model with other projections."""
    lm = gerund.load(lm.spec)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "proj" in name:
                weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    return lm


@pytest.mark.slow
def test_a_reranker_learns_to_rank(trained, lists):
    losses = [json.loads(line) for line in (trained.parent / "log.jsonl").read_text().splitlines()]
    losses = [line["loss_pointwise"] for line in losses if "loss_pointwise" in line]
    assert losses[-1] < 0.8 * losses[0]
    lm = gerund.load(trained, dtype="float32")
    right = [lm.rerank(one.query, one.documents, 1).indices == [1] for one in read_lists([lists])]
    assert np.mean(right) > 0.6


@pytest.mark.slow
def test_states_of_lower_layers_are_kept(run, settings):
    """The encoder's plan, which is not causal, does not reach them."""
    settings["model"]["lora"]["lowest_layer"] = 1
    cached, plain = (run(name, "steps=2", f"model.cache_below={name == 'a'}") for name in ("a", "b"))
    one, other = (gerund.load(folder, dtype="float32").reranker._layer for folder in (cached, plain))
    np.testing.assert_allclose(one.weight_1D, other.weight_1D, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"lora": None}}, "pointwise trains a new adapter"),
        ({"objectives": [{"kind": kind, "files": ["l"]} for kind in ("late", "pointwise")]}, "the only objective"),
    ],
)
def test_recipes_that_contradict_it(run, settings, change, words):
    settings["model"] |= change.pop("model", {})
    settings |= change
    with pytest.raises(ConfigError, match=words):
        run("out")


def test_queries_that_fill_the_length(run):
    with pytest.raises(DataError, match="every query fills the length"):
        run("out", "objectives.pointwise.length=16")
