"""Log-probabilities equal those of whole logits on every architecture; texts are split and cut in the right places."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from gerund.attention import probe
from gerund.errors import ConfigError, ModelError, TextError, UnsupportedModelError
from gerund.inference import lm_head
from gerund.inference.likelihood import SpannedText, continuation_logprobs, sequence_logprobs, span_logprobs
from gerund.inference.lm_head import TokenHead
from gerund.language_model import LanguageModel
from gerund.settings.plan import AttentionPlan
from tests.attention.reference import ReferenceModel
from tests.ready_made import closed
from tests.tiny import CONFIGS, REFUSED, VOCAB, byte_tokenizer, tiny

# Each with its own way to change logits behind the head.
SCALED = [
    ("gemma2", {"final_logit_softcapping": 3.0}),
    ("granite", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.5}),
]
LENGTHS = (9, 2, 7, 5, 1)
FIRST = (1, 1, 4, 2, 1)


def sequences(lengths=LENGTHS, vocabulary=VOCAB):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def slow(model, ids, first):
    # The last token is only predicted, and needs no place in the context.
    logits = model(torch.tensor([ids[:-1] or ids])).logits[0].float().log_softmax(dim=-1)
    return np.array([logits[place - 1, ids[place]].item() for place in range(first, len(ids))], dtype=np.float32)


def model_and_tokenizer(name="llama", bos=True, **changes):
    tokenizer = byte_tokenizer(bos)
    return tiny(name, **{"vocab_size": len(tokenizer), **changes}), tokenizer


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name, changes", [*[(name, {}) for name in [*CONFIGS, *REFUSED]], *SCALED])
def test_every_token_scores_as_in_the_logits_of_its_sequence_alone(name, changes, side, monkeypatch):
    # Three rows of logits at once: the parts have to be put together again.
    monkeypatch.setattr(lm_head, "_LOGITS_AT_ONCE", 3 * VOCAB)
    model, tokenizer = tiny(name, **changes), byte_tokenizer()
    tokenizer.padding_side = side
    ids = sequences()
    found = sequence_logprobs(model, tokenizer, list(zip(ids, FIRST, strict=True)), batch_tokens=20)
    for own, row, first in zip(found, ids, FIRST, strict=True):
        assert own.dtype == np.float32
        np.testing.assert_allclose(own, slow(model, row, first), atol=1e-5)


def test_the_head_leaves_the_model_as_it_is():
    model, _ = model_and_tokenizer()
    modules, state = dict(model.named_modules()), {name: value.clone() for name, value in model.state_dict().items()}
    TokenHead(model).logprobs(torch.randn(2, 32), torch.tensor([4, 5]))
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Aside(LlamaForCausalLM):
    """Adds something to the logits that does not come out of the last hidden state."""

    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits + (0 if input_ids is None else input_ids[..., None])
        return output


class Hidden(LlamaForCausalLM):
    """Has no decoder where others have it."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids + 0, **kwargs)


@pytest.mark.parametrize("strange", [Aside, Hidden])
def test_a_head_that_needs_more_than_states_is_refused(strange):
    model, tokenizer = model_and_tokenizer()
    with pytest.raises(ModelError, match="this llama model computes its logits from more than the last hidden state"):
        sequence_logprobs(strange(model.config).eval(), tokenizer, [([1, 2, 3], 1)])


def test_half_precision_is_no_reason_to_refuse_a_head():
    model, tokenizer = model_and_tokenizer()
    [own] = sequence_logprobs(model.bfloat16(), tokenizer, [([1, 5, 6, 7], 1)])
    np.testing.assert_allclose(own, slow(model, [1, 5, 6, 7], 1), atol=0.1)


def test_the_last_token_needs_no_room_in_the_context():
    model, tokenizer = model_and_tokenizer()
    ids = sequences((65, 66), len(tokenizer))
    [own] = sequence_logprobs(model, tokenizer, [(ids[0], 60)])
    np.testing.assert_allclose(own, slow(model, ids[0], 60), atol=1e-5)
    with pytest.raises(TextError, match="sequence 1 has 66 tokens and the model's context ends at 64"):
        sequence_logprobs(model, tokenizer, [(ids[0], 1), (ids[1], 1)])


def test_nothing_precedes_the_first_token():
    with pytest.raises(TextError, match="sequence 0 is scored from its first token"):
        sequence_logprobs(*model_and_tokenizer(), [([1, 2], 0)])


def test_no_sequences_and_nothing_to_score():
    model, tokenizer = model_and_tokenizer()
    assert sequence_logprobs(model, tokenizer, []) == []
    assert [len(own) for own in sequence_logprobs(model, tokenizer, [([5, 6], 2), ([5], 1)])] == [0, 0]


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    "prefix, continuation, tokens",
    [
        ("He ran to", " them.", 3),  # " the" is a token
        ("He ran to ", "them.", 3),  # and goes whole with what follows
        ("He ran to t", "hem.", 3),  # so is the t
        ("He ran to", "  x", 3),
        ("na\u00ef", "ve", 2),
        ("na", "\u00efve", 4),  # two bytes
    ],
)
def test_a_token_on_the_border_belongs_to_the_continuation(prefix, continuation, tokens, bos):
    model, tokenizer = model_and_tokenizer(bos=bos)
    [found] = continuation_logprobs(model, tokenizer, [(prefix, continuation)], with_prefix=True)
    ids = tokenizer(prefix + continuation).input_ids
    expected = slow(model, ids, 1)
    border = len(ids) - len(found.continuation)
    # Decoded by itself, what lies before the border is a beginning of the prefix.
    assert prefix.startswith(tokenizer.decode(ids[:border], skip_special_tokens=True))
    assert len(found.continuation) == tokens
    np.testing.assert_allclose(np.concatenate([found.prefix, found.continuation]), expected, atol=1e-5)
    assert found.lost == 0
    [short] = continuation_logprobs(model, tokenizer, [(prefix, continuation)])
    assert len(short.prefix) == 0
    np.testing.assert_allclose(short.continuation, found.continuation, atol=1e-6)


def test_an_empty_prefix_starts_from_the_beginning_token():
    model, tokenizer = model_and_tokenizer(bos=True)
    [found] = continuation_logprobs(model, tokenizer, [("", "ran")], with_prefix=True)
    np.testing.assert_allclose(found.continuation, slow(model, tokenizer("ran").input_ids, 1), atol=1e-5)
    assert len(found.prefix) == 0
    # A tokenizer that knows the token without putting it in front.
    model, tokenizer = model_and_tokenizer(bos=False)
    [knows] = continuation_logprobs(model, tokenizer, [("", "ran")])
    np.testing.assert_allclose(knows.continuation, slow(model, [1, *tokenizer("ran").input_ids], 1), atol=1e-5)
    tokenizer.bos_token = None
    [lacks] = continuation_logprobs(model, tokenizer, [("", "ran")])
    np.testing.assert_allclose(lacks.continuation, slow(model, tokenizer("ran").input_ids, 1), atol=1e-5)
    assert len(lacks.continuation) == len(knows.continuation) - 1


def test_a_token_that_closes_every_text_is_not_scored():
    model, tokenizer = model_and_tokenizer(bos=True)
    [plain] = continuation_logprobs(model, tokenizer, [("He", " ran")])
    assert closed(tokenizer)("He").input_ids[-1] == 2
    [found] = continuation_logprobs(model, tokenizer, [("He", " ran")])
    np.testing.assert_allclose(found.continuation, plain.continuation, atol=1e-6)


@pytest.mark.parametrize("bos", [True, False])
def test_a_long_prefix_loses_its_left_end(bos):
    model, tokenizer = model_and_tokenizer(bos=bos)
    prefix, continuation = "abcdefgh" * 9, "xyz"
    [found] = continuation_logprobs(model, tokenizer, [(prefix, continuation)], with_prefix=True)
    ids = tokenizer(prefix + continuation, add_special_tokens=False).input_ids
    kept = [1, *ids[-64:]] if bos else ids[-65:]  # 64 tokens are read, and the last one is only predicted
    np.testing.assert_allclose(np.concatenate([found.prefix, found.continuation]), slow(model, kept, 1), atol=1e-5)
    assert (len(found.continuation), found.lost) == (3, 0)


@pytest.mark.parametrize("bos", [True, False])
def test_a_continuation_beyond_the_context_loses_its_right_end_with_a_count(bos):
    model, tokenizer = model_and_tokenizer(bos=bos)
    continuation = "abcdefgh" * 9
    [found] = continuation_logprobs(model, tokenizer, [("zz", continuation)], with_prefix=True)
    ids = tokenizer(continuation, add_special_tokens=False).input_ids[:64]
    start = 1 if bos else tokenizer("z").input_ids[0]  # without a beginning token one token of the prefix stays
    np.testing.assert_allclose(found.continuation, slow(model, [start, *ids], 1), atol=1e-5)
    assert len(found.continuation) + found.lost == 72
    assert found.lost == 8
    assert len(found.prefix) == 0


def test_bad_texts_are_refused():
    model, tokenizer = model_and_tokenizer()
    with pytest.raises(TextError, match="continuation 1 is empty"):
        continuation_logprobs(model, tokenizer, [("a", "b"), ("a", " ")])
    with pytest.raises(TextError, match="not valid Unicode"):
        continuation_logprobs(model, tokenizer, [("a", "b\ud800")])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_lm_eval_splits_the_same_texts_at_the_same_tokens():
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = model_and_tokenizer()
    theirs = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=1, max_length=64)
    for prefix, continuation in [
        ("He ran to", " them."),
        ("The other", " man"),
        ("A", " b"),
        ("na\u00efve", " \u00ef"),
    ]:
        context, rest = theirs._encode_pair(prefix, continuation)
        [found] = continuation_logprobs(model, tokenizer, [(prefix, continuation)])
        np.testing.assert_allclose(found.continuation, slow(model, context + rest, len(context)), atol=1e-5)


TEXTS = [
    SpannedText.between("He ran to", " the other", " side."),
    SpannedText("In the end a man and a cat ran.", ((3, 6), (11, 16), (23, 31))),
    SpannedText.between("", "Another", " man"),
    SpannedText.between("xyz", "w", ""),
]


def labels_of(tokenizer, text):
    """Say for each token which span it belongs to, character by character."""
    batch = tokenizer(text.text, return_offsets_mapping=True, return_special_tokens_mask=True)
    of_character = [0] * len(text.text)
    for number, (start, stop) in enumerate(text.spans, start=1):
        of_character[start:stop] = [number] * (stop - start)
    labels = []
    for (start, stop), special in zip(batch.offset_mapping, batch.special_tokens_mask, strict=True):
        labels.append(0 if special else max(of_character[start:stop], default=0))
    return batch.input_ids, labels


def slow_spans(name, text, plan, bos=True):
    """Score one text alone: eager attention, a mask that is written out, the whole vocabulary."""
    model, tokenizer = model_and_tokenizer(name, bos)
    ids, labels = labels_of(tokenizer, text)
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    span = torch.tensor([labels]) if plan == "hybrid" else None
    logprobs = ReferenceModel(model, AttentionPlan(plan)).logprobs(batch, span)[0]
    return [
        [logprobs[place - 1, ids[place]].item() for place, label in enumerate(labels) if label == number]
        for number in range(1, len(text.spans) + 1)
    ]


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CONFIGS)
def test_spans_score_as_under_masks_that_are_written_out(name, side):
    model, tokenizer = model_and_tokenizer(name)
    tokenizer.padding_side = side
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        found = span_logprobs(model, tokenizer, TEXTS, mode)
        for text, own in zip(TEXTS, found, strict=True):
            for logprobs, expected in zip(own, slow_spans(name, text, plan), strict=True):
                assert logprobs.dtype == np.float32
                np.testing.assert_allclose(logprobs, expected, atol=2e-5, err_msg=f"{mode}: {text}")


def test_small_batches_change_nothing():
    model, tokenizer = model_and_tokenizer(bos=False)
    texts = [TEXTS[0], TEXTS[3], TEXTS[1]]
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        for own, text in zip(span_logprobs(model, tokenizer, texts, mode, batch_tokens=1), texts, strict=True):
            for logprobs, expected in zip(own, slow_spans("llama", text, plan, bos=False), strict=True):
                np.testing.assert_allclose(logprobs, expected, atol=2e-5)


@pytest.mark.parametrize(
    "text, counts",
    [
        (SpannedText.between("He ran ", "the", " end"), [1]),  # the space before it is part of the token " the"
        (SpannedText.between("He ran t", "h", "e end"), [1]),  # so is all of "the"
        (SpannedText.between("He ran", " ", "the end"), None),
        (SpannedText.between("na", "\u00ef", "ve"), [2]),  # two bytes
        (SpannedText("a the b the c", ((2, 3), (9, 10))), [1, 1]),
    ],
)
def test_a_token_with_any_character_of_a_span_belongs_to_it(text, counts):
    model, tokenizer = model_and_tokenizer()
    if counts is None:
        with pytest.raises(TextError, match="span of characters 6 to 7 is empty"):
            span_logprobs(model, tokenizer, [text], "infill")
        return
    assert [len(own) for own in span_logprobs(model, tokenizer, [text], "infill")[0]] == counts


@pytest.mark.parametrize(
    "text, said",
    [
        (SpannedText("abc", ()), "text 1 has no span"),
        (SpannedText("abc", ((1, 1),)), "characters 1 to 1 is empty"),
        (SpannedText("abc", ((2, 4),)), "outside the text of 3 characters"),
        (SpannedText("abcd", ((2, 3), (1, 2))), "begins before an earlier one ends"),
        (SpannedText("abcd", ((1, 2), (2, 3))), "spans 1 and 2 touch; make them one"),
        (SpannedText("a thex", ((1, 3), (4, 5))), "spans 1 and 2 touch"),  # both in " the"
        (SpannedText("x" * 70, ((1, 2),)), "has 71 tokens and the model's context ends at 64"),
        (SpannedText("ab\ud800", ((1, 2),)), "not valid Unicode"),
    ],
)
def test_impossible_spans_are_refused(text, said):
    with pytest.raises(TextError, match=said):
        span_logprobs(*model_and_tokenizer(), [TEXTS[0], text], "causal")


@pytest.mark.parametrize("mode", ["infill", "causal"])
def test_without_a_beginning_token_a_text_cannot_begin_with_a_span(mode):
    with pytest.raises(TextError, match="text 0 begins with a span, and this tokenizer puts no beginning token"):
        span_logprobs(*model_and_tokenizer(bos=False), [TEXTS[2]], mode)


def test_an_unknown_reading_is_refused():
    with pytest.raises(ConfigError, match="unknown mode of span log-probabilities 'both'; valid are: infill, causal"):
        span_logprobs(*model_and_tokenizer(), TEXTS, "both")


def test_no_texts():
    assert span_logprobs(*model_and_tokenizer(), [], "infill") == []


def test_a_model_that_no_plan_reaches_reads_spans_causally_only():
    model, tokenizer = model_and_tokenizer("gpt_neo")
    for _ in range(2):  # that it was refused once is no proof
        with pytest.raises(UnsupportedModelError, match="gpt_neo"):
            span_logprobs(model, tokenizer, TEXTS, "infill")
    assert len(span_logprobs(model, tokenizer, TEXTS, "causal")[1]) == 3


def test_a_model_is_verified_once(monkeypatch):
    model, tokenizer = model_and_tokenizer()
    verified = []
    monkeypatch.setattr(probe, "verify", lambda *given: verified.append(given))
    span_logprobs(model, tokenizer, TEXTS, "infill")
    span_logprobs(model, tokenizer, TEXTS, "infill")
    assert len(verified) == 1


def test_the_verb():
    lm = LanguageModel(*model_and_tokenizer())
    for mode, plan in [("infill", "hybrid"), ("causal", "causal")]:
        [expected] = slow_spans("llama", TEXTS[0], plan)
        found = lm.span_logprobs("He ran to", " the other", " side.", mode=mode)
        np.testing.assert_allclose(found, expected, atol=2e-5)
    np.testing.assert_allclose(lm.span_logprobs("a", "b", "c"), lm.span_logprobs("a", "b", "c", mode="infill"))
    with pytest.raises(TextError, match="span of characters 1 to 1 is empty"):
        lm.span_logprobs("a", "", "c")
    with pytest.raises(TextError, match="text 1 is not a string"):
        lm.span_logprobs("a", None, "c")
