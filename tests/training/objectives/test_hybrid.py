"""Masked tokens and missing spans: what is corrupted and where never, and the losses one position at a time."""

import numpy as np
import pytest
import torch

from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.vocabulary import causal_loss
from gerund.training.objectives.base import Objective
from gerund.training.objectives.hybrid import HybridBatches, HybridLosses
from gerund.training.objectives.settings import MntpConfig, MsgConfig
from gerund.training.step import StepData, TrainingModule, run_step
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers
from tests.training.objectives import slow
from tests.training.objectives.conftest import Rows, assert_equal_losses, assert_same_rows

N = 300
BUILD = {
    "bos": byte_tokenizer,
    "no-bos": tokenizers.without_bos,
    "one-for-both": tokenizers.one_token_for_both,
    "both": tokenizers.with_both,
}


def hybrid(tokenizer, rows, *, mntp=None, msg=None, eos=False, seed=3, formatter=None):
    special = set(tokenizer.all_special_ids)
    return HybridBatches(
        Rows(rows),
        formatter or InputFormatter(tokenizer, append_eos=eos),
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
    # A text that comes again is corrupted anew.
    again = hybrid(tokenizer, random_rows(1, shortest=60), mntp={}, msg={}).make(0, 0, 4)
    for name in ("selected", "span"):
        assert len({str(row.tolist()) for row in again[name]}) == 4


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


LENGTHS = (14, 9, 12, 4, 1, 13)
CASES = {
    "mntp": ("next", ("mntp",)),
    "mntp-same": ("same", ("mntp",)),
    "msg": ("next", ("msg",)),
    "both": ("next", ("mntp", "msg")),
    "both-same": ("same", ("mntp", "msg")),
}


@pytest.fixture
def make(tokenizer):
    def make(rows, formatter, names, predict="next", **msg):
        settings = {"mntp": {"rate": 0.3, "predict": predict}, "msg": msg}
        return hybrid(tokenizer, rows, formatter=formatter, **{name: settings[name] for name in names})

    return make


def expected_losses(eager, batch, names, predict):
    ways = {"mntp": lambda: slow.masked_tokens(eager, batch, predict), "msg": lambda: slow.spans(eager, batch)}
    return {name: ways[name]() for name in names}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_position_at_a_time(model, eager, make, formatter, ids_of, case):
    predict, names = CASES[case]
    batch = make(ids_of(*LENGTHS), formatter, names, predict).make(0, 0, len(LENGTHS))
    losses, passes = HybridLosses(2, names, predict=predict), []
    assert_equal_losses(losses(model, batch), expected_losses(eager, batch, names, predict), model, eager)
    told = {"mntp": sum(map(sum, batch["selected"].tolist())), "msg": int((batch["span"] > 0).sum())}
    assert losses.counts(batch) == {name: told[name] for name in names}
    assert all(told[name] > 5 for name in names)
    # Whatever the number of losses, one pass once the head is known.
    model.base_model.register_forward_hook(lambda *_: passes.append(1))
    losses(model, batch)
    assert len(passes) == 1


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_by_the_paper_a_step_divides_as_equations_2_and_4_do(model, eager, make, formatter, ids_of, micro_batch_size):
    rows, weights = ids_of(*LENGTHS), {"mntp": 0.5, "msg": 2.0}
    own = {"batch_size": len(LENGTHS), "micro_batch_size": micro_batch_size, "normalisation": "paper"}
    configs = {
        "mntp": MntpConfig(kind="mntp", weight=weights["mntp"], **own),
        "msg": MsgConfig(kind="msg", weight=weights["msg"], **own),
    }
    losses = HybridLosses(2, ("mntp", "msg"), by_paper=("mntp", "msg"))
    objective = Objective("mntp+msg", make(rows, formatter, ("mntp", "msg")), losses, configs)
    module = TrainingModule(model, {objective.name: losses})
    inputs = StepData([objective], steps=1)[0]
    result = run_step(module, [objective], inputs)
    batch = inputs[objective.name]
    n = len(LENGTHS)
    tokens = sum(len(formatter.format(np.array(row)).ids) for row in rows)
    sums = expected_losses(eager, batch, ("mntp", "msg"), "next")
    expected = {"mntp": sums["mntp"] / tokens, "msg": sums["msg"] / n}
    total = sum(weights[name] * value for name, value in expected.items())
    total.backward()
    assert result.total.item() == pytest.approx(total.item(), rel=1e-10)
    assert {name: float(value) for name, value in result.losses.items()} == pytest.approx(
        {name: value.item() for name, value in expected.items()}, rel=1e-10
    )
    for (name, one), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: n + text)


@pytest.mark.parametrize("eos", [False, True])
def test_a_text_that_is_one_span_is_plain_language_modelling(model, make, ids_of, tokenizer, eos, double):
    rows = ids_of(20, 9, 14)
    batches = make(rows, InputFormatter(tokenizer, append_eos=eos), ("mntp", "msg"), whole_fraction=1.0)
    batch = batches.make(0, 0, 3)
    found = HybridLosses(2, ("mntp", "msg"))(model, batch)
    formatted = [[tokenizer.bos_token_id, *row] for row in rows]
    expected = sum(causal_loss(model, torch.tensor([row])) for row in formatted)
    torch.testing.assert_close(found["msg"], expected, rtol=1e-11, atol=1e-11)
    assert found["mntp"].item() == 0.0
    assert HybridLosses(2, ("mntp", "msg")).counts(batch) == {"mntp": 0, "msg": 20 + 9 + 14}
    assert [text["input_ids"] for text in slow.texts_of(batch)] == formatted
