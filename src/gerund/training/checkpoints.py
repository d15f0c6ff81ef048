"""Knows when a checkpoint is whole: its manifest, written last, lists every file with its size.

The Trainer itself takes the highest number and would silently go on without a missing optimizer file.
"""

import json
import os
import re
from pathlib import Path

from gerund.jobs.files import write_whole

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)$")


def write_manifest(folder: Path) -> None:
    """Declare the checkpoint in ``folder`` whole."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                # The sizes are only a promise once the contents are on the disk.
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_whole(folder / MANIFEST, json.dumps(files, indent=1))


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint in ``folder``, and for each broken one what is wrong with it."""
    newest, broken = None, {}
    found = [path for path in folder.glob("checkpoint-*") if _NAME.match(path.name)]
    for path in sorted(found, key=step_of, reverse=True):
        problem = _problem(path)
        if problem is not None:
            broken[path] = problem
        elif newest is None:
            newest = path
    return newest, broken


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written.

    >>> step_of(Path("run/checkpoints/checkpoint-400"))
    400
    """
    return int(checkpoint.name.rsplit("-", 1)[1])


def _problem(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        return "cut short before it was complete"
    except ValueError:
        return "its manifest is unreadable"
    if not isinstance(files, dict) or not files:
        return "its manifest is unreadable"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None
