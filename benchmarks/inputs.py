"""What scripts measure with where trained models and large corpora would say no more: random models, short texts."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gerund
from gerund.models.sources import find

DEMO = Path(gerund.__file__).parent / "assets" / "demo"


@cache
def bundled_tokenizer() -> Any:
    """Return the tokenizer of the bundled model."""
    return AutoTokenizer.from_pretrained(find(None).folder)


def random_llama(**sizes: int) -> LlamaForCausalLM:
    """Return a Llama of random weights, always the same ones, for the bundled model's tokenizer."""
    torch.manual_seed(0)
    tokenizer = bundled_tokenizer()
    usual = {
        "vocab_size": len(tokenizer), "max_position_embeddings": 1024, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**usual, **sizes})).eval()


def save(model: Any, folder: Path) -> None:
    """Write a model with the bundled model's tokenizer, for texts as long as the model takes.

    Models of relative positions (T5) have no such bound; the tokenizer keeps its own for them.
    """
    model.save_pretrained(folder)
    tokenizer = bundled_tokenizer()
    tokenizer.model_max_length = getattr(model.config, "max_position_embeddings", tokenizer.model_max_length)
    tokenizer.save_pretrained(folder)


def size_of(model: Any) -> float:
    """Return what a model's weights take, in MiB."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters()) / 2**20


def demo_texts(count: int) -> list[str]:
    """Return short texts that come with the library, again from the start where there are too few."""
    lines = (DEMO / "documents.jsonl").read_text(encoding="utf-8").strip().split("\n")
    sentences = [part.strip() for line in lines for part in json.loads(line)["text"].split(". ") if part.strip()]
    return [sentences[number % len(sentences)] for number in range(count)]


def texts_of(data: Path | None, count: int, take: Callable[[Path, int], list[str]]) -> list[str]:
    """Return texts of a data folder, or without one those of the demo."""
    return demo_texts(count) if data is None else take(data, count)
