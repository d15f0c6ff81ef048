"""Small classifiers on frozen vectors: logistic regression, linear taggers, and examples made up for rare classes.

Knows: vectors, labels, scikit-learn, imbalanced-learn, torch. Does not know: texts, models, tasks.
"""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


def oversample(vectors_ND: np.ndarray, labels: Sequence[str], *, seed: int) -> tuple[np.ndarray, list[str]]:
    """Bring every class to the size of the largest one by SMOTE (Chawla et al., 2002).

    A made-up example lies between one of the class and one of its 5 nearest neighbours within the class; where
    a class has no 5 others, between as many as it has. A class with a single example stays as it is.

    Args:
        vectors_ND: one vector an example.
        labels: their labels.
        seed: decides what is made up.

    Returns:
        The examples, with those made up behind them, and the labels of all.
    """
    from imblearn.over_sampling import SMOTE

    counts = Counter(labels)
    most = max(counts.values())
    grouped: dict[int, dict[str, int]] = {}
    for label, count in sorted(counts.items()):
        if 1 < count < most:
            grouped.setdefault(min(_NEIGHBOURS, count - 1), {})[label] = most
    labels = list(labels)
    for neighbours, wanted in grouped.items():
        sampler = SMOTE(k_neighbors=neighbours, sampling_strategy=wanted, random_state=seed)
        vectors_ND, labels = sampler.fit_resample(vectors_ND, labels)
    return vectors_ND, [str(label) for label in labels]


def accuracy(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return which share of the labels is right."""
    return sum(true == label for true, label in zip(gold, predicted, strict=True)) / len(gold)


def macro_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of all labels that occur or are predicted; 0 for those that are never right."""
    from sklearn.metrics import f1_score

    return float(f1_score(gold, predicted, average="macro", zero_division=0.0))


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
    steps: int = STEPS,
    show: bool | None = None,
) -> list[LinearTagger]:
    """Train linear classifiers of frozen word vectors as MAGNET does (appendix A), several side by side.

    4000 steps of AdamW at 5e-4 on 8 sentences each, drawn without repetition until all were seen, with dropout
    0.1 on the vectors and the mean cross-entropy over the words. Weight decay is 0 and the rate constant, of
    which the paper says nothing. Classifiers that are trained together read the same batches and have nothing
    else in common, so each comes out as if it were alone but for its first weights.

    Args:
        vectors_ND: the vectors of all words, sentence after sentence; may lie in a file (``np.memmap``).
        tags: for each classifier the tags of each sentence.
        seed: decides first weights, batches and dropout; torch's own random state is not touched.
        steps: number of steps.
        show: whether to show progress; None only on a terminal.

    Returns:
        One classifier for each of ``tags``, with its classes in alphabetical order.
    """
    import torch
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
    optimizer = torch.optim.AdamW([one for pair in parameters for one in pair], lr=LEARNING_RATE, weight_decay=0.0)
    order: list[int] = []
    with progress(steps, "training linear classifiers", show=show) as advance, torch.enable_grad():
        for step in range(1, steps + 1):
            order = order or torch.randperm(len(bounds) - 1, generator=generator).tolist()
            batch, order = order[:BATCH_SENTENCES], order[BATCH_SENTENCES:]
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
            optimizer.step()
            if step % _PROGRESS_STEPS == 0:
                advance(_PROGRESS_STEPS)
    return [
        LinearTagger(names, weight_CD.detach().numpy(), bias_C.detach().numpy())
        for names, (weight_CD, bias_C) in zip(classes, parameters, strict=True)
    ]


def _targets(tags: Sequence[Sequence[str]], names: list[str]) -> np.ndarray:
    """Return the class of every word as a number."""
    places = {name: place for place, name in enumerate(names)}
    return np.array([places[tag] for sentence in tags for tag in sentence])


def _bounds(tags: Sequence[Sequence[str]]) -> np.ndarray:
    """Return where each sentence begins, and the end."""
    return np.cumsum([0, *map(len, tags)])
