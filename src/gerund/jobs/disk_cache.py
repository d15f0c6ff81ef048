"""A cache on the disk: folders by key, of which those go that were not used for longest when there are too many bytes.

Each entry is written whole or not at all, and several processes may share one cache. What somebody removes meanwhile
is not there, and that is all. A cache is a convenience: whatever is in it can be made again.

Knows: folders, sizes, when they were used. Does not know: what is in them.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gerund.checks import place
from gerund.errors import ConfigError, InputError, OutputExistsError, ResourceError
from gerund.jobs.files import atomic_folder

MOST_BYTES = 2 * 10**9
"""What a cache holds at most where nothing else is said."""

_KEY = re.compile(r"[0-9a-z]{8,64}")
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def user_cache(name: str) -> Path:
    """Return the folder where this user's caches lie: ``$XDG_CACHE_HOME/gerund/NAME``, or what the system has for it.

    Args:
        name: what is cached.
    """
    home = Path.home()
    if own := os.environ.get("XDG_CACHE_HOME"):
        base = Path(own)
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif os.name == "nt":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = home / ".cache"
    return base / "gerund" / name


def parse_size(text: str) -> int:
    """Return how many bytes a size means, such as ``2GB`` or ``500 MB``.

    Raises:
        ConfigError: it is no size.

    >>> parse_size("2GB"), parse_size("1.5 kb"), parse_size("0")
    (2000000000, 1500, 0)
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ConfigError(f"a size is a number with a unit, such as 2GB or 500MB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


class DiskCache:
    """Folders by key.

    Args:
        folder: where they lie; made when the first is written, readable by its owner alone.
        most_bytes: what they may take together.
    """

    def __init__(self, folder: str | Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder = place("the cache", folder)
        self.most_bytes = most_bytes

    def get(self, key: str) -> Path | None:
        """Return the folder of a key, which counts as used now; None where there is none."""
        found = self._place(key)
        try:
            os.utime(found)
        except OSError:
            # One that may be read and not written has its entries all the same.
            return found if os.access(found, os.R_OK | os.X_OK) and found.is_dir() else None
        return found

    def put(self, key: str, write: Callable[[Path], None]) -> None:
        """Let a folder be written under a key, and remove what was not used for longest where there are too many bytes.

        What alone would take more than the cache may is not kept.

        Args:
            key: letters and digits.
            write: fills a folder, which is empty.

        Raises:
            ResourceError: the cache cannot be written; nothing is left behind.
        """
        try:
            if not self.folder.is_dir():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"the cache {self.folder} cannot be written: {error.strerror or error}") from error
        try:
            with atomic_folder(self._place(key), overwrite=True) as work:
                write(work)
        except OutputExistsError as error:
            raise ResourceError(f"the cache {self.folder} cannot be written: {error}") from error
        self._shrink()

    def drop(self, key: str) -> None:
        """Remove a key."""
        shutil.rmtree(self._place(key), ignore_errors=True)

    def sizes(self) -> dict[str, int]:
        """Return what each key takes, in bytes, the one that was not used for longest first."""
        found = []
        with suppress(OSError):
            for one in self.folder.iterdir():
                with suppress(OSError):
                    if _KEY.fullmatch(one.name) and one.is_dir():
                        size = sum(path.stat().st_size for path in one.rglob("*") if path.is_file())
                        found.append((one.stat().st_mtime_ns, one.name, size))
        return {name: size for _, name, size in sorted(found)}

    def _shrink(self) -> None:
        sizes = self.sizes()
        whole = sum(sizes.values())
        # What is larger than the whole cache would drive out all others first.
        for key, size in sorted(sizes.items(), key=lambda own: own[1] <= self.most_bytes):
            if whole <= self.most_bytes:
                return
            self.drop(key)
            whole -= size

    def _place(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise InputError(f"a key of the cache is 8 to 64 letters and digits, not {key!r}")
        return self.folder / key
