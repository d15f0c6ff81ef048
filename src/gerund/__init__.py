"""gerund: one language model that writes and encodes, with the same weights.

>>> import gerund
>>> lm = gerund.load()
>>> lm.encode(["The cat sat on the mat.", "A feline rested on the rug."]).shape == (2, lm.dimensions)
True
>>> [story] = lm.generate("The old man looked at the sea and", max_new_tokens=8)
>>> isinstance(story.text, str)
True
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gerund.version import __version__ as __version__

if TYPE_CHECKING:
    from gerund.adaptation.config import AdaptConfig
    from gerund.adaptation.running import adapt
    from gerund.engine.config import EngineConfig
    from gerund.engine.engine import Engine
    from gerund.entry import load
    from gerund.errors import (
        ConfigError,
        DataError,
        GerundError,
        ModelError,
        TextError,
        UnsupportedModelError,
    )
    from gerund.inference.generate.config import GenerationConfig
    from gerund.inference.generate.session import Session
    from gerund.language_model import LanguageModel
    from gerund.retrieval.document_reader import ReadLimits
    from gerund.retrieval.documents import Chunking, Document
    from gerund.retrieval.index import Index, open_index
    from gerund.retrieval.open_document import open_document
    from gerund.settings.encoder import EncoderConfig
    from gerund.settings.model_spec import ModelSpec
    from gerund.settings.plan import PLAN_NAMES, AttentionPlan
    from gerund.settings.sampling import Rerank, Sampling
    from gerund.types import Answer, Generation, Hit, Infill, Ranked, Rendered, Source

# Imported on first use, so that `import gerund` and the command line's help do not wait for torch.
_WHERE = {
    "AdaptConfig": "gerund.adaptation.config",
    "Answer": "gerund.types",
    "AttentionPlan": "gerund.settings.plan",
    "Chunking": "gerund.retrieval.documents",
    "ConfigError": "gerund.errors",
    "DataError": "gerund.errors",
    "Document": "gerund.retrieval.documents",
    "EncoderConfig": "gerund.settings.encoder",
    "Engine": "gerund.engine.engine",
    "EngineConfig": "gerund.engine.config",
    "Generation": "gerund.types",
    "GerundError": "gerund.errors",
    "Hit": "gerund.types",
    "Index": "gerund.retrieval.index",
    "Infill": "gerund.types",
    "LanguageModel": "gerund.entry",  # which gives it ``from_pretrained``
    "ModelError": "gerund.errors",
    "ModelSpec": "gerund.settings.model_spec",
    "PLAN_NAMES": "gerund.settings.plan",
    "Ranked": "gerund.types",
    "ReadLimits": "gerund.retrieval.document_reader",
    "Rendered": "gerund.types",
    "Rerank": "gerund.settings.sampling",
    "Sampling": "gerund.settings.sampling",
    "Session": "gerund.inference.generate.session",
    "GenerationConfig": "gerund.inference.generate.config",
    "Source": "gerund.types",
    "TextError": "gerund.errors",
    "UnsupportedModelError": "gerund.errors",
    "adapt": "gerund.adaptation.running",
    "load": "gerund.entry",
    "open_document": "gerund.retrieval.open_document",
    "open_index": "gerund.retrieval.index",
}

__all__ = [
    "PLAN_NAMES",
    "AdaptConfig",
    "Answer",
    "AttentionPlan",
    "Chunking",
    "ConfigError",
    "DataError",
    "Document",
    "EncoderConfig",
    "Engine",
    "EngineConfig",
    "Generation",
    "GenerationConfig",
    "GerundError",
    "Hit",
    "Index",
    "Infill",
    "LanguageModel",
    "ModelError",
    "ModelSpec",
    "Ranked",
    "ReadLimits",
    "Rendered",
    "Rerank",
    "Sampling",
    "Session",
    "Source",
    "TextError",
    "UnsupportedModelError",
    "adapt",
    "load",
    "open_document",
    "open_index",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gerund' has no attribute {name!r}")
    where = _WHERE[name]
    if name == "load":
        from gerund.models.light_runtime import installed

        # Without torch a quantized GGUF file is read all the same.
        where = where if installed("torch") else "gerund.light_entry"
    return getattr(import_module(where), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
