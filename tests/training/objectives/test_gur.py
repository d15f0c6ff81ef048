"""GUR and span corruption: what is read and written, losses and gradients against slow ones, and training."""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.inference.infill.sentinels import sentinel_ids
from gerund.training.corpus.pairs import Bucket, Buckets, Example, Examples
from gerund.training.estimate import estimate
from gerund.training.run import train
from gerund.training.step import evaluate_batches, run_step
from tests.tiny import save_tiny, save_tiny_t5
from tests.training.objectives import slow
from tests.training.objectives.recipes import WORDS, built, text
from tests.training.objectives.recipes import gur as recipe
from tests.training.outcomes import read_log


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Folder of pairs, a few documents, a tiny T5 and a tiny decoder-only model."""
    folder, rng = tmp_path_factory.mktemp("gur"), np.random.default_rng(0)
    titles = [text(rng, 3) for _ in range(30)]
    rows = [{"text_a": title, "text_b": f"{text(rng, 2)} {title} {text(rng, 2)}"} for title in titles]
    for row in rows[::2]:
        row["opening"] = f"{row['text_b']}. {text(rng, 8)}."
    written(folder / "pairs.jsonl", rows)
    written(folder / "docs.jsonl", [{"text": ". ".join(text(rng, 9) for _ in range(3))} for _ in range(40)])
    save_tiny_t5(folder / "t5", sentinels=20)
    save_tiny(folder / "llama")
    return folder


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


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
    contrast = 0.0
    for side, other in (("query", "positive"), ("positive", "query")):
        names, others = (batch[name]["identity"].tolist() for name in (side, other))

        def is_right(i, j, names=names, others=others):
            # A title that stands in both pairs belongs to the sentences of both.
            return others[j] in (others[i], names[i]) or names[j] == names[i]

        contrast += slow.contrast(vectors[side], vectors[other], range(len(names)), is_right, 0.1, "cosine")[0]
    return contrast / (2 * len(names)), (total / count if count else None)


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_losses_and_gradients_are_those_of_the_slow_ones(place, micro, alpha):
    torch.manual_seed(0)
    prepared, objective, module = built(recipe(place, micro_batch_size=micro, alpha=alpha, title_fraction=0.4))
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
    prepared, objective, module = built(recipe(place, title_fraction=0.0, **changes))
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
    written(place / "same.jsonl", rows)
    settings = recipe(place, pairs={"files": ["same.jsonl"]}, batch_size=5, title_fraction=0.0)
    prepared, objective, module = built(settings)
    module.eval()
    batch = objective.batches.make(0, 0, 5)
    assert sorted(np.unique(batch["query"]["identity"].numpy(), return_counts=True)[1].tolist()) == [1, 1, 3]
    result = run_step(module, [objective], {"step": 0, "gur": batch})
    contrast, _ = slow_losses(prepared, objective, batch)
    assert float(result.losses["gur"]) == pytest.approx(float(contrast.detach()), rel=1e-4)


def test_without_language_modelling_the_same_texts_are_read(place):
    """GUR-LM (section IV-A) omits the task: crops and hidden spans are those of GUR."""
    _, whole, _ = built(recipe(place, title_fraction=0.0))
    _, without, _ = built(recipe(place, lm=False))
    for step in range(3):
        full, left = (objective.batches.make(step, 6 * step, 6) for objective in (whole, without))
        assert left.keys() == {"query", "positive"}
        for name in left:
            assert left[name].keys() == {"input_ids", "real", "pooled", "identity"}
            assert "labels" in full[name]
            for key, tensor in left[name].items():
                assert torch.equal(tensor, full[name][key])


def test_rate_0_reads_whole_texts(place):
    prepared, objective, _ = built(recipe(place, lm=False, rate=0))
    batch = objective.batches.make(0, 0, 6)
    for row in range(6):
        example = objective.batches.texts.buckets[0].examples.row(row)
        for name in ("query", "positive"):
            ids = batch[name]["input_ids"][row][batch[name]["real"][row]].tolist()
            assert ids == prepared.tokenizer(getattr(example, name))["input_ids"]


def test_validation_means_are_those_of_training(place):
    _, objective, module = built(recipe(place, micro_batch_size=2))
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
        first = read_log(folder.parent)[0]
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


T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
      "num_heads": 4, "dropout_rate": 0.0}  # fmt: skip


class TestCorruption:
    def test_text_and_target_hold_the_whole_text(self, place):
        prepared, objective, _ = built(recipe(place, title_fraction=0.0))
        sentinels = sentinel_ids(prepared.tokenizer)
        batch = objective.batches.make(0, 0, 6)
        rows = [objective.batches.texts.buckets[0].examples.row(number) for number in range(6)]
        for name in ("query", "positive"):
            group = batch[name]
            for row, example in enumerate(rows):
                ids = group["input_ids"][row][group["real"][row]].tolist()
                target = [token for token in group["labels"][row].tolist() if token != -100]
                assert target[-1] == prepared.tokenizer.eos_token_id
                used = [token for token in ids if token in sentinels]
                assert used == sentinels[: len(used)]
                assert len(used) >= 1
                spans, last = {}, None
                for token in target[:-1]:
                    if token in sentinels:
                        last = token
                        spans[token] = []
                    else:
                        spans[last].append(token)
                assert list(spans) == sentinels[: len(used) + 1]
                assert spans[last] == []
                whole = [own for token in ids for own in (spans[token] if token in sentinels else [token])]
                assert whole == prepared.tokenizer(getattr(example, name))["input_ids"]
                hidden = sum(map(len, spans.values()))
                assert hidden == max(1, round(0.15 * (len(whole) - 1)))

    def test_a_text_of_one_token_stays_whole(self, place):
        (place / "one.jsonl").write_text('{"text_a": "t", "text_b": "the"}\n' * 2)
        _, objective, module = built(recipe(place, pairs={"files": ["one.jsonl"]}, batch_size=2, title_fraction=0))
        batch = objective.batches.make(0, 0, 2)
        assert batch["query"]["labels"].tolist() == [[-100], [-100]]
        assert objective.losses.counts(batch)["lm"] == int((batch["positive"]["labels"] != -100).sum())
        assert np.isfinite(float(run_step(module, [objective], {"step": 0, "gur": batch}).total))

    def test_a_small_batch_has_one_title(self, place):
        _, objective, _ = built(recipe(place, batch_size=4, title_fraction=0.1))
        sizes = [len(objective.batches.make(step, 4 * step, 4)["title"]["identity"]) for step in range(3)]
        assert sizes == [1, 1, 1]

    def test_titles_are_written_from_documents(self, place):
        """Of documents that have a title, and of nothing else."""
        prepared, objective, _ = built(recipe(place, title_fraction=0.5))
        rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
        documents = {row["opening"]: row["text_a"] for row in rows if "opening" in row}
        seen = []
        for step in range(5):
            group = objective.batches.make(step, 6 * step, 6)["title"]
            assert len(group["identity"]) == 3
            for ids, real, labels in zip(group["input_ids"], group["real"], group["labels"], strict=True):
                read = prepared.tokenizer.decode(ids[real], skip_special_tokens=True)
                written = [token for token in labels.tolist() if token != -100]
                assert read.startswith("document2title: ")
                # Cut at 32 tokens.
                [opening] = [own for own in documents if own.startswith(read.removeprefix("document2title: ").strip())]
                assert prepared.tokenizer.decode(written) == f"{documents[opening]}</s>"
                seen.append(opening)
        # Each once before any twice: an epoch has 15 of them.
        assert sorted(seen) == sorted(documents)

    @pytest.mark.slow
    def test_two_processes_read_what_one_reads(self, place):
        rng = np.random.default_rng(1)
        rows = [{"text_a": text(rng, 2), "text_b": text(rng, n)} for n in [3] * 40 + [25] * 20]
        rows = [{**row, "opening": f"{number} {text(rng, 9)}"} for number, row in enumerate(rows)]
        written(place / "titled.jsonl", rows)
        more = {"short_length": 16, "short_characters": 32, "short_factor": 2, "title_fraction": 0.4}
        settings = recipe(place, pairs={"files": ["titled.jsonl"]}, batch_size=4, **more)
        _, objective, _ = built(settings)
        seen = []
        for step in range(40):
            whole = objective.batches.make(step, 4 * step, 4)
            parts = [objective.batches.make(step, first, 2) for first in (4 * step, 4 * step + 2)]
            for name, group in whole.items():
                halves = [part[name]["identity"] for part in parts if name in part]
                assert torch.cat(halves).tolist() == group["identity"].tolist()
            seen += whole["title"]["identity"].tolist()
        # Every document once before any twice, in batches of either length.
        assert len(seen) > len(set(seen)) == len(set(seen[:60])) == 60

    def test_no_titles_without_documents(self, place):
        """Two sentences of a document are no text and its title (gerund mine --pairs all)."""
        rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
        lines = [json.dumps({"text_a": row["text_a"], "text_b": row["text_b"]}) for row in rows]
        (place / "untitled.jsonl").write_text("\n".join(lines))
        _, objective, _ = built(recipe(place, pairs={"files": ["untitled.jsonl"]}))
        assert objective.batches.make(0, 0, 6).keys() == {"query", "positive"}
        with pytest.raises(ConfigError, match=r"title_fraction 0\.2 needs documents with titles"):
            built(recipe(place, pairs={"files": ["untitled.jsonl"]}, title_fraction=0.2))

    def test_longer_texts_are_cropped_at_random(self, place):
        long = " ".join(WORDS * 10)
        (place / "long.jsonl").write_text(json.dumps({"text_a": long, "text_b": long}) + "\n")
        settings = recipe(place, pairs={"files": ["long.jsonl"]}, batch_size=2, title_fraction=0, lm=False, rate=0)
        prepared, objective, _ = built(settings)
        seen = set()
        for step in range(4):
            batch = objective.batches.make(step, 2 * step, 2)
            assert batch["query"]["input_ids"].shape[1] <= 32
            for row in batch["query"]["input_ids"]:
                own = prepared.tokenizer.decode(row, skip_special_tokens=True)
                assert own.strip() in long
                seen.add(own)
        assert len(seen) > 4


class TestThresholds:
    ROWS = (("a" * 9, "b" * 9, 20), ("a" * 9, "b" * 64, 29), ("c" * 9, "d" * 64, 30), ("e" * 9, "f" * 63, 19))

    def kept(self, place, **pairs):
        rows = [{"text_a": a, "text_b": b, "weight": weight} for a, b, weight in self.ROWS]
        written(place / "weighed.jsonl", rows)
        _, objective, _ = built(recipe(place, pairs={"files": ["weighed.jsonl"], **pairs}, batch_size=2))
        [bucket] = objective.batches.texts.buckets
        return sorted(self.ROWS.index((e.query, e.positive, w)) for e in bucket.examples.examples
                      for a, b, w in self.ROWS if (a, b) == (e.query, e.positive))  # fmt: skip

    def test_by_the_length_of_the_texts(self, place):
        """GUR, section IV-A: below 64 characters two Chinese characters, which weigh 20, else three."""
        assert self.kept(place, threshold=30, short_threshold=20) == [0, 2]
        assert self.kept(place, threshold=30) == [2]
        assert self.kept(place) == [0, 1, 2, 3]


class TestBuckets:
    def test_divide_the_steps_by_their_batches(self):
        examples = [[Example(f"{kind}{n}", "b", ()) for n in range(size)] for kind, size in (("s", 240), ("l", 60))]
        buckets = Buckets(
            [Bucket(Examples(examples[0], seed=0), 8, 4), Bucket(Examples(examples[1], seed=1), 32, 1)], 6
        )
        turns = [buckets.at(step) for step in range(200)]
        short = [turn for bucket, turn in turns if bucket.factor == 4]
        long = [turn for bucket, turn in turns if bucket.factor == 1]
        assert (len(short), len(long)) == (100, 100)
        assert short == list(range(100))
        assert long == list(range(100))
        kinds = [bucket.factor for bucket, _ in turns]
        assert max(abs(kinds[:n].count(4) - n / 2) for n in range(200)) <= 1

    def test_batches_are_of_one_length(self, place):
        rng = np.random.default_rng(1)
        rows = [{"text_a": text(rng, 2), "text_b": text(rng, n)} for n in [3] * 40 + [25] * 20]
        written(place / "both.jsonl", rows)
        more = {"short_length": 16, "short_characters": 32, "short_factor": 2, "title_fraction": 0.0}
        settings = recipe(place, pairs={"files": ["both.jsonl"]}, batch_size=4, **more)
        _, objective, _ = built(settings)
        sizes = set()
        for step in range(12):
            batch = objective.batches.make(step, 4 * step, 4)
            sizes.add((len(batch["query"]["identity"]), batch["positive"]["input_ids"].shape[1] <= 16))
        assert sizes == {(8, True), (4, False)}


class TestSpanCorruption:
    def test_loss_is_that_of_transformers(self, place):
        objectives = [{"kind": "span_corruption", "batch_size": 4, "length": 32, "micro_batch_size": 2}]
        prepared, objective, module = built(recipe(place, objectives=objectives))
        module.eval()
        batch = objective.batches.make(0, 0, 4)
        result = run_step(module, [objective], {"step": 0, "span_corruption": batch})
        expected = prepared.model(
            input_ids=batch["input_ids"], attention_mask=batch["real"].long(), labels=batch["labels"]
        ).loss
        assert float(result.total) == pytest.approx(float(expected.detach()), rel=1e-4)

    @pytest.mark.slow
    def test_trains_a_t5_from_scratch_with_its_own_tokenizer(self, place, tmp_path):
        objectives = [{"kind": "span_corruption", "batch_size": 8, "length": 32}]
        settings = recipe(
            place, tmp_path / "out", objectives=objectives, model={"config": T5}, overrides=["tokenizer.vocab_size=420"]
        )
        known = estimate(settings)
        assert known.parameters == known.trained_parameters > 0
        lm = gerund.load(train(settings), dtype="float32")
        assert len(sentinel_ids(lm.tokenizer)) == 100
        ids = lm.tokenizer("the cat")["input_ids"]
        assert (ids[0], ids[-1]) == (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id)
        assert lm.encode("the cat").shape == (32,)
        filled = lm.infill("the [blank] sat in an inn", max_tokens=4)
        assert filled.text.startswith("the")
        assert filled.text.endswith(" sat in an inn")
