"""Retrieval of quotations: which passage of a book does a literary claim quote?

RELiC (Thai et al. 2022); RankGen, section 4.4 (Table 8).

Knows: claims, candidates. Does not know: how candidates are scored.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.evaluation.candidates import rank_of, recalls, scores_of
from gerund.evaluation.contender import Contender
from gerund.evaluation.scorers import ScoredTask
from gerund.evaluation.sets.quotations import Quotations, quotation_files, read_quotations
from gerund.evaluation.task import Score, Settings, Side, Task
from gerund.progress import progress

_BOTH = "both"
_SIDES = ("before", _BOTH)


@dataclass(frozen=True, kw_only=True)
class QuotationRetrieval(ScoredTask):
    """Recall at 1, 3, 5, 10 and 50 of the quotation among all stretches of the book with as many sentences.

    The files are ``quotations/NAME.test.json`` in RELiC's layout. The query is what the claim says before the
    quotation. Scored as ``book-retrieval`` is. ``settings.limit`` counts claims.
    """

    kind: ClassVar[str] = "quotation-retrieval"
    side: ClassVar[Side] = "representation"
    takes_bm25: ClassVar[bool] = True

    context: str = field(
        default="before",
        metadata={"help": "The query: the sentences before the quotation, or both, those behind it too."},
    )

    def __post_init__(self) -> None:
        if self.context not in _SIDES:
            raise ConfigError(f"quotation-retrieval.context is {' or '.join(_SIDES)}, not {self.context!r}")

    def run(self, contender: Contender, settings: Settings) -> Score:
        """Rank the candidates of every claim.

        Raises:
            DataError: the file is malformed, or has no claim with a text before its quotation.
            ConfigError: there is no such scorer.
        """
        path = self.scored_file(settings)
        scorer = self.judge(contender, settings)
        ranks: list[int] = []
        sizes: list[int] = []
        silent = 0
        with progress(None, self.name, show=settings.show_progress) as advance:
            for group in read_quotations(path):
                asked = [
                    (query, right) for query, right in zip(self._queries(group), group.right, strict=True) if query
                ]
                silent += len(group.right) - len(asked)
                if settings.limit is not None:
                    asked = asked[: settings.limit - len(ranks)]
                if asked:
                    queries = [query for query, _ in asked]
                    scores = scores_of(contender, scorer, queries, group.candidates, self.prompt(settings))
                    ranks += [rank_of(row, right) for row, (_, right) in zip(scores, asked, strict=True)]
                    sizes += [len(group.candidates)] * len(asked)
                advance(len(asked))
        if not ranks:
            raise DataError(f"{path}: no claim has a text before its quotation")
        notes = [f"{np.mean(sizes):.0f} candidates a claim, on the mean"]
        if silent:
            notes.append(f"claims without a text to search with, which are left out: {silent}")
        return Score("recall_at_1", recalls(ranks), size=len(ranks), notes=tuple(notes))

    def _queries(self, group: Quotations) -> list[str]:
        if self.context == _BOTH:
            return [f"{one} {other}".strip() for one, other in zip(group.before, group.after, strict=True)]
        return [one.strip() for one in group.before]


def find(folder: Path) -> list[Task]:
    """Return a task for every file in ``quotations/``."""
    return [
        QuotationRetrieval(name=f"quotation-retrieval/{name}", files=files)
        for name, files in quotation_files(folder).items()
    ]
