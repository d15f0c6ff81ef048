"""GUR and span corruption: batches and losses against slow ones, and training them from end to end."""

import json
import shutil

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError
from gerund.inference.infill.sentinels import sentinel_ids
from gerund.training.corpus.mined_pairs import Bucket, Buckets
from gerund.training.corpus.pairs import Example, Examples
from gerund.training.corpus.sources import Sources
from gerund.training.estimate import estimate
from gerund.training.losses.vectors import both_ways_info_nce
from gerund.training.objectives.registry import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.step import TrainingModule, evaluate_batches, run_step
from gerund.training.trainable_model import prepare_model
from tests.tiny import save_tiny, save_tiny_t5

WORDS = ["the", "a", "cat", "in", "an", "inn", "then", "ran", "sat", "tin", "rain", "end"]
T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
      "num_heads": 4, "dropout_rate": 0.0}  # fmt: skip


def text(rng, count):
    return " ".join(rng.choice(WORDS, count))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with pairs, a few documents, a tiny T5 and a tiny decoder-only model."""
    folder = tmp_path_factory.mktemp("gur")
    rng = np.random.default_rng(0)
    titles = [text(rng, 3) for _ in range(30)]
    rows = [{"text_a": title, "text_b": f"{text(rng, 2)} {title} {text(rng, 2)}"} for title in titles]
    for row in rows[::2]:
        row["opening"] = f"{row['text_b']}. {text(rng, 8)}."
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [json.dumps({"text": ". ".join(text(rng, 9) for _ in range(3))}) for _ in range(40)]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    save_tiny_t5(folder / "t5", sentinels=20)
    save_tiny(folder / "llama")
    return folder


def recipe(place, output="out", *, base="t5", objectives=None, encoder=None, model=None, overrides=(), **changes):
    own = {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}, "batch_size": 6, "length": 32, **changes}
    content = {
        "model": model or {"base": str(place / base)},
        "encoder": encoder or {},
        "data": {"folder": str(place), "sources": [{"name": "docs", "files": ["docs.jsonl"]}]},
        "objectives": objectives or [own],
        "optimizer": {"learning_rate": 0.01},
        "precision": "fp32",
        "output": str(output),
        "steps": 4,
        "save_steps": 2,
        "log_steps": 2,
    }
    path = place / "recipe.yaml"
    path.write_text(json.dumps(content))
    return load_recipe(path, list(overrides))


def built(settings, place):
    prepared = prepare_model(settings, write=False)
    sources = Sources(settings.model_copy(update={"output": place / "tokens"}), prepared.tokenizer)
    objectives = prepare_objectives(settings, prepared, sources)
    module = TrainingModule(prepared.model, {one.name: one.losses for one in objectives}, bf16=False)
    return prepared, objectives, module


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
    loss, _ = both_ways_info_nce(*sides, identities, temperature=0.5, similarity="cosine", gather=False)
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


class TestCorruption:
    def test_text_and_target_hold_the_whole_text(self, place):
        prepared, [objective], _ = built(recipe(place, title_fraction=0.0), place)
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
        _, [objective], module = built(
            recipe(place, pairs={"files": ["one.jsonl"]}, batch_size=2, title_fraction=0), place
        )
        batch = objective.batches.make(0, 0, 2)
        assert batch["query"]["labels"].tolist() == [[-100], [-100]]
        assert objective.losses.counts(batch)["lm"] == int((batch["positive"]["labels"] != -100).sum())
        assert np.isfinite(float(run_step(module, [objective], {"step": 0, "gur": batch}).total))

    def test_titles_are_written_from_documents(self, place):
        """Of documents that have a title, and of nothing else."""
        prepared, [objective], _ = built(recipe(place, title_fraction=0.5), place)
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

    def test_titles_of_two_processes_are_those_of_one(self, place):
        rng = np.random.default_rng(1)
        rows = [{"text_a": text(rng, 2), "text_b": text(rng, n)} for n in [3] * 40 + [25] * 20]
        rows = [{**row, "opening": f"{number} {text(rng, 9)}"} for number, row in enumerate(rows)]
        (place / "titled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = {"short_length": 16, "short_characters": 32, "short_factor": 2, "title_fraction": 0.4}
        settings = recipe(place, pairs={"files": ["titled.jsonl"]}, batch_size=4, **more)
        _, [objective], _ = built(settings, place)
        seen = []
        for step in range(40):
            whole = objective.batches.make(step, 4 * step, 4)["title"]["identity"].tolist()
            parts = [objective.batches.make(step, first, 2) for first in (4 * step, 4 * step + 2)]
            assert [one for part in parts if "title" in part for one in part["title"]["identity"].tolist()] == whole
            seen += whole
        # Every document once before any twice, in batches of either length.
        assert len(seen) > len(set(seen)) == len(set(seen[:60])) == 60

    def test_no_titles_without_documents(self, place):
        """Two sentences of a document are no text and its title (gerund mine --pairs all)."""
        rows = [json.loads(line) for line in (place / "pairs.jsonl").read_text().splitlines()]
        lines = [json.dumps({"text_a": row["text_a"], "text_b": row["text_b"]}) for row in rows]
        (place / "untitled.jsonl").write_text("\n".join(lines))
        _, [objective], _ = built(recipe(place, pairs={"files": ["untitled.jsonl"]}), place)
        assert objective.batches.make(0, 0, 6).keys() == {"query", "positive"}
        with pytest.raises(ConfigError, match=r"title_fraction 0\.2 needs documents with titles"):
            built(recipe(place, pairs={"files": ["untitled.jsonl"]}, title_fraction=0.2), place)

    def test_longer_texts_are_cropped_at_random(self, place):
        long = " ".join(WORDS * 10)
        (place / "long.jsonl").write_text(json.dumps({"text_a": long, "text_b": long}) + "\n")
        settings = recipe(place, pairs={"files": ["long.jsonl"]}, batch_size=2, title_fraction=0, lm=False, rate=0)
        prepared, [objective], _ = built(settings, place)
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
        (place / "weighed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        _, [objective], _ = built(recipe(place, pairs={"files": ["weighed.jsonl"], **pairs}, batch_size=2), place)
        [bucket] = objective.batches.texts.buckets
        return sorted(self.ROWS.index((e.query, e.positive, w)) for e in bucket.examples.examples
                      for a, b, w in self.ROWS if (a, b) == (e.query, e.positive))  # fmt: skip

    def test_by_the_length_of_the_texts(self, place):
        """GUR, section IV-A: below 64 characters two Chinese characters, which weigh 20, else three."""
        assert self.kept(place, threshold=30, short_threshold=20) == [0, 2]
        assert self.kept(place, threshold=30) == [2]
        assert self.kept(place) == [0, 1, 2, 3]

    def test_need_weights(self, place):
        settings = recipe(place, pairs={"files": ["pairs.jsonl"], "threshold": 30})
        with pytest.raises(DataError, match="needs their weights"):
            built(settings, place)


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
        (place / "both.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        more = {"short_length": 16, "short_characters": 32, "short_factor": 2, "title_fraction": 0.0}
        settings = recipe(place, pairs={"files": ["both.jsonl"]}, batch_size=4, **more)
        _, [objective], _ = built(settings, place)
        sizes = set()
        for step in range(12):
            batch = objective.batches.make(step, 4 * step, 4)
            sizes.add((len(batch["query"]["identity"]), batch["positive"]["input_ids"].shape[1] <= 16))
        assert sizes == {(8, True), (4, False)}

    def test_two_processes_read_what_one_reads(self, place):
        _, [objective], _ = built(recipe(place, title_fraction=0.0), place)
        whole = objective.batches.make(3, 18, 6)
        parts = [objective.batches.make(3, first, 3) for first in (18, 21)]
        for name in ("query", "positive"):
            joined = torch.cat([part[name]["identity"] for part in parts])
            assert joined.tolist() == whole[name]["identity"].tolist()


class TestSpanCorruption:
    def test_loss_is_that_of_transformers(self, place):
        objectives = [{"kind": "span_corruption", "batch_size": 4, "length": 32, "micro_batch_size": 2}]
        prepared, [objective], module = built(recipe(place, objectives=objectives), place)
        module.eval()
        batch = objective.batches.make(0, 0, 4)
        result = run_step(module, [objective], {"step": 0, "span_corruption": batch})
        expected = prepared.model(
            input_ids=batch["input_ids"], attention_mask=batch["real"].long(), labels=batch["labels"]
        ).loss
        assert float(result.total) == pytest.approx(float(expected.detach()), rel=1e-4)

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


class TestTraining:
    def test_the_head_is_counted(self, place):
        known = estimate(recipe(place))
        assert known.parameters == known.trained_parameters

    def test_leaves_a_model_with_its_head(self, place, tmp_path):
        folder = train(recipe(place, tmp_path / "out", encoder={"pooling": "first"}))
        lm = gerund.load(folder, dtype="float32")
        assert lm.dimensions == 128
        assert lm.encoder.pooling == "first"
        assert lm.encode(["the cat", "rain"]).shape == (2, 128)
        stored = json.loads((folder / "gerund.json").read_text())["fingerprint"]
        assert stored == lm.fingerprint()
        first = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[0])
        assert {"loss_gur", "loss_lm", "gur_accuracy"} <= set(first)

    def test_learns(self, place, tmp_path):
        changes = ["steps=80", "save_steps=80", "log_steps=10", "optimizer.learning_rate=0.003"]
        settings = recipe(place, tmp_path / "out", overrides=changes, rate=0.05, batch_size=12, temperature=0.05)
        train(settings)
        logs = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
        logs = [log for log in logs if "loss" in log]
        assert logs[-1]["loss_gur"] < 0.8 * logs[0]["loss_gur"]
        assert logs[-1]["loss_lm"] < 0.8 * logs[0]["loss_lm"]

    def test_goes_on_from_a_model_with_a_head(self, place, tmp_path):
        folder = train(recipe(place, tmp_path / "one", dimensions=16))
        model = {"base": str(folder)}
        # Its head is not asked for again.
        again = train(recipe(place, tmp_path / "two", model=model, overrides=["optimizer.learning_rate=1e-9"]))
        one, two = (gerund.load(path, dtype="float32").encode(["the cat", "rain"]) for path in (folder, again))
        np.testing.assert_allclose(one, two, atol=1e-4)
        for changes in ({"dimensions": 8}, {"variant": "released"}):
            with pytest.raises(ConfigError, match="the base has a head of 16 dimensions"):
                train(recipe(place, tmp_path / "three", **changes, model=model))

    def test_resumes_to_the_same_model(self, place, tmp_path):
        whole = train(recipe(place, tmp_path / "whole"))
        settings = recipe(place, tmp_path / "again")
        train(settings.model_copy(update={"steps": 4}))
        shutil.rmtree(tmp_path / "again" / "model")
        shutil.rmtree(tmp_path / "again" / "checkpoints" / "checkpoint-4")
        again = train(settings, resume=True)
        for name in ("model.safetensors", "head.safetensors"):
            assert (again / name).read_bytes() == (whole / name).read_bytes()

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

    def test_a_decoder_only_model_may_have_a_head(self, place, tmp_path):
        lora = {"base": str(place / "llama"), "lora": {"rank": 4, "alpha": 8}}
        folder = train(recipe(place, tmp_path / "out", model=lora, encoder={"attention": "bidir"}, dimensions=16))
        assert gerund.load(folder).encode("the cat").shape == (16,)


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"base": "llama", "lm": True}, "gur with lm needs a decoder beside an encoder"),
            ({"base": "llama", "objectives": [{"kind": "span_corruption"}]}, "span_corruption needs a decoder beside"),
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
