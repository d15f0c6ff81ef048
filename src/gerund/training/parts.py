"""What every objective is built with: the recipe, the model, what gives texts, and how a text is framed.

Knows: framings, seeds, counts. Does not know: any objective's own batches.
"""

from typing import TYPE_CHECKING, Any, Protocol

from gerund.errors import ConfigError
from gerund.inference.infill.sentinels import sentinel_ids
from gerund.training.corpus.framing import Framing
from gerund.training.objectives.contrastive import ContrastiveLosses
from gerund.training.objectives.span_corruption import Corruption
from gerund.training.recipe import Recipe
from gerund.training.recipe_objectives import (
    CausalConfig,
    ContrastiveConfig,
    GurConfig,
    ObjectiveConfig,
    SpanConfig,
    TextConfig,
)

if TYPE_CHECKING:
    from gerund.training.subject import Subject

# The seeds of the objectives differ, so that two of them do not read the same texts in the same order.
_SEEDS = {"causal": 0, "mntp": 10, "msg": 10, "unimae": 20, "simcse": 30, "sscl": 40, "contrastive": 50, "rankgen": 60}
_SEEDS |= {"span_corruption": 70, "gur": 80}
VALIDATION_SEED = 5
"""What is added for validation texts."""


class TextSource(Protocol):
    """What gives texts to objectives: a corpus, or in a dry run random tokens."""

    def texts(self, config: TextConfig, length: int, seed: int) -> Any:
        """Return training texts of at most ``length`` tokens; see :class:`~gerund.training.corpus.texts.Texts`."""

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Any | None:
        """Return validation texts; None where there are none."""

    def blocks(self, config: CausalConfig, length: int, seed: int) -> Any:
        """Return packed blocks; see :class:`~gerund.training.corpus.packing.PackedBlocks`."""

    def validation_blocks(self, config: CausalConfig) -> dict[str, Any]:
        """Return validation blocks by the name of their source."""


class Parts:
    """What every objective is built with.

    Args:
        recipe: The settings.
        subject: The model.
        source: What gives texts.
    """

    def __init__(self, recipe: Recipe, subject: "Subject", source: TextSource) -> None:
        self.recipe, self.subject, self.source = recipe, subject, source

    def _framing(self, config: Any, prompt: str | None = None) -> Framing:
        """Return how texts are wrapped: as the encoder reads them; its prompt is for contrastive objectives alone."""
        encoder = self.subject.encoder
        own = encoder.prompt if isinstance(config, ContrastiveConfig) else ""
        framing = Framing(
            self.subject.tokenizer, prompt=own if prompt is None else prompt, append_eos=encoder.append_eos
        )
        if config.length <= framing.room + 1:
            raise ConfigError(
                f"{config.kind}: length {config.length} leaves no room for text; prompt and special tokens take "
                f"{framing.room}"
            )
        return framing

    def _seed(self, config: Any) -> int:
        return self.recipe.seed * 1000 + _SEEDS[config.kind] if config.kind != "causal" else self.recipe.seed

    def _count(self, config: ObjectiveConfig, available: int) -> int:
        """Return how many validation batches the recipe's limit allows."""
        wanted = self.recipe.data.validation_tokens // (config.batch_size * config.length)
        return max(1, min(wanted, available // config.batch_size))

    def _contrastive(self, config: ContrastiveConfig) -> ContrastiveLosses:
        return ContrastiveLosses(
            self.subject.runtime,
            temperature=config.temperature,  # type: ignore[attr-defined]  # each has one, with its own default
            similarity=config.similarity,
            projection=config.projection,
            dropout=getattr(config, "dropout", None),
        )

    def _corruption(self, config: SpanConfig | GurConfig) -> Corruption:
        tokenizer = self.subject.tokenizer
        sentinels = sentinel_ids(tokenizer)
        if len(sentinels) < 2 or tokenizer.eos_token_id is None:
            raise ConfigError(f"{config.kind}: the tokenizer lacks sentinels (<extra_id_0>, ...) or an end token")
        return Corruption(self._framing(config), sentinels, tokenizer.eos_token_id, config.rate, config.spans)
