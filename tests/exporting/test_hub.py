"""Models are uploaded as they are, and a base model's weights only by choice."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gerund
from gerund.errors import ConfigError, DataError, ModelError
from gerund.exporting.hub import PLACE, prepare
from tests.adapters import make_adapter
from tests.cli.helpers import run_cli
from tests.exporting.hub_stand_in import TOKEN, Hub, stand_in
from tests.tiny import save_tiny

SOURCE = str(Path(__file__).resolve().parents[2] / "src")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with stand_in() as running:
        for name, value in {"ENDPOINT": running.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(constants, name, value)
        yield running


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("adapted")
    base = save_tiny(room / "base")
    lm = gerund.load(base, attention="mask0-bidir", k=2, prompt="Text: ", adapter=make_adapter(base, room / "lora"))
    lm.save(room / "saved")
    return room / "saved"


def test_a_model(hub: Hub, tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lm = gerund.load(tiny_folder)
    done = lm.push_to_hub("me/encoder", private=True, commit_message="First", revision="draft")
    files = hub.files["me/encoder", "draft"]
    assert (hub.private["me/encoder"], hub.messages, done.url) == (True, ["First"], f"{hub.url}/me/encoder")
    assert done.sizes == {name: len(content) for name, content in files.items()}
    assert {"model.safetensors", "config.json", "gerund.json", "tokenizer.json", "README.md"} <= set(files)
    assert b'gerund.load("me/encoder")' in files["README.md"]
    assert PLACE.encode() not in files["README.md"]
    assert re.search(r"uploading \d+ files, 0\.\d MB, to me/encoder \(private\)", caplog.text)


def test_a_base_goes_along_only_by_choice(hub: Hub, adapted: Path, tmp_path: Path) -> None:
    refused = run_cli("push", adapted, "me/adapted", "--yes").mistake
    assert "its base model" in refused
    assert "--with-base or --adapter-only" in refused
    assert "give its id as base_model" in run_cli("push", adapted, "me/adapted", "--yes", "--adapter-only").mistake
    assert not hub.private
    with pytest.raises(ConfigError, match=r"^this model has adapters \("):
        gerund.load(adapted).push_to_hub("me/adapted")
    arguments = ("--yes", "--adapter-only", "--base-model", "acme/base", "--json")
    ran = run_cli("push", adapted, "me/adapted", *arguments)
    assert ran.code == 0
    files = hub.files["me/adapted", "main"]
    assert set(json.loads(ran.out)["sizes"]) == set(files) == {
        "README.md", "gerund.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors",
    }  # fmt: skip
    # The card's example opens it.
    for name, content in files.items():
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_bytes(content)
    [example] = re.findall(r"```python\n(.*?)```", files["README.md"].decode(), re.DOTALL)
    names: dict = {}
    base = str(adapted.parent / "base")
    exec(example.replace("me/adapted", str(tmp_path / "got")).replace("acme/base", base), names)
    assert names["lm"].fingerprint() == gerund.load(adapted).fingerprint()
    assert run_cli("push", adapted, "me/whole", "--yes", "--with-base", "--base-model", "acme/base").code == 0
    assert "model.safetensors" in hub.files["me/whole", "main"]
    assert b"\nbase_model: acme/base\n" in hub.files["me/whole", "main"]["README.md"]


def test_what_is_said_before_an_upload(hub: Hub, adapted: Path, tmp_path: Path) -> None:
    (adapted / ".env").write_text("SECRET=1")
    assert ".env" not in prepare(adapted, "me/a", base=True).files
    (adapted / ".env").unlink()
    ran = run_cli("push", adapted, "me/adapted", "--with-base")
    assert "MB  model.safetensors" in ran.err
    assert "add --yes where nobody can be asked" in ran.err
    assert not hub.private
    assert "'a b' is no repository" in run_cli("push", adapted, "a b", "--yes").mistake
    (tmp_path / "empty").mkdir()
    assert "holds no model" in run_cli("push", tmp_path / "empty", "me/a", "--yes").mistake
    assert "holds no model" in run_cli("push", tmp_path / "none", "me/a", "--yes").mistake
    (tmp_path / "empty" / "model.gguf").write_bytes(b"GGUF")
    shutil.copytree(adapted.parent / "base", tmp_path / "empty" / "base")
    assert "holds several models, such as base" in run_cli("push", tmp_path / "empty", "me/a", "--yes").mistake


def test_failures(hub: Hub, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = gerund.load(tiny_folder)
    with pytest.raises(ModelError, match="log in by `hf auth login`, or set HF_TOKEN"):
        lm.push_to_hub("me/encoder", token="hf_wrong")
    hub.loses = "config.json"
    with pytest.raises(ModelError, match=r"me/encoder has config\.json with \d+ bytes after the upload"):
        lm.push_to_hub("me/encoder")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match="cannot upload to me/encoder"):
        lm.push_to_hub("me/encoder")
    adapterless = tmp_path / "saved"
    lm.save(adapterless)
    with pytest.raises(ConfigError, match="has no adapter, which could go without its base"):
        prepare(adapterless, "me/a", base=False)
    (adapterless / "gerund.json").write_text("{")
    with pytest.raises(DataError, match=r"gerund\.json is not valid JSON"):
        prepare(adapterless, "me/a", results=adapterless)
    (adapterless / "README.md").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"README\.md is not UTF-8"):
        prepare(adapterless, "me/a")


@pytest.mark.slow
def test_in_a_process_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    """As a user runs it: the hub is named by the environment alone."""
    gerund.load(tiny_folder).save(tmp_path / "saved")
    with stand_in() as running:
        settings = {"HF_ENDPOINT": running.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        environment = {**os.environ, **settings, "PYTHONPATH": SOURCE}
        command = [sys.executable, "-m", "gerund", "push", str(tmp_path / "saved"), "me/saved", "--yes"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.startswith(f"{running.url}/me/saved: ")) == (0, True), done.stderr
        saved = {path.name: path.stat().st_size for path in (tmp_path / "saved").iterdir()}
        found = {name: len(content) for name, content in running.files["me/saved", "main"].items()}
        assert {**found, "README.md": saved["README.md"]} == saved
