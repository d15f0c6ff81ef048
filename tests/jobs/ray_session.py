"""What is seen on Ray, in one session: a process of its own, in a network where nobody else is.

Takes a folder and the names of checks; prints a line of JSON for each: its name, and what went wrong.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import closing
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from gerund.data.embedding.job import EmbeddingConfig, EncodingWorkers, embedding_job
from gerund.data.tables import open_table
from gerund.errors import DataError, InputError, ResourceError
from gerund.jobs import engine
from gerund.jobs.engine import RayEngine, StatefulWork, make_engine, map_shards
from tests.data.embedding_crashes import ABOUT, fake_encode
from tests.jobs.shard_work import killed_once, square


def refused(number):
    raise DataError(f"the document {number} is broken")


def killed(_place):
    os.kill(os.getpid(), signal.SIGKILL)


def identity(number):
    time.sleep(0.05)
    return os.getpid()


def every_shard_once(_folder):
    assert dict(map_shards(RayEngine(2), square, iter(range(9)))) == {number: number**2 for number in range(9)}
    with RayEngine(2).pool(square) as pool:
        assert dict(pool.map([])) == {}
        for _ in range(2):
            assert dict(pool.map([3])) == {3: 9}


def both_workers_work_and_go_when_nobody_reads_on(_folder):
    import ray

    with closing(map_shards(RayEngine(2), identity, range(1000))) as finished:
        assert len({pid for _, pid in islice(finished, 60)}) == 2
    end = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < 3:
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.1)


def a_refusal_is_one_sentence(_folder):
    for work in (refused, StatefulWork(refused_at_the_start)):
        with pytest.raises(DataError, match=r"^the document 7 is broken$"):
            list(map_shards(RayEngine(1), work, [7]))


def refused_at_the_start():
    return refused(7)


def a_killed_worker_is_replaced(folder):
    shards = [str(folder / name) for name in "abcd"]
    assert sorted(map_shards(RayEngine(2), killed_once, shards)) == [(one, one[-1]) for one in shards]


def a_shard_that_kills_every_worker_ends_the_job(_folder):
    with patch.object(engine, "ATTEMPTS", 2), pytest.raises(ResourceError, match="was killed"):
        list(map_shards(RayEngine(1), killed, ["a"]))


def another_gerund_is_refused(folder):
    wrong = patch.object(engine, "__version__", "0.0.0")
    with wrong, pytest.raises(InputError, match="install the same on all of them"):
        list(map_shards(RayEngine(1), square, [1], folder=folder))
    assert list(folder.iterdir()) == []


def embedded_to_the_byte_while_workers_are_killed(folder):
    source = folder / "in.txt"
    source.write_bytes("".join(f"text {number}\n" for number in range(400)).encode() + b"not \xff UTF-8\n")
    _embed(source, folder / "alone.parquet", None)
    pids = folder / "pids"
    pids.mkdir()
    stop = threading.Event()
    killer = threading.Thread(target=_kill_some, args=(pids, stop), daemon=True)
    killer.start()
    _embed(source, folder / "ray.parquet", EncodingWorkers(RayEngine(2), _Telling(str(pids))))
    stop.set()
    killer.join(10)
    assert len(list(pids.iterdir())) > 2, "no worker was replaced"
    for name in ("parquet", "errors.jsonl"):
        assert (folder / f"ray.{name}").read_bytes() == (folder / f"alone.{name}").read_bytes()
    bad = [json.loads(line)["reason"] for line in (folder / "ray.errors.jsonl").read_text().splitlines()]
    assert [reason.split()[0] for reason in bad] == ["not", "the"], "a bad row is an error in its part"
    assert not (folder / "ray.parquet.parts").exists()


class _Telling:
    """Makes an encoder whose process says who it is."""

    def __init__(self, pids):
        self.pids = pids

    def __call__(self):
        Path(self.pids, str(os.getpid())).touch()
        return _slowly


def _slowly(texts, kept=None):
    time.sleep(0.05)
    return _but_for_one(texts, kept)


def _but_for_one(texts, kept=None):
    found = fake_encode(texts, kept)
    found.vectors[[text == "text 77" for text in texts]] = np.nan
    return found


def _kill_some(pids, stop):
    draw, seen = random.Random(1), set()
    while not stop.wait(0.02) and len(seen) < 2:
        for path in set(pids.iterdir()) - seen:
            time.sleep(draw.random() * 0.3)
            os.kill(int(path.name), signal.SIGKILL)
            seen.add(path)
            break


def _embed(source, output, elsewhere):
    with embedding_job(open_table(source), output, EmbeddingConfig(shard_rows=10, bad_rows="skip")) as job:
        job.run(_but_for_one, ABOUT, workers=elsewhere, show_progress=False)


def by_name(_folder):
    assert make_engine("ray", 1).workers == 1
    assert make_engine("ray").workers == 3


CHECKS = (
    every_shard_once,
    both_workers_work_and_go_when_nobody_reads_on,
    a_refusal_is_one_sentence,
    a_killed_worker_is_replaced,
    a_shard_that_kills_every_worker_ends_the_job,
    another_gerund_is_refused,
    embedded_to_the_byte_while_workers_are_killed,
    by_name,
)


def main(folder: Path, names: list[str]) -> None:
    import ray

    # Left out, the address is that of any cluster that was started on this machine.
    address = os.environ.get("RAY_ADDRESS", "local")
    options = (
        {} if address != "local" else {"num_cpus": 3, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    )
    for attempt in range(2):
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", **options)
            break
        except Exception as error:
            if attempt == 1 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    print(json.dumps({"check": "started", "seconds": round(time.process_time(), 1)}), flush=True)
    for check in (check for check in CHECKS if check.__name__ in names):
        own = folder / check.__name__
        own.mkdir()
        start = time.monotonic()
        try:
            check(own)
            wrong = ""
        except Exception:
            wrong = traceback.format_exc()
        print(
            json.dumps({"check": check.__name__, "wrong": wrong, "seconds": round(time.monotonic() - start, 1)}),
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
