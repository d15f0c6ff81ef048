"""``gerund train`` on the command line."""

import json

import pytest

from gerund.cli import main as cli


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


def test_trains_and_prints_the_folder(gerund, settings, write_recipe, tmp_path):
    code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6")
    assert (code, out.strip()) == (0, str(tmp_path / "out" / "model"))
    assert "starting at step 0 of 6" in err
    code, out, err = gerund("train", write_recipe(settings), f"output={tmp_path / 'out'}", "steps=6")
    assert (code, out) == (2, "")
    assert err.startswith("gerund: error:")
    assert err.count("\n") == 1


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


@pytest.mark.parametrize("arguments", [["absent.yaml"], ["RECIPE", "stepz=1"], ["RECIPE", "data.folder=/absent"]])
def test_mistakes_end_in_one_sentence_and_status_2(gerund, settings, write_recipe, arguments):
    recipe = str(write_recipe(settings))
    code, out, err = gerund("train", *(recipe if word == "RECIPE" else word for word in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("gerund: error:")
    assert err.count("\n") == 1
