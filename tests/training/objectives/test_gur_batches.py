"""GUR's batches, and span corruption: which texts and spans are read, and what is to be written."""

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
from gerund.training.step import run_step
from tests.training.objectives.gur_recipes import WORDS, built, make_place, recipe, text

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
      "num_heads": 4, "dropout_rate": 0.0}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("gur"))


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

    def test_a_small_batch_has_one_title(self, place):
        _, [objective], _ = built(recipe(place, batch_size=4, title_fraction=0.1), place)
        sizes = [len(objective.batches.make(step, 4 * step, 4)["title"]["identity"]) for step in range(3)]
        assert sizes == [1, 1, 1]

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

    @pytest.mark.slow
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
