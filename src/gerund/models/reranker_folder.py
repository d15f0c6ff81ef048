"""Read how a model's folder scores pairs of a query and a document, as a ``RerankerConfig``.

Reads gerund's ``reranker.json``, sentence-transformers' ``LogitScore`` and ``CrossEncoder`` layouts of decoders, and
checkpoints of transformers for sequence classification. Original checkpoints of the yes/no families are known by their
names. Nothing in the folder is executed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from gerund.checks import write_json
from gerund.errors import ConfigError, DataError, ModelError
from gerund.models.architectures import classifies, listed_architectures
from gerund.models.library_calls import guarded
from gerund.models.sentence_transformers_folder import (
    HARMLESS,
    MODULE_FILE,
    MODULES_FILE,
    SETTINGS_FILE,
    TOKENIZER_ARGUMENTS,
    TRANSFORMER_FILE,
    WAY_OUT,
    activation_of,
    checked_length,
    demanded,
    listed_modules,
    read_object,
    refuse_unknown,
    stored_arguments,
    stored_prompts,
)
from gerund.settings.encoder import CONFIG_FILE, FORMAT, read_settings
from gerund.settings.fields import AUTO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import (
    FAMILIES,
    NO_RERANKER,
    RERANKER_FILE,
    RerankerConfig,
    ScoreActivation,
    family_of,
    reranker_folder,
)

RERANKER_WEIGHTS = "reranker.safetensors"
_SCORE = ("score.weight", "score.bias")
_CLASSIFYING, _GENERATING = "sequence-classification", "text-generation"
# Variables of a chat template that would change how its text is tokenized.
_TOKENIZING = {"max_length", "padding", "return_dict", "return_tensors", "restore_suffix", "tokenize", "truncation"}


@dataclass(frozen=True)
class ScoreLayer:
    """The linear layer of a sequence classifier: ``weight_1D`` and ``bias_1``, float32."""

    weight_1D: Tensor
    bias_1: Tensor | None = None

    def save(self, folder: Path) -> None:
        """Write the layer next to ``reranker.json``."""
        tensors = {_SCORE[0]: self.weight_1D, **({} if self.bias_1 is None else {_SCORE[1]: self.bias_1})}
        save_file(tensors, folder / RERANKER_WEIGHTS)


def read_reranker(folder: Path | None, name: str, config: PreTrainedConfig, given: ModelSpec) -> RerankerConfig | None:
    """Return how a model scores pairs; None for one that is no reranker, or that the user opens as an encoder.

    Args:
        folder: the folder of its settings; None for a GGUF file.
        name: the name of its folder, file or hub id.
        config: its config.
        given: the user's settings; ``attention`` or ``pooling`` open it as an encoder.
    """
    if given.reranker == NO_RERANKER:
        return None
    if given.reranker in FAMILIES:
        return _family(str(given.reranker), config)
    if (trained := reranker_folder(given.reranker)) is not None:
        return read_trained(trained)
    saved = None if folder is None else _own(folder)
    if saved is not None and saved.embeds:
        # Its adapter is the model's own, and goes with every plan; an adapter that is given replaces all of them.
        return saved if given.adapter in (None, AUTO_ADAPTER) else None
    if given.reranker is None and (given.attention is not None or given.pooling is not None):
        return None
    stored = _stored(folder, name, config)
    if given.reranker is not None and stored is None:
        raise ModelError(
            f"nothing in {name} says how it scores a query and a document; name its family as reranker: "
            f"{', '.join(FAMILIES)}"
        )
    return stored


def read_trained(folder: Path) -> RerankerConfig:
    """Return the reranker in a folder that goes with other models of the same weights.

    Raises:
        DataError: it has none.
    """
    settings = _own(folder)
    if settings is None or not settings.embeds:
        raise DataError(f"{folder} has no reranker with an adapter of its own; gerund train reranker makes one")
    return settings


def _own(folder: Path) -> RerankerConfig | None:
    """Return what gerund's own file in a folder says; None without it."""
    path = folder / RERANKER_FILE
    return RerankerConfig.from_dict(read_settings(path, "reranker")["reranker"]) if path.is_file() else None


def _stored(folder: Path | None, name: str, config: PreTrainedConfig) -> RerankerConfig | None:
    """Return how a model scores pairs by its folder or its name."""
    if folder is not None and (folder / CONFIG_FILE).is_file():
        return _own(folder)
    family = family_of(name)
    if folder is not None and (folder / MODULES_FILE).is_file():
        stored = _from_modules(folder, config)
    elif classifies(config) or (folder is not None and is_reranker(folder)):
        stored = _without_modules(folder or Path(name), config)
    else:
        return None if family is None else _family(family, config)
    if stored is not None and stored.layout in ("pair", "chat-or-pair") and family is not None:
        # A converted checkpoint scores the text of the original.
        return replace(_family(family, config), activation=stored.activation)
    return stored


def write_reranker(folder: Path, settings: RerankerConfig) -> None:
    """Write ``reranker.json`` into a model's folder."""
    write_json(folder / RERANKER_FILE, {"format": FORMAT, "reranker": settings.to_dict()})


def read_score_layer(folder: Path | None, files: list[Path], name: str, width: int) -> ScoreLayer:
    """Return the layer that scores a pair, from a sequence classifier's weights or next to ``reranker.json``.

    ``width`` is the size of a state. Without the layer transformers would make up random weights.
    """
    file_path = None if folder is None else folder / RERANKER_WEIGHTS
    tensors: dict[str, Tensor] = {}
    for path in [file_path] if file_path is not None and file_path.is_file() else files:
        with guarded(f"cannot load {name}", safe_open, str(path), framework="pt") as file:
            tensors |= {key: file.get_tensor(key).float() for key in _SCORE if key in file.keys()}  # noqa: SIM118
    weight = tensors.get(_SCORE[0])
    if weight is None:
        raise ModelError(
            f"{name} is a reranker by a sequence classifier, and its weights have no {_SCORE[0]}, the layer that "
            "scores a pair: transformers would make up a random one. Use a checkpoint that was saved with it"
        )
    if tuple(weight.shape) != (1, width):
        shape = "x".join(map(str, weight.shape))
        raise ModelError(
            f"{name}: its {_SCORE[0]} is {shape}, and a reranker of states of {width} numbers has 1x{width}"
        )
    return ScoreLayer(weight.to(torch.float32), tensors.get(_SCORE[1]))


def _family(name: str, config: PreTrainedConfig) -> RerankerConfig:
    settings = FAMILIES[name]
    return replace(settings, **_classifier_settings(config)) if classifies(config) else settings


def _classifier_settings(config: PreTrainedConfig) -> dict[str, Any]:
    if classifies(config) and config.num_labels != 1:
        raise ModelError(
            f"this model classifies texts into {config.num_labels} labels, and a reranker gives one score (num_labels "
            f"1); {WAY_OUT}, or open it as an encoder with attention and pooling"
        )
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
    return {"true": None, "false": None, "ignored_end": pad}


def _is_cross_encoder(folder: Path) -> bool:
    return read_object(folder / SETTINGS_FILE).get("model_type") == "CrossEncoder"


def is_reranker(folder: Path) -> bool:
    """Whether a folder of sentence-transformers is one of a reranker, by its files."""
    if not (folder / MODULES_FILE).is_file():
        return _is_cross_encoder(folder)
    kinds = [module.kind for module in listed_modules(folder) if module.kind != "Dropout"]
    task = read_object(folder / TRANSFORMER_FILE).get("transformer_task")
    return _is_cross_encoder(folder) or "LogitScore" in kinds or (kinds == ["Transformer"] and task == _CLASSIFYING)


def _from_modules(folder: Path, config: PreTrainedConfig) -> RerankerConfig | None:
    if not is_reranker(folder):
        return None
    modules = [module for module in listed_modules(folder) if module.kind != "Dropout"]
    kinds = [module.kind for module in modules]
    refuse_unknown(folder, modules)
    if kinds not in (["Transformer"], ["Transformer", "LogitScore"]):
        raise ModelError(
            f"{folder / MODULES_FILE} lists {', '.join(map(str, kinds))}; a reranker that gerund reads is a "
            f"Transformer alone, or a Transformer and a LogitScore; {WAY_OUT}"
        )
    if modules[0].path:
        raise ModelError(f"{folder / MODULES_FILE} puts the language model into {modules[0].path}; move it to {folder}")
    settings = {**_transformer(folder, kinds[-1] == "LogitScore"), **_scored(folder, config)}
    if kinds[-1] == "LogitScore":
        return RerankerConfig(**settings, **_logit_score(folder / modules[1].path / MODULE_FILE))
    return RerankerConfig(**settings, **_classifier_settings(config))


def _without_modules(folder: Path, config: PreTrainedConfig) -> RerankerConfig:
    settings = _scored(folder, config)
    if not classifies(config) and any(name.endswith("ForCausalLM") for name in listed_architectures(config)):
        # What sentence-transformers takes where a folder says no more than that it is a reranker.
        has_template = (folder / "chat_template.jinja").is_file() or "chat_template" in read_object(
            folder / "tokenizer_config.json"
        )
        return RerankerConfig("chat" if has_template else "pair", true="yes", false="no", **settings)
    return RerankerConfig("chat-or-pair", **settings, **_classifier_settings(config))


def _transformer(folder: Path, is_generating: bool) -> dict[str, Any]:
    """Return the layout of the text and its longest length."""
    path = folder / TRANSFORMER_FILE
    data = read_object(path)
    expected = _GENERATING if is_generating else _CLASSIFYING
    task = data.get("transformer_task") or expected
    if task != expected or data.get("do_lower_case"):
        what = f"transformer_task {task!r}" if task != expected else "do_lower_case"
        raise ModelError(f"{path} says {what}, which gerund does not do for a reranker; {WAY_OUT}")
    length = data.get("max_seq_length")
    for name, key, value in stored_arguments(data):
        if name in TOKENIZER_ARGUMENTS and key == "model_max_length":
            length = value
        elif key not in HARMLESS and (key, value) != ("num_labels", 1):
            raise ModelError(f"{path} says {key} {value!r} in its {name}, which gerund does not do; {WAY_OUT}")
    modalities, processing = data.get("modality_config") or {}, data.get("processing_kwargs") or {}
    if not isinstance(modalities, dict) or not isinstance(processing, dict):
        raise DataError(f"{path}: modality_config and processing_kwargs are objects")
    variables = processing.get("chat_template") or {}
    unknown = sorted(key for key, value in processing.items() if value and key != "chat_template")
    if unknown or not isinstance(variables, dict) or _TOKENIZING & variables.keys():
        raise ModelError(f"{path} has processing_kwargs that gerund does not know; {WAY_OUT}")
    settings: dict[str, Any] = {"layout": "pair", "max_length": checked_length(path, length)}
    message = modalities.get("message")
    if message is not None:
        form = message.get("format") if isinstance(message, dict) else None
        known = {"flat": False, "structured": True}
        settings |= {"layout": "chat", "template_variables": variables, "is_structured": known.get(str(form))}
    return settings


def _scored(folder: Path, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the activation and the instruction."""
    path = folder / SETTINGS_FILE
    data = read_object(path)
    stored: Any = getattr(config, "sentence_transformers", None)
    if data.get("activation_fn") is None:
        path = folder / "config.json"
    given = data.get("activation_fn")
    given = given or (stored.get("activation_fn") if isinstance(stored, Mapping) else None)
    given = given or getattr(config, "sbert_ce_default_activation_function", None)
    activation = "Sigmoid" if given is None else activation_of(path, given)
    _, instruction = stored_prompts(folder / SETTINGS_FILE, data)
    return {"activation": cast(ScoreActivation, activation), "instruction": instruction}


def _logit_score(path: Path) -> dict[str, Any]:
    data = demanded(path)
    true, false = data.get("true_token_id"), data.get("false_token_id")
    if type(true) is not int or true < 0 or type(false) not in (int, type(None)) or (false or 0) < 0:
        raise DataError(f"{path}: true_token_id and false_token_id are ids of tokens (the second may be null)")
    if data.get("module_input_name", "causal_logits") != "causal_logits":
        raise ConfigError(f"{path} scores {data['module_input_name']!r}, and gerund scores causal_logits")
    return {"true": true, "false": false}
