"""Continuations that share the keys of their prompt against those with a copy for each."""

import pytest
import torch

import gerund
from gerund.attention.ragged_batch import Branches
from gerund.inference.generate import branch_pass, reranking
from gerund.inference.generate.branch_pass import BranchPass, can_branch
from gerund.inference.infill.span_pass import Context, SpanPass
from gerund.inference.likelihood.tokens import causal_runtime
from tests.tiny import CONFIGS, GIVEN, LATENT, save_tiny

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]
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


@pytest.mark.sweep(quick=6)
@pytest.mark.parametrize("name", sorted({**CONFIGS, **GIVEN, **LATENT}))
def test_equals_a_copy_for_every_row(tmp_path, name):
    runtime = runtime_of(tmp_path, name)
    if not can_branch(runtime):
        # Scores that are capped or have sinks, and positions that cannot be told: a copy for every row.
        assert name in ("gemma2", "gpt_oss", "opt", *GIVEN, *LATENT), name
        return
    shared = BranchPass(runtime, PROMPTS)
    copied = SpanPass(runtime, [Context(ids) for ids in PROMPTS], sees_right=False)
    torch.testing.assert_close(shared.logprobs_BV, copied.logprobs_BV)
    for rows, tokens in STEPS:
        shared.advance(rows, tokens)
        copied.advance(rows, tokens)
        torch.testing.assert_close(shared.logprobs_BV, copied.logprobs_BV, atol=2e-5, rtol=1e-4)


def test_equals_reading_the_whole_text(tmp_path):
    runtime = runtime_of(tmp_path)
    shared, texts = BranchPass(runtime, PROMPTS), [list(ids) for ids in PROMPTS]
    for rows, tokens in STEPS:
        shared.advance(rows, tokens)
        texts = [[*texts[row], token] for row, token in zip(rows, tokens, strict=True)]
        for text, found in zip(texts, shared.logprobs_BV, strict=True):
            with torch.no_grad():
                expected = runtime.model(torch.tensor([text])).logits[0, -1].log_softmax(-1)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_a_prompt_is_held_once(tmp_path):
    runtime = runtime_of(tmp_path)
    shared = BranchPass(runtime, PROMPTS)
    shared.advance([0] * 20, list(range(20, 40)))
    assert {layer.keys.shape[-2] for layer in shared._branches.layers} == {1}
    assert [trunk[0].shape[1] for trunk in shared._trunks[0]] == [7, 1, 3]


def test_a_model_that_differs_keeps_its_copies(tmp_path, monkeypatch):
    runtime = runtime_of(tmp_path)
    monkeypatch.setattr(branch_pass, "_without_padding", lambda layer, row, length: (
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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_that_is_not_seen_is_found_out_in_every_type(monkeypatch, dtype):
    lm = gerund.load(dtype=dtype, attention="causal")
    runtime = causal_runtime(lm.model, lm.tokenizer)
    assert can_branch(runtime)
    branch_pass._known.clear()
    attend = Branches.attend

    def blind(self, *rest):
        whole, self.trunks = self.trunks, [[(k[:, -1:], v[:, -1:]) for k, v in own] for own in self.trunks]
        try:
            return attend(self, *rest)
        finally:
            self.trunks = whole

    monkeypatch.setattr(Branches, "attend", blind)
    assert not can_branch(runtime)
    branch_pass._known.clear()
