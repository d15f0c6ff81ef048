"""Training of token vectors: the loss against one list, pair and token at a time, and a run from lists to rankings."""

import json
import random

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.training.objectives.ranking import LISTS, LateLosses, maxsim_all, read_lists
from gerund.training.objectives.settings import LateObjectiveConfig
from tests.training.conftest import WORDS


def config(**more):
    return LateObjectiveConfig(kind="late", files=["lists.jsonl"], **more)


def one_maxsim(query_TE, document_SE):
    cosines = [max(float(one @ other) for other in document_SE if other.any()) for one in query_TE if one.any()]
    return sum(cosines) / len(cosines)


def slow_loss(queries, documents, teacher, ids, settings):
    """Return the mean loss, list by list."""
    size, total = len(teacher[0]), 0.0
    for row, query in enumerate(queries):
        scores = torch.tensor([one_maxsim(query, one) for one in documents]) / settings.temperature
        own = scores[row * size : (row + 1) * size]
        wanted = torch.tensor(teacher[row])
        z = (wanted - wanted.mean()) / wanted.std(correction=0)
        target = (z / settings.teacher_temperature).softmax(0)
        total += float((target * (target.log() - own.log_softmax(0))).sum())
        best = row * size + int(wanted.argmax())
        others = [at for at in range(len(documents)) if at // size != row and ids[at] != ids[best]]
        total -= settings.in_batch * float(scores[[best, *others]].log_softmax(0)[0])
    return total / len(queries)


def test_the_loss_is_that_of_one_list_at_a_time():
    settings = config(candidates=3, length=8, dimensions=4, in_batch=0.7)
    vectors = torch.nn.functional.normalize(torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    for row, length in enumerate((3, 5, 8, 2, 4, 6, 7, 1)):
        vectors[row, length:] = 0
    teacher, ids = [[0.1, 2.0, 0.4], [1.0, -1.0, 0.5]], [1, 2, 3, 4, 2, 6]
    losses = LateLosses.__new__(LateLosses)
    losses.config, losses.heads = settings, type("Sizes", (), {"length": 8, "dimensions": 4})
    batch = {"query": {"teacher": torch.tensor(teacher)}, "document": {"identity": torch.tensor(ids)}}
    loss, right = losses.compare(vectors.flatten(1), batch, gather=False)
    assert float(loss) == pytest.approx(slow_loss(vectors[:2], vectors[2:], teacher, ids, settings), abs=1e-5)
    scores = maxsim_all(vectors[:2], vectors[2:])
    assert float(scores[1, 2]) == pytest.approx(one_maxsim(vectors[1], vectors[4]), abs=1e-6)
    assert right == sum(int(scores[row, 3 * row : 3 * row + 3].argmax() == best) for row, best in ((0, 1), (1, 0)))


@pytest.fixture
def lists(tmp_path):
    """Lists in which the document that shares the query's animal is relevant."""
    rng = random.Random(0)
    rows = []
    for _ in range(40):
        names = rng.sample(["cat", "dog", "house", "river", "stone"], 4)
        documents = [" ".join(rng.choices(WORDS[4:12], k=5)) + f" {name}" for name in names]
        rows.append({"query": f"where is the {names[1]}", "documents": documents, "scores": [0.1, 3.0, 0.2, 0]})
    path = tmp_path / "lists.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def settings(adapting, lists):
    adapting["data"] = {**adapting["data"], "folder": str(lists.parent)}
    adapting["data"].pop("sources")
    adapting["objectives"] = [
        {"kind": "late", "files": [lists.name], "batch_size": 8, "length": 32, "candidates": 4, "dimensions": 8}
    ]
    adapting["encoder"] = {"attention": "causal"}
    return adapting


@pytest.mark.slow
def test_a_run_learns_to_rank_and_leaves_generating_alone(run, base, lists):
    folder = run("out", "steps=40", "eval_steps=40", "save_steps=40", "schedule={name: constant}")
    lm = gerund.load(folder, dtype="float32")
    losses = [json.loads(line) for line in (folder.parent / "log.jsonl").read_text().splitlines()]
    losses = [line["loss_late"] for line in losses if "loss_late" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert (lm.default_measure(), lm.late.dimensions, lm.encode_multi("the cat").shape[1]) == ("maxsim", 8, 8)
    right = [lm.rerank(one.query, one.documents, 1).indices == [1] for one in read_lists([lists])]
    assert np.mean(right) > 0.6
    assert lm.generate("the cat", 5)[0].text == gerund.load(base).generate("the cat", 5)[0].text
    assert lm.fusion_weight == 0.5


@pytest.mark.slow
def test_vectors_of_all_tokens_are_trained_and_exported(run, lists, tmp_path):
    pytest.importorskip("sentence_transformers")
    folder = run("out", "steps=1", "objectives.late.counts=all")
    lm, [one, *_] = gerund.load(folder, dtype="float32"), read_lists([lists])
    assert lm.late.config.counts == "all"
    assert len(lm.encode_multi("the cat", is_query=True)) == len(lm.tokenizer("Query: the cat").input_ids)
    lm.export(tmp_path / "exported", "multi-vector")
    plain = gerund.load(tmp_path / "exported", dtype="float32")
    expected = lm.rerank(one.query, one.documents).scores
    assert plain.rerank(one.query, one.documents).scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_lists_are_made_of_texts(run, settings, adapting, corpus):
    settings["data"]["folder"] = str(corpus)
    settings["data"]["sources"] = [{"name": "a", "files": ["a.train.jsonl"]}]
    settings["objectives"][0] |= {"files": [], "lists": 6, "candidates": 3, "batch_size": 2}
    folder = run("out", "steps=1")
    made = read_lists([folder.parent / LISTS])
    assert (len(made), {len(one.documents) for one in made}) == (6, {3})
    assert all(one.query not in one.documents[0] for one in made)
    assert gerund.load(folder).late is not None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"query": "a", "documents": ["b", "c"]}', "no field 'scores'"),
        ('{"query": "a", "documents": ["b", "c"], "scores": [1]}', "scores must be 2 numbers"),
        ('{"query": "a", "documents": ["b", "c"], "scores": [1, NaN]}', "NaN|scores must be 2 numbers"),
        (f'{{"query": "a", "documents": ["b", "c"], "scores": [1, {10**400}]}}', "scores must be 2 numbers"),
        ('{"query": "a", "documents": ["b"], "scores": [1]}', "two documents at least"),
        ('{"query": " ", "documents": ["b", "c"], "scores": [1, 2]}', "a list has a query"),
        ('{"query": "a", "documents": ["b", " "], "scores": [1, 2]}', "a document is empty"),
        ("", "no lists in there"),
    ],
)
def test_broken_lists(tmp_path, line, words):
    (tmp_path / "lists.jsonl").write_text(f"\ufeff{line}\n", "utf-8")
    with pytest.raises(DataError, match=words):
        read_lists([tmp_path / "lists.jsonl"])


@pytest.mark.slow
def test_too_few_candidates(run):
    with pytest.raises(ConfigError, match="a list has 4 documents; set fewer"):
        run("out", "objectives.late.candidates=5")
