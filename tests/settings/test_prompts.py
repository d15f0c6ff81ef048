"""A prompt is a text or the name of a stored one, and never taken for the other."""

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError
from gerund.inference.encode.texts import text_tokens
from gerund.settings.templates import PromptText, choose_prompt
from tests.cli.helpers import run_cli

STORED = {"query": "Find: ", "document": ""}
TEXTS = ["the cat", "a tin"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, prompts=STORED, dtype="float32")


@pytest.mark.parametrize(
    ("stored", "prompt", "name", "message"),
    [
        ({}, None, "query", r"unknown prompt 'query': this encoder has none by name; store some \(load\(prompts="),
        (STORED, None, "qury", "unknown prompt 'qury'; valid are: query, document; did you mean 'query'"),
        (STORED, None, "Find: ", "unknown prompt 'Find: '"),
        (
            STORED,
            "query",
            None,
            r"would put this very word .* named by prompt_name, .* such as 'query: '",
        ),
        ({}, "query", None, "prompt='query' would put this very word"),
        ({}, "qurey", None, "prompt='qurey' would put this very word"),
        ({"ask this": "x"}, "ask this", None, "prompt='ask this' would put this very word"),
        (STORED, "Find: ", "query", "give a text as prompt or the name of a stored one as prompt_name, not both"),
        (STORED, 4, None, "a prompt is a text, and so is the name of one, not 4"),
        (STORED, None, b"query", "a prompt is a text"),
    ],
)
def test_what_is_neither_is_refused(stored, prompt, name, message):
    with pytest.raises(ConfigError, match=message):
        choose_prompt(stored, prompt, name)


@pytest.mark.parametrize("text", ["", "Find: ", "Find:", "two words", "検索", "search_query: "])
def test_texts_are_taken_as_they_are(text):
    assert choose_prompt(STORED, text, None) == text
    assert choose_prompt(STORED, PromptText("query"), None) == "query"


def test_a_name_gives_what_its_text_gives_in_every_verb(lm):
    by_text, by_name = {"prompt": "Find: "}, {"prompt_name": "query"}
    plain = lm.encode(TEXTS)
    for verb in (
        lambda **given: lm.encode(TEXTS, **given),
        lambda **given: lm.encode_with_usage(TEXTS, **given).vectors,
        lambda **given: np.concatenate(lm.encode_tokens(TEXTS, **given)),
        lambda **given: np.concatenate(lm.encode_spans(TEXTS, [[(0, 3)], [(2, 5)]], **given)),
        lambda **given: np.concatenate(lm.encode_words([["a", "tin"]], **given)),
        lambda **given: lm.similarity("the rain", TEXTS, **given),
        lambda **given: np.array([one.ids for one in text_tokens(lm.runtime, ["a tin"], **given)]),
    ):
        found = verb(**by_name)
        np.testing.assert_array_equal(found, verb(**by_text))
        other = verb()
        assert found.shape != other.shape or np.abs(found - other).max() > 1e-4
        with pytest.raises(ConfigError, match="unknown prompt 'qury'"):
            verb(prompt_name="qury")
    np.testing.assert_array_equal(lm.encode(TEXTS, prompt_name="document"), plain)


def test_similarity_puts_it_before_texts_and_not_before_vectors(lm):
    vectors = lm.encode(TEXTS, prompt_name="query")
    both = lm.similarity("the rain", TEXTS, prompt_name="query")
    np.testing.assert_allclose(lm.similarity("the rain", vectors, prompt_name="query"), both, atol=1e-6)
    assert np.abs(both - lm.similarity("the rain", TEXTS)).max() > 1e-4


def test_load_stores_them_and_its_spec_says_so(lm):
    assert dict(lm.encoder.prompts) == STORED
    assert gerund.load(lm.spec).encoder.prompts == STORED
    with pytest.raises(ConfigError, match="prompts"):
        gerund.load(prompts=["query"])


@pytest.mark.slow
def test_on_the_command_line(lm, tiny_folder, tmp_path):
    lm.save(tmp_path / "model")
    (tmp_path / "in.txt").write_text("the cat\na tin\n")
    base = ["embed", tmp_path / "in.txt", "-m", tmp_path / "model", "--dtype", "float32"]
    ran = run_cli(*base, "-o", tmp_path / "a.npy", "--prompt-name", "query")
    assert ran.code == 0, ran.err
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), lm.encode(TEXTS, prompt="Find: "), atol=1e-6)
    for given, message in [
        (["--prompt-name", "qury"], "unknown prompt 'qury'; valid are: query, document; did you mean 'query'?"),
        (["--prompt", "query"], "prompt='query' would put this very word before every text"),
        (["--prompt", "x: ", "--prompt-name", "query"], "not both"),
    ]:
        assert message in run_cli(*base, "-o", tmp_path / "b.npy", *given).mistake
    plain = ["embed", tmp_path / "in.txt", "-m", tiny_folder, "-o", tmp_path / "b.npy", "--prompt-name", "query"]
    assert "this encoder has none by name" in run_cli(*plain).mistake
