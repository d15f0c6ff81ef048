"""GUR and span corruption: batches and losses against slow ones, and training them from end to end."""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.training.estimate import estimate
from gerund.training.losses.contrastive import symmetric_batch_info_nce
from gerund.training.run import train
from gerund.training.step import evaluate_batches, run_step
from tests.tiny import save_tiny_t5
from tests.training.objectives.gur_recipes import built, make_place, recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("gur"))


def slow_losses(prepared, objective, batch):
    """Return both losses of equation 1, one text at a time: the contrastive one in float64, by equation 2."""
    model, head = prepared.model, objective.losses.projection
    vectors, total, count = {}, 0.0, 0
    for name, group in batch.items():
        vectors[name] = []
        for row in range(len(group["identity"])):
            ids = group["input_ids"][row][group["real"][row]][None]
            states = model.encoder(input_ids=ids).last_hidden_state[0]
            pooled = states[group["pooled"][row][group["real"][row]]].mean(0)
            vectors[name].append(head(pooled[None])[0].double())
            if "labels" in group:
                labels = group["labels"][row][group["labels"][row] != -100][None]
                if labels.numel():
                    loss = model(input_ids=ids, labels=labels).loss
                    total, count = total + loss.double() * labels.numel(), count + labels.numel()
    sides, names = (
        [vectors["query"], vectors["positive"]],
        [batch[n]["identity"].tolist() for n in ("query", "positive")],
    )
    contrast = 0.0
    for side in (0, 1):
        for i, own in enumerate(sides[side]):
            scores = []
            for j, other in enumerate(sides[1 - side]):
                # A title that stands in both pairs belongs to the sentences of both.
                same = names[1 - side][j] in (names[1 - side][i], names[side][i]) or names[side][j] == names[side][i]
                if j == i or not same:
                    scores.append(torch.nn.functional.cosine_similarity(own, other, dim=0) / 0.1)
            right = torch.nn.functional.cosine_similarity(own, sides[1 - side][i], dim=0) / 0.1
            contrast = contrast + torch.logsumexp(torch.stack(scores), 0) - right
    return contrast / (2 * len(sides[0])), (total / count if count else None)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_losses_and_gradients_are_those_of_the_slow_ones(place, micro, alpha):
    torch.manual_seed(0)
    prepared, [objective], module = built(recipe(place, micro_batch_size=micro, alpha=alpha, title_fraction=0.4), place)
    module.eval()
    batch = objective.batches.make(0, 0, 6)
    assert {name: len(group["identity"]) for name, group in batch.items()} == {"query": 6, "positive": 6, "title": 2}
    result = run_step(module, [objective], {"step": 0, "gur": batch})
    found = {name: p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    contrast, written = slow_losses(prepared, objective, batch)
    (alpha * contrast + written).backward()
    assert float(result.losses["gur"]) == pytest.approx(float(contrast.detach()), rel=1e-4)
    assert float(result.losses["lm"]) == pytest.approx(float(written.detach()), rel=1e-4)
    assert float(result.total) == pytest.approx(float((alpha * contrast + written).detach()), rel=1e-4)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("changes", "losses"), [({"lm": False}, {"gur"}), ({"alpha": 0.0}, {"gur", "lm"})])
def test_either_half_can_be_left_out(place, changes, losses):
    """The ablations GUR-LM and GUR-CL (section IV-A)."""
    prepared, [objective], module = built(recipe(place, title_fraction=0.0, **changes), place)
    batch = objective.batches.make(0, 0, 6)
    result = run_step(module, [objective], {"step": 0, "gur": batch})
    assert {name for name in result.losses if not name.endswith("accuracy")} == losses
    heads = [p.grad for p in objective.losses.parameters()]
    decoder = [p.grad for name, p in prepared.model.decoder.named_parameters() if "embed" not in name]
    assert (max(float(g.abs().max()) for g in heads) > 0) == ("alpha" not in changes)
    assert (max(float(g.abs().max()) for g in decoder) > 0) == ("lm" not in changes)


def test_the_same_text_twice_is_no_negative(place, tmp_path):
    rows = [{"text_a": "the cat", "text_b": f"a cat ran in {n} inn"} for n in ("a", "the", "then")]
    rows += [{"text_a": "then rain", "text_b": "the rain then"}, {"text_a": "the end", "text_b": "the cat"}]
    (place / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = recipe(place, pairs={"files": ["same.jsonl"]}, batch_size=5, title_fraction=0.0)
    prepared, [objective], module = built(settings, place)
    module.eval()
    batch = objective.batches.make(0, 0, 5)
    assert sorted(np.unique(batch["query"]["identity"].numpy(), return_counts=True)[1].tolist()) == [1, 1, 3]
    result = run_step(module, [objective], {"step": 0, "gur": batch})
    contrast, _ = slow_losses(prepared, objective, batch)
    assert float(result.losses["gur"]) == pytest.approx(float(contrast.detach()), rel=1e-4)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_title_twice_is_masked_in_both_directions(swapped):
    """Neither sentence of a title is a negative of it, and the title in the other pair is none of theirs."""
    torch.manual_seed(0)
    titles, sentences = torch.randn(2, 4, 5, dtype=torch.float64)
    titles[1] = titles[0]
    identities = (torch.tensor([7, 7, 8, 9]), torch.tensor([1, 2, 3, 4]))
    sides = (titles, sentences)
    if swapped:
        sides, identities = sides[::-1], identities[::-1]
    loss, _ = symmetric_batch_info_nce(*sides, identities, temperature=0.5, similarity="cosine", gather=False)
    scores = torch.nn.functional.cosine_similarity(titles[:, None], sentences[None], dim=-1) / 0.5
    scores[0, 1] = scores[1, 0] = -torch.inf
    expected = sum(
        torch.logsumexp(scores[i], 0) + torch.logsumexp(scores[:, i], 0) - 2 * scores[i, i] for i in range(4)
    )
    torch.testing.assert_close(loss, expected / 8)


def test_without_language_modelling_the_same_texts_are_read(place):
    """GUR-LM (section IV-A) omits the task: crops and hidden spans are those of GUR."""
    _, [whole], _ = built(recipe(place, title_fraction=0.0), place)
    _, [without], module = built(recipe(place, lm=False), place)
    for step in range(3):
        full, left = (objective.batches.make(step, 6 * step, 6) for objective in (whole, without))
        assert left.keys() == {"query", "positive"}
        for name in left:
            assert left[name].keys() == {"input_ids", "real", "pooled", "identity"}
            assert "labels" in full[name]
            for key, tensor in left[name].items():
                assert torch.equal(tensor, full[name][key])
    result = run_step(module, [without], {"step": 0, "gur": without.batches.make(0, 0, 6)})
    assert "lm" not in result.losses


def test_rate_0_reads_whole_texts(place):
    prepared, [objective], _ = built(recipe(place, lm=False, rate=0), place)
    batch = objective.batches.make(0, 0, 6)
    for row in range(6):
        example = objective.batches.texts.buckets[0].examples.row(row)
        for name in ("query", "positive"):
            ids = batch[name]["input_ids"][row][batch[name]["real"][row]].tolist()
            assert ids == prepared.tokenizer(getattr(example, name))["input_ids"]


def test_validation_means_are_those_of_training(place):
    _, [objective], module = built(recipe(place, micro_batch_size=2), place)
    module.eval()
    batch = objective.batches.make(0, 0, 6)
    means = evaluate_batches(module, objective, [batch])
    result = run_step(module, [objective], {"step": 0, "gur": batch})
    assert means == {name: pytest.approx(float(result.losses[name]), rel=1e-4) for name in ("gur", "lm")}


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    """Return the folder of a model with a head of the usual size."""
    return train(recipe(place, tmp_path_factory.mktemp("gur-run") / "out", encoder={"pooling": "first"}))


class TestTraining:
    def test_the_head_is_counted(self, place):
        known = estimate(recipe(place))
        assert known.parameters == known.trained_parameters

    @pytest.mark.slow
    def test_leaves_a_model_with_its_head(self, trained):
        folder = trained
        lm = gerund.load(folder, dtype="float32")
        assert lm.dimensions == 128
        assert lm.encoder.pooling == "first"
        assert lm.encode(["the cat", "rain"]).shape == (2, 128)
        stored = json.loads((folder / "gerund.json").read_text())["fingerprint"]
        assert stored == lm.fingerprint()
        first = json.loads((folder.parent / "log.jsonl").read_text().splitlines()[0])
        assert {"loss_gur", "loss_lm", "gur_accuracy"} <= set(first)

    @pytest.mark.slow
    def test_goes_on_from_a_model_with_a_head(self, place, trained, tmp_path):
        folder = trained
        model = {"base": str(folder)}
        unmoved = ["steps=1", "optimizer.learning_rate=1e-9"]
        # Its head is not asked for again.
        again = train(recipe(place, tmp_path / "two", model=model, overrides=unmoved))
        one, two = (gerund.load(path, dtype="float32").encode(["the cat", "rain"]) for path in (folder, again))
        np.testing.assert_allclose(one, two, atol=1e-4)
        for changes in ({"dimensions": 8}, {"variant": "released"}):
            with pytest.raises(ConfigError, match="the base has a head of 128 dimensions"):
                train(recipe(place, tmp_path / "three", **changes, model=model))

    @pytest.mark.slow
    def test_a_decoder_only_model_learns_by_two_objectives(self, place, tmp_path):
        objectives = [
            {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}, "batch_size": 6, "length": 32},
            {"kind": "causal", "batch_size": 4, "length": 32},
        ]
        lora = {"base": str(place / "llama"), "lora": {"rank": 4, "alpha": 8}}
        settings = recipe(place, tmp_path / "out", objectives=objectives, model=lora, encoder={"attention": "causal"})
        lm = gerund.load(train(settings), dtype="float32")
        assert lm.encode("the cat").shape == (32,)
        assert lm.head is None
        plain = gerund.load(place / "llama", attention="causal", dtype="float32")
        assert lm.generate("the cat", 6) == plain.generate("the cat", 6)


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"base": "llama", "lm": True}, "gur with lm needs an encoder and a decoder"),
            (
                {"base": "llama", "objectives": [{"kind": "span_corruption"}]},
                "span_corruption needs an encoder and a decoder",
            ),
            ({"objectives": [{"kind": "causal", "length": 32}]}, "causal is for decoder-only models"),
            ({"encoder": {"attention": "causal"}}, "looks both ways"),
            ({"model": {"base": "T5", "lora": {}}}, "an adapter for encoding"),
            ({"projection": 8, "dimensions": 8}, "give one of them"),
            ({"short_length": 64}, "short_length 64 is above length 32"),
            ({"lm": False, "alpha": 0}, "nothing is learned"),
            ({"lm": False, "title_fraction": 0.1}, "titles are written, and lm is false"),
            ({"rate": 0}, "belongs to lm: false"),
            ({"pairs": {"files": ["pairs.jsonl"], "short_threshold": 20}}, "short_threshold 20 is above threshold"),
            ({"pairs": {"files": ["pairs.jsonl"], "threshold": 99}}, "needs their weights"),
            ({"pairs": {"files": ["nothing.jsonl"]}}, "no such file"),
            ({"pairs": {"files": ["pairs.jsonl"], "query": "title"}}, "no field 'title'"),
        ],
    )
    def test_settings(self, place, tmp_path, changes, message):
        if "model" in changes:
            changes = {"model": {**changes["model"], "base": str(place / "t5")}}
        with pytest.raises((ConfigError, DataError), match=message):
            train(recipe(place, tmp_path / "out", **changes))

    def test_no_sentinels(self, place, tmp_path):
        save_tiny_t5(tmp_path / "plain", sentinels=0)
        with pytest.raises(ConfigError, match="lacks sentinels"):
            train(recipe(place, tmp_path / "out", model={"base": str(tmp_path / "plain")}))
