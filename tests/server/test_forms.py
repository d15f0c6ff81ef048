"""Texts that have to have a form, in the words of OpenAI and of vLLM, against the library's own."""

import json
from typing import Any

import pytest

from tests.server.conftest import Running

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def test_forms(live: Running, served_lm: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["yes", "no"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 64, "temperature": 0}
    found = live.ok("/v1/chat/completions", **body, response_format=form)
    [expected] = served_lm.chat(HELLO, 64, schema=schema)
    assert found["choices"][0]["message"]["content"] == expected.text
    assert json.loads(expected.text) in ("yes", "no")
    text = live.ok("/v1/chat/completions", **{**body, "max_tokens": 5}, response_format={"type": "json_object"})
    assert text["choices"][0]["message"]["content"].startswith("{")
    plain = live.ok("/v1/chat/completions", **{**body, "max_tokens": 5}, response_format={"type": "text"})
    assert plain["choices"] == live.ok("/v1/chat/completions", **{**body, "max_tokens": 5})["choices"]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, {"regex": "[a-c]{3}"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"structured_outputs": {"json": {"enum": ["a"]}}}, {"schema": {"enum": ["a"]}}),
        ({"guided_regex": "[a-c]{3}"}, {"regex": "[a-c]{3}"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_json": '{"enum": ["a"]}'}, {"schema": {"enum": ["a"]}}),
    ],
)
def test_forms_in_the_words_of_vllm(live: Running, served_lm: Any, form: Any, options: Any) -> None:
    pytest.importorskip("llguidance")
    found = live.ok("/v1/completions", prompt="the", max_tokens=8, temperature=0, **form)
    [expected] = served_lm.generate("the", 8, **options)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (expected.text, "stop")


ITSELF: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False,
     "$defs": {"n": {"$ref": "#/$defs/n"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ITSELF)
def test_a_schema_that_is_defined_by_itself_alone(live: Running, schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    found = live.post("/v1/completions", prompt="the", max_tokens=40, guided_json=schema)
    assert found.status_code == 400, found.text
    assert "defined only by itself" in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == "guided_json"


def test_a_schema_may_contain_itself(live: Running) -> None:
    pytest.importorskip("llguidance")
    tree = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"],
            "additionalProperties": False}  # fmt: skip
    found = live.ok("/v1/completions", prompt="the", max_tokens=12, guided_json=tree, temperature=0)
    assert found["choices"][0]["text"].lstrip().startswith("{")
