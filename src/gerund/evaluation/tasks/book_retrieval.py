"""Retrieval over a book: the continuation of a prefix among all continuations in the same document.

RankGen, appendix C.2 (Table 12).

Knows: documents, passages. Does not know: how candidates are scored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import ClassVar

import numpy as np

from gerund.data.passages import Passage, sample_passages, split_sentences, wrong_for
from gerund.errors import ConfigError, DataError
from gerund.evaluation.scored_task import ScoredTask, rank_of, recalls
from gerund.evaluation.sets.corpora import read_texts, test_files
from gerund.evaluation.systems.base import ScoresCandidates
from gerund.evaluation.systems.bm25 import BM25System
from gerund.evaluation.task import EvaluationConfig, Score, Side, Task
from gerund.progress import progress


@dataclass(frozen=True, kw_only=True)
class BookRetrieval(ScoredTask):
    """Recall at 1, 3, 5, 10 and 50 of the true continuation among those of the same document.

    A document is cut into passages, prefix and continuation, that may overlap, as RankGen's data are made. The
    continuations of all of them are the candidates, but for those that overlap a prefix or its true continuation: these
    stand in the prefix already, or are right in part. Candidates are scored by the model's own scorer or the one that
    is given; without either by the cosine of the encoder's vectors, so that any embedding model can be compared; BM25
    is there too. ``config.limit`` counts prefixes.
    """

    kind: ClassVar[str] = "book-retrieval"
    side: ClassVar[Side] = "representation"
    requires: ClassVar[type] = ScoresCandidates

    samples: int = field(default=200, metadata={"help": "Prefixes at most, spread over the documents."})
    candidates: int = field(default=500, metadata={"help": "Continuations of a document at most."})
    prefix_words: int = field(default=256, metadata={"help": "Words of a prefix at most."})
    continuation_words: int = field(default=128, metadata={"help": "Words of a continuation at most."})

    def __post_init__(self) -> None:
        if min(self.prefix_words, self.continuation_words) < 10:
            raise ConfigError("book-retrieval needs prefixes and continuations of at least 10 words")
        if self.samples < 1 or self.candidates < 2:
            raise ConfigError("book-retrieval needs at least one prefix and two candidates")

    def run(self, system: ScoresCandidates, config: EvaluationConfig) -> Score:
        """Rank the candidates of every prefix.

        Raises:
            DataError: the file is malformed, or no document is long enough.
            ConfigError: there is no such scorer.
        """
        path = self.scored_file(config)
        documents = list(self._documents(path, np.random.default_rng(config.seed)))
        if not documents:
            raise DataError(f"{path}: no document has two prefixes of {self.prefix_words} words with a continuation")
        scorer = system.find_scorer(self.scorer, seed=config.seed)
        wanted = min(self.samples, config.limit or self.samples)
        ranks: list[int] = []
        sizes: list[int] = []
        with progress(len(documents), self.name, show=config.show_progress) as advance:
            for number, passages in enumerate(documents):
                # As many of every document as of the others, one more of the first ones.
                asked = ((one, found) for one in passages if len(found := candidates_of(one, passages)) > 1)
                own = list(islice(asked, len(range(number, wanted, len(documents)))))
                if own:
                    texts = list(dict.fromkeys(one.continuation for one in passages))
                    prefixes = [one.prefix for one, _ in own]
                    scores = system.candidate_scores(prefixes, texts, scorer=scorer, prompt=self.prompt(config))
                    for (_, candidates), row in zip(own, scores, strict=True):
                        ranks.append(rank_of(row[[texts.index(text) for text in candidates]], 0))
                        sizes.append(len(candidates))
                advance(1)
        notes = [f"{np.mean(sizes):.0f} candidates a prefix, on the mean"]
        if scorer is None and not isinstance(system, BM25System):
            notes.append("no scorer: ranked by the cosine of the encoder's vectors")
        return Score("recall_at_1", recalls(ranks), size=len(ranks), notes=tuple(notes))

    def _documents(self, path: Path, rng: np.random.Generator) -> Iterator[list[Passage]]:
        """Yield each document's passages in a random order."""
        for text in read_texts(path):
            found = sample_passages(
                text,
                split_sentences(text),
                rng,
                count=self.candidates,
                prefix_words=self.prefix_words,
                continuation_words=(10, self.continuation_words),
            )
            if any(any(wrong_for(passage, found)) for passage in found):
                yield [found[place] for place in rng.permutation(len(found)).tolist()]


def candidates_of(passage: Passage, passages: Sequence[Passage]) -> list[str]:
    """Return the true continuation of a passage and, behind it, all different wrong ones of its document."""
    wrong = wrong_for(passage, passages)
    others = [one.continuation for one, is_wrong in zip(passages, wrong, strict=True) if is_wrong]
    return list(dict.fromkeys([passage.continuation, *others]))


def find(folder: Path) -> list[Task]:
    """Return a task for every corpus of documents with a test file."""
    return [BookRetrieval(name=f"book-retrieval/{name}", files=files) for name, files in test_files(folder).items()]
