"""Settings of late interaction: ``LateConfig``, which a model's folder has as ``late.json``.

Knows: names, ranges, JSON. Does not know: torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from gerund.checks import demand_fields, one_of, whole_number
from gerund.errors import ConfigError
from gerund.settings.templates import LAST_LAYER, check_layers

LATE_FILE = "late.json"
TokenPrecision = Literal["float32", "float16", "int8"]
CountedTokens = Literal["text", "all"]
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

    # ``text``: the text's own tokens have vectors. ``all``: so have its marker's and the special ones, as in
    # sentence-transformers.
    counts: CountedTokens = "text"

    skipped: tuple[str, ...] = ()  # tokens of documents that have no vectors, such as punctuation

    query_length: int | None = None  # longest query in tokens, everything included; None for the model's own limit

    document_length: int | None = None  # longest document

    def __post_init__(self) -> None:
        for name in ("query", "document", "layers"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{LATE_FILE}: {name} is a text, not {getattr(self, name)!r}")
        check_layers(self.layers)
        one_of(f"counts in {LATE_FILE}", self.counts, get_args(CountedTokens))
        if any(not isinstance(token, str) for token in self.skipped):
            raise ConfigError(f"{LATE_FILE}: skipped is a list of tokens, not {self.skipped!r}")
        for name in ("query_length", "document_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{LATE_FILE}: {name} is a whole number above 0, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``late.json``, without defaults of settings that were added later."""
        usual = {item.name: item.default for item in fields(self)}
        added = ("counts", "skipped", "query_length", "document_length")
        return {key: value for key, value in asdict(self).items() if key not in added or value != usual[key]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LateConfig":
        """Read settings back; raises ``ConfigError`` for an unknown field."""
        demand_fields(cls, data, f"in {LATE_FILE}")
        listed = data.get("skipped", ())
        if not isinstance(listed, list | tuple):
            raise ConfigError(f"{LATE_FILE}: skipped is a list of tokens, not {listed!r}")
        return cls(**{**data, "skipped": tuple(listed)})


def check_multi(precision: str, pool_factor: int) -> None:
    """Refuse an unknown precision of token vectors, or a pooling of less than one token."""
    one_of("precision of token vectors", precision, TOKEN_PRECISIONS)
    if whole_number("pool_factor", pool_factor) < 1:
        raise ConfigError(f"pool_factor must be at least 1, got {pool_factor}")
