"""Load a model to generate or embed with, without torch where a packed network suffices.

Knows: which models need torch. Does not know: how a model is loaded.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from gerund.errors import GerundError, MissingDependencyError
from gerund.gguf_file import GgufFile, parts_of, read_file
from gerund.jobs.disk_cache import user_cache
from gerund.models.bundled import bundled_for, tell_bundled
from gerund.models.light_runtime import (
    NEEDS_TORCH,
    installed,
    light_source,
    not_packed,
    return_freed_memory,
    trim_memory,
    usual_threads,
)
from gerund.models.saved_settings import encoder_settings, has_scorer, is_trained_to_infill, read_adapters, read_saved
from gerund.packed.shape import NetworkShape, read_shape
from gerund.settings.encoder import EncoderConfig, vectors_alike
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import LoadKeywords, ModelSpec, takes
from gerund.settings.plan import Direction
from gerund.settings.ranking import NO_RERANKER, family_of
from gerund.settings.templates import NO_TRANSFORM, TRUNCATE

if TYPE_CHECKING:
    from gerund.inference.generate.packed_decoder import PackedWriter
    from gerund.light_model import LightModel, Reading


@takes(LoadKeywords)
def load(model: str | Path | ModelSpec | None = None, *, token: str | bool | None = None, **settings: Any) -> Any:
    """Load a model: a ``LightModel`` where that reads it, else a ``LanguageModel``; see ``gerund.load``.

    This is ``gerund.load`` where torch is not installed.

    Raises:
        MissingDependencyError: it is no model that can be read without torch, and torch is not installed.
    """
    spec = ModelSpec.of(model, **settings)
    if token is None and (light := light_model(spec)) is not None:
        return light
    return _full().load(spec, token=token)


def load_full(spec: ModelSpec) -> Any:
    """Load a ``LanguageModel``.

    Raises:
        MissingDependencyError: torch is not installed.
    """
    return _full().load(spec)


def _full() -> Any:
    """Return the module that loads by torch."""
    try:
        from gerund import entry
    except ImportError as error:
        if all(map(installed, ("torch", "transformers"))):
            raise MissingDependencyError(f"torch or what needs it cannot be imported: {error}") from error
        raise MissingDependencyError(
            f"this model is computed by {NEEDS_TORCH}. Without torch only quantized GGUF files are read, with "
            "onnxruntime and onnx (pip install 'gerund[packed]')"
        ) from error
    return_freed_memory(returns=False)
    return entry


def load_writer(spec: ModelSpec, *, only_writes: bool = False) -> Any:
    """Return a ``LanguageModel`` to generate with, or a ``PackedWriter`` where the caller ``only_writes``.

    No attention plan takes part, so models that no plan reaches generate too.
    """
    if only_writes and (writer := light_writer(spec)) is not None:
        return writer
    return _full().load_writer(spec, only_writes=only_writes)


def light_writer(spec: ModelSpec) -> "PackedWriter | None":
    """Return a model that generates without torch; None where this spec's model needs it."""
    source = light_source(spec)
    if source is None or source.gguf is None:
        return None
    from gerund.inference.generate.packed_decoder import PackedWriter

    return_freed_memory()
    cache, threads = user_cache("packed"), usual_threads()
    writer = PackedWriter.open(source.gguf, name=source.name, model_type="gguf", threads=threads, cache=cache)
    trim_memory()
    return writer


def light_model(spec: ModelSpec) -> "LightModel | None":
    """Return a model that embeds and generates without torch; None where this spec's model needs it."""
    source = light_source(spec, encodes=True)
    if source is None or source.gguf is None:
        return None
    file = read_file(source.gguf)
    shape = read_shape(file)
    try:
        read = _reading(spec, file, shape)
    except GerundError:
        return None  # torch looks closer, and has the errors
    if read is None:
        return None
    from gerund.light_model import LightModel
    from gerund.models.light_tokenizer import read_light_tokenizer
    from gerund.packed.network import PackedNetwork

    tokenizer = read_light_tokenizer(source.gguf)
    if read.bundled is not None and not read.bundled.fits_tokens(tokenizer):
        return light_model(spec.model_copy(update={"adapter": NO_ADAPTER}))
    if read.bundled is not None and spec.adapter is None:
        tell_bundled(source.name)
    return_freed_memory()
    cut = read.encoder.exit_layer
    # Those of other jobs are for torch.
    adapters = {} if read.adapter is None else {"encode": read.adapter}
    network = PackedNetwork.open(source.gguf, threads=usual_threads(), adapters=adapters, cut=cut)
    adapter = spec.without_auto().adapter if read.bundled is None else AUTO_ADAPTER
    again = spec.model_copy(update={"runtime": "packed", "adapter": adapter})
    lm = LightModel(source.gguf, again, network, tokenizer, source.name, read)
    lm.load_again = load
    trim_memory()
    return lm


def _reading(spec: ModelSpec, file: GgufFile, shape: NetworkShape) -> "Reading | None":
    """Return how a file's network reads texts; None where torch is needed for it."""
    from gerund.light_model import Reading
    from gerund.models.light_head import read_light_head
    from gerund.packed.adapter import read_adapter

    own, usual, bundled = encoder_settings(file), EncoderConfig(), None
    if own is None and not _is_reranker(spec, file):
        bundled = bundled_for(spec, _numbers(shape), lambda: parts_of(file.path))
    elif own is None:
        return None
    if bundled is None:
        stored = usual if own is None else own.applied_to(usual)
        encoder = spec.without_auto().applied_to(stored)
        read = Reading(encoder)
        if own is not None and not vectors_alike(encoder, stored):
            return None  # which torch tells the user
    else:
        saved, by_job = read_saved(bundled.folder), read_adapters(bundled.folder)
        stored = usual if saved is None else saved.applied_to(usual)
        encoder = spec.without_auto().applied_to(stored)
        head = read_light_head(bundled.folder)
        if head is not None and not vectors_alike(encoder, stored):
            head = head.without_space()
        adapter = by_job.get("encode")
        if adapter is not None:
            read_adapter(adapter, shape)
        fills_gaps = is_trained_to_infill(bundled.folder, by_job, spec.without_auto())
        read = Reading(encoder, adapter, head, bundled, fills_gaps, has_scorer(bundled.folder))
    return read if _is_light(encoder, shape) else None


def _is_light(encoder: EncoderConfig, shape: NetworkShape) -> bool:
    """Whether an encoder's settings need nothing but a pass of the network."""
    plan = encoder.resolved(shape.n_layers)
    kind = encoder.transform.split("-")[0]
    reads_once = not encoder.reads_beside and not_packed(plan, encoder) is None
    fills = any(view.direction is Direction.HYBRID for view in plan.views)
    return reads_once and not fills and kind in (NO_TRANSFORM, TRUNCATE)


def _is_reranker(spec: ModelSpec, file: GgufFile) -> bool:
    """Whether a file is one that scores pairs of texts, or is to be opened as one."""
    if spec.reranker is not None:
        return bool(spec.reranker != NO_RERANKER)
    return spec.attention is None and spec.pooling is None and family_of(file.path.name) is not None


def _numbers(shape: NetworkShape) -> SimpleNamespace:
    """Return the numbers of an architecture as a config of transformers has them."""
    return SimpleNamespace(
        model_type=shape.architecture,
        num_hidden_layers=shape.n_layers,
        hidden_size=shape.width,
        vocab_size=shape.vocabulary,
        num_attention_heads=shape.n_heads,
        intermediate_size=shape.inner,
    )
