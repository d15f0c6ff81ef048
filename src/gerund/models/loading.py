"""From a path or a hub id to a model and its tokenizer, safely and with plain errors.

Knows: transformers' loading, safetensors, the embedded default. Does not know: plans.
"""

import json
import logging
import warnings
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from gerund.errors import ConfigError, ModelError, unknown_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_NAME = "the embedded default"
_LARGEST_SHARD = "48GB"


@dataclass(frozen=True)
class Source:
    """Where a model comes from: ``folder`` for a local one, else the hub id ``name``."""

    name: str
    folder: Path | None


def find(model: str | Path | None) -> Source:
    """Tell a folder from a hub id; None is the embedded default.

    Raises:
        ModelError: a path that is no folder, or a folder without a model.
    """
    if model is None:
        folder = Path(str(resources.files("gerund") / "assets" / "default"))
        if not (folder / "config.json").is_file():
            raise ModelError("this installation has no embedded default model; name a model")
        return Source(DEFAULT_NAME, folder)
    text = str(model)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            what = (
                "an adapter; give its base model and adapter="
                if (path / "adapter_config.json").is_file()
                else "no model"
            )
            raise ModelError(f"{path} holds {what}: it has no config.json")
        return Source(text, path)
    if path.exists():
        raise ModelError(f"{path} is a file; give the folder of a model")
    looks_local = isinstance(model, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or not text
    if looks_local:
        raise ModelError(f"there is no folder {text!r}")
    return Source(text, None)


def read(source: Source, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, in evaluation mode.

    Args:
        source: from ``find``.
        dtype: type of the weights; None for the checkpoint's own.

    Raises:
        ModelError: not a decoder-only language model, no safetensors, no tokenizer, or not to be had.
    """
    name = str(source.folder or source.name)
    config = _config(source, name)
    _refuse_other_kinds(config, name)
    model = _guarded(
        f"cannot load {source.name}",
        AutoModelForCausalLM.from_pretrained,
        name,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
        local_files_only=source.folder is not None,
    )
    tokenizer = _guarded(
        f"cannot load the tokenizer of {source.name}",
        AutoTokenizer.from_pretrained,
        name,
        local_files_only=source.folder is not None,
    )
    model.eval()
    return model, tokenizer


def stored_dtype(source: Source) -> torch.dtype | None:
    """Return the type that the checkpoint's config names; None when it names none."""
    config = _config(source, str(source.folder or source.name))
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def pick_device(device: str) -> torch.device:
    """Return the device: ``auto`` takes a GPU where there is one.

    Raises:
        ConfigError: an unknown device, or one that this machine lacks.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return chosen


def pick_dtype(dtype: str) -> torch.dtype | None:
    """Return the torch type of a name; None for ``auto``.

    Raises:
        ConfigError: an unknown name.
    """
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def cpu_has_bfloat16() -> bool:
    """Whether this processor computes in bfloat16 itself, rather than slowly pretending to."""
    checks = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return bool(torch.backends.mkldnn.is_available()) and any(check() for check in checks if check is not None)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], folder: Path) -> None:
    """Write weights, config and tokenizer as transformers does, so that plain transformers reads them."""
    model.save_pretrained(folder, state_dict=state, max_shard_size=_LARGEST_SHARD)
    tokenizer.save_pretrained(folder)


def _config(source: Source, name: str) -> Any:
    return _guarded(
        f"cannot read the config of {source.name}",
        AutoConfig.from_pretrained,
        name,
        local_files_only=source.folder is not None,
    )


def _refuse_other_kinds(config: Any, name: str) -> None:
    kind = config.model_type
    architectures = getattr(config, "architectures", None) or []
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name} is a {kind} model, not a decoder-only language model")
    if any(word in name_ for name_ in architectures for word in ("ForMaskedLM", "ForPreTraining")):
        raise ModelError(f"{name} is an encoder ({architectures[0]}); give a decoder-only language model")


def _guarded(what: str, load: Any, name: str, **options: Any) -> Any:
    """Call a loader of transformers, quietly, and turn whatever it raises into one sentence."""
    noisy = logging.getLogger("transformers")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load(name, trust_remote_code=False, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is not run"
        elif "safetensors" in reason and "No such file" not in reason:
            reason = f"no usable safetensors weights ({reason})"
        raise ModelError(f"{what}: {reason[:300]}") from error
    except Exception as error:
        # safetensors and huggingface_hub have exceptions outside the built-in ones.
        raise ModelError(f"{what}: {' '.join(str(error).split())[:300]}") from error
    finally:
        noisy.setLevel(level)
        if bars:
            hf_logging.enable_progress_bar()
