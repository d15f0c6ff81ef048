"""What objectives are prepared with: the recipe, the model, what gives texts, and how a text is formatted.

Knows: formatters, files, counts. Does not know: any objective's own batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gerund.errors import ConfigError
from gerund.training.objectives.base import Batches, Objective, ObjectiveConfig, TextConfig

if TYPE_CHECKING:
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.recipe import Recipe
    from gerund.training.trainable_model import TrainableModel

VALIDATION_SEED = 5
"""What is added for validation texts."""


class TextSource(Protocol):
    """What gives texts to objectives: a corpus, or in a dry run random tokens."""

    @property
    def cache(self) -> Path | None:
        """Folder for what is made of texts; None where nothing is to be written."""

    def texts(self, config: TextConfig, length: int, seed: int) -> Any:
        """Return training texts of at most ``length`` tokens; see :class:`~gerund.training.corpus.texts.Texts`."""

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Any | None:
        """Return validation texts; None where there are none."""

    def blocks(self, sources: list[str], length: int, seed: int) -> Any:
        """Return packed blocks; see :class:`~gerund.training.corpus.texts.PackedBlocks`."""

    def validation_blocks(self, sources: list[str], length: int, rows: int) -> dict[str, Any]:
        """Return validation blocks by the name of their source."""

    def reads(self, name: str, files: list[Path]) -> None:
        """Take note of files that an objective reads by itself, and of what the recipe calls them."""


@dataclass(frozen=True)
class Context:
    """What every objective is prepared with."""

    recipe: "Recipe"
    """The settings."""
    model: "TrainableModel"
    """The model."""
    source: TextSource
    """What gives texts."""
    resuming: bool = False
    """Whether a run goes on from a checkpoint, by the same recipe and on the same texts."""

    def formatter(self, config: ObjectiveConfig, prompt: str | None = None) -> "InputFormatter":
        """Return what puts special tokens and a prompt around texts, as the encoder reads them.

        Args:
            config: The settings; the length of texts must leave room for text.
            prompt: Put before texts; None takes the encoder's, where its vectors are trained.

        Raises:
            ConfigError: The length leaves no room for text.
        """
        from gerund.training.corpus.formatting import InputFormatter

        encoder = self.model.encoder
        own = encoder.prompt if config.trains_vectors else ""
        formatter = InputFormatter(
            self.model.tokenizer,
            prompt=own if prompt is None else prompt,
            append_eos=encoder.append_eos,
            normalizes=config.trains_vectors and encoder.normalizes_texts,
        )
        if config.length <= formatter.overhead + 1:
            raise ConfigError(
                f"{config.kind}: length {config.length} leaves no room for text; prompt and special tokens take "
                f"{formatter.overhead}"
            )
        return formatter

    def seed(self, config: ObjectiveConfig) -> int:
        """Return the seed of an objective."""
        return config.seed(self.recipe.seed)

    def files(self, paths: list[Path]) -> list[Path]:
        """Return files of pairs, which a resumed run has to find as they were.

        Raises:
            ConfigError: One of them is not there.
        """
        from gerund.training.corpus.texts import existing

        found = existing(self.recipe, paths, texts=False)
        for path, file in zip(paths, found, strict=True):
            self.source.reads(str(path), [file])
        return found

    def validation_batches(self, config: ObjectiveConfig, available: int) -> int:
        """Return how many validation batches the recipe's limit allows."""
        wanted = self.recipe.data.validation_tokens // (config.batch_size * config.length)
        return max(1, min(wanted, available // config.batch_size))

    def text_objective(
        self,
        name: str,
        config: TextConfig,
        batches: Callable[[Any, int], Batches],
        losses: Any,
        *,
        overhead: int,
        configs: dict[str, ObjectiveConfig] | None = None,
        factors: dict[str, float] | None = None,
        validate: bool = True,
    ) -> Objective:
        """Return an objective on texts of the sources.

        Args:
            name: What its batches are called.
            config: Which texts.
            batches: From texts and a seed to batches.
            losses: What is computed on them.
            overhead: How many tokens of the length are no text.
            configs: For each loss its settings; None for one loss of that name.
            factors: For each loss a constant factor; None for none.
            validate: Whether it has validation texts, where sources have any.
        """
        length, seed = config.length - overhead, self.seed(config)
        validation: dict[str, tuple[Batches, int]] = {}
        # Opened also where nothing is validated: what a run reads is compared on a resume.
        texts = self.source.validation_texts(config, length, seed + VALIDATION_SEED)
        if texts is not None and validate:
            own = batches(texts, seed + VALIDATION_SEED)
            validation = {name: (own, self.validation_batches(config, len(texts)))}
        training = batches(self.source.texts(config, length, seed), seed)
        return Objective(name, training, losses, configs or {name: config}, factors or {}, validation)
