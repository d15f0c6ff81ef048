"""T5 encoders as scorers: RankGen's published checkpoints, and others of their layout.

Knows: markers, where long texts are cut. Does not know: how a checkpoint is read.
"""

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
    """How the texts of one side are read.

    Attributes:
        marker: put before each.
        most: tokens at most, marker and end token included.
        keep: which end of a longer text is kept. ``start`` cuts behind the first tokens, end token and all, as the
            released code does; ``end`` keeps marker, last tokens and end token.
    """

    marker: str
    most: int
    keep: Literal["start", "end"] = "start"

    def read(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a text."""
        [found] = encode_texts(tokenizer, [self.marker + text], most=self.most if self.keep == "start" else None)
        ids = found.ids
        if len(ids) <= self.most:
            return ids
        if self.keep == "start":
            return ids[: self.most]
        marker = text_ids(tokenizer, self.marker, specials=False)
        return [*marker, *ids[len(marker) - self.most :]]


# Of the released encoder; the paper has special tokens.
PREFIX = Side("pre ", 512)
CONTINUATION = Side("suffi ", 128)


class T5Scorer(VectorScorer):
    """A T5 encoder with a projection, as RankGen published four of them.

    Args:
        model: the encoder.
        tokenizer: its tokenizer.
        name: what results call it.
        prefix: how prefixes are read.
        continuation: how continuations are read; the space that begins them is left out.
        autocast: compute in this type while the weights keep theirs; None computes in theirs.
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
        self.model = model
        self.tokenizer = tokenizer
        self.autocast = autocast

    @classmethod
    def load(cls, model: str | Path, *, dtype: str = "auto", device: str = "auto") -> "T5Scorer":
        """Load a folder or a hub id, such as ``kalpeshk2011/rankgen-t5-base-all``.

        Args:
            model: where it is.
            dtype: as in ``gerund.load``: with ``auto``, weights in float32 are read in bfloat16 where that is quick
                and the vectors hardly change.
            device: as in ``gerund.load``.

        Raises:
            ModelError: there is no such checkpoint, or it has another layout.
            ConfigError: an unknown name, or int8.
        """
        if dtype == "int8":
            raise ConfigError(f"{model} is a scorer of T5's encoder, which is not read in 8 bits; take another dtype")
        source, where = find(model), loading.pick_device(device)
        loaded, tokenizer = read_t5_scorer(source, loading.pick_dtype(dtype))
        own = cls(loaded.to(where), tokenizer, source.name)
        quick = where.type == "cuda" or matmul_attention.cpu_has_bfloat16()
        if dtype == "auto" and quick and loaded.dtype == torch.float32 and own._bfloat16_cosine() >= ENOUGH:
            own.autocast = torch.bfloat16
        return own

    def _bfloat16_cosine(self) -> float:
        """Return the smallest cosine between vectors computed in bfloat16 and in float32."""
        exact_ND = self.encode(SAMPLE_TEXTS, PREFIX)
        half = T5Scorer(self.model, self.tokenizer, self.name, autocast=torch.bfloat16)
        return smallest_cosine(exact_ND, half.encode(SAMPLE_TEXTS, PREFIX))

    @torch.no_grad()
    def encode(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Return the vectors of texts, ``(n, D)`` float32.

        Raises:
            TextError: a text is no string, or blank.
        """
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
