"""Train distillation: a language model learns to give texts the vectors that a teacher gives them.

The student's vector is its pooled state after a linear head into the teacher's space, which is kept with the model:
``encode`` then gives vectors that can be compared with the teacher's. Three losses, each with a weight: the cosine
to the teacher's vector, the squared distance to it (Reimers and Gurevych 2020), and the divergence between the two
views of which texts of a batch are similar (Fang et al. 2021, SEED). Further layers may learn the same
(Romero et al. 2015, FitNets; Jiao et al. 2020, TinyBERT), through heads that are not kept.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gerund.data.corpus import clean_text, read_documents
from gerund.entry import load
from gerund.errors import ConfigError
from gerund.inference.tokens import Tokens
from gerund.jobs.files import atomic_folder
from gerund.models.heads import ProjectionHead, read_head
from gerund.models.light_head import HeadConfig
from gerund.training.corpus.teachers import (
    KnownVectors,
    RandomVectors,
    Teacher,
    TeacherVectors,
    open_teacher,
    read_known,
    teacher_vectors,
)
from gerund.training.corpus.texts import Mixture, existing
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.distillation import (
    cosine_loss,
    fit_head,
    fit_projection,
    prefixes,
    similarity_loss,
    squared_loss,
    take_words,
    top1_count,
)
from gerund.training.losses.vectors import DistillEncoder, VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses
from gerund.training.objectives.contrastive import TextGroup
from gerund.training.objectives.settings import DistillConfig
from gerund.training.processes import process_index, uses_bf16
from gerund.training.recipe import Recipe
from gerund.training.run_folder import announce

_FIT_TOGETHER = 128
FITTED = "fitted"
"""The folder, within a run's, of the head as it was fitted."""


def prepare(context: Context, config: DistillConfig) -> Objective:
    """Return batches of texts with their teacher's vectors, and the losses."""
    formatter = context.formatter(config)
    if config.file is not None:
        [path] = context.files([config.file])
        teacher: Teacher | KnownVectors = read_known(path)
    else:
        teacher = open_teacher(config.teacher, config.teacher_prompt)
    dimensions, layers = teacher.dimensions, context.model.encoder.depth(context.model.n_layers)
    if max(config.matryoshka, default=0) > dimensions:
        raise ConfigError(f"distill: matryoshka {max(config.matryoshka)}, and the teacher has {dimensions} dimensions")
    if max(config.layers, default=0) > layers:
        raise ConfigError(f"distill: layers {max(config.layers)}, and texts are read by {layers}")
    is_new = context.model.head is None
    words_of = None if config.words_of is None else _open_words(config.words_of, teacher.space, is_new=is_new)
    head = _head(context, config, teacher.space, dimensions)
    model = context.model
    losses = DistillLosses(DistillEncoder(model.runtime, head, config.layers, model.below), config)
    group = TextGroup.of(context)
    if isinstance(teacher, KnownVectors):
        known = KnownBatches(teacher, formatter, group, length=config.length, seed=context.seed(config))
        objective = Objective(config.kind, known, losses, {config.kind: config})
    else:
        objective = context.text_objective(
            config.kind,
            config,
            lambda texts, _seed: DistillBatches(texts, formatter, group, _vectors(context, texts, teacher)),
            losses,
            overhead=formatter.overhead,
        )
    batches: Any = objective.batches
    if is_new and (config.fit_head or head.settings.vocabulary is not None):
        _fit(head, context, config, batches, words_of)
    return objective


def _head(context: Context, config: DistillConfig, space: str, dimensions: int) -> ProjectionHead:
    """Return the base's head, to be trained further, or a new one into the teacher's space."""
    model = context.model
    settings = HeadConfig(
        model.runtime.state_width,
        dimensions,
        "linear",
        vocabulary=model.vocabulary if config.token_vectors or config.word_vectors else None,
        space=space,
        words=config.word_vectors or None,
        token_vectors=False if config.word_vectors and not config.token_vectors else None,
        word_bytes=config.word_bytes,
    )
    if model.head is not None:
        has = model.head.settings
        if replace(has, space=space) != settings:
            raise ConfigError(
                f"distill: the base has another head ({has.variant}, {has.dimensions} dimensions) than the recipe, or "
                "one into no space of this teacher; set model.adapter to none, or merge the base without its head"
            )
        head = ProjectionHead(settings)
        head.load_state_dict(model.head.state_dict())
    else:
        head = ProjectionHead(settings)
        if settings.has_token_vectors:
            nn.init.zeros_(head.outer.weight)
    model.head = head.float().train()
    return model.head


def _vectors(context: Context, texts: Any, teacher: Teacher) -> TeacherVectors | RandomVectors:
    """Return the teacher's vectors of all texts; random ones in a dry run, which reads no text."""
    if context.source.cache is None:
        return RandomVectors(teacher.dimensions)
    decode = context.model.tokenizer.decode

    def read(numbers: range) -> list[str]:
        rows = (texts.tokens_of(number).tolist() for number in numbers)
        return [decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip() for ids in rows]

    return teacher_vectors(teacher, read, len(texts), context.source.cache / "teacher", announce)


@torch.no_grad()
def _pooled(
    context: Context, batches: "DistillBatches", texts: int, head: ProjectionHead
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pooled states ``(B, D)`` of so many texts, and the teacher's vectors ``(B, E)`` less those of words."""
    announce(f"fitting the head to the teacher's vectors of {min(texts, len(batches.texts)):,} texts")
    model = context.model.model.to("cuda" if torch.cuda.is_available() else "cpu")
    encoder = VectorEncoder(context.model.runtime, below=context.model.below)
    for batch in islice(batches.every(_FIT_TOGETHER), -(-texts // _FIT_TOGETHER)):
        part = {name: value.to(model.device) for name, value in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=uses_bf16(context.recipe)):
            pooled_BD = encoder(model, part)
        missed_BE = batch["teacher"].float()
        if head.settings.vocabulary is not None:
            missed_BE = missed_BE - head.static(batch["input_ids"], batch["pooled"])
        yield pooled_BD.float().cpu(), missed_BE


def _fit(
    head: ProjectionHead,
    context: Context,
    config: DistillConfig,
    batches: Any,
    words_of: tuple[ProjectionHead, Any] | None,
) -> None:
    """Fit vectors of tokens and words, or take those of another model, and then the linear map; not in a dry run.

    The first process does so once per run, since it may take minutes: the others are given its weights, and a resumed
    run reads what was fitted, of which a checkpoint has only what is trained further.
    """
    if context.source.cache is None or process_index() > 0:
        return
    folder = context.recipe.output / FITTED
    stored = read_head(folder) if context.resuming else None
    if stored is not None and stored.settings == head.settings:
        head.load_state_dict(stored.state_dict())
        return
    if head.words is not None:
        head.words.read_tokens(context.model.tokenizer)
    if words_of is not None:
        announce(f"taking the vectors of words of {config.words_of}")
        texts = batches.texts if config.file is not None else _all_texts(context.recipe, config)
        take_words(head, texts, *words_of)
    elif head.settings.vocabulary is not None:
        fit_head(head, batches.every())
    if config.fit_head:
        fit_projection(head, _pooled(context, batches, config.fit_head, head))
    with atomic_folder(folder, overwrite=True) as partial:
        head.save(partial)


def _all_texts(recipe: Recipe, config: DistillConfig) -> Iterator[str]:
    """Yield the texts of all files of the objective's sources, those beyond a limit too; bad ones are skipped."""
    for source in recipe.data.sources:
        if not config.sources or source.name in config.sources:
            files = existing(recipe, source.files)
            for document in read_documents(files, text_column=source.text_column, bad=lambda _: None):
                yield clean_text(document.text, source.clean)


def _open_words(model: str, space: str, *, is_new: bool) -> tuple[ProjectionHead, Any]:
    """Return the head and the tokenizer of a model whose words have vectors in the teacher's space."""
    if not is_new:
        raise ConfigError("distill.words_of is for a new head, and the base has one; leave it out")
    lm = load(model, device="cpu")
    head = lm.head
    if head is None or head.words is None or head.settings.space != space:
        raise ConfigError(f"distill.words_of: {model} has no head with vectors of words in the space of this teacher")
    return head, lm.tokenizer


@dataclass(eq=False)
class DistillBatches(Batches):
    """Texts of the sources with their teacher's vectors, by the number of the text and not of the row."""

    texts: Any
    formatter: InputFormatter
    group: TextGroup
    vectors: TeacherVectors | RandomVectors | KnownVectors

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the group ``query`` with the teacher's vectors ``teacher`` (B, E)."""
        return {"query": self._batch([self.number(row) for row in numbers])}

    def every(self, size: int = 256) -> Iterator[Batch]:
        """Yield all texts once, in batches."""
        for first in range(0, len(self.texts), size):
            yield self._batch(list(range(first, min(first + size, len(self.texts)))))

    def number(self, row: int) -> int:
        """Return which text is in a row of the training."""
        number: int = self.texts.number(row)
        return number

    def formatted(self, number: int) -> Tokens:
        """Return a text as the encoder reads it."""
        return self.formatter.format(self.texts.tokens_of(number))

    def _batch(self, numbers: list[int]) -> Batch:
        batch = self.group([self.formatted(number) for number in numbers])
        return {**batch, "teacher": torch.from_numpy(self.vectors.rows(numbers))}


class KnownBatches(DistillBatches):
    """Texts of a file with their teacher's vectors; the end of a text of more than ``length`` tokens is cut off."""

    def __init__(
        self, known: KnownVectors, formatter: InputFormatter, group: TextGroup, *, length: int, seed: int
    ) -> None:
        super().__init__(known.texts, formatter, group, known)
        self.length, self._order = length, Mixture([len(known.texts)], [1.0], seed=seed)

    def number(self, row: int) -> int:
        """Return which text is in a row of the training."""
        return self._order.sample(row).item

    def formatted(self, number: int) -> Tokens:
        """Return a text as the encoder reads it."""
        return self.formatter.format_text(self.texts[number], self.length)


class DistillLosses(PairLosses):
    """The weighted losses of the student's vectors."""

    def __init__(self, encoder: DistillEncoder, config: DistillConfig) -> None:
        self.heads, self.config = encoder, config

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the weighted sum of the losses, and for how many texts the nearest teacher's vector is their own."""
        teacher_BE = batch["query"]["teacher"].float()
        own_BE, *further = vectors_ND.float().split(teacher_BE.shape[1], dim=1)
        loss = self._distance_loss(own_BE, teacher_BE)
        if self.config.similarity:
            sizes = prefixes(teacher_BE.shape[1], self.config.matryoshka)
            views = [
                similarity_loss(own_BE[:, :size], teacher_BE, temperature=self.config.temperature, gather=gather)
                for size in sizes
            ]
            loss = loss + self.config.similarity * sum(views, start=loss.new_zeros(())) / len(sizes)
        if further:
            layers = sum((self._distance_loss(one_BE, teacher_BE) for one_BE in further), start=loss.new_zeros(()))
            loss = loss + self.config.layer_weight * layers / len(further)
        return loss, top1_count(own_BE, teacher_BE)

    def _distance_loss(self, student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
        loss = student_BE.new_zeros(())
        if self.config.cosine:
            loss = loss + self.config.cosine * cosine_loss(student_BE, teacher_BE)
        if self.config.mse:
            loss = loss + self.config.mse * squared_loss(student_BE, teacher_BE)
        return loss
