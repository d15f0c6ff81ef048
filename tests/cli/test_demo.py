"""The demo, from the command line down to the picture."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gerund.cli.main import app
from gerund.demo import SAMPLES, Demo, read_beginnings, read_documents, read_gaps, read_searches
from gerund.entry import load
from gerund.errors import ModelError, OutputExistsError, TextError
from gerund.inference.inspection import EXAMPLE_TEXTS, inspect_attention, sink_fraction
from gerund.scoring.word_overlap import content_words
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import AttentionPlan
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.tiny import save_tiny


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the demo's texts, which are longer than the other tests' in bytes."""
    return save_tiny(tmp_path_factory.mktemp("demo") / "roomy", room=512)


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_searches_writes_verifies_and_draws(roomy_folder: Path, tmp_path: Path) -> None:
    output = run("-m", str(roomy_folder), "-o", str(tmp_path / "out"), "--prompt", "One day")
    page = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == 3
    assert not re.search(r'(?:src|href)="(?!data:|#)', page), "nothing is fetched"
    report = json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8"))
    assert [search["query"] for search in report["searches"]] == [query.text for query in read_searches()]
    for plan in ("untouched", "mask0-bidir"):
        ranks = [search["ranks"].pop(plan) for search in report["searches"]]
        assert report["found_first"].pop(plan) == ranks.count(1)
        assert all(1 <= rank <= 48 for rank in ranks)
    assert not report["found_first"]
    assert report["verification"]["equal"]
    assert report["verification"]["difference"] == 0
    assert report["written"][0]["prompt"] == "One day"
    for item in report["written"]:
        scores = [row["score"] for row in item["ranked"]]
        assert 1 <= len(scores) <= SAMPLES
        assert scores == sorted(scores, reverse=True)
    assert [item["prompt"] for item in report["fitting"]] == [item.text for item in read_beginnings()]
    for item in report["fitting"]:
        assert item["is_right"] == (item["candidates"][0]["text"] == item["right"])
    gaps = [f"{item['before']} [blank]{item['after']}" for item in report["filled"]]
    assert gaps == [gap.text for gap in read_gaps()]
    assert report["missing"] == []
    for line in ("29 searches in 48 documents", "bit-equal", "Where the time went", "demo.html"):
        assert line in output
    assert "\x1b" not in output, "piped output must be plain"
    assert not list((tmp_path / "out").glob(".*")), "no half-written file may stay"


def test_scores_and_marks_are_those_of_the_texts(roomy_folder: Path) -> None:
    demo = Demo(ModelSpec(model=str(roomy_folder)))
    lm = demo.start()
    before, found = demo.search()
    assert (before.plan, found.plan) == ("untouched", "mask0-bidir")
    documents = lm.encode([item.text for item in demo.documents])
    for query, rank, first in zip(demo.queries, found.ranks, found.first, strict=True):
        scores = documents @ lm.encode(query.text)
        own = next(score for item, score in zip(demo.documents, scores, strict=True) if item == query.answer)
        assert abs(rank - 1 - np.sum(scores > own)) <= np.sum(np.abs(scores - own) < 1e-5)
        assert first == demo.documents[int(scores.argmax())].text
    assert found.right == sum(
        query.answer.text == first for query, first in zip(demo.queries, found.first, strict=True)
    )


@pytest.mark.slow
def test_plan_adapter_and_scorer_visibly_help() -> None:
    demo = Demo(ModelSpec())
    demo.start()
    untouched, plan, adapter = demo.search()
    assert untouched.right + 3 < plan.right
    assert plan.right + 8 < adapter.right
    own, likely = (sum(item.is_right for item in demo.choose(scorer)) for scorer in (None, "avg_cll"))
    assert likely + 3 < own


@pytest.mark.slow
def test_a_changed_weight_is_seen(roomy_folder: Path) -> None:
    demo = Demo(ModelSpec(model=str(roomy_folder)))
    lm = demo.start()
    assert demo.verify("One day").is_equal
    lm.model.lm_head.weight.data[5] += 0.01
    assert not demo.verify("One day").is_equal


def test_texts_are_balanced_and_labelled() -> None:
    documents, queries = read_documents(), read_searches()
    counts = {topic: sum(item.topic == topic for item in documents) for topic in {item.topic for item in documents}}
    assert set(counts.values()) == {8}
    assert {query.answer.topic for query in queries} == set(counts)
    for query in queries:  # in other words than the document's, but for a number
        assert {*content_words(query.text)} & {*content_words(query.answer.text)} <= {"two"}, query.text
    assert len({item.text for item in documents}) == len(documents)


def test_beginnings_have_one_right_sentence_and_gaps_are_single() -> None:
    for item in read_beginnings():
        assert item.right not in item.wrong
        assert all(text.startswith(" ") for text in (item.right, *item.wrong))
    assert all(gap.text.count("[blank]") == 1 and gap.original not in gap.text for gap in read_gaps())


def test_a_gap_that_cannot_be_filled_is_told(roomy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(ModelSpec(model=str(roomy_folder)))
    lm = demo.start()

    def refuse(*_: object, **__: object) -> None:
        raise ModelError("the hybrid mask does not reach layer 3")

    monkeypatch.setattr(type(lm), "infill", refuse)
    assert demo.fill() == ()
    assert demo.missing == ["No span was infilled: the hybrid mask does not reach layer 3."]


@pytest.mark.slow
@pytest.mark.usefixtures("no_matplotlib")
def test_a_model_that_is_read_causally_is_told_from_the_baseline_without_pictures_too(
    roomy_folder: Path, tmp_path: Path
) -> None:
    lm = load(roomy_folder, attention="causal", pooling="last")
    lm.save(tmp_path / "causal")
    # With --json, the report is all that is printed.
    report = json.loads(run("-m", str(tmp_path / "causal"), "-o", str(tmp_path / "out"), "--json"))
    assert set(report["found_first"]) == {"untouched", "causal"}
    assert report["layers"] == 4
    assert set(report["seconds"]) >= {"load and verify the plan", "draw the pictures"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["demo.html", "demo.json"]
    page = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    assert "gerund[plot]" in page
    assert "<img" not in page


def test_a_plan_that_does_not_reach_the_model_is_told(roomy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = Demo(ModelSpec(model=str(roomy_folder)))
    demo.lm = demo.start().with_encoder(EncoderConfig(attention=AttentionPlan("causal")))

    def refuse(*_: object) -> None:
        raise ModelError("the plan does not reach layer 3")

    monkeypatch.setattr(type(demo.lm), "with_encoder", refuse)
    inspected, plan = demo.inspect_attention()
    assert plan.name == "causal"
    assert demo.missing == ["Attention is not shown without the sink: the plan does not reach layer 3."]
    assert len(inspected.after) == 4


def test_layers_are_inspected_without_the_sink(roomy_folder: Path) -> None:
    demo = Demo(ModelSpec(model=str(roomy_folder)))
    lm = demo.start()
    inspected, plan = demo.inspect_attention()
    assert plan == lm.encoder.attention.with_defaults(lm.n_layers)
    demo.lm = lm.with_encoder(EncoderConfig(attention=AttentionPlan("bidir")))
    inspected, plan = demo.inspect_attention()
    assert plan.name == "mask0-bidir"
    assert sink_fraction(inspected.after)[-1] == 0 < sink_fraction(inspected.before)[-1]


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_an_adapter_is_left_aside_where_another_plan_hides_the_sink(roomy_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(roomy_folder, tmp_path / "adapter")
    plain, own = (load(roomy_folder, attention="inter-bidir", **more) for more in ({}, {"adapter": adapter}))
    found = []
    for place, lm in enumerate((plain, own)):
        lm.save(tmp_path / str(place))
        demo = Demo(ModelSpec(model=str(tmp_path / str(place))))
        demo.start()
        inspected, plan = demo.inspect_attention()
        assert plan.name == "mask0-bidir"
        found.append([*sink_fraction(inspected.before), *sink_fraction(inspected.after)])
    assert found[0] == found[1]
    own = own.with_encoder(EncoderConfig(attention=AttentionPlan("mask0-bidir")))
    assert found[0] != [*sink_fraction(inspect_attention(own.runtime, EXAMPLE_TEXTS).after)]


def test_bad_input_is_one_sentence(roomy_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    runner = CliRunner()
    taken = runner.invoke(app, ["demo", "-m", str(roomy_folder), "-o", str(tmp_path / "file")])
    assert isinstance(taken.exception, OutputExistsError)
    silent = runner.invoke(app, ["demo", "-m", str(roomy_folder), "-o", str(tmp_path / "out"), "--prompt", " "])
    assert isinstance(silent.exception, TextError)
    missing = runner.invoke(app, ["demo", "-m", str(tmp_path / "none"), "-o", str(tmp_path / "out")])
    assert isinstance(missing.exception, ModelError)
    assert not (tmp_path / "out").exists()


def test_what_an_architecture_cannot_do_is_told_and_the_page_is_made(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "lfm2", room=512)
    output = " ".join(run("-m", str(folder), "-o", str(tmp_path / "out")).split())
    assert "Nothing was ranked: this lfm2 model keeps states" in output
    assert "Attention is not shown: attention is shown of models whose every layer attends" in output
    page = (tmp_path / "out" / "demo.html").read_text(encoding="utf-8")
    assert page.count('src="data:image/png;base64,') == 2
    report = json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8"))
    assert all(item["plain"] and not item["ranked"] for item in report["written"])
