"""The page of a search: what won and by how much, everything that was tried, and a gerund.json that is the winner."""

import json
from dataclasses import replace

import pytest

import gerund
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tuning import Trial, Tuned, tune
from gerund.models.saved_settings import read_saved
from gerund.reporting.plots import scores as curves
from gerund.reporting.tuning import chosen_sentence, write_tuning
from gerund.settings.plan import AttentionPlan
from tests.evaluation.toys import ToyTask
from tests.reporting.html import checked

ONE, TWO = ToyTask(name="toy/one"), ToyTask(name="toy/two")
VALIDATION = EvaluationConfig(split="validation")


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="causal")


def tuned(lm, *plans):
    """Return trials of (plan, k, score on one, score on two)."""
    done = Tuned(lm.n_layers, 40)
    for name, k, one, two in plans:
        config = replace(lm.encoder, attention=AttentionPlan(name, k=k))
        done.trials.append(Trial(config, f"{name} k={k}" if k else name, {"toy/one": one, "toy/two": two}))
    return done


@pytest.fixture
def done(lm):
    return tuned(
        lm,
        ("causal", None, 0.30, 0.20),
        ("mask0-bidir", 1, 0.35, 0.20),
        ("mask0-bidir", 2, 0.50, 0.25),
        ("inplace-bidir", 1, 0.10, 0.20),
        ("inplace-bidir", 2, 0.45, 0.25),
    )


@pytest.mark.slow
def test_the_page(lm, done, tmp_path):
    path = write_tuning(tmp_path / "new", done, lm, [ONE, TWO], VALIDATION)
    assert path == tmp_path / "new" / "tuning.html"
    page = checked(path.read_text("utf-8"))
    assert "mask0-bidir k=2 won: 37.50 on the mean of 2 tasks, 12.50 more than causal (25.00)." in page.text
    assert "flattered" not in page.text
    tried = page.table[: len(done.trials) + 1]
    assert tried == [
        ["Setting", "mean", "toy/one", "toy/two"],
        ["mask0-bidir k=2 (chosen)", "37.50", "50.00", "25.00"],
        ["inplace-bidir k=2", "35.00", "45.00", "25.00"],
        ["mask0-bidir k=1", "27.50", "35.00", "20.00"],
        ["causal", "25.00", "30.00", "20.00"],
        ["inplace-bidir k=1", "15.00", "10.00", "20.00"],
    ]
    assert ["Settings tried", "5"] in page.table
    assert ["Passes of the model", "5 of at most 40"] in page.table
    assert ["Split", "validation"] in page.table
    assert ["Prompts", "none by task"] in page.table


@pytest.mark.slow
def test_the_winner_can_be_read_back(lm, done, tmp_path):
    write_tuning(tmp_path, done, lm, [ONE, TWO], VALIDATION)
    saved = read_saved(tmp_path)
    assert saved.plan(AttentionPlan("causal")) == AttentionPlan("mask0-bidir", k=2)
    fingerprint = json.loads((tmp_path / "gerund.json").read_text())["fingerprint"]
    assert fingerprint == lm.with_encoder(done.best.config).fingerprint() != lm.fingerprint()


def test_everything_tried_is_in_the_json(lm, done, tmp_path):
    write_tuning(tmp_path, done, lm, [ONE, TWO], VALIDATION)
    found = json.loads((tmp_path / "tuning.json").read_text("utf-8"))
    assert [trial["label"] for trial in found["trials"]] == [trial.label for trial in done.trials]
    assert found["chosen"] == found["trials"][2]
    assert found["baseline"] == found["trials"][0]
    assert found["chosen"]["scores"] == {"toy/one": 0.5, "toy/two": 0.25}
    assert found["chosen"]["mean"] == 0.375
    assert AttentionPlan.from_dict(found["chosen"]["attention"]) == AttentionPlan("mask0-bidir", k=2)
    assert found["config"] == VALIDATION.to_dict()
    assert (found["n_layers"], found["budget"], found["format"]) == (lm.n_layers, 40, 2)


def test_one_task_needs_no_mean(lm, tmp_path):
    done = tune(lm, [ONE], VALIDATION, plans=["mask0-bidir"], budget=3)
    page = checked(write_tuning(tmp_path, done, lm, [ONE], VALIDATION).read_text("utf-8"))
    assert page.table[0] == ["Setting", "toy/one"]
    assert page.table[1][0] == f"{done.best.label} (chosen)"
    assert len(page.table[1]) == 2


def test_nothing_may_be_better_than_causal(lm):
    done = tuned(lm, ("causal", None, 0.5, 0.5), ("mask0-bidir", 2, 0.4, 0.5))
    assert chosen_sentence(done, [ONE, TWO]) == (
        "None of 2 settings is better than causal: 50.00 on the mean of 2 tasks."
    )


@pytest.mark.slow
def test_a_choice_on_test_data_is_said_to_be_flattered(lm, done, tmp_path):
    config = EvaluationConfig(prompts={"toy": "Find <b>: "}, limit=7)
    page = checked(write_tuning(tmp_path, done, lm, [ONE, TWO], config).read_text("utf-8"))
    assert "on the test split of toy/one, toy/two: the winner's score there is flattered" in page.text
    assert ["Prompts", "toy/one: 'Find <b>: '; toy/two: 'Find <b>: '"] in page.table
    assert ["Limit", "at most 7 examples a task"] in page.table
    assert str(tmp_path) not in page.source


def test_curves_of_the_mean_of_k0_and_of_every_task(lm, done, tmp_path, monkeypatch):
    config = replace(lm.encoder, attention=AttentionPlan("mask0+bidir", k=2, k0=1))
    done.trials.append(Trial(config, "mask0+bidir k=2 k0=1", {"toy/one": 0.2, "toy/two": 0.4}))
    other = replace(lm.encoder, attention=AttentionPlan("mask0-bidir", k=3), pooling="last")
    done.trials.append(Trial(other, "mask0-bidir k=3, last", {"toy/one": 0.0, "toy/two": 0.0}))
    calls = {}

    def draw(curves_, *, title, baseline, **_):
        from gerund.reporting.plots.style import new_figure

        calls[title] = (curves_, round(baseline, 6))
        return new_figure(1, 1)

    monkeypatch.setattr(curves, "k_curves", draw)
    page = checked(write_tuning(tmp_path, done, lm, [ONE, TWO], VALIDATION).read_text("utf-8"))
    assert len(page.having("img")) == len(calls) == 4
    assert calls["Mean of 2 tasks"] == (done.curves("mean"), 0.25)
    assert calls["Mean of 2 tasks: mask0+bidir"] == ({"k0 = 1": [(2, pytest.approx(0.3))]}, 0.25)
    assert calls["toy/one"] == (
        {"mask0-bidir": [(1, 0.35), (2, 0.5)], "inplace-bidir": [(1, 0.1), (2, 0.45)]},
        0.3,
    )
    assert calls["toy/two"][1] == 0.2


@pytest.mark.slow
def test_real_curves(lm, done, tmp_path):
    page = checked(write_tuning(tmp_path, done, lm, [ONE, TWO], VALIDATION).read_text("utf-8"))
    assert len(page.having("img")) == 3
    assert "could not be drawn" not in page.text
    assert "mask0-bidir, best 0.3750 at k=2; inplace-bidir, best 0.3500 at k=2. Causal 0.2500." in {
        image["alt"].removeprefix("Curves of ") for image in page.having("img")
    }


@pytest.mark.slow
def test_an_adapter_that_was_trained_under_one_plan_is_told_on_the_page_and_in_json(lm, done, tmp_path, bundled):
    write_tuning(tmp_path / "none", done, lm, [ONE, TWO], VALIDATION)
    assert json.loads((tmp_path / "none" / "tuning.json").read_text())["adapter_note"] == ""
    own = tuned(bundled, ("causal", None, 0.30, 0.20), ("bidir", None, 0.50, 0.25))
    page = checked(write_tuning(tmp_path / "own", own, bundled, [ONE, TWO], VALIDATION).read_text("utf-8"))
    told = json.loads((tmp_path / "own" / "tuning.json").read_text())
    assert told["adapter_plan"]["name"] == bundled.encoder.attention.name
    assert f"was trained under {bundled.encoder.attention.name}" in told["adapter_note"]
    assert "is active under every plan that was tried" in told["adapter_note"]
    assert told["adapter_note"] in page.text
