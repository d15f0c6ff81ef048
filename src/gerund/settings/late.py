"""Settings of late interaction: ``LateConfig``, which a model's folder has as ``late.json``.

Knows: names, ranges, JSON. Does not know: torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gerund.checks import one_of, whole_number
from gerund.errors import ConfigError, unknown_name
from gerund.settings.templates import LAST_LAYER, check_layers

LATE_FILE = "late.json"
TokenPrecision = Literal["float32", "float16", "int8"]
TOKEN_PRECISIONS: tuple[TokenPrecision, ...] = get_args(TokenPrecision)


@dataclass(frozen=True)
class LateConfig:
    """How queries and documents are read for their token vectors.

    >>> LateConfig(layers="nowhere")
    Traceback (most recent call last):
    gerund.errors.ConfigError: layers='nowhere' is none of last, all, 6, -2, 4-8 and 1+8
    """

    query: str = "Query: "  # put before every query

    document: str = "Document: "  # put before every document

    layers: str = LAST_LAYER  # whose states are the token vectors, spelled as the encoder's setting

    def __post_init__(self) -> None:
        for name in ("query", "document", "layers"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{LATE_FILE}: {name} is a text, not {getattr(self, name)!r}")
        check_layers(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``late.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LateConfig":
        """Read settings back; raises ``ConfigError`` for an unknown field."""
        known = [item.name for item in fields(cls)]
        for key in data:
            if key not in known:
                raise unknown_name(f"field in {LATE_FILE}", key, known)
        return cls(**data)


def check_multi(precision: str, pool_factor: int) -> None:
    """Refuse an unknown precision of token vectors, or a pooling of less than one token."""
    one_of("precision of token vectors", precision, TOKEN_PRECISIONS)
    if whole_number("pool_factor", pool_factor) < 1:
        raise ConfigError(f"pool_factor must be at least 1, got {pool_factor}")
