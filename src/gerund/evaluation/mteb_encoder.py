"""A language model as MTEB's evaluators want to see an encoder.

Knows: MTEB's encoder protocol, prompts by task. Does not know: tasks, data, how vectors are made.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from gerund.errors import ModelError
from gerund.evaluation.contender import Contender
from gerund.language_model import LanguageModel

_DOCUMENT = "document"


class MTEBEncoder:
    """A model that ``mteb.evaluate`` accepts (``mteb.models.EncoderProtocol``).

    All texts of a call are encoded at once, so that gerund sorts and batches them by length. Vectors are given
    as they were pooled unless told otherwise: similarities are cosines either way, while the logistic regression
    that MTEB classifies with loses most of what lies in normalised vectors of a plain language model (Banking77
    with a causal model of 260k parameters: .369 raw, .196 normalised).

    Args:
        model: a language model, or a contender whose embeddings are kept.
        name: what MTEB calls the model in its results; None takes the model's name.
        prompts: by MTEB task name (``STSBenchmark``) or type (``STS``), the name first. Documents of retrieval
            and re-ranking never get one: there the prompt belongs to the query (Look Both Ways, appendix B).
            A task without one is read with the encoder's own prompt.
        normalize: give every vector length 1.
        show_progress: None shows a bar on a terminal.

    ::

        mteb.evaluate(MTEBEncoder(gerund.load("./model")), mteb.get_task("STSBenchmark"))
    """

    def __init__(
        self,
        model: LanguageModel | Contender,
        *,
        name: str | None = None,
        prompts: Mapping[str, str] | None = None,
        normalize: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        self._contender = model if isinstance(model, Contender) else Contender(model.name, model)
        self._name = name or self._contender.name
        self._prompts = dict(prompts or {})
        self._normalize = normalize
        self._show = show_progress

    @cached_property
    def mteb_model_meta(self) -> Any:
        """MTEB's description of the model; its revision is our fingerprint, so that no cache mixes two plans."""
        from mteb.models import ModelMeta

        one = self._contender
        known = {"revision": one.fingerprint, "embed_dim": one.dimensions, "max_tokens": one.max_length}
        return ModelMeta.create_empty(overwrites={"name": self._name, **known})

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **_kwargs: Any
    ) -> np.ndarray:
        """Encode the texts of MTEB's batches.

        Args:
            inputs: batches with a list of ``text`` each.
            task_metadata: MTEB's; its name and type choose the prompt.
            prompt_type: ``query``, ``document`` or None.

        Returns:
            ``(n, D)`` float32.

        Raises:
            ModelError: the model gives vectors that are not finite.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        prompt = None if prompt_type == _DOCUMENT else self._prompt_for(task_metadata)
        vectors = self._contender.encode(texts, prompt=prompt, normalize=self._normalize, show=self._show)
        if not np.isfinite(vectors).all():
            raise ModelError(f"{self._name} gives vectors that are not finite numbers, which nothing can be scored on")
        return vectors

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with each of ``(m, D)``: ``(n, m)``; 0 for a zero vector."""
        return _directions(embeddings1) @ _directions(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each vector ``(n, D)`` with its partner: ``(n,)``; 0 for a zero vector."""
        return (_directions(embeddings1) * _directions(embeddings2)).sum(dim=-1)

    def _prompt_for(self, task_metadata: Any) -> str | None:
        return self._prompts.get(task_metadata.name, self._prompts.get(task_metadata.type))


def _directions(vectors: Any) -> torch.Tensor:
    """Return vectors of length 1, in float32; zero vectors stay zero."""
    return torch.nn.functional.normalize(torch.atleast_2d(torch.as_tensor(vectors, dtype=torch.float32)), dim=-1)
