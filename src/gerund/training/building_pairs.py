"""Objectives on pairs from files: contrastive fine-tuning, GUR, RankGen.

Knows: files of pairs and of passages, their batches and losses. Does not know: objectives on texts of the sources.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gerund.errors import ConfigError
from gerund.models.heads import HeadSettings, ProjectionHead
from gerund.training.corpus.pairs import Example, Examples, read_examples
from gerund.training.corpus.passages import Passages, read_passages
from gerund.training.corpus.sources import existing
from gerund.training.objectives.base import Batches, Objective
from gerund.training.objectives.contrastive import ContrastiveLosses, Group
from gerund.training.objectives.gur import TITLE_PROMPT, Bucket, Buckets, GurBatches, GurLosses
from gerund.training.objectives.rankgen import PassageBatches
from gerund.training.objectives.supervised import ExampleBatches
from gerund.training.parts import VALIDATION_SEED, Parts
from gerund.training.recipe_objectives import GurConfig, ObjectiveConfig, RankgenConfig, SupervisedConfig

# GUR, Table I.
_GUR_DIMENSIONS = 128


class PairObjectives(Parts):
    """Makes the objectives on pairs, one kind each."""

    def supervised(self, config: SupervisedConfig) -> Objective:
        """Return contrastive fine-tuning on queries, positives and hard negatives."""
        prompts = (config.query_prompt, config.document_prompt)
        batches = self._examples(config, config.pairs, config.hard_negatives, prompts)
        return Objective(config.kind, batches, self._contrastive(config), {config.kind: config})

    def gur(self, config: GurConfig) -> Objective:
        """Return both losses of GUR, or one of them, on mined pairs."""
        apart = self.subject.is_encoder_decoder
        writes = apart if config.lm is None else config.lm
        losses = GurLosses(
            self.subject.runtime,
            temperature=config.temperature,
            similarity=config.similarity,
            projection=config.projection,
        )
        head = self._head(config)
        if head is not None:
            losses.projection = head
        framing = self._framing(config)
        seed = self._seed(config)
        batches = GurBatches(
            self._buckets(config, seed),
            config.batch_size,
            framing,
            Group(self.subject.runtime, self.subject.pad),
            seed=seed,
            corruption=self._corruption(config) if writes else None,
            titles=self._framing(config, TITLE_PROMPT) if writes and config.title_share else None,
            title_share=config.title_share,
        )
        configs: dict[str, ObjectiveConfig] = {"gur": config, **({"lm": config} if writes else {})}
        return Objective(config.kind, batches, losses, configs, factors={"gur": config.alpha})

    def rankgen(self, config: RankgenConfig) -> Objective:
        """Return the scorer of continuations on passages."""
        batches = self._passages(config, config.passages, self._seed(config))
        validation: dict[str, tuple[Batches, int]] = {}
        if config.validation:
            # The same batches in every run and at every evaluation.
            others = self._passages(config, config.validation, VALIDATION_SEED)
            validation = {config.kind: (others, self._count(config, len(others.texts)))}
        if config.continuation_length <= batches.continuations.room + 1:
            raise ConfigError(f"rankgen: continuation_length {config.continuation_length} leaves no room for text")
        width = self.subject.runtime.width
        losses = ContrastiveLosses(
            self.subject.runtime,
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

    def _head(self, config: GurConfig) -> ProjectionHead | None:
        """Return the base's head, to be trained further, or a new one, or None where the recipe asks for none."""
        head, asked = self.subject.head, config.dimensions
        if asked is None and (config.projection is not None or not (self.subject.is_encoder_decoder or head)):
            return None
        if head is None:
            shape = HeadSettings(self.subject.runtime.state_width, asked or _GUR_DIMENSIONS, config.variant or "paper")
            head = ProjectionHead(shape)
        own = head.settings
        if asked not in (None, own.dimensions) or config.variant not in (None, own.variant):
            raise ConfigError(
                f"gur: the base has a head of {own.dimensions} dimensions ({own.variant}), and the recipe asks for "
                f"{asked or own.dimensions} ({config.variant or own.variant}); left out, that of the base is trained "
                "further"
            )
        self.subject.head = head.float().train()
        return self.subject.head

    def _buckets(self, config: GurConfig, seed: int) -> Buckets:
        pairs = config.pairs
        found = read_examples(
            existing(self.recipe, pairs.files, texts=False), query=pairs.query, positive=pairs.positive
        )
        if config.short_length is None:
            return Buckets([Bucket(Examples(found, seed=seed), config.length)], config.batch_size)
        lots: tuple[list[Example], list[Example]] = ([], [])
        for one in found:
            lots[max(len(one.query), len(one.positive)) >= config.short_characters].append(one)
        shapes = ((config.short_length, config.short_factor), (config.length, 1))
        buckets = [
            Bucket(Examples(lot, seed=seed + place), length, factor)
            for place, (lot, (length, factor)) in enumerate(zip(lots, shapes, strict=True))
            if lot
        ]
        return Buckets(buckets, config.batch_size)

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
            Group(self.subject.runtime, self.subject.pad),
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
        paths = existing(self.recipe, pairs.files, texts=False)
        found = read_examples(paths, query=pairs.query, positive=pairs.positive, negatives=pairs.negatives)
        examples = Examples(found, seed=self._seed(config), hard_negatives=hard_negatives)
        queries, documents = (self._framing(config, prompt) for prompt in prompts)
        group = Group(self.subject.runtime, self.subject.pad)
        return ExampleBatches(examples, queries, documents, group, length=config.length)
