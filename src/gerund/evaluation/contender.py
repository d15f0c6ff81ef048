"""Who is measured: a language model under one reading, or BM25; other modules have other contenders.

Knows: ``LanguageModel``, stored embeddings. Does not know: tasks.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.encode.words import WordPooling
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.models.pooling import unit

if TYPE_CHECKING:
    from gerund.evaluation.embedding_cache import EmbeddingCache
    from gerund.language_model import LanguageModel
    from gerund.scoring.dual import DualScorer

BM25 = "bm25"


class Contender:
    """A language model under one reading, with embeddings that are computed once.

    Attributes:
        label: what tables call it.
        cache: where embeddings are kept.
        words: vectors of words that were computed beforehand, by (prompt, pooling, shift) and sentence.

    Args:
        label: what tables call it.
        lm: the model; None for BM25, which only ranks.
        cache: where embeddings are kept; None keeps none.
    """

    def __init__(self, label: str, lm: "LanguageModel | None", cache: "EmbeddingCache | None" = None) -> None:
        self.label = label
        self._lm = lm
        self.cache = cache
        self.words: dict[tuple[str | None, str, bool], dict[tuple[str, ...], np.ndarray]] = {}

    @property
    def has_model(self) -> bool:
        """Whether there is a language model, and so plans, states and layers."""
        return self._lm is not None

    @property
    def is_bm25(self) -> bool:
        """Whether this is BM25."""
        return self._lm is None

    @property
    def only_encodes(self) -> bool:
        """Whether this gives a vector for a whole text and does nothing else."""
        return False

    @property
    def only_ranks(self) -> bool:
        """Whether this ranks documents and does nothing else, as BM25."""
        return self.is_bm25

    @property
    def has_likelihoods(self) -> bool:
        """Whether this says how probable a text is."""
        return self._lm is not None and not is_encoder_decoder(self._lm.model)

    @property
    def lm(self) -> "LanguageModel":
        """The model.

        Raises:
            ConfigError: BM25 has none.
        """
        if self._lm is None:
            raise ConfigError("BM25 ranks documents and does nothing else")
        return self._lm

    @property
    def scorer(self) -> "DualScorer | None":
        """The scorer of continuations that the model was trained to be under this reading."""
        return None if self._lm is None else self._lm.scorer

    @property
    def fingerprint(self) -> str:
        """What the scores of representation tasks depend on."""
        return BM25 if self._lm is None else self._lm.fingerprint()

    @property
    def decides(self) -> str:
        """What vectors depend on to the last digit: the encoder and the type that it computes in."""
        return BM25 if self._lm is None else f"{self.fingerprint}-{_name(self._lm.compute_dtype)}"

    @property
    def decides_writing(self) -> str:
        """What log-probabilities depend on to the last digit: the weights and the type that holds them."""
        return BM25 if self._lm is None else f"{self.weights}-{_name(self._lm.model.dtype)}"

    @property
    def weights(self) -> str:
        """What the scores of generation tasks depend on: the weights alone."""
        return BM25 if self._lm is None else self._lm.weights_hash

    @property
    def infill_adapter(self) -> str:
        """The hash of the adapter that gaps are filled with; empty without one."""
        return "" if self._lm is None else self._lm.adapters.hash("infill")

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return BM25 if self._lm is None else self._lm.name

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self.lm.dimensions

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self.lm.max_length

    def reading(self) -> dict[str, Any]:
        """Return how it reads: what a reader of its scores wants to know, ready for JSON."""
        if self._lm is None:
            return {"model": BM25}
        lm = self._lm
        return {
            "model": lm.name,
            "attention": lm.encoder.attention.with_defaults(lm.n_layers).to_dict(),
            "pooling": lm.encoder.pooling,
            "prompt": lm.encoder.prompt,
            "max_length": lm.max_length,
            "dimensions": lm.dimensions,
            "n_layers": lm.n_layers,
            "fingerprint": lm.fingerprint(),
            "weights": lm.weights_hash,
            "adapter": lm.adapter_hash,
            "infill_adapter": self.infill_adapter,
            "compute_dtype": _name(lm.compute_dtype),
        }

    def encode(
        self, texts: Sequence[str], *, prompt: str | None = None, normalize: bool = False, show: bool | None = None
    ) -> np.ndarray:
        """Turn texts into vectors ``(n, D)`` float32; an empty text gives a zero vector.

        Args:
            texts: any texts.
            prompt: as in ``LanguageModel.encode``.
            normalize: give every vector length 1.
            show: whether to show progress; None only on a terminal.
        """
        if self.cache is None:
            vectors = self._encoded(list(texts), prompt, show)
        else:
            own_prompt = self._prompt_text(prompt)
            compute = partial(self._encoded, prompt=prompt, show=show)
            vectors = self.cache.vectors(self.decides, own_prompt, list(texts), compute)
        return unit(vectors) if normalize else vectors

    def _encoded(self, texts: list[str], prompt: str | None, show: bool | None) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled."""
        vectors: np.ndarray = self.lm.encode(texts, prompt=prompt, normalize=False, empty="zeros", show_progress=show)
        return vectors

    def _prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""
        return self.lm.encoder.prompt_text(prompt)

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        *,
        prompt: str | None = None,
        pooling: WordPooling = "mean",
        shift: bool = False,
        show: bool | None = None,
    ) -> list[np.ndarray]:
        """Return one ``(n_words, D)`` float32 array a sentence; see ``LanguageModel.encode_words``."""
        known = self.words.get((prompt, pooling, shift), {})
        if known and all(tuple(words) in known for words in sentences):
            return [known[tuple(words)] for words in sentences]
        return self.lm.encode_words(sentences, prompt=prompt, pooling=pooling, shift=shift, show_progress=show)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
