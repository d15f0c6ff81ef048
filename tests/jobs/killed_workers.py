"""Kills workers and drivers of bulk work with -9 at random moments; what comes of it has to be what comes undisturbed.

    python -m tests.jobs.killed_workers FOLDER [--workers-killed 20] [--drivers-killed 20] [--address ADDRESS]

With an address the workers are those of a Ray cluster. Any difference is an AssertionError.
"""

import argparse
import os
import random
import signal
import threading
import time
from pathlib import Path

from gerund.data.embedding_job import EmbeddingConfig, embedding_job
from gerund.data.embedding_shards import Elsewhere
from gerund.data.tables import open_table
from gerund.jobs.engine import LocalEngine
from tests.data.embedding.crashes import ABOUT, fake_encode

ROWS = 300
SECONDS_A_LOT = 0.05
# A job of 30 shards stands so many deaths without one shard having five of them.
KILLS_A_RUN = 4


class Telling:
    """Makes an encoder whose process says who it is."""

    def __init__(self, pids):
        self.pids = str(pids)

    def __call__(self):
        Path(self.pids, str(os.getpid())).touch()
        return slowly


def slowly(texts, kept=None):
    time.sleep(SECONDS_A_LOT)
    return fake_encode(texts, kept)


def engine_at(address):
    if address is None:
        return LocalEngine(2)
    from gerund.jobs.ray_engine import RayEngine

    return RayEngine(2, address)


def embed(source, output, elsewhere=None):
    with embedding_job(open_table(source), output, EmbeddingConfig(shard_rows=10)) as job:
        job.run(fake_encode, ABOUT, elsewhere=elsewhere, show_progress=False)


def workers_killed(folder, source, whole, address, kills, draw):
    """Kill so many workers, over as many jobs as it takes; each job has to end as if nothing had happened."""
    done = 0
    while done < kills:
        pids, output = folder / f"pids-{done}", folder / f"workers-{done}.parquet"
        pids.mkdir()
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
        embed(source, output, Elsewhere(engine_at(address), Telling(pids)))
        stop.set()
        killer.join(10)
        assert output.read_bytes() == whole
        assert not output.with_name(f"{output.name}.parts").exists()
        done += max(len(killed), 1)
    return done


def drivers_killed(folder, source, whole, address, kills, draw):
    """Kill the driver again and again; whoever runs last has to end with the same bytes."""
    output, pids = folder / "driver.parquet", folder / "driver-pids"
    pids.mkdir()
    done = 0
    while done < kills:
        child = os.fork()
        if child == 0:
            try:
                embed(source, output, Elsewhere(engine_at(address), Telling(pids)))
            finally:
                os._exit(int(not output.exists()))
        began = time.monotonic()
        while not list(pids.iterdir()) and time.monotonic() - began < 120:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for path in pids.iterdir():
            path.unlink()
        done += 1
        if output.exists():
            assert output.read_bytes() == whole
            output.unlink()
    if not output.exists():
        embed(source, output, Elsewhere(engine_at(address), Telling(pids)))
    assert output.read_bytes() == whole
    assert not output.with_name(f"{output.name}.parts").exists()
    return done


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers-killed", type=int, default=20)
    parser.add_argument("--drivers-killed", type=int, default=20)
    parser.add_argument("--address")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    folder, draw = options.folder, random.Random(options.seed)
    source = folder / "in.txt"
    source.write_text("".join(f"text {number}\n" for number in range(ROWS)))
    embed(source, folder / "whole.parquet")
    whole = (folder / "whole.parquet").read_bytes()
    rest = (source, whole, options.address)
    # Drivers are forked: before this process has threads.
    print(drivers_killed(folder, *rest, options.drivers_killed, draw), "drivers killed", flush=True)
    print(workers_killed(folder, *rest, options.workers_killed, draw), "workers killed", flush=True)


if __name__ == "__main__":
    main()
