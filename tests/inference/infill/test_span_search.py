"""A span that grows in a cache is predicted as by explicit masks over the whole text, in every architecture."""

import pytest
import torch
from transformers import DynamicCache

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layer_state import CACHE
from gerund.errors import ConfigError, ModelError, UnsupportedModelError
from gerund.inference.infill.span_search import Context, SpanPass
from gerund.inference.likelihood import causal_runtime
from gerund.settings.plan import AttentionPlan
from tests.attention.reference import ReferenceModel
from tests.tiny import CONFIGS, VOCAB, byte_tokenizer, tiny

# Log-probabilities of 3 nats come from sums that each processor adds up in an order of its own.
ROUNDING = {"atol": 1e-5, "rtol": 1e-5}


def ids(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def context(left, length, right, seed=0):
    """Build a context whose gap is ``length`` tokens long."""
    return Context(ids(left, seed), ids(right, seed + 1), range(left + length, left + length + right))


def runtime_of(name="llama"):
    runtime = causal_runtime(tiny(name), byte_tokenizer())
    attach(runtime.model)
    return runtime


def slow(model, row, span, plan="hybrid"):
    """Predict each token of the span, and the next, from the whole text: eager attention, a mask written out.

    Places of the gap that are not written yet, and of later gaps, are padding that nobody sees.
    """
    left = len(row.left)
    behind = dict(zip(row.right_at, row.right, strict=True))
    whole = max([left + len(span), *(at + 1 for at in row.right_at)])
    written = dict(enumerate([*row.left, *span]))
    tokens = [behind.get(at, written.get(at, 0)) for at in range(whole)]
    real = [int(at in behind or at in written) for at in range(whole)]
    labels = [int(left <= at < left + len(span)) for at in range(whole)]
    batch = {
        "input_ids": torch.tensor([tokens]),
        "attention_mask": torch.tensor([real]),
        "position_ids": torch.arange(whole)[None],
    }
    found = ReferenceModel(model, AttentionPlan(plan)).logprobs(batch, torch.tensor([labels]))
    return found[0, left - 1 : left + len(span)]


def run(runtime, rows, spans, sees_right=True):
    """Write given spans, one token at a time, and return what was predicted at each step."""
    span_pass = SpanPass(runtime, rows, sees_right=sees_right)
    steps = [span_pass.logprobs_BV]
    for tokens in zip(*spans, strict=True):
        span_pass.advance(range(len(rows)), tokens)
        steps.append(span_pass.logprobs_BV)
    return torch.stack(steps, dim=1)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", CONFIGS)
def test_cached_equals_whole_texts_under_masks_that_are_written_out(name):
    # Windows in these models are 3 wide: most of the gap is farther than that from its context.
    rows = [context(5, 4, 6), context(3, 9, 2, seed=2), context(1, 4, 4, seed=4), context(6, 7, 0, seed=6)]
    rows.append(Context(ids(4, 8), ids(5, 9), (8, 9, 14, 15, 16)))  # room for a later gap
    spans = [ids(4, 20 + index) for index in range(len(rows))]
    found = run(runtime_of(name), rows, spans)
    for own, row, span in zip(found, rows, spans, strict=True):
        torch.testing.assert_close(own, slow(tiny(name), row, span), **ROUNDING)
    alone = run(runtime_of(name), rows[:1], spans[:1])  # without padding there may be no mask at all
    torch.testing.assert_close(alone[0], slow(tiny(name), rows[0], spans[0]), **ROUNDING)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "opt", "gpt2"])
def test_rows_are_dropped_doubled_and_reordered(name):
    rows = [context(5, 4, 3), context(2, 5, 4, seed=2), context(3, 6, 1, seed=4)]
    span_pass = SpanPass(runtime_of(name), rows, sees_right=True)
    spans = [[], [], []]
    for parents, tokens in [((0, 1, 1, 2), (5, 6, 7, 8)), ((3, 2, 0, 0), (9, 10, 11, 12)), ((1, 3), (13, 14))]:
        rows = [rows[parent] for parent in parents]
        spans = [[*spans[parent], token] for parent, token in zip(parents, tokens, strict=True)]
        span_pass.advance(parents, tokens)
        for own, row, span in zip(span_pass.logprobs_BV, rows, spans, strict=True):
            torch.testing.assert_close(own, slow(tiny(name), row, span)[-1], **ROUNDING)


@pytest.mark.sweep(quick=3, check=4)
@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_right_side_it_is_the_untouched_model(name):
    rows = [Context(ids(5, 0)), Context(ids(2, 1))]
    spans = [ids(5, 2), ids(5, 3)]
    found = run(runtime_of(name), rows, spans, sees_right=False)
    for own, row, span in zip(found, rows, spans, strict=True):
        torch.testing.assert_close(own, slow(tiny(name), row, span, "causal"), **ROUNDING)
        with torch.no_grad():
            plain = tiny(name)(torch.tensor([[*row.left, *span]]), use_cache=False).logits[0].log_softmax(-1)
        torch.testing.assert_close(own, plain[len(row.left) - 1 :], **ROUNDING)


def test_a_cache_that_lets_tokens_go_is_refused():
    runtime = runtime_of()
    span_pass = SpanPass(runtime, [context(4, 3, 5)], sees_right=True)
    span_pass.cache.crop(-3)
    with pytest.raises(UnsupportedModelError, match="sees 7 cached tokens where there are 10"):
        span_pass.advance([0], [5])


def test_a_plan_of_a_whole_text_still_refuses_a_cache():
    runtime = runtime_of()
    cache = DynamicCache()
    tokens = torch.tensor([ids(4, 0)])
    plan = AttentionPlan("bidir").resolve(4)
    runtime.model(tokens, use_cache=True, **{CACHE: cache}, attention_plan=BoundPlan(plan))
    with pytest.raises(ConfigError, match="cannot be combined with cached keys"):
        runtime.model(tokens[:, :1], use_cache=True, **{CACHE: cache}, attention_plan=BoundPlan(plan))


def test_a_model_without_positions_reads_the_left_side_only():
    runtime = causal_runtime(tiny("bloom"), byte_tokenizer())
    with pytest.raises(UnsupportedModelError, match=r"bloom model takes no position_ids.*take the method left-only"):
        SpanPass(runtime, [context(4, 3, 5)], sees_right=True)
    left, span = ids(4, 0), ids(3, 1)
    found = run(runtime, [Context(left)], [span], sees_right=False)[0]
    with torch.no_grad():
        plain = runtime.model(torch.tensor([[*left, *span]]), use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, plain[3:], **ROUNDING)


def test_a_model_that_gives_no_numbers_is_refused():
    runtime = runtime_of()
    pass_ = SpanPass(runtime, [context(4, 3, 5)], sees_right=True)
    with torch.no_grad():
        runtime.model.get_output_embeddings().weight[0] = float("nan")
    with pytest.raises(ModelError, match=r"logits are not numbers in torch.float32"):
        pass_.advance([0], [5])
