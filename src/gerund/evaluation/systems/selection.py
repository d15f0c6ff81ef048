"""Make systems from model specs and names, and label them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gerund.entry import load
from gerund.errors import ConfigError, GerundError, UnsupportedModelError
from gerund.evaluation.systems.base import EmbeddingCache, Encoder, SentenceTransformersSystem, System
from gerund.evaluation.systems.language_model import LanguageModelSystem, language_model_system
from gerund.evaluation.systems.search import (
    BM25,
    HYBRID,
    INDEX,
    BM25System,
    HybridSystem,
    IndexCache,
    IndexSystem,
    parse_fusion,
    parse_index,
)
from gerund.language_model import LanguageModel
from gerund.models.light_runtime import for_many_texts
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.templates import NAMED, NO_TEMPLATE, NO_TRANSFORM


def label_of(config: EncoderConfig, n_layers: int) -> str:
    """Return the short name of an encoder config in tables.

    >>> label_of(EncoderConfig(pooling="last"), 8)
    'mask0-bidir k=4, last'
    """
    parts = [config.plan_label(n_layers)]
    if config.pooling != "mean":
        parts.append(config.pooling)
    if config.append_eos:
        parts.append("eos")
    if config.template != NO_TEMPLATE:
        parts.append(config.template if config.template in NAMED else f"template {config.template[:20]!r}")
    methods = [name for name in config.methods if name != "template"]
    parts += [f"{name} {getattr(config, name)}" if name != "transform" else config.transform for name in methods]
    if config.prompt:
        parts.append(f"prompt {config.prompt[:20]!r}")
    return ", ".join(parts)


def systems_of(
    models: Sequence[ModelSpec | LanguageModel | SentenceTransformersSystem | str],
    columns: Sequence[EncoderSpec] = (),
    *,
    cache: EmbeddingCache | None = None,
    sample: Sequence[str] = (),
) -> list[System]:
    """Return every model under every encoder config, with names that tell them apart.

    Args:
        models: specs, each of which is loaded once; models in memory; ``"bm25"`` for BM25; ``"hybrid"`` for every model
            under every encoder config once more, its ranking joined with BM25's (``"hybrid:rrf"`` by places,
            ``"hybrid:0.4"`` with another weight of the vectors); ``"index"`` for the index of every language model, as
            ``gerund search`` asks it (``"index:vectors,late"`` in other ways). A model of sentence-transformers has one
            config, its own.
        columns: settings under which every model is measured; what they leave out is the model's own. None of them
            leaves a model as it is.
        cache: where embeddings are kept; None keeps them in memory.
        sample: texts on which transforms are fitted that are not yet.

    Returns:
        The systems. Each language model among them that was made from a spec has one of its own, ``lm.spec``, which
        loads just this system elsewhere.

    Raises:
        GerundError: a spec's model cannot be loaded.
        ConfigError: an encoder config does not fit a model, or names a transform and there is no sample; ``"hybrid"``
            has no model to join with BM25; or a name is neither.
    """
    models = [load(for_many_texts(model)) if isinstance(model, ModelSpec) else model for model in models]
    cache = cache or EmbeddingCache()
    names = [model for model in models if isinstance(model, str)]
    fusions = [how for name in names if (how := parse_fusion(name)) is not None]
    indices = [options for name in names if (options := parse_index(name)) is not None]
    several = len({model.name for model in models if isinstance(model, LanguageModel)}) > 1
    # Labels, and what makes a system with its label.
    makers: list[tuple[str, Callable[[str], System]]] = []
    for model in models:
        if isinstance(model, SentenceTransformersSystem):
            makers.append((_short(model.name), partial(model.called, cache=cache)))
        elif isinstance(model, LanguageModel):
            for column in columns or (EncoderSpec(),):
                config = column.applied_to(model.encoder)
                lm = model if config == model.encoder else read_as(model, config, sample)
                label = label_of(config, model.n_layers)
                make = partial(language_model_system, lm=lm, cache=cache)
                makers.append((f"{_short(model.name)}: {label}" if several else label, make))
        elif model == BM25:
            makers.append((BM25, BM25System))
        elif not isinstance(model, str) or (parse_fusion(model) is None and parse_index(model) is None):
            raise ConfigError(f"a spec, a model in memory, {BM25!r}, {HYBRID!r} or {INDEX!r}, not {model!r}")
    labels = distinct([label for label, _ in makers])
    systems = [make(label) for label, (_, make) in zip(labels, makers, strict=True)]
    encoders = [system for system in systems if isinstance(system, Encoder)]
    language_models = [system for system in systems if isinstance(system, LanguageModelSystem)]
    if fusions and not encoders:
        raise ConfigError("hybrid joins the ranking of a model with that of BM25; name a model too")
    if indices and not language_models:
        raise ConfigError("index is that of a language model; name a model too")
    shared = IndexCache()
    systems += [HybridSystem(system, how) for how in fusions for system in encoders]
    return systems + [IndexSystem(system, options, shared) for options in indices for system in language_models]


def read_as(lm: LanguageModel, config: EncoderConfig, sample: Sequence[str]) -> LanguageModel:
    """Return a model under an encoder config, its transform fitted on ``sample`` where it has one that is not."""
    model = lm.with_encoder(config)
    if config.transform == NO_TRANSFORM or model.transform is not None:
        return model
    if not sample:
        raise ConfigError(f"the transform {config.transform!r} is fitted on texts; give a sample of them")
    return model.fitted(sample)


def refusal(lm: LanguageModel, config: EncoderConfig) -> GerundError | None:
    """Return why a model doesn't support an encoder config; None if it does.

    A template may leave no room for text, a plan may convert nothing in a model, a method may not fit its layers.
    """
    try:
        lm.with_encoder(replace(config, transform=NO_TRANSFORM)).encode(["a"])
    except (ConfigError, UnsupportedModelError) as error:
        return error
    return None


def _short(name: str) -> str:
    """Return the last part of a model's name that identifies it: training saves every model in a folder ``model``.

    >>> [_short(name) for name in ("runs/mine/model", "org/name", "model")]
    ['mine', 'name', 'model']
    """
    path = Path(name)
    return path.parent.name or path.name if path.name == "model" else path.name


def distinct(labels: Sequence[str]) -> list[str]:
    """Return the labels, numbered where they repeat.

    >>> distinct(["a", "b", "a"])
    ['a', 'b', 'a (2)']
    """
    seen: dict[str, int] = {}
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result
