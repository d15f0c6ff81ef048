"""Kills ``gerund embed`` and ``gerund eval`` in the middle of a shard, and looks what the same command makes of it.

Run as a process of its own: commands run in forked children, which saves loading torch for each. The signals come at
random times, -9 among them. Any difference to the command that nobody disturbs is an AssertionError.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Imported once here rather than in every child.
import mteb  # noqa: F401
import sentence_transformers  # noqa: F401
import torch

import gerund.cli.embed
import gerund.cli.eval
import gerund.data.embedding.job
import gerund.evaluation.registry
import gerund.evaluation.run
import gerund.evaluation.systems.selection
import gerund.papers.rankgen_suffixes  # noqa: F401
from gerund.cli.main import run
from gerund.entry import load
from gerund.inference.encode import batches, sweep
from gerund.inference.encode.runtime import Batch, EncoderRuntime
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.settings.model_spec import ModelSpec
from tests.tiny import save_tiny

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
N_TEXTS = 120
"""About 28 passes of each command: more than all interruptions together wait for."""
# So slow that it is the passes, and not the beginning and the end of a command, that are interrupted.
SECONDS_A_PASS = 0.02


def be_slow(log: Path, flush_seconds: float) -> None:
    """Let this process note every pass of the model, and how many texts it held."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    own = EncoderRuntime.run

    def slowly(self: EncoderRuntime, batch: Batch, plan: object) -> object:
        time.sleep(SECONDS_A_PASS)
        found = own(self, batch, plan)  # type: ignore[arg-type]
        os.write(handle, f"{len(batch.begin)}\n".encode())
        return found

    EncoderRuntime.run = slowly  # type: ignore[method-assign, assignment]
    for module in (batches, sweep):
        module.default_batch_tokens = lambda *_: 128
    ShardCheckpoint.__init__.__kwdefaults__["seconds"] = flush_seconds


def started(log: Path, arguments: list[object], flush_seconds: float) -> int:
    """Run a command in a slow child."""
    child = os.fork()
    if child:
        return child
    be_slow(log, flush_seconds)
    sys.argv = ["gerund", *map(str, arguments)]
    errors = os.open(log.with_suffix(".err"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    else:
        status = 0
    os._exit(status)  # without what is registered for the end: dying of SIGTERM has a test of its own


def passes(log: Path) -> list[int]:
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def interrupted(log: Path, arguments: list[object], number: int, rng: random.Random, flush_seconds: float) -> str:
    """Kill a command after some of its passes; returns what it said."""
    wait_for = len(passes(log)) + rng.randint(2, 5)
    child = started(log, arguments, flush_seconds)
    while len(passes(log)) < wait_for:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), f"ended by itself: {log.with_suffix('.err').read_text()}"
        time.sleep(0.002)
    time.sleep(rng.random() * SECONDS_A_PASS)
    os.kill(child, number)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) == (number == signal.SIGKILL), log.with_suffix(".err").read_text()
    return log.with_suffix(".err").read_text()


# Seconds after which rows are flushed, and what the command is ended by: where rows are flushed only by the
# interruption itself, no kill.
AT_ONCE = (0.0, SIGNALS)
NEVER = (1e9, (signal.SIGINT, signal.SIGTERM))


def check(
    folder: Path,
    command: Callable[[Path], list[object]],
    result: Callable[[Path], object],
    kept: str,
    rounds: tuple[tuple[float, tuple[signal.Signals, ...]], ...],
) -> None:
    """Interrupt a command again and again; at the end the result and the number of passes are the undisturbed ones."""
    rng = random.Random(os.environ.get("SEED", "1"))
    whole = folder / "whole"
    assert os.waitpid(started(folder / "whole.log", command(whole), 5.0), 0)[1] == 0
    undisturbed = passes(folder / "whole.log")
    for flush_seconds, signals in rounds:
        target, log = folder / f"out-{flush_seconds}", folder / f"{flush_seconds}.log"
        for number in signals:
            said = interrupted(log, command(target), number, rng, flush_seconds)
            if number != signal.SIGKILL:
                assert said.count("gerund: interrupted; ") == 1, said
                assert kept in said, said
                assert "Traceback" not in said
        child = started(log, command(target), 5.0)
        assert os.waitpid(child, 0)[1] == 0, log.with_suffix(".err").read_text()
        assert result(target) == result(whole)
        assert not list(target.rglob("unfinished*"))
        # Only a pass whose rows were not on the disk yet is made again: one per kill at most.
        again = len(passes(log)) - len(undisturbed)
        assert 0 <= again <= len(signals), (again, len(undisturbed))
    print(len(undisturbed), "passes")


def embed_command(source: Path, model: Path) -> Callable[[Path], list[object]]:
    def command(target: Path) -> list[object]:
        target.mkdir(exist_ok=True)
        return ["embed", source, "-m", model, "-o", target / "out.parquet"]

    return command


def eval_command(data: Path, model: Path) -> Callable[[Path], list[object]]:
    def command(target: Path) -> list[object]:
        plans = ["--plan", "causal", "--plan", "mask0-bidir:k=2"]
        return ["eval", model, "--tasks", "sts", "--data", data, "-o", target, "--no-pictures", *plans]

    return command


def cached(report: Path) -> dict[str, bytes]:
    """Return the bytes of all vectors that an evaluation has kept, and its score."""
    files = {path.name: path.read_bytes() for path in sorted((report / "embeddings").rglob("*")) if path.is_file()}
    return files | {path.name: b"" for path in sorted((report / "scores").glob("*.json"))}


def write(folder: Path) -> tuple[Path, Path]:
    rng = random.Random(3)
    texts = [
        " ".join(rng.choices(["a", "cat", "house", "rain", "snow", "the"], k=rng.randint(1, 12)))
        for _ in range(N_TEXTS)
    ]
    source = folder / "in.txt"
    source.write_text("".join(f"{text} {i}\n" for i, text in enumerate(texts)))
    data = folder / "data" / "sts"
    data.mkdir(parents=True)
    rows = [f"{i % 6}\t{texts[i]} {i}\t{texts[-1 - i]} {-1 - i}\n" for i in range(N_TEXTS // 2)]
    (data / "small.test.tsv").write_text("".join(rows))
    return source, data.parent


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    tiny = save_tiny(place / "model")
    load(ModelSpec(model=str(tiny))).encode("imports everything once")
    text_file, data_folder = write(place)
    (place / "embed").mkdir()
    (place / "eval").mkdir()
    check(
        place / "embed",
        embed_command(text_file, tiny),
        lambda target: (target / "out.parquet").read_bytes(),
        f"of {N_TEXTS} rows are kept in ",
        (AT_ONCE, NEVER),
    )
    check(place / "eval", eval_command(data_folder, tiny), cached, "run the same command again to continue", (AT_ONCE,))
