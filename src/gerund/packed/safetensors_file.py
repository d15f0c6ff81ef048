"""Read safetensors files with numpy: mapped from disk, and converted to float32 one tensor at a time."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gerund.errors import ModelError

_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_WHOLE_NUMBERS = {"I64": np.int64, "U8": np.uint8}


class SafetensorsFile(Mapping[str, np.ndarray]):
    """The tensors of a file by name, float32.

    Raises:
        ModelError: the file is missing or damaged, or a tensor is of a type other than floats.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError("its header exceeds the file")
                self._entries: dict[str, Any] = json.loads(file.read(size))
            self._entries.pop("__metadata__", None)
            # Plain views of the mapped file: an index of numpy's memmap takes ten times as long.
            self._data = np.memmap(path, mode="r", dtype=np.uint8, offset=8 + size).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot load {path}: {error}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, name: str) -> np.ndarray:
        return _float32(np.array(self._mapped(name)))

    def rows(self, name: str, numbers: np.ndarray) -> np.ndarray:
        """Return some rows of a tensor."""
        return _float32(self._mapped(name)[numbers])

    def whole_numbers(self, name: str) -> np.ndarray:
        """Return a tensor of whole numbers of 64 or 8 bits."""
        return np.array(self._mapped(name, _WHOLE_NUMBERS))

    def _mapped(self, name: str, dtypes: Mapping[str, type] = _DTYPES) -> np.ndarray:
        entry = self._entries[name]
        try:
            start, end = entry["data_offsets"]
            return self._data[start:end].view(dtypes[entry["dtype"]]).reshape(entry["shape"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"cannot load {self.path}: {name} cannot be read ({error})") from error


def _float32(stored: np.ndarray) -> np.ndarray:
    if stored.dtype == np.uint16:  # bfloat16, which numpy does not have
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)
