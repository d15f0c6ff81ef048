"""trec_eval's measures, written down from their definitions."""

from collections.abc import Mapping
from math import log2


def ranking(scores: Mapping[str, float]) -> list[str]:
    """Best first; of equals the greater id."""
    return sorted(scores, key=lambda one: (scores[one], one), reverse=True)


def measures(scores: Mapping[str, float], grades: Mapping[str, int]) -> dict[str, float]:
    """Return the measures of one query: relevant from grade 1 on, gain the grade itself."""
    ranked = ranking(scores)
    relevant = [one for one, grade in grades.items() if grade > 0]
    hits = [rank for rank, one in enumerate(ranked, start=1) if one in relevant]
    gains = [max(grades.get(one, 0), 0) for one in ranked[:10]]
    ideal = sorted((grade for grade in grades.values() if grade > 0), reverse=True)[:10]
    return {
        "ndcg_at_10": _dcg(gains) / _dcg(ideal) if ideal else 0.0,
        "recall_at_10": _share(sum(rank <= 10 for rank in hits), len(relevant)),
        "recall_at_100": _share(sum(rank <= 100 for rank in hits), len(relevant)),
        "mrr_at_10": 1 / hits[0] if hits and hits[0] <= 10 else 0.0,
        "mrr_at_1000": 1 / hits[0] if hits else 0.0,
        "map_at_1000": _share(sum(place / rank for place, rank in enumerate(hits, start=1)), len(relevant)),
    }


def mean(by_query: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each measure over queries."""
    return {name: sum(one[name] for one in by_query) / len(by_query) for name in by_query[0]}


def _dcg(gains: list[int]) -> float:
    return sum(gain / log2(rank + 1) for rank, gain in enumerate(gains, start=1))


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
