"""Where vectors are kept: of whole texts by encoder and text, of words in one array; in memory or on disk.

No text is encoded twice. On disk each (fingerprint, prompt) has two files to which rows are only ever appended:
vectors first, then the keys that name them. A process that is killed in between leaves vectors without keys, which the
next one cuts off.

Knows: vectors, keys, files. Does not know: models.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gerund.errors import ResourceError
from gerund.evaluation.systems.base import EncodesWords
from gerund.inference.encode.words import WordPooling
from gerund.jobs.files import write_whole
from gerund.progress import progress

MOST_BYTES = 1 << 30
"""Word vectors that take more than this lie in a file."""

_SENTENCES_AT_ONCE = 2048

_KEY_BYTES = 16
# Texts that are encoded before they are kept: what an interruption costs.
_CHUNK = 4096


class EmbeddingCache:
    """Vectors by encoder, prompt and text.

    Args:
        folder: where they are kept; None keeps them in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._shelves: dict[tuple[str, str], Shelf] = {}

    def vectors(
        self, fingerprint: str, prompt: str, texts: list[str], compute: Callable[[list[str]], np.ndarray]
    ) -> np.ndarray:
        """Return the vectors of ``texts``, computing only those that are not there.

        Args:
            fingerprint: the encoder.
            prompt: the text of the prompt.
            texts: any texts, repeated or not.
            compute: called with texts that are new, without repetitions; returns ``(n, D)`` float32.

        Returns:
            ``(n, D)`` float32 in the order of ``texts``.

        Raises:
            ResourceError: the disk is full.
        """
        shelf = self.shelf(fingerprint, prompt)
        keys = [_key(text) for text in texts]
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in shelf}.items())
        for start in range(0, len(missing), _CHUNK):
            chunk = missing[start : start + _CHUNK]
            shelf.add([key for key, _ in chunk], compute([text for _, text in chunk]))
        return shelf.rows(keys)

    def put(self, fingerprint: str, prompt: str, texts: list[str], vectors: np.ndarray) -> None:
        """Keep vectors that were computed elsewhere; texts that are there already keep theirs."""
        shelf = self.shelf(fingerprint, prompt)
        fresh = {key: row for row, key in enumerate(map(_key, texts)) if key not in shelf}
        if fresh:
            shelf.add(list(fresh), vectors[list(fresh.values())])

    def shelf(self, fingerprint: str, prompt: str) -> "Shelf":
        """Return the vectors of one encoder with one prompt."""
        name = (fingerprint, hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest() if prompt else "plain")
        if name not in self._shelves:
            place = None if self.folder is None else self.folder / f"{name[0]}-{name[1]}"
            self._shelves[name] = Shelf(place)
        return self._shelves[name]


class Shelf:
    """The vectors of one encoder, by key."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.places: dict[bytes, int] = {}
        self.blocks: list[np.ndarray] = []
        self.width = 0
        if folder is not None and (folder / "width").is_file():
            self._open(folder)

    def __contains__(self, key: bytes) -> bool:
        return key in self.places

    def holds(self, text: str) -> bool:
        """Tell whether a text's vector is here."""
        return _key(text) in self.places

    def rows(self, keys: list[bytes]) -> np.ndarray:
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

    def add(self, keys: list[bytes], vectors: np.ndarray) -> None:
        """Append vectors under their keys."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)
        self.width = self.width or vectors.shape[1]
        if self.folder is None:
            self.blocks.append(vectors)
        else:
            self._append(self.folder, keys, vectors)
        start = len(self.places)
        self.places.update({key: start + row for row, key in enumerate(keys)})

    def _append(self, folder: Path, keys: list[bytes], vectors: np.ndarray) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "width").is_file():
                write_whole(folder / "width", str(self.width))
            for name, data in (("vectors", vectors.tobytes()), ("keys", b"".join(keys))):
                with (folder / name).open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise ResourceError(f"embeddings cannot be kept in {folder}: {error.strerror or error}") from error

    def _open(self, folder: Path) -> None:
        """Read the keys; cut off whatever a killed process left unfinished."""
        self.width = int((folder / "width").read_text())
        sizes = [(folder / name).stat().st_size if (folder / name).is_file() else 0 for name in ("keys", "vectors")]
        rows = min(sizes[0] // _KEY_BYTES, sizes[1] // (4 * self.width))
        for name, size in (("keys", rows * _KEY_BYTES), ("vectors", rows * 4 * self.width)):
            if (folder / name).is_file():
                os.truncate(folder / name, size)
        data = (folder / "keys").read_bytes() if rows else b""
        self.places = {data[i * _KEY_BYTES : (i + 1) * _KEY_BYTES]: i for i in range(rows)}


@contextmanager
def word_states(
    system: EncodesWords,
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None = None,
    pooling: WordPooling = "mean",
    shift: bool = False,
    show: bool | None = None,
    most_bytes: int = MOST_BYTES,
) -> Iterator[np.ndarray]:
    """Yield one ``(n_words, D)`` float32 array, sentence after sentence.

    Args:
        system: whose vectors.
        sentences: lists of words.
        prompt: as in ``EncodesWords.encode_words``.
        pooling: as in ``EncodesWords.encode_words``.
        shift: as in ``EncodesWords.encode_words``.
        show: whether to show progress; None only on a terminal.
        most_bytes: where the array is larger, it lies in a file of the system's temporary folder until the
            block ends.

    Raises:
        ResourceError: the disk is full.
    """
    n_words = sum(map(len, sentences))

    def blocks() -> Iterator[np.ndarray]:
        with progress(len(sentences), "encoding words", show=show) as advance:
            for start in range(0, len(sentences), _SENTENCES_AT_ONCE):
                own = sentences[start : start + _SENTENCES_AT_ONCE]
                yield np.concatenate(system.encode_words(own, prompt=prompt, pooling=pooling, shift=shift, show=False))
                advance(len(own))

    size = 4 * n_words * system.dimensions
    if size <= most_bytes:
        yield np.concatenate(list(blocks()))
        return
    with TemporaryDirectory(prefix="gerund-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "states"
        _write(path, blocks(), size)
        yield np.memmap(path, dtype=np.float32, mode="r").reshape(n_words, -1)


def _write(path: Path, blocks: Iterator[np.ndarray], size: int) -> None:
    # Written, not filled through the map: a full disk is then an error and not a killed process.
    with path.open("wb") as file:
        for block in blocks:
            try:
                file.write(block.tobytes())
            except OSError as error:
                needed = f"{math.ceil(size / 1e9)} GB in {path.parent.parent}"
                raise ResourceError(f"the words' vectors need {needed}: {error.strerror or error}") from error


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_KEY_BYTES).digest()
