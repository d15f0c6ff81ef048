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
    from gerund.attention.plan import PLAN_NAMES, AttentionPlan
    from gerund.config import EncoderConfig, Rerank, Sampling
    from gerund.entry import load
    from gerund.errors import (
        ConfigError,
        DataError,
        GerundError,
        ModelError,
        TextError,
        UnsupportedModelError,
    )
    from gerund.language_model import LanguageModel
    from gerund.spec import ModelSpec
    from gerund.types import Generation, Infill, Ranked

# Imported on first use, so that `import gerund` and the command line's help do not wait for torch.
_WHERE = {
    "AttentionPlan": "gerund.attention.plan",
    "ConfigError": "gerund.errors",
    "DataError": "gerund.errors",
    "EncoderConfig": "gerund.config",
    "Generation": "gerund.types",
    "GerundError": "gerund.errors",
    "Infill": "gerund.types",
    "LanguageModel": "gerund.language_model",
    "ModelError": "gerund.errors",
    "ModelSpec": "gerund.spec",
    "PLAN_NAMES": "gerund.attention.plan",
    "Ranked": "gerund.types",
    "Rerank": "gerund.config",
    "Sampling": "gerund.config",
    "TextError": "gerund.errors",
    "UnsupportedModelError": "gerund.errors",
    "load": "gerund.entry",
}

__all__ = [
    "PLAN_NAMES",
    "AttentionPlan",
    "ConfigError",
    "DataError",
    "EncoderConfig",
    "Generation",
    "GerundError",
    "Infill",
    "LanguageModel",
    "ModelError",
    "ModelSpec",
    "Ranked",
    "Rerank",
    "Sampling",
    "TextError",
    "UnsupportedModelError",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gerund' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
