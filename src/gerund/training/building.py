"""From a recipe's objectives to objectives that can be trained: their texts, their losses, what they share.

Knows: every objective. Does not know: steps, the trainer, files of a run.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from gerund.errors import ConfigError
from gerund.training.corpus.framing import Framing
from gerund.training.corpus.mask_token import pick_mask_token
from gerund.training.corpus.packing import PackedBlocks, SpreadBlocks
from gerund.training.corpus.pairs import Examples, read_examples
from gerund.training.corpus.passages import Passages, read_passages
from gerund.training.corpus.sources import Sources, existing
from gerund.training.corpus.texts import Texts
from gerund.training.objectives.base import Batches, Objective
from gerund.training.objectives.causal import BlockBatches, CausalLosses
from gerund.training.objectives.contrastive import ContrastiveLosses, Group
from gerund.training.objectives.hybrid import HybridBatches, HybridLosses
from gerund.training.objectives.rankgen import PassageBatches
from gerund.training.objectives.simcse import SimcseBatches
from gerund.training.objectives.sscl import AlteredBatches
from gerund.training.objectives.supervised import ExampleBatches
from gerund.training.objectives.unimae import UnimaeBatches, UnimaeLosses
from gerund.training.recipe import Recipe
from gerund.training.recipe_objectives import (
    CausalConfig,
    ContrastiveConfig,
    MntpConfig,
    MsgConfig,
    ObjectiveConfig,
    RankgenConfig,
    SimcseConfig,
    SsclConfig,
    SupervisedConfig,
    TextConfig,
    UnimaeConfig,
)

if TYPE_CHECKING:
    from gerund.training.subject import Subject

_SHORTEST_TEXT = 8
# The seeds of the objectives differ, so that two of them do not read the same texts in the same order.
_SEEDS = {"causal": 0, "mntp": 10, "msg": 10, "unimae": 20, "simcse": 30, "sscl": 40, "contrastive": 50, "rankgen": 60}
# What is added for validation texts.
_VALIDATION_SEED = 5


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


class _Builder:
    """Makes objectives of one kind each."""

    def __init__(self, recipe: Recipe, subject: "Subject", source: TextSource) -> None:
        self.recipe, self.subject, self.source = recipe, subject, source

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
        group = Group(self.subject.reader, self.subject.pad)
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

    def supervised(self, config: SupervisedConfig) -> Objective:
        prompts = (config.query_prompt, config.document_prompt)
        batches = self._examples(config, config.pairs, config.hard_negatives, prompts)
        return Objective(config.kind, batches, self._contrastive(config), {config.kind: config})

    def rankgen(self, config: RankgenConfig) -> Objective:
        batches = self._passages(config, config.passages, self._seed(config))
        validation: dict[str, tuple[Batches, int]] = {}
        if config.validation:
            # The same batches in every run and at every evaluation.
            others = self._passages(config, config.validation, _VALIDATION_SEED)
            validation = {config.kind: (others, self._count(config, len(others.texts)))}
        if config.continuation_length <= batches.continuations.room + 1:
            raise ConfigError(f"rankgen: continuation_length {config.continuation_length} leaves no room for text")
        width = self.subject.reader.width
        losses = ContrastiveLosses(
            self.subject.reader,
            temperature=config.temperature,
            similarity=config.similarity,
            projection=width if config.projection else None,
            in_batch=config.negatives != "generative",
        )
        if isinstance(losses.projection, nn.Linear):
            with torch.no_grad():
                # The states' own directions to begin with, and products of about the square root of the width.
                losses.projection.weight.copy_(torch.eye(width) * width**-0.25)
        return Objective(config.kind, batches, losses, {config.kind: config}, validation=validation)

    def _passages(self, config: RankgenConfig, paths: list[Path], seed: int) -> PassageBatches:
        with_negatives = config.negatives != "inbook"
        found = read_passages([self.recipe.data.folder / path for path in paths])
        if with_negatives:
            found = [example for example in found if example.negatives]
            if not found:
                raise ConfigError(
                    f"rankgen: none of the passages in {', '.join(map(str, paths))} has a generated or hard "
                    "continuation; make some with `gerund negatives --generate 1`, or set negatives: inbook"
                )
        return PassageBatches(
            Passages(found, seed=seed),
            self._framing(config, config.prefix_marker),
            self._framing(config, config.continuation_marker),
            Group(self.subject.reader, self.subject.pad),
            lengths=(config.length, config.continuation_length),
            with_negatives=with_negatives,
        )

    def _examples(
        self,
        config: Any,
        pairs: Any,
        hard_negatives: int,
        prompts: tuple[str | None, str | None] = (None, None),
    ) -> ExampleBatches:
        paths = existing(self.recipe, pairs.files)
        found = read_examples(paths, query=pairs.query, positive=pairs.positive, negatives=pairs.negatives)
        examples = Examples(found, seed=self._seed(config), hard_negatives=hard_negatives)
        queries, documents = (self._framing(config, prompt) for prompt in prompts)
        group = Group(self.subject.reader, self.subject.pad)
        return ExampleBatches(examples, queries, documents, group, length=config.length)

    def _contrastive(self, config: ContrastiveConfig) -> ContrastiveLosses:
        return ContrastiveLosses(
            self.subject.reader,
            temperature=config.temperature,  # type: ignore[attr-defined]  # each has one, with its own default
            similarity=config.similarity,
            projection=config.projection,
            dropout=getattr(config, "dropout", None),
        )

    def _objective(
        self, name: str, config: TextConfig, batches: Any, losses: Any, configs: dict[str, ObjectiveConfig], room: int
    ) -> Objective:
        """Return an objective on texts of the sources."""
        length, seed = config.length - room, self._seed(config)
        validation_seed = seed + _VALIDATION_SEED
        texts = self.source.validation_texts(config, length, validation_seed)
        validation = {}
        if texts is not None:
            validation = {name: (batches(texts, validation_seed), self._count(config, len(texts)))}
        training = batches(self.source.texts(config, length, seed), seed)
        return Objective(name, training, losses, configs, validation=validation)

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
