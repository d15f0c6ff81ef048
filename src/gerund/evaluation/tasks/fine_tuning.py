"""Classification by training the whole encoder on some examples a class (GUR, section V-B, Figure 10).

Knows: labelled texts, samples. Does not know: how an encoder is trained.
"""

import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from gerund.errors import ConfigError
from gerund.evaluation.classifiers import FineTuningConfig, accuracy, fine_tuned, predicted
from gerund.evaluation.labelled_task import LabelledTask, by_label, chosen, labelled_tasks
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, LabelledTexts, Score
from gerund.inference.encode.texts import text_tokens


@dataclass(frozen=True, kw_only=True)
class FineTuning(LabelledTask):
    """Accuracy of the encoder with a linear layer on top, both trained on 100 examples a class.

    A copy is trained: the encoder (of an encoder-decoder the encoder alone), with its plan, adapter and head; the model
    that other tasks measure stays as it is. AdamW, a learning rate that falls to 0 in a straight line, a fixed number
    of epochs; GUR says nothing of how it trains. The examples are those that ``few-shot`` samples. A class that has
    fewer gives all of its examples. With several ``runs`` the mean over as many samples, whose standard deviation is
    the spread.

    It takes minutes a model, so neither ``all`` nor ``representation`` means it: it is asked for by its name.

    ``config.limit`` is at most so many texts of the training set that is sampled from and of the split that is
    scored, sampled by the seed.
    """

    kind: ClassVar[str] = "fine-tuning"
    requires: ClassVar[type] = Generates
    by_name_only: ClassVar[bool] = True

    shots: int = field(default=100, metadata={"help": "Examples a class at most."})
    runs: int = field(default=1, metadata={"help": "Samples."})
    epochs: int = field(default=5, metadata={"help": "How often each example is read."})
    learning_rate: float = field(default=3e-4, metadata={"help": "AdamW's, at the beginning."})
    batch_size: int = field(default=32, metadata={"help": "Texts a step."})

    def __post_init__(self) -> None:
        for name in ("shots", "runs", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"fine-tuning.{name} is 1 or more, not {getattr(self, name)}")
        if not 0 < self.learning_rate < 1:
            raise ConfigError(f"fine-tuning.learning_rate lies between 0 and 1, and is {self.learning_rate:g}")

    def run(self, system: Generates, config: EvaluationConfig) -> Score:
        """Train on each sample, score the other set.

        Raises:
            DataError: a file is malformed, or a label is only among what is scored.
            ModelError: the weights cannot be trained, or the training comes apart.
        """
        train, test = self.learnt_and_scored(config)
        found = [
            accuracy(test.labels, self._predicted(system, chosen(train, sample), test.texts, config, number))
            for number, sample in enumerate(self._samples(train, config))
        ]
        return Score(
            "accuracy",
            {"accuracy": statistics.fmean(found)},
            spread=statistics.stdev(found) if self.runs > 1 else None,
            runs=self.runs,
            size=len(test.labels),
            notes=self._notes(train.labels),
        )

    def _predicted(
        self, system: Generates, learnt: LabelledTexts, texts: list[str], config: EvaluationConfig, number: int
    ) -> list[str]:
        """Return the label of each text by a copy of the model that was trained on a sample."""
        import gc

        import torch

        names = sorted(set(learnt.labels))
        if len(names) == 1:
            return names * len(texts)
        lm, prompt = system.lm, self.prompt(config)
        how = FineTuningConfig(self.epochs, self.learning_rate, self.batch_size, seed=config.seed + number * 1_000_003)
        labels = [names.index(label) for label in learnt.labels]
        learnt_tokens, tokens = (text_tokens(lm.runtime, own, prompt, empty="zeros") for own in (learnt.texts, texts))
        classifier = fine_tuned(lm.runtime, learnt_tokens, labels, how, show=config.show_progress)
        found = [names[label] for label in predicted(classifier, lm.runtime, tokens)]
        del classifier
        gc.collect()
        if lm.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def _samples(self, train: LabelledTexts, config: EvaluationConfig) -> list[list[int]]:
        """Return of each sample which training texts are learnt from."""
        return [
            [place for order in by_label(train.labels, config.seed, number) for place in order[: self.shots]]
            for number in range(self.runs)
        ]

    def _notes(self, labels: list[str]) -> tuple[str, ...]:
        """Count the classes that have fewer examples than a sample takes."""
        counts = Counter(labels)
        few = sum(count < self.shots for count in counts.values())
        note = f"{few} of {len(counts)} classes have fewer than {self.shots} training examples and give all of theirs"
        return (note,) if few else ()


def find(folder: Path) -> list[FineTuning]:
    """Return a task for every folder in ``classification`` that has a training and a test set."""
    return labelled_tasks(FineTuning, folder)
