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
    assert any(line.startswith("unimae-default ") for line in out.splitlines())
    code, out, _ = gerund("recipes", "--json")
    assert "unimae-default" in json.loads(out)
    code, out, _ = gerund("recipes", "unimae-default")
    assert (code, out.splitlines()[0][:8]) == (0, "# UniMAE")
    code, out, err = gerund("recipes", "unimae-defalt")
    assert (code, out, err.count("\n")) == (2, "", 1)
