"""An objective is one class and one line: a toy one is trained by a recipe, and the traits of ours are complete."""

import json
from typing import ClassVar, Literal

import pytest
from pydantic import Field
from safetensors.torch import load_file

from gerund.errors import ConfigError
from gerund.training.objectives import settings as objective_settings
from gerund.training.objectives.base import Batches, TokenLosses, row_generator, text_batch
from gerund.training.objectives.sections import TextConfig
from gerund.training.objectives.settings import OBJECTIVES
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from tests.training.outcomes import read_log


class ReversalConfig(TextConfig):
    """The model continues a text backwards."""

    work: ClassVar = f"{__name__}.prepare"

    kind: Literal["reversal"]
    rate: float = Field(default=0.5, ge=0, le=1)

    def check(self, recipe):
        super().check(recipe)
        if recipe.precision != "fp32":
            raise ValueError("reversal is for precision fp32")


def prepare(context, config):
    formatter = context.formatter(config)

    def batches(texts, seed):
        return ReversalBatches(texts, formatter, config.rate, context.model.pad, seed)

    return context.text_objective(config.kind, config, batches, ReversalLosses(), overhead=formatter.overhead)


class ReversalBatches(Batches):
    def __init__(self, texts, formatter, rate, pad, seed):
        self.texts, self.formatter, self.rate, self.pad, self.seed = texts, formatter, rate, pad, seed

    def make(self, step, first, count):
        rows = [(self.texts.row(n), row_generator(self.seed, n)) for n in range(first, first + count)]
        return text_batch(
            [self.formatter.format(ids[::-1] if rng.random() < self.rate else ids) for ids, rng in rows], self.pad
        )


class ReversalLosses(TokenLosses):
    def counts(self, batch):
        return {"reversal": int(batch["real"][:, 1:].sum())}

    def __call__(self, model, batch):
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1].log_softmax(-1)
        own = logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        return {"reversal": -(own * batch["real"][:, 1:]).sum()}


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(objective_settings, "OBJECTIVES", (*OBJECTIVES, ReversalConfig))


@pytest.fixture
def recipe(settings, write_recipe, tmp_path):
    small = {"length": 16, "batch_size": 8, "micro_batch_size": 4}
    own = {**settings, "objectives": [{"kind": "causal", **small}, {"kind": "reversal", **small}]}
    own |= {"output": str(tmp_path / "out"), "steps": 2, "log_steps": 1, "eval_steps": 2, "save_steps": 2}
    own["schedule"] = {"name": "constant"}
    return write_recipe(own)


@pytest.mark.slow
def test_a_registered_objective_is_trained_from_a_recipe(registered, recipe):
    folder = train(load_recipe(recipe, ["objectives.reversal.rate=0.25"]))
    rows = read_log(folder.parent)
    assert [row["step"] for row in rows if "loss_reversal" in row and "loss_causal" in row] == [1, 2]
    assert "val_reversal" in rows[-1]
    report = json.loads((folder / "training.json").read_text("utf-8"))
    assert report["recipe"]["objectives"][1]["rate"] == 0.25
    assert load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("objectives.reversal.rat=1", r"unknown field 'objectives\.1\.rat'; valid are: weight, .*rate"),
        ("objectives.reversal.rate=2", r"objectives\.1\.rate: input should be less than or equal to 1"),
        ("precision=bf16", "reversal is for precision fp32"),
    ],
)
def test_its_mistakes_are_told_as_those_of_ours(registered, recipe, override, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe, [override])


def test_without_the_line_it_is_unknown(recipe):
    with pytest.raises(ConfigError, match=r"objectives\.1: unknown kind 'reversal'; valid are: 'causal', 'mntp'"):
        load_recipe(recipe)


def test_names_and_seeds_are_all_different():
    names = [own.name() for own in OBJECTIVES]
    assert len(set(names)) == len(names)
    seeds = {own.name(): own.model_construct(kind=own.name()).seed(1) for own in (*OBJECTIVES, ReversalConfig)}
    # These two may share a pass, on the same texts.
    assert seeds.pop("mntp") == seeds["msg"]
    assert len(set(seeds.values())) == len(seeds)
    assert seeds["reversal"] >= 1100
