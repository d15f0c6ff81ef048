"""``gerund train`` on the command line."""

import json
import shutil

import pytest

from gerund.jobs.files import lock_folder
from tests.cli.helpers import run_cli


@pytest.mark.slow
def test_trains_and_prints_the_folder(settings, write_recipe, tmp_path):
    arguments = ["train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6"]
    ran = run_cli(*arguments)
    assert (ran.code, ran.out.strip()) == (0, str(tmp_path / "out" / "model"))
    assert "starting at step 0 of 6" in ran.err
    steps = [line for line in ran.err.splitlines() if "learning_rate" in line]
    assert steps
    assert all(line.startswith("step ") and line.endswith(" tokens/s") for line in steps)
    assert "is finished, " in run_cli(*arguments).mistake


def test_a_second_training_in_one_folder_ends_in_one_sentence_and_status_2(settings, write_recipe, tmp_path):
    with lock_folder(tmp_path / "out"):
        ran = run_cli("train", write_recipe(settings), f"output={tmp_path / 'out'}")
    assert ran.mistake.startswith("process ")


@pytest.mark.parametrize(
    "arguments", [["absent.yaml"], ["RECIPE", "stepz=1"], ["RECIPE", "data.folder=/absent"], ["RECIPE", "--texts", "/"]]
)
def test_mistakes_end_in_one_sentence_and_status_2(settings, write_recipe, arguments):
    recipe = write_recipe(settings)
    assert run_cli("train", *(recipe if word == "RECIPE" else word for word in arguments)).mistake


@pytest.mark.slow
def test_own_texts(settings, write_recipe, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.jsonl").write_text(200 * '{"text": "The old man looked at the sea and went home."}\n')
    recipe, output = write_recipe(settings), tmp_path / "out"
    ran = run_cli("train", recipe, "--texts", tmp_path / "mine", f"output={output}", "steps=6", "--json")
    assert ran.code == 0
    assert (json.loads(ran.out)["model"], json.loads(ran.out)["steps"]) == (str(output / "model"), 6)
    assert "tokenising the training documents of texts" in ran.err
    ran = run_cli("train", recipe, "--texts", tmp_path / "absent", f"output={output}")
    assert ran.mistake == f"{tmp_path / 'absent'}: no such file or folder"


def test_lists_and_prints_recipes():
    ran = run_cli("recipes")
    assert ran.code == 0
    assert any(line.startswith("  unimae-default ") for line in ran.out.splitlines())
    assert "unimae-default" in json.loads(run_cli("recipes", "--json").out)
    ran = run_cli("recipes", "unimae-default")
    assert (ran.code, ran.out.splitlines()[0][:8]) == (0, "# Embed ")
    assert "unimae-defalt" in run_cli("recipes", "unimae-defalt").mistake


@pytest.mark.slow
def test_place_that_cannot_be_written(settings, write_recipe, tmp_path):
    (tmp_path / "file").touch()
    ran = run_cli("train", write_recipe(settings), f"output={tmp_path / 'file' / 'deep'}", "steps=6")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert "Not a directory" in ran.err
    ran = run_cli("infill", "A [blank] b.", "-o", tmp_path / "file" / "deep" / "out.jsonl", "--length", 1)
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)


@pytest.mark.slow
def test_forgotten_steps_do_not_stretch_a_falling_rate(settings, write_recipe, tmp_path):
    settings |= {"schedule": {"name": "cosine"}, "steps": 2, "save_steps": 1, "log_steps": 1}
    recipe, output = write_recipe(settings), f"output={tmp_path / 'out'}"
    assert run_cli("train", recipe, output).code == 0
    shutil.rmtree(tmp_path / "out" / "model")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "checkpoint-2")
    assert "steps was 2 and is 80" in run_cli("train", recipe, output, "steps=80", "--resume").mistake


@pytest.mark.slow
def test_few_texts_are_told(settings, write_recipe, tmp_path):
    rows = [{"text": f"The old man number {n} looked at the sea and went home."} for n in range(5)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings["objectives"] = [{"kind": "simcse", "batch_size": 8, "length": 64, "unit": "documents"}]
    settings["schedule"] = {"name": "constant"}
    settings["optimizer"] = {"name": "adamw"}
    ran = run_cli(
        "train", write_recipe(settings), "--texts", tmp_path / "few.jsonl", f"output={tmp_path / 'out'}", "steps=2"
    )
    assert ran.code == 0
    assert "simcse: only 5 texts for batches of 8, which repeat them" in ran.err


def test_mistakes_leave_no_empty_folder(tmp_path):
    missing, output = tmp_path / "absent", tmp_path / "out"
    ran = run_cli("train", "llm2vec-simcse-default", f"model.base={missing}", f"output={output}")
    assert ran.mistake == (
        f"model.base: there is no folder or file '{missing}'; give a model's folder, a GGUF file, a hub id, or a short "
        "name (gerund models lists them)"
    )
    assert not output.exists()
