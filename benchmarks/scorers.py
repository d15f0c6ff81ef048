"""Trains scorers of continuations on the embedded default model and measures what they tell apart.

    python benchmarks/scorers.py --data ../shared/data --work WORK [--seeds 0,1,2] [--only NAME ...]

RankGen's Tables 1, 2, 11, 12 and 22 in small: negatives from the same book (INBOOK), generated ones (GENERATIVE), both,
and batches of several sizes, trained on passages of `lm/books.train` and measured on `lm/books.test`, by other authors,
and Wikipedia; beside them the model's own likelihoods, shared words, BM25 and the untrained encoder. Passages, trained
models and scores that lie in the work folder already are used again, so the study may be interrupted.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from gerund.data.corpus import read_documents
from gerund.entry import load
from gerund.evaluation.contender import BM25
from gerund.evaluation.registry import select, with_options
from gerund.evaluation.run import contenders_of, evaluate
from gerund.evaluation.task import Settings
from gerund.language_model import LanguageModel
from gerund.training.negatives import NegativesSettings, make_negatives
from gerund.training.recipe import load_recipe
from gerund.training.run import train

DOCUMENTS, A_DOCUMENT = 64, 64
LONGER = "inbook, longer"
PREFIX_WORDS, WORDS = 96, 64
TASKS = (
    "suffix-identification/books", "suffix-identification/wiki", "human-or-generated/books",
    "human-or-generated/wiki", "book-retrieval/books",
)  # fmt: skip
SIZES = tuple(
    f"{kind}.{name}={value}"
    for kind in ("suffix-identification", "human-or-generated", "book-retrieval")
    for name, value in (("prefix_words", PREFIX_WORDS), ("continuation_words", WORDS))
)
ARMS: dict[str, tuple[str, ...]] = {
    "both": (),
    "inbook": ("objectives.rankgen.negatives=inbook",),
    "generative": ("objectives.rankgen.negatives=generative",),
    # Four times the steps, on passages of all books.
    LONGER: ("objectives.rankgen.negatives=inbook", "steps=400", "schedule.warmup_steps=20"),
    # As many passages as with 32.
    "both, batch 8": ("objectives.rankgen.batch_size=8", "steps=400"),
    "both, batch 128": (
        "objectives.rankgen.batch_size=128",
        "objectives.rankgen.micro_batch_size=32",
        "steps=25",
        "schedule.warmup_steps=3",
    ),
}


def passages_in(work: Path, data: Path, *, longer: bool = False) -> Path:
    """Return the folder of passages, made unless it is there; with ``longer`` of all books, without generated ones."""
    folder, books = work / ("passages-longer" if longer else "passages"), work / "books.jsonl"
    if longer:
        books = data / "lm" / "books.train.jsonl.xz"
    elif not books.is_file():
        # Every second book: the corpus goes by author.
        found = [one.text for one in read_documents([data / "lm" / "books.train.jsonl.xz"])][: 2 * DOCUMENTS : 2]
        books.write_text("".join(json.dumps({"text": text}) + "\n" for text in found), "utf-8")
    settings = NegativesSettings(
        clean="gutenberg",
        prefix_words=PREFIX_WORDS,
        most_words=WORDS,
        per_document=A_DOCUMENT,
        generate=0.0 if longer else 1.0,
    )
    lm = None if longer else load(attention="causal", adapter="none")
    make_negatives([books], folder, settings, lm=lm, batch_size=128, resume=True)
    return folder


def trained(name: str, seed: int, work: Path, data: Path, more: list[str]) -> Path:
    """Return the folder of a scorer, trained unless it is there."""
    output = work / "runs" / f"{name.replace(', ', '-').replace(' ', '')}-{seed}"
    if not (output / "model").is_dir():
        passages = passages_in(work, data, longer=name == LONGER).resolve()
        overrides = [f"objectives.rankgen.passages=[{passages}]", f"output={output}", f"seed={seed}"]
        train(load_recipe("rankgen-default", [*overrides, *ARMS[name], *more]), resume=True)
    return output / "model"


def measured(model: str | Path | None, data: Path, work: Path, *, likelihoods: bool) -> dict[str, dict[str, float]]:
    """Return the metrics of every task."""
    settings = [*SIZES, f"suffix-identification.likelihoods={str(likelihoods).lower()}"]
    settings += [f"human-or-generated.likelihoods={str(likelihoods).lower()}"]
    tasks = with_options(select(list(TASKS), data), settings)
    contenders = contenders_of([BM25 if model == BM25 else _opened(model)])
    done = evaluate(contenders, tasks, Settings(show_progress=False), folder=work / "scores")
    return {result.task: dict(result.score.metrics) for result in done.results}


def _opened(model: str | Path | None) -> LanguageModel:
    """Return a model; the one inside without what it was trained for beside writing."""
    return load(adapter="none", attention="mask0-bidir") if model is None else load(model)


def row(name: str, cells: list[list[float | None]]) -> str:
    """Return a row of the table, from each cell's values by seed, in percent."""
    shown = []
    for values in cells:
        there = [100 * value for value in values if value is not None]
        spread = f" ± {statistics.stdev(there):.1f}" if len(there) > 1 else ""
        shown.append(f"{statistics.fmean(there):.1f}{spread}" if there else "")
    return " | ".join(["", name, *shown, ""]).strip()


def cells(found: list[dict[str, dict[str, float]]], metric: str) -> list[list[float | None]]:
    """Return eleven-way and two-way INBOOK, human or generated (books, then Wikipedia), and retrieval at 1 and 10."""
    wanted = []
    for corpus in ("books", "wiki"):
        wanted += [(f"suffix-identification/{corpus}", metric), (f"suffix-identification/{corpus}", f"{metric}_2way")]
        wanted += [(f"human-or-generated/{corpus}", metric)]
    wanted += [("book-retrieval/books", "recall_at_1"), ("book-retrieval/books", "recall_at_10")]
    # What is measured of the model as it is says nothing of a retrieval by likelihoods.
    return [[one.get(task, {}).get(name) for one in found] for task, name in wanted]


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", nargs="*", default=list(ARMS))
    parser.add_argument("--set", nargs="*", default=[], help="more settings of the recipe, KEY=VALUE")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print("| | 11-way | 2-way | human | 11-way, wiki | 2-way, wiki | human, wiki | R@1 | R@10 |")
    plain = measured(None, arguments.data, arguments.work, likelihoods=True)
    retrieved = plain.pop("book-retrieval/books")
    for metric in ("random", "overlap", "avg_cll", "pmi", "self_certainty"):
        print(row(metric, cells([plain], metric)), flush=True)
    print(row("untrained encoder", cells([{"book-retrieval/books": retrieved}], "")), flush=True)
    print(row("BM25", cells([measured(BM25, arguments.data, arguments.work, likelihoods=False)], "")), flush=True)
    whole: dict[str, Any] = {"plain": plain}
    for name in arguments.only:
        whole[name] = [
            measured(
                trained(name, int(seed), arguments.work, arguments.data, arguments.set),
                arguments.data,
                arguments.work,
                likelihoods=False,
            )
            for seed in arguments.seeds.split(",")
        ]
        print(row(name, cells(whole[name], "scorer")), flush=True)
    (arguments.work / "scorers.json").write_text(json.dumps(whole, indent=1), "utf-8")


if __name__ == "__main__":
    main()
