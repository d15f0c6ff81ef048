"""``Seq2SeqModel``: a T5 with the verbs of ``LanguageModel``, its encoder for vectors and its decoder for text.

GUR, section III-C: encoder, decoder and projection head, which "can be employed independently".

Knows: which half does what. Does not know: how any of it is done.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from gerund.config import Rerank, Sampling, sampling_or
from gerund.errors import ConfigError, UnsupportedModelError
from gerund.exporting.formats import Export
from gerund.inference.encode.classifier import TextClassifier
from gerund.inference.generate.session import Session
from gerund.inference.infill import sentinels
from gerund.inference.infill.infilling import BLANK, Method
from gerund.inference.likelihood.spans import SpanMode
from gerund.inference.tokens import check_texts
from gerund.language_model import LanguageModel
from gerund.models.encoder_decoder import copy_weights, encoder_of
from gerund.seq2seq_encoder import Seq2SeqEncoder
from gerund.types import Generation, Infill


class Seq2SeqModel(Seq2SeqEncoder, LanguageModel):
    """A T5 that encodes, writes and fills gaps; made by ``gerund.load``.

    ``encode`` reads texts with the encoder alone, and the projection head where there is one. ``generate`` gives the
    prompt to the encoder and lets the decoder write; ``infill`` puts a sentinel into each gap. What needs a
    decoder-only model (scores by likelihood, the hybrid mask, exports) is refused.

    Attributes:
        head: projects the pooled state; None without one.
    """

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
        batch_size: int = 16,
        samples: int = 1,
    ) -> list[Generation]:
        """Let the decoder write, for each prompt that the encoder reads.

        The arguments are those of ``LanguageModel.generate``; re-ranking is for models that continue their prompt.

        Raises:
            TextError: a prompt is blank, no string, or longer than the encoder reads.
            ConfigError: a setting is impossible, or ``rerank`` is given.
        """
        self._refuse_rerank(rerank)
        return super().generate(prompts, max_new_tokens, sampling, batch_size=batch_size, samples=samples)

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
    ) -> Iterator[str]:
        """Yield what the decoder writes for one prompt; the arguments are those of ``generate``."""
        self._refuse_rerank(rerank)
        return super().stream(prompt, max_new_tokens, sampling)

    def infill(
        self,
        text: str,
        *,
        blank: str = BLANK,
        max_tokens: int = 32,
        lengths: int | Sequence[int] | None = None,
        sampling: Sampling | None = None,
        beams: int = 1,
        samples: int = 1,
        method: Method = "infill",
        shots: int = 0,
    ) -> Infill:
        """Fill the gaps of a text by sentinels, all of them at once (T5; GUR, section V-C).

        The model decides how long a filling is. With ``samples`` several are sampled, and that with the highest mean
        log-probability is kept.

        Args:
            text: the text. Spaces before a gap are written by the model; all else stays as it is.
            blank: what marks a gap in it.
            max_tokens: tokens of a filling at most.
            lengths: must be None: the model decides.
            sampling: how tokens are chosen; None is greedy.
            beams: must be 1.
            samples: how many fillings are sampled; above 1 it needs a temperature above 0.
            method: must be ``infill``.
            shots: must be 0.

        Raises:
            TextError: the text is no string, has no gap or nothing else, or is too long.
            ModelError: the tokenizer has no sentinels (``<extra_id_0>``, ...).
            ConfigError: a setting that is for decoder-only models.
        """
        other = {"lengths": lengths is not None, "beams": beams != 1, "method": method != "infill", "shots": shots != 0}
        for name, given in other.items():
            if given:
                raise ConfigError(f"{name} is for decoder-only models; {self.name} fills gaps by sentinels")
        [checked] = check_texts([text])
        return sentinels.fill(
            self.model,
            self.tokenizer,
            checked,
            blank=blank,
            max_tokens=max_tokens,
            sampling=sampling_or(sampling),
            samples=samples,
        )[0]

    def for_representation(self) -> Seq2SeqEncoder:
        """Return encoder and head alone (GUR, section V-A: GurForSequenceRepresentation).

        The weights are this model's, so training one trains the other. Once this model is let go of, the decoder's
        memory is free. The vectors and the fingerprint are those of this model.
        """
        half = encoder_of(self.model)
        copy_weights(half)
        name = f"the encoder of {self.name}"
        return Seq2SeqEncoder(half, self.tokenizer, self.encoder, name=name, head=self.head)

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
        return TextClassifier(self.for_representation().runtime, num_labels, dropout=dropout)

    def encode_and_keep(self, text: str, prompt: str | None = None) -> tuple[np.ndarray, Session]:
        """Refuse: the decoder cannot go on from what the encoder has read."""
        del text, prompt
        self._refuse("keep what encoding has read for generation")

    def span_logprobs(self, left: str, span: str, right: str, *, mode: SpanMode = "infill") -> np.ndarray:
        """Refuse: the hybrid mask is for decoder-only models."""
        del left, span, right, mode
        self._refuse("read a span under the hybrid mask")

    def export(
        self, folder: Any, format: Literal["sentence-transformers", "merged"], *, overwrite: bool = False
    ) -> Export:
        """Refuse: these formats are for decoder-only models; ``save`` writes a folder that transformers reads."""
        del folder, overwrite
        self._refuse(f"be exported as {format}; save() writes what transformers reads")

    def _refuse_rerank(self, rerank: Rerank | None) -> None:
        if rerank is not None:
            raise ConfigError(f"{self.name} writes beside its prompt, not behind it; re-rank with a decoder-only model")

    def _refuse(self, what: str) -> NoReturn:
        raise UnsupportedModelError(f"{self.name} is a {self.model.config.model_type} model and cannot {what}")
