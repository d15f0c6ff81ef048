"""Dual-encoder scorers: the dot product of a prefix's and a continuation's vector.

RankGen, section 2.2, with a decoder-only model as the encoder instead of T5: a marker before each text, one encoder for
prefixes and continuations, and a linear map without bias. A model's folder stores its scorer in ``scorer.json`` and
``scorer.safetensors``. The scorer has the encoder's plan, pooling and adapter unless ``scorer.json`` has an
``encoder``, which replaces them.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from gerund.checks import demand_fields, refuse_blank, write_json
from gerund.errors import ConfigError, DataError, TextError, unknown_name
from gerund.inference.encode.incremental import IncrementalEncoder, can_encode_incrementally
from gerund.inference.encode.texts import text_tokens
from gerund.inference.text_ids import beginnings
from gerund.inference.tokens import keep_end
from gerund.models.encoder_settings import default_encoder_config
from gerund.models.heads import read_matrix
from gerund.models.saved_settings import SCORER_FILE, has_scorer, read_saved, saved_fields, settings_from
from gerund.models.vectors import unit
from gerund.settings.encoder import FORMAT, EncoderConfig, read_settings
from gerund.settings.model_spec import EncoderSpec
from gerund.settings.templates import PromptText
from gerund.types import TextModel

WEIGHTS_FILE = "scorer.safetensors"
_PROJECTION = "projection.weight"
SIMILARITIES = ("dot", "cosine")

# Prefix vectors in the cache, so that a search encodes its prompts once.
_CACHED_PREFIXES = 1024

Encode = Callable[[Sequence[str]], np.ndarray]


class VectorScorer:
    """The dot product of two encoders' vectors ``(n, D)``, not normalized.

    >>> lengths = lambda texts: np.array([[len(text), 1.0] for text in texts])
    >>> VectorScorer("lengths", lengths, lengths).score(["ab"], [["c", "def"]])
    [[3.0, 7.0]]
    """

    def __init__(self, name: str, prefixes: Encode, continuations: Encode) -> None:
        self.name = name
        self._encode_prefixes = prefixes
        self._encode_continuations = continuations
        self._prefix_cache: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        for index, prefix in enumerate(prefixes):
            if not prefix.strip():
                raise TextError.about(
                    *("prefix", index),
                    "is empty, and this scorer compares it with what follows; give a text, or take the scorer avg_cll, "
                    "which needs none",
                )
        refuse_blank(continuations)
        prefix_ND = self.prefix_vectors(prefixes)
        texts = list(dict.fromkeys(text for candidates in continuations for text in candidates))
        if not texts:
            return [[] for _ in continuations]
        row = {text: index for index, text in enumerate(texts)}
        text_ND = self.continuation_vectors(texts)
        return [
            (text_ND[[row[text] for text in candidates]] @ vector_D).tolist() if candidates else []
            for vector_D, candidates in zip(prefix_ND, continuations, strict=True)
        ]

    def prefix_vectors(self, prefixes: Sequence[str]) -> np.ndarray:
        """Return the vectors of prefixes, ``(n, D)`` float64, from the cache where they are in it."""
        cache = self._prefix_cache
        with self._lock:
            vectors = {prefix: cache[prefix] for prefix in prefixes if prefix in cache}
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in vectors]
        if missing:
            new_ND = np.asarray(self._encode_prefixes(missing), dtype=np.float64)
            vectors |= dict(zip(missing, new_ND, strict=True))
        with self._lock:
            for prefix, vector in vectors.items():
                cache[prefix] = vector
                cache.move_to_end(prefix)
            while len(cache) > _CACHED_PREFIXES:
                cache.popitem(last=False)
        return np.array([vectors[prefix] for prefix in prefixes])

    def continuation_vectors(self, continuations: Sequence[str]) -> np.ndarray:
        """Return the vectors of continuations, ``(n, D)`` float64."""
        return np.asarray(self._encode_continuations(continuations), dtype=np.float64)


@dataclass(frozen=True)
class ScorerConfig:
    """How a dual-encoder scorer encodes prefixes and continuations."""

    prefix: str = "pre "  # put before every prefix

    continuation: str = "suffi "  # put before every continuation

    prefix_tokens: int = 512
    """Maximum tokens of a prefix, without marker and special tokens; a longer prefix is truncated at its start."""

    continuation_tokens: int = 128  # maximum tokens of a continuation; a longer one is truncated at its end

    similarity: str = "dot"  # ``dot``, or ``cosine``: the dot product of vectors of length 1

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise unknown_name("similarity", self.similarity, list(SIMILARITIES))
        for name in ("prefix_tokens", "continuation_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ScorerConfig":
        """Read settings back; raises ``ConfigError`` for an unknown field or a value of another type."""
        demand_fields(cls, data, f"in {SCORER_FILE}")
        types = {item.name: type(item.default) for item in fields(cls)}
        for key, value in data.items():
            if type(value) is not types[key]:
                raise ConfigError(f"{SCORER_FILE}: {key} cannot be {value!r}")
        return cls(**data)


class DualScorer(VectorScorer):
    """The dot product of two vectors of one encoder, projected by ``projection_DD`` where there is one.

    Attributes:
        has_own_config: whether ``encoder`` is the model under an encoder config of the scorer's own.
    """

    def __init__(
        self,
        encoder: TextModel,
        settings: ScorerConfig | None = None,
        projection_DD: np.ndarray | None = None,
        name: str | None = None,
    ) -> None:
        self.has_own_config = encoder.job == "score"
        settings = settings or ScorerConfig()
        vectors = _Vectors(encoder, settings, projection_DD)
        super().__init__(name or encoder.name, vectors.of_prefixes, vectors.of_continuations)
        self.encoder, self.settings, self.projection_DD = encoder, settings, projection_DD
        self._vectors = vectors
        self._is_incremental: bool | None = None

    @classmethod
    def of_folder(cls, encoder: TextModel, folder: Path | None, *, is_other: bool = False) -> "DualScorer":
        """Return the scorer that is stored in a model's folder, around a model that is in memory already.

        With ``is_other`` the folder is that of another training on the same weights, and its encoder config is used.
        Raises ``DataError`` where the folder has no scorer, or a broken one.
        """
        if folder is None or not has_scorer(folder):
            name = folder if folder is not None and is_other else encoder.name
            raise DataError(f"{name} has no {SCORER_FILE}: it was not trained to score continuations")
        settings, projection_DD = read_scorer(folder)
        saved = read_scorer_config(folder) or (read_saved(folder) if is_other else None)
        if saved is not None:
            encoder = _for_scoring(encoder, saved.applied_to(default_encoder_config(encoder.model.config)))
        if projection_DD is not None and projection_DD.shape != (encoder.dimensions, encoder.dimensions):
            raise DataError(f"{folder / WEIGHTS_FILE} does not fit vectors of {encoder.dimensions} dimensions")
        return cls(encoder, settings, projection_DD)

    def incremental(self) -> "DualScorer":
        """Return this scorer for a search that extends its continuations: only new tokens are encoded.

        Where the plan is not causal, every new token changes the states before it, so it is this scorer unchanged.
        """
        if self._is_incremental is None:
            self._is_incremental = can_encode_incrementally(self.encoder.runtime)
        if not self._is_incremental:
            return self
        other = DualScorer(self.encoder, self.settings, self.projection_DD, self.name)
        other._is_incremental, other._prefix_cache = True, self._prefix_cache
        other._encode_continuations = partial(other._vectors.incremental, IncrementalEncoder(self.encoder.runtime))
        return other

    @property
    def fingerprint(self) -> str:
        """Hash of what the scores depend on in addition to the model's encoder."""
        projection = b"" if self.projection_DD is None else np.ascontiguousarray(self.projection_DD).tobytes()
        settings = json.dumps(asdict(self.settings), sort_keys=True).encode()
        encoder = self.encoder.fingerprint().encode() if self.has_own_config else b""
        return hashlib.blake2b(settings + projection + encoder, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the scorer's files into a model's folder."""
        config = self.encoder.encoder if self.has_own_config else None
        write_scorer(folder, self.settings, self.projection_DD, config)


@dataclass(frozen=True)
class _Vectors:
    """Encodes prefixes and continuations. It has no reference to the scorer, whose memory is then freed with it."""

    encoder: TextModel
    settings: ScorerConfig
    projection_DD: np.ndarray | None

    def of_prefixes(self, texts: Sequence[str]) -> np.ndarray:
        limit = self.settings.prefix_tokens
        ends = [keep_end(self.encoder.tokenizer, text, limit) if text.strip() else text for text in texts]
        return self._encode(ends, self.settings.prefix)

    def of_continuations(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(self._truncated(texts), self.settings.continuation)

    def incremental(self, encoder: IncrementalEncoder, texts: Sequence[str]) -> np.ndarray:
        marker = PromptText(self.settings.continuation)
        tokens = text_tokens(self.encoder.runtime, self._truncated(texts), marker)
        return self._projected(encoder.encode([text for text in tokens if text is not None]))

    def _truncated(self, texts: Sequence[str]) -> list[str]:
        limit = self.settings.continuation_tokens
        return beginnings(self.encoder.tokenizer, [text.strip() for text in texts], limit)

    def _encode(self, texts: Sequence[str], marker: str) -> np.ndarray:
        vectors_ND = self.encoder.encode(texts, prompt=PromptText(marker), normalize=False, show_progress=False)
        return self._projected(vectors_ND)

    def _projected(self, vectors_ND: np.ndarray) -> np.ndarray:
        projected_ND = vectors_ND if self.projection_DD is None else vectors_ND @ self.projection_DD.T
        return unit(projected_ND) if self.settings.similarity == "cosine" else projected_ND


def read_scorer(folder: Path) -> tuple[ScorerConfig, np.ndarray | None]:
    """Return settings and projection ``(D, D)`` of a folder."""
    data = read_settings(folder / SCORER_FILE, "scorer")
    projection_DD = read_matrix(folder / WEIGHTS_FILE, _PROJECTION).numpy() if data.get("projection") else None
    return ScorerConfig.from_dict(data["scorer"]), projection_DD


def read_scorer_config(folder: Path) -> EncoderSpec | None:
    """Return the scorer's own encoder settings; None where it has those of the encoder."""
    encoder = read_settings(folder / SCORER_FILE, "scorer").get("encoder")
    if encoder is None:
        return None
    if not isinstance(encoder, dict):
        raise DataError(f"{folder / SCORER_FILE}: `encoder` must be an object, got {encoder!r}")
    return settings_from(encoder)


def write_scorer(
    folder: Path, settings: ScorerConfig, projection_DD: np.ndarray | None, config: EncoderConfig | None = None
) -> None:
    """Write settings and projection into a model's folder, and ``config`` where it is not the encoder's."""
    if projection_DD is not None:
        save_file({_PROJECTION: torch.from_numpy(np.ascontiguousarray(projection_DD))}, folder / WEIGHTS_FILE)
    data: dict[str, Any] = {"format": FORMAT, "scorer": asdict(settings), "projection": projection_DD is not None}
    if config is not None:
        data["encoder"] = saved_fields(EncoderSpec.of_config(config))
    write_json(folder / SCORER_FILE, data)


def _for_scoring(lm: TextModel, config: EncoderConfig) -> Any:
    """Return the same model with the scorer's own encoder settings and adapter, without head and transform."""
    scoring = lm.with_encoder(config)
    scoring.job, scoring.head, scoring.transform = "score", None, None
    scoring.runtime = replace(scoring.runtime, adapter=lm.adapters.name("score"), head=None, transform=None)
    return scoring
