"""From a path or a hub id to a model and its tokenizer, safely and with plain errors.

Knows: transformers' loading, safetensors, the embedded default. Does not know: plans.
"""

import json
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as hf_logging

from gerund.config import CONFIG_FILE, DEFAULT_MODEL
from gerund.errors import ConfigError, ModelError, unknown_name
from gerund.models.encoder_decoder import SEQ2SEQ

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_NAME = "the embedded default"
_LARGEST_SHARD = "48GB"
# What lies beside the weights for our own use.
_BESIDE = ("adapter*/*", "scorer.*", "head.*")
# What a checkpoint consists of; other weight formats, images and code stay behind.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README*"]
_NOT_COPIED = (
    "pytorch_model.bin.index.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    # A scorer or a head is trained for one reading, and another may be put beside the copy.
    "scorer.json",
    "head.json",
)

# How near to the name of the embedded default a slip in it is.
_SLIP = 0.75

_save_lock = threading.Lock()
_quiet_lock = threading.Lock()
_quiet_depth = 0
_before_quiet = (logging.WARNING, logging.WARNING, True)


@dataclass(frozen=True)
class Source:
    """Where a model comes from: ``folder`` for a local one, else the hub id ``name``."""

    name: str
    folder: Path | None


def find(model: str | Path | None) -> Source:
    """Tell a folder from a hub id; None and ``default`` are the embedded default.

    Raises:
        ConfigError: it is neither a text nor a path.
        ModelError: a path that is no folder, a folder without a model, or all but the name of the embedded default.
    """
    # As a path it may be ./default, which Path writes the same way.
    if model is None or (str(model) == DEFAULT_MODEL and not (isinstance(model, Path) and model.is_dir())):
        folder = Path(str(resources.files("gerund") / "assets" / "default"))
        if not (folder / "config.json").is_file():
            raise ModelError("this installation has no embedded default model; name a model")
        return Source(DEFAULT_NAME, folder)
    if not isinstance(model, str | Path):
        raise ConfigError(f"a model is given by its name or its folder, not as {model!r}")
    text = str(model)
    path = Path(text).expanduser()
    if text and path.is_dir():
        return Source(text, _check_folder(path))
    if text and path.exists():
        raise ModelError(f"{path} is a file; give the folder of a model")
    if isinstance(model, Path) or looks_local(text):
        raise ModelError(f"there is no folder {text!r}")
    # No hub model is called so, and without a network it takes long until that is clear.
    if "/" not in text and get_close_matches(text.lower(), [DEFAULT_MODEL], cutoff=_SLIP):
        raise ModelError(f"there is no folder {text!r}; did you mean {DEFAULT_MODEL}?")
    return Source(text, None)


def looks_local(name: str) -> bool:
    """Return whether a name can only be meant as a place on this machine, so that no hub is asked for it."""
    if name.startswith((".", "/", "~")) or not name:
        return True
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def read(source: Source, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, in evaluation mode.

    Args:
        source: from ``find``.
        dtype: type of the weights; None for the checkpoint's own.

    Raises:
        ModelError: neither a decoder-only language model nor a T5, no safetensors, weights missing, no tokenizer, or
            not to be had.
    """
    name = str(source.folder or source.name)
    config = _config(source, name)
    _refuse_other_kinds(config, name)
    kind = AutoModelForSeq2SeqLM if config.model_type in SEQ2SEQ else AutoModelForCausalLM
    model, found = guarded(
        f"cannot load {source.name}",
        kind.from_pretrained,
        name,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
        output_loading_info=True,
        local_files_only=source.folder is not None,
        trust_remote_code=False,
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(f"{source.name} is an adapter; give its base model, and this folder as the adapter")
    _take_away_missing_head(model, found, source.name)
    refuse_incomplete(found, source.name)
    tokenizer = guarded(
        f"cannot load the tokenizer of {source.name}",
        AutoTokenizer.from_pretrained,
        name,
        local_files_only=source.folder is not None,
        trust_remote_code=False,
    )
    # transformers would write how this tokenizer was loaded into every folder that it is saved in.
    for key in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(key, None)
    model.eval()
    return model, tokenizer


def is_seq2seq(source: Source) -> bool:
    """Whether a model has an encoder of its own beside its decoder.

    Raises:
        ModelError: there is no such model.
    """
    return _config(source, str(source.folder or source.name)).model_type in SEQ2SEQ


def stored_dtype(source: Source) -> torch.dtype | None:
    """Return the type that the checkpoint's config names; None when it names none."""
    config = _config(source, str(source.folder or source.name))
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def own_dtype(source: Source) -> str:
    """Return the name of the checkpoint's type, so that it is loaded in no other; ``auto`` when it names none."""
    stored = stored_dtype(source)
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "auto")


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
    except (RuntimeError, TypeError) as error:  # torch would name all two dozen that it was ever built for
        raise ConfigError(f"device {device!r} cannot be used here; take auto, cpu, cuda (or cuda:1) or mps") from error
    try:
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
    with _save_lock, quiet():
        # save_pretrained notes in the live config which class it saved, and that may be only the model's body.
        before = {key: getattr(model.config, key, None) for key in ("architectures", "dtype")}
        try:
            model.save_pretrained(folder, state_dict=state, max_shard_size=_LARGEST_SHARD)
        finally:
            for key, value in before.items():
                setattr(model.config, key, value)
        tokenizer.save_pretrained(folder)


def settings_folder(source: Source) -> Path | None:
    """Return the folder in which ``gerund.json`` and an adapter would lie; None when a hub model is not to be had."""
    if source.folder is not None:
        return source.folder
    from huggingface_hub import snapshot_download

    what = f"cannot find the settings of {source.name}"
    try:
        return Path(guarded(what, snapshot_download, source.name, allow_patterns=[CONFIG_FILE, *_BESIDE]))
    except ModelError:
        return None  # reading the model will say why


def original_files(source: Source) -> list[Path]:
    """Return the files of a checkpoint that are worth copying: weights, configs, tokenizer, licence.

    Raises:
        ModelError: the files of a hub model are not to be had.
    """
    folder = source.folder
    if folder is None:
        from huggingface_hub import snapshot_download

        folder = Path(
            guarded(f"cannot find the files of {source.name}", snapshot_download, source.name, allow_patterns=_FILES)
        )
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        weights = {"model.safetensors"}
    else:
        weights = {index.name, *json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    others = {path.name for pattern in _FILES for path in folder.glob(pattern) if not path.name.startswith(".")}
    others = {name for name in others if ".safetensors" not in name and name not in (CONFIG_FILE, *_NOT_COPIED)}
    return [folder / name for name in sorted(weights | others) if (folder / name).is_file()]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' bars and chatter until the block ends, whatever other threads do meanwhile."""
    global _quiet_depth, _before_quiet  # noqa: PLW0603
    noisy, hub = logging.getLogger("transformers"), logging.getLogger("huggingface_hub")
    with _quiet_lock:
        _quiet_depth += 1
        if _quiet_depth == 1:
            _before_quiet = (noisy.level, hub.level, hf_logging.is_progress_bar_enabled())
            noisy.setLevel(logging.ERROR)
            hub.setLevel(logging.ERROR)
            hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        with _quiet_lock:
            _quiet_depth -= 1
            if _quiet_depth == 0:
                level, hub_level, bars = _before_quiet
                noisy.setLevel(level)
                hub.setLevel(hub_level)
                if bars:
                    hf_logging.enable_progress_bar()


def _config(source: Source, name: str) -> Any:
    what = f"cannot read the config of {source.name}"
    if source.folder is None:
        what += ", taken as a hub id since there is no such folder"
    return guarded(
        what,
        AutoConfig.from_pretrained,
        name,
        local_files_only=source.folder is not None,
        trust_remote_code=False,
    )


def _refuse_other_kinds(config: Any, name: str) -> None:
    kind = config.model_type
    architectures = getattr(config, "architectures", None) or []
    if kind in SEQ2SEQ:
        if architectures and not architectures[0].endswith("ForConditionalGeneration"):
            raise ModelError(f"{name} is a {architectures[0]}; give a T5 with encoder, decoder and output head")
        return
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    if encoder_decoder or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(f"{name} is a {kind} model, not a decoder-only language model")
    if getattr(config, "is_causal", True) is False:
        raise ModelError(f"{name} is an encoder: its config says is_causal false; give the model it was made from")
    if any(word in name_ for name_ in architectures for word in ("ForMaskedLM", "ForPreTraining")):
        raise ModelError(f"{name} is an encoder ({architectures[0]}); give a decoder-only language model")


def _check_folder(path: Path) -> Path:
    """Return the folder of a model, refusing those that only look like one."""
    is_adapter = (path / "adapter_config.json").is_file()
    if not (path / "config.json").is_file():
        what = "an adapter; give its base model, and this folder as the adapter" if is_adapter else "no model"
        hint = f"; did you mean {path / 'model'}?" if (path / "model" / "config.json").is_file() else ""
        raise ModelError(f"{path} holds {what}: it has no config.json{hint}")
    if is_adapter:
        # transformers would switch it on for good, also while generating.
        raise ModelError(f"{path} holds a model and an adapter; move the adapter into a folder of its own")
    return path


class NoHead(nn.Module):
    """Stands where a checkpoint has no output head: published embedding models are often saved without one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, hidden_BTD: Tensor) -> Tensor:
        """Refuse to turn states into token scores."""
        del hidden_BTD
        raise ModelError(f"{self.name} was saved without an output head: it encodes, but cannot generate")


def _take_away_missing_head(model: PreTrainedModel, found: dict[str, Any], name: str) -> None:
    """Put ``NoHead`` where transformers has made a random head up, when nothing else is missing."""
    head = model.get_output_embeddings()
    lacking = set(found.get("missing_keys") or ())
    own = {key for key, module in model.named_modules() if module is head}
    if head is not None and lacking and all(key.rpartition(".")[0] in own for key in lacking):
        model.set_output_embeddings(NoHead(name))
        found["missing_keys"] = []


def refuse_incomplete(found: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that lacks weights, which transformers would fill with random numbers."""
    lacking = sorted(found.get("missing_keys") or ())
    wrong = sorted(str(item[0] if isinstance(item, tuple) else item) for item in found.get("mismatched_keys") or ())
    for keys, what in ((lacking, "missing from"), (wrong, "of the wrong shape in")):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"cannot load {name}: {keys[0]}{more} {what} its weights")


def guarded(what: str, load: Any, name: str, **options: Any) -> Any:
    """Call a loader of transformers, quietly, and turn whatever it raises into one sentence."""
    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load(name, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            reason = "it needs code of its own, which is not run"
        elif "couldn't connect" in reason or "outgoing traffic has been disabled" in reason:
            offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
            reason = f"it is not in the local cache, and the hub cannot be reached{offline}"
        elif "safetensors" in reason and "No such file" not in reason:
            reason = f"no usable safetensors weights ({reason})"
        raise ModelError(f"{what}: {reason[:300]}") from error
    except Exception as error:
        # safetensors and huggingface_hub have exceptions outside the built-in ones.
        raise ModelError(f"{what}: {' '.join(str(error).split())[:300]}") from error
