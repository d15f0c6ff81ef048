"""Check that a worker sees the folder that the driver sees, and runs the same gerund.

The driver writes a number that nobody can guess into the folder; a worker that reads it there sees the same folder.

Knows: folders, versions. Does not know: who the workers are.
"""

import platform
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gerund.errors import InputError
from gerund.jobs.files import write_whole
from gerund.version import __version__

# A name that the next job in the folder removes, should this one be killed.
NAME = ".shared-folder.part"
# A network file system may show a new file a moment later.
_PATIENCE = 5.0


@dataclass(frozen=True)
class SharedFolderCheck:
    """What a worker has to find.

    Attributes:
        folder: the folder; None where none has to be seen.
        nonce: what a file in it says.
        version: the driver's version of gerund.
    """

    folder: Path | None
    nonce: str
    version: str

    def check(self) -> None:
        """Refuse a worker that sees another folder, or runs another gerund.

        Raises:
            InputError: it is one.
        """
        machine = platform.node() or "a machine"
        if self.version != __version__:
            raise InputError(
                f"{machine} has gerund {__version__} and this machine {self.version}; install the same on all of them"
            )
        if self.folder is None:
            return
        end = time.monotonic() + _PATIENCE
        while (found := _read(self.folder)) != self.nonce:
            if time.monotonic() > end:
                what = "has another folder at" if found else "does not see"
                raise InputError(
                    f"{machine} works on this job and {what} {self.folder}; put the output, or with --work the parts, "
                    "on storage that all machines share, under the same path"
                )
            time.sleep(0.1)


@contextmanager
def shared_folder_check(folder: Path | None) -> Iterator[SharedFolderCheck]:
    """Yield what workers have to find, and leave the folder as it was.

    Raises:
        ResourceError: the folder cannot be written.
    """
    nonce = secrets.token_hex(16)
    if folder is None:
        yield SharedFolderCheck(None, nonce, __version__)
        return
    folder = folder.absolute()
    write_whole(folder / NAME, nonce)
    try:
        yield SharedFolderCheck(folder, nonce, __version__)
    finally:
        with suppress(OSError):
            (folder / NAME).unlink()


def _read(folder: Path) -> str:
    try:
        return (folder / NAME).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
