"""Load a model, its tokenizer and its encoder settings from a ``ModelSpec``.

A setting comes from the spec, else from the model's folder, else from the defaults. Nothing in a folder is executed.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from gerund.attention import interface
from gerund.attention.layouts import is_one_graph
from gerund.attention.probe import refuse_unsound
from gerund.checks import place
from gerund.errors import ConfigError, DataError, ModelError
from gerund.gguf_file import read_file
from gerund.models import gguf_model
from gerund.models.adapters import Adapters, merge_adapter, stacked
from gerund.models.architectures import (
    NoHead,
    classifies,
    is_bidirectional,
    is_body,
    listed_architectures,
    refuse_by_name,
    restore,
    set_aside,
    state_width,
)
from gerund.models.bundled import BundledAdapters, bundled_for
from gerund.models.encoder_settings import stored_settings
from gerund.models.fingerprint import describe_files, weights_key
from gerund.models.folder_files import demand_readable
from gerund.models.kinds import SEQ2SEQ, is_encoder_decoder
from gerund.models.library_calls import checked_tokenizer, guarded, quiet
from gerund.models.reranker_folder import RERANKER_WEIGHTS, ScoreLayer, read_score_layer
from gerund.models.runtimes import pack, packed_in, read_skeleton, takes_packed, with_runtime
from gerund.models.saved_settings import encoder_settings, is_trained_to_embed, is_trained_to_infill, read_adapters
from gerund.models.sentence_transformers_folder import (
    MODULES_FILE,
    SETTINGS_FILE,
    TRANSFORMER_FILE,
    dense_weights,
    is_ready_made,
)
from gerund.models.sources import ADAPTER_FILES, LLM2VEC_FILE, Source, find, find_spec
from gerund.models.vectors import read_transform
from gerund.models.weights import (
    INDEX,
    WEIGHTS,
    added_tokens,
    packing_of,
    refuse_absurd_config,
    refuse_other_shapes,
    shards_of,
    stored_shapes,
    weight_files,
    without_implementations,
)
from gerund.progress import say_once
from gerund.settings.encoder import (
    ANSWERS_FILE,
    CONFIG_FILE,
    JOBS,
    LATE_FILE,
    EncoderConfig,
    Job,
    answers_folder,
    unknown_dtype,
    vectors_alike,
)
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import RERANKER_FILE, RerankerConfig, reranker_folder
from gerund.settings.templates import NO_TRANSFORM

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST_SHARD = "48GB"
# Files of gerund next to the weights.
_OWN_FILES = (
    *("adapter*/*", "scorer.*", "head.*", "answers.*", "late.*", "transform.*", "training*.json"),
    *(RERANKER_FILE, RERANKER_WEIGHTS),
)
# Files of sentence-transformers next to the weights.
_READY_MADE = (
    MODULES_FILE,
    SETTINGS_FILE,
    TRANSFORMER_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "*/config.json",
)
# Files of a checkpoint; other weight formats, images and code are not copied.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README*"]
_NOT_COPIED = (
    "pytorch_model.bin.index.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    # A scorer or a head is trained for one encoder config, and the copy may get another one.
    "scorer.json",
    "head.json",
    ANSWERS_FILE,
    LATE_FILE,
    RERANKER_FILE,
)

# Fields of a generation config that must be numbers.
_GENERATION_NUMBERS = frozenset([
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "num_beams",
    "num_return_sequences", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "guidance_scale", "suppress_tokens", "begin_suppress_tokens",
])  # fmt: skip

_ENCODERS = frozenset([
    "bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert", "roberta",
    "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
])  # fmt: skip

_save_lock = threading.Lock()


def read(
    source: Source, dtype: torch.dtype | None, config: PreTrainedConfig | None = None, *, weights: bool = True
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer, in evaluation mode; ``dtype`` None keeps the checkpoint's own.

    With ``weights`` False the model is a skeleton on torch's meta device, for weights that come from elsewhere. (Packed
    weights are read in any case.)
    """
    config = read_config(source) if config is None else config
    _refuse_other_kinds(config, source.where)
    if source.gguf is not None:
        return _read_gguf(source.gguf, dtype, config, weights=weights)
    kind = auto_class(config)
    files = weight_files(source, getattr(config, "transformers_weights", None))
    shapes = stored_shapes(source.name, files)
    packed = getattr(config, "quantization_config", None) is not None
    refuse_other_shapes(lambda: kind.from_config(config), config, shapes, source.name)
    placed = {} if weights or packed else {"device_map": "meta"}
    if packed and not torch.cuda.is_available():
        placed = {"device_map": "cpu"}  # some packings have another default
    model, info = guarded(
        f"cannot load {source.name}",
        kind.from_pretrained,
        source.where,
        config=config,
        dtype="auto" if dtype is None else dtype,
        use_safetensors=True,
        output_loading_info=True,
        **source.hub_options,
        trust_remote_code=False,
        **placed,
    )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(f"{source.name} is an adapter; give its base model, and this folder as the adapter")
    _replace_missing_head(model, info, source.name)
    if packed:
        _forget_packing(model)
    refuse_incomplete(info, source.name)
    if weights or packed:
        refuse_unsound(model, source.name)
        _merge_adapters(model, source, packed=packed)
    _refuse_wrong_numbers(model, source.name)
    tokenizer = read_tokenizer(source)
    refuse_larger_tokenizer(tokenizer, model, source)
    # transformers would write how this tokenizer was loaded into every folder that it is saved in.
    for key in ("local_files_only", "is_local"):
        tokenizer.init_kwargs.pop(key, None)
    model.eval()
    return model, tokenizer


def _merge_adapters(model: PreTrainedModel, source: Source, *, packed: bool) -> None:
    """Make the adapters of a language model that were opened by themselves part of its weights."""
    for folder in () if source.adapted is None else source.adapted.merged:
        if packed:
            raise ModelError(
                f"{folder} is an adapter for {source.where}, whose weights are packed, so it can't be merged; "
                "take the model in full precision"
            )
        merge_adapter(model, folder)


def _read_gguf(
    path: Path, dtype: torch.dtype | None, config: PreTrainedConfig, *, weights: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model and the tokenizer in a GGUF file; its weights are unpacked."""
    model, tokenizer = read_skeleton(path, config)
    if weights:
        gguf_model.read_weights(read_file(path), model, dtype or dtype_of(config) or torch.float32)
        refuse_unsound(model, str(path))
    return model, tokenizer


def read_tokenizer(source: Source, where: str | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer whose failures are gerund's errors; ``where`` is another folder or hub id with its files."""
    what = f"cannot load the tokenizer of {source.name}"
    tokenizer: PreTrainedTokenizerBase = guarded(
        what,
        AutoTokenizer.from_pretrained,
        where or _tokenizer_folder(source),
        **(source.hub_options if where is None else {"local_files_only": source.local_only}),
        trust_remote_code=False,
    )
    if all(number in tokenizer.added_tokens_decoder for number in tokenizer.get_vocab().values()):
        raise ModelError(f"{what}: its vocabulary is empty, so that no text has a token")
    guarded(what, lambda: tokenizer.decode(tokenizer("a")["input_ids"]))
    return checked_tokenizer(tokenizer)


def _tokenizer_folder(source: Source) -> str:
    return source.where if source.adapted is None else str(source.adapted.holding("tokenizer.json"))


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class that loads the full model: a multimodal model keeps its other parts."""
    if config.model_type in SEQ2SEQ:
        return AutoModelForSeq2SeqLM
    multimodal = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if multimodal is None or (
        config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and multimodal not in listed_architectures(config)
    ):
        return AutoModelForCausalLM
    return AutoModelForImageTextToText


def read_config(source: Source) -> PreTrainedConfig:
    """Read the config of a model."""
    if source.gguf is not None:
        return gguf_model.read_config(read_file(source.gguf))
    what = source.unreadable
    options = source.hub_options
    data, _ = guarded(what, PreTrainedConfig.get_config_dict, source.where, **options)
    refuse_absurd_config(data, source.name)
    refuse_by_name(data, source.name)
    packing = packing_of(data, source.name)
    config: PreTrainedConfig = guarded(
        what, AutoConfig.from_pretrained, source.where, trust_remote_code=False, **options
    )
    cleaned = without_implementations(data)
    if cleaned != data:
        # transformers renames some architectures while it reads.
        config = guarded(what, type(config).from_dict, {**cleaned, "model_type": config.model_type})
    set_aside(config, data)
    if packing is not None and packing.is_unpacked and not torch.cuda.is_available():
        say_once(f"{source.name}: its weights are quantized as {packing.name} and unpacked, without a GPU for them")
    return config


def is_seq2seq(source: Source) -> bool:
    """Whether a model is an encoder-decoder."""
    return read_config(source).model_type in SEQ2SEQ


def dtype_of(config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that a config names; None where it names none."""
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else None


def own_dtype(source: Source) -> str:
    """Return the name of the checkpoint's dtype; ``auto`` where its config names none."""
    stored = dtype_of(read_config(source))
    return next((name for name, dtype in DTYPES.items() if dtype == stored), "auto")


def pick_device(device: str) -> torch.device:
    """Return the device: ``auto`` takes a GPU where there is one."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        # torch would list two dozen that this build doesn't have.
        raise ConfigError(f"device {device!r} cannot be used here; take auto, cpu, cuda (or cuda:1) or mps") from error
    try:
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return chosen


def pick_dtype(dtype: str) -> torch.dtype | None:
    """Return the torch type of a name; None for ``auto``, which keeps the checkpoint's own."""
    if dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise unknown_dtype(dtype)
    return DTYPES[dtype]


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, state: dict[str, Any], folder: Path) -> None:
    """Write weights, config and tokenizer as transformers does, so that plain transformers reads them."""
    with _save_lock, quiet():
        # save_pretrained writes the class that it saved into the live config, which may be only the model's body.
        before = {key: getattr(model.config, key, None) for key in ("architectures", "dtype")}
        try:
            model.save_pretrained(folder, state_dict=state, max_shard_size=_LARGEST_SHARD)
        finally:
            for key, value in before.items():
                setattr(model.config, key, value)
        # A folder whose class has a head says that there is one.
        lacks_head = isinstance(model.get_output_embeddings(), NoHead) and before["architectures"]
        changes = {"architectures": before["architectures"]} if lacks_head else {}
        restore(model.config, folder / "config.json", **changes)
        tokenizer.save_pretrained(folder)


def settings_folder(source: Source) -> Path | None:
    """Return the folder of ``gerund.json`` and adapters; None for a GGUF file, or where the hub can't be reached."""
    if source.adapted is not None:
        return source.adapted.holding(CONFIG_FILE, MODULES_FILE, LLM2VEC_FILE)
    if source.is_local:
        return source.folder
    from huggingface_hub import snapshot_download

    def fetched(patterns: Sequence[str]) -> Path:
        options = {"allow_patterns": list(patterns), **source.hub_options}
        return Path(guarded(f"cannot find the settings of {source.name}", snapshot_download, source.name, **options))

    try:
        folder = fetched([CONFIG_FILE, *_OWN_FILES, *_READY_MADE])
        return fetched(dense_weights(folder)) if is_ready_made(folder) and dense_weights(folder) else folder
    except ModelError:
        return None  # loading the model reports why


def own_adapters(source: Source, settings: Path | None) -> dict[Job, Path]:
    """Return the PEFT folder of each job that has one: those in a model's folder, or the adapters that were opened.

    ``settings`` is the folder of the model's settings.
    """
    if source.adapted is not None and source.adapted.encoding:
        return {"encode": stacked(source.adapted.encoding)}
    return {} if settings is None else read_adapters(settings)


def original_files(source: Source) -> list[Path]:
    """Return the files of a checkpoint to copy: weights, configs, tokenizer, license."""
    folder = source.folder
    if folder is None:
        from huggingface_hub import snapshot_download

        options = {"allow_patterns": _FILES, **source.hub_options}
        folder = Path(guarded(f"cannot find the files of {source.name}", snapshot_download, source.name, **options))
    index = folder / INDEX
    weights = {WEIGHTS} if (folder / WEIGHTS).is_file() else {INDEX, *shards_of(index)}
    others = {path.name for pattern in _FILES for path in folder.glob(pattern) if not path.name.startswith(".")}
    others = {name for name in others if ".safetensors" not in name and name not in (CONFIG_FILE, *_NOT_COPIED)}
    files = [folder / name for name in sorted(weights | others) if (folder / name).is_file()]
    for path in files:
        demand_readable(path, folder)
    return files


def _refuse_wrong_numbers(model: PreTrainedModel, name: str) -> None:
    """Refuse a generation config with invalid numbers, which would fail during generation."""
    for key, value in vars(model.generation_config).items():
        numbers = value if isinstance(value, (list, tuple)) else [value]
        wrong = any(number is not None and not isinstance(number, (int, float)) for number in numbers)
        if key in _GENERATION_NUMBERS and wrong:
            raise ModelError(f"cannot load {name}: {key} in its generation_config.json is a number, not {value!r}")


def refuse_larger_tokenizer(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, source: Source) -> None:
    """Refuse a tokenizer whose files have tokens that the model has no embedding for."""
    rows, added = model.get_input_embeddings().weight.shape[0], tokenizer.added_tokens_decoder
    ids = tokenizer.get_vocab()
    tokens = max((number + 1 for number in ids.values() if number not in added), default=0)
    if any(number >= rows for number in added):
        # Some tokenizer classes add tokens that are in no file; no text of the model uses them.
        tokens = max(tokens, added_tokens(source, ids))
    if tokens > rows:
        raise ModelError(
            f"cannot load {source.name}: its tokenizer has {tokens} tokens, and the model embeddings for {rows}"
        )
    # A post-processor may name ids that no token has.
    if (highest := max(tokenizer("a")["input_ids"], default=0)) >= rows:
        raise ModelError(
            f"cannot load {source.name}: its tokenizer puts token {highest} around a text, and the model has "
            f"embeddings for {rows}"
        )


def _refuse_other_kinds(config: Any, name: str) -> None:
    kind = config.model_type
    architectures = listed_architectures(config)
    if kind in SEQ2SEQ:
        if architectures and not architectures[0].endswith("ForConditionalGeneration"):
            raise ModelError(f"{name} is a {architectures[0]}; give a T5 with encoder, decoder and output head")
        return
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    known = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    if encoder_decoder or kind not in known:
        raise ModelError(f"{name} is a {kind} model, not a decoder-only language model")
    if any(word in name_ for name_ in architectures for word in ("ForMaskedLM", "ForPreTraining")):
        raise ModelError(f"{name} is an encoder ({architectures[0]}); give a decoder-only language model")
    # These are decoders only where their config says so.
    if kind in _ENCODERS and not config.is_decoder:
        raise ModelError(
            f"{name} is an encoder ({kind}) and does not generate; give a decoder-only language model. To search by "
            f"it: gerund index --encoder st:{name}"
        )


def _forget_packing(model: PreTrainedModel) -> None:
    """Let a model whose weights were unpacked on loading be saved unpacked; transformers would pack them again."""
    if getattr(model.config, "quantization_config", None) is None:
        vars(model).pop("_weight_conversions", None)


def _replace_missing_head(model: PreTrainedModel, info: dict[str, Any], name: str) -> None:
    """Put ``NoHead`` where transformers made up a random head, when nothing else is missing."""
    head = model.get_output_embeddings()
    missing = set(info.get("missing_keys") or ())
    head_names = {key for key, module in model.named_modules() if module is head}
    if head is not None and missing and all(key.rpartition(".")[0] in head_names for key in missing):
        model.set_output_embeddings(_no_head(name, model))
        info["missing_keys"] = []
    if head is None or info.get("missing_keys"):
        return
    if is_bidirectional(model.config):
        model.set_output_embeddings(NoHead(name, "attends in both directions, as its config.json says"))
    elif is_body(model.config) or classifies(model.config):
        # A head that is tied to the embeddings is never missing.
        model.set_output_embeddings(_no_head(name, model))


def _no_head(name: str, model: PreTrainedModel) -> NoHead:
    return NoHead(name, "is a classifier of texts", "scores or encodes") if classifies(model.config) else NoHead(name)


def refuse_incomplete(info: dict[str, Any], name: str) -> None:
    """Refuse a checkpoint that lacks weights, which transformers would initialize at random."""
    missing = sorted(info.get("missing_keys") or ())
    wrong = sorted(str(item[0] if isinstance(item, tuple) else item) for item in info.get("mismatched_keys") or ())
    for keys, what in ((missing, "missing from"), (wrong, "of the wrong shape in")):
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            raise ModelError(f"cannot load {name}: {keys[0]}{more} {what} its weights")


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory with its settings.

    Attributes:
        settings: the folder of its settings, if there is one on this machine.
        options: the other arguments of ``LanguageModel``.
        fills_gaps: whether it or its adapter for infilling is known to be trained for that.
        embeds: whether the record of its training, all weights included, says that its vectors were trained.
        reranker: how it scores pairs of texts; None where it is no reranker.
        score_layer: the layer that scores a pair; None where a token does.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    encoder: EncoderConfig
    settings: Path | None
    options: dict[str, Any]
    fills_gaps: bool
    embeds: bool = False
    reranker: RerankerConfig | None = None
    score_layer: ScoreLayer | None = None

    @property
    def is_bundled(self) -> bool:
        """Whether its adapters came with gerund."""
        return bool(self.options["spec"].adapter == AUTO_ADAPTER)

    @property
    def is_seq2seq(self) -> bool:
        """Whether it is an encoder-decoder."""
        return is_encoder_decoder(self.model)


@quiet()  # once for everything: changing a logger's level clears the caches of all loggers
def open_model(spec: ModelSpec, token: str | bool | None = None, *, generates: bool = False) -> LoadedModel:
    """Load a model with its settings; ``token`` is for the hub, and ``generates`` says that it will not encode."""
    dtype = pick_dtype(spec.dtype)
    where = pick_device(spec.device)
    source = find_spec(spec, token)
    config = read_config(source)
    bundled, settings = settings_of(spec, source, config)
    spec = spec.without_auto()
    adapters_there = own_adapters(source, settings)
    seq2seq = config.model_type in SEQ2SEQ
    # A GGUF file has settings too, but not those of an adapter that brings its own.
    brings_own = bundled is not None or answers_folder(spec.adapter) is not None
    reading = stored_settings(settings, config, spec, None if brings_own else source)
    stored = reading.encoder
    encoder = spec.applied_to(stored)
    reading.tell(source.name, encoder)
    if seq2seq:
        given = [adapters_there.get("encode"), spec.adapter, spec.infill_adapter, spec.scorer]
        _check_seq2seq(encoder, source.name, given)
    adapters = _adapters(adapters_there, spec)
    head = reading.head_for(encoder) if _keeps_head(spec, adapters_there, settings) else None
    packed = takes_packed(spec, source, where, encoder, adapters.folders)
    if dtype is None and where.type == "cpu" and packed is None:
        dtype = _emulated_dtype(config)
    # It was fitted to the vectors of one encoder config.
    is_fitted = encoder.transform != NO_TRANSFORM and spec.adapter is None and vectors_alike(encoder, stored)
    transform = read_transform(settings, encoder.transform) if settings is not None and is_fitted else None
    files = [*weight_files(source, getattr(config, "transformers_weights", None)), *_merged_files(source)]
    before = describe_files(files)
    reranker, layer = reading.reranker, None
    if reranker is not None:
        if not reranker.embeds:
            reranker = replace(reranker, instruction=encoder.prompt)
        if reranker.true is None:
            beside = reranker_folder(spec.reranker) or settings
            layer = read_score_layer(beside, files, source.name, state_width(config))
    if packed is None:
        loaded, tokenizer = read(source, dtype, config)
    else:
        loaded, tokenizer = read(source, torch.float32, config, weights=False)
        loaded = pack(loaded, packed, files, spec, adapters.by_name, cut=None if generates else encoder.exit_layer)
    if bundled is not None and not bundled.fits_tokens(tokenizer):
        return open_model(spec.model_copy(update={"adapter": NO_ADAPTER}), token, generates=generates)
    width = state_width(loaded.config) * encoder.poolings
    if head is not None and head.settings.width != width:
        raise DataError(f"the head in {settings} is for states of {head.settings.width} numbers, not {width}")
    # Only a part of an encoder-decoder is hashed. Files that changed while they were read can't identify the weights.
    stamp = None
    if not seq2seq and describe_files(files) == before:
        stamp = weights_key(before, str(loaded.dtype), *_tensors_of(loaded))
    options = {
        "name": source.name,
        "adapters": adapters,
        "autocast": spec.dtype == "auto" and (where.type == "cuda" or interface.cpu_has_bfloat16()),
        "head": None if head is None else head.to(where),
        "transform": transform,
        "spec": _spec_again(spec, source, packed, bundled),
        "stamp": stamp,
    }
    fills_gaps = seq2seq or is_trained_to_infill(settings, adapters_there, spec)
    trained = is_trained_to_embed(settings, adapters_there)
    return LoadedModel(loaded.to(where), tokenizer, encoder, settings, options, fills_gaps, trained, reranker, layer)


def settings_of(
    spec: ModelSpec, source: Source, config: PreTrainedConfig
) -> tuple[BundledAdapters | None, Path | None]:
    """Return the adapters that come with gerund, where the model is to take some, and the folder of its settings."""
    if (answers := answers_folder(spec.adapter)) is not None:
        return None, answers
    folder = settings_folder(source)
    has_own = folder is not None and any(
        (folder / name).is_file() for name in (CONFIG_FILE, MODULES_FILE, RERANKER_FILE)
    )
    if has_own or source.adapted is not None:
        return None, folder
    if source.gguf is not None and encoder_settings(read_file(source.gguf)) is not None:
        return None, folder
    bundle = bundled_for(spec, config, lambda: weight_files(source, getattr(config, "transformers_weights", None)))
    return (None, folder) if bundle is None else (bundle, bundle.folder)


def _spec_again(spec: ModelSpec, source: Source, packed: Path | None, bundled: BundledAdapters | None) -> ModelSpec:
    """Return the spec that opens a model as it was opened, whatever this machine or a later gerund would choose."""
    if bundled is not None:
        spec = spec.model_copy(update={"adapter": AUTO_ADAPTER})
    # An index of a file's vectors is not searched by another runtime tomorrow.
    return spec if source.gguf is None else with_runtime(spec, packed)


def _merged_files(source: Source) -> list[Path]:
    """Return the files of the adapters that become part of the weights."""
    folders = () if source.adapted is None else source.adapted.merged
    return [folder / file for folder in folders for file in ADAPTER_FILES]


def _tensors_of(model: PreTrainedModel) -> list[str]:
    """Return names and shapes of a model's tensors: its config decides which of those in its files are read."""
    return (
        [packed_in(model)[1]]
        if is_one_graph(model)
        else [f"{name} {tuple(tensor.shape)}" for name, tensor in model.state_dict().items()]
    )


def _emulated_dtype(config: PreTrainedConfig) -> torch.dtype | None:
    """Return float32 where this processor would emulate the checkpoint's dtype; else None."""
    stored = dtype_of(config)
    if stored not in (torch.bfloat16, torch.float16) or interface.cpu_has_bfloat16():
        return None
    # Emulation is slow, and float32 has the same values. Greedy texts may differ from those of the stored dtype.
    return torch.float32


def _adapters(own_folders: Mapping[Job, Path], spec: ModelSpec) -> Adapters:
    """Return the adapter of each job: those of the spec, and for the others those of the model's folder."""
    folders: dict[Job, Path] = {}
    if spec.adapter is None:
        folders = dict(own_folders)
    elif not spec.leaves_adapters and answers_folder(spec.adapter) is None:
        folders = dict.fromkeys(JOBS, place("adapter", spec.adapter))
    for job in JOBS[1:]:
        where = spec.adapter_of(job)
        if where is not None:
            folders.pop(job, None)
            if where != NO_ADAPTER:
                folders[job] = _adapter_in(where, job)
    return Adapters(folders)


def _keeps_head(spec: ModelSpec, own_folders: Mapping[Job, Path], settings: Path | None) -> bool:
    """Whether the head in a model's folder is used: with an adapter or answer tokens trained, it is useless without."""
    has_answers = settings is not None and (settings / ANSWERS_FILE).is_file()
    if spec.adapter is None or answers_folder(spec.adapter) is not None:
        return True
    return not has_answers and "encode" not in own_folders


def _adapter_in(where: str | Path, job: Job) -> Path:
    """Return the adapter for a job from another model, or a PEFT folder itself."""
    folder = place("adapter", where)
    if (folder / ADAPTER_FILES[0]).is_file():
        return folder
    settings = settings_folder(find(where))
    if settings is None:
        raise ModelError(f"there is no folder {where}, and the hub has no such model or cannot be reached")
    adapter = read_adapters(settings).get(job)
    if adapter is None:
        raise DataError(f"{where} has no adapter to {job} with; only an adapter can be taken from another model")
    return adapter


def _check_seq2seq(encoder: EncoderConfig, name: str, adapters: Sequence[str | Path | None]) -> None:
    """Refuse what belongs to decoder-only models."""
    if encoder.reads_beside or encoder.exit_layer is not None:
        raise ConfigError(
            f"{name} has an encoder of its own; layers, exit_layer, states, generated, prepend and reroute are "
            "for decoder-only models"
        )
    if encoder.attention.name != "bidir":
        raise ConfigError(f"{name} has a bidirectional encoder of its own: attention must be bidir")
    if any(where not in (None, NO_ADAPTER) for where in adapters):
        raise ConfigError(f"{name} has an encoder of its own; an adapter for encoding is for decoder-only models")
