"""Train a reranker: the model reads a query and a document together, and a linear layer scores its last state.

Scores of a list learn from a teacher's: the loss is the divergence of their softmax from that of the teacher's, as in
``late``, whose lists it shares (``training/corpus/ranked_lists.py``); pairs are read by ``scoring/reranker.py``.
The adapter and the layer are saved beside the model's own adapters, which encode, infill and score as before.

Shapes: Q lists, C documents of a list, N pairs of a batch, D dimensions of a state.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gerund.errors import DataError, TextError
from gerund.inference.text_ids import text_ids
from gerund.models.reranker_folder import ScoreLayer, write_reranker
from gerund.progress import say_once
from gerund.scoring.reranker import Reranker
from gerund.settings.rerankers import RerankerConfig
from gerund.training.corpus.ranked_lists import RankedList, ShuffledLists, ranked_lists
from gerund.training.losses.vectors import VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses, text_batch
from gerund.training.objectives.contrastive import TextGroup
from gerund.training.objectives.late import divergence
from gerund.training.objectives.settings import PointwiseConfig
from gerund.training.sharding import copy_of

# The document last, so that it is what loses its end where both are too long.
_PIECES = ("Query: {query}\n\nDocument: {document}", "\n\nRelevance:")


def prepare(context: Context, config: PointwiseConfig) -> Objective:
    """Return batches of queries with documents, and the loss on their scores."""
    model = context.model
    settings = RerankerConfig("pieces", _pieces(model.tokenizer), activation="Identity", embeds=True)
    reads = Reranker(model.model, model.tokenizer, replace(settings, max_length=config.length))
    lists = _readable(ranked_lists(context, config, config.length), reads)
    encoder = VectorEncoder(reads.runtime, below=model.below)
    layer = encoder.projection = nn.Linear(model.runtime.state_width, 1)
    # Every score begins at 0, so the first steps go by the teacher alone.
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    batches = PairBatches(ShuffledLists(lists, config.candidates, seed=context.seed(config)), reads, model.pad)
    losses = PointwiseLosses(encoder, config, settings)
    return PointwiseObjective(config.kind, batches, losses, {config.kind: config})


def _pieces(tokenizer: Any) -> tuple[str, ...]:
    """Return the pieces of a pair, after a beginning token where the tokenizer puts one before texts."""
    begins = text_ids(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    first, *others = _PIECES
    return ("{bos}" * begins + first, *others)


def _readable(lists: Sequence[RankedList], reads: Reranker) -> list[RankedList]:
    """Return the lists whose query leaves room for documents."""
    kept = []
    for ranked in lists:
        try:
            list(reads.tokens([(ranked.query, ranked.documents[0])]))
        except TextError:
            continue
        kept.append(ranked)
    if not kept:
        raise DataError("pointwise: every query fills the length, so no document fits next to it; set another length")
    if len(kept) < len(lists):
        say_once(f"pointwise: {len(lists) - len(kept)} queries leave no room for a document, and are left out")
    return kept


class PairBatches(Batches):
    """Lists as pairs of their query with each document."""

    def __init__(self, lists: ShuffledLists, reads: Reranker, pad: int) -> None:
        self.texts, self.reads, self.pad = lists, reads, pad

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the group ``query`` (Q,) with each list's best document, and ``document`` (Q (C - 1),) with others.

        ``teacher`` (Q, C) has the teacher's scores, the best document's first.
        """
        del step
        rows = self.read(first, count)
        best = [(row.query, row.documents[0]) for row in rows]
        others = [(row.query, document) for row in rows for document in row.documents[1:]]
        groups = {"query": self._group(best), "document": self._group(others)}
        groups["query"]["teacher"] = torch.tensor([row.scores for row in rows], dtype=torch.float32)
        return groups

    def _group(self, pairs: Sequence[tuple[str, str]]) -> Batch:
        """Return ``input_ids``, ``real`` and ``pooled`` (N, T), which has the last token alone."""
        batch = text_batch(list(self.reads.tokens(pairs)), self.pad)
        lengths_N = batch["real"].sum(1)
        batch["pooled"] = torch.arange(batch["real"].shape[1]) == lengths_N[:, None] - 1
        batch["identity"] = TextGroup.identities(["\0".join(pair) for pair in pairs])
        return batch


class PointwiseLosses(PairLosses):
    """The divergence of the scores from the teacher's."""

    def __init__(self, encoder: VectorEncoder, config: PointwiseConfig, settings: RerankerConfig) -> None:
        self.heads, self.config, self.settings = encoder, config, settings

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean loss of the lists, and in how many the teacher's best document has the highest score."""
        del gather
        teacher_QC = batch["query"]["teacher"]
        lists = len(teacher_QC)
        scores_N = vectors_ND.float()[:, 0]
        scores_QC = torch.cat([scores_N[:lists, None], scores_N[lists:].unflatten(0, (lists, -1))], dim=1)
        loss = divergence(scores_QC, teacher_QC, self.config.teacher_temperature)
        return loss, int((scores_QC[:, :1] > scores_QC[:, 1:]).all(1).sum())


class PointwiseObjective(Objective):
    """A reranker that is ready to be trained."""

    def extra_files(self) -> Iterator[Callable[[Path], None]]:
        """Yield what writes the reranker's settings and layer beside the model."""
        losses: Any = self.losses
        tensors = [copy_of(part) for part in losses.heads.projection.parameters()]

        def write(folder: Path) -> None:
            write_reranker(folder, losses.settings)
            ScoreLayer(*tensors).save(folder)

        yield write
