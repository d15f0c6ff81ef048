"""T5 encoders as scorers: RankGen's published checkpoints, and others of their layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from gerund.attention import matmul_attention
from gerund.checks import check_texts
from gerund.errors import ConfigError, TextError
from gerund.inference.encode.runtime import ENOUGH, SAMPLE_TEXTS, smallest_cosine
from gerund.inference.text_ids import encode_texts, text_ids
from gerund.models import loading
from gerund.models.sources import find
from gerund.models.t5_scorer import T5EncoderWithProjection, read_t5_scorer
from gerund.scoring.dual_encoder import VectorScorer

# Tokens of a batch, padding included.
_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Side:
    """How prefixes, or continuations, are tokenized."""

    marker: str
    """Put before each text."""

    limit: int
    """Maximum tokens, marker and end token included."""

    keep: Literal["start", "end"] = "start"
    """Which end of a longer text is kept. ``start`` keeps the first tokens, and loses the end token too, as the
    released code does; ``end`` keeps marker, last tokens and end token."""

    def read(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a text."""
        [encoded] = encode_texts(tokenizer, [self.marker + text], most=self.limit if self.keep == "start" else None)
        ids = encoded.ids
        if len(ids) <= self.limit:
            return ids
        if self.keep == "start":
            return ids[: self.limit]
        marker = text_ids(tokenizer, self.marker, specials=False)
        return [*marker, *ids[len(marker) - self.limit :]]


# As the released encoder; the paper has special tokens.
PREFIX = Side("pre ", 512)
CONTINUATION = Side("suffi ", 128)


class T5Scorer(VectorScorer):
    """A T5 encoder with a projection, as RankGen published four of them.

    The space that begins a continuation is removed. ``autocast`` is the dtype of computation where it is not that of
    the weights.
    """

    def __init__(
        self,
        model: T5EncoderWithProjection,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        *,
        prefix: Side = PREFIX,
        continuation: Side = CONTINUATION,
        autocast: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            name,
            lambda texts: self.encode(texts, prefix),
            lambda texts: self.encode([text.strip() for text in texts], continuation),
        )
        self.model, self.tokenizer, self.autocast = model, tokenizer, autocast

    @classmethod
    def load(cls, model: str | Path, *, dtype: str = "auto", device: str = "auto") -> "T5Scorer":
        """Load a folder or a hub id, such as ``kalpeshk2011/rankgen-t5-base-all``.

        ``dtype`` and ``device`` are those of ``gerund.load``: with ``auto``, float32 weights are computed in bfloat16
        where that is quick and the vectors hardly change.
        """
        if dtype == "int8":
            raise ConfigError(f"{model} is a scorer with a T5 encoder, which doesn't support int8. Pass another dtype.")
        source, where = find(model), loading.pick_device(device)
        loaded, tokenizer = read_t5_scorer(source, loading.pick_dtype(dtype))
        scorer = cls(loaded.to(where), tokenizer, source.name)
        quick = where.type == "cuda" or matmul_attention.cpu_has_bfloat16()
        if dtype == "auto" and quick and loaded.dtype == torch.float32 and scorer._bfloat16_cosine() >= ENOUGH:
            scorer.autocast = torch.bfloat16
        return scorer

    def _bfloat16_cosine(self) -> float:
        """Return the smallest cosine between vectors computed in bfloat16 and in float32."""
        exact_ND = self.encode(SAMPLE_TEXTS, PREFIX)
        half = T5Scorer(self.model, self.tokenizer, self.name, autocast=torch.bfloat16)
        return smallest_cosine(exact_ND, half.encode(SAMPLE_TEXTS, PREFIX))

    @torch.no_grad()
    def encode(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Return the vectors of texts, ``(n, D)`` float32."""
        checked = check_texts(texts)
        for index, text in enumerate(checked):
            if not text.strip():
                raise TextError.about("text", index, "is empty")
        ids = [side.read(self.tokenizer, text) for text in checked]
        vectors = np.zeros((len(ids), self.model.config.d_model), dtype=np.float32)
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        while order:
            # The longest first: it decides how many fit.
            width = len(ids[order[-1]])
            rows = [order.pop() for _ in range(min(len(order), max(1, _BATCH_TOKENS // width)))]
            ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
            real_BT = torch.zeros_like(ids_BT)
            for place, row in enumerate(rows):
                ids_BT[place, : len(ids[row])] = torch.tensor(ids[row])
                real_BT[place, : len(ids[row])] = 1
            device = self.model.device
            with torch.autocast(device.type, dtype=self.autocast, enabled=self.autocast is not None):
                vectors[rows] = self.model(ids_BT.to(device), real_BT.to(device)).float().cpu().numpy()
        return vectors
