"""Texts as OpenAI's objects, without a server."""

import json
from typing import get_args

import pytest

pytest.importorskip("fastapi", reason="needs gerund[serve]")

from gerund.scoring.names import MEASURE_NAMES, MODEL_NAMES
from gerund.server.openai_format import Form
from gerund.server.schemas.generation import ScorerName
from gerund.types import Generation, TokenLogprob


def test_offsets_of_characters_that_several_tokens_spell() -> None:
    spelled = ["日", "本", " ", "a"]
    tokens = [TokenLogprob(byte, bytes([byte]), -1.0) for byte in "日本 a".encode()]
    generation = Generation("日本 a", [one.token_id for one in tokens], -1.0, finished=False, logprobs=tokens)
    [choice] = Form("text", "m").whole([generation], {})["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 3]
    form, streamed = Form("text", "m"), []
    for place, text in enumerate(spelled):
        own = tokens[3 * place : 3 * place + 3] if place < 2 else tokens[4 + place : 5 + place]
        streamed += form.piece(0, text, own)["choices"][0]["logprobs"]["text_offset"]
    assert streamed == [0, 0, 0, 1, 1, 1, 2, 3]


def test_scorers_are_those_of_the_library() -> None:
    assert set(get_args(ScorerName)) == {*MODEL_NAMES, *MEASURE_NAMES}


def test_impossible_logprobs_are_json() -> None:
    token = TokenLogprob(1, b"\xf0", float("-inf"), (TokenLogprob(2, b"b", float("-inf")),))
    one = Generation("b", [1], 0.0, True, logprobs=[token])
    for kind in ("chat", "text"):
        shown = Form(kind, "m").whole([one], {})  # type: ignore[arg-type]
        assert "-9999.0" in json.dumps(shown, allow_nan=False)
