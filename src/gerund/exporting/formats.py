"""Write an encoder or a converted checkpoint in one of the export formats; here is what writes ``merged``.

A plain model with the adapter merged into its weights is loaded again, and its vectors and logits are compared with
those of the model with its adapter.

Shapes: N texts or tokens, D dimensions, V vocabulary.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gerund.checks import one_of, place
from gerund.errors import ConfigError, ModelError
from gerund.exporting import added_formats, gguf, onnx, sentence_transformers
from gerund.exporting.hub import add_origin, origin_of_spec, write_card
from gerund.exporting.shared import TEXTS, Export, read_written, with_weights, write_merged
from gerund.inference.encode.batches import encode
from gerund.inference.encode.runtime import EncoderRuntime, smallest_cosine
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.jobs.files import atomic_folder
from gerund.models import loading
from gerund.models.adapters import active_adapter, base_state
from gerund.models.architectures import NoHead
from gerund.models.encoder_settings import write_settings
from gerund.models.origin import CARD, card_fields, is_generated, origin_of
from gerund.models.sources import Source
from gerund.settings.encoder import GGUF_TYPES, ExportFormat, GgufType
from gerund.settings.plan import Direction

# Largest cosine distance of a text or a token. In half precision the merged weights are rounded, too: a single token
# of a small model is 2e-3 away; without the adapter it is 0.5 away.
_NEAR = {torch.float32: 1e-4, torch.float64: 1e-4}
_NEAR_HALF = 2e-2


def write_plain_model(runtime: EncoderRuntime, work: Path, folder: Path) -> Export:
    """Fill ``work`` with the merged model, and verify it."""
    identity = write_merged(runtime, work)
    model, tokenizer = read_written(work, None)
    original = runtime.in_own_type()
    merged = replace(original, model=model, tokenizer=tokenizer, adapter=None)
    kinds = {"vectors": lambda runtime: encode(runtime, _tokens(runtime), show=False), "logits": _logits}
    if isinstance(model.get_output_embeddings(), NoHead):
        del kinds["logits"]
    for kind, compute in kinds.items():
        expected_ND, actual_ND = compute(original), compute(merged)
        distance = 1 - smallest_cosine(expected_ND, actual_ND) if expected_ND.shape == actual_ND.shape else 1.0
        if not distance <= _NEAR.get(runtime.model.dtype, _NEAR_HALF):
            raise ModelError(
                f"the merged model, loaded again, gives other {kind} than the model with its adapter (cosine distance "
                f"{distance:.1g}); load it in float32, or use the adapter as it is"
            )
    return Export(folder, f"gerund.load({str(folder)!r})", fingerprint=identity)


@torch.no_grad()
def _logits(runtime: EncoderRuntime) -> np.ndarray:
    """Return the logits ``(N, V)`` of all tokens under causal attention, each token's centered at 0."""
    rows = []
    with active_adapter(runtime.adapter):
        for item in _tokens(runtime):
            ids = torch.tensor([item.ids], device=runtime.device)
            logits_NV = runtime.model(ids, use_cache=False).logits[0].float()
            rows.append((logits_NV - logits_NV.mean(-1, keepdim=True)).cpu().numpy())
    return np.concatenate(rows)


def _tokens(runtime: EncoderRuntime) -> Sequence[Tokens]:
    input_format = InputFormat(append_eos=runtime.config.append_eos, repeat_text=runtime.plan.repeats_text)
    tokens = [item for item in tokenize(runtime.tokenizer, TEXTS, input_format) if item is not None]
    # Truncated here, since for a short context a warning would be about texts that are not the user's.
    return [replace(item, ids=item.ids[: runtime.max_length]) for item in tokens]


# Each fills the first folder, which is then moved to the second.
_FORMATS: dict[ExportFormat, Callable[..., Export]] = {
    "sentence-transformers": sentence_transformers.write,
    "multi-vector": sentence_transformers.write_multi_vector,
    "merged": write_plain_model,
    "onnx": onnx.write,
    "onnx-int8": partial(onnx.write, eight_bits=True),
    "openvino": onnx.write_openvino,
    "gguf": gguf.write,
    "gguf-embedding": partial(gguf.write, embeds=True),
}

# What they write does not generate, so layers above an early exit are left out.
_ENCODERS_ALONE = ("sentence-transformers", "multi-vector", "onnx", "onnx-int8", "openvino")


def export(
    lm: Any,
    folder: str | Path,
    format: str,
    *,
    type: GgufType | None = None,
    scorer: Any = None,
    overwrite: bool = False,
) -> Export:
    """Write an encoder for other tools; see ``LanguageModel.export``. ``merged`` saves the scorer as well."""
    added = added_formats()
    one_of("format", format, [*_FORMATS, *added])
    check_type(format, type)
    lm = with_weights(lm)
    runtime: EncoderRuntime = lm.runtime
    if not format.startswith("gguf"):  # which generates, regardless of the encoder's settings
        if runtime.why_no_vectors:
            raise ConfigError(runtime.why_no_vectors)
        _refuse_hybrid(runtime)
        if format in _ENCODERS_ALONE:
            runtime = runtime.of_lower_layers()
        runtime.config.refuse_methods(f"an export as {format}")
        runtime.refuse_answers(f"an export as {format}")
    folder = place("the folder to write", folder)
    with atomic_folder(folder, overwrite=overwrite) as work:
        if format not in _FORMATS:
            return Export(folder, str(added[format].load()(lm, work) or ""))
        options: dict[str, Any] = {} if type is None else {"type": type}
        options |= {"late": lm.late} if format == "multi-vector" else {}
        result = _FORMATS[format](runtime, work, folder, **options)
        origin = origin_of_spec(lm._spec)
        if format != "merged":
            add_origin(work / CARD, origin)
            return result
        if scorer is not None:
            scorer.save(work)
        write_card(work, replace(runtime, adapter=None), origin)
    return result


def check_type(format: str, type: str | None) -> None:
    """Refuse a type of weights that isn't one, or that the format doesn't have."""
    if type is None:
        return
    if not format.startswith("gguf"):
        raise ConfigError(f"the type of weights is for GGUF, not for {format}; dtype sets that of other formats")
    one_of("type", type, GGUF_TYPES)


def convert(
    source: Source,
    lm: Any,
    folder: str | Path,
    *,
    more: Mapping[str, Path] | None = None,
    without: Collection[str] = (),
    overwrite: bool = False,
) -> None:
    """Copy a checkpoint byte for byte, and add ``gerund.json`` and the parts of ``lm``, the loaded ``LanguageModel``.

    ``more`` are further files to copy, by their new names, and ``without`` names files that are not copied.
    """
    runtime: EncoderRuntime = lm.runtime
    _refuse_hybrid(runtime)
    runtime.refuse_answers("a conversion")
    with atomic_folder(folder, overwrite=overwrite) as work:
        if source.gguf is not None or (source.adapted is not None and source.adapted.merged):
            loading.save_model(runtime.model, runtime.tokenizer, base_state(runtime.model), work)
        else:
            for path in loading.original_files(source):
                if path.name not in without:
                    shutil.copyfile(path, work / path.name)
        for name, path in (more or {}).items():
            shutil.copyfile(path, work / name)
        write_settings(work, runtime.config, runtime.n_layers, lm.fingerprint(), adapters=lm.adapters)
        card = work / CARD
        if card.is_file() and not is_generated(card_fields(card)):
            card.rename(work / "README.base.md")  # the base's own, which the new card leaves free
        write_card(work, runtime, origin_of(source), adapters=list(lm.adapters.folders))
        for part in (runtime.head, runtime.transform, lm.scorer, lm.late, lm.reranker):
            if part is not None:
                part.save(work)


def _refuse_hybrid(runtime: EncoderRuntime) -> None:
    if any(view.direction is Direction.HYBRID for view in runtime.plan.views):
        raise ConfigError("the plan 'hybrid' fills spans and does not encode; take another plan, such as bidir")
