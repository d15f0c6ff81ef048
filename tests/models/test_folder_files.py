"""Of a model's folder only regular files inside it are read and copied, or blobs of the hub's cache."""

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

import gerund
from gerund.errors import DataError, ModelError
from gerund.models import folder_files
from gerund.models.loading import original_files
from gerund.models.sources import Source, find
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli

SECRET = "the key of the house"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's that is no part of any model."""
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def refusal(model: object, kind: type[Exception] = ModelError, **options: object) -> str:
    with pytest.raises(kind) as caught:
        gerund.load(model, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "chat_template.jinja", "special_tokens_map.json", "vocab.txt"]
)
def test_a_link_out_of_the_folder_is_neither_read_nor_copied(folder: Path, secret: Path, name: str) -> None:
    (folder / name).symlink_to(secret)
    said = run_cli("convert", folder, folder.parent / "out", "--attention", "causal").mistake
    assert said.startswith(f"{folder / name} is a link that leads out of ")
    assert not (folder.parent / "out").exists()
    with pytest.raises(ModelError, match="leads out of its folder"):
        original_files(Source("x", folder))


def test_chains_and_linked_folders(folder: Path, secret: Path) -> None:
    (folder / "chain").symlink_to(secret)
    (folder / "LICENSE").symlink_to("chain")
    assert "chain is a link that leads out" in refusal(folder) or "LICENSE is a link" in refusal(folder)
    for name in ("chain", "LICENSE"):
        (folder / name).unlink()
    (secret.parent / "a.jinja").write_text(SECRET)
    (folder / "additional_chat_templates").symlink_to(secret.parent)
    assert "additional_chat_templates is a link that leads out" in refusal(folder)
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "a.jinja").symlink_to(secret.parent / "a.jinja")
    assert "a.jinja is a link that leads out" in refusal(folder)


def test_links_inside_the_folder_and_to_the_folder_itself(folder: Path, tmp_path: Path) -> None:
    (folder / "text.md").write_text("read me")
    (folder / "README.md").symlink_to("text.md")
    (tmp_path / "linked").symlink_to(folder)
    assert find(tmp_path / "linked").folder == tmp_path / "linked"
    assert run_cli("convert", tmp_path / "linked", tmp_path / "out", "--attention", "causal").code == 0
    assert (tmp_path / "out" / "README.base.md").read_text() == "read me"
    assert not (tmp_path / "out" / "README.base.md").is_symlink()


def in_a_cache(tiny_folder: Path, cache: Path) -> Path:
    """Return the snapshot of the tiny model in a folder that is laid out as the hub's cache is."""
    repository = cache / "models--someone--tiny"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny_folder.iterdir())):
        shutil.copyfile(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_a_snapshot_of_the_hubs_cache(
    tiny_folder: Path, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = in_a_cache(tiny_folder, tmp_path / "hub")
    names = {path.name for path in tiny_folder.iterdir()}
    assert {path.name for path in original_files(find(snapshot))} == names
    # Files that were put elsewhere as links to this user's own cache.
    own = tmp_path / "own"
    own.mkdir()
    for path in snapshot.iterdir():
        (own / path.name).symlink_to(path.resolve())
    with pytest.raises(ModelError, match="leads out of its folder"):
        find(own)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find(own).folder == own
    # A stranger may lay a folder out as a cache.
    blob = (snapshot / "config.json").resolve()
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(ModelError, match=r"config\.json is a link that leads out of its folder"):
        find(snapshot)
    shutil.rmtree(blob.parent)
    blob.parent.symlink_to(secret.parent)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/secret")
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"config\.json is a link that leads out of its folder"):
        find(snapshot)


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_an_adapter_with_a_link(tiny_folder: Path, tmp_path: Path, secret: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "adapter")
    shutil.move(adapter / "adapter_model.safetensors", secret.parent)
    (adapter / "adapter_model.safetensors").symlink_to(secret.parent / "adapter_model.safetensors")
    assert "adapter_model.safetensors is a link that leads out" in refusal(tiny_folder, adapter=adapter)


def test_the_record_of_another_models_training(tmp_path: Path, secret: Path) -> None:
    from gerund.cli.convert import _reports

    other = tmp_path / "other"
    other.mkdir()
    (other / "training.json").symlink_to(secret)
    with pytest.raises(ModelError, match=r"training\.json is a link that leads out"):
        _reports(str(other), None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "training.json", "LICENSE"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(folder) == f"{folder / name} is not a regular file; remove it from the model's folder"


def test_a_link_to_itself(folder: Path) -> None:
    (folder / "README.md").symlink_to("README.md")
    assert "README.md cannot be read" in refusal(folder) or "README.md is a link" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if os.geteuid() == 0:  # who may read everything
        monkeypatch.setattr(folder_files.os, "access", lambda path, mode: Path(path).name != name)
    else:
        (folder / name).chmod(0)
    assert refusal(folder) == f"{folder / name} cannot be read: permission denied"


def test_an_input_that_is_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a writer it is read; without one nobody waits for ever."""
    import threading

    from gerund import checks

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=lambda: pipe.write_text("a\nb\n"))
    writing.start()
    assert checks.read_sample(pipe) == ["a", "b"]
    writing.join()
    monkeypatch.setattr(checks, "_SECONDS_FOR_A_WRITER", 0.05)
    for read in (checks.read_sample, checks.read_json):
        with pytest.raises(DataError, match="pipe is a pipe that nothing writes to"):
            read(pipe)
