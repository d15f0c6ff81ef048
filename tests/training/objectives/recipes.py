"""Recipes of GUR and of RankGen's objective on a few made-up texts, and what they are built into."""

import json

from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.step import TrainingModule
from gerund.training.trainable_model import prepare_model

WORDS = ["the", "a", "cat", "in", "an", "inn", "then", "ran", "sat", "tin", "rain", "end"]


def text(rng, count):
    return " ".join(rng.choice(WORDS, count))


def passage(number, prefix, continuation, document=0, **further):
    """Return a row whose place overlaps with that of no other number."""
    start = 10_000 * number
    middle = start + len(prefix) + 1
    span = [start, middle, middle + len(continuation)]
    return {"document": document, "prefix": prefix, "continuation": continuation, "span": span, **further}


def gur(place, output="out", *, base="t5", objectives=None, encoder=None, model=None, overrides=(), **changes):
    own = {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}, "batch_size": 6, "length": 32, **changes}
    sections = {
        "model": model or {"base": str(place / base)},
        "encoder": encoder or {},
        "data": {
            "folder": str(place),
            "cache": str(place / "cache"),
            "sources": [{"name": "docs", "files": ["docs.jsonl"]}],
        },
        "objectives": objectives or [own],
    }
    return _loaded(place / "recipe.yaml", sections, output, overrides)


def rankgen(base, passages, output="out", overrides=(), model=None, encoder=None, **changes):
    own = {"kind": "rankgen", "passages": [str(passages)], "batch_size": 6, "length": 48, "continuation_length": 24}
    sections = {
        "model": {"base": str(base), **({"lora": {"rank": 4, "alpha": 8}} if model is None else model)},
        "encoder": {"attention": "causal", "pooling": "last", "append_eos": True} if encoder is None else encoder,
        "objectives": [own | changes],
    }
    return _loaded(passages.parent / f"{passages.name}.yaml", sections, output, overrides)


def _loaded(path, sections, output, overrides):
    short = {"steps": 4, "save_steps": 2, "log_steps": 2, "optimizer": {"learning_rate": 0.01}, "precision": "fp32"}
    path.write_text(json.dumps({**sections, **short, "output": str(output)}))
    return load_recipe(path, list(overrides))


def built(settings):
    """Return the model, the only objective, and both as the module that is trained."""
    prepared = prepare_model(settings, write=False)
    [objective] = prepare_objectives(settings, prepared, Sources(settings, prepared.tokenizer))
    return prepared, objective, TrainingModule(prepared.model, {objective.name: objective.losses}, bf16=False)
