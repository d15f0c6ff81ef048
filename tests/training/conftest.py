"""A small made-up corpus and a recipe that trains on it in a second."""

import json
import random

import pytest
import yaml

WORDS = "the cat dog house runs sleeps under over red blue small large and but with river stone".split()  # noqa: SIM905


def sentences(seed, count):
    rng = random.Random(seed)
    return " ".join(" ".join(rng.choices(WORDS, k=rng.randint(4, 9))).capitalize() + "." for _ in range(count))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name, documents in (("a.train", 30), ("b.train", 15), ("a.valid", 6)):
        lines = [json.dumps({"text": sentences(f"{name}{i}", 30)}) for i in range(documents)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    from gerund.training.corpus.tokenizer import train_tokenizer

    return train_tokenizer([sentences(i, 30) for i in range(20)], vocab_size=320, max_length=64)


def plain_settings(corpus, tmp_path_factory):
    """Return a recipe as plain data."""
    model = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    return {
        "model": {"config": model},
        "tokenizer": {"vocab_size": 320, "max_length": 64},
        "data": {
            "folder": str(corpus),
            "cache": str(tmp_path_factory.getbasetemp() / "token-cache"),
            "sources": [
                {"name": "a", "files": ["a.train.jsonl"], "validation": ["a.valid.jsonl"], "weight": 2},
                {"name": "b", "files": ["b.train.jsonl"]},
            ],
            "validation_tokens": 256,
        },
        "objectives": [{"kind": "causal", "length": 16, "batch_size": 8, "micro_batch_size": 4}],
        "optimizer": {"name": "muon", "learning_rate": 0.01},
        "schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 4},
        "output": str(tmp_path_factory.mktemp("run") / "out"),
        "steps": 12,
        "precision": "fp32",
        "log_steps": 2,
        "eval_steps": 6,
        "save_steps": 4,
    }


@pytest.fixture
def settings(corpus, tmp_path_factory):
    """Return a recipe as plain data; tests change it before they write it."""
    return plain_settings(corpus, tmp_path_factory)


@pytest.fixture
def write_recipe(tmp_path):
    def write(settings, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings), "utf-8")
        return path

    return write


@pytest.fixture
def run(settings, write_recipe, tmp_path):
    """Return a function that trains by the recipe in ``settings``, into a folder of this name."""

    def run(output, *overrides, resume=False):
        from gerund.training.recipe import load_recipe
        from gerund.training.run import train

        return train(load_recipe(write_recipe(settings), [f"output={tmp_path / output}", *overrides]), resume=resume)

    return run


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory):
    """Return the folder of a finished training by the recipe in ``settings``, which tests read or copy."""
    from gerund.training.recipe import Recipe
    from gerund.training.run import train

    return train(Recipe.model_validate(plain_settings(corpus, tmp_path_factory))).parent


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer):
    """Return the folder of a small random model, as a user would bring one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes
    )
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def adapter_settings(settings, base):
    """Return a recipe that trains an adapter on ``base``, without objectives."""
    kept = {name: value for name, value in settings.items() if name not in ("tokenizer", "schedule", "optimizer")}
    return {
        **kept,
        "model": {"base": str(base), "lora": {"rank": 4, "alpha": 8}},
        "optimizer": {"learning_rate": 0.01},
        "objectives": [],
    }


@pytest.fixture
def adapting(settings, base):
    """Return a recipe that trains an adapter on ``base``; tests add objectives."""
    return adapter_settings(settings, base)


@pytest.fixture
def double(monkeypatch):
    """Let ``.float()``, which lifts half precision, lift to float64: the code under test at full precision."""
    import torch

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
