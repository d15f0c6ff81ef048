"""Check which files of a model's folder may be read: regular files inside it, or blobs of the hub's cache.

A folder from somebody else may contain links, whose targets would be read as part of the model and copied with it, or
pipes, on which a read waits forever.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gerund.errors import ModelError

# Folders inside a model's folder of which every file is read.
_READ_WHOLE = ("additional_chat_templates", "adapter*", "[0-9]*_*")


def demand_readable_files(folder: Path) -> None:
    """Refuse a model's folder with a file that must not or cannot be read."""
    for path in _read_files(folder):
        demand_readable(path, folder)


def demand_readable(path: Path, folder: Path) -> None:
    """Refuse one file of a model's folder that must not or cannot be read; a missing file is skipped."""
    try:
        real, root = path.resolve(), folder.resolve()
        if not (real.is_relative_to(root) or _is_blob(real, root)):
            raise ModelError(
                f"{path} is a link that leads out of its folder, to {real}; only files inside a model's folder are "
                "read: replace the link by a copy of the file"
            )
        kind = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, RuntimeError) as error:  # such as a link to itself
        raise ModelError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise ModelError(f"{path} is not a regular file; remove it from the model's folder")
    if not os.access(path, os.R_OK):
        raise ModelError(f"{path} cannot be read: permission denied")


def _read_files(folder: Path) -> Iterator[Path]:
    """Yield what loaders may open: every file at the top level, and all files of some subfolders."""
    try:
        for entry in sorted(folder.iterdir()):
            if not entry.is_dir():
                yield entry
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror or error}") from error
    for pattern in _READ_WHOLE:
        for inside in sorted(folder.glob(pattern)):
            if inside.is_dir():
                yield inside
                yield from sorted(inside.iterdir())


def _is_blob(real: Path, root: Path) -> bool:
    """Whether a file is a blob in the hub's cache: that of the snapshot, or this user's."""
    for snapshots in (place for place in root.parents if place.name == "snapshots"):
        if real.parent == snapshots.parent / "blobs":
            return True
    from huggingface_hub import constants

    # The names of blobs are hashes, which can't be guessed.
    cache = Path(constants.HF_HUB_CACHE).resolve()
    return real.is_relative_to(cache) and real.parent.name == "blobs"


def hub_name(folder: Path) -> str:
    """Return the hub id of a folder in the hub's cache, else the folder's own name.

    >>> hub_name(Path("hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2")), hub_name(Path("models/Qwen3-0.6B"))
    ('Qwen/Qwen3-0.6B', 'Qwen3-0.6B')
    """
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name


def cached_folders(name: str) -> Iterator[Path]:
    """Yield the folders that the hub's cache has of a hub id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("config.json", "adapter_config.json"):
        try:
            path = try_to_load_from_cache(name, file)
        except HFValidationError:
            return
        if isinstance(path, str):
            yield Path(path).parent
