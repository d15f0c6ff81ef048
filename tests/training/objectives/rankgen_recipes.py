"""Recipes of RankGen's objective, and what they are built into."""

import json

from gerund.training.estimate import RandomTexts
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.step import TrainingModule
from gerund.training.trainable_model import prepare_model

WORDS = ["the", "a", "cat", "in", "an", "inn", "then", "ran", "sat", "tin", "rain", "end"]


def text(rng, count):
    return " ".join(rng.choice(WORDS, count)) + "."


def passage(number, prefix, continuation, document=0, **further):
    """Return a row whose place overlaps with that of no other number."""
    start = 10_000 * number
    middle = start + len(prefix) + 1
    span = [start, middle, middle + len(continuation)]
    return {"document": document, "prefix": prefix, "continuation": continuation, "span": span, **further}


def recipe(base, passages, output="out", overrides=(), model=None, encoder=None, **changes):
    objective = {"kind": "rankgen", "passages": [str(passages)], "batch_size": 6, "length": 48}
    objective |= {"continuation_length": 24, **changes}
    content = {
        "model": {"base": str(base), **({"lora": {"rank": 4, "alpha": 8}} if model is None else model)},
        "encoder": {"attention": "causal", "pooling": "last", "append_eos": True} if encoder is None else encoder,
        "objectives": [objective],
        "optimizer": {"learning_rate": 0.01},
        "precision": "fp32",
        "output": str(output),
        "steps": 4,
        "save_steps": 2,
        "log_steps": 2,
    }
    path = passages.parent / f"{passages.name}.yaml"
    path.write_text(json.dumps(content))
    return load_recipe(path, list(overrides))


def built(settings):
    prepared = prepare_model(settings, write=False)
    [objective] = prepare_objectives(settings, prepared, RandomTexts(100))
    return prepared, objective, TrainingModule(prepared.model, {objective.name: objective.losses}, bf16=False)
