"""Find a scorer by its name, folder or hub id."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gerund.errors import ConfigError
from gerund.inference.generate.prompts import NEXT_TURN, Prompt, TemplateOptions, plain_text, prompt_text
from gerund.models import loading
from gerund.models.saved_settings import has_scorer
from gerund.models.sources import Source, find_spec
from gerund.scoring.dual_encoder import DualScorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.names import (
    CONSENSUS,
    DEFAULT,
    MEASURE_NAMES,
    MIXED,
    MODEL_NAMES,
    SCORER_NAMES,
    WORD_MEASURE_NAMES,
    source_of,
)
from gerund.scoring.relevance import standardized
from gerund.scoring.t5 import T5Scorer
from gerund.scoring.word_overlap import OverlapScorer
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.settings.model_spec import ModelSpec
from gerund.types import Scorer, TextModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Load = Callable[..., Any]
"""``gerund.load``, which opens the model of a scorer."""


class ModelWithScorer(TextModel, Protocol):
    """A model that may have a scorer, and loads others."""

    @property
    def scorer(self) -> DualScorer | None:
        """The scorer that the model was trained to be; None where it was not."""

    @property
    def loader(self) -> Load:
        """``gerund.load``."""


def find_scorer(scorer: str | Path | Scorer | None, lm: ModelWithScorer, *, seed: int = 0) -> Scorer:
    """Return the scorer of this name, or the scorer itself.

    Args:
        scorer: a name of ``SCORER_NAMES``; ``model`` (or ``own``), the model's trained scorer; the folder or hub id of
            a scorer, or ``default``, that of the bundled model; an object with a ``score`` method; or None for the
            model's trained scorer, else ``pmi``, the best measure of likelihood in RankGen's Table 15.
        lm: the model whose likelihoods a measure reads.
        seed: of the random measure.
    """
    if scorer is None:
        scorer = lm.scorer or DEFAULT
    if isinstance(scorer, str) and scorer in (MIXED, *MODEL_NAMES):
        if lm.scorer is None:
            raise ConfigError(
                f"{lm.name} was not trained to score continuations under this encoder config. Name another scorer, "
                f"such as {DEFAULT}."
            )
        return MixedScorer(LikelihoodScorer(lm, DEFAULT, seed=seed), lm.scorer) if scorer == MIXED else lm.scorer
    if isinstance(scorer, str) and scorer in MEASURE_NAMES:
        return LikelihoodScorer(lm, scorer, seed=seed)
    if isinstance(scorer, str) and scorer == CONSENSUS:
        return ConsensusScorer(lm)
    if isinstance(scorer, str | Path):
        return load_scorer(scorer, lm.loader)
    if not callable(getattr(scorer, "score", None)):
        raise ConfigError(f"`scorer` must be a name or an object with a `score` method, got {scorer!r}")
    return scorer


def score_samples(scorer: Scorer, prefixes: Sequence[str], samples: Sequence[Sequence[str]]) -> list[list[float]]:
    """Score sampled continuations of each prefix, some of which may be equal or blank.

    Equal ones are scored once, unless the scorer has ``counts_repeats``; a blank one is not scored and gets minus
    infinity.
    """
    repeats = getattr(scorer, "counts_repeats", False)
    filled = [[text for text in group if text.strip()] for group in samples]
    asked = filled if repeats else [list(dict.fromkeys(group)) for group in filled]
    numbers = [number for number, group in enumerate(asked) if group]
    scores = scorer.score([prefixes[number] for number in numbers], [asked[number] for number in numbers])
    known = {
        (number, text): float(score)
        for number, values in zip(numbers, scores, strict=True)
        for text, score in zip(asked[number], values, strict=True)
    }
    return [[known.get((number, text), float("-inf")) for text in group] for number, group in enumerate(samples)]


def on_prompts(
    scorer: Scorer,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Prompt],
    template: TemplateOptions = NEXT_TURN,
) -> tuple[Scorer, list[str]]:
    """Return a scorer for continuations of prompts, and the prefix that it reads for each.

    Likelihoods are those after a conversation in the model's chat template; other scorers know no templates.
    """

    def rendered() -> list[str]:
        return [prompt_text(tokenizer, prompt, template) for prompt in prompts]

    if isinstance(scorer, LikelihoodScorer):
        return scorer, rendered()
    prefixes = [plain_text(tokenizer, prompt) for prompt in prompts]
    return scorer.after(prefixes, rendered()) if isinstance(scorer, MixedScorer) else scorer, prefixes


def load_scorer(scorer: str | Path, load: Load) -> Scorer:
    """Return the scorer of a folder or hub id; ``default`` is that of the bundled model."""
    folder = loading.settings_folder(source_of(scorer))
    if folder is not None and has_scorer(folder):
        return DualScorer.of_folder(load(scorer), folder)
    return T5Scorer.load(scorer)


def fixed_scorer(name: str, load: Load) -> Scorer:
    """Return a scorer that is the same for every evaluated model: shared words, or that of a folder or hub id."""
    if name in WORD_MEASURE_NAMES:
        return OverlapScorer(name)
    if name in SCORER_NAMES:
        words = " or ".join(WORD_MEASURE_NAMES)
        raise ConfigError(f"{name} differs from model to model; take {words}, or a scorer's folder or hub id")
    source_of(name, WORD_MEASURE_NAMES)
    return load_scorer(name, load)


def for_scoring(spec: ModelSpec, scorer: str | None) -> ModelSpec:
    """Return a spec for a model that only generates and scores: its plan is causal, which every architecture has.

    The spec is unchanged where the model's trained scorer is needed, which was trained for the model's plan; for
    ``consensus``, which takes the model's own vectors; and for a T5, whose encoder has no other plan.
    """
    source = find_spec(spec)
    needs_own = scorer == CONSENSUS or (scorer in (None, MIXED, *MODEL_NAMES) and _has_own_scorer(spec, source))
    return spec if needs_own or loading.is_seq2seq(source) else ModelSpec.of(spec, attention="causal")


def _has_own_scorer(spec: ModelSpec, source: Source) -> bool:
    """Whether a model has a scorer, or comes with one in gerund, which another plan would leave aside."""
    if spec.model == DEFAULT_MODEL:
        return False  # its scorer has a plan of its own
    _, settings = loading.settings_of(spec, source, loading.read_config(source))
    return settings is not None and has_scorer(settings)


class MixedScorer:
    """The mean of two scorers, each standardized over the continuations of a prefix.

    PMI reads prefix and continuation together, a trained scorer compares their vectors: they err on different texts.

    >>> import gerund
    >>> lm = gerund.load()
    >>> [scores] = lm.score(["It is"], [[" raining.", " a violin."]], scorer="mixed")
    >>> len(scores)
    2
    """

    name = MIXED
    reads_model = True

    def __init__(
        self, likelihood: LikelihoodScorer, trained: DualScorer, rendered: Mapping[str, str] | None = None
    ) -> None:
        self._likelihood, self._trained, self._rendered = likelihood, trained, rendered or {}

    def after(self, prefixes: Sequence[str], rendered: Sequence[str]) -> "MixedScorer":
        """Return this scorer with likelihoods after other texts than the prefixes, such as rendered conversations."""
        return MixedScorer(self._likelihood, self._trained, dict(zip(prefixes, rendered, strict=True)))

    def incremental(self) -> "MixedScorer":
        """Return this scorer for a search that extends its continuations: only new tokens are read."""
        return MixedScorer(self._likelihood.incremental(), self._trained.incremental(), self._rendered)

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:
        """Return a score for each continuation of each prefix; higher is better."""
        by_part = (
            self._likelihood.score([self._rendered.get(prefix, prefix) for prefix in prefixes], continuations),
            self._trained.score(prefixes, continuations),
        )
        return [
            np.mean([standardized(np.array(scores)) for scores in of_prefix], axis=0).tolist()
            for of_prefix in zip(*by_part, strict=True)
        ]


class ConsensusScorer:
    """The mean cosine similarity of each continuation to the others of its prefix, by the model's own vectors.

    The modal text is the one nearest to all others: ModeX (arXiv 2601.02535) extends the majority vote to texts that
    are never equal. It compares samples by shared n-grams and keeps splitting them by spectral clustering; here the
    model that generates them also embeds them, and nothing is split: clusters of eight texts lost against the plain
    mean where both were measured.

    A text that is given twice counts twice, so that a majority wins. The prefix is not read: all continuations share
    it. A text without others scores 0.

    >>> import gerund
    >>> [scores] = ConsensusScorer(gerund.load()).score(["It is"], [[" raining.", " raining again.", " a violin."]])
    >>> min(scores) == scores[2]
    True
    """

    name = CONSENSUS
    counts_repeats = True

    def __init__(self, lm: TextModel) -> None:
        self._lm = lm

    def score(self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]]) -> list[list[float]]:  # noqa: ARG002
        """Return a score from -1 to 1 for each continuation of each prefix; higher is nearer to the others."""
        texts = list(dict.fromkeys(text for group in continuations for text in group))
        if not texts:
            return [[] for _ in continuations]
        vectors_ND = self._lm.encode(texts, show_progress=False).astype(np.float64)
        vectors_ND /= np.maximum(np.linalg.norm(vectors_ND, axis=1, keepdims=True), 1e-12)
        place = {text: index for index, text in enumerate(texts)}
        return [_agreement(vectors_ND[[place[text] for text in group]]) for group in continuations]


def _agreement(vectors_ND: np.ndarray) -> list[float]:
    """Return the mean cosine of each unit vector to the others."""
    count = len(vectors_ND)
    if count < 2:
        return [0.0] * count
    own_N = np.square(vectors_ND).sum(axis=1)
    mean_N: np.ndarray = (vectors_ND @ vectors_ND.sum(axis=0) - own_N) / (count - 1)
    return mean_N.tolist()
