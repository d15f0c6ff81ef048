"""Train on ranked lists: token vectors for late interaction, and a reranker, that score documents as a teacher does.

A list is a query, documents and a score of each. The loss is the divergence of the softmax of the student's scores from
that of the teacher's (Santhanam et al. 2022, ColBERTv2). ``late`` scores by the MaxSim of token vectors, and has beside
it the cross entropy of the best document against all documents of the other lists in the batch. In ``pointwise`` the
model reads a query and a document together, by ``scoring/reranker.py``, and a linear layer scores its last state. Its
adapter and layer are saved beside the model's own adapters, which encode, infill and score as before.

Shapes: Q lists, C documents of a list, N texts or pairs of a batch, T tokens, D dimensions of a state, E of a token
vector.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.errors import DataError, TextError
from gerund.inference.text_ids import text_ids
from gerund.models.late_head import LateHead
from gerund.models.reranker_folder import ScoreLayer, write_reranker
from gerund.progress import say_once
from gerund.scoring.reranker import Reranker
from gerund.settings.late import LateConfig
from gerund.settings.rerankers import RerankerConfig
from gerund.training.corpus.ranked_lists import RankedList, ShuffledLists, ranked_lists
from gerund.training.losses.vectors import VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses, text_batch
from gerund.training.objectives.contrastive import TextGroup
from gerund.training.objectives.settings import LateObjectiveConfig, PointwiseConfig
from gerund.training.sharding import copy_of

if TYPE_CHECKING:
    from gerund.inference.encode.runtime import EncoderRuntime


def prepare_late(context: Context, config: LateObjectiveConfig) -> Objective:
    """Return batches of lists, and the loss on them."""
    formatters = [context.formatter(config, marker) for marker in (config.query_marker, config.document_marker)]
    lists = ranked_lists(context, config, config.length - formatters[1].overhead)
    encoder = TokenVectorEncoder(context.model.runtime, config.dimensions, config.length)
    shuffled = ShuffledLists(lists, config.candidates, seed=context.seed(config))
    batches = ListBatches(shuffled, formatters, TextGroup.of(context), config)
    return LateObjective(config.kind, batches, LateLosses(encoder, config), {config.kind: config})


class ListBatches(Batches):
    """Queries and their documents, and which of their tokens have vectors."""

    def __init__(
        self, lists: ShuffledLists, formatters: Sequence[Any], group: TextGroup, config: LateObjectiveConfig
    ) -> None:
        self.texts, self.config, self.group = lists, config, group
        self._queries, self._documents = formatters
        self._special = torch.tensor(sorted(group.runtime.tokenizer.all_special_ids), dtype=torch.long)

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the group ``query`` with the teacher's scores ``teacher`` (Q, C), and the group ``document``."""
        del step
        rows, length = self.read(first, count), self.config.length
        queries = [self._queries.format_text(row.query, length) for row in rows]
        documents = [self._documents.format_text(text, length) for row in rows for text in row.documents]
        groups = {"query": self.group(queries), "document": self.group(documents)}
        for group in groups.values():
            if self.config.counts == "all":
                group["pooled"] = group["real"].clone()
            else:
                group["pooled"] &= ~torch.isin(group["input_ids"], self._special)
        groups["query"]["teacher"] = torch.tensor([row.scores for row in rows], dtype=torch.float32)
        return groups


class TokenVectorEncoder(VectorEncoder):
    """Reads texts as ``encode_multi`` does, with gradients; a text has ``length`` places, zeros where no token is."""

    def __init__(self, runtime: "EncoderRuntime", dimensions: int, length: int) -> None:
        super().__init__(runtime)
        self.dimensions, self.length = dimensions, length
        self.projection = nn.Linear(runtime.state_width, dimensions, bias=False)
        nn.init.orthogonal_(self.projection.weight)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the token vectors ``(B, length E)``, of length 1, one place after the other."""
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            vectors_BTE = functional.normalize(self.projection(hidden_BTD.float()), dim=-1)
        vectors_BTE = vectors_BTE * part["pooled"][:, :, None]
        return functional.pad(vectors_BTE, (0, 0, 0, self.length - vectors_BTE.shape[1])).flatten(1)


class LateLosses(PairLosses):
    """The divergence from the teacher's scores, and in-batch negatives."""

    heads: TokenVectorEncoder

    def __init__(self, encoder: TokenVectorEncoder, config: LateObjectiveConfig) -> None:
        self.heads, self.config = encoder, config

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean loss of the lists, and of how many the student's best document is the teacher's.

        Documents of other processes are no negatives.
        """
        del gather
        teacher_QC = batch["query"]["teacher"]
        lists, candidates = teacher_QC.shape
        vectors_NTE = vectors_ND.float().unflatten(1, (self.heads.length, self.heads.dimensions))
        scores_QN = maxsim_all(vectors_NTE[:lists], vectors_NTE[lists:])
        own_QC = scores_QN.unflatten(1, (lists, candidates))[torch.arange(lists), torch.arange(lists)]
        loss = divergence(own_QC / self.config.temperature, teacher_QC, self.config.teacher_temperature)
        best_Q = teacher_QC.argmax(1)
        if self.config.in_batch and lists > 1:
            loss = loss + self.config.in_batch * self._against_others(scores_QN, best_Q, batch)
        return loss, int((own_QC.argmax(1) == best_Q).sum())

    def _against_others(self, scores_QN: Tensor, best_Q: Tensor, batch: Mapping[str, Batch]) -> Tensor:
        """Return the cross entropy of each best document against the documents of other lists; equal texts are none."""
        lists = len(scores_QN)
        candidates = scores_QN.shape[1] // lists
        places_Q = torch.arange(lists, device=scores_QN.device) * candidates + best_Q
        ids_N = batch["document"]["identity"]
        own_QN = (
            torch.arange(scores_QN.shape[1], device=scores_QN.device)[None] // candidates
            == torch.arange(lists, device=scores_QN.device)[:, None]
        )
        left_out_QN = (own_QN | (ids_N[None] == ids_N[places_Q][:, None])).scatter(1, places_Q[:, None], False)
        return functional.cross_entropy((scores_QN / self.config.temperature).masked_fill(left_out_QN, -1e9), places_Q)


def maxsim_all(queries_QTE: Tensor, documents_NTE: Tensor) -> Tensor:
    """Return the MaxSim of each query and each document ``(Q, N)``; a vector of zeros is no token.

    >>> one = torch.eye(2)[None]
    >>> round(maxsim_all(one, torch.tensor([[[0.6, 0.8], [0.0, 0.0]]])).item(), 3)
    0.7
    """
    cosines_QNTS = torch.einsum("qte,nse->qnts", queries_QTE, documents_NTE)
    cosines_QNTS = cosines_QNTS.masked_fill(~documents_NTE.any(-1)[None, :, None], -1.0)
    real_QT = queries_QTE.any(-1)
    best_QNT = cosines_QNTS.amax(-1) * real_QT[:, None]
    return best_QNT.sum(-1) / real_QT.sum(-1).clamp(min=1)[:, None]


def divergence(scores_QC: Tensor, teacher_QC: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of each list's softmax from that of the teacher's z-scores, 0 where all are equal."""
    apart_QC = teacher_QC - teacher_QC.mean(1, keepdim=True)
    standardized_QC = apart_QC / apart_QC.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
    expected_QC = (standardized_QC / temperature).softmax(1)
    return functional.kl_div(scores_QC.log_softmax(1), expected_QC, reduction="batchmean")


class LateObjective(Objective):
    """Token vectors that are ready to be trained."""

    def extra_files(self) -> Iterator[Callable[[Path], None]]:
        """Yield what writes the projection beside the model."""
        config, losses = cast("LateObjectiveConfig", self.config), cast("LateLosses", self.losses)
        [projection_ED] = (copy_of(part).numpy() for part in losses.heads.projection.parameters())
        yield LateHead(
            LateConfig(config.query_marker, config.document_marker, counts=config.counts), projection_ED
        ).save


# The document last, so that it is what loses its end where both are too long.
_PIECES = ("Query: {query}\n\nDocument: {document}", "\n\nRelevance:")


def prepare_pointwise(context: Context, config: PointwiseConfig) -> Objective:
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
