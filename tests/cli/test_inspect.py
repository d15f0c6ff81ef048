"""``gerund inspect``: the picture and the numbers, on tiny models and on a real small one."""

import json
import sys

import matplotlib
import matplotlib.image
import pytest

from gerund.inference.inspection import even_fraction
from tests.cli.helpers import run_cli
from tests.tiny import N_LAYERS, save_tiny

TEXT = "the cat in the hat"


@pytest.mark.slow
def test_draws_a_picture_of_every_layer_before_and_after(tiny_folder, tmp_path):
    output = tmp_path / "new" / "attention.png"
    ran = run_cli("inspect", tiny_folder, TEXT, "-o", output)
    assert (ran.code, ran.out.strip(), ran.err) == (0, str(output), "")
    assert output.read_bytes().startswith(b"\x89PNG")
    image = matplotlib.image.imread(output)
    assert 600 < image.shape[0] < 4000
    assert 900 < image.shape[1] < 4000
    assert 0.1 < (image[..., :3].min(axis=-1) < 0.9).mean() < 0.9  # neither an empty page nor a full one
    few = run_cli("inspect", tiny_folder, "-o", output, "--force", "--layers", "0,2-3", "--json")
    assert json.loads(few.out)["texts"] == 8, "without a text, those that come with gerund"
    assert matplotlib.image.imread(output).size < image.size


def test_json_has_every_layers_fraction(tiny_folder):
    ran = run_cli("inspect", tiny_folder, TEXT, "--json", "--attention", "mask0-all", "--k", 1)
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert report["architecture"] == "llama"
    assert report["attention"]["k"] == 1
    assert report["picture"] is None
    assert [item["layer"] for item in report["layers"]] == list(range(N_LAYERS))
    assert all(item["sink_fraction_after"] == 0 < item["sink_fraction_before"] < 1 for item in report["layers"])
    assert report["even_fraction"] == pytest.approx(even_fraction([report["tokens"]]), abs=1e-6)


@pytest.mark.slow
def test_an_adapter_under_another_plan_is_told():
    ran = run_cli("inspect", "default", "The old man.", "--attention", "causal", "--json")
    assert ran.code == 0, ran.err
    assert "was trained under bidir, and is read under another plan; --adapter none leaves it out" in ran.err
    alone = run_cli("inspect", "default", "The old man.", "--attention", "causal", "--json", "--adapter", "none")
    assert (alone.code, alone.err) == (0, "")
    assert run_cli("inspect", "default", "The old man.", "--json").err == ""


def test_many_texts_from_a_file_are_averaged(tiny_folder, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("the cat\n\n" + "a longer text than this is not there\n" + "x" * 100 + "\n", encoding="utf-8")
    ran = run_cli("inspect", tiny_folder, "-f", texts, "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["texts"] == 3
    assert ran.err == "gerund: 1 of 3 texts were cut at 64 tokens\n"
    ran = run_cli("inspect", tiny_folder, "-f", texts, "--json", "--limit", 2)
    assert json.loads(ran.out)["texts"] == 2


@pytest.mark.slow
def test_architectures_without_plans_show_themselves(tmp_path):
    folder = save_tiny(tmp_path / "gpt_neo", "gpt_neo")
    ran = run_cli("inspect", folder, TEXT, "--attention", "causal", "--json", "-o", tmp_path / "a.png")
    assert (ran.code, json.loads(ran.out)["architecture"]) == (0, "gpt_neo")
    assert "gpt_neo" in run_cli("inspect", folder, TEXT, "--json").mistake


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["MODEL", TEXT], "-o OUT.png"),
        (["MODEL", TEXT, "-o", "a.jpg"], ".png, .svg, .pdf"),
        (["MODEL", TEXT, "-o", "README.png"], "exists already"),
        (["MODEL", " ", "--json"], "the text is empty"),
        (["MODEL", "-f", "absent.txt", "--json"], "absent.txt"),
        (["MODEL", "-f", "empty.txt", "--json"], "no texts"),
        (["MODEL", TEXT, "--json", "--layers", "0,4"], "layers 0 to 3"),
        (["MODEL", TEXT, "--json", "--layers", "two"], "'two'"),
        (["MODEL", TEXT, "--json", "--limit", "0"], "--limit 0"),
        (["MODEL", TEXT, "--json", "--attention", "hybrid"], "spans"),
        ([TEXT, "-o", "a.png"], "MODEL comes first"),
        (["Cats.", "-o", "a.png"], "there is no folder or file 'Cats.'"),
    ],
)
def test_mistakes_end_in_one_sentence_and_status_2(tiny_folder, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.png").write_bytes(b"mine")
    (tmp_path / "empty.txt").write_text("\n \n")
    ran = run_cli("inspect", *(tiny_folder if word == "MODEL" else word for word in arguments))
    assert words in ran.mistake
    assert (tmp_path / "README.png").read_bytes() == b"mine"


def test_without_matplotlib_the_message_has_the_pip_line(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = run_cli("inspect", tiny_folder, TEXT, "-o", tmp_path / "a.png")
    assert "pip install 'gerund[plot]'" in ran.mistake
