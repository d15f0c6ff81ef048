"""Ways to write compared: how near their texts are to people's, how they repeat themselves, and how long they take.

    python benchmarks/decoding.py --data ../shared/data -o out [--model FOLDER] [--scorer FOLDER ...] [--samples 200]

RankGen's Tables 3, 16 and 17 and Figures 3 and 8. Greedy, ancestral, nucleus, top-k and typical sampling; nucleus
sampling of twenty continuations ranked by chance, by words, by the model's likelihoods and by each scorer; and beam
search by each scorer. Prefixes are passages of documents that were not trained on. The twenty continuations of a
prefix are drawn once for all who rank them. `out` gets a table (`CORPUS.txt`), all numbers (`CORPUS.json`), the
divergence curves and a picture of time against MAUVE.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gerund.entry import load
from gerund.evaluation.registry import select
from gerund.evaluation.task import Settings
from gerund.evaluation.tasks.writing import DECODINGS, Writing
from gerund.plotting.curves import TradePoint, trade_off
from gerund.plotting.divergence import divergence_curves
from gerund.plotting.style import picture
from gerund.scoring.registry import find_scorer

LIKELIHOODS = ("random", "overlap", "avg_cll", "pmi", "self_certainty")
# Prefixes whose continuations are scored at a time.
_PREFIXES = 16
SHOWN = ("mauve", "mauve_error", "rep", "overlap", "rep_4", "length")


def ways(scorers: list[str]) -> dict[str, dict[str, Any]]:
    """Return the options of each way to write, by name."""
    found: dict[str, dict[str, Any]] = {name: {"decoding": name} for name in DECODINGS}
    found |= {f"20 ranked by {name}": {"rerank": name} for name in LIKELIHOODS}
    for scorer in scorers:
        name = Path(scorer).parent.name if Path(scorer).name == "model" else Path(scorer).name
        found[f"20 ranked by {name}"] = {"rerank": scorer}
        found[f"beams by {name}"] = {
            "rerank": scorer, "rerank_samples": 10, "rerank_beams": 2, "rerank_every": 20,
        }  # fmt: skip
    return found


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--model", default=None)
    parser.add_argument("--scorer", nargs="*", default=[])
    parser.add_argument("--corpora", nargs="*", default=["books", "wiki"])
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of ways")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--prefix-words", type=int, default=96)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--seeds", default="0", help="seeds with commas; each draws prefixes and texts")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    lm = load(arguments.model, attention="causal", adapter="none")
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for corpus in arguments.corpora:
        [task] = select([f"writing/{corpus}"], arguments.data)
        assert isinstance(task, Writing)
        sizes = {"prefix_words": arguments.prefix_words, "max_new_tokens": arguments.new_tokens}
        task = replace(task, samples=arguments.samples, **sizes)
        chosen = {
            name: options
            for name, options in ways(arguments.scorer).items()
            if not arguments.only or any(part in name for part in arguments.only)
        }
        measure(lm, task, chosen, seeds, arguments.output)


def measure(lm: Any, task: Writing, chosen: dict[str, dict[str, Any]], seeds: list[int], output: Path) -> None:
    """Measure every way on one corpus, and write and draw what came out; what is there already is not done again."""
    path = output / f"{task.title}.json"
    setting = [lm.fingerprint(), task.samples, task.prefix_words, task.max_new_tokens]
    before = json.loads(path.read_text("utf-8")) if path.is_file() else {"setting": setting, "runs": {}}
    if before["setting"] != setting:
        raise SystemExit(f"{path} was measured otherwise: {before['setting']}; choose another folder")
    done: dict[str, list[dict[str, Any]]] = {}
    drawn: dict[int, Drawn] = {}
    for name, options in chosen.items():
        known = before["runs"].setdefault(name, {})
        for seed in seeds:
            if str(seed) not in known:
                known[str(seed)] = once(lm, replace(task, **options), seed, drawn)
                path.write_text(json.dumps(before), "utf-8")
        runs = done[name] = [known[str(seed)] for seed in seeds]
        print(f"{task.title:6} {name:36} " + "  ".join(f"{key} {spread(runs, key)}" for key in (*SHOWN, "seconds")))
    table = [
        "| " + " | ".join([name, *(spread(done[name], key) for key in (*SHOWN, "seconds"))]) + " |" for name in chosen
    ]
    (output / f"{task.title}.txt").write_text("\n".join(table) + "\n", "utf-8")
    curves = {
        name: (mean(done[name], "mauve"), np.array(done[name][0]["curve"])) for name in chosen if done[name][0]["curve"]
    }
    if curves:
        title = f"{task.title}: {task.samples} continuations"
        (output / f"{task.title}-divergence.png").write_bytes(picture(divergence_curves(curves, title=title)))
        points = [TradePoint(name, mean(done[name], "mauve"), mean(done[name], "seconds")) for name in curves]
        trade = trade_off(points, title=title, xlabel="seconds a text", ylabel="MAUVE", percent=False)
        (output / f"{task.title}-time.png").write_bytes(picture(trade))


def once(lm: Any, task: Writing, seed: int, drawn: dict[int, "Drawn"]) -> dict[str, Any]:
    """Return the metrics of one way and seed, with the divergence curve and the seconds for a text."""
    settings = Settings(seed=seed, show_progress=False)
    passages, others = task.passages(task.samples, settings)
    prefixes = [passage.prefix for passage in passages]
    start = time.perf_counter()
    if task.rerank and not task.rerank_every:
        if seed not in drawn:
            drawn[seed] = Drawn.by(lm, task, prefixes, settings)
            start = time.perf_counter()
        written = drawn[seed].best(find_scorer(task.rerank, lm, own=lm.scorer, seed=seed), prefixes)
        start -= drawn[seed].seconds
    else:
        written = task.write(lm, prefixes, settings)
    seconds = (time.perf_counter() - start) / len(passages)
    found = task.compare(lm, passages, written, others)
    curve = None if found.curve is None else found.curve.tolist()
    return {**found.metrics, "seconds": seconds, "curve": curve}


@dataclass(frozen=True)
class Drawn:
    """Continuations of each prefix, and the seconds that it took to draw them all."""

    candidates: list[list[Any]]
    seconds: float

    @classmethod
    def by(cls, lm: Any, task: Writing, prefixes: list[str], settings: Settings) -> "Drawn":
        """Draw them: the draws do not depend on who ranks them."""
        start = time.perf_counter()
        written: list[Any] = list(replace(task, rerank="random").write(lm, prefixes, settings))
        return cls([one.history[-1] for one in written], time.perf_counter() - start)

    def best(self, scorer: Any, prefixes: list[str]) -> list[Any]:
        """Return the continuation of each prefix that a scorer likes best."""
        chosen = []
        for start in range(0, len(prefixes), _PREFIXES):
            # What ended at once is chosen only where everything did, as in the library.
            lots = self.candidates[start : start + _PREFIXES]
            own = [[one for one in lot if one.text.strip()] or lot[:1] for lot in lots]
            texts = [[one.text if one.text.strip() else " ." for one in lot] for lot in own]
            scores = scorer.score(prefixes[start : start + _PREFIXES], texts)
            chosen += [lot[int(np.argmax(row))] for lot, row in zip(own, scores, strict=True)]
        return chosen


def mean(runs: list[dict[str, Any]], key: str) -> float:
    """Return the mean of a metric."""
    return statistics.fmean(run[key] for run in runs)


def spread(runs: list[dict[str, Any]], key: str) -> str:
    """Return mean and standard deviation over seeds."""
    values = [run[key] for run in runs if key in run]
    if not values:
        return ""
    return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")


if __name__ == "__main__":
    main()
