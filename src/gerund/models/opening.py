"""From a name and a few settings to what a reader of texts is made of.

Knows: which setting wins (the call, then ``gerund.json``, then the default). Does not know: how models are read from
the disk, or what is done with them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.plan import AttentionPlan
from gerund.config import EncoderConfig, read_encoder_config
from gerund.models import loading


@dataclass(frozen=True)
class Opened:
    """A model in memory, and how it is read.

    Attributes:
        model: the Hugging Face model, on its device.
        tokenizer: its tokenizer.
        encoder: how it is read as an encoder.
        name: what it was loaded from.
        settings: the folder of its settings, where there is one on this machine.
        adapter_folder: a PEFT adapter that is active only while encoding.
        autocast: whether to encode in bfloat16 where that is quick and near enough.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: EncoderConfig
    name: str
    settings: Path | None
    adapter_folder: Path | None
    autocast: bool

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of ``TextEncoder``."""
        return {"name": self.name, "adapter_folder": self.adapter_folder, "autocast": self.autocast}


def open_model(
    model: str | Path | None,
    *,
    attention: str | AttentionPlan | None = None,
    k: int | None = None,
    k0: int | None = None,
    sink_tokens: int | None = None,
    pooling: str | None = None,
    prompt: str | None = None,
    adapter: str | Path | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_length: int | None = None,
) -> Opened:
    """Load a model with its settings; the arguments are those of ``gerund.load``.

    Raises:
        ModelError: no such model, or not a decoder-only one.
        ConfigError: an unknown name or impossible setting.
    """
    weights_type = loading.pick_dtype(dtype)
    where = loading.pick_device(device)
    source = loading.find(model)
    settings = loading.settings_folder(source)
    stored = None if settings is None else read_encoder_config(settings)
    encoder = stored or EncoderConfig()
    given = {"pooling": pooling, "prompt": prompt, "max_length": max_length}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    encoder = replace(encoder, attention=encoder.attention.with_changes(attention, k, k0, sink_tokens), **changes)
    folder = None if adapter is None else Path(adapter)
    if folder is None and encoder.adapter is not None and settings is not None:
        folder = settings / encoder.adapter
    if weights_type is None and where.type == "cpu" and not loading.cpu_has_bfloat16():
        # Half precision would be emulated, slowly; float32 holds the same values.
        stored_type = loading.stored_dtype(source)
        weights_type = torch.float32 if stored_type in (torch.bfloat16, torch.float16) else None
    loaded, tokenizer = loading.read(source, weights_type)
    return Opened(
        loaded.to(where),
        tokenizer,
        encoder,
        source.name,
        settings,
        folder,
        autocast=dtype == "auto" and (where.type == "cuda" or loading.cpu_has_bfloat16()),
    )
