"""Validate a checkpoint's files before loading: safetensors headers, index files, sizes in its config.

transformers reads checkpoints with quantized weights, by the ``quant_method`` in their config. Before it does, what is
missing on this machine is reported, with a way on.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from gerund.checks import read_json
from gerund.errors import DataError, ModelError
from gerund.gguf_file import parts_of
from gerund.models.library_calls import guarded
from gerund.models.sources import Source

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SAFE = ".safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# What a config calls its layers, and more of them than any model has.
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers")
_MOST_LAYERS = 10_000
# transformers makes a name for each of them, used or not.
_LABELS = "num_labels"
_MOST_LABELS = 1_000_000

Shapes = dict[str, tuple[int, ...]]


def weight_files(source: Source, named: Any = None) -> list[Path]:
    """Return the files of a checkpoint's weights; those of a hub id are downloaded.

    Returns none for a hub id without safetensors, of which the hub may have a converted copy. ``named`` is the file
    that its config names.
    """
    name = source.name
    if source.gguf is not None:
        return parts_of(source.gguf)
    if named is not None:
        _demand_safe(name, "config.json", named, (_SAFE, f"{_SAFE}.index.json"))
    first = _local(source, named or WEIGHTS)
    if first is None and named is None:
        first = _local(source, INDEX)
    if first is not None and first.name.endswith(".json"):
        return [_local(source, shard) or _missing(name, shard) for shard in shards_of(first)]
    if first is None and source.folder is not None:
        pickled = sorted(path.name for pattern in _PICKLED for path in source.folder.glob(pattern))
        what = f", only {pickled[0]}, which may run code when it is opened; convert it first" if pickled else ""
        raise ModelError(f"cannot load {name}: it has no safetensors weights{what}")
    return [] if first is None else [first]


def shards_of(index: Path) -> list[str]:
    """Return the files that an index names, each once."""
    try:
        data = read_json(index)
    except DataError as error:
        raise ModelError(str(error)) from error
    names = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{index} is no index of weights: it has no weight_map")
    if not isinstance(data.get("metadata"), dict):
        raise ModelError(f'{index} lacks the field metadata, without which it is not read; add "metadata": {{}} to it')
    for shard in names.values():
        _demand_safe(str(index.parent), index.name, shard, (_SAFE,))
    return sorted(set(names.values()))


def stored_shapes(name: str, files: list[Path]) -> Shapes:
    """Return the shape of every tensor in safetensors files, from their headers."""
    shapes: Shapes = {}
    for path in files:
        with guarded(f"cannot load {name}", safe_open, str(path), framework="pt") as file:
            shapes |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    return shapes


# By these a config chooses how attention and experts are computed: also by code that is fetched from the hub.
_COMPUTED_BY = frozenset(
    ("attn_implementation", "_attn_implementation", "_attn_implementation_internal",
     "experts_implementation", "_experts_implementation", "_experts_implementation_internal",
     "_attn_implementation_autoset")
)  # fmt: skip


def without_implementations(data: Any) -> Any:
    """Return a config as it lies on the disk, without what says by which code the model is computed.

    With the package ``kernels`` transformers would fetch that code from the hub and run it.

    >>> without_implementations({"attn_implementation": "a/b", "text_config": {"_attn_implementation": "a/b", "n": 1}})
    {'text_config': {'n': 1}}
    """
    if isinstance(data, dict):
        return {key: without_implementations(value) for key, value in data.items() if key not in _COMPUTED_BY}
    return [without_implementations(value) for value in data] if isinstance(data, list) else data


def refuse_fetched_code(source: Source) -> None:
    """Refuse a checkpoint for another library whose settings would have code fetched from the hub and run."""
    if source.folder is None:
        files = [_local(source, name) for name in ("config.json", "sentence_bert_config.json")]
    else:
        files = [*source.folder.glob("*config.json"), *source.folder.glob("*/*config.json")]
    for path in files:
        if path is not None and any("/" in str(value) for value in _implementations(read_json(path))):
            raise ModelError(
                f"{source.name} cannot be opened: {path.name} has its attention computed by code of the hub"
            )


def _implementations(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from [value] if key in _COMPUTED_BY else _implementations(value)


def refuse_absurd_config(data: Any, name: str) -> None:
    """Refuse a config whose counts no model has, before lists of that length are made of it."""
    if not isinstance(data, dict):
        raise ModelError(f"cannot read the config of {name}: config.json holds no object")
    for part in (data, *(value for value in data.values() if isinstance(value, dict))):
        for key, most in (*((key, _MOST_LAYERS) for key in LAYER_COUNTS), (_LABELS, _MOST_LABELS)):
            value = part.get(key)
            if isinstance(value, int | float) and value > most:
                raise ModelError(f"cannot load {name}: its config.json says {key} {value}, which no model has")


def refuse_other_shapes(build: Callable[[], nn.Module], config: Any, shapes: Shapes, name: str) -> None:
    """Refuse a config that asks for other tensors than the weights have, before memory is taken for them."""
    # Packed weights have other shapes.
    if not shapes or getattr(config, "quantization_config", None) is not None:
        return
    parts = (config, config.get_text_config(decoder=True))
    for layers in (getattr(part, key, None) for part in parts for key in LAYER_COUNTS):
        if isinstance(layers, int) and layers > len(shapes):
            raise ModelError(
                f"cannot load {name}: its config.json says {layers} layers, and its weights are {len(shapes)} tensors"
            )

    def planned() -> tuple[str, Shapes]:
        with torch.device("meta"), no_init_weights():  # only shapes count
            model = build()
        expected_shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
        return str(getattr(model, "base_model_prefix", "")), expected_shapes

    prefix, expected_shapes = guarded(
        f"cannot load {name}: its config.json describes no model that can be built", planned
    )
    for key, shape in expected_shapes.items():
        # A body that was saved alone lacks the prefix that its parts have in the full model.
        spellings = (key, key.removeprefix(f"{prefix}."), f"{prefix}.{key}")
        stored = next((shapes[spelling] for spelling in spellings if spelling in shapes), shape)
        if stored != shape:
            expected, actual = ("x".join(map(str, numbers)) for numbers in (shape, stored))
            raise ModelError(
                f"cannot load {name}: its config.json makes {key} {expected}, and its weights have {actual}"
            )


def added_tokens(source: Source, ids: Mapping[str, int]) -> int:
    """Return how many tokens there are at least by those that a tokenizer's files add or name; 0 without any."""

    def content(file: str) -> dict[str, Any]:
        path = _local(source, file)
        data = None if path is None else read_json(path)
        return data if isinstance(data, dict) else {}

    numbers = [token["id"] for token in content("tokenizer.json").get("added_tokens") or ()]
    numbers += [number for number in content("added_tokens.json").values() if type(number) is int]
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in content(file).items():
            if key == "added_tokens_decoder" and isinstance(value, dict):
                numbers += [int(number) for number in value if number.isdecimal()]
            if key.endswith(("_token", "_special_tokens")):
                numbers += [ids[token] for token in _declared(value) if token in ids]
    return max(numbers, default=-1) + 1


def _declared(value: Any) -> Iterator[str]:
    """Yield the tokens of a declaration: a text, one with settings, or several of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and isinstance(value.get("content"), str):
        yield value["content"]
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _declared(item)


def _local(source: Source, file: str) -> Path | None:
    """Return the local path of a checkpoint's file; None where there is none."""
    if source.folder is not None:
        path = source.folder / file
        return path if path.is_file() else None
    path = guarded(
        f"cannot load {source.name}",
        cached_file,
        source.name,
        file,
        **source.hub_options,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def _missing(name: str, shard: str) -> Path:
    raise ModelError(f"cannot load {name}: its index of weights names {shard}, which is not there")


def _demand_safe(name: str, where: str, file: Any, endings: tuple[str, ...]) -> None:
    """Refuse a name that leads out of the folder, or to a file whose opening could run code."""
    if not isinstance(file, str) or "\0" in file:
        raise ModelError(f"cannot load {name}: its {where} names {file!r} as a file of weights")
    if file.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", file) or ".." in re.split(r"[/\\]", file):
        raise ModelError(f"cannot load {name}: its {where} names weights outside the folder: {file}")
    if not file.endswith(endings):
        raise ModelError(f"cannot load {name}: its {where} names {file}; only safetensors files are opened")


@dataclass(frozen=True)
class Packing:
    """A way to store quantized weights.

    Attributes:
        name: the name that its authors use.
        packages: modules that transformers needs to read it, and the names pip knows them by where these differ.
        needs_gpu: whether only a CUDA GPU computes with it.
        is_unpacked: whether transformers unpacks it to plain weights where no GPU computes with it.
    """

    name: str
    packages: tuple[tuple[str, str], ...] = ()
    needs_gpu: bool = False
    is_unpacked: bool = False


def _of(*modules: str, **pip_names: str) -> tuple[tuple[str, str], ...]:
    return tuple((module, pip_names.get(module.replace(".", "_"), module)) for module in modules)


PACKINGS: dict[str, Packing] = {
    "fp8": Packing("FP8", is_unpacked=True),
    "mxfp8": Packing("MXFP8", is_unpacked=True),
    "mxfp4": Packing("MXFP4", is_unpacked=True),
    "metal": Packing("MLX's integers", is_unpacked=True),
    "bitnet": Packing("BitNet"),
    "gptq": Packing("GPTQ", _of("optimum", "gptqmodel")),
    "awq": Packing("AWQ", _of("gptqmodel")),
    "auto-round": Packing("AutoRound", _of("auto_round", auto_round="auto-round")),
    "bitsandbytes": Packing("bitsandbytes", _of("bitsandbytes")),
    "compressed-tensors": Packing(
        "compressed-tensors", _of("compressed_tensors", compressed_tensors="compressed-tensors")
    ),
    "torchao": Packing("torchao", _of("torchao")),
    "quanto": Packing("Quanto", _of("optimum.quanto", optimum_quanto="optimum-quanto")),
    "quark": Packing("Quark", _of("quark", quark="amd-quark")),
    "aqlm": Packing("AQLM", _of("aqlm", aqlm="aqlm[cpu]")),
    "hqq": Packing("HQQ", _of("hqq"), needs_gpu=True),
    "vptq": Packing("VPTQ", _of("vptq"), needs_gpu=True),
    "spqr": Packing("SpQR", _of("spqr_quant", spqr_quant="spqr_quant[gpu]"), needs_gpu=True),
    "higgs": Packing("HIGGS", _of("flute", flute="flute-kernel"), needs_gpu=True),
    "eetq": Packing("EETQ", _of("kernels"), needs_gpu=True),
    "fbgemm_fp8": Packing("FBGEMM's FP8", _of("fbgemm_gpu", fbgemm_gpu="fbgemm-gpu"), needs_gpu=True),
    "fp_quant": Packing("FP-Quant", _of("fp_quant"), needs_gpu=True),
    "fouroversix": Packing("Four Over Six", _of("fouroversix"), needs_gpu=True),
    "sinq": Packing("SINQ", _of("sinq"), needs_gpu=True),
}
"""Every packing that transformers reads from a folder, by ``quant_method``; docs/how-to/get-a-model.md lists them."""

_WAY_ON = "use a GGUF file of this model, or its checkpoint without quantization"
_MLX = ("group_size", "bits")


def packing_of(stored: Any, name: str) -> Packing | None:
    """Return how a checkpoint's weights are packed, by its config.json; None if they are not.

    Raises:
        ModelError: this machine can't run it, or transformers doesn't read it.
    """
    settings = _settings(stored)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        method = "bitsandbytes"
    if method is None and all(key in settings for key in _MLX):
        raise ModelError(f"cannot load {name}: its weights are packed for MLX, which gerund does not read; {_WAY_ON}")
    packing = PACKINGS.get(method) if isinstance(method, str) else None
    if packing is None:
        known = ", ".join(PACKINGS)
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {method!r} (quantization_config in config.json), which "
            f"is not one of {known}; {_WAY_ON}"
        )
    absent = [pip for module, pip in packing.packages if not _is_installed(module)]
    if packing.needs_gpu and not torch.cuda.is_available():
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {packing.name}, which only a CUDA GPU computes with, "
            f"and there is none; {_WAY_ON}"
        )
    if absent:
        raise ModelError(
            f"cannot load {name}: its weights are quantized as {packing.name}, which needs {' and '.join(absent)} (pip "
            f"install {' '.join(absent)}); or {_WAY_ON}"
        )
    return packing


def _settings(stored: Any) -> dict[str, Any] | None:
    """Return the quantization settings of a config, which multimodal models may have in the config of their text."""
    if not isinstance(stored, dict):
        return None
    for part in (stored, stored.get("text_config")):
        if isinstance(part, dict):
            for key in ("quantization_config", "quantization"):
                if isinstance(part.get(key), dict):
                    settings: dict[str, Any] = part[key]
                    return settings
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False
