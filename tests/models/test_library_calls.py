"""A tokenizer that fails, or has no token for a text, ends in one sentence, also where its Rust code panics."""

import copy
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import gerund
from gerund.errors import ModelError, TextError
from gerund.inference.text_ids import encode_texts
from gerund.models.library_calls import checked_tokenizer
from tests.cli.helpers import run_cli
from tests.tiny import byte_tokenizer

WITH_SPECIAL = [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
PAIR = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]


@pytest.fixture
def changed(tiny_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes the tiny model with other parts in its ``tokenizer.json``."""

    def change(**parts: object) -> Path:
        folder = shutil.copytree(tiny_folder, tmp_path / "model")
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
        return folder

    return change


def put_before(number: int) -> dict[str, object]:
    special = {"<x>": {"id": "<x>", "ids": [number], "tokens": ["<x>"]}}
    return {"type": "TemplateProcessing", "single": WITH_SPECIAL, "pair": PAIR, "special_tokens": special}


@pytest.mark.parametrize("number", [266, 9999, 2**31])
def test_a_post_processor_that_names_a_number_without_a_token(changed: Callable[..., Path], number: int) -> None:
    folder = changed(post_processor=put_before(number))
    said = run_cli("generate", "a cat", "-m", folder).mistake
    assert said.startswith(f"cannot load {folder}: its tokenizer puts token {number} around a text")


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
        {"decoder": {"type": "Strip", "content": "a", "start": 10, "stop": 10}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    ],
    ids=["reading", "writing", "loading"],
)
def test_a_tokenizer_that_panics_on_every_text(changed: Callable[..., Path], parts: dict[str, object]) -> None:
    folder = changed(**parts)
    with pytest.raises(ModelError, match=r"cannot load the tokenizer of .*/model: "):
        gerund.load(folder)


def test_a_tokenizer_that_panics_on_some_texts() -> None:
    class PanicError(BaseException):
        """As a library in Rust raises it: no Exception."""

    class Panicking(PreTrainedTokenizerFast):
        def __call__(self, text: Any, **options: Any) -> Any:
            if "z" in text[0]:
                raise PanicError("index out of bounds")
            return super().__call__(text, **options)

    tokenizer = checked_tokenizer(Panicking(tokenizer_object=byte_tokenizer().backend_tokenizer))
    assert encode_texts(tokenizer, ["a"])[0].ids
    with pytest.raises(TextError, match="this model's tokenizer fails on this text: index out of bounds"):
        encode_texts(tokenizer, ["a z"])


def test_an_id_that_is_no_token() -> None:
    with pytest.raises(TextError, match="this model's tokenizer fails on this text"):
        checked_tokenizer(byte_tokenizer()).decode([-1])


def test_a_checked_tokenizer_is_what_it_was(tmp_path: Path) -> None:
    plain = byte_tokenizer()
    tokenizer = checked_tokenizer(copy.deepcopy(plain))
    assert checked_tokenizer(tokenizer) is tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    for other in (tokenizer, copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert type(other) is type(tokenizer)
        assert other("a cat")["input_ids"] == plain("a cat")["input_ids"]
        assert other.decode([40, 41]) == plain.decode([40, 41])
    for own, name in ((plain, "plain"), (tokenizer, "checked")):
        own.save_pretrained(tmp_path / name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "checked" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_an_empty_vocabulary(changed: Callable[..., Path], tiny_folder: Path) -> None:
    model = json.loads((tiny_folder / "tokenizer.json").read_text())["model"]
    folder = changed(model={**model, "vocab": {}, "merges": []})
    with pytest.raises(ModelError, match="its vocabulary is empty, so that no text has a token"):
        gerund.load(folder)


def test_a_text_that_has_no_tokens(changed: Callable[..., Path], tiny_folder: Path) -> None:
    model = json.loads((tiny_folder / "tokenizer.json").read_text())["model"]
    lm = gerund.load(changed(model={**model, "vocab": {"c": 5}, "merges": []}), dtype="float32")
    assert lm.encode("a cat").any()
    for prompt in ("", "c: "):
        with pytest.raises(TextError, match="text 1 has no tokens: this model's vocabulary has none of its characters"):
            lm.encode(["a cat", "dog"], prompt)
    vectors = lm.encode(["a cat", "dog", " "], empty="zeros")
    assert [bool(vector.any()) for vector in vectors] == [True, False, False]


def test_a_panic_anywhere_else_is_one_sentence_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    panic = type("PanicException", (BaseException,), {})
    monkeypatch.setattr("gerund.models.sources.find", lambda *_: (_ for _ in ()).throw(panic("out of\nbounds")))
    assert run_cli("convert", "a", "b").mistake == "a library failed on what was given: out of bounds"
