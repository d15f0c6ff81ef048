"""Read vectors as text: answer tokens map a vector or states to embeddings, which the model continues."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gerund.checks import check_texts
from gerund.errors import ConfigError, TextError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.encode.texts import text_tokens
from gerund.inference.generate.session import Session, read_embeddings
from gerund.models.heads import AnswerTokens


def is_one(given: Any) -> bool:
    """Whether one vector or text is given, and not several.

    >>> is_one(np.zeros(3)), is_one(np.zeros((1, 3))), is_one("a"), is_one(["a"])
    (True, False, True, False)
    """
    return isinstance(given, str) or (isinstance(given, np.ndarray) and given.ndim == 1)


@torch.no_grad()
def sessions_of(
    runtime: EncoderRuntime, given: np.ndarray | str | Sequence[str], weights: Callable[[], str]
) -> list[Session]:
    """Return a session for each vector, or for that of each text; see ``LanguageModel.read_vector``."""
    answers = runtime.answers
    if answers is None:
        raise ConfigError("this model has no answer tokens, which vectors are read by; `gerund train gen` trains some")
    read = _of_texts if not isinstance(given, np.ndarray) else _of_vectors
    opening_BTD = answers.opening(runtime.model, read(runtime, answers, given))
    return [read_embeddings(runtime.model, runtime.tokenizer, one_TD[None], weights) for one_TD in opening_BTD]


def _of_vectors(runtime: EncoderRuntime, answers: AnswerTokens, given: Any) -> Tensor:
    """Return vectors ``(B, E)``, checked."""
    if answers.settings.prefix != "vector":
        raise ConfigError(
            "these answer tokens make text of their states, which a vector does not hold; give the texts, or train "
            "with prefix: vector"
        )
    vectors_BE = np.atleast_2d(given)
    if vectors_BE.ndim != 2 or vectors_BE.shape[1] != runtime.width:
        raise TextError(f"vectors to read have {runtime.width} dimensions each, not the shape {np.shape(given)}")
    if vectors_BE.dtype.kind != "f" or not np.isfinite(vectors_BE).all():
        raise TextError("vectors to read are finite numbers, float32 as encode gives them")
    return torch.from_numpy(vectors_BE.astype(np.float32)).to(runtime.device)


def _of_texts(runtime: EncoderRuntime, answers: AnswerTokens, given: Any) -> Tensor:
    """Return the states ``(B, R, W)`` behind texts, or the vectors ``(B, E)`` where those are read."""
    tokens = [text for text in text_tokens(runtime, check_texts(given)) if text is not None]
    if not tokens:
        raise TextError("there is no vector or text to read")
    states_BRW, begin = runtime.states(tokens)
    if answers.settings.prefix == "states":
        return states_BRW
    return torch.from_numpy(runtime.pooled(tokens, states_BRW, begin)).to(runtime.device)
