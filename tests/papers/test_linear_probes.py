import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.language_model import LanguageModelSystem, language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers import linear_probes as classifiers
from gerund.papers import token_labels
from gerund.papers.linear_probes import FewShot, LinearProbe, accuracy, logistic_regression, macro_f1, oversample
from gerund.papers.token_labels import (
    BATCH_SENTENCES,
    DROPOUT,
    LEARNING_RATE,
    RELEASED_TAGGER,
    LinearTagger,
    train_taggers,
)
from tests.evaluation.tables import FakeEncoder, Letters, fruits, write_classification


@pytest.fixture
def task(tmp_path: Path) -> LinearProbe:
    write_classification(tmp_path, train=fruits(12), valid=fruits(3, start=12), test=fruits(5, start=15))
    [found] = LinearProbe.find(tmp_path)
    return found


def test_found_where_there_are_files(task: LinearProbe, tmp_path: Path) -> None:
    assert task.name == "linear-probe/made-up"
    assert task.has_validation
    assert LinearProbe.find(tmp_path / "classification") == []


def test_what_letters_tell_apart_is_learnt(task: LinearProbe) -> None:
    score = task.run(Letters(), EvaluationConfig())
    assert (score.main, score.size, score.notes, score.spread) == ("accuracy", 15, (), None)
    assert score.metrics == {"accuracy": 1.0, "weighted_f1": 1.0, "macro_f1": 1.0}
    assert task.run(Letters(), EvaluationConfig(split="validation")).size == 9


def test_the_score_is_that_of_a_plain_fit(task: LinearProbe, tiny_folder: Path) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, f1_score

    lm = gerund.load(tiny_folder, attention="causal")
    score = task.run(language_model_system("tiny", lm), EvaluationConfig(prompts={"linear-probe": "fruit: "}))
    texts, labels = zip(*fruits(12), strict=True)
    test_texts, test_labels = zip(*fruits(5, start=15), strict=True)
    vectors, test_vectors = (lm.encode(list(some), prompt="fruit: ", normalize=False) for some in (texts, test_texts))
    predicted = LogisticRegression(max_iter=10000).fit(vectors, labels).predict(test_vectors)
    assert score.value == pytest.approx(accuracy_score(test_labels, predicted))
    for average in ("macro", "weighted"):  # LBW's Table 2 has the weighted one
        assert score.metrics[f"{average}_f1"] == pytest.approx(f1_score(test_labels, predicted, average=average))


def test_the_texts_are_those_that_are_encoded(task: LinearProbe) -> None:
    for config in (
        EvaluationConfig(),
        EvaluationConfig(limit=7, seed=3),
        EvaluationConfig(split="validation", prompts={task.name: "say: "}),
    ):
        letters = Letters()
        task.run(letters, config)
        assert letters.encoded == task.texts(config)
        assert set(letters.prompts) == {task.prompt(config)}


def test_a_limit_counts_the_texts_of_each_split(task: LinearProbe) -> None:
    letters = Letters()
    assert task.run(letters, EvaluationConfig(limit=7)).size == 7
    assert len(letters.encoded) == 14
    # A single class among what is left is no error.
    assert 0 <= task.run(letters, EvaluationConfig(limit=1)).value <= 1


def test_a_constant_embedding_gets_the_share_of_the_largest_class(tmp_path: Path) -> None:
    write_classification(tmp_path, train=fruits(4) + fruits(6)[-6:], test=fruits(5) + fruits(5)[-5:])
    [task] = LinearProbe.find(tmp_path)
    score = task.run(FakeEncoder("constant"), EvaluationConfig())
    assert score.value == 0.5
    assert score.metrics["macro_f1"] == pytest.approx((2 / 3) / 3)


def test_smote_is_only_where_it_is_asked_for(task: LinearProbe) -> None:
    rare = [("only one", "rare"), *fruits(12), ("plums are um", "plum")]
    folder = task.files[0].parents[2]
    write_classification(folder, train=rare, test=fruits(5, start=15))
    balanced = replace(task, smote="balanced").run(Letters(), EvaluationConfig())
    assert balanced.notes == (
        "SMOTE: 38 training examples became 40",
        "SMOTE left classes of a single example as they are: rare",
    )
    released = replace(task, smote="released").run(Letters(), EvaluationConfig())
    assert released.notes[0] == "SMOTE: 38 training examples became 186"  # five times 37, and the single one
    assert task.run(Letters(), EvaluationConfig()).notes == ()


def test_whole_numbers_are_labels_too(tmp_path: Path) -> None:
    rows = [(text, ["apple_tree", "fig-tree", "plum"].index(label)) for text, label in fruits(12)]
    write_classification(tmp_path, train=rows, test=rows[:3])
    [task] = LinearProbe.find(tmp_path)
    assert task.run(Letters(), EvaluationConfig()).value == 1.0


def test_bad_input(task: LinearProbe) -> None:
    with pytest.raises(ConfigError, match="unknown value of smote 'maybe'; valid are: never, released"):
        replace(task, smote="maybe")
    write_classification(task.files[0].parents[2], test=[("a pear", "pear")])
    with pytest.raises(DataError, match="no example of label 'pear'"):
        task.run(Letters(), EvaluationConfig())
    with pytest.raises(ConfigError, match="can encode whole texts, and bm25 can only rank documents"):
        evaluate([BM25System()], [replace(task)])


FEW = (
    "1 of 3 classes have fewer than 10 training examples and give all of theirs",
    "3 of 3 classes have fewer than 100 training examples and give all of theirs",
)


@pytest.fixture
def task_few_shot(tmp_path: Path) -> FewShot:
    # 30 of two classes, a single one of the third.
    write_classification(tmp_path, train=fruits(30)[:61], test=fruits(5, start=40))
    [found] = FewShot.find(tmp_path)
    return found


def test_samples(task_few_shot: FewShot) -> None:
    assert (task_few_shot.name, task_few_shot.runs, task_few_shot.has_validation) == ("few-shot/made-up", 5, False)
    train, _ = task_few_shot.learnt_and_scored(EvaluationConfig())
    samples = task_few_shot._samples(train, EvaluationConfig())
    assert sorted(samples) == [(shots, number) for shots in (10, 100) for number in range(5)]
    for (shots, number), sample in samples.items():
        labels = [train.labels[place] for place in sample]
        assert len(set(sample)) == len(sample)
        expected = {"apple_tree": min(shots, 30), "fig-tree": min(shots, 30), "plum": 1}
        assert {label: labels.count(label) for label in set(labels)} == expected
        assert set(samples[10, number]) <= set(samples[100, number])
    assert len({tuple(samples[10, number]) for number in range(5)}) == 5
    assert task_few_shot._samples(train, EvaluationConfig()) == samples
    assert task_few_shot._samples(train, EvaluationConfig(seed=1)) != samples


def test_the_score_is_the_mean_over_the_samples(task_few_shot: FewShot) -> None:
    score = task_few_shot.run(Letters(), EvaluationConfig())
    train, test = task_few_shot.learnt_and_scored(EvaluationConfig())
    found: dict[int, list[float]] = {10: [], 100: []}
    for (shots, _), sample in task_few_shot._samples(train, EvaluationConfig()).items():
        predicted = logistic_regression(
            Letters().encode([train.texts[place] for place in sample]),
            [train.labels[place] for place in sample],
            Letters().encode(test.texts),
            seed=0,
        )
        found[shots].append(accuracy(test.labels, predicted))
    assert score.main == "accuracy_at_10"
    assert score.metrics == pytest.approx(
        {f"accuracy_at_{shots}": statistics.fmean(one) for shots, one in found.items()}
    )
    assert score.spread == pytest.approx(statistics.stdev(found[10]))
    assert (score.runs, score.size, score.notes) == (5, 15, FEW)
    assert 0.3 < score.value <= 1


@pytest.mark.slow
def test_every_system_learns_from_the_same_texts(task_few_shot: FewShot, tiny_folder: Path) -> None:
    lm = gerund.load(tiny_folder, attention="causal")
    asked = []

    class Asked(LanguageModelSystem):
        def encode(self, texts, **more):
            asked.append(list(texts))
            return super().encode(texts, **more)

    letters = Letters()
    task_few_shot.run(letters, EvaluationConfig(seed=2))
    task_few_shot.run(Asked("causal", lm), EvaluationConfig(seed=2))
    assert asked == [letters.encoded]
    assert letters.encoded == task_few_shot.texts(EvaluationConfig(seed=2))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_score(tmp_path: Path) -> None:
    # Texts that say nothing of their class, so that the sample matters.
    rows = [
        (f"{number * 7919 % 1000:03b}".replace("1", "ab").replace("0", "c"), "xyz"[number % 3]) for number in range(150)
    ]
    write_classification(tmp_path, train=rows[:90], test=rows[90:])
    [task_few_shot] = FewShot.find(tmp_path)
    first, second, other = (task_few_shot.run(Letters(), EvaluationConfig(seed=seed)) for seed in (0, 0, 1))
    assert first == second
    assert first.value != other.value
    assert first.spread


def test_one_sample_has_no_spread(task_few_shot: FewShot) -> None:
    score = replace(task_few_shot, runs=1).run(Letters(), EvaluationConfig())
    assert (score.spread, score.runs) == (None, 1)


def test_bad_input_few_shot(task_few_shot: FewShot) -> None:
    with pytest.raises(ConfigError, match="runs=0 leaves nothing"):
        replace(task_few_shot, runs=0)


LENGTHS = [3, 1, 4, 2, 5, 1, 2, 6, 3, 2, 1]


def made_up(seed: int = 0, width: int = 5) -> tuple[np.ndarray, list[list[str]], list[list[str]]]:
    """Return vectors of the words of eleven sentences, and two kinds of tags for them."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(sum(LENGTHS), width)).astype(np.float32)
    tags = [[rng.choice(["N", "V", "A"]).item() for _ in range(length)] for length in LENGTHS]
    others = [[rng.choice(["O", "I-PER"]).item() for _ in range(length)] for length in LENGTHS]
    return vectors, tags, others


def train_slowly(vectors: np.ndarray, tags: list[list[list[str]]], seed: int, steps: int) -> list[tuple]:
    """Train as MAGNET says: gradients of softmax regression and Adam by hand, a word at a time."""
    generator = torch.Generator().manual_seed(seed)
    width = vectors.shape[1]
    classes = [sorted({tag for sentence in own for tag in sentence}) for own in tags]
    first = []
    for names in classes:
        for shape in ((len(names), width), (len(names),)):
            first.append(((torch.rand(shape, generator=generator) * 2 - 1) / math.sqrt(width)).double().numpy())
    weights, moments, squares = first, [0 * one for one in first], [0 * one for one in first]
    starts = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    order: list[int] = []
    for step in range(1, steps + 1):
        if not order:
            order = torch.randperm(len(LENGTHS), generator=generator).tolist()
        batch, order = order[:BATCH_SENTENCES], order[BATCH_SENTENCES:]
        words = [(sentence, place) for sentence in batch for place in range(LENGTHS[sentence])]
        kept = (torch.rand((len(words), width), generator=generator) >= DROPOUT).numpy()
        gradients = [0 * one for one in weights]
        for row, (sentence, place) in enumerate(words):
            x = vectors[starts[sentence] + place].astype(float) * kept[row] / (1 - DROPOUT)
            for column, names in enumerate(classes):
                scores = weights[2 * column] @ x + weights[2 * column + 1]
                share = np.exp(scores) / np.exp(scores).sum()
                share[names.index(tags[column][sentence][place])] -= 1
                gradients[2 * column] += np.outer(share, x) / len(words)
                gradients[2 * column + 1] += share / len(words)
        for place, gradient in enumerate(gradients):
            moments[place] = 0.9 * moments[place] + 0.1 * gradient
            squares[place] = 0.999 * squares[place] + 0.001 * gradient**2
            mean, square = moments[place] / (1 - 0.9**step), squares[place] / (1 - 0.999**step)
            weights[place] = weights[place] - LEARNING_RATE * mean / (np.sqrt(square) + 1e-8)
    return [(names, weights[2 * place], weights[2 * place + 1]) for place, names in enumerate(classes)]


@pytest.mark.parametrize("seed", [0, 3])
def test_training_is_what_the_paper_says(seed: int) -> None:
    vectors, tags, others = made_up()
    # 11 sentences: the second batch is the short end of the first round.
    found = train_taggers(vectors, [tags, others], seed=seed, steps=25)
    for tagger, (names, weight, bias) in zip(found, train_slowly(vectors, [tags, others], seed, steps=25), strict=True):
        assert tagger.tags == names
        np.testing.assert_allclose(tagger.weight_CD, weight, atol=2e-6)
        np.testing.assert_allclose(tagger.bias_C, bias, atol=2e-6)


def test_the_released_training_is_that_of_transformers_trainer() -> None:
    """LBW's run_ner.sh: 5e-3 that falls to 0, three epochs of 32 sentences, gradients of length 1 at most."""
    from transformers import get_linear_schedule_with_warmup

    rng = np.random.default_rng(0)
    vectors = 20 * rng.normal(size=(160, 6)).astype(np.float32)
    tags = [[str(rng.choice(["O", "B-X", "I-X"])) for _ in range(2)] for _ in range(80)]
    [found] = train_taggers(vectors, [tags], seed=3, training=RELEASED_TAGGER)

    generator = torch.Generator().manual_seed(3)
    linear = torch.nn.Linear(6, 3)
    with torch.no_grad():
        for weight in (linear.weight, linear.bias):
            weight.uniform_(-(6**-0.5), 6**-0.5, generator=generator)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=5e-3, weight_decay=0.0)
    steps = 3 * 3  # 80 sentences are two batches of 32 and one of 16
    schedule = get_linear_schedule_with_warmup(optimizer, 0, steps)
    targets = torch.tensor([["B-X", "I-X", "O"].index(tag) for sentence in tags for tag in sentence])
    for _ in range(3):
        for batch in torch.randperm(80, generator=generator).split(32):
            rows = (2 * batch[:, None] + torch.arange(2)).flatten()
            kept = torch.rand((len(rows), 6), generator=generator) >= DROPOUT
            words = torch.from_numpy(vectors)[rows] * kept / (1 - DROPOUT)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(linear(words), targets[rows]).backward()
            length = torch.nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    assert length > 1  # so that cutting counts
    np.testing.assert_allclose(found.weight_CD, linear.weight.detach().numpy(), atol=2e-6)
    np.testing.assert_allclose(found.bias_C, linear.bias.detach().numpy(), atol=2e-6)


def test_training_repeats_and_leaves_other_generators_alone() -> None:
    vectors, tags, _ = made_up()
    state = torch.get_rng_state()
    with torch.no_grad():
        [first] = train_taggers(vectors, [tags], seed=0, steps=20)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    [second] = train_taggers(vectors, [tags], seed=0, steps=20)
    [other] = train_taggers(vectors, [tags], seed=1, steps=20)
    np.testing.assert_array_equal(first.weight_CD, second.weight_CD)
    assert not np.allclose(first.weight_CD, other.weight_CD)


def test_prediction_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    tagger = LinearTagger(["a", "b", "c"], rng.normal(size=(3, 4)), rng.normal(size=3))
    vectors = rng.normal(size=(10, 4))
    whole = tagger.predict(vectors)
    monkeypatch.setattr(token_labels, "_PREDICTED_AT_ONCE", 3)
    assert tagger.predict(vectors) == whole
    assert len(set(whole)) > 1
    assert tagger.predict(vectors[:0]) == []
    assert LinearTagger(["a", "b"], np.zeros((2, 4)), np.zeros(2)).predict(vectors[:1]) == ["a"]


def test_logistic_regression_is_scikit_learns() -> None:
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 6))
    places = rng.integers(4, size=300)
    vectors = (centres[places] + rng.normal(size=(300, 6))).astype(np.float32)
    labels = [f"class {place}" for place in places]
    found = logistic_regression(vectors[:200], labels[:200], vectors[200:], seed=0)
    fitted = LogisticRegression(solver="lbfgs", max_iter=100, C=1.0).fit(vectors[:200], labels[:200])
    assert found == fitted.predict(vectors[200:]).tolist()
    assert all(type(label) is str for label in found)
    assert 0.5 < accuracy(labels[200:], found) < 1.0


def test_logistic_regression_stops_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    vectors, labels = rng.normal(size=(60, 30)) * np.logspace(-3, 4, 30), ["a", "b", "c"] * 20
    monkeypatch.setattr(classifiers, "ITERATIONS", 3)
    # Warnings are errors here.
    assert set(logistic_regression(vectors, labels, vectors, seed=0)) <= {"a", "b", "c"}


def test_logistic_regression_of_what_cannot_be_told_apart() -> None:
    assert logistic_regression(np.ones((3, 2)), ["b", "a", "b"], np.ones((2, 2)), seed=0) == ["b", "b"]
    assert logistic_regression(np.ones((2, 2)), ["a", "a"], np.ones((3, 2)), seed=0) == ["a", "a", "a"]


def test_made_up_examples_balance_the_classes() -> None:
    rng = np.random.default_rng(0)
    labels = ["many"] * 30 + ["some"] * 8 + ["few"] * 3 + ["two"] * 2 + ["one"]
    vectors = rng.normal(size=(len(labels), 4)).astype(np.float32)
    more, found = oversample(vectors, labels, seed=0)
    assert {label: found.count(label) for label in set(labels)} == dict(many=30, some=30, few=30, two=30, one=1)
    assert len(more) == len(found) == 121
    np.testing.assert_array_equal(more[: len(labels)], vectors)
    assert found[: len(labels)] == labels


def test_made_up_examples_as_released_keep_the_classes_as_likely_as_they_were() -> None:
    """LBW's utils.py: every class five times, by one SMOTE with as many neighbours as the smallest class allows."""
    from imblearn.over_sampling import SMOTE

    rng = np.random.default_rng(0)
    labels = ["many"] * 30 + ["some"] * 8 + ["few"] * 4
    vectors = rng.normal(size=(len(labels), 4)).astype(np.float32)
    more, found = oversample(vectors, labels, seed=42, times=5)
    assert {label: found.count(label) for label in set(labels)} == dict(many=150, some=40, few=20)
    sampler = SMOTE(sampling_strategy=dict(many=150, some=40, few=20), k_neighbors=3, random_state=42)
    expected, names = sampler.fit_resample(vectors, labels)
    np.testing.assert_array_equal(more, expected)
    assert found == list(names)
    for times in (None, 5):
        one_class, same = oversample(vectors[:3], labels[:3], seed=0, times=times)
        assert (len(one_class), same) == (3, labels[:3])
    alone = oversample(vectors[:31], [*labels[:30], "one"], seed=0, times=5)[1]
    assert (alone.count("many"), alone.count("one")) == (150, 1)


def test_making_up_repeats() -> None:
    rng = np.random.default_rng(0)
    vectors, labels = rng.normal(size=(20, 3)), ["a"] * 15 + ["b"] * 5
    (first, _), (second, _), (other, _) = (oversample(vectors, labels, seed=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(first, other)


def test_balanced_classes_stay_as_they_are() -> None:
    vectors = np.arange(8.0).reshape(4, 2)
    more, found = oversample(vectors, ["a", "b", "b", "a"], seed=0)
    assert more is vectors
    assert found == ["a", "b", "b", "a"]


def test_shares() -> None:
    assert accuracy(["a", "b", "a"], ["a", "a", "a"]) == pytest.approx(2 / 3)
    # a: precision 2/3, recall 1; b: never right; c: predicted and never there.
    assert macro_f1(["a", "b", "a", "b"], ["a", "a", "a", "c"]) == pytest.approx((0.8 + 0 + 0) / 3)
    with pytest.raises(ValueError, match="zip"):
        accuracy(["a"], ["a", "b"])
