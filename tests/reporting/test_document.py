"""results.json reads back to what was measured, and two runs differ in it only where they do."""

import json
import random
from dataclasses import replace

import pytest

from gerund.evaluation.run import Result
from gerund.evaluation.task import EvaluationConfig
from gerund.reporting.comparison import compare
from gerund.reporting.evaluation import FORMAT, results_json
from gerund.reporting.rendering import bare_name, versions
from gerund.version import __version__
from tests.reporting.results import made, several

SETTINGS = EvaluationConfig(seed=3, prompts={"sts": "Find 雪: "})


def document(results):
    return json.loads(results_json(compare(results), SETTINGS))


def test_everything_reads_back():
    results = several()
    found = document(results)
    descriptions = {one["label"]: one["description"] for one in found["systems"]}
    runs = {(run["task"], run["system"]): run for run in found["runs"]}
    back = [
        Result.from_dict(
            {**runs[score["task"], score["system"]], **score, "description": descriptions[score["system"]]}
        )
        for score in found["scores"]
    ]
    key = lambda result: (result.task, result.system)  # noqa: E731
    assert sorted(back, key=key) == sorted(results, key=key)


def test_what_else_it_says():
    found = document(several())
    assert found["format"] == FORMAT == 3
    assert found["gerund"] == __version__
    assert found["config"] == SETTINGS.to_dict()
    assert found["packages"] == versions()
    assert {"torch", "transformers"} <= found["packages"].keys()
    assert [one["label"] for one in found["systems"]] == ["causal", "mask0-bidir k=2", "other: causal", "bm25"]
    assert "雪" in results_json(compare(several()), SETTINGS)


def test_order_does_not_depend_on_the_order_of_measuring():
    results = several()
    shuffled = results[:4] + random.Random(0).sample(results[4:], len(results) - 4)
    assert results_json(compare(shuffled), SETTINGS) == results_json(compare(results), SETTINGS)


def test_a_second_run_differs_in_times_only():
    results = several()
    again = [replace(result, seconds=9.0, date="2031-01-01T00:00:00+00:00") for result in results]
    first, second = document(results), document(again)
    assert first != second
    assert first.pop("runs") != second.pop("runs")
    assert first == second


def test_no_path_of_the_machine():
    model = "/somewhere/private/models/tiny"
    text = results_json(compare([made("sts/one", "a", 0.5, model=model)]), SETTINGS)
    assert json.loads(text)["systems"][0]["description"]["model"] == "tiny"
    assert "private" not in text.replace(f"{model}-a", "").replace(f"weights of {model}", "")


@pytest.mark.parametrize(
    "name, expected",
    [
        ("default", "default"),
        ("org/model", "org/model"),
        ("./model", "model"),
        ("../up/model", "model"),
        ("~/model", "model"),
        ("a/b/c", "c"),
        ("/a/b", "b"),
        ("C:\\models\\tiny", "tiny"),
        ("a model in memory", "a model in memory"),
        ("", ""),
    ],
)
def test_bare_name(name, expected):
    assert bare_name(name) == expected
