"""Fine-tune a copy of the encoder on labelled texts: the task `fine-tuning` (GUR, section V-B)."""

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from gerund.errors import ConfigError, ModelError, ResourceError
from gerund.evaluation.data_files import LabelledTexts
from gerund.evaluation.systems.base import Generates
from gerund.evaluation.task import EvaluationConfig, LabelledTask, Score
from gerund.inference.encode.batches import default_batch_tokens
from gerund.inference.encode.runtime import EncoderRuntime, TextClassifier
from gerund.inference.encode.texts import text_tokens
from gerund.inference.tokens import Tokens, token_batches
from gerund.models.architectures import encoder_of
from gerund.models.kinds import is_encoder_decoder
from gerund.papers.linear_probes import accuracy, notes_on, sample_of
from gerund.progress import progress

# What the gradient is cut to, as in nearly every fine-tuning of an encoder.
_LONGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class FineTuningConfig:
    """How a copy is trained."""

    epochs: int  # passes over the texts
    learning_rate: float  # AdamW's at the beginning; it falls to 0 in a straight line
    batch_size: int  # texts a step
    seed: int  # of the first weights of the linear layer, the order of texts and what dropout drops


def copied(runtime: EncoderRuntime) -> EncoderRuntime:
    """Return a copy of the encoder in float32, every weight of it ready to be trained.

    Of an encoder-decoder the encoder alone.

    Plan, adapter and head are those of the model: an adapter takes part as it does in encoding, and is trained too.
    """
    model = runtime.model
    part = encoder_of(model) if is_encoder_decoder(model) else model.base_model
    if not all(weight.is_floating_point() for weight in part.parameters()):
        raise ModelError("this model's weights are quantised and cannot be trained; load it in float32 or bfloat16")
    layers, head = copy.deepcopy(part).float(), copy.deepcopy(runtime.head)
    for module in (layers, head):
        if module is not None:
            module.requires_grad_(True)
    return replace(runtime.in_own_type(), model=layers, head=None if head is None else head.float())


def fine_tuned(
    runtime: EncoderRuntime,
    texts: Sequence[Tokens | None],
    labels: Sequence[int],
    config: FineTuningConfig,
    *,
    show: bool | None = None,
) -> TextClassifier:
    """Train a copy of an encoder, and a linear layer over its vectors, to tell texts apart.

    Torch's own random state is not touched.
    """
    steps = config.epochs * -(-len(texts) // config.batch_size)
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        torch.manual_seed(config.seed)
        classifier = TextClassifier(copied(runtime), max(labels) + 1).train()
        trained = [weight for weight in classifier.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=config.learning_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
        with progress(steps, "fine-tuning", show=show) as advance:
            for _ in range(config.epochs):
                for rows in torch.randperm(len(texts)).split(config.batch_size):
                    batch = [texts[row] for row in rows.tolist()]
                    right_B = torch.tensor([labels[row] for row in rows.tolist()], device=runtime.device)
                    _step(classifier, _inputs(runtime, batch), right_B, config)
                    nn.utils.clip_grad_norm_(trained, _LONGEST_GRADIENT)
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
                    advance(1)
    return classifier.eval()


@torch.no_grad()
def predicted(classifier: TextClassifier, runtime: EncoderRuntime, texts: Sequence[Tokens | None]) -> list[int]:
    """Return the likeliest class of each text."""
    labels = [0] * len(texts)
    budget = default_batch_tokens(runtime.device.type, runtime.state_width)
    for rows in token_batches([1 if text is None else len(text) for text in texts], budget):
        logits_BC = classifier(**_inputs(runtime, [texts[row] for row in rows])).logits
        for row, label in zip(rows, logits_BC.argmax(-1).tolist(), strict=True):
            labels[row] = label
    return labels


def _step(classifier: TextClassifier, inputs: dict[str, Tensor], right_B: Tensor, config: FineTuningConfig) -> None:
    """Compute the gradients of one batch."""
    try:
        loss = classifier(**inputs, labels=right_B).loss
        loss.backward()
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"out of memory on a step of {config.batch_size} texts; set a smaller batch_size or max_length"
        ) from error
    if not torch.isfinite(loss):
        raise ModelError(f"the loss is not finite at the learning rate {config.learning_rate:g}; set a lower one")


def _inputs(runtime: EncoderRuntime, texts: Sequence[Tokens | None]) -> dict[str, Tensor]:
    """Return texts as a classifier takes them, padded on the right; of an empty one nothing is pooled."""
    shape = len(texts), max(1 if text is None else len(text) for text in texts)
    ids_BT = torch.full(shape, runtime.tokenizer.pad_token_id or 0)
    real_BT, pooled_BT = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        real_BT[row, : 1 if text is None else len(text)] = 1
        if text is not None:
            ids_BT[row, : len(text)] = torch.tensor(text.ids)
            pooled_BT[row, runtime.pool_from(text) : len(text)] = True
    inputs = {"input_ids": ids_BT, "attention_mask": real_BT, "pooled": pooled_BT}
    return {name: tensor.to(runtime.device) for name, tensor in inputs.items()}


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
        """Train on each sample, score the other set."""
        train, test = self.learnt_and_scored(config)
        accuracies = [
            accuracy(test.labels, self._predicted(system, train.take(sample), test.texts, config, number))
            for number in range(self.runs)
            for sample in [sample_of(train.labels, self.shots, config.seed, number)]
        ]
        return Score(
            "accuracy",
            {"accuracy": statistics.fmean(accuracies)},
            spread=statistics.stdev(accuracies) if self.runs > 1 else None,
            runs=self.runs,
            size=len(test.labels),
            notes=notes_on(train.labels, [self.shots]),
        )

    def _predicted(
        self, system: Generates, learnt: LabelledTexts, texts: list[str], config: EvaluationConfig, number: int
    ) -> list[str]:
        """Return the label of each text by a copy of the model that was trained on a sample."""
        import gc

        names = sorted(set(learnt.labels))
        if len(names) == 1:
            return names * len(texts)
        lm, prompt = system.lm, self.prompt(config)
        how = FineTuningConfig(self.epochs, self.learning_rate, self.batch_size, seed=config.seed + number * 1_000_003)
        labels = [names.index(label) for label in learnt.labels]
        learnt_tokens, tokens = (text_tokens(lm.runtime, part, prompt, empty="zeros") for part in (learnt.texts, texts))
        classifier = fine_tuned(lm.runtime, learnt_tokens, labels, how, show=config.show_progress)
        named = [names[label] for label in predicted(classifier, lm.runtime, tokens)]
        del classifier
        gc.collect()
        if lm.device.type == "cuda":
            torch.cuda.empty_cache()
        return named
