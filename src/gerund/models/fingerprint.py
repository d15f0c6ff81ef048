"""Encoder fingerprints, a hash of everything that affects the vectors, and cached hashes; imports no torch.

Hashes of weights and results of attention probes are in the user's cache. A hash belongs to files as the file system
describes them: path, size, times of the last write and of the last change, which no program can set back. A file whose
content was changed or replaced gets another description, regardless of its name, size and date.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.errors import GerundError
from gerund.jobs.disk_cache import user_cache
from gerund.jobs.files import write_atomic
from gerund.models.library_calls import ready_for_threads
from gerund.settings.encoder import RANKING, EncoderConfig
from gerund.version import __version__

if TYPE_CHECKING:
    from torch import Tensor


def weights_hash(state: Mapping[str, "Tensor"]) -> str:
    """Return a hash of every weight, with names and shapes.

    Values count, not their type: a bfloat16 checkpoint that a processor without bfloat16 holds in float32 is
    the same encoder.
    """
    import torch

    def one(name: str) -> bytes:
        tensor = state[name].detach().cpu().contiguous()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)}".encode(), digest_size=16)
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    ready_for_threads()
    # hashlib lets go of the interpreter lock, so tensors are hashed side by side; few, since each is copied.
    with ThreadPoolExecutor(max_workers=4) as pool:
        parts = list(pool.map(one, sorted(state)))
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def files_hash(files: Sequence[Path], arithmetic: str) -> str:
    """Return a hash of packed weights: of their files, and of what is computed with them."""
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def adapter_hash(folder: Path | None) -> str:
    """Return a hash of an adapter's files; the empty string without an adapter."""
    if folder is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def fingerprint(
    weights: str, adapter: str, config: EncoderConfig, n_layers: int, *, dimensions: int | None = None
) -> str:
    """Return the fingerprint of an encoder: 16 hexadecimal digits.

    Two encoders with the same fingerprint give the same vectors (up to rounding) for the same texts, prompts
    and dimensions; k and k0 that were left out count as what they came to.
    """
    settings = config.to_dict()
    settings["attention"] = config.with_defaults(n_layers).attention.to_dict()
    settings.pop("normalize")
    for name in (*RANKING, "similarity"):
        settings.pop(name, None)
    parts = [weights, adapter, json.dumps(settings, sort_keys=True), str(dimensions)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def times_written(tensor: "Tensor") -> int:
    """Return how often a tensor was changed in place, as whoever trains a model does; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


LEAST_BYTES = 1 << 22
"""Smaller weights are hashed each time: that takes a hundredth of a second."""

_HASH = re.compile(r"[0-9a-f]{32}")
_PASSED = "every layer obeys the plan\n"


def describe_files(files: Sequence[Path]) -> str:
    """Return how the file system describes files; empty where they are small or can't be read."""
    try:
        stats = [(str(path.resolve()), path.stat()) for path in files]
    except OSError:
        return ""
    if sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return ""
    return "\n".join(
        f"{name} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        for name, stat in stats
    )


def weights_key(description: str, *how: str) -> str | None:
    """Return the cache key of the weights in described files; None where there is no description.

    ``how`` is what else decides which tensors they become, such as their dtype.
    """
    if not description:
        return None
    return cache_key(description, *how, _transformers(), __version__)


def cached_hash(key: str | None, compute: Callable[[], str]) -> str:
    """Return the hash of the weights with this key; where none is cached, or without a key, it is computed."""
    hashed = "" if key is None else cached_text("weights", key)
    if not _HASH.fullmatch(hashed):
        hashed = compute()
        if key is not None:
            cache_text("weights", key, hashed)
    return hashed


def probe_passed(key: str) -> bool:
    """Whether a probe with this key was passed before; an unreadable or foreign file counts as no."""
    return cached_text("probes", key) == _PASSED


def cache_passed_probe(key: str) -> None:
    """Record that a probe was passed, where the cache can be written."""
    cache_text("probes", key, _PASSED)


def cache_key(*parts: str) -> str:
    """Return the name of a file of the cache for what it depends on."""
    return hashlib.blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def cached_text(kind: str, key: str) -> str:
    """Return a short text of the cache; empty where it has none."""
    try:
        return (user_cache(kind) / key).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def cache_text(kind: str, key: str, text: str) -> None:
    """Keep a short text in the cache, where that can be written."""
    with suppress(OSError, GerundError):
        path = user_cache(kind) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)


def _transformers() -> str:
    """Return the installed version of transformers; empty without it."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""
