"""Which differences a table says are sure, and where it says so."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gerund.evaluation.task import EvaluationConfig, Examples, Score
from gerund.reporting.comparison import NOTHING, compare, significance_of, telling_examples
from gerund.reporting.evaluation import results_json, write_page
from gerund.reporting.terminal import render
from tests.reporting.results import made

COUNT = 80


def measured(task, system, values, **changes):
    examples = Examples.of_mean(values, [f"q{row}" for row in range(len(values))])
    mean = float(np.mean(examples.values))
    return replace(made(task, system, mean, **changes), score=Score("main", {"main": mean}, examples=examples))


@pytest.fixture(scope="module")
def comparison():
    rng = np.random.default_rng(0)
    base = rng.random(COUNT) * 0.6
    results = [
        measured("retrieval/one", "good", base + 0.3),
        measured("retrieval/one", "alike", base + 0.29 + 0.2 * rng.normal(size=COUNT)),
        measured("retrieval/one", "bad", base * 0.5),
        made("sts/one", "good", 0.5),
        made("sts/one", "bad", 0.4),
    ]
    return compare(results)


@pytest.fixture(scope="module")
def significance(comparison):
    return significance_of(comparison)


def test_the_best_is_compared_with_every_other(comparison, significance):
    leads = significance.leads_of("retrieval/one")
    best = max(comparison.rows[0].present, key=lambda cell: cell.value).result.system
    assert {lead.best for lead in leads} == {best}
    assert {lead.other for lead in leads} == {"good", "alike", "bad"} - {best}
    sure = {lead.other: lead.is_sure for lead in leads}
    assert sure["bad"]
    assert sum(sure.values()) == 1, "what differs by less than its noise is not sure"
    assert all(lead.p >= lead.difference.p for lead in leads)
    assert significance.leads_of("sts/one") == [], "without examples there is nothing to compare"
    assert set(significance.intervals) == {("retrieval/one", name) for name in ("good", "alike", "bad")}


def test_rows_under_other_settings_are_not_compared():
    one, other = measured("retrieval/one", "a", [1, 0, 1]), measured("retrieval/one", "b", [0, 0, 1])
    mixed = compare([one, replace(other, config={**other.config, "limit": 3})])
    assert significance_of(mixed).leads == ()


def test_in_results_json(comparison, significance):
    found = json.loads(results_json(comparison, EvaluationConfig(), significance))
    by_place = {(score["task"], score["system"]): score for score in found["scores"]}
    intervals = {(one["task"], one["system"]): one["interval"] for one in found["intervals"]}
    assert len(intervals) == 3
    low, high = intervals["retrieval/one", "good"]
    assert low < by_place["retrieval/one", "good"]["score"]["metrics"]["main"] < high
    assert by_place["retrieval/one", "bad"]["score"]["examples"]["ids"][:2] == ["q0", "q1"]
    assert len(found["differences"]) == 2
    names = {"task", "better", "other", "difference", "interval", "p", "p_holm", "examples"}
    assert names == set(found["differences"][0])
    assert json.loads(results_json(comparison, EvaluationConfig()))["differences"] == []


def test_on_the_terminal_the_doubtful_come_first(comparison, significance):
    out = io.StringIO()
    render(comparison, Console(file=out, width=120), significance)
    lines = out.getvalue().split("difference to the best")[1].splitlines()
    assert "bad" in lines[2]
    assert "p < 0.001" in lines[2] or "p = 0.0" in lines[2]
    assert "p = " in lines[1]
    out = io.StringIO()
    render(comparison, Console(file=out, width=120), NOTHING)
    assert "difference to the best" not in out.getvalue()


def test_what_is_equal_is_not_called_better(tmp_path):
    table = compare([measured("retrieval/one", name, [1, 0, 0.5]) for name in "ab"])
    found = significance_of(table)
    assert "<td>equal</td>" in write_page(tmp_path, table, significance=found).read_text()
    out = io.StringIO()
    render(table, Console(file=out, width=120), found)
    assert "difference to the best" not in out.getvalue()


def test_on_the_page(comparison, significance, tmp_path):
    page = write_page(tmp_path, comparison, significance=significance).read_text()
    assert page.count("<td>unsure</td>") == 1
    assert page.count("<td>yes</td>") == 1
    result = comparison.rows[0].cells[0].result
    assert f'<span class="spread">{significance.interval_text(result)}</span>' in page
    assert "farthest apart" in page
    assert "farthest apart" not in write_page(tmp_path, compare([made("sts/one", "a", 0.5)])).read_text()


def test_the_examples_that_tell_systems_apart():
    one, other = measured("retrieval/one", "a", [1, 0.5, 0.2, 0.3]), measured("retrieval/one", "b", [0, 0.5, 0.9, 0.2])
    [row] = compare([one, other, made("retrieval/one", "old", 0.1)]).rows
    found = telling_examples(row)
    assert [example.id for example in found] == ["q0", "q2", "q3"]
    assert found[0].values == (1.0, 0.0, None)


def test_the_plan_that_an_adapter_was_trained_under_is_said():
    result = made("sts/one", "causal", 0.5)
    trained = {"name": "mask0-bidir", "k": 3, "k0": None}
    said = "The adapter mine was trained under mask0-bidir k=3, and is read under another plan."
    for attention, wanted in ((trained, False), ({**trained, "k": 2}, True)):
        description = {**result.description, "attention": attention, "adapter_name": "mine", "adapter_plan": trained}
        table = compare([replace(result, description=description)])
        assert (said in (*table.notes, *table.remarks)) is wanted
