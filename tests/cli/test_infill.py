"""``gerund infill``: one text as text, many as JSON lines."""

import json
import shutil
from unittest.mock import patch

import pytest

import gerund
from gerund import Infill, Sampling
from gerund.language_model import LanguageModel
from gerund.settings.encoder import JOBS
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import no_loading, run_cli

TEXT = "He ran [blank] home."
FAST = ["--length", 2, "--length", 3]


def records(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def called():
    """Stands in for the engine; holds what it was called with."""
    calls = []

    def infill(self, text, **settings):
        calls.append((text, settings))
        return Infill(text.replace("[blank]", "é"), ["é"], [[7]], [-1.23456789], [1])

    with patch.object(LanguageModel, "infill", infill):
        yield calls


@pytest.fixture
def filling_folder(tiny_folder, tmp_path):
    """The tiny model with the record of a training for filling gaps."""
    folder = shutil.copytree(tiny_folder, tmp_path / "filling")
    (folder / "training.json").write_text(json.dumps({"recipe": {"objectives": [{"kind": "msg"}]}}))
    return folder


@pytest.mark.slow
def test_the_whole_text_is_printed(tiny_folder, filling_folder):
    wanted = gerund.load(tiny_folder).infill(TEXT, lengths=[2, 3])
    ran = run_cli("infill", TEXT, "-m", filling_folder, *FAST)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == wanted.text + "\n"
    [record] = records(run_cli("infill", TEXT, "-m", tiny_folder, *FAST, "--json").out)
    assert record == {
        "text": wanted.text,
        "spans": wanted.spans,
        "scores": [pytest.approx(score, abs=1e-5) for score in wanted.scores],
        "lengths": wanted.lengths,
    }
    assert list(record) == ["text", "spans", "scores", "lengths"]


def test_a_model_that_was_not_trained_to_fill_gaps(tiny_folder):
    """One line says so, for one text as for many, and none where the untouched model is prompted."""
    said = f"gerund: {tiny_folder} is not known to be trained to infill, so its spans may make no sense; "
    ran = run_cli("infill", TEXT, "-m", tiny_folder, "--length", 2)
    assert (ran.code, ran.err.count("\n"), ran.err.startswith(said)) == (0, 1, True)
    ran = run_cli("infill", "-f", "-", "-m", tiny_folder, "--length", 2, stdin=f"{TEXT}\n{TEXT}\n")
    assert (ran.code, ran.err.count("\n"), ran.err.startswith(said)) == (0, 1, True)
    ran = run_cli("infill", TEXT, "-m", tiny_folder, "--length", 2, "--method", "left-only")
    assert (ran.code, ran.err) == (0, "")


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_what_is_known_to_fill_gaps(bundled, tiny_folder, tmp_path):
    assert bundled.fills_gaps is True
    adapter = make_adapter(tiny_folder, tmp_path / "adapter")
    assert gerund.load(tiny_folder).fills_gaps is False
    assert gerund.load(tiny_folder, adapter=adapter).fills_gaps is False
    assert gerund.load(tiny_folder, infill_adapter=adapter).fills_gaps is True
    (tmp_path / "training.json").write_text(json.dumps({"recipe": {"objectives": [{"kind": "msg"}]}}))
    assert gerund.load(tiny_folder, adapter=adapter).fills_gaps is True
    lm = gerund.load(tiny_folder)
    assert LanguageModel(lm.model, lm.tokenizer, lm.encoder).fills_gaps is None


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_the_models_own_adapter_is_left_aside(tiny_folder, tmp_path):
    lm = gerund.load(tiny_folder, adapter=make_adapter(tiny_folder, tmp_path / "adapter"))
    lm.save(tmp_path / "model")
    used = []

    def infill(self, text, **settings):
        used.append(self.adapters.folders)
        return Infill(text, ["é"], [[7]], [-1.0], [1])

    with patch.object(LanguageModel, "infill", infill):
        for more in ([], ["--adapter", "none"]):
            assert run_cli("infill", TEXT, "-m", tmp_path / "model", *more).code == 0
    assert used == [dict.fromkeys(JOBS, tmp_path / "model" / "adapter"), {}]


@pytest.mark.slow
def test_every_option_reaches_the_engine(tiny_folder, called):
    options = ["--blank", "___", "--method", "left-only", "--max-tokens", 9, "--samples", 3]
    draws = ["--temperature", 0.5, "--top-p", 0.9, "--top-k", 4, "--typical-p", 0.8, "--seed", 5]
    assert run_cli("infill", "a ___ b", "-m", tiny_folder, *FAST, *options, *draws).code == 0
    assert run_cli("infill", TEXT, "-m", tiny_folder, "--beams", 2).code == 0
    assert run_cli("infill", TEXT, "-m", tiny_folder, "--method", "blank", "--shots", 1).code == 0
    assert run_cli("infill", "a [blank] b", "-m", tiny_folder).out == "a é b\n"
    wanted = {"blank": "___", "method": "left-only", "max_tokens": 9, "beams": 1, "samples": 3, "shots": 0}
    wanted |= {"lengths": [2, 3], "sampling": Sampling(0.5, top_k=4, top_p=0.9, typical_p=0.8, seed=5)}
    plain = {"blank": "[blank]", "method": "infill", "max_tokens": 32, "beams": 1, "samples": 1, "shots": 0}
    plain |= {"lengths": None, "sampling": Sampling()}
    others = [(TEXT, plain | {"beams": 2}), (TEXT, plain | {"method": "blank", "shots": 1})]
    assert called == [("a ___ b", wanted), *others, ("a [blank] b", plain)]


def test_one_text_and_many_into_a_file(tiny_folder, tmp_path, called):
    ran = run_cli("infill", "-", "-m", tiny_folder, "--json", stdin="two\n[blank] lines\n")
    assert records(ran.out) == [{"text": "two\né lines", "spans": ["é"], "scores": [-1.234568], "lengths": [1]}]
    source, out = tmp_path / "a.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"text": "one [blank]."}\n{"text": "[blank] other"}')
    ran = run_cli("infill", "--file", source, "-m", tiny_folder, "-o", out)
    assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert [record["text"] for record in records(out.read_text())] == ["one é.", "é other"]


def test_equal_texts_have_seeds_of_their_own_and_others_change_nothing(tiny_folder, called):
    lines = "a [blank]\n" * 140 + "b [blank]\n"  # more than are read at once
    run_cli("infill", "-f", "-", "-m", tiny_folder, "--top-k", 5, "--seed", 1, stdin=lines)
    *seeds, other = [settings["sampling"].seed for _, settings in called]
    assert seeds[0] == other == 1
    assert len(set(seeds)) == 140


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--file", "b.txt"], "not both"),
        (["--blank", " "], "a blank is written as some text"),
        (["--blank", "___"], "the text has no ___ to fill"),
        (["--length", "0"], "a length is a whole number of at least 1, not 0"),
        (["--samples", "3"], "samples"),
        (["--beams", "2", "--top-k", "5"], "beams look for the most probable span"),
        (["--shots", "5"], "shots=5 belongs to the methods that prompt"),
        (["--method", "contextual", "--shots", "5"], "takes no solved examples"),
        (["--method", "blank", "--shots", "9"], "shots"),
        (["--method", "blank", "--length", "3"], "takes no lengths"),
    ],
)
def test_mistakes(tiny_folder, arguments, message):
    with no_loading():
        assert message in run_cli("infill", TEXT, "-m", tiny_folder, *arguments).mistake


@pytest.mark.parametrize("method", ["infill", "blank"])
def test_what_has_no_room(filling_folder, method):
    text = TEXT if method == "blank" else "x" * 70 + TEXT
    assert "the model's context ends at 64" in run_cli("infill", text, "-m", filling_folder, "--method", method).mistake


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one [blank]\ntwo", "a.txt, line 2: the text has no [blank] to fill"),
        ("one [blank]\n[blank]", "a.txt, line 2: the text is nothing but [blank]"),
        ("one [blank]\n\n", "a.txt, line 2: the text is empty"),
        ("a [blank]\n" + "x" * 99 + " [blank]", "a.txt, line 2: the text before the first span has 10"),
    ],
)
def test_mistakes_in_files(filling_folder, tmp_path, content, message):
    (tmp_path / "a.txt").write_text(content)
    out = tmp_path / "out.jsonl"
    assert message in run_cli("infill", "-f", tmp_path / "a.txt", "-m", filling_folder, "-o", out, *FAST).mistake
    assert not out.exists()
