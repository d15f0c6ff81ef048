"""Many threads at once on one model with an adapter: each verb finds the weights that are its own."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, Sampling
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.tiny import save_tiny

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
SPAN = ("the old man", " looked at", " the sea")
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=3)
ROUNDS = 12
LAYERS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "gemma2": "all-linear"}
pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS)


@pytest.fixture(params=LAYERS)
def models(request, tmp_path: Path) -> tuple[gerund.LanguageModel, gerund.LanguageModel]:
    """The same model without and with an adapter."""
    base = save_tiny(tmp_path / "base", request.param)
    adapter = make_adapter(base, tmp_path / "lora", target_modules=LAYERS[request.param])
    return tuple(gerund.load(base, k=2, adapter=folder, dtype="float32") for folder in (None, adapter))


def same(one: object, other: object) -> bool:
    if isinstance(one, (np.ndarray, torch.Tensor)):
        return bool((one == other).all())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def inactive(lm: gerund.LanguageModel) -> dict[str, Callable[[], object]]:
    """Return the verbs that an adapter takes no part in."""
    return {
        "logits": torch.no_grad()(lambda: lm.model(torch.arange(3, 20)[None]).logits),
        "generate": lambda: lm.generate(TEXTS, 4, SAMPLED),
        "stream": lambda: list(lm.stream(TEXTS[0], 4)),
        "left only": lambda: lm.span_logprobs(*SPAN, mode="causal"),
    }


def active_adapter(lm: gerund.LanguageModel) -> dict[str, Callable[[], object]]:
    """Return the verbs that it takes part in: encoding, under plans of every kind, and infilling."""
    plans = [AttentionPlan(name) for name in ("causal", "bidir", "mask0-bidir", "inter-back", "extra-bidir")]
    encoders = {plan.name: lm.with_encoder(replace(lm.encoder, attention=plan)) for plan in plans}
    found = {name: (lambda own=own: own.encode(TEXTS)) for name, own in encoders.items()}
    return found | {
        "tokens": lambda: lm.encode_tokens(TEXTS),
        "both sides": lambda: lm.span_logprobs(*SPAN, mode="infill"),
        "infill": lambda: lm.infill("a dog in [blank] thing", lengths=[2, 3]).scores,
    }


@pytest.mark.slow
def test_no_verb_ever_sees_the_weights_of_another(models) -> None:
    plain, lm = models
    verbs = inactive(lm) | active_adapter(lm)
    wanted = {name: verb() for name, verb in (inactive(plain) | active_adapter(lm)).items()}
    without = {name: verb() for name, verb in active_adapter(plain).items()}
    assert not any(same(wanted[name], without[name]) for name in without)
    found = {name: verb() for name, verb in verbs.items()}
    assert [name for name in verbs if not same(found[name], wanted[name])] == []

    wrong: list[object] = []
    barrier = threading.Barrier(len(verbs))

    def repeat(name: str) -> None:
        barrier.wait()
        try:
            for _ in range(ROUNDS):
                if not same(verbs[name](), wanted[name]):
                    wrong.append(name)
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=repeat, args=(name,)) for name in verbs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
