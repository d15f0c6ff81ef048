"""A language model under one encoder config, among the systems.

Knows: ``LanguageModel``, its scorer and adapters, stored embeddings. Does not know: tasks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.evaluation.systems.base import Encoder, cosine_scores
from gerund.inference.encode.spans import WordPooling
from gerund.inference.encode.texts import encode_word_tokens
from gerund.models.architectures import is_encoder_decoder
from gerund.models.encoder_settings import read_saved
from gerund.scoring.registry import find_scorer
from gerund.settings.plan import AttentionPlan
from gerund.types import Scorer

if TYPE_CHECKING:
    from gerund.evaluation.systems.embeddings import EmbeddingCache
    from gerund.jobs.checkpoints import ShardCheckpoint
    from gerund.language_model import LanguageModel


def language_model_system(
    label: str, lm: "LanguageModel", cache: "EmbeddingCache | None" = None
) -> "LanguageModelSystem":
    """Return a language model as a system that can do what the model can.

    Args:
        label: what tables call it.
        lm: the model under one encoder config.
        cache: where embeddings are kept; None keeps none.
    """
    kind = LanguageModelSystem if is_encoder_decoder(lm.model) else CausalModelSystem
    return kind(label, lm, cache)


class LanguageModelSystem(Encoder):
    """A language model under one encoder config: it encodes, ranks and generates.

    Attributes:
        lm: the model.
        words: vectors of words that were computed beforehand, by (prompt, pooling, shift) and sentence.
        elsewhere: what encodes texts, behind a prompt, in the place of this process.
    """

    def __init__(self, label: str, lm: "LanguageModel", cache: "EmbeddingCache | None" = None) -> None:
        super().__init__(label, cache)
        self.lm = lm
        self.elsewhere: Callable[[Sequence[str], str | None, ShardCheckpoint | None], np.ndarray] | None = None
        self.words: dict[tuple[str | None, str, bool], dict[tuple[str, ...], np.ndarray]] = {}

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self.lm.name

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the encoder config."""
        return self.lm.fingerprint()

    @property
    def cache_key(self) -> str:
        """The encoder and the type that it computes in."""
        return f"{self.fingerprint}-{_name(self.lm.compute_dtype)}"

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """The encoder's own prompts by name."""
        return self.lm.encoder.prompts

    @property
    def weights_key(self) -> str:
        """The weights and the type that holds them."""
        return f"{self.lm.weights_hash}-{_name(self.lm.model.dtype)}"

    @property
    def infill_adapter(self) -> str:
        """Hash of the adapter that gaps are filled with; empty without one."""
        return self.lm.adapters.hash("infill")

    @property
    def scorer(self) -> Any:
        """The scorer of continuations that the model was trained to be under this encoder config."""
        return self.lm.scorer

    @property
    def fusion_weight(self) -> float | None:
        """What its vectors count where they are joined with words; None where nobody has tuned it."""
        return self.lm.encoder.fusion

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self.lm.dimensions

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self.lm.max_length

    def describe(self) -> dict[str, Any]:
        """Return model, encoder config and hashes."""
        lm = self.lm
        return {
            "model": lm.name,
            "attention": lm.encoder.attention.with_defaults(lm.n_layers).to_dict(),
            "pooling": lm.encoder.pooling,
            "prompt": lm.encoder.prompt,
            **{name: getattr(lm.encoder, name) for name in lm.encoder.methods},
            "max_length": lm.max_length,
            "dimensions": lm.dimensions,
            "n_layers": lm.n_layers,
            "fingerprint": lm.fingerprint(),
            "weights": lm.weights_hash,
            "adapter": lm.adapter_hash,
            **adapter_facts(lm),
            "infill_adapter": self.infill_adapter,
            "compute_dtype": _name(lm.compute_dtype),
        }

    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, kept: "ShardCheckpoint | None" = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled, keeping finished batches where it is said."""
        if self.elsewhere is not None:
            return self.elsewhere(texts, prompt, kept)
        vectors: np.ndarray = self.lm.encode(
            texts, prompt=prompt, normalize=False, empty="zeros", show_progress=show, kept=kept
        )
        return vectors

    def prompt_text(self, prompt: str | None) -> str:
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

    def encode_word_tokens(
        self, sentences: Sequence[Sequence[str]], *, prompt: str | None = None, show: bool | None = None
    ) -> list[list[np.ndarray]]:
        """Return the states of every word's tokens; see ``inference.encode.texts``."""
        return encode_word_tokens(self.lm.runtime, sentences, prompt, show=show)

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return the scorer of a name, the model's own for the empty name; None where it has none.

        Raises:
            ConfigError: there is no scorer of this name.
            ModelError: the folder holds no scorer.
        """
        return scorer_of(self.lm, name, seed=seed)

    def candidate_scores(
        self, queries: Sequence[str], candidates: Sequence[str], *, scorer: Scorer | None, prompt: str | None
    ) -> np.ndarray:
        """Score candidates by a scorer of continuations, without one by the cosine of the encoder's vectors.

        Args:
            queries: texts.
            candidates: texts, the same for all queries.
            scorer: scores continuations, or None.
            prompt: for the queries, where vectors are compared.

        Returns:
            ``(queries, candidates)`` float64.
        """
        if scorer is None:
            return cosine_scores(self, queries, candidates, prompt)
        texts = [f" {one}" for one in candidates]
        return np.array(scorer.score(queries, [texts for _ in queries]), dtype=np.float64)


class CausalModelSystem(LanguageModelSystem):
    """A decoder-only model, which also tells how probable a text is."""

    @property
    def causal_lm(self) -> "LanguageModel":
        """The model, whose untouched causal weights give the likelihoods."""
        return self.lm


def scorer_of(lm: "LanguageModel", name: str, *, seed: int) -> Scorer | None:
    """Return the scorer of a name, the model's own for the empty name; None where it has none.

    Raises:
        ConfigError: there is no scorer of this name.
        ModelError: the folder holds no scorer.
    """
    return find_scorer(name, lm, seed=seed) if name else lm.scorer


def adapter_facts(lm: "LanguageModel") -> dict[str, Any]:
    """Return what the encoder's adapter is called, and the plan that it was trained under where that is known."""
    folder = lm.adapters.folders.get("encode")
    if folder is None:
        return {}
    plan = trained_plan(folder, lm.n_layers)
    named = {"adapter_name": adapter_name(folder)}
    return named if plan is None else {**named, "adapter_plan": plan.to_dict()}


def adapter_name(folder: Path) -> str:
    """Return what tables call an adapter: what lies in a model's folder is called as the model is.

    >>> [adapter_name(Path(name)) for name in ("lora", "runs/mine/model/adapter", "runs/mine/model")]
    ['lora', 'mine', 'mine']
    """
    parts = [part for part in folder.parts if part not in ("model", "adapter")]
    return parts[-1] if parts else folder.name


def trained_plan(folder: Path, n_layers: int) -> AttentionPlan | None:
    """Return the plan that the ``gerund.json`` beside an adapter, or in the folder above it, says; None without one."""
    for place in (folder, folder.parent):
        saved = read_saved(place)
        if saved is not None:
            return saved.plan(AttentionPlan()).with_defaults(n_layers)
    return None


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
