"""A report holds what its folder holds, under names that stay apart; and is all written."""

import base64
import json
import random
from dataclasses import replace

import pytest

import gerund
from gerund.errors import DataError
from gerund.evaluation.run import Evaluation, Result, evaluate
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.reporting import evaluation
from gerund.reporting.comparison import compare
from gerund.reporting.evaluation import FORMAT, SUMMARY, joined, results_json, write_page, write_report
from gerund.reporting.rendering import Gallery, Picture, bare_name, duration, versions
from gerund.settings.model_spec import parse_encoder_spec
from gerund.version import __version__
from tests.evaluation.tables import FakeEncoder
from tests.evaluation.toys import ToyTask, ToyWriting
from tests.reporting.html import checked
from tests.reporting.results import SETTINGS, made, several


def done(*results, labels=()):
    """Return an evaluation of results, by systems whose fingerprints are those of ``made``."""

    class Named(FakeEncoder):
        fingerprint = property(lambda self: f"tiny-{self.label}" if self.label != "bm25" else "bm25")

    return Evaluation(list(results), [Named(label) for label in labels], [], EvaluationConfig())


def cells(results):
    return {(result.task, result.system): result.score.value for result in results}


def test_earlier_tasks_and_systems_stand_beside_the_new():
    now = made("sts/one", "a", 0.5)
    earlier = [made("sts/two", "a", 0.4), made("sts/one", "b", 0.3), made("retrieval/one", "bm25", 0.2)]
    assert cells(joined(done(now, labels=["a"]), earlier)) == {
        ("sts/one", "a"): 0.5,
        ("sts/two", "a"): 0.4,
        ("sts/one", "b"): 0.3,
        ("retrieval/one", "bm25"): 0.2,
    }


def test_what_was_asked_for_now_counts_even_if_it_was_measured_first():
    now = made("sts/one", "a", 0.5, date="2020-01-01T00:00:00+00:00")
    assert cells(joined(done(now, labels=["a"]), [made("sts/one", "a", 0.9)])) == {("sts/one", "a"): 0.5}


def test_an_earlier_result_takes_the_present_name():
    earlier = made("sts/two", "old name", 0.4)
    earlier = replace(earlier, description={**earlier.description, "fingerprint": "tiny-a"})
    assert cells(joined(done(made("sts/one", "a", 0.5), labels=["a"]), [earlier])).keys() == {
        ("sts/one", "a"),
        ("sts/two", "a"),
    }


def test_other_models_of_the_same_name_are_told_apart():
    earlier = [
        made("sts/one", "a", 0.4, model="/private/other"),
        replace(made("sts/one", "a", 0.3, model="else/other"), description={"model": "other", "fingerprint": "f0"}),
    ]
    found = cells(joined(done(made("sts/one", "a", 0.5), labels=["a"]), earlier))
    assert found == {("sts/one", "a"): 0.5, ("sts/one", "other: a"): 0.4, ("sts/one", "other: a (f0)"): 0.3}


@pytest.mark.parametrize(
    "prompts, other, fits",
    [
        ({}, {}, True),
        ({}, {"seed": 1}, False),
        ({}, {"limit": 10}, False),
        ({}, {"split": "validation"}, False),
        ({}, {"prompts": {"sts": "Find: "}}, False),
        ({}, {"document_prompts": {"sts": "Text: "}}, False),
        # Prompts of other tasks do not matter.
        ({"one": "a"}, {"prompts": {"two": "b"}}, True),
        ({"one": "a"}, {"prompts": {"one": "a", "two": "b"}}, True),
        ({"one": "a"}, {"prompts": {"one": "c"}}, False),
    ],
)
def test_what_was_told_otherwise_is_left_out(prompts, other, fits):
    now = replace(done(made("sts/one", "a", 0.5), labels=["a"]), config=EvaluationConfig(prompts=prompts))
    earlier = made("sts/two", "a", 0.4, config={**SETTINGS, **other})
    assert (len(joined(now, [earlier])) == 2) == fits


def test_what_depends_on_the_weights_holds_for_every_plan():
    """An earlier evaluation kept it once, for the plan that came first."""
    earlier = [made("perplexity/one", "a", 1.2), made("sts/one", "a", 0.4), made("sts/one", "b", 0.3)]
    earlier.append(made("sts/one", "c", 0.3, model="other"))
    found = joined(done(made("sts/one", "new", 0.5), labels=["new"]), earlier)
    assert {key: value for key, value in cells(found).items() if key[0] == "perplexity/one"} == {
        ("perplexity/one", "a"): 1.2,
        ("perplexity/one", "b"): 1.2,
        ("perplexity/one", "new"): 1.2,
    }
    assert {result.system for result in found if result.description["fingerprint"] == "tiny-new"} == {"new"}


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder)


TASKS = (ToyTask(name="toy/one"), ToyWriting(name="toy-writing/one"))


def evaluated(lm, folder, *plans, tasks=TASKS):
    configs = [parse_encoder_spec(text) for text in plans]
    return evaluate(systems_of([lm], configs), list(tasks), folder=folder)


def test_a_report_is_written_and_added_to(lm, tmp_path, capsys):
    first = write_report(tmp_path, evaluated(lm, tmp_path, "causal", "mask0-bidir:k=2"), pictures=False)
    assert [column.label for column in first.comparison.columns] == ["causal", "mask0-bidir k=2"]
    second = write_report(
        tmp_path, evaluated(lm, tmp_path, "inter-back:k=1", tasks=[ToyTask(name="toy/two")]), pictures=False
    )
    assert second.json == tmp_path / "results.json"
    assert second.page == tmp_path / "report.html"
    labels = ["inter-back k=1", "causal", "mask0-bidir k=2"]
    assert [one["label"] for one in json.loads(second.json.read_text("utf-8"))["systems"]] == labels
    rows = {row.task: [cell is not None for cell in row.cells] for row in second.comparison.rows}
    assert rows == {
        "toy/two": [True, False, False],
        "toy/one": [False, True, True],
        "toy-writing/one": [True, True, True],
    }
    checked(second.page.read_text("utf-8"))
    second.print()
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*labels, "toy-writing", "higher is better"))
    assert str(tmp_path) not in second.json.read_text("utf-8") + second.page.read_text("utf-8")


def test_pictures_are_left_out_when_not_wanted(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "_wanted", lambda *_: pytest.fail("drawn"))
    report = write_report(tmp_path, evaluated(lm, None, "causal"), pictures=False)
    assert not checked(report.page.read_text("utf-8")).having("img")


def test_a_broken_score_is_told(lm, tmp_path):
    done = evaluated(lm, tmp_path, "causal")
    (tmp_path / "scores" / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json is not a score"):
        write_report(tmp_path, done, pictures=False)


SETTINGS_document = EvaluationConfig(seed=3, prompts={"sts": "Find 雪: "})


def document(results):
    return json.loads(results_json(compare(results), SETTINGS_document))


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
    assert found["config"] == SETTINGS_document.to_dict()
    assert found["packages"] == versions()
    assert {"torch", "transformers"} <= found["packages"].keys()
    assert [one["label"] for one in found["systems"]] == ["causal", "mask0-bidir k=2", "other: causal", "bm25"]
    assert "雪" in results_json(compare(several()), SETTINGS_document)


def test_order_does_not_depend_on_the_order_of_measuring():
    results = several()
    shuffled = results[:4] + random.Random(0).sample(results[4:], len(results) - 4)
    assert results_json(compare(shuffled), SETTINGS_document) == results_json(compare(results), SETTINGS_document)


def test_a_second_run_differs_in_times_only():
    results = several()
    again = [replace(result, seconds=9.0, date="2031-01-01T00:00:00+00:00") for result in results]
    first, second = document(results), document(again)
    assert first != second
    assert first.pop("runs") != second.pop("runs")
    assert first == second


def test_no_path_of_the_machine():
    model = "/somewhere/private/models/tiny"
    text = results_json(compare([made("sts/one", "a", 0.5, model=model)]), SETTINGS_document)
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


HOSTILE = """<script>alert("x")</script>' onload='y' {{ 7*7 }} & ü 雪 \u202e"""
# The smallest picture there is: one pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def page_of(folder, results, gallery=None, files=None):
    path = write_page(folder, compare(results), gallery, files)
    assert path == folder / "report.html"
    return checked(path.read_text("utf-8"))


def picture(title="A title", group="Scores"):
    return Picture(title, "A caption.", "What it shows.", PNG, group)


def test_all_numbers_stand_in_their_rows(tmp_path):
    page = page_of(tmp_path, several())
    assert ["one 1", "41.00", "52.00 (best)", "52.00 (best)", "–"] in page.table
    assert ["one", "60.00 ±1.23", "65.00 (best) ±1.23", "–", "–"] in page.table
    assert ["one", "1.250", "1.250", "1.100 (best)", "–"] in page.table
    assert ["mean of 2 tasks", "15.00", "26.00", "25.00", "57.00 (best)"] in page.table
    assert ["Representation: mean of 4 of 5 tasks", "25.25", "34.75", "35.50 (best)", "–"] in page.table


def test_the_summary_has_both_sides(tmp_path):
    table = page_of(tmp_path, several()).table
    summary = table[: next(place for place, row in enumerate(table) if row[0] == "Task")]
    assert [row[0] for row in summary] == [
        "Side",
        "Representation ↑ mean of 4 of 5 tasks",
        "Tokens ↑ ner: main, one",
        "Perplexity ↓ main, one",
        "Writing ↑ main, one",
        "Time",
    ]
    assert summary[1][1:] == ["25.25", "34.75", "35.50 (best)", "–"]
    assert summary[-1][1:] == ["12 s", "12 s", "10 s", "3.0 s"]


def test_every_metric_unfolds(tmp_path):
    page = page_of(tmp_path, several())
    assert len(page.having("details")) == len(compare(several()).rows)
    assert ["main", "0.6000", "0.6500", "–", "–"] in page.table
    assert ["other", "0.3000", "0.3250", "–", "–"] in page.table
    assert ["standard deviation of main", "0.0123", "0.0123", "–", "–"] in page.table
    assert ["seconds", "1.5", "1.5", "–", "–"] in page.table


def test_how_it_was_measured(tmp_path):
    config = {"seed": 7, "limit": 50, "split": "test", "prompts": {"sts": "Find: "}}
    results = [
        made("sts/one", "a", 0.5, model="/private/tiny", config=config, options={"shots": 4}),
        made("sts/one", "bm25", 0.4, config=config, options={"shots": 4}),
    ]
    page = page_of(tmp_path, results, files={"sts/one": ["one.test.tsv"]})
    assert ["Seed", "7"] in page.table
    assert ["Limit", "at most 50 examples a task"] in page.table
    assert ["Split", "test"] in page.table
    assert ["Prompts", "sts: 'Find: '"] in page.table
    assert ["Model", "tiny", "bm25"] in page.table
    assert ["Attention plan", "mask0-bidir k=2", "–"] in page.table
    assert ["Prompt", "none", "–"] in page.table
    assert ["sts/one", "100", "1", "shots=4", "one.test.tsv"] in page.table
    assert "Scored on at most 50 examples." in page.text


def test_the_defaults_are_said_too(tmp_path):
    page = page_of(tmp_path, [made("sts/one", "a", 0.5)])
    assert ["Limit", "none, all examples"] in page.table
    assert ["Prompts", "none by task"] in page.table
    assert ["sts/one", "100", "1", "–", "–"] in page.table
    assert "1 system, 1 task, measured on 2025-01-01" in page.text
    assert "Means are over" not in page.text
    assert not page.having("img")
    assert "Pictures" not in page.text
    assert page.source == page_of(tmp_path / "again", [made("sts/one", "a", 0.5)]).source


def test_hostile_names_do_no_harm(tmp_path):
    results = [
        made(f"sts/{HOSTILE}", HOSTILE, 0.5, notes=(HOSTILE,), model=HOSTILE, options={HOSTILE: HOSTILE}),
        made(f"{HOSTILE}/one", "b", 0.4, config={**SETTINGS, "prompts": {HOSTILE: HOSTILE}}),
    ]
    gallery = Gallery((Picture(HOSTILE, HOSTILE, HOSTILE, PNG, HOSTILE),), (HOSTILE,))
    page = page_of(tmp_path, results, gallery, {f"sts/{HOSTILE}": [HOSTILE]})
    assert len(page.having("script")) == 1
    assert "<script>alert" not in page.source
    assert page.having("img")[0]["alt"] == HOSTILE
    assert """<script>alert("x")</script>' onload='y' {{ 7*7 }} & ü 雪""" in page.text


def test_pictures_stand_in_groups_with_captions(tmp_path):
    gallery = Gallery((picture("First"), picture("Other", "Maps"), picture("Second")), ("A map could not be drawn.",))
    page = page_of(tmp_path, several(), gallery)
    assert len(page.having("img")) == 3
    assert page.having("img")[0]["alt"] == "What it shows."
    assert page.text.index("First.") < page.text.index("Second.") < page.text.index("Other.")
    assert "A map could not be drawn." in page.text


def test_the_trade_off_stands_beside_the_summary(tmp_path):
    page = page_of(tmp_path, several(), Gallery((picture("Bars"), picture("The trade", SUMMARY))))
    assert len(page.having("img")) == 2
    assert page.text.index("The trade.") < page.text.index("A task's name leads")
    assert page.text.index("Bars.") > page.text.index("Every metric As measured")


def test_pictures_have_their_size(tmp_path):
    wide = PNG[:16] + (1500).to_bytes(4, "big") + (300).to_bytes(4, "big") + PNG[24:]
    page = page_of(tmp_path, several(), Gallery((Picture("Wide", "", "alt", wide, "Scores"), picture())))
    assert [(image["width"], image["height"]) for image in page.having("img")] == [("960", "192"), ("1", "1")]
    assert [figure.get("class") for figure in page.having("figure")] == ["wide", None]


def test_an_empty_comparison_is_a_page(tmp_path):
    assert "0 systems, 0 tasks" in page_of(tmp_path, []).text


@pytest.mark.parametrize(
    "seconds, expected",
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min")],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected
