"""Systems under evaluation: what they can do (protocols), encoders whose vectors are cached, sentence-transformers."""

import copy
import hashlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch

from gerund.errors import ModelError
from gerund.inference.encode.spans import WordPooling
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.jobs.checkpoints import KEY_BYTES, RowStore, ShardCheckpoint
from gerund.models.vectors import unit
from gerund.progress import progress
from gerund.settings.ranking import TRAINED_FUSION
from gerund.settings.templates import PromptText
from gerund.types import Scorer

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


class System(ABC):
    """What is evaluated; ``label`` is its name in tables."""

    def __init__(self, label: str) -> None:
        self.label = label

    @property
    @abstractmethod
    def name(self) -> str:
        """What it was loaded from."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Hash of what its scores depend on."""

    @property
    def cache_key(self) -> str:
        """What scores depend on exactly: the fingerprint, and where it matters the compute type."""
        return self.fingerprint

    @property
    def weights_key(self) -> str:
        """The same for scores that do not depend on how texts are encoded, as those of generation."""
        return self.cache_key

    @property
    def infill_adapter(self) -> str:
        """Hash of the infill adapter; empty without one."""
        return ""

    @property
    def scorer(self) -> Any:
        """Its own scorer of continuations; None without one."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what a reader of its scores wants to know, ready for JSON; ``model`` is always there."""


@runtime_checkable
class Encodes(Protocol):
    """Gives a vector for a whole text."""

    def encode(
        self, texts: Sequence[str], *, prompt: str | None = None, normalize: bool = False, show: bool | None = None
    ) -> np.ndarray:
        """Turn texts into vectors ``(n, D)`` float32; an empty text gives a zero vector."""


@runtime_checkable
class EncodesWords(Protocol):
    """Gives a vector for each word of a sentence."""

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        *,
        prompt: str | None = None,
        pooling: WordPooling = "mean",
        shift: bool = False,
        show: bool | None = None,
    ) -> list[np.ndarray]:
        """Return one ``(n_words, D)`` float32 array per sentence."""


@runtime_checkable
class Ranks(Protocol):
    """Ranks the documents of a collection."""

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> Any:
        """Return what ``mteb.evaluate`` searches with; ``prompts`` are for queries, by task."""


@runtime_checkable
class ScoresCandidates(Protocol):
    """Scores given candidates for a query."""

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return the scorer of a name, its own for the empty name; None where it has or takes none."""

    def candidate_scores(
        self, queries: Sequence[str], candidates: Sequence[str], *, scorer: Scorer | None, prompt: str | None
    ) -> np.ndarray:
        """Return how well each candidate follows each query, ``(queries, candidates)`` float64."""


@runtime_checkable
class EncodesWordTokens(Protocol):
    """Gives the states of each word's tokens."""

    def encode_word_tokens(
        self, sentences: Sequence[Sequence[str]], *, prompt: str | None = None, show: bool | None = None
    ) -> list[list[np.ndarray]]:
        """Return for each sentence one ``(n_tokens, D)`` float32 array per word."""


@runtime_checkable
class Generates(Protocol):
    """Is a language model in memory that generates text."""

    @property
    def lm(self) -> "LanguageModel":
        """The model."""


@runtime_checkable
class HasLikelihoods(Protocol):
    """Is a causal language model, which gives the probability of a text."""

    @property
    def causal_lm(self) -> "LanguageModel":
        """The model."""


# What a system with a capability can do, in the words of error messages.
CAPABILITIES: Mapping[type, str] = {
    Encodes: "encode whole texts",
    EncodesWords: "encode words",
    EncodesWordTokens: "encode the tokens of words",
    Ranks: "rank documents",
    ScoresCandidates: "score candidates",
    Generates: "generate texts",
    HasLikelihoods: "tell how probable a text is",
}


def capabilities(system: object) -> list[type]:
    """Return the protocols that a system satisfies."""
    return [protocol for protocol in CAPABILITIES if isinstance(system, protocol)]


def unsupported_message(systems: Iterable[System], required: Iterable[type]) -> str:
    """Say why none of the systems supports tasks that require these protocols."""
    needed = " or ".join(dict.fromkeys(CAPABILITIES[protocol] for protocol in required))
    labels: dict[str, list[str]] = {}
    for system in systems:
        words = [CAPABILITIES[protocol] for protocol in capabilities(system)]
        text = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
        labels.setdefault(text, []).append(system.label)
    known = "; ".join(f"{', '.join(names)} can only {text}" for text, names in labels.items())
    return f"these tasks need a system that can {needed}, and {known}"


# Texts per shard.
_SHARD = 4096
_UNFINISHED = "unfinished"

# Turns texts into vectors ``(n, D)``; may save finished rows in the checkpoint.
Compute = Callable[[list[str], ShardCheckpoint], np.ndarray]


class EmbeddingCache:
    """Vectors by encoder, prompt and text, in memory or in a folder; no text is encoded twice.

    New texts are encoded shard by shard, ``shards`` of them at once (as many as there are workers). Finished rows of an
    unfinished shard are saved in ``unfinished`` (in the folder, where there is one), so that an interrupted evaluation
    continues with the same batches. Without a folder they stay there until ``forget_unfinished``.
    """

    def __init__(self, folder: Path | None = None, *, unfinished: Path | None = None) -> None:
        self.folder = folder
        self.shards = 1
        self._unfinished = unfinished if folder is None else folder / _UNFINISHED
        self._stores: dict[tuple[str, str], RowStore] = {}

    def vectors(self, fingerprint: str, prompt: str, texts: list[str], compute: Compute) -> np.ndarray:
        """Return the vectors of ``texts``, ``(n, D)`` float32; ``compute`` is called with new texts alone."""
        store = self.store(fingerprint, prompt)
        keys = [key_of_text(text) for text in texts]
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in store}.items())
        step = _SHARD * self.shards
        for start in range(0, len(missing), step):
            new_keys, new_texts = zip(*missing[start : start + step], strict=True)
            with self.shard(f"{fingerprint} {prompt}", new_keys) as checkpoint:
                store.add(new_keys, compute(list(new_texts), checkpoint))
        return store.rows(keys)

    @contextmanager
    def shard(self, encoder: str, keys: Sequence[bytes]) -> Iterator[ShardCheckpoint]:
        """Yield the checkpoint of a shard; its vectors have to be in the store before the block ends."""
        name = hashlib.blake2b(encoder.encode() + b" " + b"".join(keys), digest_size=KEY_BYTES).hexdigest()
        if self.folder is not None:
            # One shard is finished before the next begins: the checkpoint of another was abandoned.
            for path in (self.folder / _UNFINISHED).glob("*"):
                if path.name != name:
                    shutil.rmtree(path, ignore_errors=True)
        with ShardCheckpoint(None if self._unfinished is None else self._unfinished / name, name) as checkpoint:
            yield checkpoint
        if self.folder is not None:
            checkpoint.discard()
            with suppress(OSError):
                (self.folder / _UNFINISHED).rmdir()

    def forget_unfinished(self) -> None:
        """Remove the checkpoints of shards."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished, ignore_errors=True)

    def keep_only(self, fingerprints: Iterable[str]) -> None:
        """Drop the vectors of all other encoders from memory."""
        kept = set(fingerprints)
        self._stores = {name: store for name, store in self._stores.items() if name[0] in kept}

    def put(self, fingerprint: str, prompt: str, texts: list[str], vectors: np.ndarray) -> None:
        """Store vectors that were computed elsewhere; texts that are there already keep theirs."""
        store = self.store(fingerprint, prompt)
        fresh = {key: row for row, key in enumerate(map(key_of_text, texts)) if key not in store}
        if fresh:
            store.add(list(fresh), vectors[list(fresh.values())])

    def store(self, fingerprint: str, prompt: str) -> RowStore:
        """Return the vectors of one encoder with one prompt."""
        name = (fingerprint, hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest() if prompt else "plain")
        if name not in self._stores:
            self._stores[name] = RowStore(None if self.folder is None else self.folder / f"{name[0]}-{name[1]}")
        return self._stores[name]


def key_of_text(text: str) -> bytes:
    """Return the key of a text's vector."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class Encoder(System):
    """A system that gives a vector for each text, cached where there is a cache; it ranks documents by their cosine."""

    def __init__(self, label: str, cache: EmbeddingCache | None = None) -> None:
        super().__init__(label)
        self.cache = cache

    @property
    def fusion_weight(self) -> float:
        """The weight of its vectors in hybrid search."""
        return TRAINED_FUSION

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """Its own prompts by name, of which ``query`` and ``document`` are for searches."""
        return {}

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """Dimensions of a vector."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""

    @abstractmethod
    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, checkpoint: ShardCheckpoint | None = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled; finished batches are saved in the checkpoint."""

    @abstractmethod
    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""

    def encode(
        self, texts: Sequence[str], *, prompt: str | None = None, normalize: bool = False, show: bool | None = None
    ) -> np.ndarray:
        """Turn texts into vectors ``(n, D)`` float32; prompt None is the encoder's own, an empty text a zero vector."""
        if self.cache is None:
            vectors = self.compute(list(texts), prompt, show)
        else:

            def compute(new: list[str], checkpoint: ShardCheckpoint) -> np.ndarray:
                return self.compute(new, prompt, show, checkpoint)

            vectors = self.cache.vectors(self.cache_key, self.prompt_text(prompt), list(texts), compute)
        return unit(vectors) if normalize else vectors

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> Any:
        """Return the encoder as ``mteb.evaluate`` takes it."""
        return EncoderForMTEB(self, prompts=prompts, show_progress=show)


class EncoderForMTEB:
    """An encoder as ``mteb.evaluate`` takes it; ``gerund.evaluation.MTEBEncoder`` describes the settings."""

    def __init__(
        self,
        system: Encoder,
        *,
        name: str | None = None,
        prompts: Mapping[str, str] | None = None,
        document_prompts: Mapping[str, str] | None = None,
        normalize: bool | None = None,
        show_progress: bool | None = None,
    ) -> None:
        self._system = system
        self._name = name or system.name
        self._prompts, self._document_prompts = dict(prompts or {}), dict(document_prompts or {})
        self._normalize = normalize
        self._show = show_progress

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the model; its revision is our fingerprint, so that no cache mixes two plans."""
        from mteb.models import ModelMeta

        system = self._system
        known = {"revision": system.fingerprint, "embed_dim": system.dimensions, "max_tokens": system.max_length}
        return ModelMeta.create_empty(overwrites={"name": self._name, **known})

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **_kwargs: Any
    ) -> np.ndarray:
        """Encode the texts of MTEB's batches, ``(n, D)`` float32."""
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = self._prompts.get(task_metadata.name, self._prompts.get(task_metadata.type))
        if prompt_type == "document":
            prompt = self._document_prompts.get(task_metadata.name)
        if prompt is None and prompt_type is not None:
            # A member of MTEB's enumeration, or its value.
            stored = self._system.stored_prompts.get(str(getattr(prompt_type, "value", prompt_type)))
            prompt = None if stored is None else PromptText(stored)
        normalize = task_metadata.type == "Clustering" if self._normalize is None else self._normalize
        vectors = self._system.encode(texts, prompt=prompt, normalize=normalize, show=self._show)
        if not np.isfinite(vectors).all():
            raise ModelError(f"{self._name} gives vectors that are not finite numbers, which nothing can be scored on")
        return vectors

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with each of ``(m, D)``: ``(n, m)``; 0 for a zero vector."""
        return _directions(embeddings1) @ _directions(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with its partner: ``(n,)``; 0 for a zero vector."""
        return (_directions(embeddings1) * _directions(embeddings2)).sum(dim=-1)


def _directions(vectors: Any) -> torch.Tensor:
    """Return vectors of length 1, in float32; zero vectors stay zero."""
    return torch.nn.functional.normalize(torch.atleast_2d(torch.as_tensor(vectors, dtype=torch.float32)), dim=-1)


def cosine_scores(
    encoder: Encodes, queries: Sequence[str], candidates: Sequence[str], prompt: str | None
) -> np.ndarray:
    """Return the cosine of each query with each candidate, ``(queries, candidates)`` float64."""
    query_ND = encoder.encode(queries, prompt=prompt, normalize=True, show=False)
    candidate_MD = encoder.encode(candidates, normalize=True, show=False)
    cosine_NM: np.ndarray = query_ND.astype(np.float64) @ candidate_MD.astype(np.float64).T
    return cosine_NM


# Texts that are encoded between two saves: whole batches of the library's default of 32.
_SLICE = 256


class SentenceTransformersSystem(Encoder):
    """A model as sentence-transformers runs it: a vector for a whole text, and nothing else."""

    def __init__(self, name: str, *, device: str = "auto", max_length: int | None = None) -> None:
        super().__init__(Path(name).name)
        self._encoder = SentenceEncoder(name, device=device, max_length=max_length)

    def called(self, label: str, cache: "EmbeddingCache") -> "SentenceTransformersSystem":
        """Return the same model with another label and a cache."""
        other = copy.copy(self)
        other.label, other.cache = label, cache
        return other

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self._encoder.source

    @property
    def fusion_weight(self) -> float:
        """The weight of its vectors in hybrid search."""
        return self._encoder.fusion_weight

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return self._encoder.dimensions

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self._encoder.max_length

    @property
    def fingerprint(self) -> str:
        """A hash of all weights and of how they are used: 16 hexadecimal digits."""
        return self._encoder.fingerprint()

    @property
    def cache_key(self) -> str:
        """The weights, how they are used, and the type that holds them."""
        return f"{self.fingerprint}-{str(self._encoder.model.dtype).removeprefix('torch.')}"

    def describe(self) -> dict[str, Any]:
        """Return the model, its limits and its hash."""
        return {
            "model": self.name,
            "max_length": self.max_length,
            "dimensions": self.dimensions,
            "fingerprint": self.fingerprint,
        }

    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, checkpoint: "ShardCheckpoint | None" = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled; finished slices are saved in the checkpoint."""
        vectors = np.zeros((len(texts), self.dimensions), dtype=np.float32)
        saved = None if checkpoint is None else checkpoint.encoding_pass()
        done = frozenset() if saved is None else saved.restore(vectors)
        # Longest first, as sentence-transformers itself goes through its batches.
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        with progress(len(texts), "encoding", show=show) as advance:
            for start in range(0, len(order), _SLICE):
                rows = order[start : start + _SLICE]
                if not done.issuperset(rows):
                    batch = [texts[row] for row in rows]
                    vectors[rows] = self._encoder.pooled(batch, prompt)
                    if saved is not None:
                        saved.save(rows, vectors[rows])
                advance(len(rows))
        return vectors

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """The model's own prompts by name."""
        return self._encoder.encoder.prompts

    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""
        return self._encoder.encoder.prompt if prompt is None else prompt
