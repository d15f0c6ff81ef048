"""From a recipe's objectives to objectives that can be trained: their texts, their losses, what they share.

Knows: every objective. Does not know: steps, the trainer, files of a run.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.errors import ConfigError
from gerund.training.building_pairs import PairObjectives
from gerund.training.corpus.mask_token import pick_mask_token
from gerund.training.corpus.packing import PackedBlocks, SpreadBlocks
from gerund.training.corpus.sources import Sources
from gerund.training.corpus.texts import Texts
from gerund.training.objectives.base import Batches, Objective
from gerund.training.objectives.causal import BlockBatches, CausalLosses
from gerund.training.objectives.contrastive import Group
from gerund.training.objectives.hybrid import HybridBatches, HybridLosses
from gerund.training.objectives.simcse import SimcseBatches
from gerund.training.objectives.span_corruption import SpanBatches, SpanLosses
from gerund.training.objectives.sscl import AlteredBatches
from gerund.training.objectives.unimae import UnimaeBatches, UnimaeLosses
from gerund.training.parts import VALIDATION_SEED, TextSource
from gerund.training.recipe import Recipe
from gerund.training.recipe_objectives import (
    CausalConfig,
    MntpConfig,
    MsgConfig,
    ObjectiveConfig,
    SimcseConfig,
    SpanConfig,
    SsclConfig,
    TextConfig,
    UnimaeConfig,
)

if TYPE_CHECKING:
    from gerund.training.subject import Subject

_SHORTEST_TEXT = 8


class CorpusTexts:
    """Texts of the recipe's sources.

    Args:
        sources: The sources as tokens.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources

    def texts(self, config: TextConfig, length: int, seed: int) -> Texts:
        """Return training texts."""
        caches = self.sources.training(config.sources, unit=config.unit, min_words=config.min_words)
        weights = [source.weight for source in self.sources.chosen(config.sources)]
        return Texts(caches, weights, length=length, seed=seed, min_tokens=min(_SHORTEST_TEXT, length))

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Texts | None:
        """Return validation texts."""
        sources, caches = self.sources.validation(config.sources, unit=config.unit, min_words=config.min_words)
        if not sources:
            return None
        weights = [source.weight for source in sources]
        return Texts(caches, weights, length=length, seed=seed, min_tokens=min(_SHORTEST_TEXT, length))

    def blocks(self, config: CausalConfig, length: int, seed: int) -> PackedBlocks:
        """Return packed training blocks."""
        weights = [source.weight for source in self.sources.chosen(config.sources)]
        return PackedBlocks(self.sources.training(config.sources), weights, length=length, seed=seed)

    def validation_blocks(self, config: CausalConfig) -> dict[str, SpreadBlocks]:
        """Return validation blocks of each source."""
        sources, caches = self.sources.validation(config.sources)
        named = zip(sources, caches, strict=True)
        limit = self.sources.recipe.data.validation_tokens
        options = {"length": config.length, "rows": config.batch_size, "limit": limit}
        return {source.name: SpreadBlocks(cache, **options) for source, cache in named}


def build_objectives(recipe: Recipe, subject: "Subject", source: TextSource) -> list[Objective]:
    """Return the recipe's objectives, mntp and msg as one where they share a pass.

    Raises:
        ConfigError: An objective does not fit the model's tokenizer, or a file is not there.
        DataError: A source has no usable text.
    """
    builder = _Builder(recipe, subject, source)
    # What never takes part needs no texts.
    active = [config for config in recipe.objectives if _takes_part(config, recipe.steps)]
    by_kind: dict[str, Any] = {config.kind: config for config in active}
    if "mntp" in by_kind and "msg" in by_kind and _share_a_pass(by_kind["mntp"], by_kind["msg"]):
        mntp, msg = by_kind.pop("mntp"), by_kind.pop("msg")
        return [builder.hybrid(mntp, msg), *(builder.one(config) for config in by_kind.values())]
    return [builder.one(config) for config in by_kind.values()]


def _takes_part(config: ObjectiveConfig, steps: int) -> bool:
    return any(weight > 0 and first < steps for first, weight in config.weight)


def _share_a_pass(mntp: MntpConfig, msg: MsgConfig) -> bool:
    fields = ("batch_size", "micro_batch_size", "length", "sources", "unit", "min_words")
    differing = [name for name in fields if getattr(mntp, name) != getattr(msg, name)]
    if msg.shared_pass and differing:
        raise ConfigError(
            f"mntp and msg share a pass and must agree in {', '.join(differing)}; "
            "make them equal, or set shared_pass: false for msg"
        )
    return msg.shared_pass


class _Builder(PairObjectives):
    """Makes objectives of one kind each."""

    def one(self, config: Any) -> Objective:
        """Return the objective of these settings."""
        makers: dict[str, Callable[[Any], Objective]] = {
            "causal": self.causal,
            "mntp": lambda own: self.hybrid(own, None),
            "msg": lambda own: self.hybrid(None, own),
            "unimae": self.unimae,
            "simcse": self.self_supervised,
            "sscl": self.self_supervised,
            "contrastive": self.supervised,
            "span_corruption": self.span_corruption,
            "gur": self.gur,
            "rankgen": self.rankgen,
        }
        return makers[config.kind](config)

    def causal(self, config: CausalConfig) -> Objective:
        recipe = self.recipe
        decay = (recipe.schedule.decay_steps or 0) if config.decay_length else 0
        seed = self._seed(config)
        blocks = self.source.blocks(config, config.length, seed)
        # A seed of its own, or the long blocks would begin where the first short ones began.
        long = self.source.blocks(config, config.decay_length or 0, seed + 1) if decay else None
        options = {"decay_from": recipe.steps - decay, "steps": recipe.steps, "rows": config.batch_size}
        validation: dict[str, tuple[Batches, int]] = {
            name: (BlockBatches(own, None, **options), self._count(config, len(own)))
            for name, own in self.source.validation_blocks(config).items()
        }
        losses = CausalLosses(compiled=recipe.compile)
        made = BlockBatches(blocks, long, **options)
        return Objective("causal", made, losses, {"causal": config}, validation=validation)

    def hybrid(self, mntp: MntpConfig | None, msg: MsgConfig | None) -> Objective:
        config = mntp or msg
        assert config is not None
        configs: dict[str, ObjectiveConfig] = {c.kind: c for c in (mntp, msg) if c is not None}
        framing = self._framing(config)
        tokenizer = self.subject.tokenizer
        special = set(tokenizer.all_special_ids)
        vocabulary = min(len(tokenizer), self.subject.model.get_input_embeddings().num_embeddings)
        options: dict[str, Any] = {
            "mntp": mntp,
            "msg": msg,
            "mask_id": pick_mask_token(tokenizer, mntp.mask_token) if mntp is not None else 0,
            "random_ids": np.array([token for token in range(vocabulary) if token not in special]),
            "pad": self.subject.pad,
        }
        name = "+".join(configs)

        def batches(texts: Any, seed: int) -> Batches:
            return HybridBatches(texts, framing, seed=seed, **options)

        predict = mntp.predict if mntp is not None else "next"
        losses = HybridLosses(self.subject.n_layers, tuple(configs), predict=predict)
        return self._objective(name, config, batches, losses, configs, framing.room)

    def unimae(self, config: UnimaeConfig) -> Objective:
        framing = self._framing(config)
        text_config = self.subject.model.config.get_text_config(decoder=True)
        mask = pick_mask_token(self.subject.tokenizer, config.mask_token)

        def batches(texts: Any, seed: int) -> Batches:
            return UnimaeBatches(texts, framing, config, mask_id=mask, pad=self.subject.pad, seed=seed)

        losses = UnimaeLosses(
            text_config.hidden_size, config.heads or text_config.num_attention_heads, config.length - framing.room
        )
        configs: dict[str, ObjectiveConfig] = {"mar": config, "mrc": config}
        objective = self._objective("unimae", config, batches, losses, configs, framing.room)
        objective.factors = {"mar": config.alpha}
        return objective

    def self_supervised(self, config: SimcseConfig | SsclConfig) -> Objective:
        group = Group(self.subject.runtime, self.subject.pad)
        losses = self._contrastive(config)
        if isinstance(config, SsclConfig) and config.pairs is not None:
            return Objective(config.kind, self._examples(config, config.pairs, 0), losses, {config.kind: config})
        framing = self._framing(config)

        def batches(texts: Any, seed: int) -> Batches:
            if isinstance(config, SimcseConfig):
                return SimcseBatches(texts, framing, group)
            return AlteredBatches(texts, framing, group, tokenizer=self.subject.tokenizer, config=config, seed=seed)

        configs: dict[str, ObjectiveConfig] = {config.kind: config}
        objective = self._objective(config.kind, config, batches, losses, configs, framing.room)
        if isinstance(config, SimcseConfig):
            # Without dropout both views are the same, and the loss says nothing.
            objective.validation = {}
        return objective

    def span_corruption(self, config: SpanConfig) -> Objective:
        corruption = self._corruption(config)

        def batches(texts: Any, seed: int) -> Batches:
            return SpanBatches(texts, corruption, pad=self.subject.pad, seed=seed)

        return self._objective(
            config.kind, config, batches, SpanLosses(), {config.kind: config}, corruption.framing.room
        )

    def _objective(
        self, name: str, config: TextConfig, batches: Any, losses: Any, configs: dict[str, ObjectiveConfig], room: int
    ) -> Objective:
        """Return an objective on texts of the sources."""
        length, seed = config.length - room, self._seed(config)
        validation_seed = seed + VALIDATION_SEED
        texts = self.source.validation_texts(config, length, validation_seed)
        validation = {}
        if texts is not None:
            validation = {name: (batches(texts, validation_seed), self._count(config, len(texts)))}
        training = batches(self.source.texts(config, length, seed), seed)
        return Objective(name, training, losses, configs, validation=validation)
