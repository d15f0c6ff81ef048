"""Recipes of GUR on a few pairs, and what they are built into."""

import json

import numpy as np

from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.step import TrainingModule
from gerund.training.trainable_model import prepare_model
from tests.tiny import save_tiny, save_tiny_t5

WORDS = ["the", "a", "cat", "in", "an", "inn", "then", "ran", "sat", "tin", "rain", "end"]


def text(rng, count):
    return " ".join(rng.choice(WORDS, count))


def make_place(folder):
    """Write into a folder pairs, a few documents, a tiny T5 and a tiny decoder-only model."""
    rng = np.random.default_rng(0)
    titles = [text(rng, 3) for _ in range(30)]
    rows = [{"text_a": title, "text_b": f"{text(rng, 2)} {title} {text(rng, 2)}"} for title in titles]
    for row in rows[::2]:
        row["opening"] = f"{row['text_b']}. {text(rng, 8)}."
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [json.dumps({"text": ". ".join(text(rng, 9) for _ in range(3))}) for _ in range(40)]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    save_tiny_t5(folder / "t5", sentinels=20)
    save_tiny(folder / "llama")
    return folder


def recipe(place, output="out", *, base="t5", objectives=None, encoder=None, model=None, overrides=(), **changes):
    own = {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}, "batch_size": 6, "length": 32, **changes}
    content = {
        "model": model or {"base": str(place / base)},
        "encoder": encoder or {},
        "data": {"folder": str(place), "sources": [{"name": "docs", "files": ["docs.jsonl"]}]},
        "objectives": objectives or [own],
        "optimizer": {"learning_rate": 0.01},
        "precision": "fp32",
        "output": str(output),
        "steps": 4,
        "save_steps": 2,
        "log_steps": 2,
    }
    path = place / "recipe.yaml"
    path.write_text(json.dumps(content))
    return load_recipe(path, list(overrides))


def built(settings, place):
    prepared = prepare_model(settings, write=False)
    sources = Sources(settings.model_copy(update={"output": place / "tokens"}), prepared.tokenizer)
    objectives = prepare_objectives(settings, prepared, sources)
    module = TrainingModule(prepared.model, {one.name: one.losses for one in objectives}, bf16=False)
    return prepared, objectives, module
