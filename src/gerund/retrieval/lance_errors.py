"""What goes wrong with a folder of LanceDB, said in one sentence.

Knows: how LanceDB words its errors. Does not know: tables, queries.
"""

import re
from collections.abc import Callable
from pathlib import Path

from gerund.errors import DataError, GerundError, InputError, ResourceError, StaleIndexError, one_line
from gerund.retrieval.filters import bad_filter
from gerund.retrieval.store import POINTER_FOLDER

_CHARACTERS_OF_A_REASON = 200
# Of a file or a table, not of a column that a filter names.
_MISSING = re.compile(r"not found: \S*\.lance\b|table '\S*' was not found")


def demand_place(folder: Path, sign: str) -> None:
    """Refuse what is there and is no index.

    Args:
        folder: where an index is or will be.
        sign: the name in it by which one is known.

    Raises:
        DataError: it is a file, or holds something else.
        InputError: it may not be read.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DataError(f"{folder} is a file; an index is a folder")
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    except PermissionError as error:
        raise refused(str(folder), "permission denied") from error
    # Of one whose making was interrupted there are tables and perhaps the lock.
    strangers = sorted(name for name in names if not name.endswith(".lance") and name != "lock")
    if strangers and sign not in names:
        raise DataError(
            f"{folder} is no index: it holds {strangers[0]}; an index is a folder of its own, which "
            f"gerund index PATHS -o my.index makes"
        )


def told(error: Exception, name: str, where: str | None, migrated: Callable[[], bool]) -> GerundError:
    """Return what LanceDB raised as an error of the library.

    Args:
        error: it.
        name: the index's, for the sentence.
        where: the filter of the query that failed.
        migrated: whether another process has put other tables in the place of these.
    """
    reason = _reason(error)
    lower = str(error).lower()
    if any(sign in lower for sign in ("no space left", "disk quota", "permission denied", "read-only file")):
        return refused(name, reason)
    is_missing = _MISSING.search(lower.replace((where or "").lower(), "")) is not None
    if where is not None and not is_missing and "not found" not in lower.split("lance")[0]:
        return bad_filter(where, reason)
    if migrated():
        return StaleIndexError(f"{name} was migrated by another process meanwhile; open it again")
    if is_missing:
        return _missing(name, reason)
    if "panicked" in lower:
        return DataError(f"{name} is damaged; restore it from a copy, or make the index again ({reason})")
    return ResourceError(f"{name}: {reason}")


def _missing(name: str, reason: str) -> DataError:
    if "://" not in name and not Path(name, POINTER_FOLDER).is_dir():
        return DataError(
            f"the index {name} is no longer there: its folder was removed or renamed; put it back, or make it again "
            f"with gerund index PATHS -o {name}"
        )
    return DataError(f"a part of the index {name} is missing; put it back, or make the index again ({reason})")


def refused(name: str, reason: str) -> GerundError:
    """Return the error for a folder that the system does not let be read or written.

    Args:
        name: the index's.
        reason: what the system says.
    """
    full = any(sign in reason.lower() for sign in ("no space left", "quota"))
    if full:
        return ResourceError(f"{name} cannot be written: {reason}; what was stored before is kept")
    return InputError(f"{name} cannot be read or written: {reason}")


def _reason(error: Exception) -> str:
    """Return what an error of LanceDB says to people: without its types, and the places in its code."""
    text = str(error).split(", /")[0].split("\n")[0]
    for start in ("lance error:", "External error:", "LanceError(IO):", "Invalid user input:", "Execution error:"):
        text = text.replace(start, "")
    return one_line(text.strip(" :,."), _CHARACTERS_OF_A_REASON) or type(error).__name__
