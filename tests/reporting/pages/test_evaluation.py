"""The page of a report: all that was measured is on it, nothing breaks it, and it stands alone."""

import base64

import pytest

from gerund.reporting.comparison import compare
from gerund.reporting.evaluation import write_page
from gerund.reporting.pictures import SUMMARY
from gerund.reporting.rendering import Gallery, Picture, duration
from tests.reporting.pages.html import checked
from tests.reporting.results import SETTINGS, made, several

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


def test_without_pictures_there_is_no_place_for_them(tmp_path):
    page = page_of(tmp_path, several())
    assert not page.having("img")
    assert "Pictures" not in page.text


def test_an_empty_comparison_is_a_page(tmp_path):
    assert "0 systems, 0 tasks" in page_of(tmp_path, []).text


def test_the_same_results_give_the_same_page(tmp_path):
    first, second = page_of(tmp_path / "a", several()), page_of(tmp_path / "b", several())
    assert first.source == second.source


@pytest.mark.parametrize(
    "seconds, expected",
    [(0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3600, "1 h 0 min")],
)
def test_duration(seconds, expected):
    assert duration(seconds) == expected
