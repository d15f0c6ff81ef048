"""``gerund.load``: from a name and a few settings to a proven ``LanguageModel``.

Knows: which setting wins (the call, then ``gerund.json``, then the default). Does not know: how models are
read from the disk, or what is done with them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gerund.attention.plan import AttentionPlan
from gerund.config import EncoderConfig, read_encoder_config
from gerund.language_model import LanguageModel
from gerund.models import loading


def load(
    model: str | Path | None = None,
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
) -> LanguageModel:
    """Load a decoder-only language model that also encodes.

    What is left out comes from the folder's ``gerund.json``; without one the plan is ``mask0-bidir`` with k
    about 0.45 of the layers, and the pooling is the mean.

    Args:
        model: a folder, a hub id, or None for the embedded default.
        attention: the name of a plan (``gerund.PLAN_NAMES``) or a plan.
        k: number of converted layers.
        k0: for ``mask0+bidir``, how many of them hide the first token.
        sink_tokens: how many first tokens a ``mask0`` plan hides.
        pooling: ``mean``, ``weighted-mean``, ``last`` or ``first``.
        prompt: default prompt of ``encode``.
        adapter: a PEFT folder, active only while encoding.
        dtype: ``auto`` keeps the checkpoint's type and encodes float32 weights in bfloat16 where the processor
            computes in it and the vectors' cosine to float32 is at least 0.999; or a type by name, for both.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``, ...
        max_length: longest text in tokens.

    Returns:
        The model, proven to obey the plan in every layer.

    Raises:
        ModelError: no such model, or not a decoder-only one.
        UnsupportedModelError: the plan does not reach every layer.
        ConfigError: an unknown name or impossible setting.

    >>> lm = gerund.load()
    >>> scores = lm.similarity(["a dog in the garden"], ["the dog is outside", "interest rates rose"])
    >>> scores.shape
    (1, 2)
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
    return LanguageModel(
        loaded.to(where),
        tokenizer,
        encoder,
        name=source.name,
        adapter_folder=folder,
        autocast=dtype == "auto" and (where.type == "cuda" or loading.cpu_has_bfloat16()),
    )
