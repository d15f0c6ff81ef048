"""Another version of a text: how much of it stays, and where."""

import numpy as np
import pytest

from gerund.errors import ConfigError, TextError
from gerund.training.objectives.contrastive import augment

WORDS = [f"w{i}" for i in range(100)]
OFF = {"deletion": 0.0, "swap": 0.0, "crop": 1.0}


def versions(words, count=400, **settings):
    return [
        augment(" ".join(words), np.random.default_rng(seed), **{**OFF, **settings}).split() for seed in range(count)
    ]


def test_everything_off_only_folds_white_space():
    assert augment(" a\tb\n\n c ", np.random.default_rng(0), **OFF) == "a b c"


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
