"""Kills workers and drivers of bulk work with -9 at random moments; what comes of it has to be what comes undisturbed.

    python -m tests.jobs.killed_workers FOLDER [--jobs parts,mine] [--workers-killed 20] [--drivers-killed 20]
        [--address ADDRESS]

`parts` is the embedding job with an encoder of no weight, `mine` the command. With an address the workers are those of
a Ray cluster. Any difference is an AssertionError.
"""

import argparse
import contextlib
import io
import os
import pickle
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gerund.data.embedding.job import EmbeddingConfig, EncodingWorkers, embedding_job
from gerund.data.tables import open_table
from gerund.jobs import engine as engines
from gerund.jobs.engine import LocalEngine, StatefulWork, prepare
from tests.data.embedding.crashes import ABOUT, fake_encode

SECONDS_A_SHARD = 0.05
# A job of 30 shards stands so many deaths without one shard having five of them.
KILLS_A_RUN = 4


class Telling:
    """An engine whose workers say who they are, and take their time.

    Args:
        engine: has the workers.
        pids: a folder in which each of them makes a file with its number.
    """

    def __init__(self, engine, pids):
        self.engine, self.pids, self.workers = engine, str(pids), engine.workers

    def pool(self, work, *, folder=None):
        """Return workers; see ``JobEngine``."""
        needs = work if isinstance(work, StatefulWork) else StatefulWork(lambda: work)
        told = StatefulWork(partial(_told, work, self.pids), gpus=needs.gpus, threads=needs.threads)
        return self.engine.pool(told, folder=folder)


def _told(work, pids):
    function = prepare(work)
    Path(pids, str(os.getpid())).touch()
    return partial(_slowly, function)


def _slowly(function, shard):
    time.sleep(SECONDS_A_SHARD)
    return function(shard)


@dataclass(frozen=True)
class Job:
    """Something that workers do.

    Attributes:
        run: does it, or goes on with it, in a folder; by an engine, or undisturbed without one.
        result: what came of it.
    """

    run: Callable[[Path, Any], None]
    result: Callable[[Path], Any]


def engine_at(address):
    if address is None:
        return LocalEngine(2)
    from gerund.jobs.engine import RayEngine

    return RayEngine(2, address)


def fake_encoder():
    return fake_encode


def parts(folder):
    source = written(folder / "in.txt", (f"text {number}" for number in range(300)))

    def run(output, engine):
        elsewhere = engine and EncodingWorkers(engine, fake_encoder)
        with embedding_job(open_table(source), output / "out.parquet", EmbeddingConfig(shard_rows=10)) as job:
            job.run(fake_encode, ABOUT, workers=elsewhere, show_progress=False)

    return Job(run, files)


def mine(folder):
    from tests.data.mining.corpora import articles, write_jsonl

    corpus = write_jsonl(folder / "corpus.jsonl", articles(300))
    size = corpus.stat().st_size // 30

    def run(output, engine):
        from gerund.data import mining

        with patch.object(mining, "MiningConfig", partial(mining.MiningConfig, part_size=size)):
            _run(["mine", corpus, "-o", output / "out.parquet", "--pairs", "all", "--resume"], engine)

    return Job(run, files)


JOBS = {"parts": parts, "mine": mine}


def written(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def files(output):
    return {path.name: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def _run(arguments, engine):
    from gerund.cli.main import main as gerund

    machines, status, told = engine or LocalEngine(1), 0, io.StringIO()
    with (
        patch.object(engines, "make_engine", lambda *_args, **_settings: machines),
        patch.object(sys, "argv", ["gerund", *map(str, arguments)]),
        contextlib.redirect_stdout(told),
        contextlib.redirect_stderr(told),
    ):
        try:
            gerund()
        except SystemExit as end:
            status = end.code or 0
    assert status == 0, told.getvalue()


def apart(folder, function):
    """Return what a function gives in a process of its own: this one has to stay without threads, to be forked."""
    place = folder / "apart"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            place.write_bytes(pickle.dumps(function()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    return pickle.loads(place.read_bytes())


def workers_killed(job, folder, whole, address, kills, draw):
    """Kill so many workers, over as many runs as it takes; each has to end as if nothing had happened."""
    done = 0
    while done < kills:
        pids, output = folder / f"pids-{done}", folder / f"workers-{done}"
        pids.mkdir()
        output.mkdir()
        killed, stop = set(), threading.Event()
        most = min(KILLS_A_RUN, kills - done)

        def kill(pids=pids, killed=killed, stop=stop, most=most):
            while len(killed) < most and not stop.wait(draw.random() * 0.4):
                if alive := sorted({path.name for path in pids.iterdir()} - killed):
                    pid = draw.choice(alive)
                    try:
                        os.kill(int(pid), signal.SIGKILL)
                    except ProcessLookupError:  # it went with another one
                        pids.joinpath(pid).unlink()
                        continue
                    killed.add(pid)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        job.run(output, Telling(engine_at(address), pids))
        stop.set()
        killer.join(10)
        assert job.result(output) == whole
        done += len(killed)
        shutil.rmtree(output)
    return done


def drivers_killed(job, folder, whole, address, kills, draw):
    """Kill the driver again and again; whoever runs last has to end with the same result."""
    output, pids, ended = folder / "driver", folder / "driver-pids", folder / "ended"
    pids.mkdir()
    output.mkdir()
    done = 0

    def finished():
        assert apart(folder, lambda: job.result(output)) == whole
        shutil.rmtree(output)
        output.mkdir()
        ended.unlink(missing_ok=True)

    while done < kills:
        child = os.fork()
        if child == 0:
            try:
                job.run(output, Telling(engine_at(address), pids))
                ended.touch()
            finally:
                os._exit(0)
        began = time.monotonic()
        while not list(pids.iterdir()) and not ended.exists() and time.monotonic() - began < 120:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in pids.iterdir():
            path.unlink()
        if ended.exists():
            finished()
        else:
            done += 1
    apart(folder, lambda: job.run(output, Telling(engine_at(address), pids)))
    finished()
    return done


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", default="parts", help=f"with commas: {', '.join(JOBS)} (%(default)s)")
    parser.add_argument("--workers-killed", type=int, default=20)
    parser.add_argument("--drivers-killed", type=int, default=20)
    parser.add_argument("--address")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    for name in options.jobs.split(","):
        folder, draw = options.folder / name, random.Random(options.seed)
        folder.mkdir()
        job = JOBS[name](folder)
        output = folder / "whole"
        output.mkdir()
        apart(folder, partial(job.run, output, None))
        whole = apart(folder, partial(job.result, output))
        rest = (job, folder, whole, options.address)
        print(name, drivers_killed(*rest, options.drivers_killed, draw), "drivers killed", flush=True)
        print(name, workers_killed(*rest, options.workers_killed, draw), "workers killed", flush=True)


if __name__ == "__main__":
    main()
