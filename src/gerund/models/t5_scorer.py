"""T5 encoders with a projection: the layout of RankGen's published checkpoints, read without their code."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, T5Config, T5EncoderModel, T5PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.utils import cached_file

from gerund.attention.weight_checks import refuse_unsound
from gerund.errors import ModelError
from gerund.models.library_calls import guarded
from gerund.models.loading import read_tokenizer, refuse_incomplete, refuse_larger_tokenizer
from gerund.models.sources import Source
from gerund.models.weights import (
    INDEX,
    WEIGHTS,
    refuse_absurd_config,
    refuse_other_shapes,
    stored_shapes,
    weight_files,
    without_implementations,
)

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


def is_t5_scorer(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of this layout."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and ARCHITECTURE in (config.get("architectures") or [])


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
    model, found = guarded(
        f"cannot load {source.name}",
        T5EncoderWithProjection.from_pretrained,
        name,
        config=config,
        dtype="auto" if dtype is None else dtype,
        output_loading_info=True,
        weights_only=True,
        local_files_only=local,
    )
    refuse_incomplete(found, source.name)
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
    options: dict[str, Any] = {
        "local_files_only": source.local_only,
        "_raise_exceptions_for_missing_entries": False,
    }
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
