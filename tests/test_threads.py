"""Many threads on one model: reading it another way disturbs nobody's pass."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest

import gerund
import gerund.attention.probe
from gerund import AttentionPlan, Sampling
from gerund.language_model import LanguageModel
from tests.tiny import byte_tokenizer, tiny

SECONDS = 4
TEXTS = ["the cat", "a dog in the garden", "x"]
SAMPLED = Sampling(temperature=1.0, seed=3)


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Let threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_switching")
def test_reading_another_way_beside_generation_and_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer()
    lm = LanguageModel(tiny("llama", vocab_size=len(tokenizer)), tokenizer)
    # Every plan is verified each time, as if it were new.
    monkeypatch.setattr("gerund.attention.probe._verified", {})
    monkeypatch.setattr("gerund.language_model.verify_once", gerund.attention.probe.verify)
    expected_texts, expected_vectors = lm.generate(TEXTS, 4, SAMPLED), lm.encode(TEXTS)
    expected_span = lm.infill("the [blank] in", lengths=[2])
    ends = time.monotonic() + SECONDS
    names = cycle(["bidir", "mask0-bidir", "mask0-all", "inter-back"])
    failures: list[str] = []
    done = [0] * 8

    def read_another_way() -> None:
        other = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan(next(names))))
        assert np.isfinite(other.encode(TEXTS)).all()

    def generate() -> None:
        assert lm.generate(TEXTS, 4, SAMPLED) == expected_texts

    def encode() -> None:
        assert np.array_equal(lm.encode(TEXTS), expected_vectors)

    def infill() -> None:
        assert lm.infill("the [blank] in", lengths=[2]) == expected_span

    def work(place: int, step: Callable[[], None]) -> None:
        while time.monotonic() < ends and not failures:
            try:
                step()
            except BaseException as error:
                failures.append(f"{step.__name__}: {type(error).__name__}: {error}")
            done[place] += 1

    steps = [read_another_way, generate, encode, read_another_way, generate, encode, read_another_way, infill]
    threads = [threading.Thread(target=work, args=(place, step)) for place, step in enumerate(steps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert min(done) > 0
