"""``gerund train`` on the command line."""

import json
import shutil

import pytest

from gerund.cli import main as cli
from gerund.jobs.locks import hold


@pytest.fixture
def gerund(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["gerund", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


@pytest.mark.slow
def test_trains_and_prints_the_folder(gerund, settings, write_recipe, tmp_path):
    code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6")
    assert (code, out.strip()) == (0, str(tmp_path / "out" / "model"))
    assert "starting at step 0 of 6" in err
    code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6")
    assert (code, out) == (2, "")
    assert err.startswith("gerund: error:")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_json(gerund, settings, write_recipe, tmp_path):
    recipe = write_recipe(settings)
    code, out, _ = gerund("train", recipe, "--dry-run", "--json")
    assert (code, json.loads(out)["tokens_per_step"]) == (0, 128)
    code, out, _ = gerund("train", recipe, "--json", f"output={tmp_path / 'out'}", "steps=6")
    assert (code, json.loads(out)["model"]) == (0, str(tmp_path / "out" / "model"))
    assert json.loads(out)["steps"] == 6


def test_dry_run(gerund, settings, write_recipe):
    code, out, _ = gerund("train", write_recipe(settings), "--dry-run")
    assert code == 0
    assert "tokens per step    128 at most for causal" in out
    assert "estimated time" in out


def test_a_second_training_in_one_folder_ends_in_one_sentence_and_status_2(gerund, settings, write_recipe, tmp_path):
    with hold(tmp_path / "out"):
        code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}")
    assert (code, out) == (2, "")
    assert err.startswith("gerund: error: process ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["absent.yaml"], ["RECIPE", "stepz=1"], ["RECIPE", "data.folder=/absent"], ["RECIPE", "--texts", "/"]]
)
def test_mistakes_end_in_one_sentence_and_status_2(gerund, settings, write_recipe, arguments):
    recipe = str(write_recipe(settings))
    code, out, err = gerund("train", *(recipe if word == "RECIPE" else word for word in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("gerund: error:")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_own_texts(gerund, settings, write_recipe, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(200 * '{"text": "The old man looked at the sea and went home."}\n')
    recipe, output = write_recipe(settings), tmp_path / "out"
    code, _, err = gerund("train", recipe, "--texts", tmp_path / "mine", f"output={output}", "steps=6")
    assert code == 0
    assert "tokenising the training documents of texts" in err
    code, _, err = gerund("train", recipe, "--texts", tmp_path / "absent", f"output={output}")
    assert (code, err) == (2, f"gerund: error: {tmp_path / 'absent'}: no such file or folder\n")


def test_lists_and_prints_recipes(gerund):
    code, out, _ = gerund("recipes")
    assert code == 0
    assert any(line.startswith("  unimae-default ") for line in out.splitlines())
    code, out, _ = gerund("recipes", "--json")
    assert "unimae-default" in json.loads(out)
    code, out, _ = gerund("recipes", "unimae-default")
    assert (code, out.splitlines()[0][:8]) == (0, "# UniMAE")
    code, out, err = gerund("recipes", "unimae-defalt")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.slow
def test_place_that_cannot_be_written(gerund, settings, write_recipe, tmp_path):
    (tmp_path / "file").touch()
    code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'file' / 'deep'}", "steps=6")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "Not a directory" in err
    code, out, err = gerund("infill", "A [blank] b.", "-o", tmp_path / "file" / "deep" / "out.jsonl", "--length", "1")
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.slow
def test_a_line_of_the_log_is_one_line(gerund, settings, write_recipe, tmp_path):
    _, _, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6")
    steps = [line for line in err.splitlines() if "learning_rate" in line]
    assert steps
    assert all(line.startswith("step ") and line.endswith(" tokens/s") for line in steps)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [{"name": "linear", "warmup_steps": 4}, {"name": "cosine"}])
def test_forgotten_steps_do_not_stretch_a_falling_rate(gerund, settings, write_recipe, tmp_path, monkeypatch, schedule):
    settings |= {"schedule": schedule, "steps": 8, "save_steps": 4, "log_steps": 4}
    recipe, output = write_recipe(settings), f"output={tmp_path / 'out'}"
    assert gerund("train", recipe, output)[0] == 0
    shutil.rmtree(tmp_path / "out" / "model")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "checkpoint-8")
    code, _, err = gerund("train", recipe, output, "steps=80", "--resume")
    assert code == 2
    assert "steps was 8 and is 80" in err


@pytest.mark.slow
def test_resume_of_what_is_finished_says_so(gerund, settings, write_recipe, tmp_path):
    recipe, output = write_recipe(settings), f"output={tmp_path / 'out'}"
    gerund("train", recipe, output, "steps=6")
    assert " is finished, " in gerund("train", recipe, output, "steps=6", "--resume")[2]


@pytest.mark.slow
def test_few_texts_are_told(gerund, settings, write_recipe, tmp_path):
    rows = [{"text": f"The old man number {n} looked at the sea and went home."} for n in range(5)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings["objectives"] = [{"kind": "simcse", "batch_size": 8, "length": 64, "unit": "documents"}]
    settings["schedule"] = {"name": "constant"}
    settings["optimizer"] = {"name": "adamw"}
    code, _, err = gerund(
        "train", write_recipe(settings), "--texts", tmp_path / "few.jsonl", f"output={tmp_path / 'out'}"
    )
    assert code == 0
    assert "simcse: only 5 texts for batches of 8, which repeat them" in err


def test_mistakes_leave_no_empty_folder(gerund, tmp_path):
    missing, output = tmp_path / "absent", tmp_path / "out"
    code, _, err = gerund("train", "llm2vec-simcse-default", f"model.base={missing}", f"output={output}")
    said = f"there is no folder '{missing}'; give a model's folder, a hub id, or default"
    assert (code, err) == (2, f"gerund: error: model.base: {said}\n")
    assert not output.exists()
