"""What a system under evaluation is, and what it can do: the protocols that tasks ask for.

A task names the protocol that it needs; a system takes part where it has the members of that protocol. Nothing is
declared twice, so that a system cannot claim what it does not do.

Knows: names, vectors, prompts. Does not know: models, tasks, files.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from gerund.inference.encode.spans import WordPooling
from gerund.models.vectors import unit
from gerund.types import Scorer

if TYPE_CHECKING:
    from gerund.evaluation.systems.embeddings import EmbeddingCache
    from gerund.jobs.checkpoints import ShardCheckpoint
    from gerund.language_model import LanguageModel


class System(ABC):
    """What is evaluated.

    Attributes:
        label: what tables call it.
    """

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
        """What scores depend on to the last digit: the fingerprint, and where it matters the type computed in."""
        return self.fingerprint

    @property
    def weights_key(self) -> str:
        """The same for scores that do not depend on how texts are encoded, as those of generation."""
        return self.cache_key

    @property
    def infill_adapter(self) -> str:
        """Hash of the adapter that gaps are filled with; empty without one."""
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
        """Numbers in a vector."""

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        *,
        prompt: str | None = None,
        pooling: WordPooling = "mean",
        shift: bool = False,
        show: bool | None = None,
    ) -> list[np.ndarray]:
        """Return one ``(n_words, D)`` float32 array a sentence."""


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
        """Return for each sentence one ``(n_tokens, D)`` float32 array a word."""


@runtime_checkable
class Generates(Protocol):
    """Is a language model that continues texts, and whose weights and states are at hand."""

    @property
    def lm(self) -> "LanguageModel":
        """The model."""


@runtime_checkable
class HasLikelihoods(Protocol):
    """Is a causal language model, which tells how probable a text is."""

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


def why_nobody(systems: Iterable[System], needed: Iterable[type]) -> str:
    """Say why none of the systems can take part in tasks.

    Args:
        systems: none of which has a capability that is needed.
        needed: what each task asks for.
    """
    wanted = " or ".join(dict.fromkeys(CAPABILITIES[one] for one in needed))
    groups: dict[str, list[str]] = {}
    for one in systems:
        groups.setdefault(_listed([CAPABILITIES[protocol] for protocol in capabilities(one)]), []).append(one.label)
    known = "; ".join(f"{', '.join(labels)} can only {what}" for what, labels in groups.items())
    return f"these tasks need a system that can {wanted}, and {known}"


class Encoder(System):
    """A system that gives a vector for each text, computed once and kept; it ranks documents by their cosine.

    Attributes:
        cache: where embeddings are kept; None keeps none.
    """

    def __init__(self, label: str, cache: "EmbeddingCache | None" = None) -> None:
        super().__init__(label)
        self.cache = cache

    @property
    def fusion_weight(self) -> float | None:
        """What its vectors count where they are joined with words; None where nobody has tuned it."""
        return None

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """Its own prompts by name, of which ``query`` and ``document`` are for searches."""
        return {}

    @property
    @abstractmethod
    def dimensions(self) -> int:
        """Numbers in a vector."""

    @property
    @abstractmethod
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""

    @abstractmethod
    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, kept: "ShardCheckpoint | None" = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled, keeping finished batches where it is said."""

    @abstractmethod
    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""

    def encode(
        self, texts: Sequence[str], *, prompt: str | None = None, normalize: bool = False, show: bool | None = None
    ) -> np.ndarray:
        """Turn texts into vectors ``(n, D)`` float32; an empty text gives a zero vector.

        Args:
            texts: any texts.
            prompt: put before each; None for the encoder's own.
            normalize: give every vector length 1.
            show: whether to show progress; None only on a terminal.
        """
        if self.cache is None:
            vectors = self.compute(list(texts), prompt, show)
        else:

            def own(new: list[str], kept: "ShardCheckpoint") -> np.ndarray:
                return self.compute(new, prompt, show, kept)

            vectors = self.cache.vectors(self.cache_key, self.prompt_text(prompt), list(texts), own)
        return unit(vectors) if normalize else vectors

    def search_model(self, prompts: Mapping[str, str], *, show: bool | None = None) -> Any:
        """Return the encoder as ``mteb.evaluate`` takes it."""
        from gerund.evaluation.mteb import MTEBEncoder

        return MTEBEncoder(self, prompts=prompts, show_progress=show)


def cosine_scores(
    encoder: Encodes, queries: Sequence[str], candidates: Sequence[str], prompt: str | None
) -> np.ndarray:
    """Return the cosine of each query with each candidate, ``(queries, candidates)`` float64.

    Args:
        encoder: whose vectors are compared.
        queries: texts.
        candidates: texts, the same for all queries.
        prompt: for the queries alone.
    """
    query_ND = encoder.encode(queries, prompt=prompt, normalize=True, show=False)
    candidate_MD = encoder.encode(candidates, normalize=True, show=False)
    cosine_NM: np.ndarray = query_ND.astype(np.float64) @ candidate_MD.astype(np.float64).T
    return cosine_NM


def _listed(words: Sequence[str]) -> str:
    """Return words as a list in a sentence.

    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
