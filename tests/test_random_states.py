"""No verb reads or changes the global random states of torch, numpy and Python."""

import json
import random
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund import Rerank, Sampling
from gerund.data.mining.candidates import MiningConfig
from gerund.data.mining.job import mine
from gerund.errors import ResourceError
from gerund.training.estimate import estimate
from gerund.training.recipe import Recipe
from gerund.training.run import train
from tests.adapters import make_adapter
from tests.tiny import save_tiny, save_tiny_t5

FRESH, SEEDED = Sampling(temperature=1.0), Sampling(temperature=1.0, seed=4)
TEXT = "the cat in the inn"


def states():
    return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = save_tiny(tmp_path_factory.mktemp("long") / "m", max_position_embeddings=512)
    lm = gerund.load(folder, dtype="float32")
    lm.tokenizer.model_max_length = 512
    lm.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return lm


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return gerund.load(save_tiny_t5(tmp_path_factory.mktemp("t5") / "m"))


def expanded(model, sampling):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a random model finds few
        return model.expand("the cat sat", 2, sampling=sampling, max_tokens=2)


BOTH = {
    "generate": lambda lm, sampling: lm.generate([TEXT, "a"], 4, sampling),
    "generate one by one": lambda lm, sampling: lm.generate([TEXT, "a"], 4, sampling, batch_size=1),
    "stream": lambda lm, sampling: list(lm.stream(TEXT, 4, sampling)),
    "infill": lambda lm, sampling: lm.infill("the [blank] in", sampling=sampling, max_tokens=2),
    "expand": expanded,
}
DECODER_ONLY = {
    "rerank": lambda lm, sampling: lm.generate([TEXT], 6, sampling, rerank=Rerank(3, 2, 2, scorer="pmi")),
    "rerank by chance": lambda lm, sampling: lm.generate([TEXT], 6, sampling, rerank=Rerank(2, scorer="random")),
    "rerank a stream": lambda lm, sampling: list(lm.stream(TEXT, 6, sampling, rerank=Rerank(2, every=2))),
    "chat": lambda lm, sampling: lm.chat([{"role": "user", "content": TEXT}], 4, sampling),
    "prompt": lambda lm, sampling: lm.infill("a [blank] b", sampling=sampling, method="blank", max_tokens=2),
    "session": lambda lm, sampling: lm.with_encoder(
        gerund.EncoderConfig(attention=gerund.AttentionPlan("causal"))
    ).encode_and_prefill(TEXT)[1].generate(4, sampling),
    "read": lambda lm, sampling: lm.prefill(TEXT).generate(4, sampling),
}  # fmt: skip
SILENT = {
    "rerank documents": lambda lm: lm.rerank(TEXT, ["a cat", "in"]),
    "fitted": lambda lm: lm.with_encoder(replace(lm.encoder, transform="all-but-the-top")).fitted(list("abcdefgh")),
    "encode": lambda lm: lm.encode([TEXT, "a"]),
    "encode_tokens": lambda lm: lm.encode_tokens([TEXT]),
    "encode_words": lambda lm: lm.encode_words([["the", "cat"]]),
    "similarity": lambda lm: lm.similarity([TEXT], ["a"]),
    "fingerprint": lambda lm: lm.fingerprint(),
}


@pytest.fixture(autouse=True)
def left_alone():
    before = states()
    yield
    assert states() == before


@pytest.mark.sweep(quick=5, check=9)
@pytest.mark.parametrize("sampling", [None, FRESH, SEEDED], ids=["greedy", "fresh", "seeded"])
@pytest.mark.parametrize("verb", [*BOTH, *DECODER_ONLY])
def test_writing(lm, verb, sampling):
    if sampling is None and "rerank" in verb:
        return
    {**BOTH, **DECODER_ONLY}[verb](lm, sampling)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("sampling", [None, FRESH, SEEDED], ids=["greedy", "fresh", "seeded"])
@pytest.mark.parametrize("verb", BOTH)
def test_writing_of_an_encoder_decoder(t5, verb, sampling):
    BOTH[verb](t5, sampling)


@pytest.mark.parametrize("verb", SILENT)
def test_encoding(lm, t5, verb):
    SILENT[verb](lm)
    SILENT[verb](t5)


def test_scoring(lm):
    lm.score([TEXT], [[" a", " the"]])
    lm.span_logprobs("the", " cat", " sat")
    lm.rerank(TEXT, ["a cat", "in"], by="likelihood")


def test_choosing_layers(lm):
    lm.rerouting_layers([f"{TEXT} {number} and the tin" for number in range(30)])


def test_a_classifier(t5):
    t5.for_classification(3)


def recipe(folder, **changes):
    words = f"{TEXT} and a tin on the hat".split()
    texts = [" ".join(words[number % 5 :] * 4) for number in range(20)]
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {
        "model": {"config": {"model_type": "llama", "max_position_embeddings": 64, "attention_dropout": 0.1, **sizes}},
        "tokenizer": {"vocab_size": 300, "max_length": 64},
        "data": {"folder": folder, "sources": [{"name": "a", "files": ["a.jsonl"]}]},
        "objectives": [{"kind": "causal", "length": 16, "batch_size": 2}],
        "output": folder / "out",
        "steps": 2,
        "precision": "fp32",
        **changes,
    }
    return Recipe.model_validate(settings)


@pytest.mark.slow
def test_training(tmp_path):
    estimate(recipe(tmp_path))
    train(recipe(tmp_path))


def test_a_training_that_fails(tmp_path, monkeypatch):
    def full(*_, **__):
        random.random()
        np.random.rand()
        torch.rand(1)
        raise MemoryError

    monkeypatch.setattr("gerund.training.run.GerundTrainer", full)
    with pytest.raises(ResourceError):
        train(recipe(tmp_path))


def test_mining(tmp_path):
    documents = tmp_path / "documents.txt"
    documents.write_text(f"{TEXT} is a cat of my own. Here is {TEXT} once more today.\n", "utf-8")
    config = MiningConfig(threshold=5, pairs="all")
    mine([documents], tmp_path / "pairs.jsonl", config, workers=1)


@pytest.mark.filterwarnings("ignore")
def test_loading_and_saving(lm, t5, tiny_folder, tmp_path):
    for number, model in enumerate((lm, t5)):
        model.save(tmp_path / str(number))
        gerund.load(tmp_path / str(number))
    lm.export(tmp_path / "merged", "merged")
    lm.with_encoder(gerund.EncoderConfig())


@pytest.mark.filterwarnings("ignore")
def test_loading_an_adapter(tiny_folder, tmp_path):
    # Making one is the test's own business.
    random_before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    folder = make_adapter(tiny_folder, tmp_path / "adapter")
    random.setstate(random_before[0])
    np.random.set_state(random_before[1])
    torch.set_rng_state(random_before[2])
    gerund.load(tiny_folder, adapter=folder).encode([TEXT])
