"""The vectors of all words of many sentences in one array, encoded once, in memory or in a temporary file.

Knows: contenders' words, the disk. Does not know: tags, files of sentences.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from gerund.errors import ResourceError
from gerund.evaluation.contender import Contender
from gerund.progress import progress

MOST_BYTES = 1 << 30
"""Beyond this the array lies in a file."""

_SENTENCES_AT_ONCE = 2048


@contextmanager
def word_states(
    contender: Contender,
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None = None,
    shift: bool = False,
    show: bool | None = None,
    most_bytes: int = MOST_BYTES,
) -> Iterator[np.ndarray]:
    """Yield one ``(n_words, D)`` float32 array, sentence after sentence; a word is the mean over its tokens.

    Args:
        contender: who reads.
        sentences: lists of words.
        prompt: as in ``Contender.encode_words``.
        shift: as in ``Contender.encode_words``.
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
                yield np.concatenate(contender.encode_words(own, prompt=prompt, shift=shift, show=False))
                advance(len(own))

    size = 4 * n_words * contender.lm.dimensions
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
