"""Distillation: a language model learns to give texts the vectors that a teacher gives them.

The student's vector is its pooled state behind a linear head into the teacher's space, which is kept with the model:
``encode`` then gives vectors that can be compared with the teacher's own. Three losses, each with a weight: the cosine
to the teacher's vector, the squared distance to it (Reimers and Gurevych 2020), and the divergence between the two
views of which texts of a batch are alike (Fang et al. 2021, SEED). Further layers may learn the same beside the last
(Romero et al. 2015, FitNets; Jiao et al. 2020, TinyBERT), through heads of their own that are not kept.

Knows: which texts, which losses. Does not know: how a teacher encodes, how vectors are kept (``corpus.teachers``).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from gerund.errors import ConfigError
from gerund.training.objectives.base import DECODER_ONLY, Batch, Batches, Objective, PairLosses, Purpose, TextConfig
from gerund.training.objectives.vectors import TextGroup, VectorConfig

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from gerund.inference.tokens import Tokens
    from gerund.models.heads import ProjectionHead
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.teachers import KnownVectors, TeacherVectors
    from gerund.training.losses.vectors import DistillEncoder
    from gerund.training.objectives.context import Context
    from gerund.training.recipe import Recipe


FITTED = "fitted"
"""The folder, within a run's, of the head as it was fitted."""


class DistillConfig(TextConfig, VectorConfig):
    """A teacher's vectors are learned: by cosine, by distance, and by what is alike in a batch (distillation)."""

    models: ClassVar[tuple[str, ...]] = (DECODER_ONLY,)
    trains_head: ClassVar[bool] = True
    purpose: ClassVar[Purpose] = Purpose.DISTIL
    seed_offset: ClassVar[int | None] = 90
    shortest_text: ClassVar[int] = 1

    kind: Literal["distill"]
    teacher: str = Field(min_length=1)
    """What gives the vectors: a folder or hub id of a model that sentence-transformers or gerund reads, or a Parquet
    file of ``gerund embed --keep-text``, whose texts are then those that are learned."""
    teacher_prompt: str = ""
    """Put before every text that the teacher reads, as ``query:`` for one that was trained so."""
    unit: Literal["documents", "sentences"] = "sentences"
    length: int = Field(default=128, ge=2)
    batch_size: int = Field(default=64, ge=2)
    cosine: float = Field(default=1.0, ge=0)
    """Weight of one minus the cosine to the teacher's vector."""
    mse: float = Field(default=0.0, ge=0)
    """Weight of the squared distance to it."""
    similarity: float = Field(default=1.0, ge=0)
    """Weight of the divergence between the student's and the teacher's similarities within a batch."""
    temperature: float = Field(default=0.05, gt=0)
    """These similarities are divided by it."""
    layers: list[int] = Field(default_factory=list)
    """Layers, counted from 1, whose pooled states learn the teacher's vectors too, through linear heads that are not
    kept; left out, only the last state does."""
    layer_weight: float = Field(default=0.5, gt=0)
    """What the mean loss of these layers counts beside the last state's."""
    matryoshka: list[int] = Field(default_factory=list)
    """Further numbers of dimensions: the first so many numbers of a vector learn the teacher's similarities too, so
    that shortened vectors keep more of what whole ones know (Kusupati et al. 2022). Needs ``similarity``."""
    token_vectors: bool = False
    """Whether the head adds a vector for each token, the mean over the text. They are fitted to the teacher before the
    first step, by least squares over all texts, so that the language model has to learn only what they miss."""
    word_vectors: int = Field(default=0, ge=0)
    """How many words at most, the commonest of the texts, have a vector of their own that is added too, whatever their
    case and however many tokens they are made of. They are fitted together with those of the tokens, rounded to 8 bits
    a number, and stay as they are. Needs ``token_vectors``."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if not (self.cosine or self.mse or self.similarity):
            raise ValueError("with cosine, mse and similarity all 0 nothing is learned")
        if self.layers and not (self.cosine or self.mse):
            raise ValueError("layers learn by cosine and mse, which are both 0")
        if self.matryoshka and not self.similarity:
            raise ValueError("matryoshka trains shortened vectors by similarity, which is 0")
        if self.word_vectors and not self.token_vectors:
            raise ValueError("word_vectors are fitted together with token_vectors, which are off")
        if any(size < 1 for size in self.matryoshka):
            raise ValueError(f"matryoshka has numbers of dimensions, above 0, not {self.matryoshka}")
        if len(set(self.layers)) < len(self.layers) or any(layer < 1 for layer in self.layers):
            raise ValueError(f"layers are counted from 1, each named once, not {self.layers}")
        return self

    @property
    def file(self) -> Path | None:
        """The Parquet file of the teacher's vectors, where they are given so."""
        return Path(self.teacher) if self.teacher.lower().endswith(".parquet") else None

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return self.file is None

    def check(self, recipe: "Recipe") -> None:
        """Refuse to be listed behind an objective that trains the same head, and a prompt for a file of vectors."""
        super().check(recipe)
        before = recipe.objectives[: [own.kind for own in recipe.objectives].index(self.kind)]
        other = next((own.kind for own in before if own.trains_vectors), None)
        if other is not None:
            raise ValueError(f"distill makes the head that {other} trains too: list it first")
        if self.file is not None and self.teacher_prompt:
            raise ValueError(f"{self.teacher} has vectors that are made already; teacher_prompt is for a model")

    def prepare(self, context: "Context") -> Objective:
        """Return batches of texts with their teacher's vectors, and the losses."""
        from gerund.training.corpus.teachers import open_teacher, read_known

        formatter = context.formatter(self)
        if self.file is not None:
            [path] = context.files([self.file])
            known = read_known(path)
            return self._objective(context, formatter, known, known.space, known.dimensions)
        teacher = open_teacher(self.teacher, self.teacher_prompt)
        return self._objective(context, formatter, teacher, teacher.space, teacher.dimensions)

    def _objective(
        self, context: "Context", formatter: "InputFormatter", teacher: Any, space: str, dimensions: int
    ) -> Objective:
        from gerund.training.losses.vectors import DistillEncoder

        if max(self.matryoshka, default=0) > dimensions:
            raise ConfigError(
                f"distill: matryoshka {max(self.matryoshka)}, and the teacher has {dimensions} dimensions"
            )
        runtime = context.model.runtime
        if max(self.layers, default=0) > context.model.n_layers:
            raise ConfigError(f"distill: layers {max(self.layers)}, and the model has {context.model.n_layers}")
        head = self._head(context, space, dimensions)
        losses = DistillLosses(DistillEncoder(runtime, head, dimensions, self.layers), self)
        group = TextGroup.of(context)
        if self.file is not None:
            batches: Batches = KnownBatches(teacher, formatter, group, length=self.length, seed=context.seed(self))
            objective = Objective(self.kind, batches, losses, {self.kind: self})
        else:
            from gerund.training.run_folder import announce

            def made(texts: Any, seed: int) -> Batches:
                del seed
                return DistillBatches(texts, formatter, group, self._vectors(context, texts, teacher, announce))

            objective = context.text_objective(self.kind, self, made, losses, overhead=formatter.overhead)
        if head.tokens is not None and not bool(head.tokens.weight.any()):
            self._fit(head, objective.batches, context)
        return objective

    def _head(self, context: "Context", space: str, dimensions: int) -> "ProjectionHead":
        """Return the base's head, to be trained further, or a new one into the teacher's space."""
        from torch import nn

        from gerund.models.heads import HeadConfig, ProjectionHead

        model = context.model
        width = model.runtime.state_width
        vocabulary = model.vocabulary if self.token_vectors else None
        settings = HeadConfig(width, dimensions, "linear", vocabulary, space, self.word_vectors or None)
        if model.head is not None:
            own = model.head.settings
            if replace(own, space=space) != settings:
                raise ConfigError(
                    f"distill: the base has a head of {own.dimensions} dimensions ({own.variant}), which leads into "
                    "no space of this teacher; set model.adapter to none, or merge the base without its head"
                )
            head = ProjectionHead(settings)
            head.load_state_dict(model.head.state_dict())
        else:
            head = ProjectionHead(settings)
            if self.token_vectors:
                nn.init.zeros_(head.outer.weight)
        model.head = head.float().train()
        return model.head

    @staticmethod
    def _vectors(
        context: "Context", texts: Any, teacher: Any, report: Callable[[str], None]
    ) -> "TeacherVectors | RandomVectors":
        """Return the teacher's vectors of all texts; random ones in a dry run, which reads no text."""
        from gerund.training.corpus.teachers import teacher_vectors

        if context.source.cache is None:
            return RandomVectors(teacher.dimensions)
        decode = context.model.tokenizer.decode

        def read(numbers: range) -> list[str]:
            found = (texts.tokens_of(number).tolist() for number in numbers)
            return [decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False).strip() for ids in found]

        return teacher_vectors(teacher, read, len(texts), context.source.cache / "teacher", report)

    def _fit(self, head: "ProjectionHead", batches: Any, context: "Context") -> None:
        """Fit the vectors of tokens and words to the teacher's vectors of all training texts; not in a dry run.

        The first process does so once a run, since it may take minutes: the others are given its weights, and a resumed
        run reads what was fitted, of which a checkpoint holds only what is trained further.
        """
        from gerund.jobs.files import atomic_folder
        from gerund.models.heads import read_head
        from gerund.training.losses.distillation import fit_head
        from gerund.training.processes import process_index

        if context.source.cache is None or process_index() > 0:
            return
        folder = context.recipe.output / FITTED
        kept = read_head(folder) if context.resuming else None
        if kept is not None and kept.settings == head.settings:
            head.load_state_dict(kept.state_dict())
            return
        if head.words is not None:
            head.words.read_tokens(context.model.tokenizer)
        fit_head(head, batches.every())
        with atomic_folder(folder, overwrite=True) as partial:
            head.save(partial)


class RandomVectors:
    """Random vectors in the place of a teacher's.

    Args:
        dimensions: Numbers of a vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def rows(self, numbers: "list[int]") -> "np.ndarray":
        """Return a vector for each number."""
        import numpy as np

        rows = [np.random.default_rng(number).normal(size=self.dimensions) for number in numbers]
        return np.stack(rows).astype(np.float32)


class DistillBatches(Batches):
    """Texts of the sources with their teacher's vectors.

    Args:
        texts: Token ids by number.
        formatter: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
        vectors: The teacher's vectors, by the number of the text and not of the row.
    """

    def __init__(
        self, texts: Any, formatter: "InputFormatter", group: TextGroup, vectors: "TeacherVectors | RandomVectors"
    ) -> None:
        self.texts, self.formatter, self.group, self.vectors = texts, formatter, group, vectors

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the group ``query`` with the teacher's vectors ``teacher`` (B, E)."""
        del step
        numbers = [self.texts.number(row) for row in range(first, first + count)]
        return {"query": self._batch(numbers)}

    def every(self, size: int = 256) -> "Any":
        """Yield all texts once, in batches."""
        for first in range(0, len(self.texts), size):
            yield self._batch(list(range(first, min(first + size, len(self.texts)))))

    def _batch(self, numbers: list[int]) -> Batch:
        texts = [self.formatter.format(self.texts.tokens_of(number)) for number in numbers]
        return with_teacher(self.group(texts), self.vectors.rows(numbers))


class KnownBatches(Batches):
    """Texts of a file with their teacher's vectors.

    Args:
        known: The texts and vectors.
        formatter: Formats texts.
        group: Makes a group of texts into tensors.
        length: Longest text in tokens; the end of a longer one is cut off.
        seed: Determines the order.
    """

    def __init__(
        self, known: "KnownVectors", formatter: "InputFormatter", group: TextGroup, *, length: int, seed: int
    ) -> None:
        from gerund.training.corpus.texts import Mixture

        self.texts, self.formatter, self.group, self.length = known.texts, formatter, group, length
        self.known, self._order = known, Mixture([len(known.texts)], [1.0], seed=seed)

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the group ``query`` with the teacher's vectors ``teacher`` (B, E)."""
        del step
        return {"query": self._batch([self._order.sample(row).item for row in range(first, first + count)])}

    def every(self, size: int = 256) -> "Any":
        """Yield all texts once, in batches."""
        for first in range(0, len(self.texts), size):
            yield self._batch(list(range(first, min(first + size, len(self.texts)))))

    def _batch(self, numbers: list[int]) -> Batch:
        texts: list[Tokens] = [self.formatter.format_text(self.texts[number], self.length) for number in numbers]
        return with_teacher(self.group(texts), self.known.rows(numbers))


def with_teacher(batch: Batch, vectors_BE: "np.ndarray") -> Batch:
    """Return a batch with the teacher's vectors as ``teacher``."""
    import torch

    return {**batch, "teacher": torch.from_numpy(vectors_BE)}


class DistillLosses(PairLosses):
    """What the student's vectors cost.

    Args:
        reader: Reads texts.
        config: The weights of the losses.
    """

    heads: "DistillEncoder"

    def __init__(self, reader: "DistillEncoder", config: DistillConfig) -> None:
        self.heads, self.config = reader, config

    def __call__(self, model: "PreTrainedModel", part: Batch) -> "Tensor":
        """Return the vectors ``(B, E)`` of the texts, side by side with those of further layers ``(B, L E)``."""
        vectors_BF: Tensor = self.heads(model, part)
        return vectors_BF

    def compare(self, vectors_ND: "Tensor", batch: Mapping[str, Batch], *, gather: bool) -> "tuple[Tensor, int]":
        """Return the weighted sum of the losses, and for how many texts the nearest teacher's vector is their own."""
        from gerund.training.losses.distillation import found_first, prefixes, similarity_loss

        teacher_BE = batch["query"]["teacher"].float()
        own_BE, *further = vectors_ND.float().split(teacher_BE.shape[1], dim=1)
        loss = self._near(own_BE, teacher_BE)
        if self.config.similarity:
            sizes = prefixes(teacher_BE.shape[1], self.config.matryoshka)
            views = [
                similarity_loss(own_BE[:, :size], teacher_BE, temperature=self.config.temperature, gather=gather)
                for size in sizes
            ]
            loss = loss + self.config.similarity * sum(views, start=loss.new_zeros(())) / len(sizes)
        if further:
            layers = sum((self._near(one_BE, teacher_BE) for one_BE in further), start=loss.new_zeros(()))
            loss = loss + self.config.layer_weight * layers / len(further)
        return loss, found_first(own_BE, teacher_BE)

    def _near(self, student_BE: "Tensor", teacher_BE: "Tensor") -> "Tensor":
        from gerund.training.losses.distillation import cosine_loss, squared_loss

        loss = student_BE.new_zeros(())
        if self.config.cosine:
            loss = loss + self.config.cosine * cosine_loss(student_BE, teacher_BE)
        if self.config.mse:
            loss = loss + self.config.mse * squared_loss(student_BE, teacher_BE)
        return loss
