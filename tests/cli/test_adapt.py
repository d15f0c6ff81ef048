"""`gerund adapt`: what cannot be used is told in a sentence, and a folder of documents ends in a model and a report."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.adaptation import config, running
from gerund.adaptation.config import PAIRS, TEXTS
from gerund.errors import ConfigError, DataError, OutputExistsError
from tests.adaptation.made_up import documents, write
from tests.cli.helpers import no_loading, run_cli
from tests.tiny import save_tiny_t5


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts.jsonl", documents(70))


@pytest.fixture
def small_batches(monkeypatch):
    """Let a step read 8 pairs, an eighth of what is right for a small model: what is tried here is not their number."""
    shape = config.shape_of
    monkeypatch.setattr(config, "shape_of", lambda *given: shape(*given) | {"batch": 8, "micro": 8})


def mistake(*arguments):
    """Return the last line of a refusal, before which it may be told what was read."""
    with no_loading():
        ran = run_cli("adapt", *arguments)
    assert (ran.code, ran.out) == (2, "")
    *before, last = ran.err.splitlines()
    assert all(line.startswith("gerund: ") for line in before)
    return last.removeprefix("gerund: error: ")


def test_what_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path, texts):
    out = tmp_path / "out"
    three = write(tmp_path / "three.jsonl", documents(3))
    assert "3 documents are too few to adapt to" in mistake("--texts", three, "-o", out)
    assert "name the folder" in mistake("--texts", texts)
    assert "did you mean default?" in mistake("defalt", "--texts", texts, "-o", out)
    assert "lies in the texts' folder" in mistake("--texts", tmp_path, "-o", out)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "Who?", "source": "nobody.txt"}\n')
    said = mistake("--texts", texts, "-o", out, "--questions", questions)
    assert "line 1: no document is called 'nobody.txt'" in said
    assert not out.exists()


def test_an_output_that_is_there_is_left_alone(tmp_path, texts):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "exists already; choose another output" in mistake("--texts", texts, "-o", out)
    (out / "adapt.json").write_text("{}")
    assert "holds an unfinished run; go on with --resume" in mistake("--texts", texts, "-o", out)
    (out / "report.json").write_text("{}")
    assert "is finished already" in mistake("--texts", texts, "-o", out, "--resume")
    assert "is a file; an output is a folder" in mistake("--texts", texts, "-o", out / "mine.txt")


def test_a_t5_is_told_how_it_is_trained(tmp_path, texts):
    folder = save_tiny_t5(tmp_path / "t5")
    said = mistake(folder, "--texts", texts, "-o", tmp_path / "out")
    assert "has an encoder of its own, which no adapter is trained for; train it whole" in said


@pytest.mark.slow
def test_what_fails_once_the_model_is_there_leaves_nothing_behind(tmp_path, texts, tiny_folder, monkeypatch):
    out = tmp_path / "out"
    assert "did you mean unimae-default" in mistake("--texts", texts, "-o", out, "--recipe", "unimae-defalt")
    monkeypatch.setattr("gerund.adaptation.data.LEAST_PAIRS", 10**6)
    with pytest.raises(DataError, match="pairs, and 1000000 are needed to train"):
        gerund.adapt(tiny_folder, texts, out, show_progress=False)
    assert not out.exists()


def test_a_copy_of_the_base_does_not_outlive_a_failure(tmp_path, texts, tiny_folder, monkeypatch):
    def open_base(_, folder):
        (folder / "base").mkdir()
        raise ConfigError("not so")

    monkeypatch.setattr(running, "open_base", open_base)
    with pytest.raises(ConfigError, match="not so"):
        gerund.adapt(tiny_folder, texts, tmp_path / "out", show_progress=False)
    assert not (tmp_path / "out").exists()


def test_a_spec_says_how_the_model_is_read_while_it_is_adapted(tmp_path, texts, tiny_folder, monkeypatch):
    read = []
    monkeypatch.setattr(running, "open_base", lambda spec, _: read.append(spec) or stop())
    spec = gerund.ModelSpec(model=str(tiny_folder), pooling="last", dtype="float32", device="cpu")
    with pytest.raises(Stopped):
        gerund.adapt(spec, texts, tmp_path / "a", show_progress=False)
    run_cli("adapt", tiny_folder, "--texts", texts, "-o", tmp_path / "b", "--device", "cpu", "--dtype", "float32")
    assert read == [spec, gerund.ModelSpec(model=str(tiny_folder), dtype="float32", device="cpu")]
    with pytest.raises(ConfigError, match="begun with other encoder"):
        gerund.adapt(spec.model, texts, tmp_path / "a", resume=True, show_progress=False)
    with pytest.raises(ConfigError, match="adapter is no setting of a model that is adapted"):
        gerund.adapt(gerund.ModelSpec(adapter="none"), texts, tmp_path / "c")
    with pytest.raises(ConfigError, match="by its name or its folder"):
        gerund.adapt(3, texts, tmp_path / "c")


def test_whoever_interrupts_is_told_what_is_kept(tmp_path, texts, monkeypatch):
    def interrupted(*_arguments, **_settings):
        stop = KeyboardInterrupt()
        stop.add_note("the pairs are kept")
        raise stop

    monkeypatch.setattr(running, "adapt", interrupted)
    assert "gerund: interrupted; the pairs are kept" in run_cli("adapt", "--texts", texts, "-o", tmp_path / "out").err


class Stopped(KeyboardInterrupt):
    """What Ctrl-C is in a test."""


def stop(*_arguments, **_settings):
    raise Stopped


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_run_says_what_is_kept_and_ends_as_if_it_had_not_been(tmp_path, texts, tiny_folder, monkeypatch):
    settings = {"steps": 4, "show_progress": False}
    tiny_folder = gerund.ModelSpec(model=str(tiny_folder), pooling="last")
    whole = gerund.adapt(tiny_folder, texts, tmp_path / "whole", **settings)
    assert gerund.load(whole.encoder).encoder.pooling == "last"
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(running, "finish", stop)
        with pytest.raises(Stopped) as caught:
            gerund.adapt(tiny_folder, texts, out, **settings)
    [note] = caught.value.__notes__
    assert "keeps the pairs and the training up to step 4: give --resume to go on" in note
    with pytest.raises(OutputExistsError, match="unfinished run"):
        gerund.adapt(tiny_folder, texts, out, **settings)
    with pytest.raises(ConfigError, match="begun with other options"):
        gerund.adapt(tiny_folder, texts, out, steps=5, resume=True, show_progress=False)
    done = gerund.adapt(tiny_folder, texts, out, **settings, resume=True)
    assert (done.before, done.after) == (whole.before, whole.after)
    assert done.verdict == whole.verdict
    weights = [folder / "model/adapter/adapter_model.safetensors" for folder in (out, tmp_path / "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    # The adapter encodes, and does nothing else.
    base, adapted = gerund.load(tiny_folder), gerund.load(done.encoder)
    assert adapted.adapters.name("infill") is None
    assert not np.array_equal(base.encode(["The old bridge."]), adapted.encode(["The old bridge."]))
    ids = base.tokenizer("The old bridge", return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(base.model(ids).logits, adapted.model(ids).logits)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_from_documents_to_a_model_and_a_report(tmp_path, monkeypatch, bundled):
    monkeypatch.chdir(tmp_path)
    notes = Path("notes")
    notes.mkdir()
    for row in documents(62):
        (notes / f"{row['id']}.md").write_text(f"# {row['title']}\n\n{row['text']}\n")
    rows = documents(62)[:30]
    asked = [{"question": f"What about {row['title']}?", "source": f"{row['id']}.md"} for row in rows]
    Path("questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    given = ("--texts", notes, "--questions", "questions.jsonl", "--steps", 2)
    planned = run_cli("adapt", *given, "--dry-run", "--json")
    assert planned.code == 0, planned.err
    assert json.loads(planned.out)["steps"] == 2
    assert json.loads(planned.out)["memory_mib"] > 100
    assert sorted(path.name for path in Path().iterdir()) == ["notes", "questions.jsonl"]
    ran = run_cli("adapt", *given, "-o", "out")
    assert ran.code == 0, ran.err
    assert "62 documents in 62 files" in ran.err
    assert "30 documents held out; queries: 30 questions" in ran.err
    assert "gerund index notes -o out.index -m out/model" in ran.out
    report = json.loads(Path("out/report.json").read_text())
    assert report["verdict"] in ran.out
    assert str(tmp_path) not in Path("out/report.json").read_text() + Path("out/report.html").read_text()
    assert {one["mode"] for one in report["compared"]} == {"words", "vectors", "hybrid"}
    # Means in percent with their intervals, and the change with its interval and p.
    figure, p = r"\d+\.\d \[(\d+\.\d), (\d+\.\d)\]", r"p (?:= \d\.\d{3}|< 0\.001)"
    row = re.search(
        rf"^vectors +nDCG@10 +{figure} +{figure} +([+-]\d+\.\d) \[([+-]\d+\.\d), ([+-]\d+\.\d)\], {p}$", ran.out, re.M
    )
    assert row is not None, ran.out
    *_, change, low, high = map(float, row.groups())
    [told] = [one for one in report["compared"] if (one["mode"], one["measure"]) == ("vectors", "nDCG@10")]
    assert low <= change <= high
    assert 0 <= told["change"]["p"] <= 1
    assert change == pytest.approx(100 * told["change"]["value"], abs=0.051)
    trained = Path("out/data", PAIRS).read_text() + Path("out/data", TEXTS).read_text()
    assert not [row["title"] for row in rows if row["title"] in trained]
    assert documents(62)[40]["title"] in trained
    adapted = gerund.load("out/model")
    assert adapted.generate("The old man", max_new_tokens=8) == bundled.generate("The old man", max_new_tokens=8)
    # What fills gaps and scores continuations is what it was.
    assert [adapted.adapters.hash(job) for job in ("infill", "score")] == [
        bundled.adapters.hash(job) for job in ("infill", "score")
    ]
    assert adapted.adapters.hash("encode") != bundled.adapters.hash("encode")
    prefix = (["The old man"], [[" looked at the sea.", " stone and interest."]])
    assert adapted.score(*prefix) == bundled.score(*prefix)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
def test_a_reranker_is_trained_after_the_encoder_and_measured(tmp_path, texts, tiny_folder):
    done = gerund.adapt(tiny_folder, texts, tmp_path / "out", steps=2, reranker=True, show_progress=False)
    lm, plain = gerund.load(done.encoder), gerund.load(tiny_folder)
    assert len({lm.adapters.hash("encode"), lm.adapters.hash("rerank"), ""}) == 3
    assert lm.default_measure(is_second=True) == "model"
    assert lm.generate("A cat", 5)[0].text == plain.generate("A cat", 5)[0].text
    assert done.after.second_seconds.keys() == {"model", "lift"}
    assert len(json.loads((tmp_path / "out" / "report.json").read_text())["second_stage"]) == 2
    assert "trained reranker" in (tmp_path / "out" / "report.html").read_text()
    assert not (tmp_path / "out" / "encoder").exists()
