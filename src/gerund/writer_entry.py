"""Load a model to generate with: without torch where a packed network is enough.

Knows: who can do it. Does not know: how.
"""

from typing import TYPE_CHECKING, Any

from gerund.jobs.disk_cache import user_cache
from gerund.models.light_runtime import light_source, usual_threads
from gerund.settings.model_spec import ModelSpec

if TYPE_CHECKING:
    from gerund.inference.generate.packed_writer import PackedWriter


def load_writer(spec: ModelSpec, *, only_writes: bool = False) -> Any:
    """Return a ``LanguageModel`` to generate with, or a ``PackedWriter`` where the caller ``only_writes``.

    No attention plan takes part, so models that no plan reaches generate too.
    """
    if only_writes and (writer := light_writer(spec)) is not None:
        return writer
    from gerund.entry import load_writer

    return load_writer(spec, only_writes=only_writes)


def light_writer(spec: ModelSpec) -> "PackedWriter | None":
    """Return a model that generates without torch; None where this spec's model needs it."""
    source = light_source(spec)
    if source is None or source.gguf is None:
        return None
    from gerund.inference.generate.packed_writer import PackedWriter

    cache, threads = user_cache("packed"), usual_threads()
    return PackedWriter.open(source.gguf, name=source.name, model_type="gguf", threads=threads, cache=cache)
