"""Keys of what was made from the content of files, under which it is cached."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gerund.errors import GerundError
from gerund.jobs.files import write_atomic


def content_key(sources: Sequence[Path], folder: Path, *parts: str) -> str:
    """Return the key of what is made from the content of some files, and of ``parts``.

    The digest of a file is remembered in ``folder`` until the file is changed.

    Raises:
        OSError: a file cannot be read.
    """
    return key_of(*(_digest(path, folder) for path in sources), *parts)


def key_of(*parts: str) -> str:
    """Return a key of texts."""
    return hashlib.blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def stamp_of(path: Path) -> list[int]:
    """Describe a file by what no program can set back after a change."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _digest(path: Path, folder: Path) -> str:
    known = folder / "known" / key_of(str(path.resolve()), *map(str, stamp_of(path)))
    with suppress(OSError, ValueError):
        return known.read_text(encoding="ascii")
    digest = sha256_of(path)
    with suppress(OSError, GerundError):
        known.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(known, digest)
    return digest
