"""The comparison by hand: what is best, what means are over, which result counts, what the notes say."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gerund.evaluation.task import EvaluationConfig, Examples, Score
from gerund.reporting.comparison import NOTHING, compare, render, shown, significance_of, telling_examples
from gerund.reporting.evaluation import results_json, write_page
from tests.reporting.results import SETTINGS, made, several


def row_of(comparison, task):
    return next(row for row in comparison.rows if row.task == task)


def numbers(row):
    return [None if cell is None else cell.shown for cell in row.cells]


def best(row):
    return [cell is not None and cell.best for cell in row.cells]


def group_of(comparison, kind):
    return next(group for section in comparison.sections for group in section.groups if group.kind == kind)


def test_rows_columns_and_sections():
    comparison = compare(several())
    assert [column.label for column in comparison.columns] == ["causal", "mask0-bidir k=2", "other: causal", "bm25"]
    assert [column.only_ranks for column in comparison.columns] == [False, False, False, True]
    assert [(section.side, [group.kind for group in section.groups]) for section in comparison.sections] == [
        ("representation", ["sts", "retrieval", "classification"]),
        ("tokens", ["ner"]),
        ("generation", ["perplexity", "writing"]),
    ]
    assert [row.title for row in comparison.sections[0].groups[0].rows] == ["one", "two"]
    assert numbers(row_of(comparison, "classification/one")) == ["60.00", "65.00", None, None]
    assert comparison.columns[0].seconds == pytest.approx(8 * 1.5)
    assert len(comparison.results) == len(several())


def test_sides_stand_in_one_order_whatever_came_first():
    comparison = compare([made("perplexity/one", "a", 1.0), made("ner/one", "a", 0.5), made("sts/one", "a", 0.5)])
    assert [section.side for section in comparison.sections] == ["representation", "tokens", "generation"]


@pytest.mark.parametrize(
    "task, values, expected",
    [
        ("sts/one", (0.1, 0.3, 0.2), [False, True, False]),
        ("sts/one", (0.3, 0.1, 0.3), [True, False, True]),
        # Printed alike is equally good.
        ("sts/one", (0.30001, 0.1, 0.30002), [True, False, True]),
        ("sts/one", (-0.1, -0.3, -0.2), [True, False, False]),
        ("perplexity/one", (1.2, 1.1, 1.3), [False, True, False]),
        ("infilling/one", (100.0, 20.0, 9.0), [False, False, True]),
        # Where all are equal none is better than another.
        ("sts/one", (0.2, 0.2, 0.2), [False, False, False]),
        ("sts/one", (0.2,), [False]),
    ],
)
def test_best(task, values, expected):
    row = row_of(compare([made(task, name, value) for name, value in zip("abc", values, strict=False)]), task)
    assert best(row) == expected


def test_a_missing_score_is_not_best():
    comparison = compare([made("perplexity/one", "a", 2.0), made("perplexity/one", "b", 1.0), made("sts/x", "c", 0.1)])
    assert best(row_of(comparison, "perplexity/one")) == [False, True, False]
    assert numbers(row_of(comparison, "sts/x")) == [None, None, "10.00"]


def test_the_newest_result_counts_whatever_its_place():
    old = made("sts/one", "a", 0.1, date="2025-01-01T00:00:00+00:00")
    new = made("sts/one", "a", 0.2, date="2025-01-02T00:00:00+00:00")
    for results in ([old, new], [new, old]):
        comparison = compare(results)
        assert numbers(row_of(comparison, "sts/one")) == ["20.00"]
        assert comparison.columns[0].seconds == 1.5
    # Of two from the same second, the later in the list.
    assert numbers(row_of(compare([new, made("sts/one", "a", 0.3, date=new.date)]), "sts/one")) == ["30.00"]


def test_means_are_over_what_every_system_finished():
    comparison = compare(several())
    representation = comparison.sections[0]
    # classification/one is not finished by all; BM25 keeps nothing out.
    assert representation.mean.label == "mean of 4 of 5 tasks"
    expected = [(0.41 + 0.30 + 0.20 + 0.10) / 4, (0.52 + 0.35 + 0.31 + 0.21) / 4, (0.52 + 0.40 + 0.30 + 0.20) / 4]
    assert representation.mean.values[:3] == pytest.approx(expected)
    assert representation.mean.values[3] is None
    assert representation.mean.shown == ("25.25", "34.75", "35.50", "")
    assert representation.mean.best == (False, False, True, False)


def test_means_of_a_kind():
    comparison = compare(several())
    sts, retrieval, classification = (
        group_of(comparison, kind).mean for kind in ("sts", "retrieval", "classification")
    )
    assert sts.shown == ("35.50", "43.50", "46.00", "")
    assert sts.label == "mean of 2 tasks"
    # BM25 finished all of this kind.
    assert retrieval.shown == ("15.00", "26.00", "25.00", "57.00")
    assert retrieval.best == (False, False, False, True)
    # Who has no score of a kind keeps none of the others out.
    assert classification.shown == ("60.00", "65.00", "", "")
    assert classification.label == "mean of 1 task"
    # BM25 has no mean of what it did not finish.
    fewer = [result for result in several() if (result.task, result.system) != ("retrieval/two", "bm25")]
    assert group_of(compare(fewer), "retrieval").mean.shown == ("15.00", "26.00", "25.00", "")


def test_without_a_common_task_means_are_blank_and_say_so():
    comparison = compare([made("sts/one", "a", 0.1), made("sts/two", "b", 0.2)])
    mean = comparison.sections[0].mean
    assert mean.values == (None, None)
    assert mean.shown == ("", "")
    assert mean.best == (False, False)
    assert mean.label == "mean: no task was finished by all alike"


def test_perplexities_have_a_geometric_mean():
    results = [made(f"infilling/{name}", "a", value) for name, value in (("one", 2.0), ("two", 8.0))]
    mean = group_of(compare(results), "infilling").mean
    assert mean.shown == ("4.00",)
    assert mean.label == "geometric mean of 2 tasks"


def test_different_units_have_no_mean():
    generation = compare(several()).sections[2]
    assert generation.mean is None
    assert [group.mean.shown for group in generation.groups] == [
        ("1.250", "1.250", "1.100", ""),
        ("5.00", "5.00", "7.00", ""),
    ]


def test_notes_are_numbered_and_stand_with_what_they_are_about():
    results = [
        made("sts/one", "a", 0.1, notes=("Both know this", "Only a knows this.")),
        made("sts/one", "b", 0.1, notes=("Both know this",)),
        made("sts/two", "b", 0.1, notes=("Only a knows this.", "Twice!", "Twice!")),
        made("sts/three", "b", 0.1),
    ]
    comparison = compare(results)
    one, two = row_of(comparison, "sts/one"), row_of(comparison, "sts/two")
    assert comparison.notes == ("Both know this.", "Only a knows this.", "Twice!")
    assert (one.notes, [cell.notes for cell in one.cells]) == ((1,), [(2,), ()])
    assert (two.notes, two.cells[1].notes) == ((2, 3), ())


def test_limit_and_split_are_said():
    config = {**SETTINGS, "limit": 200, "split": "validation"}
    comparison = compare([made("sts/one", "a", 0.1, config=config), made("sts/two", "a", 0.1)])
    assert comparison.notes == ("Scored on at most 200 examples.", "Scored on the validation split.")
    assert (row_of(comparison, "sts/one").notes, row_of(comparison, "sts/two").notes) == ((1, 2), ())


def test_what_holds_for_all_scores_is_said_once():
    config = {**SETTINGS, "limit": 200}
    results = [made(f"sts/{name}", "a", 0.1, config=config, notes=(name,)) for name in ("one", "two")]
    comparison = compare(results)
    assert comparison.remarks == ("Scored on at most 200 examples.",)
    assert comparison.notes == ("one.", "two.")
    assert [row.notes for row in comparison.rows] == [(1,), (2,)]


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {**SETTINGS, "limit": 10}},
        {"config": {**SETTINGS, "split": "validation"}},
        {"options": {"shots": 4}},
        {"score": Score("else", {"else": 0.9})},
    ],
)
def test_what_was_measured_otherwise_is_not_compared(changes):
    results = [
        made("sts/one", "a", 0.1),
        made("sts/one", "b", 0.2, **changes),
        made("sts/two", "a", 0.3),
        made("sts/two", "b", 0.2),
    ]
    comparison = compare(results)
    row = row_of(comparison, "sts/one")
    assert not row.comparable
    assert best(row) == [False, False]
    assert "under different settings" in comparison.notes[row.notes[0] - 1]
    assert group_of(comparison, "sts").mean.shown == ("30.00", "20.00")
    assert group_of(comparison, "sts").mean.label == "mean of 1 of 2 tasks"


def test_options_are_said_where_they_differ():
    results = [made("sts/one", name, 0.1, options={"shots": shots}) for name, shots in (("a", 4), ("b", 8))]
    comparison = compare(results)
    assert [comparison.notes[cell.notes[0] - 1] for cell in row_of(comparison, "sts/one").cells] == [
        "Options: shots=4.",
        "Options: shots=8.",
    ]


def test_prompts_and_seeds_may_differ():
    results = [made("sts/one", "a", 0.1), made("sts/one", "b", 0.2, config={**SETTINGS, "prompts": {"sts": "q"}})]
    assert row_of(compare(results), "sts/one").comparable


def test_spreads_are_printed_in_the_same_unit():
    cell = row_of(compare([made("sts/one", "a", 0.5, spread=0.0123)]), "sts/one").cells[0]
    assert (cell.shown, cell.spread, cell.value, cell.seconds) == ("50.00", "1.23", 0.5, 1.5)
    assert row_of(compare([made("sts/one", "a", 0.5, spread=0.0)]), "sts/one").cells[0].spread == "0.00"


@pytest.mark.parametrize(
    "value, unit, expected",
    [
        (1.0, "percent", "100.00"),
        (0.005, "fraction", "0.50"),
        (99999.4, "perplexity", "99999.40"),
        (123456.7, "perplexity", "1.23e+05"),
        (7.0, "bits", "7.000"),
        (-0.000001, "percent", "0.00"),
        (-0.5, "percent", "-50.00"),
    ],
)
def test_numbers_as_printed(value, unit, expected):
    assert shown(value, unit) == expected


def test_nothing_to_compare():
    comparison = compare([])
    assert (comparison.columns, comparison.sections, comparison.notes, comparison.remarks) == ((), (), (), ())


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
    leads = [lead for lead in significance.leads if lead.task == "retrieval/one"]
    best = max(comparison.rows[0].present, key=lambda cell: cell.value).result.system
    assert {lead.best for lead in leads} == {best}
    assert {lead.other for lead in leads} == {"good", "alike", "bad"} - {best}
    sure = {lead.other: lead.is_sure for lead in leads}
    assert sure["bad"]
    assert sum(sure.values()) == 1, "what differs by less than its noise is not sure"
    assert all(lead.p >= lead.difference.p for lead in leads)
    assert "sts/one" not in {lead.task for lead in significance.leads}, "without examples there is nothing to compare"
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
