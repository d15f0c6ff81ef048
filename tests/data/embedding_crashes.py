"""Kills an embedding job before each of its steps on the disk, and looks what the same command makes of it.

A file that has not been flushed yet is torn in half, as a power cut would leave it.

Run as a process of its own: it forks a child a run, which wants a process without threads. Prints how many
runs were killed; any difference to the uninterrupted run is an AssertionError.
"""

import hashlib
import os
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock  # noqa: F401  (imported once here rather than in every child)
import numpy as np
import pyarrow.parquet  # noqa: F401

from gerund.data.embedding_job import EmbeddingConfig, Encoded, embedding_job
from gerund.data.tables import open_table

ABOUT = {"fingerprint": "f", "model": "m", "dimensions": 4}
# Both have the same steps while parts are made; npy has more of them at the end.
STRIDE = {"parquet": 1, "npy": 2}
STEPS = ("replace", "unlink", "rmdir", "mkdir", "ftruncate")


def fake_encode(texts: list[str]) -> Encoded:
    """Encode by hashing: texts to ``(n, 4)``."""
    digests = [hashlib.blake2b(text.encode(), digest_size=4).digest() for text in texts]
    return Encoded(np.array([list(digest) for digest in digests], dtype=np.float32), truncated=1)


def embed(source: Path, output: Path, force: bool = False) -> None:
    config = EmbeddingConfig(shard_rows=2, keep_text=True, force=force)
    with embedding_job(open_table(source), output, config) as job:
        job.run(fake_encode, ABOUT, show_progress=False)


def killed_before(step: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that is killed before its ``step``-th step on the disk; tells whether it was."""
    child = os.fork()
    if child == 0:
        _kill_before(step)
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _kill_before(step: int) -> None:
    left = step

    def at_step(tear: int | None = None) -> None:
        nonlocal left
        if left == 0:
            if tear is not None:
                os.truncate(tear, os.fstat(tear).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    def counted(name: str) -> Callable[..., object]:
        own = getattr(os, name)

        def call(*arguments: object, **options: object) -> object:
            at_step()
            return own(*arguments, **options)

        return call

    def fsync(handle: int) -> None:
        # The flush itself is left out: another process sees what was written anyway, and sooner.
        if stat.S_ISREG(os.fstat(handle).st_mode):
            at_step(tear=handle)

    os.fsync = fsync  # type: ignore[assignment]
    for name in STEPS:
        setattr(os, name, counted(name))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.iterdir())}


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
