"""``Seq2SeqModel``: a T5, its encoder for vectors and its decoder for text; a sibling of ``LanguageModel``.

GUR, section III-C: encoder, decoder and projection head, which "can be employed independently".

Knows: which part does what. Does not know: how any of it is done.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Unpack

import torch

from gerund.checks import check_texts
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.generative_model import GenerativeModel
from gerund.inference.encode.classifier import TextClassifier
from gerund.inference.infill import sentinels
from gerund.inference.infill.infilling import BLANK, InfillKeywords, Method, each, infill_sampling
from gerund.models.architectures import copy_weights, encoder_of
from gerund.seq2seq_encoder import Seq2SeqEncoder
from gerund.settings.aliases import takes_aliases
from gerund.settings.sampling import Sampling
from gerund.types import Infill


class Seq2SeqModel(Seq2SeqEncoder, GenerativeModel):
    """A T5 that encodes, writes and fills gaps; made by ``gerund.load``.

    ``encode`` reads texts with the encoder alone, and the projection head where there is one. ``generate`` gives the
    prompt to the encoder and lets the decoder write; ``infill`` puts a sentinel into each gap. What needs a
    decoder-only model (re-ranking, scores by likelihood, the hybrid mask, exports) it has not.

    Attributes:
        head: projects the pooled state; None without one.
    """

    @takes_aliases
    def infill(
        self,
        text: str | Sequence[str],
        *,
        blank: str = BLANK,
        max_tokens: int = 32,
        lengths: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        beams: int = 1,
        samples: int = 1,
        method: Method = "infill",
        shots: int = 0,
        **options: Unpack[InfillKeywords],
    ) -> Any:
        """Fill the gaps of a text by sentinels, all of them at once (T5; GUR, section V-C).

        The model determines how long a filling is. With ``samples`` several are sampled, and that with the highest mean
        log-probability is kept.

        Args:
            text: the text, or several. Spaces before a gap are written by the model; all else stays as it is.
            blank: what marks a gap in it.
            max_tokens: tokens of a filling at most.
            lengths: must be None: the model determines it.
            sampling: how tokens are chosen; None is greedy.
            beams: must be 1.
            samples: how many fillings are sampled; above 1 it needs a temperature above 0.
            method: must be ``infill``.
            shots: must be 0.
            options: as in ``LanguageModel.infill``.

        Raises:
            TextError: the text is no string, has no gap or nothing else, or is too long.
            ModelError: the tokenizer has no sentinels (``<extra_id_0>``, ...).
            ConfigError: a setting that is for decoder-only models.
        """
        other = {"lengths": lengths is not None, "beams": beams != 1, "method": method != "infill", "shots": shots != 0}
        for name, given in other.items():
            if given:
                raise ConfigError(f"{name} is for decoder-only models; {self.name} fills gaps by sentinels")

        chosen = infill_sampling(sampling, options)

        def fill(one: str) -> Infill:
            [checked] = check_texts([one])
            return sentinels.fill(
                self.model,
                self.tokenizer,
                checked,
                blank=blank,
                max_tokens=max_tokens,
                sampling=chosen,
                samples=samples,
            )[0]

        return each(fill, text)

    def for_representation(self) -> Seq2SeqEncoder:
        """Return encoder and head alone (GUR, section V-A: GurForSequenceRepresentation).

        The weights are this model's, so training one trains the other. Once this model is let go of, the decoder's
        memory is free. The vectors and the fingerprint are those of this model.
        """
        encoder = encoder_of(self.model)
        copy_weights(encoder)
        name = f"the encoder of {self.name}"
        own = encoder, self.tokenizer, self.encoder
        return Seq2SeqEncoder(*own, name=name, head=self.head, transform=self.transform)

    def for_classification(self, num_labels: int, *, dropout: float = 0.1) -> TextClassifier:
        """Return encoder, head and a linear layer over ``num_labels`` labels, to be trained as any torch module.

        GUR, section V-B: GurForSequenceClassification. The encoder is shared with this model, not copied: training
        the classifier changes it.

        Args:
            num_labels: how many labels there are, at least 2.
            dropout: of the vector, while training.

        Raises:
            ConfigError: fewer than two labels.
        """
        with torch.random.fork_rng(devices=[]):  # the layer takes its first weights from torch's generator
            return TextClassifier(self.for_representation().runtime, num_labels, dropout=dropout)

    def __getattr__(self, name: str) -> NoReturn:
        """Say why a verb of decoder-only models is not there; to ``hasattr`` it is not."""
        if name in _DECODER_ONLY:
            kind = self.model.config.model_type
            raise _NoSuchVerbError(f"{self.name} is a {kind} model and cannot {_DECODER_ONLY[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


# Verbs of ``LanguageModel`` that need a decoder-only model, and what they would do.
_DECODER_ONLY = {
    "read": "keep what it has read for generation",
    "encode_and_keep": "keep what encoding has read for generation",
    "span_logprobs": "read a span under the hybrid mask",
    "export": "be exported; save() writes what transformers reads",
}


class _NoSuchVerbError(UnsupportedModelError, AttributeError):
    """A verb that this kind of model does not have."""
