"""The verb: what stays of the text, which methods there are, the adapter's part, and what is refused."""

import itertools

import numpy as np
import pytest

import gerund
from gerund import ConfigError, EncoderConfig, Infill, Sampling, TextError, UnsupportedModelError
from gerund.inference.infill import prompts as infill_prompts
from gerund.language_model import LanguageModel
from gerund.settings.encoder import INFILL_METHODS
from gerund.settings.plan import AttentionPlan
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.inference.infill.test_infilling import LEFT, RIGHT, TEXT, Slow, build, left_and_right
from tests.tiny import byte_tokenizer, tiny


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
    with pytest.raises(TextError, match=r"53 tokens and a gap of 12 more, .* 64; set a length of at most 11"):
        lm.infill(text, lengths=[1, 12])
    with pytest.raises(TextError, match=r"59 tokens and 2 gaps of 3 more, .* 64; set a length of at most 2"):
        lm.infill(f"{'x' * 54} [blank] ab [blank] c", lengths=3)
    with pytest.raises(TextError, match=r"63 tokens and 2 gaps of 3 more, .* 64; shorten it"):
        lm.infill(f"{'x' * 58} [blank] ab [blank] c", lengths=3)
    with pytest.raises(TextError, match=r"text before the first gap has 64 tokens|the text has"):
        lm.infill("x" * 63 + " [blank]")


@pytest.mark.slow
def test_the_adapter_takes_part_where_both_sides_are_seen_and_nowhere_else(tiny_folder, tmp_path):
    adapter = make_adapter(tiny_folder, tmp_path / "adapter", target_modules=["q_proj", "down_proj", "lm_head"])
    plain = gerund.load(tiny_folder)
    lm = gerund.load(tiny_folder, adapter=adapter)
    from gerund.models.adapters import merged_state

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


test_the_adapter_takes_part_where_both_sides_are_seen_and_nowhere_else.pytestmark = [
    pytest.mark.filterwarnings(warning) for warning in PEFT_WARNINGS
]


@pytest.mark.parametrize("method", infill_prompts.PROMPT_METHODS)
def test_prompting_methods_are_dispatched_to_and_scored_by_the_untouched_model(method, monkeypatch):
    lm = build()
    asked = []

    def answers(model, tokenizer, pieces, **settings):
        asked.append((model, tokenizer, list(pieces), settings))
        return ["the man ", ""]

    monkeypatch.setattr(infill_prompts, "fill", answers)
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


@pytest.mark.slow
def test_every_method_has_a_name(bundled):
    assert ("infill", "left-only", *infill_prompts.PROMPT_METHODS) == INFILL_METHODS
    for method in infill_prompts.PROMPT_METHODS:
        result = bundled.infill("The old man sat down. [blank] He went home.", method=method, max_tokens=8)
        assert result.text == f"The old man sat down.{result.spans[0]} He went home."


def test_an_empty_answer_at_the_end_of_a_text_scores_nothing(monkeypatch):
    monkeypatch.setattr(infill_prompts, "fill", lambda *given, **settings: [" "])
    result = build().infill("In [blank]", method="blank")
    assert (result.text, result.spans, result.token_ids, result.scores) == ("In", [""], [[]], [0.0])


@pytest.mark.parametrize(
    "given, kind, said",
    [
        ({"text": "no gap"}, TextError, r"has no \[blank\] to fill"),
        ({"text": " "}, TextError, "the text is empty"),
        ({"text": " [blank]\n"}, TextError, r"nothing but \[blank\]; give some text around it"),
        ({"text": "[blank][blank]"}, TextError, "nothing but"),
        ({"text": "a [blank] b [blank] [blank]"}, TextError, "blanks 2 and 3 have nothing between them"),
        ({"text": 3}, TextError, "is a string, not int"),
        ({"text": [["a [blank]"]]}, TextError, "is a string, not list"),
        ({"text": "a\udcff [blank]"}, TextError, "the text is not valid Unicode"),
        ({"blank": " "}, ConfigError, "a blank is written as some text, not ' '"),
        ({"blank": None}, ConfigError, "not None"),
        ({"max_tokens": 0}, ConfigError, "max_tokens is a whole number of at least 1, not 0"),
        ({"lengths": 0}, ConfigError, "a length is a whole number of at least 1, not 0"),
        ({"lengths": [3, -1]}, ConfigError, "not -1"),
        ({"lengths": True}, ConfigError, "not True"),
        ({"lengths": 2.5}, ConfigError, "lengths are one or several whole numbers, not 2.5"),
        ({"lengths": "3"}, ConfigError, "not '3'"),
        ({"lengths": []}, ConfigError, r"not \[\]"),
        ({"beams": -1}, ConfigError, "beams is a whole number of at least 1, not -1"),
        ({"beams": 2.0}, ConfigError, "beams is a whole number"),
        ({"samples": 0}, ConfigError, "samples is a whole number of at least 1"),
        ({"samples": 2}, ConfigError, "samples=2 would all be the same span without a temperature"),
        ({"beams": 2, "sampling": Sampling(temperature=1.0)}, ConfigError, "give one of them"),
        ({"method": "magic"}, ConfigError, "unknown way to infill 'magic'; valid are: infill, left-only, blank"),
        ({"shots": 5}, ConfigError, "shots=5 belongs to the methods that prompt, not to 'infill'"),
        ({"method": "left-only", "shots": 5}, ConfigError, "not to 'left-only'"),
        ({"method": "blank", "lengths": 3}, ConfigError, "'blank' writes until it stops"),
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
    with pytest.raises(TextError, match="the text before the first gap is empty and this model has no beginning token"):
        lm.infill("[blank] man", lengths=2)


def test_a_model_that_the_mask_does_not_reach_fills_from_the_left_only():
    lm = LanguageModel(
        tiny("gpt_neo", vocab_size=len(byte_tokenizer())), byte_tokenizer(), EncoderConfig(AttentionPlan("causal"))
    )
    with pytest.raises(UnsupportedModelError, match="gpt_neo"):
        lm.infill(TEXT, lengths=2)
    assert lm.infill(TEXT, lengths=2, method="left-only").lengths == [2]


def test_a_slow_tokenizer_is_refused(monkeypatch):
    lm = build()
    monkeypatch.setattr(type(lm.tokenizer), "is_fast", False)
    with pytest.raises(gerund.ModelError, match="infilling needs a fast tokenizer"):
        lm.infill(TEXT, lengths=2)


@pytest.mark.slow
def test_the_embedded_default_fills_a_story(bundled):
    text = "The old man looked at [blank] and went home. His wife [blank] at the door.\n"
    for settings in ({}, {"beams": 2}, {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=1), "samples": 2}):
        result = bundled.infill(text, max_tokens=6, **settings)
        assert (
            result.text
            == f"The old man looked at{result.spans[0]} and went home. His wife{result.spans[1]} at the door.\n"
        )
        assert result == bundled.infill(text, max_tokens=6, **settings)
        assert [len(ids) for ids in result.token_ids] == result.lengths
        assert all(1 <= length <= 6 for length in result.lengths)
        assert all(score < 0 for score in result.scores)
