"""Runs of MTEB's evaluators: seeds, what is silenced, what is left as it was, and that nothing is fetched."""

import logging
import os
import random
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch

from gerund.evaluation.mteb import mteb_seed, own_random_state, quiet, score_of
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import Sts
from tests.evaluation.tables import random_table, write_collection, write_lines

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import socket, sys
def refuse(*_):
    raise AssertionError("something reached for the network")
socket.socket.connect = refuse
from pathlib import Path
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks import classification, clustering, pair_classification, reranking, retrieval, sts
from tests.evaluation.tables import random_table
folder = Path(sys.argv[1])
modules = [sts, pair_classification, clustering, classification, retrieval, reranking]
for [task] in [module.find(folder) for module in modules]:
    texts = [*task.texts(EvaluationConfig()), "", *map(str, range(20))]
    print(task.name, task.run(random_table(texts), EvaluationConfig()).value)
"""


def write_folder(folder: Path) -> None:
    texts = [str(number) for number in range(20)]
    (folder / "sts").mkdir()
    (folder / "sts" / "a.test.tsv").write_text("".join(f"{n}\t{n}\t{n + 1}\n" for n in range(6)))
    pairs = [{"text1": str(n), "text2": str(n + 3), "label": n % 2} for n in range(8)]
    write_lines(folder / "pairs" / "a.jsonl", pairs)
    rows = [{"text": text, "label": str(n % 3)} for n, text in enumerate(texts)]
    write_lines(folder / "clustering" / "a.jsonl", rows)
    for split in ("train", "test"):
        write_lines(folder / "classification" / "a" / f"{split}.jsonl", rows)
    documents = {text: f"{text} {int(text) % 3}" for text in texts}
    write_collection(folder / "retrieval" / "a", documents, {"q": "1", "r": "2"}, [("q", "1", 1), ("r", "5", 2)])


@pytest.mark.slow
def test_local_tasks_fetch_nothing_and_say_nothing_even_when_nothing_tells_them_to_stay_offline(tmp_path):
    write_folder(tmp_path)
    free = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        env={**free, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kinds = [line.split("/")[0] for line in done.stdout.splitlines()]
    assert kinds == ["sts", "pair-classification", "clustering", "classification", "retrieval", "reranking"]
    assert done.stderr == ""


def test_the_default_seed_is_mtebs():
    assert mteb_seed(EvaluationConfig()) == 42
    assert mteb_seed(EvaluationConfig(seed=3)) == 45


def test_a_run_leaves_the_random_state_alone(tmp_path):
    (tmp_path / "sts").mkdir()
    (tmp_path / "sts" / "a.test.tsv").write_text("1\ta\tb\n2\tc\td\n")
    [task] = Sts.find(tmp_path)

    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    wanted = [draws(), draws()]
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    found = [draws()]
    task.run(random_table("abcd"), EvaluationConfig())
    assert [*found, draws()] == wanted


def test_the_random_state_comes_back_after_an_error():
    random.seed(1)
    wanted = random.random()
    random.seed(1)
    with suppress(KeyError), own_random_state():
        random.seed(5)
        raise KeyError
    assert random.random() == wanted


def test_only_what_is_expected_is_silenced_and_only_meanwhile():
    from sklearn.exceptions import ConvergenceWarning

    log = logging.getLogger("mteb")
    level = log.level
    with quiet():
        warnings.warn("lbfgs failed to converge after 100 iteration(s)", ConvergenceWarning, stacklevel=1)
        assert datasets.are_progress_bars_disabled()
        with pytest.raises(ConvergenceWarning):
            warnings.warn("liblinear failed to converge", ConvergenceWarning, stacklevel=1)
    assert not datasets.are_progress_bars_disabled()
    assert log.level == level
    with pytest.raises(ConvergenceWarning):
        warnings.warn("lbfgs failed to converge", ConvergenceWarning, stacklevel=1)


def test_what_is_not_defined_is_0_with_a_note():
    score = score_of({"a": float("nan"), "b": 0.5, "c": 1.0}, "a", ("b",), notes=["first"], size=3)
    assert score.metrics == {"a": 0.0, "b": 0.5}
    assert score.notes[0] == "first"
    assert score.notes[1].startswith("a cannot be computed")
    assert score.size == 3
    assert score_of({"a": 0.25}, "a").notes == ()
