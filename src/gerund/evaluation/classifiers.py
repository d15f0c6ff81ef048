"""Classifiers that tasks train: on frozen vectors (logistic regression, linear taggers), and of a whole encoder.

Knows: vectors, tokens, labels, scikit-learn, imbalanced-learn, torch. Does not know: texts, files, tasks.
"""

import copy
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from gerund.errors import ModelError, ResourceError
from gerund.inference.encode.classifier import TextClassifier
from gerund.inference.encode.runtime import EncoderRuntime, default_batch_tokens
from gerund.inference.tokens import Tokens, token_batches
from gerund.models.architectures import encoder_of, is_encoder_decoder
from gerund.progress import progress

ITERATIONS = 100
"""Of LBFGS: LBW section 4.1, as in MTEB."""

STEPS = 4000
BATCH_SENTENCES = 8
LEARNING_RATE = 5e-4
DROPOUT = 0.1
"""How linear taggers are trained: MAGNET, appendix A."""

# Nearest neighbours that SMOTE interpolates between: its paper's (Chawla et al., 2002) and imbalanced-learn's.
_NEIGHBOURS = 5
_PREDICTED_AT_ONCE = 1 << 16
_PROGRESS_STEPS = 100
# What the gradient is cut to, as in nearly every fine-tuning of an encoder.
_LONGEST_GRADIENT = 1.0


def logistic_regression(
    train_ND: np.ndarray, train_labels: Sequence[str], test_MD: np.ndarray, *, seed: int
) -> list[str]:
    """Fit a logistic regression by LBFGS and return what it predicts.

    The vectors are taken as they are: measured on banking77, hwu64, chemprot and the financial phrasebank, length 1
    costs up to 18 points of accuracy, and unit variance gains nothing.

    Args:
        train_ND: one vector a training example.
        train_labels: their labels. Where all are the same, nothing is fitted.
        test_MD: the vectors to classify.
        seed: handed to scikit-learn.

    Returns:
        One of ``train_labels`` for each of ``test_MD``.
    """
    if len(set(train_labels)) == 1:
        return [train_labels[0]] * len(test_MD)
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    # More threads make LBFGS slower here, by four on two cores: the matrices are small.
    with threadpool_limits(limits=1, user_api="blas"), warnings.catch_warnings():
        # The papers stop after so many iterations, converged or not.
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted = LogisticRegression(max_iter=ITERATIONS, random_state=seed).fit(train_ND, train_labels)
        return [str(label) for label in fitted.predict(test_MD)]


def oversample(
    vectors_ND: np.ndarray, labels: Sequence[str], *, seed: int, times: int | None = None
) -> tuple[np.ndarray, list[str]]:
    """Make examples up by SMOTE (Chawla et al., 2002): bring every class to one size, or to several times its own.

    A made-up example lies between one of the class and one of its 5 nearest neighbours within the class; where
    a class has no 5 others, between as many as it has. A class with a single example stays as it is.

    Args:
        vectors_ND: one vector an example.
        labels: their labels.
        seed: of what is made up.
        times: how many times as large every class becomes, so that no class becomes likelier, as LBW's released code
            has it with 5; all of them with as many neighbours as the smallest allows. None brings every class to the
            size of the largest.

    Returns:
        The examples, with those made up behind them, and the labels of all.
    """
    from imblearn.over_sampling import SMOTE

    if len(set(labels)) < 2:  # there is nothing to tell apart, as in the first examples of a file
        return vectors_ND, list(labels)
    counts = {label: count for label, count in sorted(Counter(labels).items()) if count > 1}
    most = max(counts.values(), default=0)
    fewest = min(_NEIGHBOURS, min(counts.values(), default=2) - 1)
    grouped: dict[int, dict[str, int]] = {}
    for label, count in counts.items():
        if times is not None:
            grouped.setdefault(fewest, {})[label] = times * count
        elif count < most:
            grouped.setdefault(min(_NEIGHBOURS, count - 1), {})[label] = most
    labels = list(labels)
    for neighbours, wanted in grouped.items():
        sampler = SMOTE(k_neighbors=neighbours, sampling_strategy=wanted, random_state=seed)
        vectors_ND, labels = sampler.fit_resample(vectors_ND, labels)
    return vectors_ND, [str(label) for label in labels]


def accuracy(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return which fraction of the labels is right."""
    return sum(true == label for true, label in zip(gold, predicted, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of all labels that occur or are predicted; 0 for those that are never right."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="macro", zero_division=0.0))


def weighted_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of all labels that occur, each weighing as often as it occurs."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="weighted", zero_division=0.0))


@dataclass(frozen=True)
class TaggerTraining:
    """How linear taggers are trained.

    Attributes:
        batch: sentences a step.
        learning_rate: AdamW's.
        steps: number of steps; None for ``epochs`` passes.
        epochs: passes over the sentences, each in an order of its own.
        decays: whether the rate falls to 0 in a straight line.
        longest_gradient: what the gradient is cut to; None for no limit.
    """

    batch: int = BATCH_SENTENCES
    learning_rate: float = LEARNING_RATE
    steps: int | None = STEPS
    epochs: int = 0
    decays: bool = False
    longest_gradient: float | None = None

    def count(self, sentences: int) -> int:
        """Return how many steps that is for so many sentences."""
        return self.epochs * -(-sentences // self.batch) if self.steps is None else self.steps


RELEASED_TAGGER = TaggerTraining(32, 5e-3, steps=None, epochs=3, decays=True, longest_gradient=1.0)
"""LBW's released code, ``scripts/run_ner.sh`` with frozen weights, and what transformers' Trainer does by itself."""


@dataclass(frozen=True)
class LinearTagger:
    """A linear classifier of word vectors.

    Attributes:
        tags: the classes.
        weight_CD: one row a class.
        bias_C: one number a class.
    """

    tags: list[str]
    weight_CD: np.ndarray
    bias_C: np.ndarray

    def predict(self, vectors_ND: np.ndarray) -> list[str]:
        """Return the tag of each vector; of equals the first."""
        found: list[str] = []
        for start in range(0, len(vectors_ND), _PREDICTED_AT_ONCE):
            scores_NC = vectors_ND[start : start + _PREDICTED_AT_ONCE] @ self.weight_CD.T + self.bias_C
            found += [self.tags[place] for place in scores_NC.argmax(axis=1)]
        return found


def train_taggers(
    vectors_ND: np.ndarray,
    tags: Sequence[Sequence[Sequence[str]]],
    *,
    seed: int,
    steps: int | None = None,
    training: TaggerTraining = TaggerTraining(),
    show: bool | None = None,
) -> list[LinearTagger]:
    """Train linear classifiers of frozen word vectors as MAGNET does (appendix A), several side by side.

    4000 steps of AdamW at 5e-4 on 8 sentences each, sampled without repetition until all were seen, with dropout
    0.1 on the vectors and the mean cross-entropy over the words. Weight decay is 0 and the rate constant, of
    which the paper says nothing. Classifiers that are trained together read the same batches and have nothing
    else in common, so each comes out as if it were alone but for its first weights.

    Args:
        vectors_ND: the vectors of all words, sentence after sentence; may lie in a file (``np.memmap``).
        tags: for each classifier the tags of each sentence.
        seed: of first weights, batches and dropout; torch's own random state is not touched.
        steps: number of steps; None for those of ``training``.
        training: other settings than MAGNET's.
        show: whether to show progress; None only on a terminal.

    Returns:
        One classifier for each of ``tags``, with its classes in alphabetical order.
    """
    from torch.nn import functional

    generator = torch.Generator().manual_seed(seed)
    classes = [sorted({tag for sentence in own for tag in sentence}) for own in tags]
    targets = [torch.from_numpy(_targets(own, names)) for own, names in zip(tags, classes, strict=True)]
    bounds = _bounds(tags[0])
    width = vectors_ND.shape[1]
    # The first weights of torch.nn.Linear.
    reach = width**-0.5
    parameters = [
        (
            torch.empty(len(names), width).uniform_(-reach, reach, generator=generator).requires_grad_(),
            torch.empty(len(names)).uniform_(-reach, reach, generator=generator).requires_grad_(),
        )
        for names in classes
    ]
    trained = [one for pair in parameters for one in pair]
    optimizer = torch.optim.AdamW(trained, lr=training.learning_rate, weight_decay=0.0)
    steps = training.count(len(bounds) - 1) if steps is None else steps
    order: list[int] = []
    with progress(steps, "training linear classifiers", show=show) as advance, torch.enable_grad():
        for step in range(1, steps + 1):
            order = order or torch.randperm(len(bounds) - 1, generator=generator).tolist()
            batch, order = order[: training.batch], order[training.batch :]
            rows = np.concatenate([np.arange(bounds[place], bounds[place + 1]) for place in batch])
            words_ND = torch.from_numpy(vectors_ND[rows])
            kept_ND = torch.rand(words_ND.shape, generator=generator) >= DROPOUT
            words_ND = words_ND * kept_ND / (1 - DROPOUT)
            losses = [
                functional.cross_entropy(functional.linear(words_ND, weight_CD, bias_C), own[rows])
                for (weight_CD, bias_C), own in zip(parameters, targets, strict=True)
            ]
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            if training.longest_gradient is not None:
                for pair in parameters:  # each classifier is trained as if it were alone
                    nn.utils.clip_grad_norm_(pair, training.longest_gradient)
            if training.decays:
                optimizer.param_groups[0]["lr"] = training.learning_rate * (1 - (step - 1) / steps)
            optimizer.step()
            if step % _PROGRESS_STEPS == 0:
                advance(_PROGRESS_STEPS)
    return [
        LinearTagger(names, weight_CD.detach().numpy(), bias_C.detach().numpy())
        for names, (weight_CD, bias_C) in zip(classes, parameters, strict=True)
    ]


@dataclass(frozen=True)
class FineTuningConfig:
    """How a copy is trained.

    Attributes:
        epochs: passes over the texts.
        learning_rate: AdamW's at the beginning; it falls to 0 in a straight line.
        batch_size: texts a step.
        seed: of the first weights of the linear layer, the order of texts and what dropout drops.
    """

    epochs: int
    learning_rate: float
    batch_size: int
    seed: int


def copied(runtime: EncoderRuntime) -> EncoderRuntime:
    """Return a copy of the encoder in float32, every weight of it ready to be trained.

    Of an encoder-decoder the encoder alone.

    Plan, adapter and head are those of the model: an adapter takes part as it does in encoding, and is trained too.

    Raises:
        ModelError: the weights are quantised.
    """
    model = runtime.model
    part = encoder_of(model) if is_encoder_decoder(model) else model.base_model
    if not all(weight.is_floating_point() for weight in part.parameters()):
        raise ModelError("this model's weights are quantised and cannot be trained; load it in float32 or bfloat16")
    own, head = copy.deepcopy(part).float(), copy.deepcopy(runtime.head)
    for module in (own, head):
        if module is not None:
            module.requires_grad_(True)
    return replace(runtime.in_own_type(), model=own, head=None if head is None else head.float())


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

    Args:
        runtime: the encoder, which stays as it is.
        texts: what is learnt from; None for an empty text.
        labels: their classes, from 0 on.
        config: how.
        show: whether to show progress; None only on a terminal.

    Returns:
        The classifier, not training any more.

    Raises:
        ModelError: the weights cannot be trained, or the loss is no number any more.
        ResourceError: a step does not fit the memory.
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
    """Return the likeliest class of each text.

    Args:
        classifier: as ``fine_tuned`` returns it.
        runtime: that it was made from.
        texts: any; None for an empty one.
    """
    found = [0] * len(texts)
    budget = default_batch_tokens(runtime.device.type, runtime.state_width)
    for rows in token_batches([1 if text is None else len(text) for text in texts], budget):
        logits_BC = classifier(**_inputs(runtime, [texts[row] for row in rows])).logits
        for row, label in zip(rows, logits_BC.argmax(-1).tolist(), strict=True):
            found[row] = label
    return found


def _targets(tags: Sequence[Sequence[str]], names: list[str]) -> np.ndarray:
    """Return the class of every word as a number."""
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[tag] for sentence in tags for tag in sentence])


def _bounds(tags: Sequence[Sequence[str]]) -> np.ndarray:
    """Return where each sentence begins, and the end."""
    return np.cumsum([0, *map(len, tags)])


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
        raise ModelError(
            f"the loss is no number any more at the learning rate {config.learning_rate:g}; set a lower one"
        )


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
