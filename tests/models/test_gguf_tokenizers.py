"""The tokenizer in a GGUF file cuts texts as llama.cpp does."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gerund.errors import ModelError
from gerund.exporting.gguf import TokenTable, token_table
from gerund.exporting.llama_cpp import serve
from gerund.gguf_file import read_file
from gerund.models.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from tests.models.gguf_writer import common_settings, finish, put, tensors
from tests.tiny import tiny

needs_llama_cpp = pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="xllamacpp is not installed")
ASCII = list("abZQ12 \n\r\t.,'!-/s")
OTHERS = ["é", "你", "の", "가", "\u0301", "🙂", "\u00a0", "٣", "ǅ", "—", "Я", "ʰ"]
WHOLE = "bababb"  # a token that no merges lead to
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
# In other scripts these are told apart as by their authors, which llama.cpp does in ASCII.
BY_CASE = ("tekken", "gpt-4o")


def pairs_of_characters() -> TokenTable:
    """Return a vocabulary in which any two characters merge, so that the tokens show where words end."""
    spelled = bytes_to_unicode()
    characters = ["".join(spelled[byte] for byte in text.encode()) for text in ASCII + OTHERS]
    merges = [(text[:end], text[end]) for text in characters for end in range(1, len(text))]
    merges += [(first, second) for first in characters for second in characters]
    single = ["<pad>", "<s>", "</s>", *(spelled[byte] for byte in range(256))]
    tokens = list(dict.fromkeys([*single, *("".join(pair) for pair in merges), WHOLE]))
    types = [3] * 3 + [1] * (len(tokens) - 3)
    return TokenTable("gpt2", "default", tokens, types, [" ".join(pair) for pair in merges], [], space_before=False)


BYTE_LEVEL = pairs_of_characters()


def write(path: Path, table: TokenTable, **settings: Any) -> Path:
    """Write a small model with a vocabulary; ``settings`` are those of the tokenizer."""
    model = tiny("llama", vocab_size=len(table.tokens), num_hidden_layers=1)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in common_settings(model.config).items():
        put(writer, f"llama.{key}", value)
    writer.add_tokenizer_model(table.model)
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.types)
    if table.merges:
        writer.add_token_merges(table.merges)
    else:
        writer.add_token_scores(table.scores)
    for key, value in settings.items():
        put(writer, f"tokenizer.ggml.{key}", value)
    finish(writer, tensors(model, "llama"))
    return path


def random_texts(characters: list[str]) -> list[str]:
    choose = random.Random(5)
    texts = ["".join(choose.choice(characters) for _ in range(choose.randint(3, 14))) for _ in range(150)]
    return [
        *texts,
        "a's b'S a'll 'tis 12121 a1b2 Zab ZaZ aZ  \n\n a",
        f" {WHOLE} {WHOLE}",
        WHOLE,
        "  a",
        "a   ",
        "\n\na",
    ]


def compare_with_llama_cpp(path: Path, texts: list[str]) -> None:
    import httpx

    server, tokenizer = serve(path, 64), read_tokenizer(read_file(path))
    with httpx.Client(base_url=server.listening_address, timeout=60) as client:
        for text in texts:
            body = {"content": text, "add_special": True, "parse_special": True}
            assert tokenizer(text).input_ids == client.post("/tokenize", json=body).json()["tokens"], text


@needs_llama_cpp
@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("name", [known.names[0] for known in PRE_TOKENIZERS])
def test_words_end_where_llama_cpp_ends_them(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "model.gguf", BYTE_LEVEL, pre=name, **SPECIAL)
    compare_with_llama_cpp(path, random_texts(ASCII if name in BY_CASE else ASCII + OTHERS))


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_eos_token": True}])
def test_begin_and_end_tokens(tmp_path: Path, flags: dict[str, bool]) -> None:
    compare_with_llama_cpp(write(tmp_path / "model.gguf", BYTE_LEVEL, pre="gpt-2", **SPECIAL, **flags), ["a b", "Z"])


@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {**SPECIAL, "add_space_prefix": False}, {**SPECIAL, "add_eos_token": True}])
def test_spaces_of_sentencepiece(tmp_path: Path, stories_folder: Path, settings: dict[str, Any]) -> None:
    table = token_table(AutoTokenizer.from_pretrained(stories_folder), 512)
    texts = [*random_texts([*ASCII, "é", "你", "🙂", "\u00a0"]), "Once upon a time", "a</s>b", "<s>a"]
    compare_with_llama_cpp(write(tmp_path / "model.gguf", table, **settings), texts)


def test_sentencepiece_as_in_the_folder(tmp_path: Path, stories_folder: Path) -> None:
    folder = AutoTokenizer.from_pretrained(stories_folder)
    file = read_tokenizer(read_file(write(tmp_path / "model.gguf", token_table(folder, 512), **SPECIAL)))
    for text in ("Once upon a time", "  two spaces", "a</s>b", "naïve café\n"):
        assert file(text).input_ids == folder(text).input_ids
        assert file.decode(file(text).input_ids, skip_special_tokens=True) == folder.decode(
            folder(text).input_ids, skip_special_tokens=True
        )


def test_begin_tokens_by_default(tmp_path: Path) -> None:
    def ids(**settings: Any) -> list[int]:
        path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", BYTE_LEVEL, **SPECIAL, **settings)
        return list(read_tokenizer(read_file(path))("a").input_ids)

    inner = ids(pre="gpt-2")
    assert len(inner) == 1
    assert ids(pre="llama-bpe") == [1, *inner]
    assert ids(pre="llama-bpe", add_bos_token=False, add_eos_token=True) == [*inner, 2]
    assert ids() == inner


def test_tokenizers_that_are_not_read(tmp_path: Path) -> None:
    def refused(**settings: Any) -> str:
        path = write(tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf", BYTE_LEVEL, **SPECIAL, **settings)
        with pytest.raises(ModelError) as caught:
            read_tokenizer(read_file(path))
        return str(caught.value)

    assert "how texts are cut into tokens there ('viking') is not known" in refused(pre="viking")
    assert "of the kind 'rwkv', which is not read" in refused(model="rwkv")
    assert "its add_bos_token is 1, neither true nor false" in refused(pre="gpt-2", add_bos_token=1)
