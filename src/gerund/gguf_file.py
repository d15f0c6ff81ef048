"""Read a GGUF file's metadata and tensors, validated.

GGUF is the format of llama.cpp, Ollama and LM Studio. Blocks are unpacked by the ``gguf`` package. This module knows
the container only: neither architectures nor torch.
"""

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite, prod
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

from gerund.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_VERSIONS = (2, 3)
# struct formats of values by type, and the two types without a fixed size.
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4


def is_gguf(path: Path) -> bool:
    """Whether a file is a GGUF file, by its first bytes."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def is_first_part(path: Path) -> bool:
    """Whether a file is a model, or the first file of a split model."""
    split = _SPLIT.fullmatch(path.name)
    return split is None or int(split["number"]) == 1


def parts_of(path: Path) -> list[Path]:
    """Return all files of a split model, or the file itself."""
    split = _SPLIT.fullmatch(path.name)
    if split is None or not 0 < int(split["number"]) <= int(split["count"]):
        return [path]
    count = int(split["count"])
    parts = [path.with_name(f"{split['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = next((part.name for part in parts if not part.is_file()), None)
    if missing is not None:
        raise ModelError(f"cannot load {path}: the model is split into {count} files, and {missing} is missing")
    return parts


class TensorInfo(NamedTuple):
    """The offset of a tensor in its file's data, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Tensors:
    """The tensors of a file, or of a file that was split into several."""

    infos: Mapping[str, TensorInfo]
    files: Mapping[str, Path]
    starts: Mapping[Path, int]  # offset of the data of each file

    def stored(self, name: str) -> "np.ndarray":
        """Return a tensor's bytes as rows (N, bytes of a row), mapped from the file."""
        import numpy as np  # here, since commands look whether a model is a GGUF file before they need numbers

        info, path = self.infos[name], self.files[name]
        start = self.starts[path] + info.offset
        data = np.memmap(path, mode="r", dtype=np.uint8)
        return data[start : start + info.nbytes].reshape(prod(info.shape[:-1]), -1)

    def rows_of(self, name: str) -> "StoredRows":
        """Open a matrix to read a few of its rows at a time."""
        info, path = self.infos[name], self.files[name]
        return StoredRows(path, self.starts[path] + info.offset, prod(info.shape[:-1]), info.nbytes)

    def read(self, name: str, numbers: "np.ndarray | None" = None) -> "np.ndarray":
        """Return a tensor, or the rows of a matrix with these numbers, unpacked, as float32."""
        import gguf
        import numpy as np

        info = self.infos[name]
        stored = self.stored(name)
        rows = np.array(stored if numbers is None else stored[numbers])
        shape = info.shape if numbers is None else (len(numbers), *info.shape[1:])
        kind = gguf.GGMLQuantizationType(info.ggml_type)
        if kind == gguf.GGMLQuantizationType.F32:
            return rows.view(np.float32).reshape(shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return rows.view(np.float16).reshape(shape).astype(np.float32)
        return gguf.quants.dequantize(rows, kind).reshape(shape)


class StoredRows:
    """A matrix of a file, some rows of which are read at a time; threads may share it.

    Mapped rows would stay in the memory of the process, with what lies near them. The file stays open, so that these
    are the rows of the same file if another one takes its name.
    """

    def __init__(self, path: Path, start: int, n_rows: int, nbytes: int) -> None:
        self._start, self._n_rows, self._width = start, n_rows, nbytes // n_rows
        self._file, self._lock = path.open("rb", buffering=0), Lock()
        finalize(self, self._file.close)

    def read(self, numbers_N: "np.ndarray") -> "np.ndarray":
        """Return the bytes of the rows with these numbers (N, bytes of a row)."""
        import numpy as np

        different, place_N = np.unique(numbers_N, return_inverse=True)
        if len(different) and not 0 <= different[0] <= different[-1] < self._n_rows:
            raise IndexError(f"rows {different[0]} to {different[-1]} of {self._n_rows}")
        rows = b"".join(self._row(number) for number in different.tolist())
        return np.frombuffer(rows, np.uint8).reshape(-1, self._width)[place_N]

    def _row(self, number: int) -> bytes:
        place = self._start + number * self._width
        if hasattr(os, "pread"):  # without the position of the file, which a forked process would share
            return os.pread(self._file.fileno(), self._width, place)
        with self._lock:
            self._file.seek(place)
            return self._file.read(self._width)


@dataclass(frozen=True)
class GgufFile:
    """A validated GGUF file: its metadata and tensors."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Tensors = field(repr=False)

    @property
    def architecture(self) -> str:
        """The architecture, by llama.cpp's name."""
        return str(self.metadata["general.architecture"])

    @property
    def vocabulary(self) -> int:
        """Number of tokens that have an embedding."""
        info = self.tensors.infos.get("token_embd.weight")
        if info is None:
            raise ModelError(f"cannot load {self.path}: it has no token embeddings (token_embd.weight)")
        return int(info.shape[0])

    @property
    def types(self) -> tuple[str, ...]:
        """The types of the stored tensors, the most frequent first."""
        import gguf

        kinds = [gguf.GGMLQuantizationType(info.ggml_type).name for info in self.tensors.infos.values()]
        return tuple(sorted(set(kinds), key=lambda kind: -kinds.count(kind)))

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(prod(info.shape) for info in self.tensors.infos.values())

    def value(self, key: str, default: Any = None) -> Any:
        """Return the metadata under ``ARCHITECTURE.key``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """Return an integer, which the file must have if there is no default."""
        value = self.value(key, default)
        if value is None:
            raise ModelError(f"cannot load {self.path}: it has no {self.architecture}.{key}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelError(f"cannot load {self.path}: its {self.architecture}.{key} is {value!r}, not a number")
        return value

    def numbers(self, key: str) -> list[int]:
        """Return an integer for each layer, which the file has as a list or as one for all."""
        value = self.value(key)
        if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
            return value
        return [self.number(key)] * self.number("block_count")

    def fraction(self, key: str, default: float | None = None) -> float | None:
        """Return a float, if the file has it."""
        value = self.value(key, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ModelError(f"cannot load {self.path}: its {self.architecture}.{key} is {value!r}, not a number")
        return float(value)

    def token_id(self, name: str) -> int | None:
        """Return the id of a special token, such as ``eos``, if the file has it."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            return None
        if type(value) is not int or not 0 <= value < self.vocabulary:
            raise ModelError(
                f"cannot load {self.path}: its {name}_token_id is {value!r}, and its tokens are 0 to "
                f"{self.vocabulary - 1}"
            )
        return value


def read_file(path: Path) -> GgufFile:
    """Read and validate the metadata and the table of tensors."""
    parts = parts_of(path)
    try:
        stamps = tuple((part, part.stat().st_mtime_ns, part.stat().st_size) for part in parts)
    except OSError as error:
        raise ModelError(f"cannot load {path}: {error.strerror or error}") from error
    return _read_parts(parts[0], stamps)


@lru_cache(maxsize=4)  # loading a model reads the file three times: for settings, config and weights
def _read_parts(path: Path, stamps: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    infos: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    starts: dict[Path, int] = {}
    metadata: dict[str, Any] = {}
    for part, _, _ in stamps:
        values, tensors, start = _header(part)
        metadata = metadata or values
        starts[part] = start
        _check_layout(part, tensors, start)
        for info in tensors:
            if info.name in infos:
                raise ModelError(f"cannot load {part}: it holds {info.name} twice")
            infos[info.name], files[info.name] = info, part
    # In a split model only the first file has metadata.
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"cannot load {path}: it does not say its architecture")
    return GgufFile(path, metadata, Tensors(infos, files, starts))


def read_texts(path: Path) -> dict[str, Any]:
    """Return a file's metadata with the texts of its arrays, which ``read_file`` leaves out.

    Raises:
        ModelError: the file is damaged, or no GGUF file.
    """
    return _header(path, texts=True)[0]


def _header(path: Path, *, texts: bool = False) -> tuple[dict[str, Any], list[TensorInfo], int]:
    """Return metadata (without ``texts`` only the length of arrays of them), the tensors, and the offset of their data.

    The ``gguf`` package makes an object of each token's text, which takes seconds; transformers' own reader refuses
    several types that it can unpack.
    """
    if not is_gguf(path):
        raise ModelError(f"cannot load {path}: it is no GGUF file")
    with path.open("rb") as file:
        reader = _Reader(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), texts=texts)
    try:
        version, n_tensors, n_values = reader.numbers("<IQQ")
        if version not in _VERSIONS:
            raise ModelError(f"cannot load {path}: it is of version {version} of GGUF; 2 and 3 are read")
        metadata = {reader.text(): reader.value(reader.number("<I")) for _ in range(n_values)}
        tensors = [_tensor(reader, path) for _ in range(n_tensors)]
    except (struct.error, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot load {path}: the file is cut off or damaged") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 16:
        raise ModelError(f"cannot load {path}: its general.alignment is {alignment!r}")
    return metadata, tensors, -(-reader.place // alignment) * alignment


class _Reader:
    """Reads values in order; reading beyond the end of the file raises ``struct.error``."""

    def __init__(self, data: memoryview, *, texts: bool = False) -> None:
        self.data, self.place, self.texts = data, len(MAGIC), texts

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self.data, self.place)
        self.place += struct.calcsize(form)
        return values

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self) -> str:
        return bytes(self._span()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind in _FORMS:
            return self.number(f"<{_FORMS[kind]}")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise struct.error(f"a value of type {kind}")
        kind, count = self.numbers("<IQ")
        if kind in _FORMS:
            return list(self.numbers(f"<{count}{_FORMS[kind]}"))
        if kind != _TEXT:
            raise struct.error(f"an array of type {kind}")
        if self.texts:
            return [self.text() for _ in range(count)]
        self._skip(count)
        return count

    def _skip(self, count: int) -> None:
        """Skip texts; a vocabulary has half a million, so each is worth few steps."""
        length_at, place, data = struct.Struct("<Q").unpack_from, self.place, self.data
        for _ in range(count):  # each takes at least eight bytes, so the end of the file stops an absurd count
            place += 8 + length_at(data, place)[0]
        if place > len(data):
            raise struct.error("a text beyond the end")
        self.place = place

    def _span(self) -> memoryview:
        length = self.number("<Q")
        if length > len(self.data) - self.place:
            raise struct.error("a text beyond the end")
        self.place += length
        return self.data[self.place - length : self.place]


def _tensor(reader: _Reader, path: Path) -> TensorInfo:
    import gguf

    name, n_dimensions = reader.text(), reader.number("<I")
    if not 0 < n_dimensions <= _MOST_DIMENSIONS:
        raise ModelError(f"cannot load {path}: {name} has {n_dimensions} dimensions")
    # GGUF lists the contiguous dimension first, torch last.
    shape = tuple(reversed(reader.numbers(f"<{n_dimensions}Q")))
    number, offset = reader.numbers("<IQ")
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    if number not in sizes:
        raise ModelError(f"cannot load {path}: {name} is of type {number}, which is not known")
    if min(shape) < 1 or shape[-1] % sizes[number][0]:
        raise ModelError(f"cannot load {path}: {name} has the shape {shape}")
    return TensorInfo(name, shape, number, offset, prod(shape) // sizes[number][0] * sizes[number][1])


def _check_layout(path: Path, tensors: list[TensorInfo], start: int) -> None:
    """Refuse tensors that overlap or exceed the file."""
    size, end = path.stat().st_size, 0
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise ModelError(f"cannot load {path}: {info.name} overlaps another tensor")
        end = info.offset + info.nbytes
        if start + end > size:
            raise ModelError(f"cannot load {path}: the file is cut off; {info.name} lies beyond its end")
