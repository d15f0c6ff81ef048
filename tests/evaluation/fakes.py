"""A system without a model, for tests that say what its vectors are."""

from typing import Any

import numpy as np

from gerund.evaluation.systems.base import Encoder


class FakeEncoder(Encoder):
    """An encoder that only has what a test gives it; its vectors are all the same."""

    dimensions = 3
    max_length = None

    @property
    def name(self) -> str:
        return self.label

    @property
    def fingerprint(self) -> str:
        return self.label

    def describe(self) -> dict[str, Any]:
        return {"model": self.label}

    def prompt_text(self, prompt: str | None) -> str:
        return prompt or ""

    def compute(self, texts: list[str], prompt: str | None, show: bool | None, kept: Any = None) -> np.ndarray:
        return np.ones((len(texts), self.dimensions), np.float32)
