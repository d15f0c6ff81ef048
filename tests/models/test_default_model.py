"""The bundled model: what its card promises, and that it is what the recipes say."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import gerund
from gerund.demo import read_beginnings, read_documents, read_searches
from gerund.models.saved_settings import read_adapters
from gerund.settings.encoder import JOBS
from gerund.training.recipe import find_recipe

FOLDER = Path(str(resources.files("gerund"))) / "assets" / "default"
RECIPES = {
    "training-base": "default-base",
    "training": "default-encoder",
    "training-infill": "default-infill",
    "training-score": "default-scorer",
}
# Where files lie is the user's affair.
ELSEWHERE = {"output", "data"}


@pytest.fixture(scope="module")
def base() -> gerund.LanguageModel:
    return gerund.load(adapter="none", attention="causal", pooling="mean")


def test_it_is_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*")) < 68e6


@pytest.mark.slow
def test_each_job_has_an_adapter_of_its_own(bundled):
    places = read_adapters(FOLDER)
    assert set(places) == set(JOBS)
    assert places["rerank"] == places["encode"]  # until a reranker is trained
    assert len(set(places.values())) == len(JOBS) - 1
    assert all((FOLDER / place / "adapter_model.safetensors").is_file() for place in places.values())
    assert bundled.scorer is not None


@pytest.mark.slow
def test_its_adapters_are_taken_by_its_name(bundled):
    joined = gerund.load(infill_adapter="default", scorer="default")
    assert joined.adapters.folders == bundled.adapters.folders
    assert joined.scorer is not None
    assert joined.scorer.fingerprint == bundled.scorer.fingerprint


def test_a_filling_is_made_of_words(bundled):
    [span] = bundled.infill("The king was angry with his [blank], and he sent them away.", lengths=[1, 2, 4]).spans
    assert span[:1] == " "
    assert span.strip()[:1].isalpha()


@pytest.mark.slow
def test_it_writes_as_the_base_to_the_bit(bundled, base):
    batch = bundled.tokenizer(["The old man looked at the sea and", "In 1825"], return_tensors="pt", padding=True)
    with torch.no_grad():
        assert torch.equal(bundled.model(**batch).logits, base.model(**batch).logits)
    assert bundled.generate("The old man", 12)[0].text == base.generate("The old man", 12)[0].text


@pytest.mark.slow
def test_it_finds_what_is_meant(bundled, base):
    documents, queries = read_documents(), read_searches()
    same = np.array([[document.topic == query.answer.topic for document in documents] for query in queries])

    def apart(model: gerund.LanguageModel) -> float:
        """How far documents of the topic that was asked for lie from others, in standard deviations."""
        similar = model.similarity([one.text for one in queries], model.encode([one.text for one in documents]))
        return float((similar[same].mean() - similar[~same].mean()) / similar[~same].std())

    assert apart(bundled) > 1.2 * apart(base)


def test_it_knows_what_follows(bundled):
    beginnings = read_beginnings()
    shards = [(one.right, *one.wrong) for one in beginnings]
    scores = bundled.score([one.text for one in beginnings], shards)
    assert sum(int(np.argmax(row)) == 0 for row in scores) > len(beginnings) / 2


def test_both_sides_of_a_gap_say_more_than_one(bundled):
    gaps = [
        ("The king was ill. His", " doctor", " gave him a medicine, and the king was well again."),
        ("She opened the", " door", " and walked into the house."),
        ("The river flows through the city and into the", " sea", " near the harbour, where ships lie at anchor."),
    ]
    both = [float(np.mean(bundled.span_logprobs(*gap))) for gap in gaps]
    left = [float(np.mean(bundled.span_logprobs(*gap, mode="causal"))) for gap in gaps]
    assert np.mean(both) > np.mean(left)


@pytest.mark.parametrize(("written", "recipe"), RECIPES.items())
def test_it_was_trained_by_the_recipes_inside(written, recipe):
    record = json.loads((FOLDER / f"{written}.json").read_text("utf-8"))
    asked = yaml.safe_load(find_recipe(recipe).read_text("utf-8"))
    asked["model"].pop("base", None)
    _agree(record["recipe"], {name: value for name, value in asked.items() if name not in ELSEWHERE})


def _agree(record: object, asked: object) -> None:
    """Everything that is asked for stands in the record; it has the defaults as well."""
    if isinstance(asked, dict):
        for name, value in asked.items():
            _agree(record[name], value)
    elif isinstance(asked, list):
        assert len(record) == len(asked)
        for one, other in zip(record, asked, strict=True):
            _agree(one, other)
    else:
        assert record == (float(asked) if isinstance(record, float) else asked)
