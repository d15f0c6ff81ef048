"""Plain language modelling against one position at a time, and the blocks of the decay."""

import pytest
import torch

from gerund.errors import ConfigError
from gerund.training.objectives.language_modelling import BlockBatches, CausalLosses
from tests.training.objectives import slow
from tests.training.objectives.conftest import assert_equal_losses


class Blocks:
    """Blocks of a stream of numbers."""

    def __init__(self, length):
        self.length = length

    def rows(self, first, count):
        return torch.arange(first * self.length, (first + count) * self.length).reshape(count, self.length)

    def epochs(self, rows):
        return [rows * self.length / 1000]


def test_equals_one_position_at_a_time(model, eager, ids_of, double):
    rows = ids_of(12, 12, 12)
    batch = {"input_ids": torch.tensor(rows)}
    losses = CausalLosses()
    assert losses.counts(batch) == {"causal": 33}
    assert_equal_losses(losses(model, batch), {"causal": slow.next_tokens(eager, rows)}, model, eager)


@pytest.mark.parametrize("length, rows, decay_length", [(16, 8, 32), (16, 6, 24), (16, 4, 64), (16, 6, 8)])
def test_the_decay_reads_as_many_tokens_in_other_blocks(length, rows, decay_length):
    batches = BlockBatches(Blocks(length), Blocks(decay_length), decay_from=3, steps=5, rows=rows)
    per_step = rows * length // decay_length
    for step in range(5):
        ids = batches.make(step, step * rows, rows)["input_ids"]
        assert ids.numel() == rows * length
        if step < 3:
            assert torch.equal(ids, Blocks(length).rows(step * rows, rows))
        else:
            assert torch.equal(ids, Blocks(decay_length).rows((step - 3) * per_step, per_step))
    assert batches.epochs() == pytest.approx([5 * rows * length / 1000])


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_blocks_of_the_decay(processes):
    batches = BlockBatches(Blocks(16), Blocks(32), decay_from=1, steps=3, rows=8)
    for step in range(3):
        share = 8 // processes
        parts = [batches.make(step, step * 8 + rank * share, share)["input_ids"] for rank in range(processes)]
        assert torch.equal(torch.cat(parts), batches.make(step, step * 8, 8)["input_ids"])


def test_more_processes_than_blocks():
    batches = BlockBatches(Blocks(16), Blocks(64), decay_from=0, steps=3, rows=8)
    with pytest.raises(ConfigError, match="4 processes cannot share the blocks of decay_length 64"):
        batches.make(0, 0, 2)
