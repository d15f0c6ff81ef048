"""Which runtime computes a model: torch, or on a CPU the packed network, usually of a GGUF file.

Knows: what each runtime can do. Does not know: how either does it.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from gerund.errors import ConfigError, GerundError
from gerund.gguf_file import read_file
from gerund.models import gguf_tokenizer
from gerund.models.architectures import NoHead
from gerund.models.library_calls import checked_tokenizer, guarded
from gerund.models.light_runtime import ARITHMETIC, PLAIN, not_packed
from gerund.models.sources import Source
from gerund.models.weights import weight_files
from gerund.packed.adapter import read_adapter
from gerund.packed.shape import read_folder_shape, read_shape
from gerund.progress import say_once
from gerund.settings.encoder import EncoderConfig, Job
from gerund.settings.model_spec import ModelSpec


def takes_packed(
    spec: ModelSpec,
    source: Source,
    device: torch.device,
    encoder: EncoderConfig,
    adapters: Mapping[Job, Path],
) -> Path | None:
    """Return the GGUF file or the folder whose packed network computes a model; None where torch does.

    A packed network generates several times as fast as torch, and encodes as fast as torch in float32.

    Raises:
        ConfigError: it is asked for, and cannot; the message says why.
    """
    usual = source.gguf is not None and device.type == "cpu" and bool(set(read_file(source.gguf).types) - PLAIN)
    if spec.weights is not None and spec.runtime == "torch":
        raise ConfigError(f"weights {spec.weights} are for runtime packed; leave them out for torch")
    asked = spec.runtime == "packed" or spec.weights is not None
    if not asked and (spec.runtime == "torch" or not usual):
        return None
    reason = _unfit(spec, source, device)
    if reason is None:
        files = weight_files(source)
        path = source.gguf or source.folder or (files[0].parent if files else None)
        reason = _unread(path, encoder, adapters) if path is not None else "it has no safetensors weights"
        if reason is None:
            return path
    if asked:
        raise ConfigError(f"runtime packed cannot be used for {source.name}: {reason}")
    if spec.dtype == "auto":  # whoever names a type of torch's expects torch
        say_once(f"{source.name} is unpacked, and computed by torch: {reason}")
    return None


def with_runtime(spec: ModelSpec, packed: Path | None) -> ModelSpec:
    """Return a spec that says which runtime was taken."""
    return spec.model_copy(update={"runtime": "torch" if packed is None else "packed"})


def _unfit(spec: ModelSpec, source: Source, device: torch.device) -> str | None:
    """Return why a packed network is not what is asked for."""
    if spec.weights is not None and source.gguf is not None and set(read_file(source.gguf).types) - PLAIN:
        return f"its weights are quantized already; leave out weights {spec.weights}"
    if device.type != "cpu":
        return f"it is for CPUs, not for {device.type}"
    if spec.dtype != "auto":
        return f"it has no dtype {spec.dtype}; leave it out, or take runtime torch"
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        return "it needs ONNX Runtime; pip install 'gerund[packed]'"
    if source.adapted is not None and source.adapted.merged:
        return "an adapter is merged into its weights; take runtime torch"
    return None


def _unread(path: Path, encoder: EncoderConfig, adapters: Mapping[Job, Path]) -> str | None:
    """Return why a packed network cannot compute a file or folder, or read a text as asked."""
    try:
        shape = read_folder_shape(path) if path.is_dir() else read_shape(read_file(path))
        for folder in set(adapters.values()):
            read_adapter(folder, shape)
    except GerundError as error:
        return str(error)
    return not_packed(encoder.resolved(shape.n_layers), encoder)


def pack(
    model: PreTrainedModel,
    path: Path,
    files: Sequence[Path],
    spec: ModelSpec,
    adapters: Mapping[str, Path],
    *,
    cut: int | None,
) -> PreTrainedModel:
    """Return a model without weights as the packed network of a file or folder, with as many threads as torch.

    ``files`` have the weights; ``adapters`` are folders by name; ``cut`` is how many layers read texts to embed, if
    not all.

    Raises:
        ConfigError: the model has no output head.
        ModelError: the file is damaged.
    """
    from gerund.models.packed_model import packed_model
    from gerund.packed.network import PackedNetwork

    if isinstance(model.get_output_embeddings(), NoHead):
        raise ConfigError(f"runtime packed cannot be used for {path}: it was saved without an output head")
    network = guarded(
        *(f"cannot load {path}", PackedNetwork.open, path),
        threads=torch.get_num_threads(), adapters=adapters, weights=spec.weights, files=files, cut=cut,
    )  # fmt: skip
    quantized = spec.weights or ("int8" if path.is_dir() else None)
    arithmetic = ARITHMETIC if quantized is None else f"{ARITHMETIC}, weights {quantized}"
    object.__setattr__(model, "packed_in", (tuple(files), arithmetic))
    return packed_model(model, network)


def packed_in(model: PreTrainedModel) -> tuple[tuple[Path, ...], str]:
    """Return what the vectors of a packed model depend on: its files, and the arithmetic."""
    files, arithmetic = vars(model)["packed_in"]
    return files, arithmetic


def read_skeleton(path: Path, config: PreTrainedConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model in a GGUF file, without weights, and its tokenizer."""
    file = read_file(path)
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = guarded(f"cannot load {path}", AutoModelForCausalLM.from_config, config)
    tokenizer = checked_tokenizer(gguf_tokenizer.read_tokenizer(file))
    model.generation_config.eos_token_id = gguf_tokenizer.ends_of(file, tokenizer) or None
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer
