"""Mining pairs: gerund beside the rule of GUR's released miner, growth with length, and speed of whole corpora.

The peer is the rule of the released miner on its own suffix automaton (``pip install SuffixAutomaton==0.0.10``; newer
ones find nothing): lower case, the matches that the automaton returns, weights of 1, 0.3 and 0.1 in floating point, a
pair from 3 on. It is timed twice: as released, where a document is done when it has two pairs a sentence and a sentence
is used once (twice for the first), and on every pair of sentences, which is what gerund does.

First both sides' decisions are compared with an exact search (difflib's definition of a common substring, by dynamic
programming), and every difference is counted by its cause.

    python benchmarks/mining.py --data ../shared/data
"""

import json
import lzma
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

import harness
from gerund.data.mining import MiningConfig, SymbolWeights, matching_pairs, mine
from gerund.data.mining.substrings import code_points, normalised
from gerund.data.passages import sentence_bounds
from inputs import demo_texts
from results import Column, Row, Table, median_of

PARTS = ("decisions", "documents", "growth", "corpus")
WRONG = "gerund differs from the exact search"
TIMES = [
    Column("document", "document"), Column("system", "system"), Column("cpu", "processor time", "ms", 2),
    Column("wall", "wall time", "ms", 2), Column("ratio", "times gerund's, all pairs", "", 0),
    Column("measured", "pairs measured"),
]  # fmt: skip
WEIGHTS = SymbolWeights()


def main(argv: list[str] | None = None) -> None:
    """Run what is asked for."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--data", type=Path, help="without it sentences of the demo, of growing length")
    parser.add_argument("--checked", type=int, default=20_000, help="pairs whose decisions are compared")
    parser.add_argument("--timed", type=int, default=5_000, help="pairs of the peer that are timed, of all of them")
    parser.add_argument("--sentences", type=int, default=4000, help="the longest document")
    parser.add_argument("--only", choices=PARTS)
    options = harness.parse(parser, argv, quick={"sentences": 250, "only": "growth", "checked": 200, "timed": 200})
    if options.data is None:
        tables = [growth(demo_texts(options.sentences), options)]
    else:
        lm = options.data / "lm"
        texts = {"a book": sentences_of(lm / "books.train.jsonl.xz", options.sentences)}
        texts["Wikipedia"] = sentences_of(lm / "wiki.train.jsonl.xz", min(1000, options.sentences))
        work: dict[str, Callable[[], Table]] = {
            "decisions": lambda: decisions_of(texts, options.checked),
            "documents": lambda: documents(texts, options),
            "growth": lambda: growth(texts["a book"], options),
            "corpus": lambda: corpus(lm / "wiki.train.jsonl.xz", options.rounds),
        }
        tables = [make() for name, make in work.items() if options.only in (None, name)]
    harness.report(options, __file__, tables, libraries=("SuffixAutomaton",))


def sentences_of(path: Path, count: int) -> list[str]:
    """Return consecutive sentences of documents, of at most 128 characters: the peer takes no longer ones."""
    found: list[str] = []
    with lzma.open(path) as file:
        for line in file:
            text = json.loads(line)["text"]
            pieces = (" ".join(text[start:end].split()) for start, end in sentence_bounds(text))
            found += [piece for piece in pieces if 2 <= len(piece) <= 128]
            if len(found) >= count:
                return found[:count]
    return found


def peer_match(automaton: object, other: str) -> bool:
    """Decide by the released rule, short texts excepted."""
    matches = automaton.lcs1(other, min_len=1)  # type: ignore[attr-defined]
    return bool(matches) and max(float_weight(match[0]) for match in matches) >= 3


def float_weight(text: str) -> float:
    """Return the weight of a substring as the released code adds it up."""
    total = 0.0
    for symbol in text:
        letter = unicodedata.category(symbol)[0] == "L"
        total += (1 if ord(symbol) > 10000 else 0.3) if letter else 0.1
    return total


def exact_weight(a: str, b: str, *, edges: bool) -> int:
    """Return the weight of the heaviest common substring in whole numbers, by dynamic programming.

    With ``edges`` spaces at its ends count, as they do in the released rule.
    """
    codes_a, codes_b = code_points(a), code_points(b)
    weight = WEIGHTS.of(codes_b)
    ending = np.zeros(len(codes_b) + 1, dtype=np.int64)
    starts_with_space = codes_b == 32
    best = 0
    for code in codes_a:
        same = codes_b == code
        ending[1:] = np.where(same, ending[:-1] + weight, 0)
        if not edges:
            # A run begins at a symbol, and is looked at where it ends with one.
            ending[1:][same & starts_with_space & (ending[1:] == weight)] = 0
            best = max(best, int(np.max(np.where(starts_with_space, 0, ending[1:]), initial=0)))
        else:
            best = max(best, int(ending.max()))
    return best


def decisions_of(texts: dict[str, list[str]], count: int) -> Table:
    """Compare both sides' decisions with the exact search; the table says what differs and why."""
    found = {name: decisions(sentences, count) for name, sentences in texts.items()}
    if any(causes[WRONG] for causes in found.values()):
        raise harness.NotTheSame(WRONG)
    kinds = list(dict.fromkeys(cause for causes in found.values() for cause in causes))
    rows: list[Row] = [{"cause": cause, **{name: causes[cause] for name, causes in found.items()}} for cause in kinds]
    columns = [Column("cause", "pairs of sentences"), *(Column(name, name) for name in texts)]
    return Table(
        "decisions", "Which sentences are a pair, beside an exact search, by the cause of a difference.", columns, rows
    )


def decisions(texts: list[str], count: int) -> Counter[str]:
    """Return how often both sides decide otherwise than the exact search, by cause."""
    from SuffixAutomaton import SuffixAutomaton

    n = int((2 * count) ** 0.5) + 1
    texts = texts[:n]
    ours = {(match.i, match.j) for match in matching_pairs(texts)}
    lowered = [text.lower() for text in texts]
    forms = [normalised(text) for text in texts]
    causes: Counter[str] = Counter()
    causes[WRONG] = 0
    for i in range(len(texts)):
        automaton = SuffixAutomaton(lowered[i])
        for j in range(i + 1, len(texts)):
            causes["compared"] += 1
            exact = exact_weight(forms[i], forms[j], edges=False) >= 30
            causes[WRONG] += ((i, j) in ours) != exact
            theirs = peer_match(automaton, lowered[j])
            causes["a pair by gerund"] += (i, j) in ours
            causes["a pair by the peer"] += theirs
            released = exact_weight(lowered[i], lowered[j], edges=True)
            if theirs != (released >= 30):
                causes[_fault(automaton, lowered[j], released)] += 1
            causes["rule differs: spaces at the ends, which the released rule counts"] += (released >= 30) != exact
    return causes


def _fault(automaton: object, other: str, released: int) -> str:
    matches = automaton.lcs1(other, min_len=1)  # type: ignore[attr-defined]
    whole = max((WEIGHTS.of_text(match[0]) for match in matches), default=0)
    if whole == released:
        return "peer wrong: floating point (ten letters weigh 2.999...)"
    return (
        "peer wrong: its automaton misses the heaviest match"
        if whole < released
        else "peer wrong: a match that is none"
    )


def timed(work: Callable[[], object], rounds: int, scale: float = 1) -> dict[str, Any]:
    """Return the times of one system, in ms. The peer takes minutes: sides in turn would leave ours cold."""
    rounds_ = harness.alternate({"one": work}, rounds)
    return {"cpu": rounds_.cpu("one", 1e3 * scale), "wall": rounds_.wall("one", 1e3 * scale)}


def documents(texts: dict[str, list[str]], options: Any) -> Table:
    """Time both sides on documents of 100 and of 1000 sentences."""
    rows = [row for name, some in texts.items() for n in (100, 1000) for row in document(name, some[:n], options)]
    caption = "Mining a document beside the released rule on its own suffix automaton, on all pairs and as released."
    return Table("documents", caption, TIMES, rows)


def document(name: str, texts: list[str], options: Any) -> list[Row]:
    """Time both sides on all pairs of a document."""
    from SuffixAutomaton import SuffixAutomaton

    n = len(texts)
    lowered = [text.lower() for text in texts]
    matching_pairs(texts)
    # All pairs of 1000 sentences take the peer minutes: some sentences with all later ones stand for the rest.
    pairs = list(combinations(range(n), 2))
    rows = range(0, n - 1, max(len(pairs) // options.timed, 1))
    some = sum(n - 1 - i for i in rows)

    def peer() -> None:
        for i in rows:
            automaton = SuffixAutomaton(lowered[i])
            for j in range(i + 1, n):
                peer_match(automaton, lowered[j])

    few = 1 if n > 100 else min(3, options.rounds)
    measured = {
        "gerund, all pairs": timed(lambda: matching_pairs(texts), options.rounds),
        "gerund, at most 4 uses": timed(lambda: matching_pairs(texts, max_uses=4), options.rounds),
        "peer, all pairs": timed(peer, few, len(pairs) / some),
        "peer, stopping early as released": timed(lambda: released(lowered), few),
    }
    base = measured["gerund, all pairs"]["cpu"]["median"]
    found: list[Row] = []
    for system, times in measured.items():
        ratio = times["cpu"]["median"] / base if system.startswith("peer") else None
        told = f"{some:,} of {len(pairs):,}" if system == "peer, all pairs" and some < len(pairs) else None
        found.append(
            {"document": f"{n} sentences of {name}", "system": system, **times, "ratio": ratio, "measured": told}
        )
    return found


def released(texts: list[str]) -> int:
    """Go through the pairs in the released order of work, with its limits: each sentence once, the first twice."""
    from SuffixAutomaton import SuffixAutomaton

    random = np.random.default_rng(0)
    n = len(texts)
    pairs = [(i, j) for i in range(n - 1) for j in range(i + 1, min(i + 1000, n))]
    chosen = random.integers(len(pairs), size=min(100_000, len(pairs)))
    automata: list[object | None] = [None] * n
    used = [0] * n
    used[0] = -1
    found = 0
    for place in chosen.tolist():
        i, j = pairs[place]
        if found >= 2 * n:
            break
        if used[i] >= 1 or used[j] >= 1 or j - i >= 100:
            continue
        automaton = automata[i] = automata[i] or SuffixAutomaton(texts[i])
        if peer_match(automaton, texts[j]):
            used[i] += 1
            used[j] += 1
            found += 1
    return found


def growth(texts: list[str], options: Any) -> Table:
    """Time documents of growing length."""
    rows: list[Row] = []
    for n in (250, 500, 1000, 2000, 4000):
        if n > len(texts):
            break
        some = texts[:n]
        size = sum(map(len, some))
        row: Row = {"sentences": n, "characters": size, "pairs": len(matching_pairs(some))}
        for key, uses in (("all", None), ("four", 4)):
            times = timed(lambda some=some, uses=uses: matching_pairs(some, max_uses=uses), options.rounds)
            row |= {key: times["cpu"], f"{key}_wall": times["wall"]}
            row |= {f"{key}_each": times["cpu"]["median"] / size * 1e6}
        rows.append(row)
    columns = [Column("sentences", "sentences"), Column("characters", "characters"), Column("pairs", "all pairs")]
    for key, title in (("all", "all pairs"), ("four", "each sentence 4 times at most")):
        columns += [Column(key, f"{title}: processor time", "ms", 1), Column(f"{key}_wall", "wall time", "ms", 1)]
        columns.append(Column(f"{key}_each", "a character", "ns", 0))
    return Table("growth", "Consecutive sentences of one document, by its length.", columns, rows)


def corpus(path: Path, rounds: int) -> Table:
    """Mine a whole corpus by title, and by all pairs."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "wiki.jsonl"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        for pairs in ("title", "all"):
            for workers in (1, 2):
                speeds = []
                for number in range(rounds):
                    output = Path(folder) / f"{pairs}-{workers}-{number}.parquet"
                    done = mine([plain], output, MiningConfig(pairs=pairs), workers=workers, show=False)
                    speeds.append(done.megabytes_per_second)
                sizes = {"megabytes": round(done.megabytes), "pairs": done.pairs}
                rows.append({"rule": f"`--pairs {pairs}`", "processes": workers, "speed": median_of(speeds), **sizes})
    columns = [
        Column("rule", "pairs"), Column("processes", "processes"), Column("speed", "wall time", "MB/s", 1),
        Column("megabytes", "corpus", "MB"), Column("pairs", "found"),
    ]  # fmt: skip
    return Table(
        "corpus", "Wikipedia's training articles from an unpacked file, reading and writing included.", columns, rows
    )


if __name__ == "__main__":
    main()
