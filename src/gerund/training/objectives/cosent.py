"""Train on pairs of texts with scores: their cosines learn the order of the scores (CoSENT).

What sentence-transformers trains with its ``CoSENTLoss``. With ``distill`` before it in a recipe it trains that
objective's head too; else the head of the base, where it has one.

Shapes: B pairs, D dimensions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gerund.errors import DataError
from gerund.training.corpus.formatting import InputFormatter
from gerund.training.corpus.pairs import ScoredPair, read_scored_pairs
from gerund.training.corpus.texts import Mixture
from gerund.training.losses.contrastive import cosent, ordered
from gerund.training.losses.vectors import VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses
from gerund.training.objectives.contrastive import TextGroup
from gerund.training.objectives.settings import CosentConfig
from gerund.training.processes import gather_numbers, gather_rows


def prepare(context: Context, config: CosentConfig) -> Objective:
    """Return batches of scored pairs, and CoSENT."""
    pairs = read_scored_pairs(context.files(config.pairs.files), **config.pairs.model_dump(exclude={"files"}))
    if len({pair.score for pair in pairs}) < 2:
        raise DataError("cosent: every pair has the same score, so there is no order to learn")
    batches = ScoredBatches(pairs, context.formatter(config), TextGroup.of(context), config, seed=context.seed(config))
    encoder = VectorEncoder(context.model.runtime, below=context.model.below)
    if context.model.head is not None:
        encoder.projection = context.model.head
    return Objective(config.kind, batches, CosentLosses(encoder, config.temperature), {config.kind: config})


class ScoredBatches(Batches):
    """Scored pairs in shuffled epochs."""

    def __init__(
        self,
        pairs: Sequence[ScoredPair],
        formatter: InputFormatter,
        group: TextGroup,
        config: CosentConfig,
        *,
        seed: int,
    ) -> None:
        self.texts, self.formatter, self.group, self.length = pairs, formatter, group, config.length
        self._order = Mixture([len(pairs)], [1.0], seed=seed)

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``, the first and second texts; the first has ``score`` (B,)."""
        del step
        pairs = [self.texts[self._order.sample(number).item] for number in range(first, first + count)]
        groups = {
            "query": self._group([pair.text1 for pair in pairs]),
            "positive": self._group([pair.text2 for pair in pairs]),
        }
        groups["query"]["score"] = torch.tensor([pair.score for pair in pairs])
        return groups

    def _group(self, texts: Sequence[str]) -> Batch:
        return self.group([self.formatter.format_text(text, self.length) for text in texts])


class CosentLosses(PairLosses):
    """CoSENT over the vectors of a batch."""

    def __init__(self, encoder: VectorEncoder, temperature: float) -> None:
        self.heads, self.temperature = encoder, temperature

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, float]:
        """Return the loss of all pairs, and the share of them in the order of the scores times this process's pairs."""
        first_BD, second_BD = vectors_ND.float().chunk(2)
        cosines_B, scores_B = functional.cosine_similarity(first_BD, second_BD), batch["query"]["score"]
        pairs = len(cosines_B)
        if gather:
            # Every process has the loss of all pairs, of which its own rows take their part of the gradient.
            cosines_B, scores_B = gather_rows(cosines_B[:, None])[0][:, 0], gather_numbers(scores_B)
        loss = cosent(cosines_B, scores_B, temperature=self.temperature)
        return loss, pairs * ordered(cosines_B, scores_B).item()
