"""Pairs of texts of one document that share words: language modelling and contrastive learning in one pass (GUR).

GUR, section III-A, equation 1: ``LM loss + alpha * CL loss``. The encoder reads both sides of a pair with spans
hidden; its states go to the projection head, whose vectors are compared, and to the decoder, which writes what is
hidden. A decoder-only model has the contrastive half alone: its language modelling is an objective of its own beside
this one.

Knows: which texts make a batch, both losses. Does not know: where pairs come from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gerund.inference.encode.runtime import hidden_states
from gerund.training.corpus.pairs import Example, Examples
from gerund.training.losses.contrastive import accuracy, excluded_pairs, info_nce
from gerund.training.losses.gathering import gather_numbers, gather_rows
from gerund.training.objectives.base import Batch, Batches, JointLosses, row_generator
from gerund.training.objectives.contrastive import ContrastiveLosses
from gerund.training.objectives.span_corruption import NOTHING, decoder_loss, with_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.training.corpus.framing import Framing
    from gerund.training.objectives.contrastive import Group
    from gerund.training.objectives.span_corruption import Corruption

TITLE_PROMPT = "document2title: "
"""Put before a text whose title is to be written (GUR, section IV-B)."""


@dataclass(frozen=True)
class Bucket:
    """Pairs of about one length, which make batches of their own (GUR, section IV-B).

    Attributes:
        examples: The pairs.
        length: Longest text in tokens.
        factor: A batch has so many times the objective's batch size.
    """

    examples: Examples
    length: int
    factor: int = 1


class Buckets:
    """Which bucket a step reads: each in proportion to its batches, spread evenly, a pure function of the step.

    Args:
        buckets: One or two.
        batch_size: The objective's.
    """

    def __init__(self, buckets: Sequence[Bucket], batch_size: int) -> None:
        self.buckets = buckets
        batches = [len(bucket.examples) / (bucket.factor * batch_size) for bucket in buckets]
        self._share = batches[0] / sum(batches)

    def __len__(self) -> int:
        """Return how many pairs there are."""
        return sum(len(bucket.examples) for bucket in self.buckets)

    def turn(self, step: int) -> tuple[Bucket, int]:
        """Return the bucket of a step, and how many steps have read it before."""
        before, after = int(step * self._share + 1e-9), int((step + 1) * self._share + 1e-9)
        return (self.buckets[0], before) if after > before else (self.buckets[-1], step - before)


class GurBatches(Batches):
    """Pairs in the order that they are dealt in.

    Args:
        buckets: The pairs, by length.
        batch_size: Pairs of a step.
        framing: Frames texts.
        group: Makes a group of texts into tensors.
        seed: Decides crops and spans.
        corruption: Hides spans; None for a model that only encodes here.
        titles: Frames texts whose title is to be written; None for no such task.
        title_share: So many of the pairs are also read as text and title.
    """

    def __init__(
        self,
        buckets: Buckets,
        batch_size: int,
        framing: "Framing",
        group: "Group",
        *,
        seed: int,
        corruption: "Corruption | None" = None,
        titles: "Framing | None" = None,
        title_share: float = 0.0,
    ) -> None:
        self.texts, self.batch_size, self.framing, self.group = buckets, batch_size, framing, group
        self.seed, self.corruption, self.titles, self.title_share = seed, corruption, titles, title_share

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive`` and, with the task of titles, ``title``."""
        bucket, turn = self.texts.turn(step)
        offset = first - step * self.batch_size  # where this process's share of the batch begins
        begin = (turn * self.batch_size + offset) * bucket.factor
        numbers = range(begin, begin + count * bucket.factor)
        rows = [bucket.examples.row(number) for number in numbers]
        sides = {"query": [row.query for row in rows], "positive": [row.positive for row in rows]}
        groups = {
            name: self._side(texts, numbers, bucket.length, place) for place, (name, texts) in enumerate(sides.items())
        }
        # Spread evenly over the whole batch, so that several processes take those that one would.
        places = range(offset * bucket.factor, (offset + count) * bucket.factor)
        titled = [row for row, k in zip(rows, places, strict=True) if self._titles(k + 1) > self._titles(k)]
        if self.titles is not None and titled:
            groups["title"] = self._titled(titled, bucket.length)
        return groups

    def _titles(self, count: int) -> int:
        """Return how many of the first ``count`` pairs of a batch are read as text and title."""
        return int(self.title_share * count + 1e-9)

    def _side(self, texts: Sequence[str], numbers: range, length: int, side: int) -> Batch:
        framed, targets = [], []
        for text, number in zip(texts, numbers, strict=True):
            rng = row_generator(self.seed + side, number)
            whole = self._cropped(text, length, rng)
            own, target = (whole, []) if self.corruption is None else self.corruption(whole, rng)
            framed.append(own)
            targets.append(target)
        batch = self.group(framed)
        # Which texts are the same is asked of them as they are, not of what is left of them.
        batch["identity"] = self.group.identities(texts)
        return batch if self.corruption is None else with_targets(batch, targets)

    def _cropped(self, text: str, length: int, rng: Any) -> "Tokens":
        """Return a text as the encoder reads it; of a longer one a random stretch (GUR, section III-B, step 5)."""
        whole = self.framing.frame_text(text, None)
        if len(whole) <= length:
            return whole
        places = self.framing.places(whole)
        room = length - (len(whole) - len(places))
        begin = places.start + int(rng.integers(len(places) - room + 1))
        return self.framing.frame(whole.ids[begin : begin + room])

    def _titled(self, rows: Sequence[Example], length: int) -> Batch:
        assert self.titles is not None
        assert self.corruption is not None
        batch = self.group([self.titles.frame_text(row.positive, length + self.titles.room) for row in rows])
        plain = self.framing.tokenizer
        written = [plain(row.query, add_special_tokens=False, verbose=False)["input_ids"][: length - 1] for row in rows]
        return with_targets(batch, [[*ids, self.corruption.end] for ids in written])


class GurLosses(ContrastiveLosses, JointLosses):
    """Symmetric InfoNCE between the sides of the pairs, and what the decoder writes, in one pass of the encoder.

    The arguments are those of :class:`ContrastiveLosses`.
    """

    def counts(self, batch: Mapping[str, Batch]) -> dict[str, int]:
        """Return over how many tokens the decoder's loss is summed; nothing where it writes nothing."""
        if "labels" not in batch["query"]:
            return {}
        return {"lm": sum(int((group["labels"] != NOTHING).sum()) for group in batch.values())}

    def forward(self, model: "PreTrainedModel", part: Batch) -> Tensor:
        """Return the vectors ``(B, D)``, in one pass where ``joint`` reads the same texts under the same dropout."""
        if "labels" not in part:
            return super().forward(model, part)
        return self.vectors(hidden_states(model, part["input_ids"], part["real"], self.plan), part)

    def joint(self, model: "PreTrainedModel", part: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the vectors ``(B, D)`` and, where something is to be written, the decoder's summed loss."""
        hidden_BTD = hidden_states(model, part["input_ids"], part["real"], self.plan)
        vectors_BD = self.vectors(hidden_BTD, part)
        if "labels" not in part:
            return vectors_BD, {}
        return vectors_BD, {"lm": decoder_loss(model, hidden_BTD, part["real"], part["labels"])}

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean over both directions of InfoNCE (equation 2), and how many queries find their positive."""
        identities = [batch[name]["identity"] for name in ("query", "positive")]
        pairs = len(identities[0])
        sides = list(vectors_ND[: 2 * pairs].split(pairs))
        total, right = vectors_ND.new_zeros(()), 0
        for place in (0, 1):
            own_BD, own_ids_B = sides[place], identities[place]
            keys_KD, key_ids_K, first = sides[1 - place], identities[1 - place], 0
            if gather:
                keys_KD, first = gather_rows(keys_KD)
                key_ids_K = gather_numbers(key_ids_K)
            positives_B = first + torch.arange(pairs, device=keys_KD.device)
            excluded_BK = excluded_pairs(own_ids_B, key_ids_K, positives_B)
            options: dict[str, Any] = {"similarity": self.similarity, "excluded_BK": excluded_BK}
            total = total + info_nce(own_BD, keys_KD, positives_B, temperature=self.temperature, **options)
            if place == 0:
                right = int(accuracy(own_BD, keys_KD, positives_B, **options))
        return total / (2 * pairs), right
