"""The encoder settings stored with a model: ``gerund.json``, sentence-transformers' files, or a GGUF file's metadata.

Knows: which of them counts, and what is said aloud when a user leaves the author's reading. Does not know: how a model
is loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from gerund.attention.recurrent import ATTENTION_FREE
from gerund.errors import ConfigError, DataError
from gerund.models import sentence_transformers_folder as ready_made
from gerund.models.attention_flags import is_bidirectional
from gerund.models.encoder_decoder import SEQ2SEQ
from gerund.models.gguf_files import encoder_settings, read_file
from gerund.models.heads import HeadConfig, ProjectionHead, VectorModule, head_of, read_head, read_tensors
from gerund.models.loading import is_body, state_width
from gerund.models.settings_file import read_saved
from gerund.notes import say_once
from gerund.settings.encoder import CONFIG_FILE, EncoderConfig
from gerund.settings.model_spec import EncoderSpec
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NO_TRANSFORM, transform_parts

# An encoder of its own looks both ways by itself, and so does a decoder whose config says so.
_BOTH_WAYS = AttentionPlan("bidir")
# Where no layer attends, a plan that leaves recurrent layers causal would convert nothing.
_RECURRENT = EncoderConfig(attention=AttentionPlan(recurrent="both"))
# What may differ from the author's reading without changing what a text's whole vector is.
_FREE = ("prompt", "prompts", "normalize", "max_length", "fusion", "similarity", "transform")


@dataclass(frozen=True)
class StoredReading:
    """How a model is read where nobody says otherwise.

    Attributes:
        encoder: the encoder config.
        head: what projects its pooled states; None without one.
        file: the file that says it; empty where none does.
        notes: what a user should know of it, a sentence each.
    """

    encoder: EncoderConfig
    head: ProjectionHead | None = None
    file: str = ""
    notes: Sequence[str] = ()

    def tell(self, name: str, encoder: EncoderConfig) -> None:
        """Log what a user should know, and how far ``encoder``, as which the model is read now, leaves the author's."""
        for note in self.notes:
            say_once(f"{name}: {note}")
        if self.file in ("", CONFIG_FILE):
            return  # nobody has said it, or whoever trained or saved the model here
        same = replace(self.encoder, **{field: getattr(encoder, field) for field in _FREE})
        if same != encoder:
            say_once(
                f"{name}: read with {_in_words(encoder, same)}, and not as its author means it, with "
                f"{_in_words(same, encoder)}: the vectors are others"
            )


def default_encoder_config(config: PreTrainedConfig) -> EncoderConfig:
    """Return how a model with this config is read as an encoder where its folder says nothing."""
    if config.model_type in SEQ2SEQ or is_bidirectional(config):
        return EncoderConfig(attention=_BOTH_WAYS)
    return _RECURRENT if config.model_type in ATTENTION_FREE else EncoderConfig()


def stored_reading(
    folder: Path | None, config: PreTrainedConfig, said: EncoderSpec, gguf: Path | None = None
) -> StoredReading:
    """Read how the model in a folder or in a GGUF file is read.

    Args:
        folder: the folder; None where a hub model's files are not to be had.
        config: the model's.
        said: what the user says, without which a model whose attention is its author's code is refused.
        gguf: the GGUF file, where it is one.

    Raises:
        DataError: a file is missing or broken.
        ModelError: the author reads it in a way that gerund does not know.
        ConfigError: nothing but code says how its layers attend, and neither does the user; or a file was written by a
            newer version.
    """
    default = default_encoder_config(config)
    if gguf is not None:
        settings_of_file = encoder_settings(read_file(gguf))
        if settings_of_file is None:
            return StoredReading(default)
        return StoredReading(settings_of_file.applied_to(default), file=gguf.name)
    if folder is None:
        return StoredReading(default)
    if not ready_made.is_ready_made(folder):
        saved = read_saved(folder)
        if saved is None:
            return StoredReading(default, read_head(folder), notes=_unsaid(config, said))
        return StoredReading(saved.applied_to(default), read_head(folder), CONFIG_FILE)
    found = ready_made.read_ready_made(folder)
    settings, notes = dict(found.settings), list(found.notes)
    if _has_code(config):
        notes += _demand_said(folder, said)
        settings["append_eos"] = True
    both_ways = config.model_type in SEQ2SEQ or is_bidirectional(config)
    # Its author's tokenizer reads a text as it stands.
    settings["text_normalization"] = "none"
    encoder = EncoderConfig(attention=_BOTH_WAYS if both_ways else AttentionPlan("causal"), **settings)
    width = state_width(config) * encoder.poolings
    head = _head(folder, found.modules, width)
    dimensions = width if head is None else head.settings.dimensions
    encoder = _truncated(folder, encoder, dimensions)
    if config.model_type == "qwen3" and "last" in encoder.pooling and not _ends(folder, encoder):
        notes.append(
            "no end token closes its texts; Qwen3-Embedding was trained with one, which early revisions of its "
            "tokenizer.json lacked"
        )
    if encoder.similarity != "cosine" and not encoder.normalize:
        notes.append(
            f"its author compares vectors by {encoder.similarity}, as similarity and rerank do; searching an index "
            "compares by cosine"
        )
    return StoredReading(encoder, head, ready_made.MODULES_FILE, notes)


def _unsaid(config: PreTrainedConfig, said: EncoderSpec) -> list[str]:
    """Return what to say of a model without a head, as embedding models are published, whose folder says no more."""
    if not is_body(config) or said.attention is not None or said.pooling is not None:
        return []
    return [
        f"it holds a model without a head and no {ready_made.MODULES_FILE}, so nothing says how it is meant to encode, "
        "and it is read as any language model; if it is an embedding model, give attention and pooling as its model "
        "card does"
    ]


def _has_code(config: PreTrainedConfig) -> bool:
    """Whether the author's code computes the model, so that the config does not say how its layers attend."""
    return bool(getattr(config, "auto_map", None))


def _demand_said(folder: Path, said: EncoderSpec) -> list[str]:
    path = folder / "config.json"
    if said.attention is None:
        raise ConfigError(
            f"{path} leaves the attention to its author's code (auto_map), which gerund never runs, so nothing says "
            "whether its layers look both ways; say attention='causal' or attention='bidir' as its model card does"
        )
    if said.append_eos is None:
        return ["an end token is put after every text, as its author's tokenizer does; append_eos=False leaves it out"]
    return []


def _head(folder: Path, modules: Sequence[tuple[dict[str, Any], str]], width: int) -> ProjectionHead | None:
    """Return what stands behind the pooling as a head, with its weights."""
    if not modules:
        return None
    if all(own["kind"] == "Normalize" for own, _ in modules):
        return None
    weights: dict[str, Tensor] = {}
    layers: list[VectorModule] = []
    given = width
    for place, (own, path) in enumerate(modules):
        own = {**own, "width": own["width"] or given, "dimensions": own["dimensions"] or given}
        if own["width"] != given:
            raise DataError(
                f"{folder / path / ready_made.MODULE_FILE}: this module takes vectors of {own['width']} numbers, and "
                f"is given {given}"
            )
        layers.append(VectorModule(**own))
        given = own["dimensions"]
        if own["kind"] != "Normalize":
            file = folder / path / ready_made.MODULE_WEIGHTS
            stored = {f"chain.0.{key}": value for key, value in read_tensors(file).items()}
            head_of(HeadConfig.of_modules([layers[-1]]), stored, str(file), ready_made.MODULE_FILE)
            weights |= {f"chain.{place}.{key.removeprefix('chain.0.')}": value for key, value in stored.items()}
    return head_of(HeadConfig.of_modules(layers), weights, str(folder), ready_made.MODULES_FILE)


def _truncated(folder: Path, encoder: EncoderConfig, dimensions: int) -> EncoderConfig:
    """Return the config without a truncation that keeps everything."""
    if encoder.transform == NO_TRANSFORM:
        return encoder
    _, number = transform_parts(encoder.transform)
    if number is not None and number > dimensions:
        raise DataError(
            f"{folder / ready_made.SETTINGS_FILE} keeps {number} numbers of a vector (truncate_dim), which has "
            f"{dimensions}"
        )
    return replace(encoder, transform=NO_TRANSFORM) if number == dimensions else encoder


def _ends(folder: Path, encoder: EncoderConfig) -> bool:
    return encoder.append_eos or ready_made.closes_texts(folder)


def _in_words(encoder: EncoderConfig, other: EncoderConfig) -> str:
    """Return what of a config differs from another one."""
    fields = [name for name in vars(encoder) if getattr(encoder, name) != getattr(other, name)]
    named = ((name, getattr(encoder, name)) for name in fields)
    return ", ".join(f"{name}={own.name if isinstance(own, AttentionPlan) else own}" for name, own in named)
