"""T5 encoders with a projection as scorers: RankGen's published checkpoints, read without their code."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5Config, T5EncoderModel, T5PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.utils import cached_file

from gerund.attention import interface
from gerund.attention.probe import refuse_unsound
from gerund.checks import check_texts
from gerund.errors import ModelError, TextError
from gerund.inference.encode.runtime import ENOUGH, SAMPLE_TEXTS, smallest_cosine
from gerund.inference.text_ids import encode_texts, text_ids
from gerund.models import loading
from gerund.models.library_calls import guarded
from gerund.models.loading import read_tokenizer, refuse_incomplete, refuse_larger_tokenizer
from gerund.models.sources import Source, find
from gerund.models.weights import (
    INDEX,
    WEIGHTS,
    refuse_absurd_config,
    refuse_other_shapes,
    stored_shapes,
    weight_files,
    without_implementations,
)
from gerund.scoring.dual_encoder import VectorScorer

ARCHITECTURE = "T5EncoderWithProjection"
# The published checkpoints bring no tokenizer; theirs is that of the T5 they were made from, which its width tells.
_TOKENIZERS = {768: "google/t5-v1_1-base", 1024: "google/t5-v1_1-large", 2048: "google/t5-v1_1-xl"}


class T5EncoderWithProjection(T5PreTrainedModel):
    """The first state of a T5 encoder, projected (RankGen, section 2.2; the released model).

    Parameters are called as in the published checkpoints: ``t5_encoder.*`` and ``projection.weight``.
    """

    config_class = T5Config

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.t5_encoder = T5EncoderModel(config)
        _fuse_gelu(self.t5_encoder)
        self.projection = nn.Linear(config.d_model, config.d_model, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the encoder's own."""
        embeddings: nn.Module = self.t5_encoder.get_input_embeddings()
        return embeddings

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return one vector a text, ``(B, D)``."""
        hidden_BTD = self.t5_encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        vectors_BD: Tensor = self.projection(hidden_BTD[:, 0])
        return vectors_BD


def _fuse_gelu(module: nn.Module) -> None:
    """Compute GELU's tanh form in one kernel; transformers spells it out in eight, a fifth of the encoder's time."""
    for name, child in module.named_children():
        if isinstance(child, NewGELUActivation):
            setattr(module, name, nn.GELU(approximate="tanh"))
        else:
            _fuse_gelu(child)


def read_t5_scorer(
    source: Source, dtype: torch.dtype | None = None
) -> tuple[T5EncoderWithProjection, PreTrainedTokenizerBase]:
    """Load model and tokenizer, in evaluation mode.

    A published checkpoint has its weights in a file of the old format, of which only tensors are read.
    """
    name, local = source.where, source.local_only
    what = f"cannot read the config of {source.name}"
    data, _ = guarded(what, T5Config.get_config_dict, name, local_files_only=local)
    refuse_absurd_config(data, source.name)
    config = guarded(what, T5Config.from_dict, without_implementations(data))
    if ARCHITECTURE not in (config.architectures or []):
        raise ModelError(f"{source.name} is no T5 scorer: its config does not name {ARCHITECTURE}")
    _check_weights(source, config)
    model, info = guarded(
        f"cannot load {source.name}",
        T5EncoderWithProjection.from_pretrained,
        name,
        config=config,
        dtype="auto" if dtype is None else dtype,
        output_loading_info=True,
        weights_only=True,
        local_files_only=local,
    )
    refuse_incomplete(info, source.name)
    refuse_unsound(model, source.name)
    tokenizer = _tokenizer(source, name, config)
    refuse_larger_tokenizer(tokenizer, model, source)
    return model.eval(), tokenizer


def _check_weights(source: Source, config: T5Config) -> None:
    """Refuse safetensors files outside the folder, and sizes that are not theirs."""
    if source.folder is not None and not any((source.folder / name).is_file() for name in (WEIGHTS, INDEX)):
        return
    shapes = stored_shapes(source.name, weight_files(source))
    refuse_other_shapes(lambda: T5EncoderWithProjection(config), config, shapes, source.name)


def _tokenizer(source: Source, name: str, config: T5Config) -> PreTrainedTokenizerBase:
    # Without files transformers would make an empty tokenizer up.
    options: dict[str, Any] = {"local_files_only": source.local_only, "_raise_exceptions_for_missing_entries": False}
    what = f"cannot load the tokenizer of {source.name}"
    if not any(
        guarded(what, cached_file, name, filename=file, **options) for file in ("tokenizer.json", "spiece.model")
    ):
        other = _TOKENIZERS.get(config.d_model)
        if source.folder is not None or other is None:
            hint = f"; put the files of {other} into the folder" if other else ""
            raise ModelError(f"{source.name} has no tokenizer{hint}")
        name = other
    return read_tokenizer(source, name)


# Tokens of a batch, padding included.
_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class Side:
    """How prefixes, or continuations, are tokenized."""

    marker: str  # put before each text

    limit: int  # maximum tokens, marker and end token included

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
        source, where = find(model), loading.pick_device(device)
        loaded, tokenizer = read_t5_scorer(source, loading.pick_dtype(dtype))
        scorer = cls(loaded.to(where), tokenizer, source.name)
        quick = where.type == "cuda" or interface.cpu_has_bfloat16()
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
