"""CoSENT against sums written out and sentence-transformers' loss, a run that learns an order, and bad files."""

import json

import pytest
import torch

import gerund
from gerund.errors import DataError
from gerund.training.losses.contrastive import cosent, ordered
from gerund.training.recipe import Recipe
from gerund.training.run import train
from tests.training.conftest import adapter_settings, plain_settings
from tests.training.outcomes import read_log

SCORES = torch.tensor([3.0, 1.0, 3.0, 5.0, 0.5])


def test_the_loss_is_the_sum_over_pairs_of_pairs():
    torch.manual_seed(0)
    cosines = torch.rand(5, requires_grad=True)
    total = torch.ones(())
    right = []
    for i in range(5):
        for j in range(5):
            if SCORES[i] > SCORES[j]:
                total = total + ((cosines[j] - cosines[i]) / 0.1).exp()
                right.append(float(cosines[i] > cosines[j]))
    loss = cosent(cosines, SCORES, temperature=0.1)
    torch.testing.assert_close(loss, total.log())
    torch.testing.assert_close(torch.autograd.grad(loss, cosines), torch.autograd.grad(total.log(), cosines))
    assert ordered(cosines, SCORES).item() == pytest.approx(sum(right) / len(right))


def test_pairs_of_one_score_ask_for_nothing():
    cosines = torch.rand(3, requires_grad=True)
    loss = cosent(cosines, torch.ones(3), temperature=0.05)
    loss.backward()
    assert loss.item() == 0
    assert not cosines.grad.any()
    assert ordered(cosines, torch.ones(3)).item() == 0


def recipe_of(corpus, tmp_path_factory, base, folder):
    recipe = adapter_settings(plain_settings(corpus, tmp_path_factory), base)
    recipe["objectives"] = [
        {"kind": "cosent", "pairs": {"files": ["pairs.csv"]}, "batch_size": 8, "micro_batch_size": 4, "length": 24}
    ]
    return {**recipe, "data": {"folder": str(folder)}, "encoder": {"attention": "bidir", "pooling": "mean"}}


PAIRS = [
    ("the cat runs", "the dog sleeps", 4.5),
    ("red stone", "blue river", 1),
    ("a small house", "large and red", 3),
    ("under the stone", "over the house", 0),
    ("cat and dog", "river with stone", 2),
    ("large cat", "small dog", 5),
]


def cosines(folder):
    lm = gerund.load(folder, dtype="float32")
    first, second = (torch.from_numpy(lm.encode([pair[side] for pair in PAIRS])) for side in (0, 1))
    return (first * second).sum(1)


def test_a_run_puts_cosines_in_the_order_of_the_scores(corpus, tmp_path_factory, base, tmp_path):
    rows = "".join(f"{first},{second},{score}\n" for first, second, score in PAIRS)
    (tmp_path / "pairs.csv").write_text("sentence1,sentence2,score\n" + rows)
    recipe = recipe_of(corpus, tmp_path_factory, base, tmp_path)
    folder = train(Recipe.model_validate({**recipe, "steps": 60, "save_steps": 60, "eval_steps": 60}))
    scores = torch.tensor([score for *_, score in PAIRS])
    assert ordered(cosines(base), scores) < 0.9
    assert ordered(cosines(folder), scores) == 1
    log = read_log(folder.parent)
    assert log[-1]["cosent_accuracy"] > log[0]["cosent_accuracy"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"sentence1": "a", "sentence2": "b"}, "no field 'score'"),
        ({"sentence1": "a", "sentence2": "b", "score": "good"}, "'score' is not a number: 'good'"),
        ({"sentence1": "a", "sentence2": "b", "score": "nan"}, "'score' is not a number: 'nan'"),
        ({"sentence1": "a", "sentence2": "b", "score": 10**400}, "'score' is not a number: '1000"),
        ({"sentence1": "a", "sentence2": "b", "score": True}, "'score' is not a number: 'True'"),
        ({"sentence1": "a", "sentence2": " ", "score": 1}, "'sentence2' is empty"),
        ({"sentence1": "a", "sentence2": "b", "score": 1}, "every pair has the same score"),
    ],
)
def test_bad_files_are_refused(corpus, tmp_path_factory, base, tmp_path, row, message):
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    recipe = recipe_of(corpus, tmp_path_factory, base, tmp_path)
    recipe["objectives"][0]["pairs"] = {"files": ["pairs.jsonl"]}
    with pytest.raises(DataError, match=message):
        train(Recipe.model_validate(recipe))
