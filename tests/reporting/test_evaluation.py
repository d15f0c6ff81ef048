"""A report holds what its folder holds, under names that stay apart; and is all written."""

import json
from dataclasses import replace

import pytest

import gerund
from gerund.errors import DataError
from gerund.evaluation.run import Evaluation, evaluate
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.reporting import pictures
from gerund.reporting.evaluation import joined, write_report
from gerund.settings.model_spec import parse_encoder_spec
from tests.evaluation.fakes import FakeEncoder
from tests.evaluation.toys import ToyTask, ToyWriting
from tests.reporting.pages.html import checked
from tests.reporting.results import SETTINGS, made


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
    "other, fits",
    [
        ({}, True),
        ({"seed": 1}, False),
        ({"limit": 10}, False),
        ({"split": "validation"}, False),
        ({"prompts": {"sts": "Find: "}}, False),
    ],
)
def test_what_was_told_otherwise_is_left_out(other, fits):
    earlier = made("sts/two", "a", 0.4, config={**SETTINGS, **other})
    assert (len(joined(done(made("sts/one", "a", 0.5), labels=["a"]), [earlier])) == 2) == fits


@pytest.mark.parametrize(
    "prompts, fits", [({"two": "b"}, True), ({"one": "a", "two": "b"}, True), ({"one": "c"}, False)]
)
def test_prompts_of_other_tasks_do_not_matter(prompts, fits):
    now = replace(done(made("sts/one", "a", 0.5), labels=["a"]), config=EvaluationConfig(prompts={"one": "a"}))
    earlier = made("sts/two", "a", 0.4, config={**SETTINGS, "prompts": prompts})
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
    monkeypatch.setattr(pictures, "_wanted", lambda *_: pytest.fail("drawn"))
    report = write_report(tmp_path, evaluated(lm, None, "causal"), pictures=False)
    assert not checked(report.page.read_text("utf-8")).having("img")


def test_a_broken_score_is_told(lm, tmp_path):
    done = evaluated(lm, tmp_path, "causal")
    (tmp_path / "scores" / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"x\.json is not a score"):
        write_report(tmp_path, done, pictures=False)
