"""Masked tokens and missing spans: the losses one position at a time, and who sees whom, one pair at a time."""

import numpy as np
import pytest
import torch

from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.vocabulary import causal_loss
from gerund.training.objectives.base import Objective
from gerund.training.objectives.hybrid import HybridBatches, HybridLosses
from gerund.training.objectives.settings import MntpConfig, MsgConfig
from gerund.training.step import StepData, TrainingModule, run_step
from tests.training.objectives import slow
from tests.training.objectives.conftest import Rows, assert_equal_losses, gpt2

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
    def make(rows, formatter, names, predict="next", seed=3, **msg):
        return HybridBatches(
            Rows(rows),
            formatter,
            mntp=MntpConfig(kind="mntp", rate=0.3, predict=predict) if "mntp" in names else None,
            msg=MsgConfig(kind="msg", **msg) if "msg" in names else None,
            mask_id=tokenizer.mask_token_id,
            random_ids=np.arange(16, len(tokenizer)),
            pad=tokenizer.pad_token_id,
            seed=seed,
        )

    return make


def expected_losses(eager, batch, names, predict):
    ways = {"mntp": lambda: slow.masked_tokens(eager, batch, predict), "msg": lambda: slow.spans(eager, batch)}
    return {name: ways[name]() for name in names}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_position_at_a_time(model, eager, make, formatter, ids_of, case):
    predict, names = CASES[case]
    batch = make(ids_of(*LENGTHS), formatter, names, predict).make(0, 0, len(LENGTHS))
    losses = HybridLosses(2, names, predict=predict)
    assert_equal_losses(losses(model, batch), expected_losses(eager, batch, names, predict), model, eager)
    told = {"mntp": sum(map(sum, batch["selected"].tolist())), "msg": int((batch["span"] > 0).sum())}
    assert losses.counts(batch) == {name: told[name] for name in names}
    assert all(told[name] > 5 for name in names)


def test_masked_tokens_alone_are_read_in_both_directions(model, eager, make, formatter, ids_of):
    batch = make(ids_of(*LENGTHS), formatter, ("mntp",)).make(0, 0, len(LENGTHS))
    assert not batch["span"].any()
    expected = slow.masked_tokens(eager, batch, "next", sees=lambda query, key, span: True)
    found = HybridLosses(2, ("mntp",))(model, batch)["mntp"]
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


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


class TestWhoSeesWhom:
    """Layouts: the span of each token, padding not among them."""

    LAYOUTS = (
        [0, 0, 1, 1, 1, 0, 0],
        [0, 1, 1, 0, 2, 2, 2, 0],
        [0, 0, 2, 2, 0, 1, 1],
        [0, 1, 1, 1, 1],
        [0, 0, 0],
        [0],
    )

    def batch(self):
        width = max(map(len, self.LAYOUTS))
        span = torch.tensor([row + [0] * (width - len(row)) for row in self.LAYOUTS])
        real = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in self.LAYOUTS]).bool()
        return span, real

    def test_the_loss_sees_no_more(self, tokenizer):
        """Change one token at a time: in a model of one layer just those states move that see it."""
        model = gpt2(len(tokenizer), n_layer=1).eval()
        span, real = self.batch()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(16, len(tokenizer), span.shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids, "real": real, "span": span, "selected": torch.zeros_like(real)}
        before = self.states(model, batch)
        for key in range(ids.shape[1]):
            changed = ids.clone()
            changed[:, key] = (ids[:, key] - 16 + 7) % (len(tokenizer) - 16) + 16
            moved = (self.states(model, {**batch, "input_ids": changed}) - before).abs().amax(dim=2) > 1e-9
            for row, layout in enumerate(self.LAYOUTS):
                for query in range(len(layout)):
                    expected = key < len(layout) and slow.hybrid(query, key, layout)
                    assert moved[row, query] == expected, (layout, query, key)

    def states(self, model, batch):
        kept = []
        handle = model.base_model.register_forward_hook(lambda *call: kept.append(call[2].last_hidden_state.detach()))
        HybridLosses(1, ("msg",))(model, batch)
        handle.remove()
        return kept[0]


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


def test_both_in_one_pass_are_each_alone_on_the_same_view(model, make, formatter, ids_of):
    batch = make(ids_of(*LENGTHS), formatter, ("mntp", "msg")).make(0, 0, len(LENGTHS))
    both = HybridLosses(2, ("mntp", "msg"))(model, batch)
    spans = HybridLosses(2, ("msg",))(model, batch)["msg"]
    torch.testing.assert_close(both["msg"], spans, rtol=1e-12, atol=1e-12)
    # One pass of the model, whatever the number of losses.
    passes = []
    handle = model.base_model.register_forward_hook(lambda *_: passes.append(1))
    HybridLosses(2, ("mntp", "msg"))(model, batch)
    handle.remove()
    assert len(passes) == 1


def test_texts_without_room_give_zero_and_no_gradient(model, make, formatter, ids_of):
    # One token is no room for a span; it can be masked, where something precedes it.
    batch = make(ids_of(1, 2, 3), formatter, ("msg",)).make(0, 0, 3)
    losses = HybridLosses(2, ("msg",))
    assert losses.counts(batch) == {"msg": 0}
    loss = losses(model, batch)["msg"]
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
