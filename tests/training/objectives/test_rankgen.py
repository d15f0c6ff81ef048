"""The encoder of continuations: its batches and loss against slow ones, and training it from end to end."""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from gerund.scoring.dual_encoder import DualScorer
from gerund.scoring.word_overlap import OverlapScorer
from gerund.training.objectives.rankgen import Passages, read_passages
from gerund.training.run import train
from gerund.training.step import run_step
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny, save_tiny_t5
from tests.training.objectives import slow
from tests.training.objectives.recipes import WORDS, built, passage
from tests.training.objectives.recipes import rankgen as recipe
from tests.training.objectives.recipes import text as words
from tests.training.outcomes import read_log


def text(rng, count):
    return words(rng, count) + "."


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("base") / "tiny", max_position_embeddings=64)


@pytest.fixture(scope="module")
def passages(tmp_path_factory):
    """Two documents with twelve passages each, half of which have a generated continuation."""
    folder = tmp_path_factory.mktemp("passages")
    rng = np.random.default_rng(0)
    for part in range(2):
        rows = []
        for number in range(12):
            row = passage(number, text(rng, 9), text(rng, 4), part)
            if number % 2:
                row["generated"] = [text(rng, 4)]
            rows.append(row)
        (folder / f"part-{part:05}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def trained(base, passages, tmp_path_factory):
    """A model that was trained to score."""
    return train(recipe(base, passages, tmp_path_factory.mktemp("trained") / "out"))


def slow_loss(vectors, batch, negatives, is_right=lambda i, j: False):
    """Return the loss of RankGen, section 2.2, one passage and one candidate at a time, in float64."""
    queries, *keys = vectors.double().split([len(group["identity"]) for group in batch.values()])
    own, right, *others = [group["identity"].tolist() for group in batch.values()]
    names, count = [*right, *(name for group in others for name in group)], len(own)

    def is_excluded(i, j):
        return (j < count and negatives == "generative") or names[j] in (right[i], own[i]) or is_right(i, j)

    return slow.contrast(queries, torch.cat(keys), range(count), is_excluded)[0] / count


@pytest.mark.parametrize("negatives", ["both", "inbook", "generative"])
@pytest.mark.parametrize("micro", [None, 2])
def test_loss_and_gradient_are_those_of_the_slow_one(base, passages, negatives, micro):
    settings = recipe(base, passages, negatives=negatives, micro_batch_size=micro)
    _, objective, module = built(settings)
    batch = objective.batches.make(0, 0, 6)
    assert list(batch) == (["query", "positive"] if negatives == "inbook" else ["query", "positive", "negative"])
    result = run_step(module, [objective], {"step": 0, objective.name: batch})
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    vectors = torch.cat([module(objective.name, part) for part in batch.values()])
    expected = slow_loss(vectors, batch, negatives)
    expected.backward()
    assert float(result.losses["rankgen"]) == pytest.approx(float(expected.detach()), rel=1e-4)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_continuation_that_is_the_same_text_is_no_negative(base, tmp_path):
    rows = [passage(n, f"the cat {n} sat in", "an inn.") for n in range(4)]
    rows += [passage(4, "then a rain", "the end.")]
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "part-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, objective, module = built(recipe(base, tmp_path / "p", negatives="inbook", batch_size=5))
    batch = objective.batches.make(0, 0, 5)
    vectors = torch.cat([module(objective.name, part) for part in batch.values()])
    loss, _ = objective.losses.compare(vectors, batch, gather=False)
    expected = slow_loss(vectors, batch, "inbook").detach()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


class TestBatches:
    def test_come_from_one_document(self, passages):
        sampled = Passages(read_passages([passages]), seed=3)
        for epoch in range(3):
            documents = [sampled.row(24 * epoch + n)[0].document for n in range(24)]
            assert len(set(documents[:12])) == len(set(documents[12:])) == 1
            assert len({sampled.row(24 * epoch + n)[0].prefix for n in range(24)}) == 24
        orders = {tuple(sampled.row(24 * epoch + n)[0].prefix for n in range(24)) for epoch in range(3)}
        assert len(orders) == 3

    def test_have_generated_ones_for_every_passage(self, base, passages):
        _, objective, _ = built(recipe(base, passages))
        assert objective.batches.available == 12
        assert len(objective.batches.make(0, 0, 6)["negative"]["identity"]) == 6

    def test_keep_the_end_of_a_prefix_and_the_beginning_of_a_continuation(self, base, tmp_path):
        long = " ".join(WORDS * 8)
        (tmp_path / "p").mkdir()
        row = passage(0, f"{long} tin", f"tin {long}")
        (tmp_path / "p" / "part-00000.jsonl").write_text(json.dumps(row) + "\n")
        prepared, objective, _ = built(recipe(base, tmp_path / "p", negatives="inbook"))
        batch = objective.batches.make(0, 0, 1)
        decoded = {name: prepared.tokenizer.decode(group["input_ids"][0]) for name, group in batch.items()}
        assert decoded["query"].startswith("<s>pre ")
        assert decoded["query"].endswith("end tin</s>")
        assert decoded["positive"].startswith("<s>suffi tin the a")
        assert batch["query"]["input_ids"].shape[1] <= 48
        assert batch["positive"]["input_ids"].shape[1] == 24

    @pytest.mark.slow
    def test_are_what_the_scorer_reads(self, base, passages, trained):
        lm = gerund.load(trained, dtype="float32")
        settings = recipe(base, passages)
        _, objective, _ = built(settings)
        batch = objective.batches.make(0, 0, 6)
        rows = [objective.batches.texts.row(n)[0] for n in range(6)]
        prepared = lm.scorer.encoder
        for name, texts, marker in (
            ("query", [row.prefix for row in rows], "pre "),
            ("positive", [row.continuation for row in rows], "suffi "),
        ):
            for ids, real, own in zip(batch[name]["input_ids"], batch[name]["real"], texts, strict=True):
                read = prepared.tokenizer(marker + own)["input_ids"] + [prepared.tokenizer.eos_token_id]
                assert ids[real.bool()].tolist() == read


class TestTraining:
    @pytest.mark.slow
    def test_leaves_a_scorer_and_an_untouched_generator(self, base, trained):
        folder = trained
        assert {"scorer.json", "scorer.safetensors", "adapter", "gerund.json"} <= {p.name for p in folder.iterdir()}
        lm, plain = gerund.load(folder, dtype="float32"), gerund.load(base, attention="causal", dtype="float32")
        assert lm.generate("the cat", 6) == plain.generate("the cat", 6)
        [scores] = lm.score(["the cat sat in"], [[" the rain", " an end."]])
        # By its folder it is loaded as it would be for encoding, in bfloat16 where that is near enough.
        [near] = lm.score(["the cat sat in"], [[" the rain", " an end."]], str(folder))
        assert near == pytest.approx(scores, rel=0.05)
        assert gerund.load(folder, dtype="float32").scorer.score(["the cat sat in"], [[" the rain"]])[0] == [
            pytest.approx(scores[0], rel=1e-4)
        ]
        vectors = lm.encode(["pre the cat sat in", "suffi the rain"], normalize=False)
        expected = (lm.scorer.projection_DD @ vectors[0]) @ (lm.scorer.projection_DD @ vectors[1])
        assert scores[0] == pytest.approx(expected, rel=1e-3)

    @pytest.mark.slow
    def test_trained_on_cosines_it_scores_by_cosines(self, base, passages, tmp_path):
        settings = {"similarity": "cosine", "temperature": 0.05}
        lm = gerund.load(train(recipe(base, passages, tmp_path / "out", **settings)), dtype="float32")
        texts = ["an inn", "a tin then the end"]
        vectors = lm.scorer.continuation_vectors(texts)
        assert np.linalg.norm(vectors, axis=1) == pytest.approx([1.0, 1.0], rel=1e-5)
        [found] = lm.scorer.score(["the cat sat in"], [texts])
        assert found == pytest.approx((vectors @ lm.scorer.prefix_vectors(["the cat sat in"])[0]).tolist(), rel=1e-5)
        assert max(map(abs, found)) <= 1.0 + 1e-6

    @pytest.mark.slow
    def test_a_t5_becomes_a_scorer(self, passages, tmp_path):
        save_tiny_t5(tmp_path / "t5")
        settings = recipe(tmp_path / "t5", passages, tmp_path / "out", model={}, encoder={})
        folder = train(settings)
        lm = gerund.load(folder, dtype="float32")
        texts = [" the rain", " an end."]
        [own] = lm.score(["the cat sat in"], [texts])
        sides = (("the cat sat in", "pre "), ("the rain", "suffi "))
        vectors = [lm.scorer.projection_DD @ lm.encode(text, prompt=marker, normalize=False) for text, marker in sides]
        assert own[0] == pytest.approx(vectors[0] @ vectors[1], rel=1e-3)
        assert gerund.load(folder, dtype="float32").scorer.score(["the cat sat in"], [texts])[0] == pytest.approx(own)
        assert lm.scorer.incremental() is lm.scorer

    @pytest.mark.slow
    def test_ranks_its_own_writing(self, trained):
        lm = gerund.load(trained, dtype="float32")
        sampling = gerund.Sampling(temperature=1.0, seed=0)
        [one] = lm.generate("the cat", 6, sampling, rerank=gerund.Rerank(4, beams=2, every=2))
        [scores] = lm.score(["the cat"], [[candidate.text for candidate in one.beams]])
        assert [candidate.rank_score for candidate in one.beams] == pytest.approx(scores, rel=1e-4)

    @pytest.mark.slow
    def test_its_own_scorer_on_the_command_line(self, base, trained):
        folder = trained
        texts = [" tin", " inn"]
        [expected] = gerund.load(folder).score(["a"], [texts])
        for more in ([], ["--scorer", "own"], ["--scorer", folder]):
            done = run_cli("score", "a", *texts, "-m", folder, "--json", *more)
            assert json.loads(done.out)["scores"] == pytest.approx(expected, abs=1e-5)
        done = run_cli("score", "a", *texts, "-m", folder, "--json", "--scorer", "pmi")
        assert json.loads(done.out)["scores"] != pytest.approx(expected, abs=1e-3)
        options = ["--samples", "3", "--max-new-tokens", "4", "--seed", "1", "--json"]
        one, other = (run_cli("generate", "a", "-m", folder, "--rerank", name, *options) for name in ("own", folder))
        assert json.loads(one.out) == json.loads(other.out)
        done = run_cli("generate", "a", "-m", base, "--rerank", "own", *options)
        assert "was not trained to score continuations" in done.mistake


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"continuation_length": 5}, "continuation_length 5 leaves no room"),
            ({"length": 3}, "length 3 leaves no room"),
            ({"similarity": "cosine"}, "similarity cosine needs a temperature"),
            ({"negatives": "some"}, "negatives: input should be"),
        ],
    )
    def test_settings(self, base, passages, changes, message):
        with pytest.raises(ConfigError, match=message):
            built(recipe(base, passages, **changes))

    def test_no_generated_ones(self, base, tmp_path):
        (tmp_path / "p").mkdir()
        (tmp_path / "p" / "part-00000.jsonl").write_text(json.dumps(passage(0, "a", "b")))
        with pytest.raises(ConfigError, match="make some with `gerund negatives --generate 1`"):
            built(recipe(base, tmp_path / "p"))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("", "no passages in there"),
            ("[", "line 1: not valid JSON"),
            ('{"prefix": "a"}', "with a number 'document'"),
            ('{"document": 0, "prefix": "a"}', "no field 'continuation'"),
            ('{"document": true, "prefix": "a"}', "with a number 'document'"),
            ('{"document": 0, "prefix": " ", "continuation": "b"}', "'prefix' is empty"),
            (json.dumps(passage(0, "a", "b") | {"generated": 5}), "'generated' is not a list but int"),
            (json.dumps(passage(0, "a", "b") | {"generated": "text"}), "'generated' is not a list but str"),
        ],
    )
    def test_passages(self, tmp_path, line, message):
        (tmp_path / "part-00000.jsonl").write_text(f"\ufeff{line}\n", "utf-8")
        with pytest.raises(DataError, match=message):
            read_passages([tmp_path])

    def test_scorers(self, base, tmp_path):
        lm = gerund.load(base)
        with pytest.raises(DataError, match=r"has no scorer\.json"):
            DualScorer.of_folder(lm, base)
        DualScorer(lm, projection_DD=np.eye(32, dtype=np.float32)).save(tmp_path)
        (tmp_path / "scorer.json").write_text('{"format": 1, "scorer": {"prefixx": "a"}}')
        with pytest.raises(ConfigError, match=r"unknown field in scorer\.json 'prefixx'"):
            DualScorer.of_folder(lm, tmp_path)
        (tmp_path / "scorer.json").write_text('{"format": 9, "scorer": {}}')
        with pytest.raises(ConfigError, match="has format 9"):
            DualScorer.of_folder(lm, tmp_path)
        (tmp_path / "scorer.json").write_text('{"format": 1, "scorer": {}}')
        DualScorer(lm, projection_DD=np.eye(8, dtype=np.float32)).save(tmp_path)
        with pytest.raises(DataError, match="does not fit vectors of 32 dimensions"):
            DualScorer.of_folder(lm, tmp_path)
        (tmp_path / "scorer.safetensors").unlink()
        with pytest.raises(DataError, match=r"scorer\.safetensors cannot be read"):
            DualScorer.of_folder(lm, tmp_path)


@pytest.mark.slow
def test_other_passages_are_measured_at_every_evaluation(base, passages, tmp_path):
    overrides = [f"objectives.rankgen.passages=[{passages / 'part-00000.jsonl'}]", "eval_steps=2"]
    validation = [str(passages / "part-00001.jsonl")]
    settings = recipe(base, passages, tmp_path / "out", overrides, validation=validation)
    _, objective, _ = built(settings)
    [(batches, count)] = objective.validation.values()
    assert (len(batches.texts), count) == (6, 1)  # those with a generated continuation
    assert {example.document[1] for example in batches.texts.examples} == {1}
    train(settings)
    rows = read_log(tmp_path / "out")
    assert [row["step"] for row in rows if "val_rankgen" in row] == [2, 4]
    assert all(np.isfinite(row["val_rankgen"]) for row in rows if "val_rankgen" in row)


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory):
    """Passages of one book from every sentence on, with hard stretches, as `gerund negatives` writes them."""
    folder = tmp_path_factory.mktemp("overlapping")
    rng = np.random.default_rng(5)
    book = " ".join(f"{word.capitalize()} {text(rng, int(rng.integers(2, 5)))}" for word in rng.choice(WORDS, 40))
    (folder / "book.jsonl").write_text(json.dumps({"text": book}) + "\n")
    settings = NegativesConfig(prefix_words=14, fewest_words=3, most_words=10, generate=0.0, hard=3)
    make_negatives([folder / "book.jsonl"], folder / "passages", settings, scorer=OverlapScorer())
    return book, folder / "passages"


# Nothing is cut: of texts that are cut, equal beginnings are equal texts.
ROOM = {"length": 64, "continuation_length": 64}


def slow_overlaps(book, batch, rows):
    """Return which keys share a character with a query's true continuation, character by character."""
    right = [set(range(*example.span[1:])) for example, _ in rows]
    keys = [*right, *(set(range(*example.negative_spans[which])) for example, which in rows if which is not None)]
    for (example, _), characters in zip(rows, right, strict=True):
        assert book[min(characters) : max(characters) + 1] == example.continuation
    assert len(keys) == sum(len(group["identity"]) for name, group in batch.items() if name != "query")
    return [[not own.isdisjoint(key) for key in keys] for own in right]


class TestTrueContinuations:
    """Section 2.2: every other continuation of the batch is a negative; what overlaps the true one is right too."""

    @pytest.mark.parametrize("negatives", ["both", "inbook", "generative"])
    def test_are_never_negatives(self, base, overlapping, negatives):
        book, passages = overlapping
        _, objective, _ = built(recipe(base, passages, negatives=negatives, batch_size=24, **ROOM))
        batch = objective.batches.make(0, 0, 24)
        rows = [objective.batches.texts.row(number) for number in range(24)]
        if negatives == "inbook":
            rows = [(example, None) for example, _ in rows]
        overlaps = slow_overlaps(book, batch, rows)
        vectors = torch.randn(len(batch) * 24, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected = slow_loss(vectors, batch, negatives, lambda i, j: overlaps[i][j])
        assert expected != slow_loss(vectors, batch, negatives)
        loss, _ = objective.losses.compare(vectors, batch, gather=False)
        assert float(loss) == pytest.approx(float(expected), rel=1e-9)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({}, "no field 'span'; present are: document, prefix, continuation"),
            ({"span": [0, 9]}, "'span' holds 3 rising places of characters"),
            ({"span": [0, 9, 9]}, "'span' holds 3 rising places"),
            ({"span": [0, True, 9]}, "'span' holds 3 rising places"),
            ({"span": "0 9 12"}, "'span' holds 3 rising places"),
            ({"span": [0, 4, 9], "hard": ["a"]}, "1 texts in 'hard', and 0 in 'hard_spans'"),
            ({"span": [0, 4, 9], "hard": ["a"], "hard_spans": [[-1, 3]]}, "'hard_spans' holds 2 rising places"),
        ],
    )
    def test_malformed_places(self, tmp_path, row, message):
        (tmp_path / "p.jsonl").write_text(json.dumps({"document": 0, "prefix": "a", "continuation": "b"} | row))
        with pytest.raises(DataError, match=f"p.jsonl, line 1: {message}"):
            read_passages([tmp_path / "p.jsonl"])
