"""Telling people's continuations from a model's (RankGen, section 2.1 and appendix C.3: Tables 2, 13, 22).

Knows: documents, passages, a model that writes. Does not know: how the two are scored.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gerund.data.passages import Passage, cut_passages, cut_to_words, split_sentences
from gerund.errors import ConfigError, DataError
from gerund.evaluation.scored_task import files_of
from gerund.evaluation.sets.choices import Choice
from gerund.evaluation.sets.corpora import read_texts, test_files
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.evaluation.tasks.suffix_identification import SuffixTask
from gerund.inference.generate.generation import continuations_of_length
from gerund.settings.sampling import Sampling

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

# Words of a continuation at least.
_FEWEST = 10
_OWN = "own"
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class HumanOrGenerated(SuffixTask):
    """Accuracy of scoring the continuation in the document above a generated one of about as many words.

    Both are whole sentences. Half of the points is chance; a model's likelihoods come to less, as they like what is
    generated. Metrics are those of ``suffix-identification``.
    """

    kind: ClassVar[str] = "human-or-generated"

    samples: int = field(default=200, metadata={"help": "Prefixes at most, spread over the documents."})
    writer: str = field(
        default="default",
        metadata={"help": "Writes what is told apart: default, own (the model that is measured), a folder or hub id."},
    )
    top_p: float = field(default=0.9, metadata={"help": "It samples from the likeliest tokens of this probability."})
    prefix_words: int = field(default=256, metadata={"help": "Words of a prefix, about."})
    continuation_words: int = field(default=128, metadata={"help": "Words of a continuation at most."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.prefix_words, self.continuation_words) < _FEWEST:
            raise ConfigError(f"{self.kind} needs prefixes and continuations of at least {_FEWEST} words")

    @property
    def also_read(self) -> tuple[Path, ...]:
        """The files of scorer and writer."""
        return (*super().also_read, *files_of(self.writer))

    def choices(self, count: int, config: EvaluationConfig, system: Generates) -> list[Choice]:
        """Return prefixes from all documents in turn, each with the true and the generated continuation."""
        path = self.scored_file(config)
        rng = np.random.default_rng(config.seed)
        passages = tuple(islice(self._passages(path, count, rng), count))
        if not passages:
            raise DataError(f"{path}: no document is long enough for prefixes of {self.prefix_words} words")
        sampling = Sampling(temperature=1.0, top_p=self.top_p)
        if self.writer == _OWN:
            texts = _written(system.lm, passages, sampling, config.seed)
        else:
            state = tuple((path, path.stat().st_mtime_ns) for path in files_of(self.writer))
            texts = _written_by(self.writer, state, passages, sampling, config.seed)
        found = []
        for passage, text in zip(passages, texts, strict=True):
            # As long as true ones may be, or length alone would give it away; one that is too short is left out.
            generated = cut_to_words(text, passage.words, fewest=_FEWEST, most=self.continuation_words)
            if generated:
                gold = int(rng.integers(2))
                pair = (passage.continuation, generated)
                found.append(Choice((passage.prefix,), pair if gold == 0 else pair[::-1], gold))
        if not found:
            raise DataError(f"{path}: {self.writer} writes no {_FEWEST} words behind any of the prefixes")
        return found

    def _passages(self, path: Path, count: int, rng: np.random.Generator) -> Iterator[Passage]:
        """Yield passages, one of every document before any gives another."""
        documents = []
        for text in read_texts(path):
            found = cut_passages(
                text,
                split_sentences(text),
                prefix_words=self.prefix_words,
                continuation_words=(_FEWEST, self.continuation_words),
            )
            documents.append([found[place] for place in rng.permutation(len(found))[:count].tolist()])
        for turn in zip_longest(*documents):
            yield from (one for one in turn if one is not None)


# One writer serves all systems of an evaluation.
@lru_cache(maxsize=4)
def _written_by(
    writer: str, state: tuple[tuple[Path, int], ...], passages: tuple[Passage, ...], sampling: Sampling, seed: int
) -> list[str]:
    del state  # of its files: a folder that was trained anew is another writer
    from gerund.entry import load

    lm = load(None if writer == "default" else writer, attention="causal")
    return _written(lm, passages, sampling, seed)


def _written(lm: "LanguageModel", passages: tuple[Passage, ...], sampling: Sampling, seed: int) -> list[str]:
    return continuations_of_length(
        lm.model,
        lm.tokenizer,
        [one.prefix for one in passages],
        [f" {one.continuation}" for one in passages],
        sampling,
        batch_size=_BATCH,
        key=(seed,),
    )


def find(folder: Path) -> list[Task]:
    """Return a task for every corpus of documents with a test file."""
    return [
        HumanOrGenerated(name=f"human-or-generated/{name}", files=files) for name, files in test_files(folder).items()
    ]
