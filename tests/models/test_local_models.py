"""GGUF files are found in folders, in parts, and in other programs' stores."""

import json
import os
from pathlib import Path

import pytest

from gerund.errors import ModelError
from gerund.gguf_file import MAGIC, is_gguf, parts_of
from gerund.models.catalog import find_local, gguf_in, local_models
from gerund.models.sources import find

HEX = "a" * 64


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MAGIC + bytes(20))
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without any model."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_a_folder_with_one_model(tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    model = put(tmp_path / "model.gguf")
    put(tmp_path / "mmproj-model.gguf")  # the image encoder beside it
    assert gguf_in(tmp_path) == find(tmp_path).gguf == model
    put(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"holds 2 GGUF models; give the path of one: model.gguf, other.gguf"):
        find(tmp_path)


def test_a_model_in_parts(tmp_path: Path) -> None:
    names = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    parts = [put(tmp_path / name) for name in names]
    assert gguf_in(tmp_path) == parts[0]
    assert parts_of(parts[0]) == parts
    parts[1].unlink()
    with pytest.raises(ModelError, match=r"split into 3 files, and m-00002-of-00003.gguf is missing"):
        parts_of(parts[0])


def test_another_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.gguf").write_text("not a model")
    assert not is_gguf(tmp_path / "notes.gguf")
    with pytest.raises(ModelError, match="is not a GGUF file; give a model's folder"):
        find(tmp_path / "notes.gguf")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "model.gguf")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ModelError, match=r"model.gguf cannot be read: permission denied"):
        find(path)


def test_the_folder_of_a_service_that_only_it_may_look_into(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: object, *arguments: object, **options: object) -> os.stat_result:
        if str(path).startswith("/usr/share/ollama"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    assert local_models() == []
    with pytest.raises(ModelError, match="ollama has no models on this machine"):
        find("ollama:llama3.2")


def test_ollama(home: Path) -> None:
    models = home / ".ollama" / "models"
    blob = put(models / "blobs" / f"sha256-{HEX}")

    def manifest(place: str, digest: str, kind: str = "application/vnd.ollama.image.model") -> None:
        path = models / "manifests" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"layers": [{"mediaType": kind, "digest": digest, "size": 24}]}))

    manifest("registry.ollama.ai/library/llama3.2/latest", f"sha256:{HEX}")
    manifest("registry.ollama.ai/someone/mine/q4", f"sha256:{HEX}")
    manifest("hf.co/a/b/latest", f"sha256:{HEX}")
    manifest("registry.ollama.ai/library/tensors/latest", f"sha256:{HEX}", "application/vnd.ollama.image.tensor")
    manifest("registry.ollama.ai/library/evil/latest", "sha256:../../../etc/passwd")
    (models / "manifests/registry.ollama.ai/library/llama3.2/broken").write_text("{")
    names = [model.name for model in local_models()]
    assert names == ["ollama:hf.co/a/b:latest", "ollama:llama3.2:latest", "ollama:someone/mine:q4"]
    assert find_local("ollama:llama3.2") == find("ollama:llama3.2").gguf == blob
    with pytest.raises(ModelError, match=r"unknown model of ollama 'llama4'"):
        find("ollama:llama4")


def test_stores_of_other_programs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="lmstudio has no models on this machine"):
        find("lmstudio:anything")
    studio = put(home / ".lmstudio" / "models" / "who" / "Tiny-GGUF" / "tiny-q8.gguf")
    hub = put(home / "hub" / "models--who--Tiny" / "snapshots" / "0123" / "tiny.gguf")
    flat = put(home / ".cache" / "llama.cpp" / "flat.gguf")
    assert [model.name for model in local_models()] == [
        "hf:who/Tiny/tiny.gguf",
        "llama.cpp:flat.gguf",
        "lmstudio:who/Tiny-GGUF/tiny-q8.gguf",
    ]
    assert find("lmstudio:tiny-q8").gguf == studio
    assert find("hf:who/Tiny").gguf == hub
    assert find("llama.cpp:flat.gguf").gguf == flat
    put(home / ".lmstudio" / "models" / "who" / "Tiny-GGUF" / "tiny-q4.gguf")
    with pytest.raises(ModelError, match="several models called 'tiny'"):
        find("lmstudio:tiny")
    (home / ".lmstudio-home-pointer").write_text(str(home / "elsewhere"))
    monkeypatch.setenv("LLAMA_CACHE", str(home / "cache"))
    assert find_local("hf:who") == hub
    assert find_local("who/Tiny") is None
