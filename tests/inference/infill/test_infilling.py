"""Gaps are filled as a slow loop over whole texts fills them; the best length wins; the text around stays."""

import itertools
import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import gerund
from gerund import ConfigError, Infill, Sampling, TextError, UnsupportedModelError
from gerund.inference.infill import infilling, prompting, span_search
from gerund.inference.infill.infilling import BlankedText, Search, fill
from gerund.inference.infill.span_search import Context
from gerund.inference.text_ids import ids_inside
from gerund.models.adapters import merged_state
from gerund.models.sources import find
from gerund.settings.plan import AttentionPlan
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.inference.infill.test_span_search import slow as predicted
from tests.tiny import byte_tokenizer, tiny, tiny_lm

TEXT = "In the end [blank] and ran."
LEFT, RIGHT = "In the end", " and ran."
SPECIAL = [0, 1, 2]
# Behind a word and a space these would go on the word. (The tokenizer has a token a byte.)
GROWING = [index for index in range(3, len(byte_tokenizer())) if byte_tokenizer().decode([index])[:1].isalnum()]
ARCHITECTURES = ["llama", "mistral", "gemma2", "gpt2", "opt", "gpt_oss"]


def build(name="llama", bos=True, **changes):
    return tiny_lm(name, byte_tokenizer(bos), changes=changes)


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

    def hybrid(self, left, span, right, length):
        """Return what follows ``span``, log-probabilities of the whole vocabulary."""
        behind = len(left) + length
        return predicted(self.model, Context(left, right, range(behind, behind + len(right))), span)[-1]

    @torch.no_grad()
    def causal(self, ids):
        return self.model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

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


def written_paths(lm, search):
    """Return every span that is written for the one gap of TEXT."""
    found = []
    own = infilling.write

    def write(*given, **settings):
        found.extend(own(*given, **settings))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infilling, "write", write)
        fill(lm.model, lm.tokenizer, BlankedText.of(TEXT, "[blank]"), search)
    return found


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
    # Behind the first gap there is room for the second one.
    at = [*range(len(middle)), *range(len(middle) + 3, len(middle) + 3 + len(last))]
    for written, right, right_at in ((result.token_ids[0], [*middle, *last], at), (result.token_ids[1], last, None)):
        behind = [len(left) + 3 + place for place in right_at or range(len(right))]
        follow = predicted(slow.model, Context(left, right, behind), written)
        for step, token in enumerate(written):
            follow[step, not_here(written[:step])] = float("-inf")
            assert token == int(follow[step].argmax())
        left = [*left, *written, *middle]
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


def written_left_only(slow, left, length, end=None):
    """Write the most probable span by the causal model, one whole text at a time; an end before ``length`` ends it."""
    span, logprobs = [], []
    while len(span) < length:
        follow = slow.causal([*left, *span])[-1]
        banned = [token for token in not_here(span) if token != end or not span]
        follow[banned] = float("-inf")
        token = int(follow.argmax())
        logprobs.append(float(follow.max()))
        if token == end:
            break
        span.append(token)
    return span, logprobs


def test_left_only_continues_the_left_side_causally():
    lm, slow = build(), Slow()
    left, right = left_and_right(lm)
    for length in (2, 5):
        span, logprobs = written_left_only(slow, left, length)
        result = lm.infill(TEXT, lengths=length, method="left-only")
        assert result.token_ids == [span]
        assert result.scores == pytest.approx([slow.score(left, span, right, sum(logprobs))], abs=1e-5)


BEHIND = [" and ran.", " xyz", ". It was late.", " the end of the day came soon", "!"]


@pytest.mark.sweep(quick=0, check=3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"lengths": [2, 5, 9]},
        {"beams": 3, "max_tokens": 6},
        {"beams": 3, "lengths": [2, 3]},
        {"sampling": Sampling(temperature=1.5, seed=3), "samples": 4, "lengths": [1, 4]},
        {"sampling": Sampling(temperature=1.5, seed=3), "samples": 4},
    ],
)
def test_the_text_behind_a_gap_chooses_nothing_for_left_only(settings):
    lm = build()
    found = {
        tuple(lm.infill(f"In the end [blank]{end}", method="left-only", **settings).token_ids[0]) for end in BEHIND
    }
    assert len(found) == 1
    assert len({tuple(lm.infill(f"In the end [blank]{end}", **settings).token_ids[0]) for end in BEHIND}) > 1


@pytest.mark.slow
def test_left_only_writes_until_the_model_ends_its_text():
    lm, slow = build(), Slow()
    left, _ = left_and_right(lm)
    whole, _ = written_left_only(slow, left, 32)
    assert lm.infill(TEXT, method="left-only").token_ids == [whole]
    assert lm.infill(TEXT, max_tokens=7, method="left-only").token_ids == [whole[:7]]
    # What it writes as its sixth token is from now on its end.
    end = next(token for token in whole[5:] if token not in whole[:5])
    lm.model.generation_config.eos_token_id = end
    span, logprobs = written_left_only(slow, left, 32, end)
    assert 0 < len(span) < 32
    result = lm.infill(TEXT, method="left-only")
    assert result.token_ids == [span]
    assert result.spans[0] == lm.tokenizer.decode(span)
    _, right = left_and_right(lm)
    assert result.scores == pytest.approx([slow.score(left, span, right, sum(logprobs[:-1]))], abs=1e-5)
    # Beams compare spans of several lengths by the mean of what was predicted, the end included.
    assert lm.infill(TEXT, method="left-only", beams=1).token_ids == result.token_ids
    assert all(end not in ids for ids in lm.infill(TEXT, method="left-only", beams=4).token_ids)


def test_among_lengths_left_only_takes_the_one_where_the_model_most_likely_ends():
    lm, slow = build(), Slow()
    left, _ = left_and_right(lm)
    for end in (40, 90, 130):
        lm.model.generation_config.eos_token_id = [end]
        banned = {end}
        spans = {}
        for length in (1, 3, 6):
            span = []
            for _ in range(length):
                follow = slow.causal([*left, *span])[-1]
                follow[[*not_here(span), *banned]] = float("-inf")
                span.append(int(follow.argmax()))
            ending = slow.causal([*left, *span])[-1]
            spans[sum(math.exp(float(ending[token])) for token in (end, lm.tokenizer.eos_token_id))] = span
        assert lm.infill(TEXT, lengths=[1, 3, 6], method="left-only").token_ids == [spans[max(spans)]]


@pytest.mark.parametrize("settings", [{}, {"lengths": [2, 9]}, {"lengths": 5}])
def test_the_text_behind_takes_no_room_of_left_only(settings):
    lm = build(max_position_embeddings=24)
    short, long = (
        lm.infill(f"In the end [blank]{end}", method="left-only", **settings) for end in (" xyz", " xyz" * 30)
    )
    assert short.token_ids == long.token_ids
    assert 1 <= len(short.token_ids[0]) <= 24 - len(left_and_right(lm)[0])
    with pytest.raises(TextError, match="the model's context ends at 24"):
        lm.infill(f"In the end [blank]{' xyz' * 30}", **settings)


def test_gaps_of_left_only_leave_room_for_those_behind_them():
    lm = build(max_position_embeddings=40)
    found = [lm.infill(f"In the [blank] end [blank]{end}", method="left-only") for end in (" xyz", " xyz" * 40)]
    assert found[0].token_ids == found[1].token_ids
    assert all(found[0].token_ids)


def test_left_only_is_not_filled_in_chunks():
    lm = build()
    text = BlankedText.of(TEXT, "[blank]")
    a, b = (
        fill(lm.model, lm.tokenizer, text, Search([9], Sampling(), sees_right=False, chunk=chunk)) for chunk in (2, 32)
    )
    assert a == b


def space_first_tokenizer(scheme="first"):
    """Build a tokenizer of the SentencePiece kind, which puts a space before whatever begins a text."""
    characters = ["<unk>", *"\u2581abcdefghijklmnopqrstuvwxyz.1\n)"]
    words = ["\u2581he", "he", "ab", "\u2581a", "\u2581\u2581"]
    vocabulary = {token: index for index, token in enumerate([*characters, *words])}
    merges = [("h", "e"), ("\u2581", "he"), ("a", "b"), ("\u2581", "a"), ("\u2581", "\u2581")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    "text, tokens",
    [
        (" he", ["\u2581he"]),
        ("he", ["he"]),
        (" he he", ["\u2581he", "\u2581he"]),
        ("b", ["b"]),  # "ab" is one token: the boundary has to be sought elsewhere
        (". he", [".", "\u2581he"]),
        ("\nhe", ["\n", "he"]),
        ("", []),
    ],
)
def test_a_piece_gets_no_space_that_it_does_not_have(scheme, text, tokens):
    tokenizer = space_first_tokenizer(scheme)
    assert tokenizer.convert_ids_to_tokens(ids_inside(tokenizer, text)) == tokens


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), byte_tokenizer(bos=False), AutoTokenizer.from_pretrained(find(None).where)]
)
@pytest.mark.parametrize(
    "text", [" the end", "the end", ".", "n", "\n\nHe", "\u00e9t\u00e9", "\U0001f600", "  two", "123"]
)
def test_byte_level_tokenizers_read_a_piece_as_they_read_it_alone(tokenizer, text):
    assert ids_inside(tokenizer, text) == tokenizer(text, add_special_tokens=False).input_ids


def test_a_piece_that_no_anchor_divides_is_read_alone():
    vocabulary = {token: index for index, token in enumerate(["<unk>", "b", "ab", ".b", "1b", "\nb", ")b", "a"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert ids_inside(tokenizer, "b") == [1]


def test_pieces_of_a_text():
    text = BlankedText.of(" a \t[blank]  b [blank]\n", "[blank]")
    assert text.pieces == (" a", "  b", "\n")
    assert text.gaps == 2
    assert text.joined([" x", " y"]) == " a x  b y\n"
    assert [text.trimmed(0, " x \n"), text.trimmed(1, " y ")] == [" x", " y"]
    assert BlankedText.of("un[blank]able", "[blank]").trimmed(0, "bear ") == "bear "
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(text.ids(tokenizer)[0]) == "  b"
    assert text.ids(tokenizer)[1] == []


@pytest.mark.parametrize(
    "text",
    ["  In the [blank]\n then", "[blank] man", "The end [blank]", "The end [blank] \n", "un[blank]able",
     "a\n[blank]\nb", "a\t[blank]\tb  [blank]  c\u00e9", "na\u00efve [blank] \U0001f600 end"],
)  # fmt: skip
def test_the_text_around_the_gaps_stays_as_it_is(text):
    lm = build()
    result = lm.infill(text, max_tokens=4)
    assert isinstance(result, Infill)
    first, *others = text.split("[blank]")
    kept = [first.rstrip(" \t"), *(piece.rstrip(" \t") for piece in others[:-1]), others[-1]]
    rest = result.text
    for piece, span in itertools.zip_longest(kept, result.spans):
        assert rest.startswith(piece)
        rest = rest.removeprefix(piece)
        if span is not None:
            assert rest.startswith(span)
            rest = rest.removeprefix(span)
    assert rest == ""
    for span, piece in zip(result.spans, others, strict=True):
        assert not (span[-1:].isspace() and piece[:1].isspace())


def test_another_mark_for_a_gap():
    lm = build()
    assert lm.infill("In the end ___ and ran.", blank="___", lengths=3) == lm.infill(TEXT, lengths=3)


def test_lengths_that_do_not_fit_are_left_out_unless_they_were_asked_for():
    lm = build()
    text = f"{'x' * 50} [blank] ab"  # with <s> 51 tokens, and 2 behind the gap
    assert lm.infill(text, max_tokens=32).lengths[0] <= 11
    assert lm.infill(text, lengths=11).lengths == [11]
    with pytest.raises(TextError, match=r"53 tokens and a span of 12 more, .* 64; set a length of at most 11"):
        lm.infill(text, lengths=[1, 12])
    with pytest.raises(TextError, match=r"59 tokens and 2 spans of 3 more, .* 64; set a length of at most 2"):
        lm.infill(f"{'x' * 54} [blank] ab [blank] c", lengths=3)
    with pytest.raises(TextError, match=r"63 tokens and 2 spans of 3 more, .* 64; shorten it"):
        lm.infill(f"{'x' * 58} [blank] ab [blank] c", lengths=3)
    with pytest.raises(TextError, match=r"text before the first span has 64 tokens|the text has"):
        lm.infill("x" * 63 + " [blank]")


@pytest.mark.slow
@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_the_adapter_takes_part_where_both_sides_are_seen_and_nowhere_else(tiny_folder, tmp_path):
    adapter = make_adapter(tiny_folder, tmp_path / "adapter", target_modules=["q_proj", "down_proj", "lm_head"])
    plain = gerund.load(tiny_folder)
    lm = gerund.load(tiny_folder, adapter=adapter)
    merged = gerund.load(tiny_folder)
    merged.model.load_state_dict(merged_state(lm.model, "encode"))
    for kind, other in (("infill", merged), ("causal", plain)):
        found = lm.span_logprobs("In the end", " a man", " ran.", mode=kind)
        np.testing.assert_allclose(found, other.span_logprobs("In the end", " a man", " ran.", mode=kind), atol=1e-5)
    assert np.abs(lm.span_logprobs("In", " a man", " ran.") - plain.span_logprobs("In", " a man", " ran.")).max() > 0.01
    assert lm.infill(TEXT, lengths=4, method="left-only") == plain.infill(TEXT, lengths=4, method="left-only")
    found, expected = lm.infill(TEXT, lengths=4), merged.infill(TEXT, lengths=4)
    assert found.token_ids == expected.token_ids
    assert found.token_ids != plain.infill(TEXT, lengths=4).token_ids
    # The span is scored with the adapter, what follows it without.
    own = lm.span_logprobs(LEFT, found.spans[0], RIGHT).sum()
    after = sum(plain.span_logprobs(LEFT + found.spans[0], RIGHT, "", mode="causal"))
    n = len(left_and_right(lm)[1])
    if len(lm.tokenizer(found.text).input_ids) == len(left_and_right(lm)[0]) + 4 + n:
        assert found.scores[0] == pytest.approx((own + after) / (4 + n), abs=1e-4)


@pytest.mark.parametrize("method", prompting.PROMPT_METHODS)
def test_prompting_methods_are_dispatched_to_and_scored_by_the_untouched_model(method, monkeypatch):
    lm = build()
    asked = []

    def answers(model, tokenizer, pieces, **settings):
        asked.append((model, tokenizer, list(pieces), settings))
        return ["the man ", ""]

    monkeypatch.setattr(prompting, "fill", answers)
    sampling = Sampling(temperature=1.0, seed=4)
    shots = 0 if method == "contextual" else 5  # which takes none
    result = lm.infill("In  [blank] end [blank] x", method=method, shots=shots, max_tokens=7, sampling=sampling)
    settings = {"method": method, "shots": shots, "max_tokens": 7, "sampling": sampling}
    assert asked == [(lm.model, lm.tokenizer, ["In  ", " end ", " x"], settings)]
    assert result.text == "In  the man end x"
    assert result.spans == ["  the man", ""]
    assert result.lengths == [len(ids) for ids in result.token_ids]
    assert lm.tokenizer.decode(result.token_ids[0]) == "  the man"
    slow = Slow()
    logprobs = slow.causal(ids := lm.tokenizer("In  the man end").input_ids)
    left = len(lm.tokenizer("In").input_ids)
    expected = [float(logprobs[place - 1, ids[place]]) for place in range(left, len(ids))]
    assert result.scores[0] == pytest.approx(np.mean(expected), abs=1e-5)
    logprobs = slow.causal(whole := lm.tokenizer("In  the man end x").input_ids)
    expected = [float(logprobs[place - 1, whole[place]]) for place in range(len(ids), len(whole))]
    assert result.scores[1] == pytest.approx(np.mean(expected), abs=1e-5)


def test_an_empty_answer_at_the_end_of_a_text_scores_nothing(monkeypatch):
    monkeypatch.setattr(prompting, "fill", lambda *given, **settings: [" "])
    result = build().infill("In [blank]", method="blank")
    assert (result.text, result.spans, result.token_ids, result.scores) == ("In", [""], [[]], [0.0])


@pytest.mark.parametrize(
    "given, kind, said",
    [
        ({"text": "no gap"}, TextError, r"has no \[blank\] to fill"),
        ({"text": " "}, TextError, "the text is empty"),
        ({"text": " [blank]\n"}, TextError, r"nothing but \[blank\]; give some text around it"),
        ({"text": "a [blank] b [blank] [blank]"}, TextError, "blanks 2 and 3 have nothing between them"),
        ({"text": 3}, TextError, "is a string, not int"),
        ({"text": "a\udcff [blank]"}, TextError, "the text is not valid Unicode"),
        ({"blank": " "}, ConfigError, "a blank is written as some text, not ' '"),
        ({"max_tokens": 0}, ConfigError, "max_tokens is a whole number of at least 1, not 0"),
        ({"lengths": 0}, ConfigError, "a length is a whole number of at least 1, not 0"),
        ({"lengths": 2.5}, ConfigError, "lengths are one or several whole numbers, not 2.5"),
        ({"lengths": []}, ConfigError, r"not \[\]"),
        ({"beams": -1}, ConfigError, "beams is a whole number of at least 1, not -1"),
        ({"samples": 0}, ConfigError, "samples is a whole number of at least 1"),
        ({"samples": 2}, ConfigError, "samples=2 would all be the same span without a temperature"),
        ({"beams": 2, "sampling": Sampling(temperature=1.0)}, ConfigError, "give one of them"),
        ({"method": "magic"}, ConfigError, "unknown way to infill 'magic'; valid are: infill, left-only, blank"),
        ({"shots": 5}, ConfigError, "shots=5 belongs to the methods that prompt, not to 'infill'"),
        ({"method": "blank", "lengths": 3}, ConfigError, "'blank' generates until it stops"),
        ({"method": "line-by-line", "beams": 2}, ConfigError, "takes no lengths, beams or samples"),
    ],
)  # fmt: skip
def test_bad_input(given, kind, said):
    lm = build()
    with pytest.raises(kind, match=said):
        lm.infill(**{"text": TEXT, "max_tokens": 4, **given})


def test_a_text_that_begins_with_a_gap_needs_a_beginning_token():
    assert build().infill("[blank] man", lengths=2).text.endswith(" man")
    lm = build(bos=False)
    assert lm.infill("[blank] man", lengths=2).text.endswith(" man")  # it has one, and only does not put it by itself
    lm.tokenizer.bos_token = None
    with pytest.raises(TextError, match="text before the first span is empty and this model has no beginning token"):
        lm.infill("[blank] man", lengths=2)


def test_a_model_that_the_mask_does_not_reach_fills_from_the_left_only():
    lm = tiny_lm("gpt_neo", attention=AttentionPlan("causal"))
    with pytest.raises(UnsupportedModelError, match="gpt_neo"):
        lm.infill(TEXT, lengths=2)
    assert lm.infill(TEXT, lengths=2, method="left-only").lengths == [2]


def test_a_slow_tokenizer_is_refused(monkeypatch):
    lm = build()
    monkeypatch.setattr(type(lm.tokenizer), "is_fast", False)
    with pytest.raises(gerund.ModelError, match="infilling needs a fast tokenizer"):
        lm.infill(TEXT, lengths=2)
