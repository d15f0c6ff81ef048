"""Where vectors are kept: of whole texts by encoder and text, of words in one array; in memory or on disk.

No text is encoded twice. Texts that are new are encoded shard by shard; the rows of one that is not finished lie beside
the rest under ``unfinished``, so that whoever is interrupted goes on in the shard, with the batches it would have had.

Knows: vectors, keys, files. Does not know: models.
"""

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gerund.errors import ResourceError
from gerund.evaluation.systems.base import EncodesWords
from gerund.inference.encode.spans import WordPooling
from gerund.jobs.checkpoints import KEY_BYTES, RowStore, ShardCheckpoint
from gerund.progress import progress

MOST_BYTES = 1 << 30
"""Word vectors that take more than this lie in a file."""

_SENTENCES_AT_ONCE = 2048

# Texts of a shard.
_SHARD = 4096
_UNFINISHED = "unfinished"

# Turns texts into vectors ``(n, D)``; may keep finished rows in what it is given with them.
Compute = Callable[[list[str], ShardCheckpoint], np.ndarray]


class EmbeddingCache:
    """Vectors by encoder, prompt and text.

    Args:
        folder: where they are kept; None keeps them in memory.
        unfinished: where the rows of shards that are not finished are kept although the rest is in memory; all of them
            stay until ``forget_unfinished``. With ``folder`` they lie in there.

    Attributes:
        shards: how many shards are encoded at once: as many as there are workers.
    """

    def __init__(self, folder: Path | None = None, *, unfinished: Path | None = None) -> None:
        self.folder = folder
        self.shards = 1
        self._unfinished = unfinished if folder is None else folder / _UNFINISHED
        self._stores: dict[tuple[str, str], RowStore] = {}

    def vectors(self, fingerprint: str, prompt: str, texts: list[str], compute: Compute) -> np.ndarray:
        """Return the vectors of ``texts``, computing only those that are not there.

        Args:
            fingerprint: the encoder.
            prompt: the text of the prompt.
            texts: any texts, repeated or not.
            compute: called with texts that are new, without repetitions, and with what is done of them.

        Returns:
            ``(n, D)`` float32 in the order of ``texts``.

        Raises:
            ResourceError: the disk is full.
        """
        store = self.store(fingerprint, prompt)
        keys = [key_of_text(text) for text in texts]
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in store}.items())
        step = _SHARD * self.shards
        for start in range(0, len(missing), step):
            new_keys, new_texts = zip(*missing[start : start + step], strict=True)
            with self.shard(f"{fingerprint} {prompt}", new_keys) as kept:
                store.add(new_keys, compute(list(new_texts), kept))
        return store.rows(keys)

    @contextmanager
    def shard(self, encoder: str, keys: Sequence[bytes]) -> Iterator[ShardCheckpoint]:
        """Yield what is done of the vectors of some texts, to be put into the store before the block ends.

        Args:
            encoder: all that the vectors depend on besides the texts.
            keys: those of the texts, in their order.
        """
        name = hashlib.blake2b(encoder.encode() + b" " + b"".join(keys), digest_size=KEY_BYTES).hexdigest()
        if self.folder is not None:
            # One shard is finished before the next begins: what lies here of another was given up.
            for path in (self.folder / _UNFINISHED).glob("*"):
                if path.name != name:
                    shutil.rmtree(path, ignore_errors=True)
        with ShardCheckpoint(None if self._unfinished is None else self._unfinished / name, name) as kept:
            yield kept
        if self.folder is not None:
            kept.discard()
            with suppress(OSError):
                (self.folder / _UNFINISHED).rmdir()

    def forget_unfinished(self) -> None:
        """Remove what is kept of shards, once nobody is going to go on with them."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def put(self, fingerprint: str, prompt: str, texts: list[str], vectors: np.ndarray) -> None:
        """Keep vectors that were computed elsewhere; texts that are there already keep theirs."""
        store = self.store(fingerprint, prompt)
        fresh = {key: row for row, key in enumerate(map(key_of_text, texts)) if key not in store}
        if fresh:
            store.add(list(fresh), vectors[list(fresh.values())])

    def store(self, fingerprint: str, prompt: str) -> "RowStore":
        """Return the vectors of one encoder with one prompt."""
        name = (fingerprint, hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest() if prompt else "plain")
        if name not in self._stores:
            place = None if self.folder is None else self.folder / f"{name[0]}-{name[1]}"
            self._stores[name] = RowStore(place)
        return self._stores[name]


def key_of_text(text: str) -> bytes:
    """Return the key of a text's vector."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


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
