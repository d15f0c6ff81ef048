"""Find GGUF files: in a folder, split into parts, or in what Ollama, LM Studio and llama.cpp have downloaded.

Imports no torch, so that a slip in a path or a name is reported at once. Nothing is written or downloaded.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gerund.errors import ModelError, unknown_name

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_VISION = "mmproj"  # how llama.cpp's files of image encoders are called, which lie beside the model

_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_TENSOR = "application/vnd.ollama.image.tensor"
_OLLAMA_DEFAULTS = ("registry.ollama.ai", "library", "latest")


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, by its first bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a folder that holds one model (perhaps split into several files); None without any.

    Raises:
        ModelError: there are several models.
    """
    models = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if path.is_file() and _is_first(path)]
    models = [path for path in models if not path.name.startswith(_VISION)]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:10]) + (", ..." if len(models) > 10 else "")
        raise ModelError(f"{folder} holds {len(models)} GGUF models; give the path of one: {names}")
    return models[0] if models else None


def _is_first(path: Path) -> bool:
    split = _SPLIT.fullmatch(path.name)
    return split is None or int(split["number"]) == 1


def parts_of(path: Path) -> list[Path]:
    """Return all files of a model that was split; the file itself where it was not.

    Raises:
        ModelError: a part is missing.
    """
    split = _SPLIT.fullmatch(path.name)
    if split is None or not 0 < int(split["number"]) <= int(split["count"]):
        return [path]
    count = int(split["count"])
    parts = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = next((part.name for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ModelError(f"cannot load {path}: the model is split into {count} files, and {missing} is missing")
    return parts


@dataclass(frozen=True)
class LocalModel:
    """A GGUF file that another program has downloaded.

    Attributes:
        name: what ``gerund.load`` takes, such as ``ollama:llama3.2:latest``.
        path: the file.
    """

    name: str
    path: Path


def local_models() -> list[LocalModel]:
    """Return the GGUF files that Ollama, LM Studio and llama.cpp have on this machine, by name."""
    return sorted((model for find in STORES.values() for model in find()), key=lambda model: model.name)


def find_local(name: str) -> Path | None:
    """Return the file that ``ollama:NAME``, ``lmstudio:NAME``, ``llama.cpp:NAME`` or ``hf:NAME`` means.

    Returns:
        The file; None for a name without such a beginning.

    Raises:
        ModelError: that program has no such model; the nearest names are listed.

    >>> find_local("gpt2") is None
    True
    """
    store, colon, wanted = name.partition(":")
    if not colon or store not in STORES:
        return None
    models = {model.name.removeprefix(f"{store}:"): model.path for model in STORES[store]()}
    short = wanted if store != "ollama" else _ollama_name(wanted)
    matches = [path for known, path in models.items() if known == short]
    matches = matches or [path for known, path in models.items() if wanted and wanted.lower() in known.lower()]
    if len(matches) == 1:
        return matches[0]
    if not models:
        raise ModelError(f"{store} has no models on this machine")
    if len(matches) > 1:
        names = [known for known in models if wanted.lower() in known.lower()]
        raise ModelError(f"{store} has several models called {wanted!r}: {', '.join(sorted(names)[:10])}")
    raise ModelError(str(unknown_name(f"model of {store}", wanted, sorted(models))))


def _ollama() -> Iterator[LocalModel]:
    """Yield Ollama's models: each manifest names the blob that holds the weights."""
    for root in _ollama_folders():
        manifests = root / "manifests"
        # Unlike Path.is_dir it says no of a folder that this user may not look into, such as the service's.
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
    """Return the digest of the weights that a manifest names; None where they are not a GGUF file."""
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8")).get("layers")
        digests = [layer["digest"] for layer in layers if layer.get("mediaType") == _OLLAMA_MODEL]
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    good = [digest for digest in digests if isinstance(digest, str) and re.fullmatch(r"sha256:[0-9a-f]{64}", digest)]
    return good[0] if good else None


def _ollama_short(parts: tuple[str, ...]) -> str:
    """Return a model's name as Ollama prints it, without what is usual."""
    host, namespace, model, tag = parts
    before = [] if host == _OLLAMA_DEFAULTS[0] else [host]
    before += [] if namespace == _OLLAMA_DEFAULTS[1] and not before else [namespace]
    return "/".join([*before, f"{model}:{tag}"])


def _ollama_name(name: str) -> str:
    """Return the name that ``ollama run`` would understand, with its tag.

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
            repository = snapshot.parts[-3].removeprefix("models--").replace("--", "/")
            yield from (
                LocalModel(f"hf:{repository}/{path.relative_to(snapshot)}", path)
                for path in sorted(snapshot.rglob(f"*{SUFFIX}"))
                if _is_first(path) and is_gguf(path)
            )


def _files(folder: Path, store: str, pattern: str) -> Iterator[LocalModel]:
    for path in sorted(folder.glob(pattern)) if os.path.isdir(folder) else ():  # noqa: PTH112 - as in _ollama
        if _is_first(path) and is_gguf(path) and not path.name.startswith(_VISION):
            yield LocalModel(f"{store}:{path.relative_to(folder)}", path)


STORES = {"ollama": _ollama, "lmstudio": _lmstudio, "llama.cpp": _llama_cpp, "hf": _hub_cache}
"""Programs whose models are found by name, and what finds them."""
