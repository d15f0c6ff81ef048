"""Tasks without data, and systems without a model worth the name."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gerund.evaluation.systems.base import Encodes, EncodesWords, Generates, HasLikelihoods
from gerund.evaluation.task import EvaluationConfig, Score, Task

TEXTS = ("a cat", "the dog in the rain", "an inn", "the end", "a thin man")


@dataclass(frozen=True, kw_only=True)
class ToyTask(Task):
    """Scores the mean cosine of neighbouring texts."""

    kind: ClassVar = "toy"
    requires: ClassVar = Generates
    side: ClassVar = "representation"

    texts_: tuple[str, ...] = TEXTS
    weight: float = field(default=1.0, metadata={"help": "Multiplies the score."})

    def texts(self, config: EvaluationConfig) -> list[str]:
        return list(self.texts_[: config.limit])

    def run(self, system: Encodes, config: EvaluationConfig) -> Score:
        vectors = system.encode(self.texts(config), prompt=self.prompt(config), normalize=True)
        cosines = (vectors[1:] * vectors[:-1]).sum(axis=1)
        return Score("cosine", {"cosine": float(self.weight * np.mean(cosines))}, size=len(vectors))


@dataclass(frozen=True, kw_only=True)
class ToyLikelihood(ToyTask):
    """One that asks how probable a text is."""

    kind: ClassVar = "toy-likelihood"
    requires: ClassVar = HasLikelihoods


@dataclass(frozen=True, kw_only=True)
class ToyWriting(Task):
    """Scores how long the model's continuation is: the same under every plan."""

    kind: ClassVar = "toy-writing"
    side: ClassVar = "generation"
    reads_plan: ClassVar = False

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        [made] = system.lm.generate("the", max_new_tokens=4)
        return Score("tokens", {"tokens": float(len(made.token_ids))})


@dataclass(frozen=True, kw_only=True)
class ToyWords(Task):
    """Scores the mean of all numbers in the word vectors."""

    kind: ClassVar = "toy-words"
    requires: ClassVar = EncodesWords
    side: ClassVar = "tokens"

    shift: bool = False

    def sentences(self, config: EvaluationConfig) -> list[list[str]]:
        return [text.split() for text in (*TEXTS, TEXTS[0])]

    @property
    def shifts_words(self) -> bool:
        return self.shift

    def run(self, system: EncodesWords, config: EvaluationConfig) -> Score:
        vectors = system.encode_words(self.sentences(config), prompt=self.prompt(config), shift=self.shift)
        return Score("mean", {"mean": float(np.concatenate(vectors).mean())})
