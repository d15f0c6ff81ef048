"""Commands read a folder of sentence-transformers as its author means it."""

import json
from pathlib import Path

import numpy as np
import pytest

import gerund
from tests.cli.helpers import run_cli
from tests.ready_made import WIDTH, dense, ready_made, write

TEXTS = ["the cat", "an apple tree"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ready") / "st"
    gemma = dict(num_hidden_layers=2, sliding_window=8, layer_types=None, use_bidirectional_attention=True)
    return ready_made(place, "gemma3_text", pooling="mean", behind=[dense(WIDTH, 20)], max_seq_length=64, **gemma)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.mark.slow
def test_embed_and_convert(folder: Path, texts: Path, tmp_path: Path) -> None:
    expected = gerund.load(folder, dtype="float32").encode(TEXTS, prompt_name="query")
    assert run_cli("convert", folder, tmp_path / "converted").code == 0
    for model in (folder, tmp_path / "converted"):
        out = tmp_path / f"{model.name}.npy"
        ran = run_cli("embed", texts, "-m", model, "--prompt-name", "query", "--dtype", "float32", "-o", out)
        assert ran.code == 0
        assert "author" not in ran.err
        np.testing.assert_allclose(np.load(out), expected, atol=1e-6)


@pytest.mark.slow
def test_doctor_says_where_the_settings_are(folder: Path) -> None:
    ran = run_cli("doctor", folder)
    assert ran.code == 0
    assert "read as modules.json says, prompts query, document" in ran.out
    assert "Plan bidir, mean pooling: every layer obeys" in ran.out
    found = json.loads(run_cli("doctor", folder, "--json").out)
    assert (found["settings_from"], found["prompts"]) == ("modules.json", ["query", "document"])
    assert found["width"] == WIDTH


@pytest.mark.slow
def test_another_plan_is_told_and_generating_is_refused(folder: Path, texts: Path, tmp_path: Path) -> None:
    ran = run_cli("embed", texts, "-m", folder, "--attention", "causal", "-o", tmp_path / "vectors.npy")
    assert ran.code == 0
    said = f"gerund: {folder}: read with attention=causal, and not as its author means it, with attention=bidir"
    assert ran.err.count(said) == 1
    ran = run_cli("generate", "the cat", "-m", folder)
    assert ran.code == 2
    assert "gerund: error:" in ran.err
    assert "attends in both directions, as its config.json says: it encodes, but cannot generate" in ran.err


@pytest.mark.slow
def test_training_tells_which_layers_it_leaves_out(tmp_path: Path) -> None:
    base = ready_made(tmp_path / "base", behind=[dense(WIDTH, 24)])
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\n" * 40)
    recipe = {
        "model": {"base": str(base)},
        "data": {
            "folder": str(tmp_path),
            "sources": [{"name": "texts", "files": ["texts.txt"], "validation": ["texts.txt"]}],
            "validation_tokens": 64,
        },
        "objectives": [{"kind": "simcse", "batch_size": 4, "length": 16}],
        "output": str(tmp_path / "out"),
        "steps": 2,
        "log_steps": 1,
        "save_steps": 2,
    }
    write(tmp_path / "recipe.yaml", recipe)  # JSON is YAML
    ran = run_cli("train", tmp_path / "recipe.yaml", "--dry-run")
    assert ran.code == 0
    assert f"its vectors are the pooled states, of {WIDTH} numbers instead of 24" in ran.err
