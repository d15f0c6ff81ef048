"""Build or load the model that a recipe trains, with or without a LoRA adapter, and check that it can be trained."""

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers, text_half
from gerund.attention.probe import verify
from gerund.attention.recurrent import kind_of, read_by_weight
from gerund.checks import one_of
from gerund.errors import ConfigError, ModelError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.tokens import context_length
from gerund.models import loading
from gerund.models.encoder_settings import default_encoder_config, stored_settings
from gerund.models.heads import AnswerTokens, ProjectionHead
from gerund.models.kinds import SEQ2SEQ, is_encoder_decoder
from gerund.models.library_calls import guarded
from gerund.models.sources import Source, find
from gerund.models.weights import LAYER_COUNTS
from gerund.progress import say_once
from gerund.settings.encoder import EncoderConfig
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.plan import ResolvedPlan
from gerund.training.corpus.tokenizer import load_tokenizer, prepare_tokenizer, sentinels_of, train_tokenizer
from gerund.training.losses.vectors import LowerStates
from gerund.training.objectives.sections import DECODER_ONLY, ENCODER_DECODER
from gerund.training.objectives.settings import OBJECTIVES
from gerund.training.processes import has_bf16, uses_bf16
from gerund.training.recipe import LoraConfig, Recipe, TokenizerConfig, made_by

if TYPE_CHECKING:
    from peft import PeftModel


# Of the tokenizer that stands in for one that is not trained yet.
_SMALLEST_VOCABULARY = 272
_LONGEST = 2**20


@dataclass
class TrainableModel:
    """The model that is trained, before any objective is attached to it."""

    model: PreTrainedModel  # the language model, with the adapter's layers inside where there is one
    tokenizer: PreTrainedTokenizerBase
    encoder: EncoderConfig  # how it is read as an encoder
    source: Source | None = None  # where it was loaded from; None for a model from scratch
    adapter: "PeftModel | None" = None  # the adapter that is trained; None where all weights are
    below: LowerStates | None = None  # the cached states of the layers below the adapter's
    head: ProjectionHead | None = None
    """What projects its pooled states, of the base or from an objective; None without one."""
    answers: AnswerTokens | None = None  # the answer tokens that are trained; None without any

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder of its own."""
        return is_encoder_decoder(self.model)

    @property
    def runtime(self) -> EncoderRuntime:
        """What the encoder's plan makes of the model."""
        plan = self.encoder.resolved(self.n_layers)
        sends_plan = (not plan.is_causal or self.encoder.exit_layer is not None) and not self.is_encoder_decoder
        return EncoderRuntime(self.model, self.tokenizer, self.encoder, plan, sends_plan=sends_plan)

    @property
    def n_layers(self) -> int:
        """How many layers a plan has a say in."""
        return int(self.model.config.num_layers) if self.is_encoder_decoder else len(decoder_layers(self.model))

    @property
    def layers(self) -> list[torch.nn.Module]:
        """All its layers, bottom first: those of the encoder, where there is one, before the decoder's."""
        if not self.is_encoder_decoder:
            return list(decoder_layers(self.model))
        return [layer for half in (self.model.encoder, self.model.decoder) for layer in half.block]

    @property
    def vocabulary(self) -> int:
        """How many embeddings it has, of tokens or none."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def pad(self) -> int:
        """The token that padding is filled with; it is never looked at."""
        return int(self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0)


def prepare_model(recipe: Recipe, *, write: bool = True, weights: bool = True) -> TrainableModel:
    """Build or load the recipe's model and make it trainable.

    Without ``write`` no tokenizer is trained, and a new model gets the recipe's vocabulary size. Without ``weights``
    the model is a skeleton on the meta device, and a copy of two layers is verified.
    """
    set_seed(recipe.seed)
    if recipe.model.base is not None:
        prepared = _load(recipe, recipe.model.base, weights=weights)
    else:
        prepared = _new(recipe, write=write, weights=weights)
    _check_objectives(recipe, prepared)
    if not prepared.is_encoder_decoder:
        attach(prepared.model)
        attach_streams(decoder_layers(prepared.model))
        plans = [plan for objective in recipe.objectives for plan in objective.plans(prepared.encoder)]
        stored_plan = prepared.encoder.attention
        for plan in dict.fromkeys(plans):
            check = verify if weights else verify_on_two_layers
            depth = prepared.encoder.depth(prepared.n_layers) if plan == stored_plan else prepared.n_layers
            check(prepared.model, plan.resolve(depth))
    adapter_folder = None if recipe.model.adapter == NO_ADAPTER else _stored_adapter(prepared.source)
    trains_base = any(objective.trains_base for objective in recipe.objectives)
    if adapter_folder is not None and not trains_base:
        raise ConfigError(f"{recipe.model.base} has an adapter, which would not be trained; set model.adapter to none")
    if recipe.model.lora is not None or adapter_folder is not None:
        prepared.adapter = _with_adapter(prepared.model, recipe, adapter_folder, _unread_layers(recipe, prepared))
    else:
        prepared.model.float()
        prepared.model.requires_grad_(trains_base)
    if recipe.model.gradient_checkpointing:
        old_name = prepared.model.gradient_checkpointing_enable
        getattr(prepared.model, "activation_checkpointing_enable", old_name)({"use_reentrant": False})
    if recipe.model.cache_below:
        if prepared.is_encoder_decoder:
            raise ConfigError("model.cache_below is for decoder-only models")
        runtime = prepared.runtime
        # A reranker reads causally, whatever the encoder does.
        sends = runtime.sends_plan and not any(objective.trains_reranker for objective in recipe.objectives)
        prepared.below = LowerStates(prepared.model, runtime.plan if sends else None)
    return prepared


def _new(recipe: Recipe, *, write: bool, weights: bool) -> TrainableModel:
    """Return a new model of the recipe's architecture."""
    check_architecture(recipe)
    path = None if recipe.tokenizer is None else recipe.tokenizer.path
    tokenizer = prepare_tokenizer(recipe) if write else None if path is None else load_tokenizer(path)
    with nullcontext() if weights else torch.device("meta"):
        model = build_model(recipe, tokenizer)
    # A dry run only needs the special tokens, which any tokenizer of ours has.
    sentinels = sentinels_of(recipe)
    tokenizer = tokenizer or train_tokenizer(
        ["a"], vocab_size=_SMALLEST_VOCABULARY + sentinels, max_length=_LONGEST, sentinels=sentinels
    )
    return TrainableModel(
        model, tokenizer, _checked_encoder(recipe.encoder.applied_to(default_encoder_config(model.config)))
    )


def _load(recipe: Recipe, base: str, *, weights: bool) -> TrainableModel:
    try:
        source = find(base)
    except ModelError as error:
        raise ModelError(f"model.base: {error}{made_by(base)}") from error
    settings = loading.settings_folder(source)
    config = loading.read_config(source)
    reading = stored_settings(settings, config, recipe.encoder, source)
    # Frozen weights need no more precision than they are computed in.
    frozen = recipe.model.lora is not None and has_bf16() and uses_bf16(recipe)
    model, tokenizer = loading.read(source, torch.bfloat16 if frozen else torch.float32, config, weights=weights)
    # Another objective would leave a head behind that does not know the new states, as would another adapter.
    goes_on = any(objective.trains_head for objective in recipe.objectives)
    left_aside = recipe.model.adapter == NO_ADAPTER and _stored_adapter(source) is not None
    head = reading.head if goes_on and not left_aside else None
    if head is not None:
        # What it learns leads it out of its teacher's space; distillation declares that of its own teacher.
        head = head.without_space()
    encoder = _checked_encoder(recipe.encoder.applied_to(reading.encoder))
    reading.tell(source.name, encoder)
    if head is None and reading.head is not None and reading.head.settings.modules is not None:
        say_once(
            f"{source.name}: trained without the layers that its author put behind the pooling, so its vectors are the "
            f"pooled states, of {reading.head.settings.width} numbers instead of {reading.head.settings.dimensions}"
        )
    return TrainableModel(model, tokenizer, encoder, source, head=head)


def _checked_encoder(encoder: EncoderConfig) -> EncoderConfig:
    """Return an encoder config, unless training knows nothing of what it says."""
    encoder.refuse_methods("training", takes=("exit_layer",))
    return encoder


def _check_objectives(recipe: Recipe, model: TrainableModel) -> None:
    """Refuse objectives that the model cannot be trained for, or texts that it cannot read."""
    kind = ENCODER_DECODER if model.is_encoder_decoder else DECODER_ONLY
    for objective in recipe.objectives:
        objective.check_model(kind, model.encoder)
        if kind not in objective.models:
            *names, last = [objective.name() for objective in OBJECTIVES if kind in objective.models]
            raise ConfigError(
                f"{objective.kind} is for {' and '.join(objective.models)} models; a {model.model.config.model_type} "
                f"learns by {', '.join(names)} and {last}"
            )
    if model.is_encoder_decoder and model.encoder.attention.name != "bidir":
        raise ConfigError("this model has an encoder of its own, which looks both ways: encoder.attention is bidir")
    if model.is_encoder_decoder and recipe.model.lora is not None:
        raise ConfigError("model.lora is an adapter for encoding; a model with an encoder of its own is trained whole")
    longest = context_length(model.model.config, model.tokenizer)
    for objective in recipe.objectives:
        if longest is not None and objective.longest_text > longest:
            raise ConfigError(
                f"{objective.kind}: texts of {objective.longest_text} tokens exceed the model's {longest}"
            )


def _stored_adapter(source: Source | None) -> Path | None:
    """Return the folder of the adapter that a base was saved with."""
    return None if source is None else loading.own_adapters(source, loading.settings_folder(source)).get("encode")


def _unread_layers(recipe: Recipe, model: TrainableModel) -> list[str]:
    """Return the linear layers above ``exit_layer``, which an adapter of vectors alone would never train."""
    if model.encoder.exit_layer is None or not all(objective.trains_vectors for objective in recipe.objectives):
        return []
    return _linear_in(model.model, model.layers[model.encoder.exit_layer :])


def _linear_in(model: PreTrainedModel, layers: Iterable[torch.nn.Module]) -> list[str]:
    """Return the names of the linear layers within some decoder layers."""
    within = {id(part) for layer in layers for part in layer.modules()}
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and id(part) in within]


def _with_adapter(
    model: PreTrainedModel, recipe: Recipe, folder: Path | None, unread: Sequence[str] = ()
) -> "PeftModel":
    """Put a new adapter into the model, or the base's own to be trained further."""
    from peft import LoraConfig as PeftLora
    from peft import PeftModel, get_peft_model

    lora = recipe.model.lora
    with loading.quiet(), warnings.catch_warnings():
        # PEFT asks transformers for something under its old name.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        # Of experts in one tensor, which are no layers that an adapter here adapts.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        if folder is not None:
            adapter = PeftModel.from_pretrained(model, str(folder), is_trainable=True)
            if lora is not None:
                _check_same_shape(model, adapter, lora, folder)
            return adapter
        assert lora is not None
        if lora.lowest_layer >= (count := len(decoder_layers(model))):
            raise ConfigError(
                f"model.lora.lowest_layer is below {count}, the number of layers, not {lora.lowest_layer}"
            )
        excluded = _excluded_layers(model) if lora.target_modules == "all-linear" else []
        excluded += _linear_in(model, decoder_layers(model)[: lora.lowest_layer]) if lora.lowest_layer else []
        config = PeftLora(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            exclude_modules=[*excluded, *unread] or None,
            task_type="CAUSAL_LM",
        )
        unseen = set(read_by_weight(model))
        try:
            adapter = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"model.lora.target_modules: {' '.join(str(error).split())[:300]}") from error
    adapted = {name for name, part in model.named_modules() if hasattr(part, "lora_A")}
    if adapted & unseen:
        raise ConfigError(
            f"model.lora.target_modules: {min(adapted & unseen)} is read by its weight, past an adapter; leave it out"
        )
    return adapter


def _excluded_layers(model: PreTrainedModel) -> list[str]:
    """Return the linear layers that no text goes through, or whose adapters would not be seen."""
    text_parts = {id(part) for part in text_half(model).modules()}
    towers = [
        name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and id(part) not in text_parts
    ]
    head = model.get_output_embeddings()
    names = [name for name in towers if model.get_submodule(name) is not head]
    return [*names, *read_by_weight(model)]


def _check_same_shape(model: PreTrainedModel, adapter: "PeftModel", lora: LoraConfig, folder: Path) -> None:
    """Refuse a recipe that asks for another adapter than the one that is trained further, but for its dropout."""
    config, difference = adapter.peft_config["default"], ""
    if (config.r, float(config.lora_alpha)) != (lora.rank, lora.alpha):
        difference = f"rank {config.r} and alpha {config.lora_alpha}, and model.lora asks for rank {lora.rank} "
        difference += f"and alpha {lora.alpha:g}"
    elif "target_modules" in lora.model_fields_set:
        present = {name.rpartition(".")[2] for name, part in adapter.named_modules() if hasattr(part, "lora_A")}
        requested = {name.rpartition(".")[2] for name in _requested_layers(model, lora)}
        if requested - present if lora.target_modules == "all-linear" else requested != present:
            difference = f"layers {', '.join(sorted(present))}, and model.lora.target_modules asks for "
            difference += ", ".join(sorted(requested))
    lowest = min(
        (at for at, layer in enumerate(decoder_layers(model)) if any(hasattr(p, "lora_A") for p in layer.modules())),
        default=0,
    )
    if not difference and lora.lowest_layer > lowest:
        difference = f"updates from layer {lowest} on, and model.lora.lowest_layer asks for {lora.lowest_layer}"
    if difference:
        raise ModelError(
            f"{folder} has {difference}; leave model.lora out to train it further, set model.adapter to none for a new "
            "one, or merge it into the weights first"
        )
    if "dropout" in lora.model_fields_set:
        config.lora_dropout = lora.dropout
        for part in adapter.modules():
            for name in getattr(part, "lora_dropout", {}):
                part.lora_dropout[name] = torch.nn.Dropout(lora.dropout) if lora.dropout else torch.nn.Identity()


def _requested_layers(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Return the names of layers that a recipe asks for, of a model that has an adapter already."""
    if isinstance(lora.target_modules, list):
        return lora.target_modules
    names = {name.removesuffix(".base_layer"): part for name, part in model.named_modules() if "lora_" not in name}
    if lora.target_modules != "all-linear":
        return [name for name in names if re.fullmatch(lora.target_modules, name)]
    left_out = {name.removesuffix(".base_layer") for name in _excluded_layers(model)}
    linear = [name for name, part in names.items() if isinstance(part, torch.nn.Linear)]
    return [name for name in linear if name not in left_out and names[name] is not model.get_output_embeddings()]


def check_architecture(recipe: Recipe) -> None:
    """Refuse an unknown architecture, or a field that it does not have; transformers would ignore it."""
    fields = recipe.model.config or {}
    kind = fields.get("model_type")
    if kind is None:
        raise ConfigError("model.config has no model_type; 'llama' is one")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model.config.model_type {kind!r} is unknown to transformers; 'llama' is one it knows")
    known = sorted(CONFIG_MAPPING[kind]().to_dict().keys() | {"rope_theta"})
    for name in fields:
        one_of("field of model.config", name, known)


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedModel:
    """Return a freshly initialised model; the same seed gives the same weights."""
    vocabulary: dict[str, Any] = {"vocab_size": (recipe.tokenizer or TokenizerConfig()).vocab_size}
    if tokenizer is not None:
        ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        vocabulary = {"vocab_size": len(tokenizer), **ids}
    set_seed(recipe.seed)
    try:
        fields = {**(recipe.model.config or {}), **vocabulary}
        if fields["model_type"] in SEQ2SEQ:
            # As in T5, whose decoder begins with padding.
            fields["decoder_start_token_id"] = fields.get("pad_token_id", 0)
            return AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields), dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise ConfigError(f"model.config makes no model: {' '.join(str(error).split())}") from error


# What a layer attends to depends on its code, not on its weights. So a process that gets its weights from another one
# can still check within seconds that its installation obeys the plan.
_VOCABULARY = 64


def verify_on_two_layers(model: PreTrainedModel, plan: ResolvedPlan) -> None:
    """Verify the first and the last layer of a plan on a small copy of a model, with random weights.

    An architecture whose layers are of several kinds is left to the process that has the weights and verifies all.
    """
    if len({kind_of(layer) for layer in decoder_layers(model)}) > 1 or len(plan.views) < 2:
        return
    config = two_layers_of(model.config.get_text_config(decoder=True))
    with torch.random.fork_rng(devices=[]):
        small = guarded(
            f"cannot try the attention plan on two layers of this {model.config.model_type} model",
            AutoModelForCausalLM.from_config,
            config,
            dtype=torch.float32,
        )
    attach(small)
    attach_streams(decoder_layers(small))
    verify(small, outermost(plan))


def two_layers_of(config: Any) -> Any:
    """Return a config of two layers, the first and the last, and few tokens.

    >>> from transformers import LlamaConfig
    >>> small = two_layers_of(LlamaConfig(num_hidden_layers=32))
    >>> small.num_hidden_layers, small.vocab_size, small.hidden_size
    (2, 64, 4096)
    """
    small = copy.deepcopy(config)
    count = config.num_hidden_layers
    for name, value in vars(config).items():
        if isinstance(value, list | tuple) and len(value) == count > 2:
            setattr(small, name, [value[0], value[-1]])
        elif name.endswith("_token_id"):
            setattr(small, name, None)
    for name in LAYER_COUNTS:
        if getattr(config, name, None) == count:
            setattr(small, name, 2)
    small.vocab_size = min(config.vocab_size, _VOCABULARY)
    return small


def outermost(plan: ResolvedPlan) -> ResolvedPlan:
    """Return what a plan does in the first and in the last layer, as a plan of two layers.

    >>> from gerund.settings.plan import AttentionPlan
    >>> [str(view) for view in outermost(AttentionPlan("mask0-bidir", k=10).resolve(22)).views]
    ['causal', 'bidirectional without the first token']
    """
    last = len(plan.views) - 1
    stream = plan.stream
    if stream is not None:
        inside = [place for place, layer in enumerate((0, last)) if layer in stream.layers]
        stream = replace(stream, layers=range(inside[0], inside[-1] + 1), repeats=min(stream.repeats, 1))
    return replace(plan, views=(plan.views[0], plan.views[-1]), stream=stream, skips=())
