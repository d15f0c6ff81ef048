"""Cached hashes of weights and results of attention probes, in the user's cache; imports no torch.

A hash belongs to files as the file system describes them: path, size, times of the last write and of the last change,
which no program can set back. A file whose content was changed or replaced gets another description, regardless of its
name, size and date.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gerund.errors import GerundError
from gerund.jobs.disk_cache import user_cache
from gerund.jobs.files import write_atomic
from gerund.version import __version__

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


def cached_hash(key: str) -> str | None:
    """Return the hash of the weights with this key; None where none is cached."""
    hashed = cached_text("weights", key)
    return hashed if _HASH.fullmatch(hashed) else None


def cache_hash(key: str, hashed: str) -> None:
    """Cache the hash of the weights with this key, where the cache can be written."""
    cache_text("weights", key, hashed)


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
