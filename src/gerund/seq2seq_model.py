"""``Seq2SeqModel``: a T5, whose encoder embeds texts and whose decoder generates.

GUR, section III-C: encoder, decoder and projection head, which "can be employed independently".
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel

from gerund.checks import check_texts
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.inference.encode.runtime import TextClassifier
from gerund.inference.generate.prompts import Prompt
from gerund.inference.generate.reranking import Judge
from gerund.inference.infill import sentinels
from gerund.language_model import LanguageModel
from gerund.models.architectures import copy_weights, encoder_of
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import ResolvedPlan
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Infill


class Seq2SeqModel(LanguageModel):
    """A T5 that embeds, generates and infills; made by ``gerund.load``.

    ``encode`` uses the encoder alone, with the projection head if there is one; its attention is bidirectional, so no
    plan is sent. ``generate`` gives the prompt to the encoder, and the decoder generates a text of its own; ``infill``
    puts a sentinel into each blank. What needs a decoder-only model (re-ranking of completions, likelihoods, the hybrid
    mask, exports) is not supported.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}: {self.encoder.pooling}, {self.dimensions} dimensions>"

    def _attach(self) -> int:
        return int(self.model.config.num_layers)

    def _verify(self, plan: ResolvedPlan) -> None:
        if not plan.is_bidirectional:
            raise ConfigError(f"{self.name} has a bidirectional encoder of its own: attention must be bidir")

    @staticmethod
    def _sends_plan(plan: ResolvedPlan, encoder: EncoderConfig) -> bool:
        del plan, encoder
        return False

    def _hashed_part(self) -> PreTrainedModel:
        # With the decoder or without it, the vectors are the same.
        return encoder_of(self.model)

    def _judge(self, prompts: Sequence[Prompt], rerank: Rerank, sampling: Sampling) -> Judge:
        del prompts, rerank, sampling
        raise ConfigError(
            f"{self.name} generates a text of its own instead of continuing its prompt; re-rank with a "
            "decoder-only model"
        )

    def _filler(self, **settings: Any) -> Callable[[str], Infill]:
        usual = {"lengths": None, "beams": 1, "method": "infill", "shots": 0}
        for name, value in usual.items():
            if settings.pop(name) != value:
                raise ConfigError(f"{name} is for decoder-only models; {self.name} infills by sentinels")

        def fill(text: str) -> Infill:
            [checked] = check_texts([text])
            return sentinels.fill(self.model, self.tokenizer, checked, **settings)[0]

        return fill

    def for_representation(self) -> "Seq2SeqEncoder":
        """Return encoder and head alone (GUR, section V-A: GurForSequenceRepresentation).

        The weights are this model's, so training one trains the other. Once this model is garbage-collected, the
        decoder's memory is free. The vectors and the fingerprint are those of this model.
        """
        encoder = encoder_of(self.model)
        copy_weights(encoder)
        name = f"the encoder of {self.name}"
        parts = encoder, self.tokenizer, self.encoder
        return Seq2SeqEncoder(*parts, name=name, head=self.head, transform=self.transform)

    def for_classification(self, num_labels: int, *, dropout: float = 0.1) -> TextClassifier:
        """Return encoder, head and a linear layer over ``num_labels`` labels, to be trained as any torch module.

        GUR, section V-B: GurForSequenceClassification. The encoder is shared with this model, not copied: training
        the classifier changes it.

        Args:
            num_labels: number of labels, at least 2.
            dropout: of the vector, while training.

        Raises:
            ConfigError: fewer than two labels.
        """
        with torch.random.fork_rng(devices=[]):  # the layer takes its first weights from torch's generator
            return TextClassifier(self.for_representation().runtime, num_labels, dropout=dropout)


class Seq2SeqEncoder(Seq2SeqModel):
    """The encoder of a T5 alone, with the projection head if there is one: it embeds, and doesn't generate."""

    @property
    def decoding(self) -> None:
        """None: it does not write."""


class _UnsupportedMethodError(UnsupportedModelError, AttributeError):
    """A method that this kind of model does not have."""


class _Unsupported:
    """Stands in for an inherited method: ``hasattr`` says that there is none, and using it explains why."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __get__(self, lm: Seq2SeqModel | None, kind: type[Seq2SeqModel]) -> NoReturn:
        name = kind.__name__ if lm is None else f"{lm.name} is a {lm.model.config.model_type} model and"
        raise _UnsupportedMethodError(f"{name} cannot {self.what}")


for _name, _what in {
    "prefill": "keep what it has read for generation",
    "encode_and_prefill": "keep what encoding has read for generation",
    "span_logprobs": "read a span under the hybrid mask",
    "export": "be exported; save() writes what transformers reads",
}.items():
    setattr(Seq2SeqModel, _name, _Unsupported(_what))

for _name in ("generate", "chat", "stream", "agenerate", "achat", "astream", "infill", "expand", "score", "save"):
    setattr(Seq2SeqEncoder, _name, _Unsupported(f"{_name}: only the encoder is left of it"))
