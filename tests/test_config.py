"""Prompts by name, and what is a slip rather than a text."""

import pytest

import gerund
from gerund.errors import ConfigError

NAMED = gerund.EncoderConfig(prompt="own: ", prompts={"query": "Question: ", "document": ""})


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (None, "own: "),
        ("query", "Question: "),
        ("document", ""),
        ("querying a text: ", "querying a text: "),
        ("Read", "Read"),
        ("", ""),
    ],
)
def test_a_prompt_is_a_name_or_a_text(given, used):
    assert NAMED.prompt_text(given) == used


@pytest.mark.parametrize("slip", ["qeury", "queries", "Query", "documents"])
def test_a_slip_in_a_name_is_not_taken_for_a_text(slip):
    with pytest.raises(ConfigError, match=f"unknown prompt '{slip}'; valid are: query, document"):
        NAMED.prompt_text(slip)
    assert gerund.EncoderConfig().prompt_text(slip) == slip
