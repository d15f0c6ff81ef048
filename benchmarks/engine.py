"""Many callers on one model: the engine beside one request after another.

    python benchmarks/engine.py [--tokens 32] [--writers 1,8,32] [--dtypes float32,bfloat16] [--rounds 3]

The bundled model; prompts of 5 to 40 words, sampled with a seed each, all of `--tokens` tokens. Checks first that texts
are those of `lm.generate` one by one: all of them where an engine promises that; where it promises less, the check
counts those that differ. Then, in turn:

- writing: the texts one by one through `lm.generate`, and through engines with so many slots;
- a mix: 2 writers and 6 who encode, each asking again as soon as it is answered, for some seconds: what both get, and
  the greatest gap between two tokens of a text, with an engine and with a lock around the model;
- batches: many prompts to `lm.generate` whose texts end where their sentence ends, in batches and in turn;
- memory: what a process that serves 8 writers holds more than one that has loaded the model.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count, islice
from pathlib import Path
from typing import Any

import gerund
import harness
from gerund import Engine, EngineConfig, LanguageModel, Sampling
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig
from gerund.types import Generation
from results import Column, Row, Table, median_of

ONE_BY_ONE, ENGINE = "one by one", "engine"
LOCK = "a lock around the model"
BATCHES, IN_TURN = "batches to their ends", "one makes room for the next"
Asked = list[tuple[str, GenerationConfig]]


@cache
def words() -> list[str]:
    """Return the words of the bundled documents."""
    folder = Path(gerund.__file__).parent / "assets" / "demo"
    texts = [path.read_text("utf-8") for path in sorted(folder.iterdir()) if path.suffix in (".txt", ".jsonl", ".md")]
    return " ".join(texts).split()


def endless(tokens: int, seed: int = 0) -> Iterator[tuple[str, GenerationConfig]]:
    """Yield prompts out of the bundled documents, with what is asked for."""
    chance = random.Random(seed)
    for number in count():
        length = chance.randint(5, 40)
        start = chance.randrange(len(words()) - length)
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=number)
        yield " ".join(words()[start : start + length]), GenerationConfig.of(tokens, sampling, {})


def requests(number: int, tokens: int) -> Asked:
    """Return so many of them."""
    return list(islice(endless(tokens), number))


def one_by_one(lm: LanguageModel, asked: Asked) -> list[Generation]:
    """Write texts through the library, each streamed."""
    own = lm.model, lm.tokenizer
    return [generation.generate(*own, [prompt], settings, emit=lambda _: None)[0] for prompt, settings in asked]


def by_engine(engine: Engine, asked: Asked) -> list[Generation]:
    """Write texts side by side, each streamed, as a server does."""
    tickets = [engine.submit_generate(prompt, own, on_text=lambda _: None) for prompt, own in asked]
    return [ticket.result()[0] for ticket in tickets]


def writing(options: argparse.Namespace, dtype: str) -> tuple[list[Row], list[str]]:
    """Compare texts of so many writers."""
    lm, rows, checks = gerund.load(dtype=dtype), list[Row](), list[str]()
    engines = {ENGINE: Engine(lm, EngineConfig(slots=options.slots))}
    for engine in engines.values():
        engine.start()
    for writers in options.writers:
        asked = requests(max(writers, 8), options.tokens)
        systems: dict[str, Callable[[], Any]] = {ONE_BY_ONE: lambda asked=asked: one_by_one(lm, asked)}
        for name, engine in engines.items():
            systems[name] = lambda engine=engine, asked=asked, writers=writers: in_groups(engine, asked, writers)
        expected = systems[ONE_BY_ONE]()
        for name, engine in engines.items():
            others = sum(one.text != other.text for one, other in zip(systems[name](), expected, strict=True))
            # Another last bit of bfloat16 is another text.
            allowed = {"float32": 1 + 0.1 * len(asked)}.get(dtype, len(asked))
            allowed = 0 if engine.state().guarantee == "bits of generate" else allowed
            what = f"{dtype}, {writers} writers, {name} ({engine.state().guarantee}): texts of {len(asked)} that differ"
            checks.append(harness.require(what, others, allowed))
        rounds = harness.alternate(systems, options.rounds)
        tokens = sum(one.usage.completion_tokens for one in expected)
        for name in systems:
            rate = median_of([tokens / spent.cpu for spent in rounds.spent[name]])
            ratio = None if name == ONE_BY_ONE else rounds.times_as_fast(name, ONE_BY_ONE)
            rows.append({"system": name, "dtype": dtype, "writers": writers, "rate": rate, "ratio": ratio})
    for engine in engines.values():
        engine.close()
    return rows, checks


def in_groups(engine: Engine, asked: Asked, writers: int) -> list[Generation]:
    """Write texts, so many at a time."""
    found: list[Generation] = []
    for start in range(0, len(asked), writers):
        found += by_engine(engine, asked[start : start + writers])
    return found


class Mixed:
    """Some who write and some who encode, each asking again as soon as it is answered.

    Args:
        write: writes a text and calls a function for each piece of it.
        encode: encodes texts.
    """

    def __init__(
        self,
        write: Callable[[tuple[str, GenerationConfig], Callable[[], None]], Any],
        encode: Callable[[list[str]], Any],
    ) -> None:
        self.write, self.encode = write, encode
        self.tokens = self.texts = 0
        self.gaps: list[float] = []
        self._ends = 0.0

    def run(self, seconds: float, tokens: int, writers: int = 2, encoders: int = 6) -> dict[str, float | None]:
        """Let all of them work; return what they got, with no gap where no text came in two pieces."""
        self._ends = time.perf_counter() + seconds
        cpu = time.process_time()
        with ThreadPoolExecutor(writers + encoders) as clients:
            running = [clients.submit(self._writer, number, tokens) for number in range(writers)]
            running += [clients.submit(self._encoder, number) for number in range(encoders)]
        for client in running:
            client.result()
        cpu = time.process_time() - cpu
        return {
            "tokens": self.tokens / cpu,
            "texts": self.texts / cpu,
            "gap": 1000 * statistics.median(self.gaps) if self.gaps else None,
            "greatest": 1000 * max(self.gaps) if self.gaps else None,
        }

    def _writer(self, number: int, tokens: int) -> None:
        for asked in endless(tokens, seed=number):
            if time.perf_counter() > self._ends:
                return
            last: list[float] = []

            def note(last: list[float] = last) -> None:
                now = time.perf_counter()
                if last:
                    self.gaps.append(now - last[-1])
                last.append(now)
                self.tokens += 1

            self.write(asked, note)

    def _encoder(self, number: int) -> None:
        for prompt, _ in endless(1, seed=100 + number):
            if time.perf_counter() > self._ends:
                return
            self.encode([prompt])
            self.texts += 1


def mix(options: argparse.Namespace) -> list[Row]:
    """Compare an engine with a lock, in turn."""
    lm, lock = gerund.load(dtype="float32"), threading.Lock()

    def write_locked(asked: tuple[str, GenerationConfig], note: Callable[[], None]) -> None:
        with lock:
            generation.generate(lm.model, lm.tokenizer, [asked[0]], asked[1], emit=lambda _: note())

    def encode_locked(texts: list[str]) -> None:
        with lock:
            lm.encode(texts)

    found: dict[str, list[dict[str, float | None]]] = {LOCK: [], ENGINE: []}
    with Engine(lm, EngineConfig(slots=options.slots)) as engine:

        def write(asked: tuple[str, GenerationConfig], note: Callable[[], None]) -> None:
            engine.submit_generate(*asked, on_text=lambda _: note()).result()

        systems: dict[str, tuple[Any, Any]] = {
            LOCK: (write_locked, encode_locked),
            ENGINE: (write, lambda texts: engine.submit_encode(texts).result()),
        }
        for number in range(options.rounds):
            for name in sorted(systems, reverse=bool(number % 2)):
                found[name].append(Mixed(*systems[name]).run(options.seconds, options.tokens))
    rows: list[Row] = []
    for name, rounds in found.items():
        there = {key: [value for got in rounds if (value := got[key]) is not None] for key in rounds[0]}
        rows.append({"system": name, **{key: median_of(values) for key, values in there.items() if values}})
    return rows


def batches(options: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """Compare many prompts in batches with the same in turn."""
    rows, checks = [], []
    settings = GenerationConfig.of(64, Sampling(temperature=1.0, top_p=0.9, seed=5), {"stop": ["."]})
    prompts = [prompt for prompt, _ in requests(options.prompts, 1)]
    for dtype in options.dtypes:
        lm = gerund.load(dtype=dtype)

        def run(worthwhile: int, lm: LanguageModel = lm) -> list[str]:
            before, generation._WORTHWHILE = generation._WORTHWHILE, worthwhile
            try:
                found = generation.generate(lm.model, lm.tokenizer, prompts, settings, batch_size=8)
            finally:
                generation._WORTHWHILE = before
            return [one.text for one in found]

        systems = {BATCHES: lambda run=run: run(sys.maxsize), IN_TURN: lambda run=run: run(1)}
        alone = [generation.generate(lm.model, lm.tokenizer, [one], settings)[0].text for one in prompts]
        same = {name: sum(map(str.__eq__, work(), alone)) for name, work in systems.items()}
        allowed = 1 + 0.1 * len(prompts)
        what = f"{dtype}: texts of {len(prompts)} that differ from those of one by one when they are written in turn"
        checks.append(harness.require(what, len(prompts) - same[IN_TURN], allowed))
        rounds = harness.alternate(systems, options.rounds)
        for row in rounds.rows(BATCHES, dtype=dtype):
            rows.append({**row, "same": same[str(row["system"])]})
    return rows, checks


def serve(case: dict[str, Any]) -> dict[str, float]:
    """Serve 8 writers in this process, which is there for nothing else; return its memory before and after."""
    lm = gerund.load(dtype="float32")
    asked = requests(8, case["tokens"])
    one_by_one(lm, asked[:1])  # what a first pass brings along
    loaded = harness.resident_memory()
    if case["system"] == ONE_BY_ONE:
        one_by_one(lm, asked)
        return {"loaded": loaded, "after": harness.resident_memory()}
    with Engine(lm, EngineConfig(slots=8)) as engine:
        by_engine(engine, asked)
        return {"loaded": loaded, "after": harness.resident_memory()}


def memory(options: argparse.Namespace) -> list[Row]:
    """Compare processes."""
    rows: list[Row] = []
    for name in (ONE_BY_ONE, ENGINE):
        found = harness.in_child(__file__, {"system": name, "tokens": options.tokens}, harness.RETURN_FREED_MEMORY)
        rows.append({"system": name, "more": found["after"] - found["loaded"], "loaded": found["loaded"]})
    return rows


def numbers(text: str) -> list[int]:
    """Read numbers with commas between them."""
    return [int(one) for one in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    """Compare the systems."""
    parser = harness.parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--writers", type=numbers, default=[1, 8, 32], help="with commas")
    parser.add_argument("--slots", type=int, default=8, help="texts at a time")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a mix")
    parser.add_argument("--prompts", type=int, default=64, help="of a call with batches")
    quick = {"tokens": 4, "writers": [8], "seconds": 0.3, "prompts": 16, "dtypes": ["float32"]}
    options = harness.parse(parser, argv, quick=quick)
    if options.child is not None:
        harness.answer(serve(options.child))
        return
    found, checks = [], []
    for dtype in options.dtypes:
        rows, own = writing(options, dtype)
        found += rows
        checks += own
    in_batches, checks_of_batches = batches(options)
    system, dtype_ = Column("system", "system"), Column("dtype", "type")
    times = f"times as fast as {ONE_BY_ONE}"
    tables = [
        Table(
            "writing",
            f"Texts of {options.tokens} tokens at most by so many writers at a time, {options.slots} slots.",
            [system, dtype_, Column("writers", "writers"), Column("rate", "tokens a processor second", "", 0, "higher"),
             Column("ratio", times, "", 2)],
            found,
            checks=checks,
        ),
        Table(
            "mix",
            f"2 writers and 6 who encode a text at a time, for {options.seconds:g} seconds of the clock, float32.",
            [system, Column("tokens", "tokens a processor second", "", 1, "higher"),
             Column("texts", "texts a processor second", "", 1, "higher"),
             Column("gap", "median gap between tokens", "ms", 0, "lower"),
             Column("greatest", "greatest gap", "ms", 0, "lower")],
            mix(options),
        ),
        Table(
            "batches",
            f"{options.prompts} prompts in one call of `lm.generate`, until a sentence ends, 8 at a time.",
            [*harness.time_columns(BATCHES, dtype_), Column("same", "texts as one by one", "", 0, "higher")],
            in_batches,
            checks=checks_of_batches,
        ),
        Table(
            "memory",
            "What a process holds more after it has served 8 writers, float32: slots of 1024 tokens, kept beginnings.",
            [system, Column("more", "more", "MiB", 0, "lower"), Column("loaded", "with the model alone", "MiB", 0)],
            memory(options),
        ),
    ]  # fmt: skip
    harness.report(options, __file__, tables)


if __name__ == "__main__":
    main()
