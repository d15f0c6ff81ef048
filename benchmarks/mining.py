"""Mining pairs: gerund beside the rule of GUR's released miner, growth with length, and speed of whole corpora.

The peer is the rule of the released miner on its own suffix automaton (``pip install SuffixAutomaton==0.0.10``; newer
ones find nothing): lower case, the matches that the automaton returns, weights of 1, 0.3 and 0.1 in floating point, a
pair from 3 on. It is timed twice: as released, where a document is done when it has two pairs a sentence and a sentence
is used once (twice for the first), and on every pair of sentences, which is what gerund does.

First both sides' decisions are compared with an exact search (difflib's definition of a common substring, by dynamic
programming), and every difference is counted by its cause.

    python benchmarks/mining.py --data ../shared/data
"""

import argparse
import json
import lzma
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from gerund.data.mining import MiningSettings, SymbolWeights, matching_pairs, mine
from gerund.data.mining.symbols import code_points, normalised
from gerund.data.passages import sentence_bounds

WEIGHTS = SymbolWeights()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--checked", type=int, default=20_000, help="pairs whose decisions are compared")
    parser.add_argument("--timed", type=int, default=5_000, help="pairs of the peer that are timed, of all of them")
    parser.add_argument("--only", choices=["decisions", "documents", "growth", "corpus"])
    chosen = parser.parse_args()
    book = sentences_of(chosen.data / "lm" / "books.train.jsonl.xz", 4000)
    wiki = sentences_of(chosen.data / "lm" / "wiki.train.jsonl.xz", 1000)
    work = {
        "decisions": lambda: [
            decisions(name, texts, chosen.checked) for name, texts in (("book", book), ("wiki", wiki))
        ],
        "documents": lambda: [
            documents(n, name, texts, chosen) for name, texts in (("book", book), ("wiki", wiki)) for n in (100, 1000)
        ],
        "growth": lambda: growth(book, chosen.rounds),
        "corpus": lambda: corpus(chosen.data / "lm" / "wiki.train.jsonl.xz", 3),
    }
    for name, run in work.items():
        if chosen.only in (None, name):
            run()


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


def decisions(name: str, texts: list[str], count: int) -> None:
    """Compare both sides' decisions with the exact search, and name the cause of each difference."""
    from SuffixAutomaton import SuffixAutomaton

    n = int((2 * count) ** 0.5) + 1
    texts = texts[:n]
    ours = {(match.i, match.j) for match in matching_pairs(texts)}
    lowered = [text.lower() for text in texts]
    forms = [normalised(text) for text in texts]
    causes: Counter[str] = Counter()
    for i in range(len(texts)):
        automaton = SuffixAutomaton(lowered[i])
        for j in range(i + 1, len(texts)):
            causes["pairs compared"] += 1
            exact = exact_weight(forms[i], forms[j], edges=False) >= 30
            if ((i, j) in ours) != exact:
                causes["GERUND DIFFERS FROM THE EXACT SEARCH"] += 1
            theirs = peer_match(automaton, lowered[j])
            causes["pairs by gerund"] += (i, j) in ours
            causes["pairs by the peer"] += theirs
            released = exact_weight(lowered[i], lowered[j], edges=True)
            if theirs != (released >= 30):
                causes[_fault(automaton, lowered[j], released)] += 1
            if (released >= 30) != exact:
                causes["rule differs: spaces at the ends, which the released rule counts"] += 1
    print(f"\n## Decisions, {name}")
    for cause, number in causes.items():
        print(f"{number:9,d}  {cause}")
    assert not causes["GERUND DIFFERS FROM THE EXACT SEARCH"]


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


def timed(work: Callable[[], object], rounds: int) -> float:
    """Return the median time in seconds."""
    seconds = []
    for _ in range(rounds):
        begin = perf_counter()
        work()
        seconds.append(perf_counter() - begin)
    return median(seconds)


def documents(n: int, name: str, texts: list[str], chosen: argparse.Namespace) -> None:
    """Time both sides on all pairs of a document."""
    from SuffixAutomaton import SuffixAutomaton

    texts = texts[:n]
    lowered = [text.lower() for text in texts]
    matching_pairs(texts)
    ours = timed(lambda: matching_pairs(texts), chosen.rounds)
    limited = timed(lambda: matching_pairs(texts, max_uses=4), chosen.rounds)
    pairs = list(combinations(range(n), 2))
    # All pairs of 1000 sentences take the peer minutes: some sentences with all later ones stand for the rest.
    step = max(len(pairs) // chosen.timed, 1)
    rows = range(0, n - 1, step)
    some = [(i, j) for i in rows for j in range(i + 1, n)]

    def peer() -> None:
        for i in rows:
            automaton = SuffixAutomaton(lowered[i])
            for j in range(i + 1, n):
                peer_match(automaton, lowered[j])

    whole = timed(peer, 1 if n > 100 else 3) * len(pairs) / len(some)
    early = timed(lambda: released(lowered), 1 if n > 100 else 3)
    told = "" if step == 1 else f" (measured on {len(some):,} of {len(pairs):,} pairs)"
    print(f"\n## {n} sentences, {name}, {sum(map(len, texts)):,} characters")
    print(f"gerund, all pairs: {ours * 1e3:.2f} ms; at most 4 uses: {limited * 1e3:.2f} ms")
    print(f"peer, all pairs: {whole * 1e3:,.0f} ms{told}: {whole / ours:,.0f} times")
    print(f"peer, stopping early as released: {early * 1e3:,.0f} ms: {early / ours:,.0f} times")


def released(texts: list[str]) -> int:
    """Go through the pairs in the released order of work, with its limits: each sentence once, the first twice."""
    from SuffixAutomaton import SuffixAutomaton

    draw = np.random.default_rng(0)
    n = len(texts)
    pairs = [(i, j) for i in range(n - 1) for j in range(i + 1, min(i + 1000, n))]
    chosen = draw.integers(len(pairs), size=min(100_000, len(pairs)))
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


def growth(texts: list[str], rounds: int) -> None:
    """Time documents of growing length."""
    print("\n## Growth")
    for n in (250, 500, 1000, 2000, 4000):
        some = texts[:n]
        size = sum(map(len, some))
        found = len(matching_pairs(some))
        whole = timed(lambda some=some: matching_pairs(some), rounds)
        limited = timed(lambda some=some: matching_pairs(some, max_uses=4), rounds)
        print(
            f"{n:5d} sentences, {size:8,d} characters: all {found:7,d} pairs {whole * 1e3:7.1f} ms, "
            f"{whole / size * 1e9:5.0f} ns a character; at most 4 uses {limited * 1e3:6.1f} ms, "
            f"{limited / size * 1e9:5.0f} ns a character"
        )


def corpus(path: Path, rounds: int) -> None:
    """Mine a whole corpus by title, and by all pairs."""
    print("\n## A corpus")
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "wiki.jsonl"
        plain.write_bytes(lzma.decompress(path.read_bytes()))
        for pairs in ("title", "all"):
            for workers in (1, 2):
                speeds = []
                for number in range(rounds):
                    output = Path(folder) / f"{pairs}-{workers}-{number}.parquet"
                    done = mine([plain], output, MiningSettings(pairs=pairs), workers=workers, show=False)
                    speeds.append(done.megabytes_per_second)
                size = f"{done.pairs:,} pairs of {done.megabytes:.0f} MB"
                print(f"{pairs}, {workers} processes: {median(speeds):.1f} MB/s, {size}")


if __name__ == "__main__":
    main()
