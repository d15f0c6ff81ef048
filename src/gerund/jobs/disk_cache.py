"""A disk cache of folders by key, with a size limit and LRU eviction; and keys made from files.

Entries are written atomically, and several processes may share a cache. Everything in it can be made again.
"""

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gerund.checks import place
from gerund.errors import ConfigError, GerundError, InputError, OutputExistsError, ResourceError
from gerund.jobs.files import atomic_folder, explained, write_atomic

MOST_BYTES = 2 * 10**9
"""Default size of a cache."""

_KEY = re.compile(r"[0-9a-z]{8,64}")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def user_cache(name: str) -> Path:
    """Return this user's cache folder for something: ``$XDG_CACHE_HOME/gerund/NAME``, or the system's equivalent."""
    home = Path.home()
    if folder := os.environ.get("XDG_CACHE_HOME"):
        base = Path(folder)
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = home / ".cache"
    return base / "gerund" / name


def parse_size(text: str) -> int:
    """Parse a size such as ``2GB`` or ``500 MB`` into bytes.

    >>> parse_size("2GB"), parse_size("1.5 kb"), parse_size("0")
    (2000000000, 1500, 0)
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"a size is a number with a unit, such as 2GB or 500MB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


class DiskCache:
    """Folders by key, of at most ``most_bytes``. The cache is made on the first write, readable by its owner alone."""

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = place("the cache", folder)
        self.most_bytes = most_bytes

    def get(self, key: str) -> Path | None:
        """Return the folder of a key and mark it as used now; None where there is none."""
        path = self._path(key)
        try:
            os.utime(path)
        except OSError:
            # A cache that may be read and not written has its entries all the same.
            return path if os.access(path, os.R_OK | os.X_OK) and path.is_dir() else None
        return path

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Let ``write`` fill the empty folder of a key, then evict the least recently used beyond the cache's size.

        An entry larger than the cache is not kept.
        """
        with explained(f"the cache {self.folder} cannot be written"):
            if not self.folder.is_dir():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with atomic_folder(self._path(key), overwrite=True) as work:
                write(work)
        except OutputExistsError as error:
            raise ResourceError(f"the cache {self.folder} cannot be written: {error}") from error
        self._shrink()

    def drop(self, key: str) -> None:
        """Remove a key."""
        shutil.rmtree(self._path(key), ignore_errors=True)

    def sizes(self) -> dict[str, int]:
        """Return the size of each key in bytes, the least recently used first."""
        entries = []
        with suppress(OSError):
            for entry in self.folder.iterdir():
                with suppress(OSError):  # another process may remove it meanwhile
                    if _KEY.fullmatch(entry.name) and entry.is_dir():
                        size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
                        entries.append((entry.stat().st_mtime_ns, entry.name, size))
        return {name: size for _, name, size in sorted(entries)}

    def _shrink(self) -> None:
        sizes = self.sizes()
        total = sum(sizes.values())
        # First an entry larger than the cache, which would evict all others.
        for key, size in sorted(sizes.items(), key=lambda entry: entry[1] <= self.most_bytes):
            if total <= self.most_bytes:
                return
            self.drop(key)
            total -= size

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InputError(f"a cache key is 8 to 64 letters and digits, not {key!r}")
        return self.folder / key


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
