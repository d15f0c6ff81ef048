"""Objectives on ranked lists: losses against one list at a time, runs from lists to rankings, lists made of texts."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.training.objectives import ranking
from gerund.training.objectives.ranking import LISTS, LateLosses, PointwiseLosses, _Lines, maxsim_all, read_lists
from gerund.training.objectives.settings import LateObjectiveConfig, PointwiseConfig
from gerund.training.recipe import Recipe, load_recipe
from gerund.training.run import train
from gerund.training.trainable_model import prepare_model
from tests.training.conftest import WORDS, adapter_settings, plain_settings
from tests.training.outcomes import losses_of


def divergence(scores, wanted, settings):
    """Return how far a list's scores are from the teacher's."""
    z = (wanted - wanted.mean()) / wanted.std(correction=0)
    target = (z / settings.teacher_temperature).softmax(0)
    return float((target * (target.log() - scores.log_softmax(0))).sum())


def written_lists(folder, relevant=None):
    """Write lists whose second document has what the query asks for, or the same thing in all of them."""
    rng, rows = random.Random(0), []
    for _ in range(40):
        names = rng.sample([name for name in ("cat", "dog", "house", "river", "stone") if name != relevant], 4)
        query = f"the {names[0]}" if relevant else f"where is the {names[1]}"
        names[1] = relevant or names[1]
        documents = [" ".join(rng.choices(WORDS[4:12], k=5)) + f" {name}" for name in names]
        rows.append({"query": query, "documents": documents, "scores": [0.1, 3.0, 0.2, 0]})
    path = folder / "lists.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rightly_ranked(lm, lists):
    """Return the share of lists whose relevant document comes first."""
    return np.mean([lm.rerank(one.query, one.documents, 1).indices == [1] for one in read_lists([lists])])


def one_maxsim(query_TE, document_SE):
    cosines = [max(float(one @ other) for other in document_SE if other.any()) for one in query_TE if one.any()]
    return sum(cosines) / len(cosines)


def slow_late(queries, documents, teacher, ids, settings):
    """Return the mean loss of token vectors, list by list."""
    size, total = len(teacher[0]), 0.0
    for row, query in enumerate(queries):
        scores = torch.tensor([one_maxsim(query, one) for one in documents]) / settings.temperature
        wanted = torch.tensor(teacher[row])
        total += divergence(scores[row * size : (row + 1) * size], wanted, settings)
        best = row * size + int(wanted.argmax())
        others = [at for at in range(len(documents)) if at // size != row and ids[at] != ids[best]]
        total -= settings.in_batch * float(scores[[best, *others]].log_softmax(0)[0])
    return total / len(queries)


def test_the_late_loss_is_that_of_one_list_at_a_time():
    settings = LateObjectiveConfig(
        kind="late", files=["lists.jsonl"], candidates=3, length=8, dimensions=4, in_batch=0.7
    )
    vectors = torch.nn.functional.normalize(torch.randn(8, 8, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    for row, length in enumerate((3, 5, 8, 2, 4, 6, 7, 1)):
        vectors[row, length:] = 0
    teacher, ids = [[0.1, 2.0, 0.4], [1.0, -1.0, 0.5]], [1, 2, 3, 4, 2, 6]
    losses = LateLosses.__new__(LateLosses)
    losses.config, losses.heads = settings, type("Sizes", (), {"length": 8, "dimensions": 4})
    batch = {"query": {"teacher": torch.tensor(teacher)}, "document": {"identity": torch.tensor(ids)}}
    loss, right = losses.compare(vectors.flatten(1), batch, gather=False)
    assert float(loss) == pytest.approx(slow_late(vectors[:2], vectors[2:], teacher, ids, settings), abs=1e-5)
    scores = maxsim_all(vectors[:2], vectors[2:])
    assert float(scores[1, 2]) == pytest.approx(one_maxsim(vectors[1], vectors[4]), abs=1e-6)
    assert right == sum(int(scores[row, 3 * row : 3 * row + 3].argmax() == best) for row, best in ((0, 1), (1, 0)))


def test_the_pointwise_loss_is_that_of_one_list_at_a_time():
    settings = PointwiseConfig(kind="pointwise", files=["lists.jsonl"], candidates=3)
    teacher = torch.tensor([[2.0, 0.1, 0.4], [1.0, 0.5, -1.0]])
    scores = torch.tensor([0.3, -0.2, 0.1, 0.5, -1.0, 0.2])[:, None]
    losses = PointwiseLosses.__new__(PointwiseLosses)
    losses.config = settings
    loss, right = losses.compare(scores, {"query": {"teacher": teacher}}, gather=False)
    lists = torch.tensor([[0.3, 0.1, 0.5], [-0.2, -1.0, 0.2]])
    total = sum(divergence(own, wanted, settings) for own, wanted in zip(lists, teacher, strict=True))
    assert float(loss) == pytest.approx(total / 2, abs=1e-6)
    assert right == 0


class TestLate:
    """Vectors of tokens."""

    @pytest.fixture
    def lists(self, tmp_path):
        return written_lists(tmp_path)

    @pytest.fixture
    def settings(self, adapting, lists):
        adapting["data"] = {**adapting["data"], "folder": str(lists.parent)}
        adapting["data"].pop("sources")
        adapting["objectives"] = [
            {"kind": "late", "files": [lists.name], "batch_size": 8, "length": 32, "candidates": 4, "dimensions": 8}
        ]
        adapting["encoder"] = {"attention": "causal"}
        return adapting

    @pytest.mark.slow
    def test_a_run_learns_to_rank_and_leaves_generating_alone(self, run, base, lists):
        folder = run("out", "steps=40", "eval_steps=40", "save_steps=40", "schedule={name: constant}")
        lm = gerund.load(folder, dtype="float32")
        losses = losses_of(folder, "late")
        assert losses[-1] < 0.8 * losses[0]
        assert (lm.default_measure(), lm.late.dimensions, lm.encode_multi("the cat").shape[1]) == ("maxsim", 8, 8)
        assert rightly_ranked(lm, lists) > 0.6
        assert lm.generate("the cat", 5)[0].text == gerund.load(base).generate("the cat", 5)[0].text
        assert lm.fusion_weight == 0.5

    @pytest.mark.slow
    def test_vectors_of_all_tokens_are_trained_and_exported(self, run, lists, tmp_path):
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
    def test_lists_are_made_of_texts(self, run, settings, adapting, corpus):
        settings["data"]["folder"] = str(corpus)
        settings["data"]["sources"] = [{"name": "a", "files": ["a.train.jsonl"]}]
        settings["objectives"][0] |= {"files": [], "lists": 6, "candidates": 3, "batch_size": 2}
        folder = run("out", "steps=1")
        made = read_lists([folder.parent / LISTS])
        assert (len(made), {len(one.documents) for one in made}) == (6, {3})
        assert all(one.query not in one.documents[0] for one in made)
        assert gerund.load(folder).late is not None

    @pytest.mark.slow
    def test_too_few_candidates(self, run):
        with pytest.raises(ConfigError, match="a list has 4 documents; set fewer"):
            run("out", "objectives.late.candidates=5")


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


def reranking(corpus, tmp_path_factory, base, lists):
    recipe = adapter_settings(plain_settings(corpus, tmp_path_factory), base)
    recipe["data"] = {"folder": str(lists.parent)}
    recipe["objectives"] = [
        {"kind": "pointwise", "files": [lists.name], "batch_size": 8, "length": 48, "candidates": 4}
    ]
    recipe["model"]["adapter"] = "none"
    return recipe


def single(lm, query, document):
    """The score of one pair in a pass of its own, by the files of the folder."""
    ids = [token for piece in lm.reranker.settings.pieces for token in piece_ids(lm, piece, query, document)]
    with torch.no_grad(), gerund.models.adapters.active_adapter("rerank"):
        states = lm.model.base_model(torch.tensor([ids]), use_cache=False).last_hidden_state
    layer = lm.reranker._layer
    return float(states[0, -1] @ layer.weight_1D[0] + layer.bias_1[0])


def piece_ids(lm, piece, query, document):
    whole = piece.replace("{bos}", lm.tokenizer.bos_token).replace("{query}", query).replace("{document}", document)
    return lm.tokenizer(whole, add_special_tokens=False).input_ids


def further_trained(lm):
    """The model with other projections."""
    lm = gerund.load(lm.spec)
    with torch.no_grad():
        for name, weight in lm.model.named_parameters():
            if "proj" in name:
                weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    return lm


class TestPointwise:
    """A reranker beside the model."""

    @pytest.fixture(scope="class")
    @classmethod
    def lists(cls, tmp_path_factory):
        return written_lists(tmp_path_factory.mktemp("lists"), "river")

    @pytest.fixture
    def settings(self, corpus, tmp_path_factory, base, lists):
        return reranking(corpus, tmp_path_factory, base, lists)

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, corpus, tmp_path_factory, base, lists):
        """Return the folder of a model whose reranker has learned."""
        recipe = reranking(corpus, tmp_path_factory, base, lists)
        recipe |= {"steps": 60, "save_steps": 60, "eval_steps": 60, "schedule": {"name": "constant"}}
        return train(Recipe.model_validate(recipe))

    @pytest.mark.slow
    def test_a_reranker_learns_to_rank(self, trained, lists):
        losses = losses_of(trained, "pointwise")
        assert losses[-1] < 0.8 * losses[0]
        assert rightly_ranked(gerund.load(trained, dtype="float32"), lists) > 0.6

    @pytest.mark.slow
    def test_a_run_adds_a_reranker_to_the_model(self, trained, base):
        folder = trained
        lm, plain = gerund.load(folder, dtype="float32"), gerund.load(base, dtype="float32")
        assert {path.name for path in folder.iterdir()} >= {"reranker.json", "reranker.safetensors", "adapter-rerank"}
        assert lm.adapters.folders.keys() == {"rerank"}
        # Long and short documents, so that there is padding.
        documents = ["the cat", "a dog runs under the house and", "river"]
        ranking = lm.rerank("the cat", documents)
        assert ranking.by == "model"
        expected = [single(lm, "the cat", document) for document in documents]
        assert max(expected) - min(expected) > 1e-6
        scores = dict(ranking)
        np.testing.assert_allclose([scores[place] for place in range(3)], expected, atol=1e-5)
        assert lm.generate("the cat", 5)[0].text == plain.generate("the cat", 5)[0].text
        np.testing.assert_array_equal(lm.encode("the cat"), plain.encode("the cat"))
        assert lm.fingerprint() == plain.fingerprint()

    @pytest.mark.slow
    def test_a_reranker_goes_with_the_model_that_it_was_trained_from(self, trained, base, tmp_path):
        folder, lm = trained, gerund.load(trained, dtype="float32")
        scores = lm.rerank("the cat", ["the dog", "the cat runs"]).scores
        for other in (
            gerund.load(base, reranker=str(folder), dtype="float32"),
            gerund.load(gerund.load(base, reranker=folder, dtype="float32").spec),
            gerund.load(folder, attention="causal", dtype="float32"),
            lm.with_encoder(gerund.load(base, attention="bidir").encoder),
        ):
            assert other.rerank("the cat", ["the dog", "the cat runs"]).scores == pytest.approx(scores, abs=1e-6)
        lm.save(tmp_path / "saved")
        assert gerund.load(tmp_path / "saved").rerank("the cat", ["the dog", "the cat runs"]).scores == pytest.approx(
            scores, abs=1e-6
        )
        assert gerund.load(folder, adapter="none").reranker is None
        assert gerund.load(folder, reranker="none").reranker is None
        with pytest.raises(DataError, match="has no reranker with an adapter of its own"):
            gerund.load(base, reranker=str(base))

    @pytest.mark.slow
    def test_a_reranker_goes_with_a_quantized_file_of_its_model(self, trained, base, tmp_path):
        documents = ["the dog", "a cat runs under the house and", "river"]
        plain = gerund.load(base, adapter="none", dtype="float32")
        for name, lm in (("same", plain), ("other", further_trained(plain))):
            lm.export(tmp_path / name, "gguf", type="q8_0")
        file = tmp_path / "same" / "model.gguf"
        # In torch the expected scores are those of the file's own weights.
        gerund.load(file, runtime="torch", adapter="none", dtype="float32").save(tmp_path / "unpacked")
        expected = gerund.load(tmp_path / "unpacked", reranker=trained, dtype="float32").rerank("the cat", documents)
        for runtime, dtype, close in (("torch", "float32", 1e-6), ("packed", "auto", 2e-3)):
            lm = gerund.load(file, reranker=trained, runtime=runtime, dtype=dtype)
            assert dict(lm.rerank("the cat", documents)) == pytest.approx(dict(expected), abs=close)
            with pytest.raises(DataError, match="was not trained from the weights"):
                gerund.load(tmp_path / "other" / "model.gguf", reranker=trained, runtime=runtime)

    @pytest.mark.slow
    def test_states_of_lower_layers_are_kept(self, run, settings):
        """The encoder's plan, which is not causal, does not reach them."""
        settings["model"]["lora"]["lowest_layer"] = 1
        cached, plain = (run(name, "steps=2", f"model.cache_below={name == 'a'}") for name in ("a", "b"))
        one, other = (gerund.load(folder, dtype="float32").reranker._layer for folder in (cached, plain))
        np.testing.assert_allclose(one.weight_1D, other.weight_1D, atol=1e-5)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"model": {"lora": None}}, "pointwise trains a new adapter"),
            ({"objectives": [{"kind": kind, "files": ["l"]} for kind in ("late", "pointwise")]}, "the only objective"),
        ],
    )
    def test_recipes_that_contradict_it(self, run, settings, change, words):
        settings["model"] |= change.pop("model", {})
        settings |= change
        with pytest.raises(ConfigError, match=words):
            run("out")

    def test_queries_that_fill_the_length(self, run):
        with pytest.raises(DataError, match="every query fills the length"):
            run("out", "objectives.pointwise.length=16")


def asking(monkeypatch, made):
    """Let the model ask by the first words of a text, and note which texts."""

    def questions_to(_, texts, seed):
        made.append((len(texts), seed))
        return [[f"{' '.join(text.split()[:9])}?", "never reached?"] for text in texts]

    monkeypatch.setattr(ranking, "questions_to", questions_to)


class TestMadeLists:
    """What asks, what is offered, and what an interrupted run keeps."""

    @pytest.fixture
    def settings(self, adapting, corpus, tmp_path):
        adapting["data"] = {"folder": str(corpus), "sources": [{"name": "a", "files": ["a.train.jsonl"]}]}
        adapting["data"]["cache"] = str(tmp_path / "cache")
        late = {"kind": "late", "batch_size": 2, "length": 32, "candidates": 3, "dimensions": 8, "lists": 6}
        adapting["objectives"] = [late | {"questions": "written"}]
        adapting["encoder"] = {"attention": "causal"}
        return adapting

    def test_questions_are_written_once(self, run, settings, monkeypatch):
        made = []
        asking(monkeypatch, made)
        lists = read_lists([run("out", "steps=1").parent / LISTS])
        assert len(lists) == 6
        assert all(ranked.documents[0].startswith(ranked.query[:-1]) for ranked in lists)
        assert made
        written = list(made)
        monkeypatch.setattr(ranking, "_lift", lambda *_: pytest.fail("scored again"))
        again = read_lists([run("again", "steps=1").parent / LISTS])
        assert (again, made) == (lists, written)

    def test_half_of_the_questions_are_sentences(self, run, settings, monkeypatch):
        asking(monkeypatch, [])
        lists = read_lists([run("out", "steps=1", "objectives.late.questions=both").parent / LISTS])
        assert [ranked.query.endswith("?") for ranked in lists] == 3 * [False] + 3 * [True]

    def test_a_model_that_cannot_ask_is_told(self, run, settings, monkeypatch):
        monkeypatch.setattr(ranking, "questions_to", lambda _, texts, seed: [["zebra?"] for _ in texts])
        with pytest.raises(DataError, match="late: the model wrote no question that finds its text"):
            run("out", "steps=1")

    def test_an_interrupted_run_keeps_what_was_made(self, tmp_path):
        path = tmp_path / "lines.jsonl"
        path.write_text("[0, [1]]\n[1, [2]]\n[2, [3", "utf-8")
        lines = _Lines(path)
        assert [lines.get(at, lambda: pytest.fail("made again")) for at in range(2)] == [[1], [2]]
        assert lines.get(2, lambda: [4]) == [4]
        again = _Lines(path)
        assert [again.get(at, lambda: pytest.fail("made again")) for at in range(3)] == [[1], [2], [4]]

    def test_two_runs_at_a_time_keep_each_result_at_its_place(self, tmp_path):
        runs = [_Lines(tmp_path / "lines.jsonl") for _ in range(2)]
        made = [run.get(number, lambda number=number: [number]) for number in range(3) for run in runs]
        read = _Lines(tmp_path / "lines.jsonl")
        assert made == [[0], [0], [1], [1], [2], [2]]
        assert [read.get(number, lambda: pytest.fail("made again")) for number in range(3)] == [[0], [1], [2]]

    def test_an_adapter_that_is_trained_further_does_not_score(self, settings, write_recipe, monkeypatch, tmp_path):
        model = prepare_model(load_recipe(write_recipe(settings)))
        documents = ["the cat runs under the house", "a stone and a river", "red and blue dog"]
        model.model.eval()
        expected = ranking._lift(model.model, model.tokenizer, "the cat", documents)  # the adapter is new
        torch.manual_seed(0)
        for name, weight in model.adapter.named_parameters():
            if "lora_B" in name:
                weight.data.normal_()
        assert ranking._lift(model.model, model.tokenizer, "the cat", documents) != pytest.approx(expected, rel=0.1)
        config = LateObjectiveConfig(kind="late", lists=1, candidates=3)
        maker = ranking._Maker(SimpleNamespace(model=model, seed=lambda _: 0), config, documents, tmp_path)
        monkeypatch.setattr(maker, "_taken", lambda _, count: [("the cat", documents)] * count)
        [ranked] = maker.lists()
        assert ranked.scores == pytest.approx(expected, rel=1e-5)
        assert any(weight.requires_grad for weight in model.adapter.parameters())
