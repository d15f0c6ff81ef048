"""Trains scorers of continuations on the bundled model and measures what they tell apart.

    python benchmarks/scorers.py --data ../shared/data --work WORK [--seeds 0,1,2] [--only NAME ...]

RankGen's Tables 1, 2, 11, 12 and 22 in small: negatives from the same book (INBOOK), generated ones (GENERATIVE), both,
and batches of several sizes, trained on passages of `lm/books.train` and measured on `lm/books.test`, by other authors,
and Wikipedia; beside them the model's own likelihoods, shared words, BM25 and the untrained encoder. Passages, trained
models and scores that lie in the work folder already are used again, so the study may be interrupted.
"""

import json
from pathlib import Path
from typing import Any

import harness
import study
from gerund.data.corpus import read_documents
from gerund.entry import load
from gerund.evaluation.registry import select, with_options
from gerund.evaluation.systems.search import BM25
from gerund.language_model import LanguageModel
from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from results import Cell, Column, Row, Table

DOCUMENTS, A_DOCUMENT = 64, 64
QUICK_SIZES = (4, 8)
MEASURES = ("random", "overlap", "content_overlap", "avg_cll", "pmi", "self_certainty")
PREFIX_WORDS, WORDS = 96, 64
CAPTION = (
    f"Scorers of continuations of {WORDS} words behind prefixes of {PREFIX_WORDS}: the true one among eleven or two of "
    "the same book or article, a person's above a generated one, retrieval over a book."
)
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
    # As many passages as with 32.
    "both, batch 8": ("objectives.rankgen.batch_size=8", "steps=400"),
    "both, batch 128": (
        "objectives.rankgen.batch_size=128",
        "objectives.rankgen.micro_batch_size=32",
        "steps=25",
        "schedule.warmup_steps=3",
    ),
}


def passages_in(options: Any) -> Path:
    """Return the folder of passages, made unless it is there."""
    documents, a_document = QUICK_SIZES if options.quick else (DOCUMENTS, A_DOCUMENT)
    work, data = options.work, options.data
    folder, books = work / "passages", work / "books.jsonl"
    if not books.is_file():
        # Every second book: the corpus goes by author.
        found = [one.text for one in read_documents([data / "lm" / "books.train.jsonl.xz"])][: 2 * documents : 2]
        books.write_text("".join(json.dumps({"text": text}) + "\n" for text in found), "utf-8")
    settings = NegativesConfig(
        clean="gutenberg",
        prefix_words=PREFIX_WORDS,
        most_words=WORDS,
        per_document=a_document,
        generate=1.0,
    )
    lm = load(attention="causal", adapter="none")
    make_negatives([books], folder, settings, lm=lm, batch_size=128, resume=True)
    return folder


def trained(name: str, seed: int, options: Any) -> Path:
    """Return the folder of a scorer, trained unless it is there."""
    output = options.work / "runs" / f"{name.replace(', ', '-').replace(' ', '')}-{seed}"
    if (output / "model").is_dir():
        return output / "model"
    passages = passages_in(options).resolve()
    overrides = [f"objectives.rankgen.passages=[{passages}]", f"seed={seed}", *ARMS[name]]
    return study.trained("rankgen-default", overrides, output, options.set)


def measured(model: str | Path | None, options: Any, *, likelihoods: bool) -> study.Metrics:
    """Return the metrics of every task."""
    names = TASKS[:1] if options.quick else TASKS
    settings = [*SIZES, f"suffix-identification.likelihoods={str(likelihoods).lower()}"]
    settings += [f"human-or-generated.likelihoods={str(likelihoods).lower()}"]
    kinds = {name.partition("/")[0] for name in names}
    used = [setting for setting in settings if setting.partition(".")[0] in kinds]
    tasks = with_options(select(list(names), options.data), used)
    return study.measured([BM25 if model == BM25 else _opened(model)], tasks, options)


def _opened(model: str | Path | None) -> LanguageModel:
    """Return a model; the bundled one without its adapters."""
    return load(adapter="none", attention="mask0-bidir") if model is None else load(model)


def columns(metric: str) -> list[tuple[Column, str, str]]:
    """Return each column with the task and the metric in it; ``metric`` is what continuations are ranked by."""
    wanted = []
    for corpus in ("books", "wiki"):
        named = (("11-way", "suffix-identification", metric), ("2-way", "suffix-identification", f"{metric}_2way"))
        for title, task, name in (*named, ("human", "human-or-generated", metric)):
            column = Column(f"{corpus} {title}", f"{title}, {corpus}", "%", 1, "higher")
            wanted.append((column, f"{task}/{corpus}", name))
    for top in (1, 10):
        wanted.append((Column(f"R@{top}", f"R@{top}", "%", 1, "higher"), "book-retrieval/books", f"recall_at_{top}"))
    return wanted


def row(name: str, found: list[study.Metrics], metric: str) -> Row:
    """Return a row of the table."""
    cells: dict[str, Cell] = {
        column.key: study.over_seeds(found, task, name_, 100) for column, task, name_ in columns(metric)
    }
    return {"scorer": name, **cells}


def main(argv: list[str] | None = None) -> None:
    """Train, measure, and report the table."""
    parser = study.parser(__doc__)
    quick = {"seeds": [0], "only": ["inbook"], "set": [*study.QUICK_RECIPE, "objectives.rankgen.batch_size=4"]}
    options = harness.parse(parser, argv, quick=quick)
    options.work.mkdir(parents=True, exist_ok=True)
    plain = measured(None, options, likelihoods=True)
    # What is measured of the model as it is says nothing of a retrieval by likelihoods.
    retrieved = plain.pop("book-retrieval/books", {})
    rows = [row(metric, [plain], metric) for metric in MEASURES]
    rows.append(row("untrained encoder, cosine", [{"book-retrieval/books": retrieved}], ""))
    if not options.quick:
        rows.append(row("BM25", [measured(BM25, options, likelihoods=False)], ""))
    whole: dict[str, Any] = {"plain": plain}
    for name in options.only or list(ARMS):
        models = [trained(name, seed, options) for seed in options.seeds]
        whole[name] = [measured(model, options, likelihoods=False) for model in models]
        rows.append(row(f"trained, {name}", whole[name], "scorer"))
    (options.work / "scorers.json").write_text(json.dumps(whole, indent=1), encoding="utf-8")
    shown = [Column("scorer", "scorer"), *(column for column, _, _ in columns(""))]
    harness.report(options, __file__, [Table("scorers", CAPTION, shown, rows)])


if __name__ == "__main__":
    main()
