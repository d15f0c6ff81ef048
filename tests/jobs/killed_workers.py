"""Kills workers and drivers of bulk work with -9 at random moments; what comes of it has to be what comes undisturbed.

    python -m tests.jobs.killed_workers FOLDER [--jobs parts,embed,mine,negatives,index,eval] [--workers-killed 20]
        [--drivers-killed 20] [--address ADDRESS]

`parts` is the embedding job with an encoder of no weight; the others are commands of gerund with a small model. With an
address the workers are those of a Ray cluster. Any difference is an AssertionError.
"""

import argparse
import contextlib
import io
import json
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

import numpy as np
import pytest

from gerund.data.embedding.job import EmbeddingConfig, EncodingWorkers, embedding_job
from gerund.data.tables import open_table
from gerund.jobs import engine as engines
from gerund.jobs.checkpoints import KEY_BYTES, RowStore
from gerund.jobs.engine import LocalEngine, StatefulWork, prepare
from tests.data.embedding.crashes import ABOUT, fake_encode

SECONDS_A_SHARD = 0.05
# A job of 30 shards stands so many deaths without one shard having five of them.
KILLS_A_RUN = 4
# Batches of shards and those of one process are not the same.
EXACTLY = ("--dtype", "float32")
WORDS = ("a", "cat", "dog", "house", "rain", "sat", "on", "the", "mat", "and", "snow", "fell")


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


def _equal(found, wanted):
    assert found == wanted


@dataclass(frozen=True)
class Job:
    """Something that workers do.

    Attributes:
        run: does it, or goes on with it, in a folder; by an engine, or undisturbed without one.
        result: what came of it.
        same: raises where two results are not the same.
    """

    run: Callable[[Path, Any], None]
    result: Callable[[Path], Any]
    same: Callable[[Any, Any], None] = _equal


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


def embed(folder):
    source = written(folder / "in.txt", texts(300))
    return command(
        lambda output: [
            "embed",
            source,
            "-o",
            output / "out.parquet",
            "-m",
            model(folder),
            "--shard-rows",
            10,
            *EXACTLY,
        ],
        files,
    )


def mine(folder):
    from tests.data.mining.corpora import articles, write_jsonl

    corpus = write_jsonl(folder / "corpus.jsonl", articles(300))
    size = corpus.stat().st_size // 30

    def run(output, engine):
        from gerund.data import mining

        with patch.object(mining, "MiningConfig", partial(mining.MiningConfig, part_size=size)):
            _run(["mine", corpus, "-o", output / "out.parquet", "--pairs", "all", "--resume"], engine)

    return Job(run, files)


def negatives(folder):
    sentences = [" ".join([f"W{i}", *(["a"] * (1 + i % 5)), "in."]) for i in range(60)]
    books = (json.dumps({"text": " ".join(sentences[first % 40 : first % 40 + 20])}) for first in range(480))
    source = written(folder / "books.jsonl", books)
    options = ["--generate", 0, "--hard", 1, "--scorer", "overlap", "--prefix-words", 12, "--fewest-words", 3]
    return command(lambda output: ["negatives", source, "-o", output / "out", *options, "--resume"], files)


def index(folder):
    notes = folder / "notes"
    notes.mkdir()
    for number, text in enumerate(texts(300)):
        written(notes / f"{number:03}.txt", [f"{text}.\n\n{text} again."])

    def run(output, engine):
        from gerund.retrieval import embedding, indexing

        # So small that many shards are embedded, and many lots stored.
        with (
            patch.object(embedding, "_SHARD", 4),
            patch.object(indexing, "CHUNKS_AT_ONCE", 30),
            patch.object(indexing, "DOCUMENTS_AT_ONCE", 30),
        ):
            _run(
                ["index", notes, "-o", output / "my.index", "-m", model(folder), *EXACTLY, "--chunk-tokens", 40], engine
            )

    def result(output):
        import gerund

        found = gerund.open_index(output / "my.index", gerund.load(model(folder), dtype="float32"))
        return {(hit.source, hit.start): hit.similarity for hit in found.search("cat", k=10_000)}

    def same(found, wanted):
        assert len(wanted) >= 300
        assert found.keys() == wanted.keys()
        np.testing.assert_allclose([found[key] for key in wanted], list(wanted.values()), atol=1e-6)

    return Job(run, result, same)


def evaluation(folder):
    data = folder / "data" / "sts"
    data.mkdir(parents=True)
    some = list(texts(200))
    written(data / "small.test.tsv", (f"{i % 6}\t{some[i]}\t{some[-1 - i]}" for i in range(100)))

    def run(output, engine):
        from gerund.evaluation.systems import language_model as evaluation_workers

        with patch.object(evaluation_workers, "_SHARD", 4):
            options = ["--tasks", "sts", "--data", data.parent, "-o", output / "out", "--no-pictures"]
            _run(["eval", model(folder), *options, *EXACTLY, "--plan", "causal", "--plan", "mask0-bidir:k=2"], engine)

    def result(output):
        vectors = {}
        for path in sorted((output / "out" / "embeddings").rglob("keys")):
            data = path.read_bytes()
            keys = [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]
            assert len(set(keys)) == len(keys), "a row is there twice"
            rows = RowStore(path.parent).rows(keys)
            vectors |= {(path.parent.name, key): row for key, row in zip(keys, rows, strict=True)}
        scores = [json.loads(path.read_text()) for path in sorted((output / "out" / "scores").glob("*.json"))]
        return vectors, {one["system"]: one["score"]["metrics"] for one in scores}

    def same(found, wanted):
        (vectors, scores), (others, wanted_scores) = found, wanted
        assert len(others) >= 200
        assert vectors.keys() == others.keys()
        np.testing.assert_allclose([vectors[key] for key in others], list(others.values()), atol=1e-6)
        assert scores.keys() == wanted_scores.keys()
        for name, metrics in wanted_scores.items():
            assert scores[name] == pytest.approx(metrics, abs=1e-4)

    return Job(run, result, same)


JOBS = {"parts": parts, "embed": embed, "mine": mine, "negatives": negatives, "index": index, "eval": evaluation}


def texts(count):
    draw = random.Random(3)
    return (" ".join(draw.choices(WORDS, k=draw.randint(3, 30))) + f" {number}" for number in range(count))


def written(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def model(folder):
    """Return a small model, made once."""
    from tests.tiny import save_tiny

    place = folder / "model"
    return place if place.exists() else save_tiny(place)


def files(output):
    return {path.name: path.read_bytes() for path in sorted(output.rglob("*")) if path.is_file()}


def command(arguments, result):
    """Return a command of gerund as a job."""
    return Job(lambda output, engine: _run(arguments(output), engine), result)


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
        job.same(job.result(output), whole)
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
        job.same(apart(folder, lambda: job.result(output)), whole)
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
