"""Rows of numbers by key, in memory or in a folder to which rows are only ever appended.

On disk there are two files: vectors first, then the keys that name them. A process that is killed in between leaves
vectors without keys, which are cut off by whoever appends or reads next.

Knows: vectors, keys, files. Does not know: what they are of.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gerund.errors import ResourceError
from gerund.jobs.files import write_whole

KEY_BYTES = 16


class RowStore:
    """Rows of one width, by key.

    Args:
        folder: where they are kept; None keeps them in memory. It is made with the first row.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.places: dict[bytes, int] = {}
        self.blocks: list[np.ndarray] = []
        self.width = 0
        if folder is not None and (folder / "width").is_file():
            self._open(folder)

    def __contains__(self, key: bytes) -> bool:
        return key in self.places

    def __len__(self) -> int:
        return len(self.places)

    def rows(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return the vectors of ``keys``."""
        if not keys:
            return np.zeros((0, self.width), dtype=np.float32)
        places = np.array([self.places[key] for key in keys])
        if self.folder is not None:
            table = np.memmap(self.folder / "vectors", dtype=np.float32, mode="r").reshape(-1, self.width)
            return np.array(table[places])
        if len(self.blocks) > 1:
            self.blocks = [np.concatenate(self.blocks)]
        chosen: np.ndarray = self.blocks[0][places]
        return chosen

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Append vectors ``(n, width)`` under their keys, none of which is here yet.

        Raises:
            ResourceError: the disk is full; what was here before stays.
        """
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self.width = self.width or vectors.shape[1]
        if self.folder is None:
            self.blocks.append(vectors)
        else:
            self._append(self.folder, keys, vectors)
        start = len(self.places)
        self.places.update({key: start + row for row, key in enumerate(keys)})

    def _append(self, folder: Path, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "width").is_file():
                write_whole(folder / "width", str(self.width))
            rows = len(self.places)
            for name, size, data in (
                ("vectors", 4 * self.width, vectors.tobytes()),
                ("keys", KEY_BYTES, b"".join(keys)),
            ):
                with (folder / name).open("ab") as file:
                    # Whatever an attempt that was interrupted has left behind the last row.
                    file.truncate(rows * size)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"vectors cannot be kept in {folder}: {error.strerror or error}") from error

    def _open(self, folder: Path) -> None:
        """Read the keys; cut off whatever a killed process left unfinished."""
        self.width = int((folder / "width").read_text())
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in ("keys", "vectors")]
        rows = min(sizes[0] // KEY_BYTES, sizes[1] // (4 * self.width))
        for name, size in (("keys", rows * KEY_BYTES), ("vectors", rows * 4 * self.width)):
            if (folder / name).is_file():
                os.truncate(folder / name, size)
        data = (folder / "keys").read_bytes() if rows else b""
        self.places = {data[i * KEY_BYTES : (i + 1) * KEY_BYTES]: i for i in range(rows)}
