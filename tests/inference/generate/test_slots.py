"""Texts side by side in slots, against transformers' own cache; proofs, against what they are to find out."""

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from gerund.attention import BLOCK
from gerund.attention.preemption import pause, pausing
from gerund.attention.ragged_batch import RaggedBatch
from gerund.inference.generate import reproducibility
from gerund.inference.generate.batch_decoder import PrefixCache
from gerund.inference.generate.reproducibility import check_batching, slots_of
from gerund.inference.generate.slots import Slots, unsupported_reason, without_hooks
from gerund.packed import LEAST_READ
from tests.tiny import byte_tokenizer, tiny_lm

FIT = ["llama", "qwen3", "gpt2", "gpt_neox", "olmo2", "phi", "opt", "cohere", "qwen2_moe", "deepseek_v2"]
UNFIT = ["mistral", "gemma2", "gpt_oss", "lfm2", "qwen3_next", "bloom", "longcat_flash", "gemma3n_text"]


def model_of(kind: str, dtype: torch.dtype = torch.float32, **changes: object):
    return tiny_lm(kind, changes=changes).model.to(dtype)


@torch.no_grad()
def logits_alone(model, ids: list[int]) -> torch.Tensor:
    """The slow way: read everything anew."""
    return model(torch.tensor([ids]), use_cache=False).logits[0, -1]


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("kind", FIT)
@pytest.mark.parametrize("alone", [True, False])
def test_rows_that_join_and_leave_get_what_a_pass_over_their_text_gives(kind, alone) -> None:
    model = model_of(kind)
    assert unsupported_reason(model) is None
    slots = Slots(model, 3, 40, alone=alone, at_least=2)
    texts = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
    live: list[list[int]] = []

    def check(logits_V: torch.Tensor, ids: list[int]) -> None:
        torch.testing.assert_close(logits_V, logits_alone(model, ids), atol=2e-4, rtol=1e-3)

    def join(ids: list[int]) -> None:
        check(slots.prefill(ids), ids)
        assert slots.join(len(ids)) == len(live)
        live.append(list(ids))

    def step(*tokens: int) -> None:
        for row, token in enumerate(tokens):
            live[row].append(token)
        for logits_V, ids in zip(slots.step(tokens), live, strict=True):
            check(logits_V, ids)

    join(texts[0])
    step(21)
    join(texts[1])
    join(texts[2])
    step(22, 23, 24)
    slots.leave(0)
    live[0] = live.pop()
    step(25, 26)
    join(texts[0])
    step(27, 28, 29)
    slots.leave(2)
    live.pop()
    step(30, 31)


@pytest.mark.sweep(quick=3, check=5)
@pytest.mark.parametrize("kind", FIT)
@pytest.mark.parametrize("end", [BLOCK - 5, 2 * BLOCK, 3 * BLOCK + 1])
def test_prompts_that_are_read_by_blocks_get_what_a_pass_over_them_gives(kind, end) -> None:
    model = model_of(kind, max_position_embeddings=128)
    slots = Slots(model, 2, 100, by_blocks=True)
    ids = [(7 * place + 3) % 60 + 4 for place in range(end)]
    expected = logits_alone(model, ids)
    for start in range(0, end, BLOCK):
        if start:
            slots.prefill(ids[:start])
        torch.testing.assert_close(slots.prefill(ids, start), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_what_a_prompt_left_is_the_same_to_the_bit_for_all_that_begin_like_it(bundled) -> None:
    room, lengths = 900, (100, 850)
    found = check_batching(bundled.model, bundled.tokenizer, 2, room)
    if not found.recalls:
        pytest.skip(found.why)
    slots = slots_of(found, bundled.model, 2, room, by_blocks=True)
    ids = [5 + 17 * place % 8000 for place in range(max(lengths))]
    for first in lengths:
        kept = PrefixCache(room, LEAST_READ, BLOCK)
        slots.prefill(ids[:first])
        kept.store(slots, ids[:first])
        for second in lengths:
            other = ids[: min(first, second) - 20] + ids[::-1][: second - min(first, second) + 20]
            fresh = slots.prefill(other)
            known = kept.restore(slots, other)
            assert known >= 64
            assert torch.equal(slots.prefill(other, known), fresh), f"{known} tokens of {first}, in {second}"


def test_activations_that_compute_the_end_of_a_text_otherwise_are_found_out() -> None:
    # Torch's vectors of activations do not fit rows of 30: the last of them are computed one by one.
    models = (model_of("llama", intermediate_size=size, max_position_embeddings=400) for size in (30, 64))
    found, even = (check_batching(model, byte_tokenizer(), 2, 400) for model in models)
    if not even.recalls:
        pytest.skip(even.why)
    assert not found.recalls


@pytest.mark.parametrize("kind", UNFIT)
def test_models_that_keep_something_else_are_not_fit_and_the_proof_says_so(kind) -> None:
    model = model_of(kind)
    assert unsupported_reason(model)
    found = check_batching(model, byte_tokenizer(), 4, 64)
    assert (found.fits, found.guarantee) == (False, "bits of generate")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_promised_holds(dtype) -> None:
    model = model_of("llama", dtype)
    found = check_batching(model, byte_tokenizer(), 4, 64)
    assert found.fits
    if found.guarantee == "none":
        pytest.skip(found.why)
    logits = []
    for beside in ([], [[7, 8, 9] * 9], [[3], [4, 5] * 12, [6] * 30]):
        slots = slots_of(found, model, 4, 64)
        logits_V = slots.prefill([5, 6, 7, 8])
        slots.join(4)
        for ids in beside:
            slots.prefill(ids)
            slots.join(len(ids))
        logits.append(torch.stack([logits_V, *(slots.step([20 + k] * slots.live)[0] for k in range(6))]))
    assert all(torch.equal(one, logits[0]) for one in logits)


def test_the_check_finds_out_that_rows_depend_on_each_other(monkeypatch) -> None:
    plain = Slots.step
    monkeypatch.setattr(Slots, "step", lambda self, tokens: plain(self, tokens) * (1 + 1e-6 * len(tokens)))
    model = model_of("llama")
    found = check_batching(model, byte_tokenizer(), 4, 64)
    assert (found.fits, found.guarantee) == (True, "none")
    assert "depends" in found.why


def test_the_check_finds_out_that_slots_give_something_else(monkeypatch) -> None:
    plain = Slots.step
    monkeypatch.setattr(Slots, "step", lambda self, tokens: plain(self, tokens).flip(-1))
    found = check_batching(model_of("llama"), byte_tokenizer(), 4, 64)
    assert not found.fits
    assert "logits differ" in found.why


def test_a_proof_is_made_once(monkeypatch) -> None:
    model = model_of("llama")
    first = check_batching(model, byte_tokenizer(), 2, 64)
    monkeypatch.setattr(reproducibility, "_check", None)
    assert check_batching(model, byte_tokenizer(), 2, 64) is first


def test_experts_make_rows_depend_on_each_other() -> None:
    found = check_batching(model_of("qwen2_moe"), byte_tokenizer(), 3, 64)
    assert (found.fits, found.guarantee) == (True, "none")


def test_a_bare_model_computes_the_same_and_hooks_of_others_stay(bundled) -> None:
    ids = torch.tensor([[5, 6, 7]])
    seen = []
    own = model_of("llama")
    handle = own.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        for model in (bundled.model, own):
            assert torch.equal(without_hooks(model)(ids).logits, model(ids).logits)
    handle.remove()
    assert len(seen) == 2
    assert "lora" in str(bundled.model).lower()
    assert "lora" not in str(without_hooks(bundled.model)).lower()


# ----------------------------------------------------------------------------------------------------------- prefixes


def test_beginnings_are_shared_by_blocks_and_the_least_useful_go() -> None:
    model = model_of("llama", max_position_embeddings=512)
    slots = Slots(model, 2, 200)
    kept = PrefixCache(4 * BLOCK, least=4, block=BLOCK)
    first = [3 + number % 50 for number in range(3 * BLOCK + 5)]
    other = [*first[: 2 * BLOCK], *([7] * 20)]
    whole_V = slots.prefill(first)
    kept.store(slots, first)
    assert len(kept) == 3 * BLOCK
    assert kept.restore(slots, other) == 2 * BLOCK
    torch.testing.assert_close(slots.prefill(other, 2 * BLOCK), logits_alone(model, other), atol=2e-4, rtol=1e-3)
    assert kept.restore(slots, first) == 3 * BLOCK
    torch.testing.assert_close(slots.prefill(first, 3 * BLOCK), whole_V, atol=2e-4, rtol=1e-3)
    assert kept.restore(slots, first[: 3 * BLOCK]) == 2 * BLOCK, "some of a prompt is always read"
    assert kept.restore(slots, [9, *first]) == 0
    third = [60] * (2 * BLOCK + 1)
    slots.prefill(third)
    kept.store(slots, third)
    assert len(kept) == 4 * BLOCK
    assert kept.restore(slots, [*first, 5]) == 2 * BLOCK, "the end of a beginning goes before what it stands on"


# ------------------------------------------------------------------------------------------------------------- pauses


def test_pauses_come_after_every_layer_and_change_nothing() -> None:
    model = model_of("llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    paused = []

    def other() -> None:
        paused.append(model(torch.tensor([[9, 9]])).logits)
        pause()  # not within itself

    with torch.no_grad():
        plain = model(ids).logits
        with pausing(other):
            assert torch.equal(model(ids).logits, plain)
        assert len(paused) == 4
        model(ids)
    assert len(paused) == 4


def test_an_error_in_a_pause_ends_the_pass_and_leaves_the_next_one_alone() -> None:
    model = model_of("llama")
    ids = torch.tensor([[5, 6]])

    def fail() -> None:
        raise LookupError

    with torch.no_grad():
        with pausing(fail), pytest.raises(LookupError):
            model(ids)
        assert model(ids).logits.shape[1] == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_half_precision_attends_as_float32_does(dtype, key_heads, scale) -> None:
    draw = torch.Generator().manual_seed(0)
    plan = RaggedBatch(2, [1, 5, 17], alone=False, device=torch.device("cpu"))
    query = torch.randn(3, 4, 1, 8, generator=draw).to(dtype)
    key, value = (torch.randn(3, key_heads, 48, 8, generator=draw).to(dtype)[:, :, : plan.width] for _ in range(2))
    found = plan.attend(torch.nn.Identity(), 0, query, key, value, {"scaling": scale})
    assert found.shape == (3, 1, 4, 8)
    assert found.dtype == dtype
    for row, length in enumerate(plan.lengths):
        keys, values = (one[row, :, :length].float().repeat_interleave(4 // key_heads, 0) for one in (key, value))
        scores = (query[row].float() @ keys.transpose(1, 2)) * (8**-0.5 if scale is None else scale)
        assert torch.allclose(found[row, 0].float(), (scores.softmax(-1) @ values)[:, 0], atol=2e-2)


def test_a_check_leaves_no_memory_behind(monkeypatch) -> None:
    """Slots of a large model are as large as its weights; what tries them must not wait for the garbage collector."""
    made = []
    own = Slots.__init__

    def noted(self, *given, **options) -> None:
        own(self, *given, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Slots, "__init__", noted)
    gc.collect()
    gc.disable()
    try:
        check_batching(model_of("llama"), byte_tokenizer(), 3, 64)
        assert made
        assert not any(one() is not None for one in made)
    finally:
        gc.enable()


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads Linux' own count")
def test_room_that_no_text_fills_takes_no_memory() -> None:
    slots = Slots(model_of("llama"), 8, 16_384)
    before = resident_pages()
    slots.prefill([5, 6, 7])
    slots.join(3)
    slots.step([4])
    assert slots.bytes > 64 * 2**20
    assert (resident_pages() - before) * os.sysconf("SC_PAGE_SIZE") < slots.bytes / 4


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_a_product_that_rounds_one_row_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision hides most differences of kernels, so weights are tried on more rows than a step has."""
    model = model_of("llama", torch.bfloat16)

    def each_row_alike(rows_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        return (rows_NI.float()[:, None] * weight_OI.float()).sum(-1)

    monkeypatch.setattr(reproducibility, "linear", each_row_alike)
    assert reproducibility._products_agree(model, range(1, 4))

    def rarely_otherwise(rows_NI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        found_NO = each_row_alike(rows_NI, weight_OI)
        # As seen on a processor with AMX: one of some sixty rows by itself, in the last bit of one number.
        return found_NO.nextafter(found_NO.new_tensor(9e9)) if len(rows_NI) == 1 and rows_NI[0, 0] > 2 else found_NO

    monkeypatch.setattr(reproducibility, "linear", rarely_otherwise)
    assert not reproducibility._products_agree(model, range(1, 4))
    assert reproducibility._products_agree(model, (2, 3))
