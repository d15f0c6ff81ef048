"""Positives that are the text with words deleted, swapped or written anew: how much of it stays, and where."""

import json

import numpy as np
import pytest
import torch

from gerund import LanguageModel
from gerund.errors import ConfigError, TextError
from gerund.training.estimate import estimate
from gerund.training.objectives.contrastive import AlteredBatches, Rewriter, TextGroup, augment
from gerund.training.objectives.settings import SsclConfig
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from tests.training.objectives import slow
from tests.training.objectives.conftest import Rows, assert_same_rows
from tests.training.objectives.test_contrastive import ENCODERS, formatter_of, runtime_of

WORDS = [f"w{i}" for i in range(100)]
OFF = {"deletion": 0.0, "swap": 0.0, "crop": 1.0}


def versions(words, count=400, **settings):
    return [
        augment(" ".join(words), np.random.default_rng(seed), **{**OFF, **settings}).split() for seed in range(count)
    ]


def test_deletion_leaves_out_its_share_and_keeps_the_order():
    found = versions(WORDS, deletion=0.1)
    for words in found:
        assert words == sorted(words, key=WORDS.index)
    missing = [100 - len(words) for words in found]
    # Binomial(100, 0.1)
    assert np.mean(missing) == pytest.approx(10, abs=0.5)
    assert np.var(missing) == pytest.approx(9, abs=2)


def test_swap_moves_no_word_by_more_than_a_place():
    moved = []
    for words in versions(WORDS, swap=0.1):
        assert sorted(words) == sorted(WORDS)
        distances = [abs(place - WORDS.index(word)) for place, word in enumerate(words)]
        assert max(distances) <= 1
        moved.append(sum(distances) / 2)
    # Each place begins an exchange with probability 0.1, unless the one before did: 0.1 / 1.1 of them.
    assert np.mean(moved) == pytest.approx(9.05, abs=0.5)
    assert versions(["a", "b", "c"], 1, swap=1.0) == [["b", "a", "c"]]


def test_crop_takes_a_stretch_of_at_least_its_share():
    lengths, starts = [], []
    for words in versions(WORDS, crop=0.6):
        start = WORDS.index(words[0])
        assert words == WORDS[start : start + len(words)]
        lengths.append(len(words))
        starts.append(start / max(1, 100 - len(words)))
    assert (min(lengths), max(lengths)) == (60, 100)
    assert np.mean(lengths) == pytest.approx(80, abs=2)
    assert 0 in starts
    assert 1 in starts


@pytest.mark.parametrize("words", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_never_empty(words):
    for found in versions(words, 100, deletion=1.0, swap=0.5, crop=0.0):
        assert len(found) == 1
        assert found[0] in words
    kept = {found[0] for found in versions(words, 100, deletion=1.0)}
    assert kept == set(words)


def test_pure():
    text = " ".join(WORDS)
    one, again, other = (augment(text, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert one == again != other
    assert one != text


def test_mistakes_are_named():
    for text in ("", " \n"):
        with pytest.raises(TextError, match="without words"):
            augment(text, np.random.default_rng(0))
    for setting in ({"deletion": -0.1}, {"swap": 1.5}, {"crop": float("nan")}):
        with pytest.raises(ConfigError, match=f"{next(iter(setting))} is a fraction from 0 to 1"):
            augment("a b", np.random.default_rng(0), **setting)


def altered(model, tokenizer, rows, seed=3, rewriter=None, **settings):
    group = TextGroup(runtime_of(model, tokenizer, ENCODERS["magnet"]), 2)
    config = SsclConfig(kind="sscl", length=64, **settings)
    options = {"tokenizer": tokenizer, "config": config, "seed": seed, "rewriter": rewriter}
    return AlteredBatches(Rows(rows), formatter_of(tokenizer, ENCODERS["magnet"]), group, **options)


def shown(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True).removeprefix("Find: ")


class TestSscl:
    def test_positives_have_the_words_of_the_text(self, model, tokenizer, ids_of):
        rows = ids_of(*range(20, 40))
        batch = altered(model, tokenizer, rows, deletion=0.3, swap=0.2).make(0, 0, 20)
        differing = 0
        pairs = zip(rows, *(slow.texts_of(batch[group]) for group in ("query", "positive")), strict=True)
        for row, query, positive in pairs:
            one, other = (shown(tokenizer, text["input_ids"]) for text in (query, positive))
            assert one.strip() == tokenizer.decode(row).strip()
            assert set(other.split()) <= set(one.split())
            assert query["input_ids"][-1] == positive["input_ids"][-1] == tokenizer.eos_token_id
            differing += one.split() != other.split()
        assert differing > 15

    def test_a_batch_depends_on_nothing_but_its_numbers(self, model, tokenizer, ids_of):
        rows = ids_of(*range(20, 40))
        whole = altered(model, tokenizer, rows).make(0, 4, 10)
        for first, count in [(4, 10), (4, 1), (7, 5), (13, 1)]:
            part = altered(model, tokenizer, rows).make(8, first, count)
            for group in whole:
                assert_same_rows(whole[group], first - 4, part[group])
        other = altered(model, tokenizer, rows, seed=4).make(0, 4, 10)
        assert other["positive"]["identity"].tolist() != whole["positive"]["identity"].tolist()

    def test_blank_lines_are_their_own_positive(self, model, tokenizer):
        blank = tokenizer("\n\n \n \n\n", add_special_tokens=False).input_ids
        assert len(blank) > 1
        batch = altered(model, tokenizer, [blank]).make(0, 0, 2)
        assert torch.equal(batch["query"]["input_ids"], batch["positive"]["input_ids"])


class TestRewriting:
    """Positives whose words the base writes anew."""

    TEXTS = ("the cat sleeps under the red house", "a small dog runs over the blue river", "cat")

    @pytest.mark.slow
    def test_what_is_written_depends_on_the_text_alone_and_is_kept(self, base, tmp_path, monkeypatch):
        first, second = Rewriter(str(base), 0.3, tmp_path / "one"), Rewriter(str(base), 0.3, None)
        written = {text: first(text) for text in self.TEXTS}
        assert {text: second(text) for text in reversed(self.TEXTS)} == written
        [path] = (tmp_path / "one").iterdir()
        # As after a crash in the middle of a line.
        path.write_text(path.read_text("utf-8") + '{"query": "half', "utf-8")
        monkeypatch.setattr(LanguageModel, "expand", None)  # nothing is written a second time
        again = Rewriter(str(base), 0.3, tmp_path / "one")
        assert {text: again(text) for text in self.TEXTS} == written
        with pytest.raises(TypeError):
            again("a text that is not known yet")

    def test_a_text_without_a_word_stays(self, base, tmp_path):
        assert Rewriter(str(base), 0.3, tmp_path)("... !") == "... !"

    @pytest.mark.slow
    def test_positives_are_rewritten_texts(self, model, tokenizer, base, ids_of):
        rewriter, rows = Rewriter(str(base), 0.3, None), ids_of(12, 15)
        settings = {"deletion": 0, "swap": 0, "rewritten": 0.3}
        batch = altered(model, tokenizer, rows, rewriter=rewriter, **settings).make(0, 0, 2)
        for row, positive in zip(rows, slow.texts_of(batch["positive"]), strict=True):
            assert shown(tokenizer, positive["input_ids"]).split() == rewriter(tokenizer.decode(row)).split()

    @pytest.mark.slow
    def test_a_training_keeps_what_was_rewritten_and_goes_on_with_it(self, adapting, write_recipe, tmp_path):
        objective = {"kind": "sscl", "batch_size": 4, "length": 32, "rewritten": 0.3}
        encoder = {"attention": "bidir", "pooling": "last", "append_eos": True}
        settings = {**adapting, "objectives": [objective], "encoder": encoder, "steps": 1, "save_steps": 1}
        settings |= {
            "log_steps": 1,
            "output": str(tmp_path / "run"),
            "data": {**adapting["data"], "cache": str(tmp_path)},
        }
        recipe = load_recipe(write_recipe(settings))
        estimate(recipe)
        assert not list(tmp_path.glob("rewritten-*"))  # a dry run writes nothing
        train(recipe)
        [path] = tmp_path.glob("rewritten-*.jsonl")
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        assert len({row["query"] for row in rows}) == len(rows) >= 4
        assert any(row["query"] != row["positive"] for row in rows)

    def test_a_model_that_has_learnt_nothing_cannot_rewrite(self, settings, write_recipe):
        objective = {"kind": "sscl", "batch_size": 4, "length": 32, "rewritten": 0.3}
        with pytest.raises(ConfigError, match="a model from scratch can't generate yet"):
            load_recipe(write_recipe({**settings, "objectives": [objective]}))
        with pytest.raises(ValueError, match="give one of them"):
            SsclConfig(kind="sscl", rewritten=0.3, pairs={"files": ["pairs.jsonl"]})
