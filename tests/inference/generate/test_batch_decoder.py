"""Many texts, one making room for the next: the same texts as one by one."""

import threading

import pytest
import torch

from gerund import Sampling
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.inference.generate.reproducibility import check_batching
from gerund.inference.generate.sequence import Cancelled, Piece
from gerund.inference.generate.slots import Slots
from gerund.language_model import LanguageModel
from tests.tiny import tiny_lm

PROMPTS = ["the cat", "x", "in another the thing", "an", "the end of the thing", "er", "and then in the", "a"]
SEEDS = Sampling(temperature=1.0, seed=list(range(8)))


@pytest.fixture(autouse=True)
def _anything_is_worthwhile(monkeypatch):
    monkeypatch.setattr(generation, "_WORTHWHILE", 1)


@pytest.fixture
def steps(monkeypatch):
    """How many rows each step of slots had, without the check's."""
    seen: list[int] = []
    plain, write = Slots.step, generation.decode_all

    def noted(self, tokens):
        seen.append(len(tokens))
        return plain(self, tokens)

    def writing(*args):
        with monkeypatch.context() as noting:
            noting.setattr(Slots, "step", noted)
            write(*args)

    monkeypatch.setattr(generation, "decode_all", writing)
    return seen


def lm_of(kind: str = "llama", dtype: torch.dtype = torch.float32) -> LanguageModel:
    lm = tiny_lm(kind)
    return LanguageModel(lm.model.to(dtype), lm.tokenizer)


def has_equal_bits(lm: LanguageModel) -> bool:
    """Whether this processor computes a row alone and among others alike."""
    return check_batching(lm.model, lm.tokenizer, 3, 64, recalling=False).guarantee == "bits of generate"


@pytest.mark.sweep(quick=0, check=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("sampling", "options"), [(None, {}), (SEEDS, {"stop": ["e"]}), (SEEDS, {"n": 2}), (None, {"logprobs": 1})]
)
def test_texts_are_those_of_one_by_one(dtype, sampling, options, steps) -> None:
    lm = lm_of(dtype=dtype)
    settings = GenerationConfig.of(9, sampling, options)
    found = generate(lm.model, lm.tokenizer, PROMPTS, settings, batch_size=3)
    if dtype != torch.float32 and not has_equal_bits(lm):
        assert not steps
        pytest.skip("this processor computes a row alone and among others otherwise, so slots rightly took no part")
    assert steps, "slots took no part"
    assert max(steps) == 3
    expected = []
    for number, prompt in enumerate(PROMPTS):
        own = sampling if sampling is None else Sampling(temperature=1.0, seed=number)
        expected += generate(lm.model, lm.tokenizer, [prompt], GenerationConfig.of(9, own, options))
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.finished for one in found] == [one.finished for one in expected]


def test_a_text_that_ends_makes_room_for_the_next(steps) -> None:
    lm = lm_of()
    settings = GenerationConfig.of(20, SEEDS, {"stop": ["a", "e", "i", "o", "t"]})
    found = generate(lm.model, lm.tokenizer, PROMPTS, settings, batch_size=2)
    tokens = [one.usage.completion_tokens for one in found]
    assert len(set(tokens)) > 2
    # The first token of a text comes from its prompt, each further one from a step; few steps have an empty slot.
    assert sum(steps) == sum(tokens) - len(tokens)
    assert len(steps) < sum(max(pair) for pair in zip(tokens[::2], tokens[1::2], strict=True))


def test_pieces_come_and_work_ends_when_it_is_cancelled() -> None:
    lm = lm_of()
    pieces: list[Piece] = []
    settings = GenerationConfig.of(9, SEEDS, {})
    found = generate(lm.model, lm.tokenizer, PROMPTS, settings, batch_size=2, emit=pieces.append)
    for number, whole in enumerate(found):
        assert "".join(piece.text for piece in pieces if piece.index == number) == whole.text
    stop = threading.Event()

    def once(piece: Piece) -> None:
        pieces.append(piece)
        stop.set()

    pieces.clear()
    with pytest.raises(Cancelled):
        generate(lm.model, lm.tokenizer, PROMPTS, settings, batch_size=2, emit=once, cancelled=stop)
    assert len(pieces) <= 2


@pytest.mark.parametrize("kind", ["mistral", "lfm2", "qwen2_moe"])
def test_models_of_which_nothing_is_promised_write_in_batches(kind, steps) -> None:
    lm = lm_of(kind)
    assert len(generate(lm.model, lm.tokenizer, PROMPTS, GenerationConfig.of(3, None, {}), batch_size=2)) == 8
    assert not steps


def test_few_prompts_and_short_texts_are_not_worth_a_proof(steps, monkeypatch) -> None:
    lm = lm_of()
    generate(lm.model, lm.tokenizer, PROMPTS[:3], GenerationConfig.of(9, None, {}), batch_size=2)
    monkeypatch.setattr(generation, "_WORTHWHILE", 8192)
    generate(lm.model, lm.tokenizer, PROMPTS, GenerationConfig.of(9, None, {}), batch_size=2)
    assert not steps
