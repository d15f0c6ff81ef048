"""Models and requests that the tests of engines share."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gerund import Sampling
from gerund.inference.generate import generation
from gerund.inference.generate.config import GenerationConfig
from gerund.language_model import LanguageModel
from gerund.types import Generation
from tests.tiny import byte_tokenizer, tiny

SEEDED = Sampling(temperature=1.0, seed=5)
LONG = GenerationConfig.of(40, Sampling(temperature=1.0, seed=1), {})
PROMPTS = ("the cat", "in", "an other thin thing", "x", "the end in the end", "a", "er", "that and this")


def tiny_lm(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: object) -> LanguageModel:
    """Return a tiny random model; prompts and texts have 64 tokens at most."""
    tokenizer = byte_tokenizer()
    return LanguageModel(tiny(kind, vocab_size=len(tokenizer), **changes).to(dtype), tokenizer)


def alone(lm: LanguageModel, prompt: str, settings: GenerationConfig) -> list[Generation]:
    """Return what the library gives for one request by itself."""
    return generation.generate(lm.model, lm.tokenizer, [prompt], settings)


def requests(most: int = 12) -> list[tuple[str, GenerationConfig]]:
    """Return requests of every kind, which write different numbers of tokens."""
    options = [
        (None, {}),
        (SEEDED, {}),
        (Sampling(frequency_penalty=0.5, repetition_penalty=1.3), {}),
        (None, {"regex": "[a-e]{3,9}"}),
        (Sampling(temperature=0.8, top_p=0.9, seed=2), {"n": 2}),
        (None, {"stop": ["e", "zz"]}),
        (Sampling(temperature=1.0, top_k=9, seed=8), {"logprobs": 2}),
        (None, {"logprobs": 0}),
    ]
    return [
        (prompt, GenerationConfig.of(3 + (5 * number) % most, sampling, own))  # type: ignore[arg-type]
        for number, (prompt, (sampling, own)) in enumerate(zip(PROMPTS, options, strict=True))
    ]


@contextmanager
def held(engine: object) -> Iterator[None]:
    """Keep an engine's thread busy until the block ends, so that what is asked for meanwhile waits."""
    began, ends = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        ends.wait(20)

    engine.submit_call(wait, tokens=0)  # type: ignore[attr-defined]
    assert began.wait(20)
    try:
        yield
    finally:
        ends.set()


def rows_of(found):
    """Everything that a result says."""
    return [(one.text, one.token_ids, one.score, one.finished, one.stop, one.logprobs, one.usage) for one in found]
