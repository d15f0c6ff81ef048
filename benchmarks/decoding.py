"""Ways to write compared: how near their texts are to people's, how they repeat themselves, and how long they take.

    python benchmarks/decoding.py --data ../shared/data --work WORK [--model FOLDER] [--scorer FOLDER ...]
    python benchmarks/decoding.py ... --id prefix-lengths --prefix-lengths 24,96,192 --only nucleus "ranked by default"
    python benchmarks/decoding.py ... --id sentence-ends --ends sentence --corpora books

RankGen's Tables 3, 16 and 17 and Figures 3, 4 and 8. Greedy, ancestral, nucleus, top-k and typical sampling; nucleus
sampling of twenty continuations ranked by chance, by words, by the model's likelihoods and by each scorer; and beam
search by each scorer. Prefixes are passages of documents that were not trained on. The twenty continuations of a
prefix are sampled once for all who rank them. The work folder keeps all numbers, so the study may be interrupted, and
gets the divergence curves and a picture of time against MAUVE.
"""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import harness
import study
from gerund.entry import load
from gerund.evaluation.registry import select
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.generated_texts import DECODINGS, ENDS, Writing
from gerund.reporting.plots.scores import TradePoint, divergence_curves, trade_off
from gerund.reporting.plots.style import picture
from gerund.scoring.registry import find_scorer
from results import Column, Row, Table, mean_of

IDS = ("writing", "prefix-lengths", "sentence-ends")
LIKELIHOODS = ("random", "overlap", "content_overlap", "avg_cll", "pmi", "self_certainty")
# Prefixes whose continuations are scored at a time.
_PREFIXES = 16
COLUMNS = [
    Column("system", "way to write"), Column("corpus", "corpus"), Column("prefix", "words of the prefix"),
    Column("mauve", "MAUVE", "", 3, "higher"), Column("gain", "above nucleus, seed by seed", "", 3),
    Column("mauve_error", "its standard error a seed", "", 3),
    Column("rep", "rep", "", 3), Column("overlap", "overlap with the prefix", "", 3),
    Column("rep_4", "repeated 4-grams", "", 3), Column("length", "words", "", 0),
    Column("seconds", "wall time a text", "s", 1),
]  # fmt: skip


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


def main(argv: list[str] | None = None) -> None:
    """Run the comparison."""
    parser = study.parser(__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--scorer", nargs="*", default=[])
    parser.add_argument("--corpora", nargs="*", default=["books", "wiki"])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--prefix-lengths", default="96", help="words of the prefix, with commas")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--ends", default="token", choices=ENDS, help="where both sides' texts end")
    parser.add_argument("--id", default="writing", choices=IDS, help="the table's name")
    quick = {"seeds": [0], "corpora": ["wiki"], "samples": 8, "new_tokens": 8, "only": ["nucleus", "ranked by overlap"]}
    options = harness.parse(parser, argv, quick=quick)
    options.work.mkdir(parents=True, exist_ok=True)
    lm = load(options.model, attention="causal", adapter="none")
    chosen = {
        name: way
        for name, way in ways(options.scorer).items()
        if not options.only or any(part in name for part in options.only)
    }
    rows: list[Row] = []
    for corpus in options.corpora:
        [task] = select([f"writing/{corpus}"], options.data)
        assert isinstance(task, Writing)
        for words in map(int, options.prefix_lengths.split(",")):
            sizes = {"prefix_words": words, "max_new_tokens": options.new_tokens, "ends": options.ends}
            rows += measure(lm, replace(task, samples=options.samples, **sizes), chosen, options)
    caption = f"{options.samples} continuations of {options.new_tokens} tokens by each way to write."
    harness.report(options, __file__, [Table(options.id, caption, COLUMNS, rows)])


def measure(lm: Any, task: Writing, chosen: dict[str, dict[str, Any]], options: Any) -> list[Row]:
    """Measure every way on one corpus, and draw what came out; what is in the work folder is not done again."""
    stem = f"{task.title}-{task.prefix_words}".replace("/", "-")
    path = options.work / f"{stem}.json"
    setting = [lm.fingerprint(), task.samples, task.prefix_words, task.max_new_tokens, task.ends]
    before = json.loads(path.read_text("utf-8")) if path.is_file() else {"setting": setting, "runs": {}}
    if before["setting"] != setting:
        raise SystemExit(f"{path.name} was measured otherwise: {before['setting']}; choose another folder")
    done: dict[str, list[dict[str, Any]]] = {}
    sampled: dict[int, Sampled] = {}
    rows: list[Row] = []
    for name, way in chosen.items():
        known = before["runs"].setdefault(name, {})
        for seed in options.seeds:
            if str(seed) not in known:
                known[str(seed)] = once(lm, replace(task, **way), seed, sampled)
                path.write_text(json.dumps(before), "utf-8")
        runs = done[name] = [known[str(seed)] for seed in options.seeds]
        cells = {column.key: mean(runs, column.key) for column in COLUMNS[3:]}
        row: Row = {"system": name, "corpus": task.title, "prefix": task.prefix_words, **cells}
        if name != "nucleus" and "nucleus" in done:
            pairs = zip(runs, done["nucleus"], strict=True)
            gains = [run["mauve"] - base["mauve"] for run, base in pairs if "mauve" in run and "mauve" in base]
            row["gain"] = mean_of(gains) if gains else None
        rows.append(row)
    draw(done, task, options.work / stem)
    return rows


def draw(done: dict[str, list[dict[str, Any]]], task: Writing, stem: Path) -> None:
    """Draw divergence curves, and time against MAUVE."""
    curves = {
        name: (mean(runs, "mauve"), np.array(runs[0]["curve"])) for name, runs in done.items() if runs[0]["curve"]
    }
    if not curves:
        return
    curves = {name: (cell["mean"], curve) for name, (cell, curve) in curves.items()}
    title = f"{task.title}: {task.samples} continuations"
    Path(f"{stem}-divergence.png").write_bytes(picture(divergence_curves(curves, title=title)))
    points = [TradePoint(name, curves[name][0], mean(done[name], "seconds")["mean"]) for name in curves]
    trade = trade_off(points, title=title, xlabel="seconds a text", ylabel="MAUVE", percent=False)
    Path(f"{stem}-time.png").write_bytes(picture(trade))


def once(lm: Any, task: Writing, seed: int, sampled: dict[int, "Sampled"]) -> dict[str, Any]:
    """Return the metrics of one way and seed, with the divergence curve and the seconds for a text."""
    settings = EvaluationConfig(seed=seed, show_progress=False)
    passages, others = task.passages(task.samples, settings)
    prefixes = [passage.prefix for passage in passages]
    start = time.perf_counter()
    if task.rerank and not task.rerank_every:
        if seed not in sampled:
            sampled[seed] = Sampled.by(lm, task, prefixes, settings)
            start = time.perf_counter()
        written = sampled[seed].best(find_scorer(task.rerank, lm, seed=seed), prefixes)
        start -= sampled[seed].seconds
    else:
        written = task.write(lm, prefixes, settings)
    seconds = (time.perf_counter() - start) / len(passages)
    found = task.compare(lm, passages, written, others)
    curve = None if found.curve is None else found.curve.tolist()
    return {**found.metrics, "seconds": seconds, "curve": curve}


@dataclass(frozen=True)
class Sampled:
    """Continuations of each prefix, and the seconds that it took to sample them all."""

    candidates: list[list[Any]]
    seconds: float

    @classmethod
    def by(cls, lm: Any, task: Writing, prefixes: list[str], settings: EvaluationConfig) -> "Sampled":
        """Sample them: what is sampled does not depend on who ranks it."""
        start = time.perf_counter()
        written: list[Any] = list(replace(task, rerank="random").write(lm, prefixes, settings))
        return cls([one.history[-1] for one in written], time.perf_counter() - start)

    def best(self, scorer: Any, prefixes: list[str]) -> list[Any]:
        """Return the continuation of each prefix that a scorer likes best."""
        chosen = []
        for start in range(0, len(prefixes), _PREFIXES):
            # What ended at once is chosen only where everything did, as in the library.
            candidates = self.candidates[start : start + _PREFIXES]
            own = [[one for one in row if one.text.strip()] or row[:1] for row in candidates]
            texts = [[one.text if one.text.strip() else " ." for one in row] for row in own]
            scores = scorer.score(prefixes[start : start + _PREFIXES], texts)
            chosen += [row[int(np.argmax(of_row))] for row, of_row in zip(own, scores, strict=True)]
        return chosen


def mean(runs: list[dict[str, Any]], key: str) -> Any:
    """Return a metric over seeds, None where no run has it."""
    values = [run[key] for run in runs if key in run]
    return mean_of(values) if values else None


if __name__ == "__main__":
    main()
