"""A decoder-only model as a scorer: the weights that write also turn prefixes and continuations into vectors.

RankGen, section 2.2, with our encoder in the place of T5: a marker before each text, one encoder for both sides, a
linear map without bias, the dot product. The model's folder has ``scorer.json`` and ``scorer.safetensors`` beside its
other files; without them it is the same language model and encoder. A scorer has the encoder's plan, pooling
and adapter, or, where ``scorer.json`` has an ``encoder``, its own.

Knows: markers, where long texts are cut, the folder. Does not know: how texts become vectors.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from gerund.checks import refuse_blank
from gerund.errors import ConfigError, DataError, TextError, unknown_name
from gerund.inference.encode.incremental import IncrementalEncoder, can_encode_incrementally
from gerund.inference.text_ids import encode_texts
from gerund.inference.tokens import keep_end
from gerund.models.encoder_settings import default_encoder_config, read_saved, saved_fields, settings_from
from gerund.models.loading import open_model
from gerund.models.vectors import unit
from gerund.seq2seq_encoder import Seq2SeqEncoder
from gerund.settings.encoder import FORMAT, EncoderConfig, read_settings
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.templates import PromptText
from gerund.text_encoder import TextEncoder

# Prefixes that are remembered, so that a search encodes its prompts once.
_REMEMBERED = 1024

Encode = Callable[[Sequence[str]], np.ndarray]


class VectorScorer:
    """The dot product of two encoders' vectors, not normalised.

    Args:
        name: what results call it.
        prefixes: encodes prefixes, ``(n, D)``.
        continuations: encodes continuations, ``(n, D)``.

    >>> lengths = lambda texts: np.array([[len(text), 1.0] for text in texts])
    >>> VectorScorer("lengths", lengths, lengths).score(["ab"], [["c", "def"]])
    [[3.0, 7.0]]
    """

    def __init__(self, name: str, prefixes: Encode, continuations: Encode) -> None:
        self.name = name
        self._encode_prefixes = prefixes
        self._encode_continuations = continuations
        self._known: OrderedDict[str, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better.

        Raises:
            TextError: a prefix or a continuation is blank; of nothing there is no vector.
        """
        for index, prefix in enumerate(prefixes):
            if not prefix.strip():
                raise TextError.about(
                    *("prefix", index),
                    "is empty, and this scorer compares it with what follows; give a text, or take the scorer avg_cll, "
                    "which needs none",
                )
        refuse_blank(continuations)
        prefix_ND = self.prefix_vectors(prefixes)
        texts = list(dict.fromkeys(text for own in continuations for text in own))
        if not texts:
            return [[] for _ in continuations]
        place = {text: index for index, text in enumerate(texts)}
        text_ND = np.asarray(self._encode_continuations(texts), dtype=np.float64)
        return [
            (text_ND[[place[text] for text in own]] @ vector_D).tolist() if own else []
            for vector_D, own in zip(prefix_ND, continuations, strict=True)
        ]

    def prefix_vectors(self, prefixes: Sequence[str]) -> np.ndarray:
        """Return the vectors of prefixes, ``(n, D)`` float64; those that were encoded lately are not encoded anew."""
        known = self._known
        with self._lock:
            found = {prefix: known[prefix] for prefix in prefixes if prefix in known}
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in found]
        if missing:
            vectors = np.asarray(self._encode_prefixes(missing), dtype=np.float64)
            found |= dict(zip(missing, vectors, strict=True))
        with self._lock:
            for prefix, vector in found.items():
                known[prefix] = vector
                known.move_to_end(prefix)
            while len(known) > _REMEMBERED:
                known.popitem(last=False)
        return np.array([found[prefix] for prefix in prefixes])

    def continuation_vectors(self, continuations: Sequence[str]) -> np.ndarray:
        """Return the vectors of continuations, ``(n, D)`` float64."""
        return np.asarray(self._encode_continuations(continuations), dtype=np.float64)


SETTINGS_FILE = "scorer.json"
WEIGHTS_FILE = "scorer.safetensors"
_PROJECTION = "projection.weight"
SIMILARITIES = ("dot", "cosine")


@dataclass(frozen=True)
class ScorerConfig:
    """How the two sides are read."""

    prefix: str = "pre "
    """Put before every prefix."""

    continuation: str = "suffi "
    """Put before every continuation."""

    prefix_tokens: int = 512
    """Tokens of a prefix at most, without marker and special tokens; of a longer one the end is kept."""

    continuation_tokens: int = 128
    """Tokens of a continuation at most; of a longer one the beginning is kept."""

    similarity: str = "dot"
    """``dot``, or ``cosine``: the dot product of vectors of length 1."""

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise unknown_name("similarity", self.similarity, list(SIMILARITIES))
        for name in ("prefix_tokens", "continuation_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} leaves no text")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "ScorerConfig":
        """Read settings back.

        Raises:
            ConfigError: an unknown field, or a value that is not valid.
        """
        valid = {item.name: type(item.default) for item in fields(cls)}
        for key, value in data.items():
            if key not in valid:
                raise unknown_name(f"field in {SETTINGS_FILE}", key, list(valid))
            if type(value) is not valid[key]:
                raise ConfigError(f"{SETTINGS_FILE}: {key} cannot be {value!r}")
        return cls(**data)


class DualScorer(VectorScorer):
    """The product of two vectors of one encoder.

    Args:
        encoder: reads both sides, under its own plan and pooling.
        settings: markers and lengths.
        projection_DD: the linear map of both vectors; None for none.
        name: what results call it; left out, the model's name.

    Attributes:
        has_own_config: whether ``encoder`` is the model under an encoder config of the scorer's own.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        settings: ScorerConfig | None = None,
        projection_DD: np.ndarray | None = None,
        name: str | None = None,
    ) -> None:
        self.has_own_config = encoder.job == "score"
        own = settings or ScorerConfig()
        sides = _Sides(encoder, own, projection_DD)
        super().__init__(name or encoder.name, sides.prefixes, sides.continuations)
        self.encoder, self.settings, self.projection_DD = encoder, own, projection_DD
        self._sides = sides
        self._is_incremental: bool | None = None

    @classmethod
    def load(cls, model: str | Path, *, dtype: str = "auto", device: str = "auto") -> "DualScorer":
        """Load the scorer of a folder or hub id.

        Args:
            model: where it is.
            dtype: as in ``gerund.load``.
            device: as in ``gerund.load``.

        Raises:
            ModelError: no such model.
            DataError: it has no scorer, or a broken one.
        """
        opened = open_model(ModelSpec.of(model, dtype=dtype, device=device))
        kind = Seq2SeqEncoder if opened.is_seq2seq else TextEncoder
        encoder = kind(opened.model, opened.tokenizer, opened.encoder, **opened.options)
        return cls.beside(encoder, opened.settings)

    @classmethod
    def beside(cls, encoder: TextEncoder, folder: Path | None, *, apart: bool = False) -> "DualScorer":
        """Return the scorer whose files lie in a model's folder, around the model that is in memory already.

        Args:
            encoder: the model.
            folder: where the files lie.
            apart: whether the folder is that of another training on the same weights, so that the scorer reads as
                the encoder there does.

        Raises:
            DataError: there are none, or broken ones.
        """
        if folder is None or not has_scorer(folder):
            name = encoder.name if folder is None or not apart else folder
            raise DataError(f"{name} has no {SETTINGS_FILE}: it was not trained to score continuations")
        settings, projection_DD = read_scorer(folder)
        saved = read_scorer_config(folder) or (read_saved(folder) if apart else None)
        if saved is not None:
            encoder = encoder.for_job("score", saved.applied_to(default_encoder_config(encoder.model.config)))
        if projection_DD is not None and projection_DD.shape != (encoder.dimensions, encoder.dimensions):
            raise DataError(f"{folder / WEIGHTS_FILE} does not fit vectors of {encoder.dimensions} dimensions")
        return cls(encoder, settings, projection_DD)

    def incremental(self) -> "DualScorer":
        """Return this scorer for a search, which extends its continuations: it reads what is new of them and no more.

        Where the encoder's plan is not causal, so that a beginning looks different with every word that follows, it is
        this scorer itself.
        """
        if self._is_incremental is None:
            self._is_incremental = can_encode_incrementally(self.encoder.runtime)
        if not self._is_incremental:
            return self
        own = DualScorer(self.encoder, self.settings, self.projection_DD, self.name)
        own._is_incremental, own._known = True, self._known
        own._encode_continuations = partial(own._sides.incremental, IncrementalEncoder(self.encoder.runtime))
        return own

    @property
    def fingerprint(self) -> str:
        """Hash of what the scores depend on beside the model's encoder."""
        projection = b"" if self.projection_DD is None else np.ascontiguousarray(self.projection_DD).tobytes()
        settings = json.dumps(asdict(self.settings), sort_keys=True).encode()
        own = self.encoder.fingerprint().encode() if self.has_own_config else b""
        return hashlib.blake2b(settings + projection + own, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the scorer's own files into a model's folder."""
        config = self.encoder.encoder if self.has_own_config else None
        write_scorer(folder, self.settings, self.projection_DD, config)


@dataclass(frozen=True)
class _Sides:
    """What both sides' vectors are made of; it does not hold the scorer, whose memory is then freed with it."""

    encoder: TextEncoder
    settings: ScorerConfig
    projection_DD: np.ndarray | None

    def prefixes(self, texts: Sequence[str]) -> np.ndarray:
        most = self.settings.prefix_tokens
        kept = [keep_end(self.encoder.tokenizer, text, most) if text.strip() else text for text in texts]
        return self._encode(kept, self.settings.prefix)

    def continuations(self, texts: Sequence[str]) -> np.ndarray:
        return self._encode(self._cut(texts), self.settings.continuation)

    def incremental(self, encoder: IncrementalEncoder, texts: Sequence[str]) -> np.ndarray:
        tokens = self.encoder.tokens(self._cut(texts), PromptText(self.settings.continuation))
        return self._projected(encoder.encode([one for one in tokens if one is not None]))

    def _cut(self, texts: Sequence[str]) -> list[str]:
        return [_keep_start(self.encoder, text.strip(), self.settings.continuation_tokens) for text in texts]

    def _encode(self, texts: Sequence[str], marker: str) -> np.ndarray:
        vectors = self.encoder.encode(texts, prompt=PromptText(marker), normalize=False, show_progress=False)
        return self._projected(vectors)

    def _projected(self, vectors_ND: np.ndarray) -> np.ndarray:
        projected_ND = vectors_ND if self.projection_DD is None else vectors_ND @ self.projection_DD.T
        return unit(projected_ND) if self.settings.similarity == "cosine" else projected_ND


def has_scorer(folder: Path) -> bool:
    """Whether a model's folder holds a scorer."""
    return (folder / SETTINGS_FILE).is_file()


def read_scorer(folder: Path) -> tuple[ScorerConfig, np.ndarray | None]:
    """Return settings and projection ``(D, D)`` of a folder.

    Raises:
        DataError: the files are broken.
        ConfigError: they were written by a newer version, or hold unknown fields.
    """
    path = folder / SETTINGS_FILE
    data = read_settings(path, "scorer")
    weights = folder / WEIGHTS_FILE
    projection_DD = None
    if data.get("projection"):
        try:
            projection_DD = load_file(weights)[_PROJECTION].float().numpy()
        except Exception as error:  # safetensors has an exception outside the built-in ones
            raise DataError(f"{weights} cannot be read: {error}") from error
    return ScorerConfig.from_dict(data["scorer"]), projection_DD


def read_scorer_config(folder: Path) -> EncoderSpec | None:
    """Return how the scorer in a model's folder reads, where that is not how the encoder does.

    Raises:
        DataError: the file is broken.
        ConfigError: it was written by a newer version, or holds unknown fields.
    """
    fields = read_settings(folder / SETTINGS_FILE, "scorer").get("encoder")
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise DataError(f"{folder / SETTINGS_FILE}: encoder is how the scorer reads, not {fields!r}")
    return settings_from(fields)


def write_scorer(
    folder: Path,
    settings: ScorerConfig,
    projection_DD: np.ndarray | None,
    config: EncoderConfig | None = None,
) -> None:
    """Write settings and projection into a model's folder, and ``config`` where it is not the encoder's."""
    if projection_DD is not None:
        save_file({_PROJECTION: torch.from_numpy(np.ascontiguousarray(projection_DD))}, folder / WEIGHTS_FILE)
    data: dict[str, Any] = {"format": FORMAT, "scorer": asdict(settings), "projection": projection_DD is not None}
    if config is not None:
        data["encoder"] = saved_fields(EncoderSpec.of_config(config))
    (folder / SETTINGS_FILE).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_start(encoder: TextEncoder, text: str, most: int) -> str:
    """Return the beginning of a text that has at most so many tokens."""
    [found] = encode_texts(encoder.tokenizer, [text], specials=False, offsets=True, most=most)
    ends = [end for _, end in found.offsets]
    return text if len(ends) <= most else text[: ends[most - 1]]
