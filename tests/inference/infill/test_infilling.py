"""Gaps are filled as a slow loop over whole texts fills them; the best length wins; the text around stays."""

import itertools
import math

import numpy as np
import pytest
import torch

import gerund
from gerund import EncoderConfig, Sampling
from gerund.errors import TextError
from gerund.inference.infill import infilling, span_search
from gerund.inference.infill.blanks import BlankedText
from gerund.inference.infill.infilling import Search, fill
from gerund.language_model import LanguageModel
from gerund.settings.plan import AttentionPlan
from tests.attention.reference import ReferenceModel
from tests.inference.infill.test_span_pass import log_softmax
from tests.tiny import byte_tokenizer, tiny

TEXT = "In the end [blank] and ran."
LEFT, RIGHT = "In the end", " and ran."
SPECIAL = [0, 1, 2]
# Behind a word and a space these would go on the word. (The tokenizer has a token a byte.)
GROWING = [index for index in range(3, len(byte_tokenizer())) if byte_tokenizer().decode([index])[:1].isalnum()]
ARCHITECTURES = ["llama", "mistral", "gemma2", "gpt2", "opt", "gpt_oss"]


def build(name="llama", bos=True, **changes):
    tokenizer = byte_tokenizer(bos)
    return LanguageModel(tiny(name, **{"vocab_size": len(tokenizer), **changes}), tokenizer, EncoderConfig())


def not_here(span):
    """Return the tokens that cannot follow what is written of a span."""
    return SPECIAL if len(span) else [*SPECIAL, *GROWING]


def left_and_right(lm, left=LEFT, right=RIGHT):
    """Tokenise with the byte-level tokenizer, which reads a text alone as it does inside another."""
    return lm.tokenizer(left).input_ids, lm.tokenizer(right, add_special_tokens=False).input_ids


class Slow:
    """Predicts from whole texts, one text and one token at a time, in eager attention."""

    def __init__(self, name="llama"):
        self.model = tiny(name, vocab_size=len(byte_tokenizer()))

    @torch.no_grad()
    def hybrid(self, left, span, right, length):
        """Return what follows ``span``, log-probabilities of the whole vocabulary."""
        open_ = length - len(span)
        ids = [*left, *span, *[0] * open_, *right]
        real = [1] * (len(left) + len(span)) + [0] * open_ + [1] * len(right)
        label = [0] * len(left) + [1] * length + [0] * len(right)
        return self._run(ids, real, label, "hybrid")[len(left) + len(span) - 1]

    def causal(self, ids):
        return self._run(ids, [1] * len(ids), [0] * len(ids), "causal")

    @torch.no_grad()
    def _run(self, ids, real, label, plan):
        batch = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.tensor([real]),
            "position_ids": torch.arange(len(ids))[None],
        }
        states = ReferenceModel(self.model, AttentionPlan(plan)).hidden_states(batch, torch.tensor([label]))
        return log_softmax(self.model, states)[0]

    def beams(self, left, right, length, beams):
        """Return the spans a beam search ends with and their log-probabilities, best first."""
        kept = [((), 0.0)]
        for _ in range(length):
            options = []
            for span, total in kept:
                follow = self.hybrid(left, span, right, length)
                banned = not_here(span)
                options += [((*span, t), total + float(follow[t])) for t in range(len(follow)) if t not in banned]
            kept = sorted(options, key=lambda option: -option[1])[:beams]
        return kept

    def score(self, left, span, right, logprob):
        """Spell the rule by which fillings are compared."""
        return (logprob + self.behind(left, span, right)) / (len(span) + len(right[:16]))

    def behind(self, left, span, right):
        """Say how well the right side follows: what decides between lengths."""
        following = right[:16]
        logprobs = self.causal([*left, *span, *following])
        places = range(len(left) + len(span), len(left) + len(span) + len(following))
        return sum(float(logprobs[place - 1, token]) for place, token in zip(places, following, strict=True))

    def best(self, left, right, lengths, beams=1):
        chosen = []
        for length in lengths:
            options = [
                (self.score(left, span, right, logprob), list(span))
                for span, logprob in self.beams(left, right, length, beams)
            ]
            score, span = max(options)
            chosen.append((self.behind(left, span, right) if right else score, score, span))
        return max(chosen)[1:]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_and_beams_equal_a_slow_search_over_whole_texts(name):
    lm, slow = build(name), Slow(name)
    left, right = left_and_right(lm)
    for beams in (1, 3):
        score, span = slow.best(left, right, [2, 4], beams)
        result = lm.infill(TEXT, lengths=[4, 2], beams=beams)
        assert result.token_ids == [span]
        assert result.scores == pytest.approx([score], abs=1e-5)
        assert result.lengths == [len(span)]


@pytest.mark.slow
def test_a_gap_of_each_length_is_filled_as_if_alone():
    lm, slow = build("mistral"), Slow("mistral")
    left, right = left_and_right(lm)
    lengths = [1, 2, 3, 5, 7]
    for settings in ({}, {"beams": 3}, {"sampling": Sampling(temperature=1.0, seed=3), "samples": 2}):
        alone = [lm.infill(TEXT, lengths=length, **settings) for length in lengths]
        together = lm.infill(TEXT, lengths=lengths, **settings)
        best = max(alone, key=lambda one: slow.behind(left, one.token_ids[0], right))
        assert together.scores[0] == pytest.approx(best.scores[0], abs=1e-5)
        assert together.token_ids == best.token_ids


def test_beams_find_what_is_at_least_as_probable_as_greedy():
    lm, slow = build(), Slow()
    left, right = left_and_right(lm)
    found = {beams: slow.beams(left, right, 3, beams)[0][1] for beams in (1, 8)}
    assert found[8] >= found[1]
    search = Search([3], Sampling(), beams=8)
    [paths] = [written_paths(lm, search)]
    expected = slow.beams(left, right, 3, 8)
    assert [path.tokens for path in paths] == [span for span, _ in expected]
    np.testing.assert_allclose([path.logprob for path in paths], [total for _, total in expected], atol=1e-5)


def written_paths(lm, search, monkeypatch=None):
    """Return every span that is written for the one gap of TEXT."""
    found = []
    own = infilling.write

    def write(*given, **settings):
        found.extend(own(*given, **settings))
        return found

    infilling.write = write
    try:
        fill(lm.model, lm.tokenizer, BlankedText.of(TEXT, "[blank]"), search)
    finally:
        infilling.write = own
    return found


@pytest.mark.slow
def test_the_score_of_a_span_is_that_of_span_logprobs_and_of_what_follows():
    lm = gerund.load(dtype="float32")
    result = lm.infill("The old man [blank] and went home.", lengths=5)
    [span] = result.spans
    own = lm.span_logprobs("The old man", span, " and went home.")
    following = lm.tokenizer(" and went home.", add_special_tokens=False).input_ids
    ids = lm.tokenizer(result.text).input_ids
    assert ids[-len(following) - 5 :] == [*result.token_ids[0], *following]  # read again, it is the same tokens
    with torch.no_grad():
        logprobs = lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    after = sum(float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - len(following), len(ids)))
    assert result.scores[0] == pytest.approx((own.sum() + after) / (5 + len(following)), abs=1e-5)


def test_only_the_first_tokens_behind_a_gap_are_scored():
    lm = build()
    a, b = (lm.infill(f"He ran [blank] {'x' * 15}{end}", lengths=3, method="left-only").scores for end in "yz")
    assert a == b


@pytest.mark.slow
def test_draws_of_one_token_follow_the_exact_distribution():
    lm, slow = build(), Slow()
    left, right = left_and_right(lm)
    n = 2000
    for sampling in (Sampling(temperature=2.0, seed=5), Sampling(temperature=1.5, top_k=6, seed=6)):
        logits = slow.hybrid(left, (), right, 1)
        logits[not_here(())] = float("-inf")
        logits = logits / sampling.temperature
        if sampling.top_k:
            logits[logits < logits.topk(sampling.top_k).values[-1]] = float("-inf")
        expected = logits.softmax(-1).numpy()
        drawn = [path.tokens[0] for path in written_paths(lm, Search([1], sampling, samples=n))]
        share = np.bincount(drawn, minlength=len(expected)) / n
        assert np.abs(share - expected).max() < 4 * math.sqrt(0.25 / n)
        assert (share[expected == 0] == 0).all()


def test_draws_are_repeatable_and_do_not_depend_on_what_else_is_drawn(monkeypatch):
    lm = build()

    def spans(lengths, samples, seed=7, temperature=1.0):
        paths = written_paths(lm, Search(lengths, Sampling(temperature=temperature, seed=seed), samples=samples))
        return {(path.length, path.sample): path.tokens for path in paths}

    many = spans([2, 3, 6], 4)
    assert len(many) == 12
    assert len(set(many.values())) > 9
    assert many == spans([2, 3, 6], 4)
    for key, tokens in spans([3], 2).items():
        assert many[key] == tokens
    assert many != spans([2, 3, 6], 4, seed=8)
    assert spans([6], 3, seed=None) != spans([6], 3, seed=None)
    monkeypatch.setattr(span_search, "_TOKENS_AT_ONCE", 1)  # one length at a time
    assert many == spans([2, 3, 6], 4)


def test_the_global_random_state_is_left_alone():
    lm = build()
    before = torch.get_rng_state()
    lm.infill(TEXT, lengths=3, sampling=Sampling(temperature=1.0))
    assert torch.equal(before, torch.get_rng_state())


def test_gaps_of_one_text_are_drawn_apart():
    lm = build()
    with torch.no_grad():  # a model that always predicts the same
        lm.model.get_output_embeddings().weight.zero_()
    result = lm.infill("a [blank] b [blank] c", lengths=6, sampling=Sampling(temperature=1.0, seed=1))
    assert result.token_ids[0] != result.token_ids[1]


def test_several_gaps_are_filled_from_left_to_right_with_room_for_later_ones():
    lm, slow = build("mistral"), Slow("mistral")
    result = lm.infill("He ran [blank] the end [blank] a man.", lengths=[3])
    left = lm.tokenizer("He ran").input_ids
    middle, last = (lm.tokenizer(text, add_special_tokens=False).input_ids for text in (" the end", " a man."))

    def predicted(left, span, open_, behind, real_behind):
        ids = [*left, *span, *[0] * open_, *behind]
        real = [1] * (len(left) + len(span)) + [0] * open_ + real_behind
        label = [0] * len(left) + [1] * (len(span) + open_) + [0] * len(behind)
        follow = slow._run(ids, real, label, "hybrid")[len(left) + len(span) - 1]
        follow[not_here(span)] = float("-inf")
        return int(follow.argmax())

    span = []
    for step in range(3):
        behind = [*middle, 0, 0, 0, *last]
        span.append(predicted(left, span, 3 - step, behind, [1] * len(middle) + [0] * 3 + [1] * len(last)))
    assert result.token_ids[0] == span
    left = [*left, *span, *middle]
    span = []
    for step in range(3):
        span.append(predicted(left, span, 3 - step, last, [1] * len(last)))
    assert result.token_ids[1] == span
    assert result.text == f"He ran{result.spans[0]} the end{result.spans[1]} a man."


def test_the_score_of_a_gap_ends_at_the_next_gap():
    lm = build()
    a, b = (
        lm.infill(f"He ran [blank] th [blank] {end}", lengths=2, method="left-only").scores[0] for end in ("x", "the")
    )
    assert a == b


def test_long_gaps_are_filled_in_chunks_that_become_context():
    lm, slow = build("mistral"), Slow("mistral")
    left, right = left_and_right(lm)
    text = BlankedText.of(TEXT, "[blank]")
    result = fill(lm.model, lm.tokenizer, text, Search([7, 8], Sampling(), chunk=3))
    options = []
    for length in (7, 8):
        span, total = [], 0.0
        for place in range(length):
            begun = span[: place // 3 * 3]  # what was written before is context now
            follow = slow.hybrid([*left, *begun], span[len(begun) :], right, length - len(begun))
            follow[not_here(span)] = float("-inf")
            span.append(int(follow.argmax()))
            total += float(follow.max())
        options.append((slow.behind(left, span, right), slow.score(left, span, right, total), span))
    _, score, span = max(options)
    assert result.token_ids == [span]
    assert result.scores == pytest.approx([score], abs=1e-5)
    whole = fill(lm.model, lm.tokenizer, text, Search([7, 8], Sampling()))
    assert whole.scores != result.scores


@pytest.mark.parametrize("settings", [{"beams": 3}, {"sampling": Sampling(temperature=1.0, seed=2), "samples": 3}])
def test_beams_and_draws_go_on_over_chunks(settings):
    lm = build()
    sampling = settings.get("sampling", Sampling())
    search = Search([4, 7], sampling, settings.get("beams", 1), settings.get("samples", 1), chunk=3)
    paths = written_paths(lm, search)
    assert [(path.length, path.sample) for path in paths] == list(itertools.product([4, 7], range(3)))
    slow = Slow()
    left, right = left_and_right(lm)
    for path in paths:
        assert len(path.tokens) == path.length
        total = 0.0
        for place, token in enumerate(path.tokens):
            begun = path.tokens[: place // 3 * 3]
            follow = slow.hybrid([*left, *begun], path.tokens[len(begun) : place], right, path.length - len(begun))
            total += float(follow[token])
        assert path.logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.slow
def test_chunks_are_those_of_the_paper():
    lm = build(max_position_embeddings=128)
    lm.tokenizer.model_max_length = 128
    text = BlankedText.of(TEXT, "[blank]")
    by_default = lm.infill(TEXT, lengths=34)
    assert by_default == fill(lm.model, lm.tokenizer, text, Search([34], Sampling(), chunk=32))
    assert by_default != fill(lm.model, lm.tokenizer, text, Search([34], Sampling(), chunk=34))


def test_no_special_token_is_ever_written():
    lm = build(vocab_size=300)  # the tokenizer has fewer
    with torch.no_grad():
        head = lm.model.get_output_embeddings().weight
        head[[*SPECIAL, *range(len(lm.tokenizer), 300)]] *= 50
    lm.model.generation_config.eos_token_id = [2, 40]
    banned = {*SPECIAL, 40, *range(len(lm.tokenizer), 300)}
    for settings in ({}, {"beams": 2}, {"sampling": Sampling(temperature=3.0, seed=1)}, {"method": "left-only"}):
        [ids] = lm.infill(TEXT, lengths=12, **settings).token_ids
        assert not banned & set(ids)


@pytest.mark.parametrize("settings", [{}, {"beams": 2}, {"method": "left-only"}])
def test_no_filling_grows_together_with_the_word_before_it(settings):
    lm = build()
    letters = lm.tokenizer("abcdefghij", add_special_tokens=False).input_ids
    with torch.no_grad():
        lm.model.get_output_embeddings().weight[letters] *= 50

    def begins(text):
        return lm.infill(text, lengths=4, **settings).spans[0][:1]

    assert not begins("In the end [blank] and ran.").isalnum()
    # With no space before the gap, or no word, anything may stand there.
    assert begins("In the end[blank] and ran.").isalnum()
    assert begins("In the end. [blank] and ran.").isalnum()


def test_a_space_may_begin_a_filling_behind_a_word():
    lm = build()
    head = lm.model.get_output_embeddings().weight
    letters, space = (lm.tokenizer(text, add_special_tokens=False).input_ids for text in ("abcdefghij", " "))
    with torch.no_grad():
        head[letters] *= 50
        [best] = lm.infill("In the end[blank] and ran.", lengths=1).token_ids
        head[space] = 0.999 * head[best]  # all but as likely as the letter that is left out
    assert lm.infill(TEXT, lengths=1).token_ids == [space]


@pytest.mark.slow
def test_more_beams_than_there_are_tokens():
    lm = build()
    result = lm.infill(TEXT, lengths=1, beams=1000)
    assert len(result.token_ids[0]) == 1
    slow = Slow()
    left, right = left_and_right(lm)
    assert result.scores[0] == pytest.approx(slow.best(left, right, [1], beams=1000)[0], abs=1e-5)


def test_a_gap_at_the_end_sees_the_left_side_both_ways():
    lm, slow = build(), Slow()
    left, _ = left_and_right(lm)
    result = lm.infill("In the end [blank]", lengths=3)
    [(span, total)] = slow.beams(left, [], 3, 1)
    assert result.token_ids == [list(span)]
    assert result.scores == pytest.approx([total / 3], abs=1e-5)


def test_several_texts():
    lm = build()
    texts = [TEXT, "He ran [blank] the end"]
    assert lm.infill(texts, lengths=2) == [lm.infill(one, lengths=2) for one in texts]
    assert lm.infill([], lengths=2) == []
    with pytest.raises(TextError, match=r"^text 1 cannot be filled: ") as caught:
        lm.infill([TEXT, "no gap"], lengths=2)
    assert caught.value.index == 1
