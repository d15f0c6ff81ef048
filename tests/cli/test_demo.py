"""The demo, from the command line down to the picture."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gerund.cli.main import app
from gerund.demo import HITS, Demo, read_passages
from gerund.errors import ModelError, OutputExistsError, TextError


@pytest.fixture(scope="module")
def roomy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the demo's texts, which are longer than the other tests' in bytes."""
    from tests.tiny import save_tiny

    folder = save_tiny(tmp_path_factory.mktemp("demo") / "roomy", max_position_embeddings=512)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_max_length"] = 512
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["demo", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_searches_writes_proves_and_draws(roomy_folder: Path, tmp_path: Path) -> None:
    output = run("-m", str(roomy_folder), "-o", str(tmp_path / "out"), "--prompt", "One day")
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((tmp_path / "out" / "demo.json").read_text(encoding="utf-8"))
    queries = read_passages("queries.jsonl")
    assert [search["query"] for search in report["searches"]] == [query.text for query in queries]
    assert all(len(search["answers"]) == HITS for search in report["searches"])
    assert set(report["right"]) == {"causal", "mask0-bidir"}
    assert report["proof"]["equal"]
    assert report["proof"]["difference"] == 0
    for line in ("Searches in 48 documents on 6 topics", "bit-equal", "Where the time went", "demo.png"):
        assert line in output
    assert "\x1b" not in output, "piped output must be plain"
    assert not list((tmp_path / "out").glob(".*")), "no half-written file may stay"


def test_scores_and_marks_are_those_of_the_texts(roomy_folder: Path) -> None:
    demo = Demo(str(roomy_folder))
    lm = demo.start()
    found = demo.search()
    documents = lm.encode([item.text for item in demo.documents])
    topic_of = {item.text: item.topic for item in demo.documents}
    queries = lm.encode([item.text for item in demo.queries])
    for query, vector, hits in zip(demo.queries, queries, found.answers, strict=True):
        scores = documents @ vector
        assert [hit.score for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:HITS], abs=1e-5)
        assert [hit.right for hit in hits] == [topic_of[hit.text] == query.topic for hit in hits]
    right = np.mean([hit.right for hits in found.answers for hit in hits])
    assert found.right == pytest.approx(right)


def test_a_changed_weight_is_seen(roomy_folder: Path) -> None:
    demo = Demo(str(roomy_folder))
    lm = demo.start()
    assert demo.prove("One day").is_equal
    lm.model.lm_head.weight.data[5] += 0.01
    assert not demo.prove("One day").is_equal


def test_json_is_all_that_is_printed(roomy_folder: Path, tmp_path: Path) -> None:
    report = json.loads(run("-m", str(roomy_folder), "-o", str(tmp_path / "out"), "--json"))
    assert report["layers"] == 4
    assert set(report["seconds"]) >= {"load and prove the plan", "draw the picture"}


def test_without_matplotlib_only_the_picture_is_missing(
    roomy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = run("-m", str(roomy_folder), "-o", str(tmp_path / "out"))
    assert "pip install 'gerund[plot]'" in output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["demo.json"]


def test_texts_are_balanced_and_labelled() -> None:
    documents, queries = read_passages("documents.jsonl"), read_passages("queries.jsonl")
    counts = {topic: sum(item.topic == topic for item in documents) for topic in {item.topic for item in documents}}
    assert set(counts.values()) == {8}
    assert {query.topic for query in queries} == set(counts)
    assert len({item.text for item in documents}) == len(documents)


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
