"""Results made up for the report's tests."""

from gerund.evaluation.run import Result
from gerund.evaluation.task import Score

SETTINGS = {"seed": 0, "limit": None, "prompts": {}, "split": "test"}
SIDES = {"perplexity": "generation", "writing": "generation", "ner": "tokens"}
UNITS = {"perplexity": "bits", "writing": "fraction", "infilling": "perplexity"}


def made(task, system, value, *, spread=None, notes=(), date="2025-01-01T00:00:00+00:00", model="tiny", **changes):
    """Return a result with as much filled in as a test does not care about."""
    kind = task.partition("/")[0]
    description = {
        "model": model,
        "attention": {"name": "mask0-bidir", "k": 2, "k0": None},
        "pooling": "mean",
        "prompt": "",
        "fingerprint": f"{model}-{system}",
        "weights": f"weights of {model}",
    }
    fields = {
        "task": task,
        "kind": kind,
        "side": SIDES.get(kind, "representation"),
        "unit": UNITS.get(kind, "percent"),
        "higher_is_better": kind not in ("perplexity", "infilling"),
        "reads_plan": kind not in ("perplexity", "writing"),
        "system": system,
        "description": {"model": "bm25"} if system == "bm25" else description,
        "score": Score("main", {"main": value, "other": value / 2}, spread, 5 if spread else 1, 100, tuple(notes)),
        "options": {},
        "config": SETTINGS,
        "key": f"{task}-{system}",
        "seconds": 1.5,
        "date": date,
        "version": "0.1.0",
    }
    return Result(**{**fields, **changes})


def several():
    """Return three systems and BM25 on both sides, with spreads, ties, gaps and notes."""
    values = {
        "sts/one": (0.41, 0.52, 0.52),
        "sts/two": (0.30, 0.35, 0.40),
        "retrieval/one": (0.20, 0.31, 0.30, 0.52),
        "retrieval/two": (0.10, 0.21, 0.20, 0.62),
        "classification/one": (0.60, 0.65, None),
        "ner/one": (0.50, 0.61, 0.60),
        "perplexity/one": (1.25, 1.25, 1.10),
        "writing/one": (0.05, 0.05, 0.07),
    }
    names = ("causal", "mask0-bidir k=2", "other: causal", "bm25")
    return [
        made(
            task,
            name,
            value,
            spread=0.0123 if task.startswith("classification") else None,
            notes=("The sets overlap",) if task == "sts/one" else (),
        )
        for task, row in values.items()
        for name, value in zip(names, row, strict=False)
        if value is not None
    ]
