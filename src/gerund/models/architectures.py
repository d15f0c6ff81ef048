"""Architectures that need special treatment: encoder-decoders, bidirectional decoders, models without a head.

In memory every decoder is causal, and an attention plan alone decides the attention. So the flags by which a config
makes a decoder bidirectional are set aside on loading and written again on saving. What transformers makes of them
differs by architecture and version: ``is_causal`` false is obeyed by most from 5.2 on, and
``use_bidirectional_attention`` by Gemma 3 alone. Under ``is_causal`` false a sliding window counts its own distance
too; Gemma 3 halves its window under the other flag, which its config class has done by then.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from gerund.checks import read_json, write_json
from gerund.errors import ModelError, UnsupportedModelError
from gerund.models.kinds import SEQ2SEQ, is_encoder_decoder


def encoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder of an encoder-decoder."""
    encoder: PreTrainedModel = getattr(model, "encoder", model)
    return encoder


@torch.no_grad()
def copy_weights(encoder: PreTrainedModel) -> None:
    """Copy an encoder's weights, so that the decoder's memory can be freed.

    On a CPU all weights are parts of one memory map of their file, which stays mapped as long as any part is used.
    """
    for weight in encoder.parameters():
        if weight.device.type == "cpu":
            weight.data = weight.detach().clone()


def demand_decoder_only(model: PreTrainedModel, what: str) -> None:
    """Raise ``UnsupportedModelError`` for an encoder-decoder, which cannot do ``what``."""
    if is_encoder_decoder(model):
        raise UnsupportedModelError(
            f"a {model.config.model_type} model is an encoder-decoder and cannot {what}; take a decoder-only model"
        )


IS_CAUSAL = "is_causal"
BIDIRECTIONAL = "use_bidirectional_attention"
_WINDOW = "sliding_window"
_TEXT = "text_config"
# Attribute of a config in memory with the flags of the one on disk.
_KEPT = "gerund_flags"


def set_aside(config: PreTrainedConfig, stored: Mapping[str, Any]) -> None:
    """Make the config of a bidirectional decoder causal, and store its flags; ``stored`` is the config on disk."""
    part: Any = config.get_text_config(decoder=True)
    text = stored.get(_TEXT)
    source = text if part is not config and isinstance(text, Mapping) else stored
    flags = {}
    if getattr(part, IS_CAUSAL, True) is False:
        flags[IS_CAUSAL] = False
        setattr(part, IS_CAUSAL, True)
        if isinstance(getattr(part, _WINDOW, None), int):
            setattr(part, _WINDOW, getattr(part, _WINDOW) + 1)
    if getattr(part, BIDIRECTIONAL, None) is True:
        flags[BIDIRECTIONAL] = True
        setattr(part, BIDIRECTIONAL, False)
    if flags:
        flags |= {_WINDOW: source[_WINDOW]} if _WINDOW in source else {}
        setattr(config, _KEPT, {"part": _TEXT if source is text else "", "stored": flags})


def is_bidirectional(config: PreTrainedConfig) -> bool:
    """Whether the config on the disk lets the decoder attend in both directions."""
    return getattr(config, _KEPT, None) is not None


def restore(config: PreTrainedConfig, path: Path, **changes: Any) -> None:
    """Write the flags that were set aside into the ``config.json`` that transformers has written."""
    kept = getattr(config, _KEPT, None)
    if kept is None and not changes:
        return
    data = read_json(path)
    data.pop(_KEPT, None)
    if kept is not None:
        data.get(kept["part"], data).update(kept["stored"])
    write_json(path, {**data, **changes})


_MERGED = "use sentence-transformers with trust_remote_code"
_BIDIRECTIONAL_CODE = f"a decoder whose attention is its author's code, which gerund never runs; {_MERGED}"
_BY_NAME = {
    "NVEmbedModel": f"which pools by attention of its own in its author's code; {_MERGED}",
    "nvembed": f"which pools by attention of its own in its author's code; {_MERGED}",
    "JinaEmbeddingsV5Model": (
        "which switches adapters in its author's code; take one of its merged repositories, whose names end in "
        "-retrieval, -text-matching, -clustering or -classification"
    ),
    "JinaForRanking": f"a listwise reranker in its author's code; {_MERGED}",
    "embedding_gemma2": "an encoder that does not generate; use sentence-transformers",
    "eurobert": "an encoder that does not generate; use sentence-transformers",
    "LlamaBidirectionalModel": _BIDIRECTIONAL_CODE,
    "llama_bidirec": _BIDIRECTIONAL_CODE,
    "Qwen3BidirectionalModel": _BIDIRECTIONAL_CODE,
    "DeepseekV3BidirectionalModel": _BIDIRECTIONAL_CODE,
    "Lfm2BidirectionalModel": _BIDIRECTIONAL_CODE,
    "bidirectional_pplx_qwen3": _BIDIRECTIONAL_CODE,
    "C2LLMForEmbedding": _BIDIRECTIONAL_CODE,
}


def refuse_by_name(stored: Any, name: str) -> None:
    """Refuse an architecture whose model is its author's code, or an encoder that does not generate, by its name."""
    if not isinstance(stored, dict):
        return
    listed = stored.get("architectures") or []
    for kind in (*(listed if isinstance(listed, list) else ()), stored.get("model_type")):
        if isinstance(kind, str) and kind in _BY_NAME:
            raise ModelError(f"{name}: its config.json says {kind}, {_BY_NAME[kind]}")


def state_width(config: PreTrainedConfig) -> int:
    """Return the size of a model's last hidden states; some of OPT's are projected to that of its embeddings."""
    text = config.get_text_config(decoder=True)
    return int((getattr(text, "word_embed_proj_dim", None) if text.model_type == "opt" else None) or text.hidden_size)


class NoHead(nn.Module):
    """Replaces a missing output head: published embedding models are often saved without one."""

    is_missing = True

    def __init__(self, name: str, why: str = "was saved without an output head", does: str = "encodes") -> None:
        super().__init__()
        self.name = name
        self.why = why
        self.does = does

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Refuse to turn states into token scores."""
        del hidden_BTD
        raise ModelError(f"{self.name} {self.why}: it {self.does}, but cannot generate")


def is_body(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint was saved without a head, by its config."""
    return config.model_type not in SEQ2SEQ and MODEL_MAPPING_NAMES.get(config.model_type) in listed_architectures(
        config
    )


def classifies(config: PreTrainedConfig) -> bool:
    """Whether a checkpoint is one of a sequence classifier, by its config."""
    return any(name.endswith("ForSequenceClassification") for name in listed_architectures(config))


def listed_architectures(config: Any) -> list[str]:
    """Return the class names under ``architectures`` in a config."""
    return list(getattr(config, "architectures", None) or [])
