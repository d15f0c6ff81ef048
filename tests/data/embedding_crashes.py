"""Kills an embedding job before each of its steps on the disk, and looks what the same command makes of it.

Run as a process of its own: it forks a child a run, which wants a process without threads. Prints how many
runs were killed; any difference to the uninterrupted run is an AssertionError.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

# Imported once here rather than in every child.
import pyarrow.compute
import pyarrow.parquet  # noqa: F401

from gerund.data.embedding.job import EmbeddingConfig, Encoded, embedding_job
from gerund.data.tables import open_table
from gerund.jobs.checkpoints import ShardCheckpoint
from tests.jobs.crashes import contents, killed_before

with suppress(ImportError):
    import pandas  # noqa: F401  (pyarrow looks for it where it first makes an array)

ABOUT = {"fingerprint": "f", "model": "m", "dimensions": 4}
# Both have the same steps while parts are made; npy has more of them at the end.
STRIDE = {"parquet": 1, "npy": 2}


def fake_encode(texts: list[str], kept: ShardCheckpoint | None = None) -> Encoded:
    """Encode by hashing: texts to ``(n, 4)``."""
    del kept
    digests = [hashlib.blake2b(text.encode(), digest_size=4).digest() for text in texts]
    return Encoded(np.array([list(digest) for digest in digests], dtype=np.float32), truncated=1)


def embed(source: Path, output: Path, force: bool = False) -> None:
    config = EmbeddingConfig(shard_rows=2, keep_text=True, force=force)
    with embedding_job(open_table(source), output, config) as job:
        job.run(fake_encode, ABOUT, show_progress=False)


def rounds(kind: str, folder: Path) -> Iterator[int]:
    """Yield the number of kills that each round took."""
    source = folder / "in.txt"
    source.write_text("".join(f"text {i}\n" for i in range(5)))
    whole = folder / "whole"
    whole.mkdir()
    assert not killed_before(-1, lambda: embed(source, whole / f"out.{kind}"))
    expected = contents(whole)
    assert not any(name.endswith(".parts") for name in expected)
    step = 0
    again = True
    while again:
        target = folder / f"at-{step}"
        target.mkdir()
        output = target / f"out.{kind}"
        again = killed_before(step, lambda output=output: embed(source, output))
        kills = int(again)
        if again and output.exists() and not (target / f"out.{kind}.parts" / "manifest.json").exists():
            # All was done but for the empty folder: as after any finished run, there is an output.
            assert contents(target) | expected == contents(target)
        elif again:
            # The second run is killed a little later than the first, the third goes through.
            kills += killed_before(step // 2 + 3, lambda output=output: embed(source, output))
            if not (output.exists() and not (target / f"out.{kind}.parts" / "manifest.json").exists()):
                assert not killed_before(-1, lambda output=output: embed(source, output))
                assert contents(target) == expected, (kind, step)
            assert contents(target) | expected == contents(target), (kind, step)
        yield kills
        step += STRIDE[kind]


if __name__ == "__main__":
    print(sum(rounds(sys.argv[1], Path(sys.argv[2]))))
