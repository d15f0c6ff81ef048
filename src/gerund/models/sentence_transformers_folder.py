"""Read and write the settings of a sentence-transformers folder: modules, prompts, lengths and similarity.

The chain of modules is supported as a whole or not at all: an unknown module raises an error that names it. Reads the
layouts of versions 2 to 6. Nothing in the folder is executed.
"""

import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gerund.checks import read_json, write_json
from gerund.errors import ConfigError, DataError, ModelError
from gerund.models.folder_files import demand_readable
from gerund.poolings import CONCATENATED, MODES, SWITCHES
from gerund.settings.encoder import CONFIG_FILE, SIMILARITIES, ST_CONVENTIONS, EncoderConfig, LateConfig
from gerund.settings.templates import TRUNCATE, is_template

OWN_CLASS = "gerund.integrations.sentence_transformers.Transformer"
MODULES_FILE = "modules.json"
SETTINGS_FILE = "config_sentence_transformers.json"
TRANSFORMER_FILE = "sentence_bert_config.json"
MODULE_FILE = "config.json"
MODULE_WEIGHTS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_MODULE_FILES = (MODULE_FILE, MODULE_WEIGHTS, TRANSFORMER_FILE)
_ROUTER_FILE = "router_config.json"
_LLM2VEC_GEN_FILE = "encoder_decoder_config.json"

_CLASSES = {
    "Transformer": "transformer",
    "Pooling": "pooling",
    "Dense": "dense",
    "Normalize": "normalize",
    "LayerNorm": "layer_norm",
    "Dropout": "dropout",
}
_PACKAGES = ("base", "sentence_transformer")
# Versions 2 to 5 wrote the short name, and version 6 writes where the class is now.
_KINDS = {f"sentence_transformers.models.{name}": name for name in _CLASSES}
_KINDS |= {f"sentence_transformers.models.{name}.{name}": name for name in _CLASSES}
_KINDS |= {
    f"sentence_transformers.{package}.modules.{file}{name}": name
    for package in _PACKAGES
    for name, module in _CLASSES.items()
    for file in ("", f"{module}.")
}
_LOGIT_SCORE = "sentence_transformers.cross_encoder.modules"
_KINDS |= {f"{_LOGIT_SCORE}{file}.LogitScore": "LogitScore" for file in ("", ".logit_score")}
_MASK = "sentence_transformers.multi_vector_encoder.modules"
# Modules of late interaction, which no other model has.
_LATE_KINDS = {f"{_MASK}{file}.MultiVectorMask": "MultiVectorMask" for file in ("", ".multi_vector_mask")}
_LATE_KINDS |= {"pylate.models.Dense.Dense": "Dense"}
_PYLATE, _MULTI_VECTOR = "ColBERT", "MultiVectorEncoder"
"""Model types that the settings files of PyLate and sentence-transformers name."""
_SPARSE = "its vectors are sparse, one number for each token of the vocabulary"
_LATE = "it keeps a vector for each token (late interaction)"
_NO_LANGUAGE_MODEL = "it is no language model"
_UNKNOWN_LAYER = "gerund has no such layer"
_REASONS = {
    "Router": "it chooses among several models",
    "Asym": "it chooses among several models",
    "StaticEmbedding": _NO_LANGUAGE_MODEL,
    "WordEmbeddings": _NO_LANGUAGE_MODEL,
    "BoW": _NO_LANGUAGE_MODEL,
    "CLIPModel": _NO_LANGUAGE_MODEL,
    "CNN": _UNKNOWN_LAYER,
    "LSTM": _UNKNOWN_LAYER,
    "WeightedLayerPooling": _UNKNOWN_LAYER,
    "WordWeights": _UNKNOWN_LAYER,
    "MLMTransformer": _SPARSE,
    "SpladePooling": _SPARSE,
    "SparseAutoEncoder": _SPARSE,
    "SparseStaticEmbedding": _SPARSE,
    "MultiVectorMask": _LATE,
    "HierarchicalTokenPooling": _LATE,
    "LambdaTokenPooling": _LATE,
}
_OTHER_TYPES = {"SparseEncoder": _SPARSE}
WAY_OUT = "use sentence-transformers for it"
_CODE_WAY_OUT = (
    "use sentence-transformers, which runs it with trust_remote_code, or a folder whose weights are merged into plain "
    "modules"
)

_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?(Identity|Tanh|ReLU|GELU|Sigmoid|SiLU)")
# What a Dense layer is followed by where its file does not say.
_NO_ACTIVATION = "Tanh"
_VECTOR = "sentence_embedding"
_STATES = "token_embeddings"
_DENSE_KEYS = {
    "in_features",
    "out_features",
    "bias",
    "activation_function",
    "module_input_name",
    "module_output_name",
    "use_residual",
}
# Authors' names of the prompts for documents and queries. sentence-transformers uses only the first by default.
_DOCUMENT_NAMES = ("document", "passage", "corpus")
_QUERY_NAMES = ("query", "web_search_query", "s2p_query")

# Settings for transformers that don't change vectors, or that gerund decides itself.
HARMLESS = {
    "attn_implementation",
    "device_map",
    "dtype",
    "low_cpu_mem_usage",
    "padding_side",
    "torch_dtype",
    "trust_remote_code",
    "use_cache",
    "use_fast",
}
_ARGUMENTS = ("model_args", "model_kwargs", "config_args", "config_kwargs")
TOKENIZER_ARGUMENTS = ("tokenizer_args", "processor_kwargs")


@dataclass(frozen=True)
class ListedModule:
    """One entry of ``modules.json``.

    Attributes:
        place: its index.
        path: its folder, relative to the model's; empty for the model's folder.
        type: the full name of its class.
    """

    place: int
    path: str
    type: str

    @property
    def kind(self) -> str | None:
        """Its class; None for classes that gerund doesn't know."""
        return _KINDS.get(self.type)


@dataclass(frozen=True)
class ReadyMade:
    """The encoder settings in a sentence-transformers folder, except the attention.

    Attributes:
        settings: fields of ``EncoderConfig``.
        modules: the modules after the pooling: the fields of ``VectorModule``, each with the folder of its weights.
        notes: what a user should know about them.
    """

    settings: dict[str, Any]
    modules: tuple[tuple[dict[str, Any], str], ...] = ()
    notes: list[str] = field(default_factory=list)


def is_ready_made(folder: Path) -> bool:
    """Whether a folder is one of sentence-transformers, without ``gerund.json``, which takes precedence."""
    return (folder / MODULES_FILE).is_file() and not (folder / CONFIG_FILE).is_file()


def read_ready_made(folder: Path) -> ReadyMade:
    """Read the encoder settings in a sentence-transformers folder."""
    modules = listed_modules(folder)
    settings = read_object(folder / SETTINGS_FILE)
    kind = settings.get("model_type") or "SentenceTransformer"
    if kind in (_PYLATE, _MULTI_VECTOR):
        return _read_late(folder, modules)
    if kind != "SentenceTransformer":
        reason = _OTHER_TYPES.get(str(kind), "gerund does not know such models")
        raise ModelError(f"{folder / SETTINGS_FILE} says {kind}: {reason}; {WAY_OUT}")
    first, pooling, *after = _checked_order(folder, modules)
    stored = ReadyMade({"conventions": ST_CONVENTIONS}, _chain(folder, after))
    normalizes = bool(after) and after[-1].kind == "Normalize"
    stored.settings.update(_pooling(folder / pooling.path / MODULE_FILE), normalize=normalizes)
    stored.settings.update(_text(folder, first))
    stored.settings.update(_compared(folder, settings))
    stored.settings.update(_prompts(folder, settings, stored.notes))
    stored.settings["append_eos"] = _appends_eos(folder)
    return stored


@dataclass(frozen=True)
class LateModules:
    """How a folder makes token vectors: the settings, and the folders of linear maps, in their order."""

    config: LateConfig
    layers: tuple[str, ...]


def read_late_modules(folder: Path) -> LateModules | None:
    """Return how a folder of sentence-transformers' ``MultiVectorEncoder`` or of PyLate makes token vectors.

    None for a folder of another kind. Query expansion, and anything else that would change vectors, is refused.
    """
    settings = read_object(folder / SETTINGS_FILE)
    if settings.get("model_type") not in (_PYLATE, _MULTI_VECTOR):
        return None
    modules = _late_order(folder, listed_modules(folder))
    by_pylate = settings["model_type"] == _PYLATE
    data = settings if by_pylate else read_object(folder / TRANSFORMER_FILE)
    path = folder / (SETTINGS_FILE if by_pylate else TRANSFORMER_FILE)
    expands = data.get("do_query_expansion", True) if by_pylate else data.get("query_expansion") is not None
    if expands is not False:
        raise ModelError(f"{path} pads queries with mask tokens (query expansion), which gerund does not do; {WAY_OUT}")
    skipped: Any = settings.get("skiplist_words", list(string.punctuation)) if by_pylate else []
    for module in modules:
        if module.type in _LATE_KINDS and _LATE_KINDS[module.type] == "MultiVectorMask":
            mask = read_object(folder / module.path / MODULE_FILE)
            skipped = mask.get("skiplist_words") or []
            if mask.get("keep_only_token_ids") or mask.get("skiplist_tasks", ["document"]) != ["document"]:
                raise ModelError(f"{folder / module.path} masks other tokens than gerund can; {WAY_OUT}")
    prompts, _ = stored_prompts(folder / SETTINGS_FILE, settings)
    markers = {
        name: str(settings.get(f"{name}_prefix") or "")
        + prompts.get(name, "").removeprefix(str(settings.get(f"{name}_prefix") or ""))
        for name in ("query", "document")
    }
    lengths = {name: checked_length(path, data.get(name)) for name in ("query_length", "document_length")}
    config = LateConfig(**markers, counts="all", skipped=tuple(skipped or ()), **lengths)  # type: ignore[arg-type]
    return LateModules(config, tuple(module.path for module in modules if _kind_of(module) == "Dense"))


def _kind_of(module: ListedModule) -> str | None:
    return module.kind or _LATE_KINDS.get(module.type)


def _late_order(folder: Path, modules: list[ListedModule]) -> list[ListedModule]:
    """Return the modules of late interaction, after checking that they are a language model and linear maps."""
    refuse_unknown(folder, [module for module in modules if module.type not in _LATE_KINDS])
    active = [module for module in modules if module.kind != "Dropout"]
    kinds = [_kind_of(module) for module in active]
    rest = [kind for kind in kinds[1:] if kind != "MultiVectorMask"]
    dense = rest[:-1] if rest[-1:] == ["Normalize"] else rest
    if kinds[:1] != ["Transformer"] or active[0].path or any(kind != "Dense" for kind in dense):
        raise ModelError(
            f"{folder / MODULES_FILE} lists {', '.join(map(str, kinds))}; gerund reads a Transformer in the folder "
            f"itself, and behind it Dense, MultiVectorMask and Normalize; {WAY_OUT}"
        )
    for module in active[1:]:
        if _kind_of(module) == "Dense":
            fields = _layer(folder, module, _STATES)
            if fields["bias"] or fields["residual"] or fields["activation"] != "Identity":
                raise ModelError(
                    f"{folder / module.path / MODULE_FILE} has a bias, an activation or a residual connection, and "
                    f"gerund makes token vectors by a linear map alone; {WAY_OUT}"
                )
        elif module.kind == "Normalize":
            _check_names(folder, module, _STATES)
    return active


def _read_late(folder: Path, modules: list[ListedModule]) -> ReadyMade:
    """Read the settings of a model of late interaction; the vector of a whole text is the mean of its states."""
    late = read_late_modules(folder)
    assert late is not None
    of_late_vectors = ("query_length", "document_length", "query_expansion")
    stored = ReadyMade({"conventions": ST_CONVENTIONS, "pooling": "mean", "normalize": True})
    stored.settings.update(_text(folder, modules[0], without=of_late_vectors))
    stored.settings["prompts"] = {"query": late.config.query, "document": late.config.document}
    stored.settings["append_eos"] = _appends_eos(folder)
    stored.notes.append(
        "it was trained for token vectors (encode_multi, rerank by maxsim); encode gives the mean of its states, which "
        "was not trained"
    )
    return stored


def listed_modules(folder: Path) -> list[ListedModule]:
    """Return the modules in ``modules.json``."""
    path = folder / MODULES_FILE
    data = read_json(path)
    if not isinstance(data, list) or not data:
        raise DataError(f"{path} is no list of modules")
    modules = []
    for place, item in enumerate(data):
        where, kind = (item.get("path"), item.get("type")) if isinstance(item, dict) else (None, None)
        if not isinstance(where, str) or not isinstance(kind, str):
            raise DataError(f"{path}: module {place} is no object with path and type")
        if re.match(r"[/\\]|[A-Za-z]:", where) or ".." in re.split(r"[/\\]", where) or "\0" in where:
            raise DataError(f"{path}: module {place} is outside the folder: {where!r}")
        for name in _MODULE_FILES if where else ():
            demand_readable(folder / where / name, folder)
        modules.append(ListedModule(place, where, kind))
    return modules


def refuse_modules(folder: Path) -> None:
    """Raise ``ModelError`` for a folder without ``config.json``, where its files explain why."""
    if (folder / _LLM2VEC_GEN_FILE).is_file():
        raise ModelError(
            f"{folder / _LLM2VEC_GEN_FILE} is of LLM2Vec-Gen, whose layers are pickled and would run code; use "
            "llm2vec-gen itself, or its base model"
        )
    if (folder / _ROUTER_FILE).is_file():
        raise ModelError(f"{folder / _ROUTER_FILE} is of a Router, which chooses among several models; {WAY_OUT}")
    if not (folder / MODULES_FILE).is_file():
        return
    modules = listed_modules(folder)
    refuse_unknown(folder, modules)
    if modules[0].path:
        raise ModelError(
            f"{folder / MODULES_FILE} puts the language model into {modules[0].path}; move the files of that folder "
            f"into {folder}, and give it the path ''"
        )


def dense_weights(folder: Path) -> list[str]:
    """Return the files of the modules' weights, to download them."""
    kinds = ("Dense", "LayerNorm")
    return [f"{module.path}/{MODULE_WEIGHTS}" for module in listed_modules(folder) if _kind_of(module) in kinds]


def refuse_unknown(folder: Path, modules: list[ListedModule]) -> None:
    """Raise ``ModelError`` for a module that gerund doesn't know, by its name."""
    for module in modules:
        if module.kind is not None:
            continue
        what = f"{folder / MODULES_FILE}: module {module.place} is {module.type}, which gerund cannot run"
        if module.type == OWN_CLASS:
            raise ModelError(f"{folder / MODULES_FILE} is gerund's, and {CONFIG_FILE} is not there: copy it along")
        package, _, name = module.type.rpartition(".")
        if package.startswith("pylate."):
            raise ModelError(f"{what}: {_LATE}; use pylate for it")
        if not package.startswith("sentence_transformers."):
            raise ModelError(f"{what}: it is code of its author; {_CODE_WAY_OUT}")
        raise ModelError(f"{what}: {_REASONS.get(name, _UNKNOWN_LAYER)}; {WAY_OUT}")


def _checked_order(folder: Path, modules: list[ListedModule]) -> list[ListedModule]:
    """Return the modules that compute something: a language model, its pooling, and the modules after it."""
    refuse_unknown(folder, modules)
    active = [module for module in modules if module.kind != "Dropout"]  # inactive outside of training
    kinds = [module.kind for module in active]
    if kinds[:2] != ["Transformer", "Pooling"] or {"Transformer", "Pooling"} & set(kinds[2:]):
        named = ", ".join(map(str, kinds))
        raise ModelError(
            f"{folder / MODULES_FILE} lists {named}; gerund reads a Transformer, then one Pooling, and behind it "
            f"Dense, LayerNorm and Normalize; {WAY_OUT}"
        )
    if active[0].path:
        raise ModelError(
            f"{folder / MODULES_FILE} puts the language model into {active[0].path}; move its files into {folder}"
        )
    return active


def _chain(folder: Path, modules: list[ListedModule]) -> tuple[tuple[dict[str, Any], str], ...]:
    """Return the modules between pooling and the last normalization."""
    while modules and modules[-1].kind == "Normalize":
        _check_names(folder, modules[-1])
        modules = modules[:-1]
    chain: list[tuple[dict[str, Any], str]] = []
    width: int | None = None
    for module in modules:
        if module.kind == "Normalize":
            _check_names(folder, module)
            # The width of the first module is known when the model is loaded.
            fields: dict[str, Any] = {"kind": "Normalize", "width": width, "dimensions": width}
        else:
            fields = _layer(folder, module)
        width = fields["dimensions"]
        chain.append((fields, module.path))
    return tuple(chain)


def _layer(folder: Path, module: ListedModule, source: str = _VECTOR) -> dict[str, Any]:
    path = folder / module.path / MODULE_FILE
    data = demanded(path)
    weights = folder / module.path / MODULE_WEIGHTS
    if not weights.is_file():
        if (folder / module.path / _PICKLED).is_file():
            raise DataError(
                f"{folder / module.path / _PICKLED} may run code when it is opened; convert it to safetensors "
                "(load it with sentence-transformers and save it)"
            )
        raise DataError(f"{weights} is missing: without this {module.kind} layer the vectors would be others")
    if module.kind == "LayerNorm":
        width = _number(path, data, "dimension")
        return {"kind": "LayerNorm", "width": width, "dimensions": width}
    if unknown := sorted(data.keys() - _DENSE_KEYS):
        raise ModelError(f"{path} has the setting {unknown[0]!r}, which gerund does not know; {WAY_OUT}")
    _check_names(folder, module, source)
    activation = activation_of(path, data.get("activation_function", f"torch.nn.{_NO_ACTIVATION}"))
    flags = {"bias": data.get("bias", True), "residual": data.get("use_residual", False)}
    if any(type(value) is not bool for value in flags.values()):
        raise DataError(f"{path}: bias and use_residual are true or false")
    sizes = {"width": _number(path, data, "in_features"), "dimensions": _number(path, data, "out_features")}
    return {"kind": "Dense", **sizes, **flags, "activation": activation}


def activation_of(path: Path, given: Any) -> str:
    """Return the class of ``torch.nn`` that a file names as an activation."""
    activation = _ACTIVATION.fullmatch(given) if isinstance(given, str) else None
    if activation is None:
        raise ModelError(
            f"{path} names the activation {given!r}; gerund has Identity, Tanh, ReLU, GELU, Sigmoid and SiLU of "
            f"torch.nn; {WAY_OUT}"
        )
    return activation[1]


def _check_names(folder: Path, module: ListedModule, source: str = _VECTOR) -> None:
    """Refuse a module that doesn't work on the vector of a text, or on what else is its source."""
    path = folder / module.path / MODULE_FILE
    # A Normalize without a folder has no file; the model's config.json is another one.
    data = read_object(path) if module.path else {}
    for key in ("module_input_name", "module_output_name"):
        value = data.get(key)
        if value not in (None, source):
            reason = _LATE if value == _STATES else f"gerund computes {source} alone"
            raise ModelError(f"{path} has {key} {value!r}: {reason}; {WAY_OUT}")
    if module.kind == "Normalize" and data.get("normalize_embeddings", True) is not True:
        raise ModelError(f"{path} says that its normalize_embeddings is off, and gerund would normalise; {WAY_OUT}")


def _pooling(path: Path) -> dict[str, Any]:
    data = demanded(path)
    modes = data.get("pooling_mode")
    if modes is None:
        modes = [mode for switch, mode in SWITCHES.items() if data.get(switch)] or ["mean"]
    listed = [modes] if isinstance(modes, str) else modes
    if not isinstance(listed, list) or not listed or any(mode not in MODES for mode in map(str, listed)):
        raise ModelError(f"{path} pools by {modes!r}; gerund knows {', '.join(MODES)}, and several of them")
    includes = data.get("include_prompt", True)
    if type(includes) is not bool:
        raise DataError(f"{path}: include_prompt is true or false, not {includes!r}")
    return {"pooling": CONCATENATED.join(MODES[mode] for mode in listed), "pool_prompt": includes}


def _text(folder: Path, transformer: ListedModule, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the maximum length; refuse settings that change tokens, but those of ``without``."""
    path = folder / transformer.path / TRANSFORMER_FILE
    data = read_object(path)
    modalities = data.get("modality_config")
    if isinstance(modalities, dict) and "message" in modalities:
        raise ModelError(
            f'{path} has "message" in its modality_config, so sentence-transformers puts every text into the chat '
            "template, which gerund does not; use sentence-transformers, or take that entry out where the model was "
            "trained on plain texts"
        )
    expected = {"method": "forward", "method_output_name": "last_hidden_state"}
    if modalities is not None and (not isinstance(modalities, dict) or modalities.get("text") != expected):
        raise ModelError(f"{path}: its modality_config reads texts by something else than the last hidden state")
    usual = {"transformer_task": "feature-extraction", "module_output_name": _STATES, "do_lower_case": False}
    usual |= dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"))
    for key, value in usual.items():
        if key not in without and data.get(key, value) not in (value, None):
            raise ModelError(f"{path} says {key} {data[key]!r}, which gerund does not do; {WAY_OUT}")
    length = data.get("max_seq_length")
    for name, key, value in stored_arguments(data):
        if name in TOKENIZER_ARGUMENTS and key == "model_max_length":
            length = value
        elif key not in HARMLESS:
            raise ModelError(f"{path} says {key} {value!r} in its {name}, which gerund does not do; {WAY_OUT}")
    processing = data.get("processing_kwargs") or {}
    if not isinstance(processing, dict) or processing.get("text") or processing.get("common"):
        raise ModelError(f"{path} has processing_kwargs for texts, which gerund does not know; {WAY_OUT}")
    return {"max_length": checked_length(path, length)}


def checked_length(path: Path, length: Any) -> int | None:
    """Return the longest text in tokens that a file names; None where it names none."""
    if length is not None and (type(length) is not int or length < 1):
        raise DataError(f"{path}: max_seq_length is a whole number above 0, not {length!r}")
    return length


def stored_arguments(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the keywords for transformers in a Transformer module's file: where each is, its name and its value."""
    for name in (*_ARGUMENTS, *TOKENIZER_ARGUMENTS):
        given = data.get(name) or {}
        for key, value in given.items() if isinstance(given, dict) else [(name, given)]:
            yield name, key, value


def _compared(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    similarity = data.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ModelError(f"{path} compares vectors by {similarity!r}; gerund knows {', '.join(SIMILARITIES)}")
    settings = {"similarity": similarity}
    if (kept := data.get("truncate_dim")) is not None:
        if type(kept) is not int or kept < 1:
            raise DataError(f"{path}: truncate_dim is a whole number above 0, not {kept!r}")
        settings["transform"] = f"{TRUNCATE}-{kept}"
    return settings


def _prompts(folder: Path, data: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    prompts, prompt = stored_prompts(folder / SETTINGS_FILE, data)
    if wrong := next((name for name, text in prompts.items() if is_template(text)), None):
        raise ModelError(
            f"{folder / SETTINGS_FILE}: the prompt {wrong!r} has a place {{text}} in it, which gerund would fill"
        )
    for wanted, names in (("document", _DOCUMENT_NAMES), ("query", _QUERY_NAMES)):
        named = next((name for name in names if name in prompts), None)
        if named not in (None, wanted):
            prompts[wanted] = prompts[str(named)]
            notes.append(
                f"searches take its prompt {named!r}, since it has none called {wanted!r}; encode_{wanted} of "
                "sentence-transformers takes none"
            )
    if prompt:
        # The default is for other texts; a query or document without its own prompt gets none.
        prompts = {**prompts, **{name: prompts.get(name, "") for name in ("query", "document")}}
    return {"prompts": prompts, "prompt": prompt}


def stored_prompts(path: Path, data: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """Return the prompts by name in a settings file, and the text of the default one, which may be empty."""
    given = data.get("prompts") or {}
    if not isinstance(given, dict) or any(not isinstance(text, str | None) for text in given.values()):
        raise DataError(f"{path}: prompts are texts by name, not {given!r}")
    prompts = {name: text or "" for name, text in given.items()}
    default = data.get("default_prompt_name")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        raise ConfigError(f"{path} names the default prompt {default!r}, and its prompts have no such name")
    return prompts, "" if default is None else prompts[default]


def _appends_eos(folder: Path) -> bool:
    """Whether the tokenizer's settings add an end token, and its post-processor doesn't."""
    if read_object(folder / "tokenizer_config.json").get("add_eos_token") is not True:
        return False
    return not closes_texts(folder)


def closes_texts(folder: Path) -> bool:
    """Whether the post-processor in ``tokenizer.json`` adds a special token after a text."""
    pending = [read_object(folder / "tokenizer.json").get("post_processor")]
    while pending:
        processor = pending.pop()
        if not isinstance(processor, dict):
            continue
        inner = processor.get("processors")
        pending += inner if isinstance(inner, list) else []
        single, is_template = processor.get("single"), processor.get("type") == "TemplateProcessing"
        last = single[-1] if is_template and isinstance(single, list) and single else None
        if isinstance(last, dict) and "SpecialToken" in last:
            return True
    return False


def read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty without the file."""
    if not path.is_file():
        return {}
    data = read_json(path)
    if not isinstance(data, dict):
        raise DataError(f"{path} holds no object")
    return data


def demanded(path: Path) -> dict[str, Any]:
    """Return the content of the JSON file of a listed module."""
    if not path.is_file():
        raise DataError(f"{path} is missing, though {MODULES_FILE} lists this module")
    return read_object(path)


def _number(path: Path, data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if type(value) is not int or value < 1:
        raise DataError(f"{path}: {key} is a whole number above 0, not {value!r}")
    return value


_NORMALIZE = "sentence_transformers.models.Normalize"
# The prompts that sentence-transformers looks up automatically.
_JOBS = ("query", "document")
_NEEDS = {
    "gerund": {
        "specifier": ">=0.1",
        "reason": "Its attention plan is gerund's; open it with gerund.integrations.sentence_transformers.load(FOLDER)",
    }
}


def write_own_modules(folder: Path, config: EncoderConfig) -> None:
    """Write ``modules.json`` with gerund's own class."""
    write_modules(folder, config, [("", OWN_CLASS)], needs=_NEEDS)


def write_modules(
    folder: Path,
    config: EncoderConfig,
    modules: list[tuple[str, str]],
    *,
    needs: dict[str, dict[str, str]] | None = None,
) -> None:
    """Write ``modules.json`` and the settings file.

    ``modules`` are the folder and class of each module except the normalization; ``needs`` the required packages, each
    with a ``specifier`` and a ``reason``.
    """
    if config.normalize:
        modules = [*modules, (f"{len(modules)}_Normalize", _NORMALIZE)]
    listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / MODULES_FILE, listed)
    prompts, default = prompt_settings(config)
    settings = {"prompts": prompts, "default_prompt_name": default, "similarity_fn_name": config.similarity}
    required = {"requirements": needs} if needs else {}
    write_json(folder / SETTINGS_FILE, {"model_type": "SentenceTransformer", **settings, **required})


def prompt_settings(config: EncoderConfig) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one.

    A default prompt is that of queries and documents too, where these have none of their own: ``encode_query`` and
    ``encode_document`` would otherwise put nothing before a text.

    >>> prompt_settings(EncoderConfig(prompt="Query: ", prompts={"document": "Text: "}))
    ({'default': 'Query: ', 'query': 'Query: ', 'document': 'Text: '}, 'default')
    >>> prompt_settings(EncoderConfig(prompts={"document": "Text: "}))
    ({'document': 'Text: '}, None)
    """
    prompts = dict(config.prompts)
    if not config.prompt:
        return prompts, None
    name = next((name for name, text in prompts.items() if text == config.prompt), None)
    if name is None:
        name = "default" if "default" not in prompts else "gerund-default"
    return {name: config.prompt, **dict.fromkeys(_JOBS, config.prompt), **prompts}, name
