"""What may be asked of a continuation, each against something slow and obvious."""

import json
import re

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from gerund import ConfigError, Rerank, Sampling, TextError
from gerund.inference.generate.detokenizing import TextTail, token_bytes
from gerund.inference.generate.sampling import filters_of
from tests.tiny import byte_tokenizer, tiny_lm

PROMPTS = ["the cat", "x", "in another the thing"]
SAMPLED = Sampling(temperature=1.0, seed=6, logit_bias={2: -100})


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def by_hand(lm, prompt, count, change):
    """Write greedily, one whole pass of the model a token; ``change`` gets logits, all ids and the new ones."""
    ids = lm.tokenizer(prompt).input_ids if isinstance(prompt, str) else list(prompt)
    new = []
    for _ in range(count):
        with torch.no_grad():
            logits_V = lm.model(torch.tensor([[*ids, *new]]), use_cache=False).logits[0, -1]
        token = int(change(logits_V, [*ids, *new], new).argmax())
        if token == lm.tokenizer.eos_token_id:
            break
        new.append(token)
    return new


class TestPenalties:
    def test_repetition_is_that_of_transformers_and_padding_is_no_token(self, lm):
        processor = RepetitionPenaltyLogitsProcessor(1.7)
        found = lm.generate(PROMPTS, 9, Sampling(repetition_penalty=1.7))
        for prompt, one in zip(PROMPTS, found, strict=True):
            expected = by_hand(lm, prompt, 9, lambda v, ids, _: processor(torch.tensor([ids]), v[None])[0])
            assert one.token_ids == expected
        assert [one.token_ids for one in found] != [one.token_ids for one in lm.generate(PROMPTS, 9)]

    @pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
    def test_frequency_and_presence_count_what_was_written(self, lm, name):
        def change(logits_V, _, new):
            changed_V = logits_V.clone()
            for token in new if name == "frequency_penalty" else set(new):
                changed_V[token] -= 1.9
            return changed_V

        for prompt in PROMPTS:
            [one] = lm.generate(prompt, 12, Sampling(**{name: 1.9}))
            assert one.token_ids == by_hand(lm, prompt, 12, change)

    def test_bias(self, lm):
        [plain] = lm.generate("the cat", 4)
        wanted = (plain.token_ids[0] + 7) % len(lm.tokenizer)
        [forced] = lm.generate("the cat", 4, Sampling(logit_bias={wanted: 100}))
        assert forced.token_ids == [wanted] * 4
        banned = Sampling(logit_bias=dict.fromkeys(plain.token_ids, -100))
        assert not set(lm.generate("the cat", 9, banned)[0].token_ids) & set(plain.token_ids)

    def test_score_and_logprobs_are_the_untouched_models(self, lm):
        [one] = lm.generate("the cat", 6, Sampling(repetition_penalty=3.0, presence_penalty=2.0), logprobs=0)
        ids = lm.tokenizer("the cat").input_ids
        with torch.no_grad():
            logits = lm.model(torch.tensor([ids + one.token_ids])).logits[0].log_softmax(-1)
        full = [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(one.token_ids)]
        assert [each.logprob for each in one.logprobs] == pytest.approx(full, abs=1e-4)
        assert one.score == pytest.approx(sum(full) / len(full), abs=1e-4)

    def test_in_a_search_too(self, lm):
        sampling = Sampling(temperature=1.0, seed=2, presence_penalty=2.0, logit_bias={70: 4.0})
        [searched] = lm.generate("the cat", 8, sampling, rerank=Rerank(1, scorer="overlap"))
        [plain] = lm.generate("the cat", 8, sampling)
        assert searched.token_ids == plain.token_ids
        with pytest.raises(ConfigError, match="`repetition_penalty` can't be combined with `rerank`"):
            lm.generate("a", 2, Sampling(temperature=1.0, repetition_penalty=2.0), rerank=Rerank(2, scorer="overlap"))


@pytest.mark.parametrize("min_p", [0.05, 0.4, 1.0])
def test_min_p_is_that_of_transformers(min_p):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 3
    scores = logits
    for filter_ in filters_of(Sampling(temperature=0.7, top_p=0.95, min_p=min_p)):
        scores = filter_(scores)
    probabilities = (logits / 0.7).softmax(-1)
    kept = probabilities >= min_p * probabilities.max(-1, keepdim=True).values
    assert torch.equal(scores > -torch.inf, kept & (scores > -torch.inf))
    expected = MinPLogitsWarper(min_p)(None, logits / 0.7)
    alone = filters_of(Sampling(temperature=0.7, min_p=min_p))
    assert torch.equal(alone[1](alone[0](logits)), expected)


def test_logprobs_and_the_best_ones_are_those_of_a_full_forward(lm):
    for prompt, one in zip(PROMPTS, lm.generate(PROMPTS, 7, SAMPLED, logprobs=3), strict=True):
        ids = lm.tokenizer(prompt).input_ids
        with torch.no_grad():
            logits = lm.model(torch.tensor([ids + one.token_ids])).logits[0].log_softmax(-1)
        for place, each in enumerate(one.logprobs):
            own_V = logits[len(ids) - 1 + place]
            assert each.token_id == one.token_ids[place]
            assert each.logprob == pytest.approx(float(own_V[each.token_id]), abs=1e-4)
            best = own_V.topk(3)
            assert [top.token_id for top in each.top] == best.indices.tolist()
            assert [top.logprob for top in each.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert lm.generate("a", 2)[0].logprobs is None
    assert lm.generate("a", 2, logprobs=0)[0].logprobs[0].top == ()


def test_tokens_spell_their_bytes(lm):
    for text in ["the cat", "été €", "a\nb"]:
        ids = lm.tokenizer(text, add_special_tokens=False).input_ids
        assert b"".join(token_bytes(lm.tokenizer, one) for one in ids).decode() == text
    assert token_bytes(lm.tokenizer, 1) == b""


class TestStopStrings:
    def cut(self, text, stops):
        """Read letter by letter until a stop string is complete; the longest one where several are."""
        for end in range(1, len(text) + 1):
            ended = [one for one in stops if text[:end].endswith(one)]
            if ended:
                longest = max(ended, key=len)
                return text[: end - len(longest)], longest
        return text, None

    @pytest.mark.slow
    def test_wherever_tokens_end(self, lm):
        for prompt in PROMPTS:
            [whole] = lm.generate(prompt, 30, SAMPLED)
            text = whole.text
            assert len(text) > 12
            for stops in ([text[4:7]], [text[9:10], text[8:12]], [text[3:6], text[4:6], text[2:9]], ["never there"]):
                [one] = lm.generate(prompt, 30, SAMPLED, stop=stops)
                assert (one.text, one.stop) == self.cut(text, stops)
                assert one.finished == (one.stop is not None)
                stream = lm.stream(prompt, 30, SAMPLED, stop=stops)
                pieces = list(stream)
                assert "".join(pieces) == one.text
                assert stream.result == one

    def test_no_part_of_one_is_given_out(self):
        tokenizer = byte_tokenizer()
        ids = tokenizer("the ends, then END of é", add_special_tokens=False).input_ids
        for stops in (["END"], ["END of é!"], ["nd", "ends"], ["é"]):
            tail, given = TextTail(tokenizer, [], stops), ""
            expected, stop = self.cut("the ends, then END of é", stops)
            for token in ids:
                given += tail.put(token)
                assert expected.startswith(given)
            assert given + tail.end() == expected
            assert tail.stopped == stop

    def test_a_control_token_ends_it_by_its_name(self, lm):
        [pad] = lm.generate("the cat", 3, Sampling(logit_bias={0: 100}), stop="<pad>")
        assert (pad.text, pad.token_ids, pad.stop, pad.finished) == ("", [], "<pad>", True)

    @pytest.mark.parametrize("stop", ["", [""], 3, [3], {"a": 1}])
    def test_impossible_ones(self, lm, stop):
        with pytest.raises(ConfigError, match="stop"):
            lm.generate("a", 2, stop=stop)


class TestForms:
    @pytest.fixture(autouse=True)
    def library(self):
        pytest.importorskip("llguidance")

    def test_a_regex_matches_the_whole_text(self, lm):
        for one in lm.generate(PROMPTS, 20, SAMPLED, regex="[a-c]{2}-(x|yy)[0-9]"):
            assert re.fullmatch("[a-c]{2}-(x|yy)[0-9]", one.text)
            assert one.finished

    def test_a_choice_is_the_one_that_the_model_finds_most_probable_token_by_token(self, lm):
        choices = ['say "no"', "yes", "perhaps\n", "été"]
        ids = {text: lm.tokenizer(text, add_special_tokens=False).input_ids for text in choices}
        for one in lm.generate(PROMPTS, 20, choice=choices):
            assert one.text in choices
        [one] = lm.generate("the cat", 20, choice=choices)

        def only(logits_V, _, new):
            allowed = {own[len(new)] for own in ids.values() if own[: len(new)] == new and len(own) > len(new)}
            return torch.where(torch.isin(torch.arange(len(logits_V)), torch.tensor([*allowed])), logits_V, -torch.inf)

        assert one.token_ids == by_hand(lm, "the cat", len(ids[one.text]), only)

    @pytest.mark.slow
    def test_json_of_a_schema(self, lm):
        schema = {
            "type": "object", "required": ["a", "b"], "additionalProperties": False,
            "properties": {"a": {"enum": [1, 2]}, "b": {"type": "string", "maxLength": 3}},
        }  # fmt: skip
        for given in (schema, json.dumps(schema)):
            for one in lm.generate(PROMPTS, 60, Sampling(temperature=1.0, seed=4, top_k=40), schema=given):
                if one.finished:
                    assert json.loads(one.text)["a"] in (1, 2)
                else:
                    assert one.finish_reason == "length"
        assert any(one.finished for one in lm.generate(PROMPTS, 60, Sampling(1.0, top_k=40, seed=4), schema=schema))

    def test_rows_have_forms_of_their_own_and_streams_have_them(self, lm):
        together = lm.generate(PROMPTS, 12, SAMPLED, n=2, regex="[ab]{1,9}")
        for number, prompt in enumerate(PROMPTS):
            alone = lm.generate(prompt, 12, SAMPLED, n=2, regex="[ab]{1,9}")
            assert [one.text for one in together[2 * number : 2 * number + 2]] == [one.text for one in alone]
        assert "".join(lm.stream("x", 12, SAMPLED, regex="[ab]{1,9}")) == together[2].text

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"regex": "("}, "`regex` is invalid: .*: unclosed group"),
            ({"regex": ""}, "regex is a regular expression"),
            ({"schema": {"type": "nonsense"}}, "`schema` is invalid"),
            ({"schema": "{"}, "schema is not valid JSON"),
            ({"schema": [1]}, "schema is a JSON schema"),
            ({"choice": []}, "choice is a list of texts"),
            ({"choice": ["a", ""]}, "choice is a list of texts"),
            ({"choice": ["a"], "regex": "a"}, "Pass only one of `regex`, `choice`"),
        ],
    )
    def test_impossible_ones(self, lm, options, words):
        with pytest.raises(ConfigError, match=words):
            lm.generate("a", 2, **options)


def test_usage_and_reasons(lm):
    [one] = lm.generate("the cat", 5)
    count = len(lm.tokenizer("the cat").input_ids)
    assert (one.usage.prompt_tokens, one.usage.completion_tokens, one.usage.total_tokens) == (count, 5, count + 5)
    assert one.finish_reason == "length"
    end = Sampling(logit_bias={2: 100})
    [ended] = lm.generate("the cat", 5, end)
    assert (ended.finish_reason, ended.usage.completion_tokens, ended.token_ids) == ("stop", 1, [])


def test_all_candidates_of_a_search(lm):
    [best] = lm.generate("the cat", 6, SAMPLED, rerank=Rerank(5, scorer="overlap"))
    assert best.candidates[0] == best.beams[0]
    scores = [one.rank_score for one in best.candidates]
    assert scores == sorted(scores, reverse=True)
    assert best.usage.completion_tokens >= sum(len(one.token_ids) for one in best.candidates)


class TestPrompts:
    def test_token_ids_are_read_as_they_are(self, lm):
        ids = lm.tokenizer("the cat").input_ids
        assert lm.generate(ids, 6) == lm.generate("the cat", 6) == lm.generate([torch.tensor(ids)], 6)
        assert lm.generate([ids, "x"], 6) == lm.generate(["the cat", "x"], 6)
        assert lm.generate(ids[1:], 6)[0].token_ids == by_hand(lm, ids[1:], 6, lambda v, *_: v)

    @pytest.mark.parametrize(
        ("prompts", "words"),
        [([10**6], "has the token id 1000000"), ([[5], [-1]], "prompt 1 has the token id -1"),
         ([["a", 3]], "list of neither token ids nor messages"), ([None], "is not a string but NoneType"),
         ([[]], "list of neither"), ({"role": "user"}, "a conversation is a list of messages"), (3, "prompts are")],
    )  # fmt: skip
    def test_impossible_ones(self, lm, prompts, words):
        with pytest.raises(TextError, match=words):
            lm.generate(prompts, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"temperature": -1.0}, "temperature must be at least 0, got -1.0"), ({"top_p": 0.0}, "top_p must be above 0"),
     ({"typical_p": 1.5}, "typical_p must be at most 1, got 1.5"), ({"top_k": 0}, "top_k must be at least 1, got 0"),
     ({"min_p": 1.5}, "min_p must be at most 1, got 1.5"), ({"min_p": -0.1}, "min_p"),
     ({"repetition_penalty": 0}, "repetition_penalty must be at least 0.1"),
     ({"repetition_penalty": float("nan")}, "repetition_penalty"),
     ({"frequency_penalty": 3}, "frequency_penalty must be at most 2, got 3"),
     ({"presence_penalty": "a"}, "presence_penalty is a number"),
     ({"logit_bias": {5: 101}}, r"logit_bias\[5\] must be at most 100"),
     ({"logit_bias": {-1: 1}}, r"logit_bias\[-1\] must be at least 0"), ({"logit_bias": {"a": 1}}, "whole number"),
     ({"logit_bias": [1]}, "logit_bias is a mapping, not")],
)  # fmt: skip
def test_impossible_samplings(settings, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 2}, "unknown setting 'samples'"),
        ({"logprobs": 1, "rerank": Rerank(1)}, "`logprobs` can't be combined with `rerank`"),
        ({"n": 2, "rerank": Rerank(2)}, "`n` can't be combined with `rerank`"),
    ],
)
def test_impossible_options(lm, options, words):
    with pytest.raises(ConfigError, match=words):
        lm.generate("a", 2, **options)


def test_a_bias_for_a_token_that_is_not_there(lm):
    with pytest.raises(ConfigError, match="`logit_bias` has the token 999999"):
        lm.generate("a", 2, Sampling(logit_bias={999999: 1}))


def test_gaps_are_filled_without_penalties(lm):
    with pytest.raises(ConfigError, match="not for infilling"):
        lm.infill("the [blank] in", sampling=Sampling(presence_penalty=1))
