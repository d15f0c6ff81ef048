"""UniMAE's two losses one position at a time, and what is hidden from whom."""

from functools import partial

import pytest
import torch

from gerund.errors import ConfigError
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.objectives.settings import UnimaeConfig
from gerund.training.objectives.unimae import ReconstructionDecoder, UnimaeBatches, UnimaeLosses, reconstruction_mask
from tests.tiny import byte_tokenizer
from tests.training.corpus import tokenizers
from tests.training.objectives import slow
from tests.training.objectives.conftest import Rows, assert_equal_losses, assert_same_rows, doubled
from tests.training.objectives.test_hybrid import MASK, random_rows

LENGTHS = (11, 9, 12, 4, 1, 13)


def unimae(tokenizer, rows, seed=3, **settings):
    formatter = InputFormatter(tokenizer, append_eos=True)
    config = UnimaeConfig(kind="unimae", **settings)
    return UnimaeBatches(Rows(rows), formatter, config, mask_id=MASK, pad=2, seed=seed)


@pytest.fixture
def make(tokenizer):
    return partial(unimae, tokenizer)


def head(heads=2):
    torch.manual_seed(1)
    losses = doubled(UnimaeLosses(16, heads, 40))
    for parameter in losses.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    return losses


@pytest.mark.parametrize(
    "heads, settings", [(1, {}), (4, {"p_mar": 0.0, "p_mrc": 0.0}), (2, {"p_mar": 0.9, "p_mrc": 1.0})]
)
def test_equals_one_position_at_a_time(model, eager, make, ids_of, double, settings, heads):
    batch = make(ids_of(*LENGTHS), **settings).make(0, 0, len(LENGTHS))
    losses = head(heads)
    expected = {
        "mar": slow.auto_regression(eager, batch),
        "mrc": slow.reconstruction(eager, losses.decoder, batch),
    }
    assert_equal_losses(losses(model, batch), expected, model, eager, [losses])
    assert losses.counts(batch) == {"mar": sum(LENGTHS), "mrc": sum(LENGTHS)}


def test_without_a_token_before_the_text(model, eager, ids_of, double):
    """Nothing precedes the first token, so it is rebuilt but not predicted."""
    batch = unimae(tokenizers.without_bos(), ids_of(*LENGTHS)).make(0, 0, len(LENGTHS))
    losses = head()
    assert losses.counts(batch) == {"mar": sum(LENGTHS) - len(LENGTHS), "mrc": sum(LENGTHS)}
    expected = {"mar": slow.auto_regression(eager, batch), "mrc": slow.reconstruction(eager, losses.decoder, batch)}
    assert_equal_losses(losses(model, batch), expected, model, eager, [losses])


def test_what_each_position_sees(make, ids_of):
    rows = random_rows(40, longest=40)
    batch = make(rows).make(0, 0, 40)
    kept = pairs = 0
    for row, text in enumerate(rows):
        n = len(text)
        assert batch["text"][row, :n].tolist() == text.tolist()
        assert batch["text_real"][row].tolist() == [place < n for place in range(batch["text"].shape[1])]
        assert batch["sees"][row, :, 0].all()  # h, and so no row is empty
        others = batch["sees"][row, :, 1:]
        assert not others.diagonal().any()
        assert not others[:, n:].any()
        assert not others[n:].any()
        kept += int(others.sum())
        pairs += n * (n - 1)
        # Sampled for every pair, not one token for all.
        assert len({str(line) for line in others[:n].int().tolist()}) > n * 0.8
    assert kept / pairs == pytest.approx(0.5, abs=0.02)
    for rate in (0.0, 1.0):
        sees = make(rows, p_mrc=rate).make(0, 0, 1)["sees"][0, :, 1:]
        assert int(sees.sum()) == rate * len(rows[0]) * (len(rows[0]) - 1)


@pytest.mark.parametrize("rate", [0.5, 0.2])
@pytest.mark.parametrize("build", [byte_tokenizer, tokenizers.without_bos, tokenizers.with_both])
def test_what_is_masked(build, rate):
    tokenizer = build()
    rows = random_rows(200, shortest=1, longest=60)
    formatter = InputFormatter(tokenizer, append_eos=True)
    batch = unimae(tokenizer, rows, p_mar=rate).make(0, 0, len(rows))
    hidden = 0
    for row, text in enumerate(slow.texts_of(batch)):
        formatted = formatter.format(rows[row])
        assert text["labels"] == formatted.ids
        assert text["labels"][-1] == tokenizer.eos_token_id
        assert [place for place, inside in enumerate(text["inside"]) if inside] == list(formatter.places(formatted))
        assert sum(text["inside"]) == len(rows[row])
        for own, original, inside in zip(text["input_ids"], text["labels"], text["inside"], strict=True):
            assert own == original or (inside and own == MASK)
            hidden += own == MASK
    assert hidden / sum(map(len, rows)) == pytest.approx(rate, abs=0.02)


def test_a_batch_depends_on_nothing_but_its_numbers(make):
    rows = random_rows(40, longest=50)
    whole = make(rows).make(2, 6, 12)
    for first, count in [(6, 12), (6, 1), (6, 3), (9, 4), (13, 5), (17, 1)]:
        assert_same_rows(whole, first - 6, make(rows).make(7, first, count))
    other = make(rows, seed=4).make(2, 6, 12)
    for name in ("input_ids", "sees"):
        assert (other[name] != whole[name]).any()
    again = make(rows[:1]).make(0, 0, 3)
    for name in ("input_ids", "sees"):
        assert len({str(row.tolist()) for row in again[name]}) == 3


def test_the_decoder_in_bfloat16_under_autocast():
    generator = torch.Generator().manual_seed(1)
    module, real = ReconstructionDecoder(8, 2, 10), torch.ones(3, 6).bool()
    h, embeddings = torch.randn(3, 8, generator=generator), torch.randn(3, 6, 8, generator=generator)
    mask = reconstruction_mask(real, 0.5, generator)
    plain = module(h, embeddings, real, mask)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(h.bfloat16(), embeddings.bfloat16(), real, mask)
    torch.testing.assert_close(found.float(), plain, rtol=0.05, atol=0.05)


def test_heads_divide_the_width():
    with pytest.raises(ConfigError, match="3 attention heads do not divide a width of 8"):
        ReconstructionDecoder(8, 3, 4)
