"""Tasks without data, and contenders without a model worth the name."""

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from gerund.evaluation.contender import Contender
from gerund.evaluation.task import Score, Settings, Task

TEXTS = ("a cat", "the dog in the rain", "an inn", "the end", "a thin man")


@dataclass(frozen=True, kw_only=True)
class ToyTask(Task):
    """Scores the mean cosine of neighbouring texts."""

    kind: ClassVar = "toy"
    side: ClassVar = "representation"

    texts_: tuple[str, ...] = TEXTS
    weight: float = field(default=1.0, metadata={"help": "Multiplies the score."})

    def texts(self, settings: Settings) -> list[str]:
        return list(self.texts_[: settings.limit])

    def run(self, contender: Contender, settings: Settings) -> Score:
        vectors = contender.encode(self.texts(settings), prompt=self.prompt(settings), normalize=True)
        cosines = (vectors[1:] * vectors[:-1]).sum(axis=1)
        return Score("cosine", {"cosine": float(self.weight * np.mean(cosines))}, size=len(vectors))


@dataclass(frozen=True, kw_only=True)
class ToyLikelihood(ToyTask):
    """One that asks how probable a text is."""

    kind: ClassVar = "toy-likelihood"

    @property
    def needs_likelihoods(self) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class ToyWriting(Task):
    """Scores how long the model's continuation is: the same under every plan."""

    kind: ClassVar = "toy-writing"
    side: ClassVar = "generation"
    reads_plan: ClassVar = False

    def run(self, contender: Contender, settings: Settings) -> Score:
        [made] = contender.lm.generate("the", max_new_tokens=4)
        return Score("tokens", {"tokens": float(len(made.token_ids))})


@dataclass(frozen=True, kw_only=True)
class ToyWords(Task):
    """Scores the mean of all numbers in the word vectors."""

    kind: ClassVar = "toy-words"
    side: ClassVar = "tokens"

    shift: bool = False

    def sentences(self, settings: Settings) -> list[list[str]]:
        return [text.split() for text in (*TEXTS, TEXTS[0])]

    @property
    def shifts_words(self) -> bool:
        return self.shift

    def run(self, contender: Contender, settings: Settings) -> Score:
        vectors = contender.encode_words(self.sentences(settings), prompt=self.prompt(settings), shift=self.shift)
        return Score("mean", {"mean": float(np.concatenate(vectors).mean())})
