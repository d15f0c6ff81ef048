"""``results.json``: everything that was measured, in an order that makes two runs differ only where they do.

Knows: results, JSON, versions. Does not know: where they come from.
"""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from gerund.evaluation.results import Result
from gerund.evaluation.task import EvaluationConfig
from gerund.reporting.comparison import Comparison
from gerund.reporting.significance import NOTHING, Significance
from gerund.version import __version__

FORMAT = 3
_PACKAGES = ("torch", "transformers", "tokenizers", "mteb", "scikit-learn", "scipy", "bm25s", "lm-eval")
# What no two runs have in common, at the end of the document.
_FLEETING = ("seconds", "date")


def results_json(comparison: Comparison, config: EvaluationConfig, significance: Significance = NOTHING) -> str:
    """Return the document as text.

    ``scores`` are sorted by side, kind, task and system; how long each took and when stands in ``runs``, so that
    all else is the same when the same is measured again.

    Args:
        comparison: what was measured.
        config: of the last evaluation; each score has its own, too.
        significance: intervals of scores, and differences.
    """
    ordered = sorted(comparison.results, key=lambda result: (result.side, result.kind, result.task, result.system))
    document = {
        "format": FORMAT,
        "gerund": __version__,
        "packages": versions(),
        "config": config.to_dict(),
        "systems": [
            {"label": column.label, "description": shareable(column.description)} for column in comparison.columns
        ],
        "scores": [_lasting(result) for result in ordered],
        "intervals": significance.intervals_of(ordered),
        "differences": significance.to_dict(),
        "runs": [
            {"task": result.task, "system": result.system, **{name: getattr(result, name) for name in _FLEETING}}
            for result in ordered
        ],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True, default=str) + "\n"


def versions() -> dict[str, str]:
    """Return the versions of the packages that scores may depend on, of those that are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def shareable(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description that says nothing about the machine: of a model's folder only the last name.

    >>> shareable({"model": "/data/models/tiny", "pooling": "mean"})
    {'model': 'tiny', 'pooling': 'mean'}
    >>> shareable({"model": "Qwen/Qwen3-0.6B"})
    {'model': 'Qwen/Qwen3-0.6B'}
    """
    return {**description, "model": bare_name(str(description.get("model", "")))}


def bare_name(name: str) -> str:
    """Return a hub id as it is, and of a path only the last part."""
    path = PureWindowsPath(name) if "\\" in name else PurePosixPath(name)
    is_path = path.is_absolute() or name.startswith((".", "~")) or len(path.parts) > 2
    return path.name if is_path else name


def _lasting(result: Result) -> dict[str, Any]:
    left_out = {*_FLEETING, "description"}
    return {name: value for name, value in result.to_dict().items() if name not in left_out}
