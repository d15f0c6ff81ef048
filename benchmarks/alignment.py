"""Queries of one encoder on the vectors of another: an index that a teacher has made, asked by its students.

    python benchmarks/alignment.py --data ../shared/data --work WORK --teacher ./all-MiniLM-L6-v2 [--set steps=100]

The students are the bundled model, and one that `align-default` trains on the documents of the collections, each once,
by sentences; no query and no judgement is used. Documents are whole, as each encoder cuts them; the search is exact.
The work folder keeps what was trained.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gerund
import harness
import study
from gerund.models.vectors import unit
from gerund.quantization import nearest
from gerund.training.corpus.teachers import open_teacher
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from index import Set
from results import Cell, Column, Row, Table, mean_of

TEACHER, BUNDLED, ALIGNED = "the teacher", "the bundled model", "aligned by the documents"
_DEPTH = 100

# Vectors of a collection's queries and documents, all of length 1.
Vectors = tuple[np.ndarray, np.ndarray]


def aligned(options: Any, sets: list[Set], seed: int) -> Path:
    """Return the folder of a student of the collections' documents, trained unless it is there."""
    output = options.work / f"aligned-{seed}"
    if not (output / "model").is_dir():
        texts = options.work / "documents.txt"
        texts.write_text("\n".join(" ".join(one.text.split()) for own in sets for one in own.documents), "utf-8")
        overrides = [f"output={output}", f"seed={seed}", f"data.cache={options.work / 'cache'}", *options.set]
        train(load_recipe("align-default", overrides, texts=[texts], teacher=str(options.teacher)), resume=True)
    return output / "model"


def vectors_of(encoder: Any, own: Set) -> Vectors:
    """Return an encoder's vectors of a collection."""
    queries = encoder.encode([own.queries[query] for query in own.judgements])
    documents = encoder.encode([one.text for one in own.documents])
    return unit(queries), unit(documents)


def score(own: Set, queries: np.ndarray, documents: np.ndarray) -> float:
    """Return nDCG@10 of an exact search."""
    found = zip(own.judgements, *nearest(queries, documents, "float32", _DEPTH), strict=True)
    return own.ndcg(
        {
            query: {own.documents[row].source: float(score) for row, score in zip(rows, scores, strict=True)}
            for query, rows, scores in found
        }
    )


def rows_of(own: Set, teacher: Vectors, students: dict[str, list[Vectors]]) -> list[Row]:
    """Return the rows of one collection."""
    best = score(own, *teacher)
    rows: list[Row] = [{"set": own.name, "queries": TEACHER, "documents": TEACHER, "ndcg": best, "reference": True}]
    for name, of_seeds in students.items():
        asked = [score(own, queries, teacher[1]) for queries, _ in of_seeds]
        asking = [score(own, teacher[0], documents) for _, documents in of_seeds]
        alone = [score(own, queries, documents) for queries, documents in of_seeds]
        near = [[float((a * b).sum(1).mean()) for a, b in zip(one, teacher, strict=True)] for one in of_seeds]
        rows += [
            {"set": own.name, "queries": name, "documents": TEACHER, **_cells(asked, best),
             "cosine": mean_of([own for own, _ in near])},
            {"set": own.name, "queries": TEACHER, "documents": name, **_cells(asking, best),
             "cosine": mean_of([own for _, own in near])},
            {"set": own.name, "queries": name, "documents": name, **_cells(alone, best)},
        ]  # fmt: skip
    return rows


def _cells(found: list[float], best: float) -> dict[str, Cell]:
    return {"ndcg": mean_of(found), "ratio": mean_of([one / best for one in found]) if best else math.nan}


def main(argv: list[str] | None = None) -> None:
    """Train what is missing, and measure."""
    parser = study.parser(__doc__)
    parser.add_argument("--teacher", required=True, help="a folder of sentence-transformers, or of gerund")
    parser.add_argument("--sets", default="cranfield,medline,cisi")
    parser.add_argument("--documents", type=int, help="at most so many of a collection")
    parser.add_argument("--queries", type=int, help="at most so many of a collection")
    small = {
        "sets": "medline", "documents": 20, "queries": 5, "seeds": [0],
        "set": ["steps=2", "schedule.warmup_steps=1", "objectives.distill.batch_size=4",
                "objectives.distill.word_vectors=20"],
    }  # fmt: skip
    options = harness.parse(parser, argv, quick=small)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    read = [Set.read(name, options) for name in options.sets.split(",")]
    # A document without text has no vector.
    sets = [replace(own, documents=[one for one in own.documents if one.text.strip()]) for own in read]
    models = {BUNDLED: ["default"], ALIGNED: [str(aligned(options, sets, seed)) for seed in options.seeds]}
    teacher = open_teacher(str(options.teacher))
    students = {name: [gerund.load(folder) for folder in folders] for name, folders in models.items()}
    rows = []
    for own in sets:
        found = {name: [vectors_of(lm, own) for lm in of_seeds] for name, of_seeds in students.items()}
        rows += rows_of(own, vectors_of(teacher, own), found)
    columns = [
        Column("queries", "queries by"), Column("documents", "documents by"), Column("set", "collection"),
        Column("ndcg", "nDCG@10", "%", 1, "higher"), Column("ratio", "of the teacher's own", "", 2),
        Column("cosine", "mean cosine to the teacher's vectors", "", 2),
    ]  # fmt: skip
    caption = "Queries and documents by a teacher and its students, whole documents, exact search."
    harness.report(options, __file__, [Table("alignment", caption, columns, rows)], libraries=["sentence-transformers"])


if __name__ == "__main__":
    main()
