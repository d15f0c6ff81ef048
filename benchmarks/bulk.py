"""Bulk work in one process, in several, and on Ray: how much more two workers do, and what Ray costs.

    python benchmarks/bulk.py [--tables embed,mine] [--texts 20000] [--articles 400] [--workers 1,2] [--address local]
    python benchmarks/bulk.py --tables rates --articles 40000 --rounds 5

Every worker computes in one thread. Without `--address` there is no Ray; `local` starts one on this machine, which
listens on all of its interfaces (with a token): in a network namespace nobody else reaches it,

    unshare -rn sh -c 'ip link set lo up && exec python benchmarks/bulk.py --address local'

A rate is what was finished between the moment when each worker had finished one shard and the end, so that starting
workers and loading models do not count; the whole time, with both, stands beside it. The processor time of the workers
alone says what a text costs where, also beside other work. Before anything is told, the ids
and vectors (to 1e-6) and the pairs (to the byte) were shown to be the same.

`rates` is what the process that reads, hands out and joins takes for a megabyte: what a billion texts cost there.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import harness
from gerund.cli.embed import Encoding, EncodingWorker
from gerund.data.embedding.files import Part, join_parquet, read_embeddings, write_part
from gerund.data.embedding.job import (
    EmbeddingConfig,
    EncodingWorkers,
    Shard,
    Source,
    digest_of,
    embedding_job,
    survey_of,
)
from gerund.data.mining import MiningConfig, mine
from gerund.data.mining import job as mining_job
from gerund.data.tables import open_table
from gerund.entry import load
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool, make_engine, map_shards, prepare
from gerund.worker_model import WorkerModel
from inputs import demo_texts
from results import Column, Row, Table, median_of

TABLES = ("embed", "mine")
COLUMNS = [
    Column("system", "where"), Column("workers", "workers"), Column("rate", "rate", "", 1, "higher"),
    Column("cpu", "processor time of the workers", "", 1, "lower"),
    Column("wall", "whole time", "s", 1), Column("ratio", "times the rate of one process", "", 2),
]  # fmt: skip


class Timed:
    """An engine that notes when each shard was finished, and what processor time it took its worker.

    Args:
        engine: does the work.
    """

    def __init__(self, engine: JobEngine) -> None:
        self.engine, self.workers = engine, engine.workers
        self.began = time.perf_counter()
        self.done: list[tuple[float, float]] = []
        self.cpu = 0.0

    @contextmanager
    def pool(self, work: Any, *, folder: Path | None = None) -> Iterator[WorkerPool[Any, Any]]:
        """Yield workers; see ``JobEngine``."""
        needs = work if isinstance(work, StatefulWork) else StatefulWork(lambda: work)
        clocked = StatefulWork(partial(_clocked, work), gpus=needs.gpus, threads=needs.threads)
        with self.engine.pool(clocked, folder=folder) as pool:
            self.pool_of_engine = pool
            yield self

    def map(self, shards: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield each shard with its result, and note the time."""
        for shard, (facts, seconds) in self.pool_of_engine.map(shards):
            self.cpu += seconds
            size = len(shard.rows) if hasattr(shard, "rows") else shard.size / 1e6
            self.done.append((time.perf_counter() - self.began, size))
            yield shard, facts

    def rate(self) -> float:
        """Return what was finished a second, once every worker had finished a shard."""
        first = min(self.workers, len(self.done) - 1)
        began = self.done[first - 1][0] if first else 0.0
        return sum(size for _, size in self.done[first:]) / (self.done[-1][0] - began)

    def cpu_each(self) -> float:
        """Return the processor time of what counts as one, in milliseconds."""
        return 1000 * self.cpu / sum(size for _, size in self.done)


def _clocked(work: Any) -> Any:
    return partial(_call, prepare(work))


def _call(function: Any, shard: Any) -> tuple[Any, float]:
    began = time.process_time()
    facts = function(shard)
    return facts, time.process_time() - began


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--tables", default=",".join(TABLES), help="which, with commas (%(default)s)")
    parser.add_argument("--texts", type=int, default=20_000, help="texts that are embedded (%(default)s)")
    parser.add_argument("--articles", type=int, default=400, help="documents that are mined (%(default)s)")
    parser.add_argument("--shard", type=int, default=256, help="texts of a shard (%(default)s)")
    parser.add_argument("--workers", default="1,2", help="how many, with commas (%(default)s)")
    parser.add_argument("--address", help="of a Ray cluster; left out, without Ray")
    quick = {"texts": 64, "shard": 8, "articles": 40, "tables": "mine"}
    options = harness.parse(parser, argv, quick=quick)
    # Ray gives its workers the lowest priority of all unless it is told otherwise: beside other work that would be all
    # that is measured.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with TemporaryDirectory() as name:
        made = {"embed": embed, "mine": mine_articles, "rates": rates}
        tables = [made[table](options, Path(name)) for table in options.tables.split(",")]
    harness.report(options, __file__, tables, libraries=("ray",))


def systems_of(options: Any) -> list[tuple[str, int]]:
    """Return what is compared: engines by name, each with a number of workers."""
    counts = [int(count) for count in options.workers.split(",")]
    local = [("processes", count) for count in counts]
    return local + ([("Ray", count) for count in counts] if options.address else [])


def engine_for(system: str, workers: int, options: Any) -> Timed:
    """Return an engine that notes times."""
    if system == "Ray":
        return Timed(make_engine("ray", workers, options.address))
    return Timed(make_engine("local", workers))


def embed(options: Any, folder: Path) -> Table:
    """Embed texts, and compare the vectors."""
    texts = demo_texts(options.texts)
    source = folder / "texts.txt"
    source.write_text("".join(f"{text} {number}\n" for number, text in enumerate(texts)), encoding="utf-8")
    lm = load(dtype="float32")
    settings = {"prompt": None, "batch_tokens": None, "empty": "error", "overflow": "truncate"}
    worker = EncodingWorker(WorkerModel.of(lm), Encoding(settings))

    def run(system: str, workers: int, output: Path) -> Timed:
        timed = engine_for(system, workers, options)
        with embedding_job(open_table(source), output, EmbeddingConfig(shard_rows=options.shard, force=True)) as job:
            about = {"fingerprint": lm.fingerprint(), "model": lm.name, "dimensions": lm.dimensions}
            job.run(None, about, workers=EncodingWorkers(timed, worker), show_progress=False)  # type: ignore[arg-type]
        return timed

    rows, outputs = compared(options, folder, "vectors.parquet", run)
    first, *others = [read_embeddings(output) for output in outputs]
    assert all(other.ids == first.ids for other in others)
    largest = max((float(np.abs(other.vectors - first.vectors).max()) for other in others), default=0.0)
    check = harness.require("ids the same, largest difference of the vectors", largest, 1e-6)
    caption = f"Embedding {len(texts)} short texts with the bundled model in float32, {options.shard} a shard."
    return Table("embed", caption, with_unit("texts"), rows, checks=[check])


def mine_articles(options: Any, folder: Path) -> Table:
    """Mine documents, and compare the pairs."""
    corpus = written_articles(options, folder)
    config = MiningConfig(part_size=max(1, corpus.stat().st_size // 20), pairs="all")

    def run(system: str, workers: int, output: Path) -> Timed:
        timed = engine_for(system, workers, options)
        mine([corpus], output, config, engine=timed, force=True, show=False)
        return timed

    rows, outputs = compared(options, folder, "pairs.parquet", run)
    same = len({output.read_bytes() for output in outputs}) == 1
    check = harness.require("difference of the files of pairs", 0.0 if same else float("nan"), 0)
    caption = f"Mining {options.articles} documents ({corpus.stat().st_size / 1e6:.1f} MB), about 20 shards."
    return Table("mine", caption, with_unit("MB"), rows, checks=[check])


def written_articles(options: Any, folder: Path) -> Path:
    """Write documents of 30 sentences as JSON lines."""
    texts, corpus = demo_texts(30 * options.articles), folder / "articles.jsonl"
    articles = [
        " ".join(f"{one}." for one in texts[number * 7 : number * 7 + 30]) for number in range(options.articles)
    ]
    corpus.write_text("".join(json.dumps({"text": one or texts[0]}) + "\n" for one in articles), encoding="utf-8")
    return corpus


def rates(options: Any, folder: Path) -> Table:
    """Measure the process that reads, hands out and joins, with workers that do nothing."""
    corpus = written_articles(options, folder)
    rows, parts = 4096, []
    source = Source(open_table(corpus), rows)
    vectors_RD = np.random.default_rng(0).standard_normal((rows, 1024), dtype=np.float32)
    for number in range(10):
        ids: list[int | str] = list(range(number * rows, (number + 1) * rows))
        parts.append(folder / f"part-{number}.arrow")
        write_part(
            parts[-1], Part(ids, None, vectors_RD), "int", {"job": "", "shard": "", "rows": rows, "truncated": 0}
        )

    def handed_out(engine: JobEngine, by_place: bool) -> None:
        shards = mining_job.shards_of([corpus], 4 * 2**20, text_column="text", title_column="title")
        for _ in map_shards(engine, _nothing, (one.by_place() if by_place else one for one in shards)):
            pass

    def rows_handed_out(engine: JobEngine, by_place: bool) -> None:
        shards = enumerate(source.shards())
        given = (Shard(number, digest_of(one), one, one.start if by_place else None) for number, one in shards)
        for _ in map_shards(engine, _nothing, given):
            pass

    megabytes, numbers = corpus.stat().st_size / 1e6, vectors_RD.nbytes * len(parts) / 1e6
    works: dict[str, tuple[float, Callable[[], object]]] = {
        "first reading, before `embed`": (megabytes, lambda: survey_of(source)),
        "reading for the workers": (
            megabytes, lambda: [digest_of(one) for one in source.shards()]
        ),
        "joining vectors of 1024 numbers": (
            numbers, lambda: join_parquet(parts, folder / "joined.parquet", {"fingerprint": "", "dimensions": 1024})
        ),
    }  # fmt: skip
    engines = {"processes": make_engine("local", 2)}
    if options.address:
        engines["Ray"] = make_engine("ray", 2, options.address)
    for name, engine in engines.items():
        for kind, by_place in (("places", True), ("documents", False)):
            works[f"handing out `mine`'s {kind} to {name}"] = (megabytes, partial(handed_out, engine, by_place))
        for kind, by_place in (("places", True), ("rows", False)):
            works[f"handing out `embed`'s {kind} to {name}"] = (megabytes, partial(rows_handed_out, engine, by_place))
    spent = harness.alternate({name: work for name, (_, work) in works.items()}, options.rounds)
    found: list[Row] = [
        {"step": name, "size": size, "rate": median_of([size / one.cpu for one in spent.spent[name]])}
        for name, (size, _) in works.items()
    ]
    columns = [Column("step", "step"), Column("size", "of", "MB", 0), Column("rate", "rate", "MB/s", 0)]
    caption = "What one process reads, hands out and joins in a second of its processor time, its workers idle."
    return Table("rates", caption, columns, found)


def _nothing(_shard: Any) -> None:
    return None


def compared(options: Any, folder: Path, name: str, run: Any) -> tuple[list[Row], list[Path]]:
    """Run the systems in turn; return their rows and what each of them made."""
    systems = systems_of(options)
    rates: dict[tuple[str, int], list[float]] = {one: [] for one in systems}
    walls: dict[tuple[str, int], list[float]] = {one: [] for one in systems}
    cpus: dict[tuple[str, int], list[float]] = {one: [] for one in systems}
    for number in range(options.rounds):
        for one in systems[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            timed = run(*one, folder / f"{one[0]}-{one[1]}-{name}")
            walls[one].append(time.perf_counter() - began)
            rates[one].append(timed.rate())
            cpus[one].append(timed.cpu_each())
            print(f"{one[0]}, {one[1]} workers: {rates[one][-1]:.2f}, {walls[one][-1]:.1f} s", file=sys.stderr)
    base = systems[0]
    rows: list[Row] = [
        {
            "system": system, "workers": workers, "rate": median_of(rates[system, workers]),
            "cpu": median_of(cpus[system, workers]), "wall": median_of(walls[system, workers]),
            "ratio": median_of([own / other for own, other in zip(rates[system, workers], rates[base], strict=True)]),
        }
        for system, workers in systems
    ]  # fmt: skip
    return rows, [folder / f"{system}-{workers}-{name}" for system, workers in systems]


def with_unit(unit: str) -> list[Column]:
    """Return the columns, with what a rate counts."""
    units = {"rate": f"{unit}/s", "cpu": f"ms/{unit.removesuffix('s')}"}
    return [replace(one, unit=units.get(one.key, one.unit)) for one in COLUMNS]


if __name__ == "__main__":
    main()
