"""The search against a slow one that keeps no cache, and against plain generation."""

import math
from dataclasses import replace

import pytest
import torch

import gerund
from gerund.attention.ragged_batch import Branches
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.generate import reranking
from gerund.inference.generate.detokenizing import continuation_text
from gerund.inference.generate.prompts import prompt_ids
from gerund.inference.generate.reranking import BranchPass, can_branch, search, stream_search
from gerund.inference.generate.sampling import Draws, chosen_tokens, draws_for, filters_of, sample_seed
from gerund.inference.infill.span_search import Context, SpanPass
from gerund.inference.likelihood import causal_runtime
from gerund.inference.text_ids import end_ids
from gerund.settings.sampling import Rerank, Sampling
from tests.tiny import CONFIGS, GIVEN, LATENT, save_tiny

SAMPLING = Sampling(temperature=1.0, top_p=0.9, seed=3)
PROMPTS = ["the cat sat in", "an inn", "the end is near, and a tin"]


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


def vowels(_numbers, texts):
    """Score texts by something that has nothing to do with likelihood."""
    return [
        [sum(text.count(letter) for letter in "aeiou") / len(text) if text.strip() else -math.inf for text in own]
        for own in texts
    ]


def run(lm, prompts, rerank, judge=vowels, max_new_tokens=12, sampling=SAMPLING):
    return search(lm.model, lm.tokenizer, prompts, judge, rerank, max_new_tokens=max_new_tokens, sampling=sampling)


def slow(lm, prompts, rerank, judge, max_new_tokens, sampling):
    """The same search from token ids, one hypothesis and one full forward pass at a time."""
    ends, found = set(end_ids(lm.model, lm.tokenizer)), []
    for number, prompt in enumerate(prompts):
        ids = prompt_ids(lm.model, lm.tokenizer, prompt, "prompt")
        begin = Draws(sample_seed(sampling.seed, 0))
        beams, turn = [([], False, begin, None)], 0
        while any(not ended and len(tokens) < max_new_tokens for tokens, ended, _, _ in beams):
            going = [beam for beam in beams if not beam[1] and len(beam[0]) < max_new_tokens]
            pool = [beam for beam in beams if beam not in going]
            for rank, (tokens, _, draw, _) in enumerate(going):
                for sample in range(rerank.samples * (1 if turn else rerank.beams)):
                    own = draws_for(sampling.seed, 0, turn, rank, sample)
                    if sample == 0:
                        own = draw.copy()
                    new, ended = list(tokens), False
                    for _ in range(rerank.every or max_new_tokens):
                        with torch.no_grad():
                            scores = lm.model(torch.tensor([ids + new])).logits[0, -1].float().log_softmax(-1)[None]
                        for filter_ in filters_of(sampling):
                            scores = filter_(scores)
                        token = int(chosen_tokens(scores, None if sampling.is_greedy else [own]))
                        ended = token in ends
                        if ended:
                            break
                        new.append(token)
                        if len(new) >= max_new_tokens:
                            break
                    text = continuation_text(lm.tokenizer, ids, new)
                    score = judge([number], [[text]])[0][0] if text.strip() else -math.inf
                    pool.append((new, ended, own, score))
            unique = {}
            for one in pool:
                unique.setdefault((tuple(one[0]), one[1]), one)
            beams = sorted(unique.values(), key=lambda one: -one[3])[: rerank.beams]
            turn += 1
        found.append([(tokens, ended, score) for tokens, ended, _, score in beams])
    return found


@pytest.mark.slow
def test_equals_the_slow_search(lm):
    rerank = Rerank(4, beams=2, every=3)
    fast = run(lm, PROMPTS, rerank)
    expected = slow(lm, PROMPTS, rerank, vowels, 12, SAMPLING)
    assert [[(c.token_ids, c.finished, c.rank_score) for c in one.beams] for one in fast] == expected
    assert [one.token_ids for one in fast] == [own[0][0] for own in expected]


@pytest.mark.slow
@pytest.mark.parametrize("begins", ["shared", "copied"])
def test_what_is_ranked_at_its_end_is_written_in_parts(lm, monkeypatch, begins):
    if begins == "copied":
        monkeypatch.setattr(reranking, "can_branch", lambda runtime: False)
    whole = run(lm, PROMPTS, Rerank(4, beams=2))
    at_once = []
    draw = reranking.chosen_tokens
    monkeypatch.setattr(
        reranking, "chosen_tokens", lambda scores, own: at_once.append(len(scores)) or draw(scores, own)
    )
    monkeypatch.setattr(reranking, "_PART", 3)
    parts = run(lm, PROMPTS, Rerank(4, beams=2))
    for one, other in zip(parts, whole, strict=True):
        for part, candidate in zip(one.history[0], other.history[0], strict=True):
            assert replace(part, score=0.0) == replace(candidate, score=0.0)
            assert part.score == pytest.approx(candidate.score, abs=1e-4)
    assert max(at_once) == 3


@pytest.mark.slow
def test_early_ends_compete_on(lm, monkeypatch):
    ending = lm.tokenizer("e", add_special_tokens=False).input_ids[-1]
    monkeypatch.setattr(lm.model.generation_config, "eos_token_id", [ending])
    rerank = Rerank(4, beams=3, every=2)
    shortest = lambda _numbers, texts: [[-len(text) for text in own] for own in texts]  # noqa: E731
    fast = run(lm, PROMPTS, rerank, shortest, 20)
    expected = slow(lm, PROMPTS, rerank, shortest, 20, SAMPLING)
    assert [[(c.token_ids, c.finished, c.rank_score) for c in one.beams] for one in fast] == expected
    assert any(candidate.finished for one in fast for candidate in one.beams)


def test_one_beam_of_one_sample_is_plain_sampling(lm):
    plain = lm.generate(PROMPTS, 12, SAMPLING)
    for rerank in (Rerank(1), Rerank(1, every=4)):
        for one, other in zip(run(lm, PROMPTS, rerank), plain, strict=True):
            assert (one.text, one.token_ids, one.finished) == (other.text, other.token_ids, other.finished)
            assert one.score == pytest.approx(other.score, abs=1e-5)


@pytest.mark.slow
def test_prompts_do_not_depend_on_their_company(lm):
    rerank = Rerank(4, beams=2, every=3)
    together = run(lm, PROMPTS[::-1] * 7, rerank)  # more than one group
    [alone] = run(lm, PROMPTS[:1], rerank)
    for place in (len(PROMPTS) - 1, 2 * len(PROMPTS) - 1, 7 * len(PROMPTS) - 1):
        assert together[place].token_ids == alone.token_ids
        assert [[c.text for c in turn] for turn in together[place].history] == [
            [c.text for c in turn] for turn in alone.history
        ]


def test_random_scores_do_not_depend_on_the_other_prompts(lm):
    settings = {"sampling": SAMPLING, "rerank": Rerank(3, beams=2, every=3, scorer="random")}
    together = lm.generate(PROMPTS, 9, **settings)
    for prompt, one in zip(PROMPTS, together, strict=True):
        assert lm.generate(prompt, 9, **settings)[0].token_ids == one.token_ids


def test_history_tells_the_rounds(lm):
    [one] = run(lm, PROMPTS[:1], Rerank(3, beams=2, every=5))
    assert len(one.history) == 3
    for competing in one.history:
        scores = [candidate.rank_score for candidate in competing]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(c.token_ids) for c in competing}) == len(competing)
    assert one.beams == one.history[-1][:2]
    assert (one.text, one.rank_score) == (one.beams[0].text, one.beams[0].rank_score)
    # A text that is kept begins with one that was kept before.
    for before, after in zip(one.history, one.history[1:], strict=False):
        starts = [tuple(candidate.token_ids) for candidate in before[:2]]
        assert all(any(tuple(c.token_ids)[: len(start)] == start for start in starts) for c in after)


@pytest.mark.parametrize("rerank", [Rerank(3, beams=2, every=3), Rerank(4, every=2), Rerank(5), Rerank(1, every=1)])
def test_stream_gives_the_text_as_it_settles(lm, rerank):
    settings = {"max_new_tokens": 12, "sampling": SAMPLING}
    pieces = list(stream_search(lm.model, lm.tokenizer, PROMPTS[0], vowels, rerank, **settings))
    [whole] = run(lm, PROMPTS[:1], rerank)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert all(piece.text for piece in pieces[:-1])
    assert [piece.result for piece in pieces] == [None] * (len(pieces) - 1) + [whole]
    if rerank.beams == 1 and rerank.every:
        assert len(pieces) > 2


def test_room_ends_with_the_context(lm):
    limit = lm.model.config.max_position_embeddings
    long = "a" * (limit - 6)
    [one] = run(lm, [long], Rerank(2, every=2), max_new_tokens=50)
    assert len(one.token_ids) == limit - len(prompt_ids(lm.model, lm.tokenizer, long, "it"))


class TestBadInput:
    @pytest.mark.parametrize(("name", "value"), [("samples", 0), ("beams", 0), ("every", 0), ("samples", -1)])
    def test_nothing_to_rank(self, name, value):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1, got {value}"):
            Rerank(**{name: value})

    def test_greedy_writes_the_same_again(self, lm):
        with pytest.raises(ConfigError, match="nothing to rank"):
            run(lm, PROMPTS, Rerank(2), sampling=Sampling())

    def test_scores_that_are_no_numbers(self, lm):
        with pytest.raises(ModelError, match="not a number"):
            run(lm, PROMPTS, Rerank(2), judge=lambda _n, texts: [[math.nan] * len(own) for own in texts])

    def test_prompt_beyond_the_context(self, lm):
        with pytest.raises(TextError, match="prompt 0 has"):
            run(lm, ["a" * 10_000], Rerank(2))

    def test_nothing_to_write(self, lm):
        with pytest.raises(ConfigError, match="must be at least 1, got 0"):
            run(lm, PROMPTS, Rerank(2), max_new_tokens=0)


PROMPT_IDS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
STEPS = [
    ([0, 0, 0, 1, 1, 2], [20, 21, 22, 23, 24, 25]),
    ([0, 1, 2, 3, 4, 5], [30, 31, 32, 33, 34, 35]),
    ([0, 0, 2, 5, 5], [40, 41, 42, 43, 44]),
    ([1, 1, 4], [50, 51, 52]),  # a prompt without a row
    ([0, 1, 2], [53, 54, 55]),
]


def runtime_of(folder, name="llama", **changes):
    lm = gerund.load(save_tiny(folder / name, name, **changes), dtype="float32", attention="causal")
    return causal_runtime(lm.model, lm.tokenizer)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", sorted({**CONFIGS, **GIVEN, **LATENT}))
def test_equals_a_copy_for_every_row(tmp_path, name):
    runtime = runtime_of(tmp_path, name)
    if not can_branch(runtime):
        # Scores that are capped or have sinks, and positions that cannot be told: a copy for every row.
        assert name in ("gemma2", "gpt_oss", "opt", *GIVEN, *LATENT), name
        return
    shared = BranchPass(runtime, PROMPT_IDS)
    copied = SpanPass(runtime, [Context(ids) for ids in PROMPT_IDS], sees_right=False)
    torch.testing.assert_close(shared.logprobs_BV, copied.logprobs_BV)
    for rows, tokens in STEPS:
        shared.advance(rows, tokens)
        copied.advance(rows, tokens)
        torch.testing.assert_close(shared.logprobs_BV, copied.logprobs_BV, atol=2e-5, rtol=1e-4)


def test_a_prompt_is_held_once(tmp_path):
    runtime = runtime_of(tmp_path)
    shared = BranchPass(runtime, PROMPT_IDS)
    shared.advance([0] * 20, list(range(20, 40)))
    assert {layer.keys.shape[-2] for layer in shared._branches.layers} == {1}
    assert [trunk[0].shape[1] for trunk in shared._trunks[0]] == [7, 1, 3]


def test_a_model_that_differs_keeps_its_copies(tmp_path, monkeypatch):
    runtime = runtime_of(tmp_path)
    monkeypatch.setattr(reranking, "_without_padding", lambda layer, row, length: (
        layer.keys[row, :, -length:], layer.values[row, :, -length:].flip(1)
    ))  # fmt: skip
    assert not can_branch(runtime)


@pytest.mark.parametrize("worth", [1, 10**6])
def test_a_search_takes_either(tiny_folder, monkeypatch, worth):
    """Both ways run under every test of the search; here each is forced."""
    made = []
    for cls in (BranchPass, SpanPass):
        init = cls.__init__

        def counted(self, *args, cls=cls, init=init, **kwargs):
            made.append(cls)
            init(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", counted)
    monkeypatch.setattr(reranking, "_WORTH_SHARING", worth)
    lm = gerund.load(tiny_folder, dtype="float32")
    rerank = gerund.Rerank(3, beams=2, every=2, scorer="random")
    lm.generate(["the cat"], 6, gerund.Sampling(temperature=1.0, seed=1), rerank=rerank)
    assert (BranchPass in made) == (worth == 1)


@pytest.mark.slow
def test_a_prompt_that_is_not_seen_is_found_out(monkeypatch):
    lm = gerund.load(dtype="float32", attention="causal")
    runtime = causal_runtime(lm.model, lm.tokenizer)
    assert can_branch(runtime)
    reranking._known.clear()
    attend = Branches.attend

    def blind(self, *rest):
        with monkeypatch.context() as patch:
            patch.setattr(self, "trunks", [[(k[:, -1:], v[:, -1:]) for k, v in own] for own in self.trunks])
            return attend(self, *rest)

    monkeypatch.setattr(Branches, "attend", blind)
    assert not can_branch(runtime)
    reranking._known.clear()
