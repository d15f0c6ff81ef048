"""Packed graphs are kept in a cache of the tests' own, and a tiny file that chats is written once."""

from pathlib import Path

import pytest
import torch

import gerund
from tests.inference.generate.test_prompts import chat_tokenizer
from tests.models.test_gguf_files import write
from tests.tiny import tiny


@pytest.fixture(autouse=True, scope="package")
def own_cache(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="package")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("light")
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return write(gerund.load(folder / "base"), folder / "tiny.gguf", type="q8_0")
