"""What is corrupted: how much, where never, and that it depends on the text's number alone."""

from collections import Counter

import numpy as np
import pytest

from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.objectives.hybrid import HybridBatches
from gerund.training.objectives.settings import MntpConfig, MsgConfig
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers
from tests.training.objectives.conftest import Rows, assert_same_rows

N = 300
BUILD = {
    "bos": byte_tokenizer,
    "no-bos": tokenizers.without_bos,
    "one-for-both": tokenizers.one_token_for_both,
    "both": tokenizers.with_both,
}


def hybrid(tokenizer, rows, *, mntp=None, msg=None, eos=False, seed=3):
    special = set(tokenizer.all_special_ids)
    return HybridBatches(
        Rows(rows),
        InputFormatter(tokenizer, append_eos=eos),
        mntp=None if mntp is None else MntpConfig(kind="mntp", **mntp),
        msg=None if msg is None else MsgConfig(kind="msg", **msg),
        mask_id=MASK,
        random_ids=np.array([token for token in range(len(tokenizer)) if token not in special]),
        pad=tokenizer.pad_token_id or 0,
        seed=seed,
    )


# A token that no text of these tests has.
MASK = 200


def random_rows(count, shortest=8, longest=180, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(20, 90, size=rng.integers(shortest, longest + 1)) for _ in range(count)]


def runs(spans):
    """Return the length of each span, by its number; a number that comes back is an error."""
    lengths, before = {}, 0
    for number in spans:
        if number and number != before:
            assert number not in lengths, spans
            assert number == len(lengths) + 1
            assert before == 0, "no context between two spans"
            lengths[number] = 0
        if number:
            lengths[number] += 1
        before = number
    return list(lengths.values())


def views(batch):
    """Yield (ids, labels, selected, span) of each text without padding, and demand that padding is untouched."""
    for row in range(len(batch["input_ids"])):
        n = int(batch["real"][row].sum())
        assert not batch["selected"][row, n:].any()
        assert not batch["span"][row, n:].any()
        yield [batch[name][row, :n].tolist() for name in ("input_ids", "labels", "selected", "span")]


class TestShares:
    def test_other_shares(self):
        settings = {"rate": 0.5, "mask_fraction": 0.0, "random_fraction": 1.0}
        batch = hybrid(byte_tokenizer(), random_rows(N), mntp=settings).make(0, 0, N)
        random = [own for ids, _, selected, _ in views(batch) for own, s in zip(ids, selected, strict=True) if s]
        assert min(random) >= 3  # no special token
        assert len(set(random)) > 200
        assert len(random) / int(batch["real"].sum() - N) == pytest.approx(0.5, abs=0.01)

    def test_spans(self):
        rows = random_rows(N, longest=400)
        batch = hybrid(byte_tokenizer(), rows, msg={}).make(0, 0, N)
        counts, lengths = Counter(), []
        for ids, labels, _, span in views(batch):
            assert ids == labels
            found = runs(span)
            counts[len(found)] += 1
            lengths += found
        assert set(counts) == {1, 2}
        assert counts[1] / N == pytest.approx(0.5, abs=0.1)
        assert min(lengths) == 4
        assert 100 < max(lengths) <= 128

    def test_both(self):
        batch = hybrid(byte_tokenizer(), random_rows(N), mntp={}, msg={}).make(0, 0, N)
        chosen, context = 0, 0
        for ids, labels, selected, span in views(batch):
            for place in range(1, len(ids)):
                if span[place]:
                    # What is to be written is not corrupted: it is its own context.
                    assert not selected[place]
                    assert ids[place] == labels[place]
                elif not span[place - 1]:
                    context += 1
                    chosen += selected[place]
        assert chosen / context == pytest.approx(0.2, abs=0.015)

    def test_whole_texts(self):
        batch = hybrid(byte_tokenizer(), random_rows(N), mntp={}, msg={"whole_fraction": 0.3}).make(0, 0, N)
        whole = [all(span[1:]) for _, _, _, span in views(batch)]
        assert sum(whole) / N == pytest.approx(0.3, abs=0.08)
        for is_whole, (_, _, selected, span) in zip(whole, views(batch), strict=True):
            if is_whole:
                assert span[0] == 0
                assert set(span[1:]) == {1}
                assert not any(selected)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("eos", [False, True])
@pytest.mark.parametrize("build", BUILD)
@pytest.mark.parametrize("predict", ["next", "same"])
def test_what_is_never_touched(build, eos, predict):
    tokenizer = BUILD[build]()
    rows = random_rows(N, shortest=1, longest=30)
    settings = {"mntp": {"rate": 0.9, "predict": predict}, "msg": {"shortest": 1, "longest": 3, "whole_fraction": 0.1}}
    formatter = InputFormatter(tokenizer, append_eos=eos)
    batch = hybrid(tokenizer, rows, eos=eos, **settings).make(0, 0, N)
    touched_first = 0
    for row, (ids, labels, selected, span) in enumerate(views(batch)):
        formatted = formatter.format(rows[row])
        places = formatter.places(formatted)
        assert labels == formatted.ids[: len(labels)]
        assert len(labels) == len(formatted) or (len(labels) == places.stop and all(span[1:]))
        for place in range(len(ids)):
            if place not in places:
                assert not selected[place]
                assert not span[place]
                assert ids[place] == labels[place]
            if selected[place]:
                assert span[place] == 0
                # What predicts it belongs to the context, too.
                assert predict == "same" or (place > 0 and span[place - 1] == 0)
        assert not span[0]
        touched_first += selected[0]
    assert (touched_first > 0) == (predict == "same" and not formatter.places(formatter.format(rows[0])).start)


def test_a_batch_depends_on_nothing_but_its_numbers():
    tokenizer = byte_tokenizer()
    batches = hybrid(tokenizer, random_rows(40), mntp={}, msg={}, eos=True)
    whole = batches.make(3, 6, 12)
    assert_same_rows(whole, 0, batches.make(3, 6, 12))
    for first, count in [(6, 1), (6, 3), (9, 4), (13, 5), (17, 1)]:
        assert_same_rows(whole, first - 6, batches.make(3, first, count))
    # Not on the step, which texts were made before, or the object that made them.
    assert_same_rows(hybrid(tokenizer, random_rows(40), mntp={}, msg={}, eos=True).make(9, 6, 12), 0, whole)
    other = hybrid(tokenizer, random_rows(40), mntp={}, msg={}, eos=True, seed=4).make(3, 6, 12)
    assert (other["selected"] != whole["selected"]).any()


def test_a_text_that_comes_again_is_corrupted_anew():
    [text] = random_rows(1, shortest=60)
    batch = hybrid(byte_tokenizer(), [text], mntp={}, msg={}).make(0, 0, 4)
    assert len({str(row.tolist()) for row in batch["selected"]}) == 4
    assert len({str(row.tolist()) for row in batch["span"]}) == 4


@pytest.mark.parametrize("build", ["bos", "no-bos"])
def test_short_texts(build):
    rows = [[20], [20, 21], [20, 21, 22], [20, 21, 22, 23], [20, 21, 22, 23, 24]]
    batches = hybrid(BUILD[build](), rows, mntp={}, msg={})
    bos = int(build == "bos")
    for first in range(0, 200, 5):
        batch = batches.make(0, first, 5)
        for length, (_, _, selected, span) in enumerate(views(batch), start=1):
            # Four tokens to write and one as context is the least; the first position cannot be written.
            assert any(span) == (length == 5), (length, span)
            # Nor can it be masked, as little as what stands behind a span; else one token always is.
            context = [place for place in range(1, length + bos) if not span[place] and not span[place - 1]]
            assert any(selected) == bool(context)


def test_texts_that_are_too_short_are_counted():
    batches = hybrid(byte_tokenizer(), random_rows(3), mntp={})
    batches.texts.skipped = 7
    assert batches.skipped == 7
