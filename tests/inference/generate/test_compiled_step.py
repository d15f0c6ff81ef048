"""A step that torch compiles, against the plain one."""

import pytest
import torch

from gerund.attention import ragged_batch
from gerund.inference.generate import compiled_step, reproducibility
from gerund.inference.generate.slots import Slots
from tests.inference.generate.test_slots import model_of
from tests.tiny import byte_tokenizer, tiny

# The compiler takes a quarter of a minute for each layer.
ONE_LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize("steady", [True, False])
def test_a_compiled_step_begins_with_free_slots_whatever_was_verified(
    steady: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = tiny("llama", vocab_size=300), byte_tokenizer()
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    # As where kernels compute all rows the same way, and where they do not.
    monkeypatch.setattr(torch, "equal", lambda *_: steady)
    plain = reproducibility.Reproducibility(True, "same text under any load", "")
    slots, found = reproducibility.check_compiled_batching(plain, model, 4, 32)
    assert found.guarantee == ("same text under any load" if steady else "none")
    assert slots.live == 0
    prompt = tokenizer("the cat")["input_ids"]
    slots.prefill(prompt)
    slots.join(len(prompt))
    assert slots.step([5]).shape == (1, 300)


@pytest.mark.parametrize(
    ("live", "passes"), [(1, [2]), (2, [2]), (3, [3]), (4, [4]), (5, [3, 2]), (6, [3, 3]), (9, [3, 3, 3])]
)
def test_a_step_in_parts_writes_what_all_rows_at_once_do(
    live: int, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, passed = model_of("llama"), []
    plain, parts = Slots(model, 9, 40), Slots(model, 9, 40, compiled=(2, 4))
    for slots in (plain, parts):
        for row in range(live):
            slots.prefill([5 + row] * (3 + row))
            slots.join(3 + row)
    whole = Slots._one_pass
    monkeypatch.setattr(
        Slots, "_one_pass", lambda self, ids_B1, *more: passed.append(len(ids_B1)) or whole(self, ids_B1, *more)
    )
    parts._compiled_pass = parts._one_pass
    for token in (7, 8, 9):
        passed.clear()
        torch.testing.assert_close(parts.step([token] * live), plain.step([token] * live), atol=2e-4, rtol=1e-3)
        assert passed[:-1] == passes
    assert parts.lengths == plain.lengths


@pytest.mark.slow
def test_code_is_compiled_once_for_all_lengths_and_numbers_of_rows_and_writes_what_the_plain_step_does() -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, room = model_of("llama", **ONE_LAYER), 64
    plain, quick = Slots(model, 6, room), Slots(model, 6, room, compiled=(2, 4))
    with torch.inference_mode(), compiled_step.quiet_compiler():
        for live, length in ((1, 3), (4, 3), (6, 20), (3, 30), (5, 62), (1, 62)):
            found = []
            for slots in (plain, quick):
                slots.lengths = []
                for row in range(live):
                    slots.prefill([5 + row] * length)
                    slots.join(length)
                found.append(slots.step(list(range(5, 5 + live))))
            torch.testing.assert_close(*found, atol=2e-4, rtol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.slow
def test_a_compiled_step_follows_weights_that_are_changed_in_place() -> None:
    model = model_of("llama", **ONE_LAYER)
    made = [Slots(model, 2, 64), Slots(model, 2, 64, compiled=(2, 2))]
    with compiled_step.quiet_compiler():
        for _ in range(2):
            found = []
            for slots in made:
                slots.lengths = []
                slots.prefill([5, 6, 7])
                slots.join(3)
                found.append(slots.step([8]))
            torch.testing.assert_close(*found, atol=2e-4, rtol=1e-3)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.1)


@pytest.mark.slow
@pytest.mark.parametrize("converted", [0, 2**20])
def test_a_compiled_step_in_half_precision_attends_in_either_way(
    converted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged_batch, "_QUICKLY_CONVERTED", converted)
    model = tiny("llama", vocab_size=300, **ONE_LAYER).to(torch.bfloat16)
    plain, quick = Slots(model, 4, 64), Slots(model, 4, 64, compiled=(2, 4))
    with compiled_step.quiet_compiler():
        found = []
        for slots in (plain, quick):
            for row in range(3):
                slots.prefill([5 + row] * (8 + row))
                slots.join(8 + row)
            found.append(slots.step([5, 6, 7]))
    torch.testing.assert_close(*found, atol=6e-2, rtol=2e-2)


@pytest.mark.slow
def test_compiled_steps_of_one_model_with_other_room_do_not_share_code() -> None:
    model = model_of("llama", **ONE_LAYER)
    pairs = [(Slots(model, 4, room), Slots(model, 4, room, compiled=(2, 4))) for room in (40, 90)]
    with compiled_step.quiet_compiler():
        for live in (1, 3, 2):
            for pair in pairs:
                found = []
                for slots in pair:
                    slots.lengths = []
                    for row in range(live):
                        slots.prefill([5 + row] * (8 + row))
                        slots.join(8 + row)
                    found.append(slots.step(list(range(5, 5 + live))))
                torch.testing.assert_close(*found, atol=2e-4, rtol=1e-3)


@pytest.mark.slow
def test_steps_that_look_at_no_weights_before_they_run_are_not_shared_by_models() -> None:
    """As on a GPU, where weights are no constants of the code."""
    for factor in (1.0, 1.7):
        with torch.inference_mode():
            model = tiny("llama", vocab_size=300, **ONE_LAYER)
            for weight in model.parameters():
                weight.mul_(factor)
        assert next(model.parameters()).is_inference()
        found = []
        with compiled_step.quiet_compiler():
            for slots in (Slots(model, 2, 64), Slots(model, 2, 64, compiled=(2, 2))):
                slots.prefill([5, 6, 7])
                slots.join(3)
                found.append(slots.step([8]))
        torch.testing.assert_close(*found, atol=2e-4, rtol=1e-3)
