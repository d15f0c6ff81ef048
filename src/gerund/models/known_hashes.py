"""Hashes of weights that were worked out before, so that a large model is not read whole again to be told from others.

A hash belongs to files as the file system describes them: where they lie, how large they are, when they were last
written, and when anything of them last changed, which no program can set back. A file whose content was changed or
replaced is another one, whatever its name, size and date say. What a model's tensors became after they were loaded is
not in the files: whoever asks here has seen that nothing did.

Knows: files' descriptions, this user's caches. Does not know: models.
"""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import transformers

from gerund.errors import GerundError
from gerund.jobs.disk_cache import default_cache
from gerund.jobs.files import write_whole
from gerund.version import __version__

LEAST_BYTES = 1 << 22
"""Below this the weights are hashed each time: that takes a hundredth of a second."""

_HASH = re.compile(r"[0-9a-f]{32}")


def described(files: Sequence[Path]) -> str:
    """Return how the file system describes files; empty where they are small, or cannot be looked at."""
    try:
        found = [(str(path.resolve()), path.stat()) for path in files]
    except OSError:
        return ""
    if sum(one.st_size for _, one in found) < LEAST_BYTES:
        return ""
    return "\n".join(
        f"{name} {one.st_dev} {one.st_ino} {one.st_size} {one.st_mtime_ns} {one.st_ctime_ns}" for name, one in found
    )


def stamp(description: str, *how: str) -> str | None:
    """Return under what the hash of files is kept; None for files that have no description.

    Args:
        description: from ``described``.
        how: what else decides which tensors are made of them, such as their type.
    """
    if not description:
        return None
    parts = [description, *how, transformers.__version__, __version__]
    return hashlib.blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def recall(stamp: str) -> str | None:
    """Return the hash that was kept under a stamp; None where there is none."""
    try:
        kept = _place(stamp).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return kept if _HASH.fullmatch(kept) else None


def remember(stamp: str, hashed: str) -> None:
    """Keep a hash, where it can be kept."""
    with suppress(OSError, GerundError):
        place = _place(stamp)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, hashed)


def _place(stamp: str) -> Path:
    return default_cache("weights") / stamp
