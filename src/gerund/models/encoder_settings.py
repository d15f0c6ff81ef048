"""The encoder settings stored with a model: ``gerund.json``, sentence-transformers' files, or GGUF metadata.

``gerund.json`` is a file of its own, not part of transformers' ``config.json``, so that the folder still opens as a
plain language model. Published models whose folders leave their settings to their authors' code are known here: GritLM
(Muennighoff et al., 2024, "Generative Representational Instruction Tuning") and LLM2Vec (BehnamGhader et al., 2024,
"LLM2Vec: Large Language Models Are Secretly Powerful Text Encoders").
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from gerund.attention.recurrent import ATTENTION_FREE
from gerund.errors import ConfigError, DataError, ModelError
from gerund.gguf_file import read_file
from gerund.models import sentence_transformers_folder as ready_made
from gerund.models.adapters import Adapters
from gerund.models.architectures import is_bidirectional, is_body, state_width
from gerund.models.folder_files import hub_name
from gerund.models.heads import ProjectionHead, head_of, read_head, read_tensors
from gerund.models.kinds import SEQ2SEQ
from gerund.models.light_head import HeadConfig, VectorModule
from gerund.models.reranker_folder import is_reranker, read_reranker
from gerund.models.saved_settings import encoder_settings, read_saved, settings_text
from gerund.models.sentence_transformers_folder import read_object
from gerund.models.sources import LLM2VEC_FILE, AdaptedModel, Source, is_llm2vec
from gerund.progress import say_once
from gerund.settings.encoder import (
    CONFIG_FILE,
    LLM2VEC_CONVENTIONS,
    RANKING,
    ST_CONVENTIONS,
    EncoderConfig,
    vectors_alike,
)
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.plan import AttentionPlan
from gerund.settings.ranking import RerankerConfig
from gerund.settings.templates import NO_TRANSFORM, PLACE, transform_parts

# The encoder of a T5 is bidirectional, and so is a decoder whose config says so.
_BOTH_WAYS = AttentionPlan("bidir")
# Where no layer attends, a plan that leaves recurrent layers causal would convert nothing.
_RECURRENT = EncoderConfig(attention=AttentionPlan(recurrent="both"))
# Settings that may differ from the author's without changing a text's full vector.
_FREE = ("prompt", "prompts", "normalize", "max_length", *RANKING, "similarity", "transform")


@dataclass(frozen=True)
class StoredSettings:
    """The encoder settings stored with a model.

    Attributes:
        encoder: the encoder config.
        head: projects the pooled states; None without one.
        file: the name of the file with the settings; empty without one.
        notes: what a user should know about them.
        reranker: how the model scores pairs of texts; None where it is no reranker.
    """

    encoder: EncoderConfig
    head: ProjectionHead | None = None
    file: str = ""
    notes: Sequence[str] = ()
    reranker: RerankerConfig | None = None

    def head_for(self, encoder: EncoderConfig) -> ProjectionHead | None:
        """Return the head; under other settings than it was trained for, its vectors lie in no shared space."""
        if self.head is None or vectors_alike(encoder, self.encoder):
            return self.head
        return self.head.without_space()

    def tell(self, name: str, encoder: EncoderConfig) -> None:
        """Log the notes, and how ``encoder``, the settings in use, differs from the author's."""
        for note in self.notes:
            say_once(f"{name}: {note}")
        if self.file in ("", CONFIG_FILE):
            return  # there are no settings of an author
        same = replace(self.encoder, **{field: getattr(encoder, field) for field in _FREE})
        if same != encoder:
            say_once(
                f"{name}: read with {_in_words(encoder, same)}, and not as its author means it, with "
                f"{_in_words(same, encoder)}: the vectors are others"
            )


def default_encoder_config(config: PreTrainedConfig) -> EncoderConfig:
    """Return the encoder settings of a model whose folder has none."""
    if config.model_type in SEQ2SEQ or is_bidirectional(config):
        return EncoderConfig(attention=_BOTH_WAYS)
    return _RECURRENT if config.model_type in ATTENTION_FREE else EncoderConfig()


def stored_settings(
    folder: Path | None, config: PreTrainedConfig, given: EncoderSpec, source: Source | None = None
) -> StoredSettings:
    """Read the encoder settings of a model's folder or GGUF file.

    ``given`` are the user's: without them a model whose attention is its author's code raises ``ConfigError``.
    """
    gguf = None if source is None else source.gguf
    reranker = _reranker(folder, config, given, gguf) if isinstance(given, ModelSpec) else None
    if reranker is not None and not reranker.embeds:
        plan = _BOTH_WAYS if is_bidirectional(config) else AttentionPlan("causal")
        # An encoder's prompt is what a reranker is asked to find.
        return StoredSettings(EncoderConfig(attention=plan, prompt=reranker.instruction), reranker=reranker)
    return replace(_encoder_settings(folder, config, given, source), reranker=reranker)


def _encoder_settings(
    folder: Path | None, config: PreTrainedConfig, given: EncoderSpec, source: Source | None
) -> StoredSettings:
    """Return how a model that embeds reads texts."""
    default = default_encoder_config(config)
    gguf = None if source is None else source.gguf
    if gguf is not None:
        settings_of_file = encoder_settings(read_file(gguf))
        if settings_of_file is None:
            return StoredSettings(default)
        return StoredSettings(settings_of_file.applied_to(default), file=gguf.name)
    known = known_encoder(config, None if source is None else source.adapted)
    if known is not None and not (folder is not None and (folder / CONFIG_FILE).is_file()):
        return StoredSettings(known, file=ready_made.MODULE_FILE)
    return StoredSettings(default) if folder is None else _settings_in(folder, config, given, default)


def _settings_in(folder: Path, config: PreTrainedConfig, given: EncoderSpec, default: EncoderConfig) -> StoredSettings:
    if not ready_made.is_ready_made(folder) or is_reranker(folder):
        saved = read_saved(folder)
        if saved is None:
            return StoredSettings(default, read_head(folder), notes=_missing_settings(config, given))
        return StoredSettings(saved.applied_to(default), read_head(folder), CONFIG_FILE)
    return _ready_made_settings(folder, config, given)


def _ready_made_settings(folder: Path, config: PreTrainedConfig, given: EncoderSpec) -> StoredSettings:
    """Read the encoder settings of a sentence-transformers folder."""
    stored = ready_made.read_ready_made(folder)
    settings, notes = dict(stored.settings), list(stored.notes)
    if _has_code(config):
        notes += _require_attention(folder, given)
        settings["append_eos"] = True
    both_ways = config.model_type in SEQ2SEQ or is_bidirectional(config)
    # The author's tokenizer doesn't normalize texts.
    settings["text_normalization"] = "none"
    encoder = EncoderConfig(attention=_BOTH_WAYS if both_ways else AttentionPlan("causal"), **settings)
    width = state_width(config) * encoder.poolings
    head = _head(folder, stored.modules, width)
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
    return StoredSettings(encoder, head, ready_made.MODULES_FILE, notes)


def _reranker(
    folder: Path | None, config: PreTrainedConfig, given: ModelSpec, gguf: Path | None
) -> RerankerConfig | None:
    if gguf is not None:
        return read_reranker(None, gguf.name, config, given)
    return read_reranker(folder, given.model if folder is None else hub_name(folder), config, given)


def _missing_settings(config: PreTrainedConfig, given: EncoderSpec) -> list[str]:
    """Return a note for a model without a head, as embedding models are published, whose folder has no settings."""
    if not is_body(config) or given.attention is not None or given.pooling is not None:
        return []
    return [
        f"it holds a model without a head and no {ready_made.MODULES_FILE}, so nothing says how it is meant to encode, "
        "and it is read as any language model; if it is an embedding model, give attention and pooling as its model "
        "card does"
    ]


def _has_code(config: PreTrainedConfig) -> bool:
    """Whether the author's code computes the model, so that the config does not say how its layers attend."""
    return bool(getattr(config, "auto_map", None))


def _require_attention(folder: Path, given: EncoderSpec) -> list[str]:
    path = folder / "config.json"
    if given.attention is None:
        raise ConfigError(
            f"{path} leaves the attention to its author's code (auto_map), which gerund never runs, so nothing says "
            "whether its layers look both ways; say attention='causal' or attention='bidir' as its model card does"
        )
    if given.append_eos is None:
        return ["an end token is put after every text, as its author's tokenizer does; append_eos=False leaves it out"]
    return []


def _head(folder: Path, modules: Sequence[tuple[dict[str, Any], str]], width: int) -> ProjectionHead | None:
    """Return the modules after the pooling as a head, with its weights."""
    if not modules:
        return None
    if all(fields["kind"] == "Normalize" for fields, _ in modules):
        return None
    weights: dict[str, Tensor] = {}
    layers: list[VectorModule] = []
    given = width
    for place, (fields, path) in enumerate(modules):
        fields = {**fields, "width": fields["width"] or given, "dimensions": fields["dimensions"] or given}
        if fields["width"] != given:
            raise DataError(
                f"{folder / path / ready_made.MODULE_FILE}: this module takes vectors of {fields['width']} numbers, "
                f"and is given {given}"
            )
        layers.append(VectorModule(**fields))
        given = fields["dimensions"]
        if fields["kind"] != "Normalize":
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
    """Return the settings in which ``encoder`` differs from another config."""
    fields = [name for name in vars(encoder) if getattr(encoder, name) != getattr(other, name)]
    values = ((name, getattr(encoder, name)) for name in fields)
    return ", ".join(f"{name}={value.name if isinstance(value, AttentionPlan) else value}" for name, value in values)


def write_settings(
    folder: Path, encoder: EncoderConfig, n_layers: int, identity: str, *, adapters: Adapters | None = None
) -> None:
    """Write ``gerund.json``, with k resolved, and copy adapters into subfolders.

    Also writes ``modules.json``, so that sentence-transformers opens the folder by gerund's own class.
    """
    places = (adapters or Adapters()).copy_into(folder)
    text = settings_text(EncoderSpec.of_config(encoder, n_layers), identity, places)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    ready_made.write_own_modules(folder, encoder)


_RETRIEVE = "Given a web search query, retrieve relevant passages that answer the query"
# The authors' tokenizers don't normalize texts, and both models attend in both directions.
_SHARED: dict[str, Any] = {"attention": AttentionPlan("bidir"), "pooling": "mean", "text_normalization": "none"}

GRITLM = EncoderConfig(
    **_SHARED,
    conventions=ST_CONVENTIONS,
    prompt="<|embed|>\n",
    prompts={"query": f"<|user|>\n{_RETRIEVE}\n<|embed|>\n", "document": "<|embed|>\n"},
)
"""GritLM's encoder settings; the task in its query prompt can be replaced."""

# What LLM2Vec puts around a text, by the model that it was made from.
_AROUND = {
    "Meta-Llama-3-8B-Instruct": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    "Mistral-7B-Instruct-v0.2": ("[INST] ", " [/INST]"),
    "Llama-2-7b-chat-hf": ("[INST] ", " [/INST]"),
    "Qwen2-1.5B-Instruct": ("<|im_start|>user\n", "<|im_end|>"),
    "Qwen2-7B-Instruct": ("<|im_start|>user\n", "<|im_end|>"),
}
_POOLINGS = {"mean": "mean", "weighted_mean": "weighted-mean", "last_token": "last"}
_LLM2VEC_LENGTH = 512


def known_encoder(config: PreTrainedConfig, adapted: AdaptedModel | None) -> EncoderConfig | None:
    """Return the encoder settings of a model that is known by its config or its adapters; None for another one."""
    if any("gritlm" in str(value).lower() for value in (getattr(config, "auto_map", None) or {}).values()):
        return GRITLM
    if adapted is not None and adapted.encoding and any(map(is_llm2vec, adapted.encoding)):
        return _llm2vec(adapted)
    return None


def _llm2vec(adapted: AdaptedModel) -> EncoderConfig:
    path = adapted.holding(LLM2VEC_FILE) / LLM2VEC_FILE
    stored = read_object(path)
    pooling = stored.get("pooling_mode", "mean")
    if pooling not in _POOLINGS:
        raise ModelError(f"{path} pools by {pooling!r}; gerund knows {', '.join(_POOLINGS)} of LLM2Vec")
    length, skips = stored.get("max_length", _LLM2VEC_LENGTH), stored.get("skip_instruction", True)
    if type(length) is not int or length < 1 or type(skips) is not bool:
        raise DataError(f"{path}: max_length is a whole number above 0, and skip_instruction is true or false")
    before, after = _AROUND.get(Path(adapted.base_name).name, ("", ""))
    around = f"{before}{PLACE}{after}" if before else ""
    return EncoderConfig(
        **{**_SHARED, "pooling": _POOLINGS[pooling]},
        conventions=LLM2VEC_CONVENTIONS,
        max_length=length,
        pool_prompt=not skips,
        pool_bos="never",
        prompt=around,
        prompts={"query": f"{before}{_RETRIEVE}: {PLACE if before else ''}{after}", "document": around},
    )
