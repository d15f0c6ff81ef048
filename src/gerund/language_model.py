"""``LanguageModel``: a decoder-only model that writes and encodes; each verb one call into the rest.

Knows: which function does what. Does not know: how any of it is done.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from gerund.checks import check_texts
from gerund.errors import ConfigError
from gerund.generative_model import GenerativeModel
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.prompts import Prompt, plain_text, prompt_text
from gerund.inference.generate.reranking import Judge, search, stream_search
from gerund.inference.generate.sequence import Piece
from gerund.inference.generate.session import Session, encode_and_keep, read_prompt
from gerund.inference.infill import infilling
from gerund.inference.infill.infilling import BLANK, InfillKeywords, Method, each, infill_sampling, untrained_to_fill
from gerund.inference.likelihood import SpanMode, SpannedText, span_logprobs
from gerund.progress import say_once
from gerund.scoring.dual_encoder import DualScorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.registry import find_scorer
from gerund.settings.aliases import takes_aliases
from gerund.settings.encoder import ExportFormat
from gerund.settings.sampling import Rerank, Sampling
from gerund.types import Ranked

if TYPE_CHECKING:
    from gerund.exporting.formats import Export


class LanguageModel(GenerativeModel):
    """One language model that writes and encodes with the same weights.

    Made by ``gerund.load``. ``model`` is the Hugging Face module, untouched: without a plan in the call its
    logits are bit-equal to those of plain transformers in the same dtype. Safe to use from several threads at once.

    Attributes:
        model: the Hugging Face causal language model.
        tokenizer: its tokenizer; batches are padded on its ``padding_side``.
        encoder: how the model is read as an encoder.
        name: what it was loaded from.
        runtime: model, settings and resolved plan together, as the functions of ``inference`` take them.
    """

    def __repr__(self) -> str:
        plan = self.encoder.attention.label(self.n_layers)
        return f"<LanguageModel {self.name}: {plan}, {self.encoder.pooling}, {self.dimensions} dimensions>"

    def _search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> list[Ranked]:
        return search(
            self.model,
            self.tokenizer,
            prompts,
            self._judge(prompts, rerank, settings.sampling),
            rerank,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            cancelled=stop,
        )

    def _stream_search(
        self, prompt: Prompt, settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> Iterator[Piece]:
        return stream_search(
            self.model,
            self.tokenizer,
            prompt,
            self._judge([prompt], rerank, settings.sampling),
            rerank,
            max_new_tokens=settings.max_new_tokens,
            sampling=settings.sampling,
            cancelled=stop,
        )

    def _judge(self, prompts: Sequence[Prompt], rerank: Rerank, sampling: Sampling) -> Judge:
        if not isinstance(rerank, Rerank):
            raise ConfigError(f"rerank is a Rerank, such as Rerank(scorer='pmi'), not {rerank!r}")
        seed = sampling.seed if isinstance(sampling.seed, int) else 0
        scorer = find_scorer(rerank.scorer, self, seed=seed)
        # Likelihoods are those behind a conversation as the model reads it; other scorers know no templates.
        as_text = prompt_text if isinstance(scorer, LikelihoodScorer) else plain_text
        prefixes = [as_text(self.tokenizer, prompt) for prompt in prompts]
        if isinstance(scorer, DualScorer | LikelihoodScorer) and rerank.every is not None:
            scorer = scorer.incremental()
        return lambda numbers, texts: scorer.score([prefixes[number] for number in numbers], texts)

    def span_logprobs(self, left: str, span: str, right: str, *, mode: SpanMode = "infill") -> np.ndarray:
        """Return the log-probability of every token of ``span`` between its neighbours.

        Args:
            left: what precedes the span.
            span: the span.
            right: what follows it.
            mode: ``infill`` sees both sides under MAGNET's hybrid mask (section 3.1), with the adapter for it;
                ``causal`` only the left, without one.

        Returns:
            Natural logarithms ``(n,)`` float32. The tokens are those of the joined text; one that holds a
            character of the span is the span's.

        Raises:
            TextError: a text is no string or too long, or the span is empty or begins a text that nothing precedes.
            UnsupportedModelError: the hybrid mask does not reach every layer.

        >>> lm = gerund.load()
        >>> len(lm.span_logprobs("The old man", " looked at", " the sea.", mode="causal")) > 0
        True
        """
        text = SpannedText.between(*check_texts([left, span, right]))
        own = self.adapters.name("infill")
        return span_logprobs(self.model, self.tokenizer, [text], mode, show=False, adapter=own)[0][0]

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
        """Fill the gaps of a text, seeing both sides of them (MAGNET, sections 3.1 and 3.2.3).

        Where the right side stands depends on how long the gap is, so a gap is filled once for each candidate
        length. Each filling is scored: the sum of the log-probabilities of its tokens under the hybrid mask and of
        the first 16 tokens behind the gap (up to the next gap) under the untouched causal model, divided by how many
        they are. Of each length the filling with the highest score is kept; which length is taken, the text behind
        the gap determines alone, where there is any, since a mean over a long span nearly always looks better. The
        adapter for filling in takes part under the hybrid mask only.

        Several gaps are filled from left to right; each sees the earlier fillings, and the text behind later gaps at
        a distance that leaves room for them. A length above 32 is filled 32 tokens at a time, each chunk becoming
        context of the next while the right side stays where it is (MAGNET, appendix F). A filling never holds a
        special token.

        Args:
            text: the text, or several, each filled by itself. Spaces before a gap are written by the model; all else
                stays as it is.
            blank: what marks a gap in it.
            max_tokens: the longest length that is tried when ``lengths`` is None: 1, 2, 3, 4, 6, 8, 12, ... up to it.
                The other methods write until the model ends its text, and so much at most.
            lengths: the length of a gap in tokens, or several to try.
            sampling: how tokens are chosen; None is greedy.
            beams: follow the so many most probable fillings of each length at a time; not with sampling.
            samples: sample so many fillings of each length; needs a temperature above 0.
            method: ``infill``; or ``left-only``, which continues the left side with the untouched causal model, the
                paper's baseline: the text behind the gap chooses nothing, neither a filling nor its length, which is
                where the model ends its text (among several ``lengths`` the one at which that is most probable); or a
                prompt to the untouched model (appendix B):
                ``blank``, ``contextual``, ``prefix-suffix`` or ``line-by-line``, which write until they stop, at
                most ``max_tokens``.
            shots: solved examples in the prompt, 0 or 5.
            options: the fields of ``Sampling`` in the place of ``sampling``: ``temperature``, ``top_p``, ``seed``, ...;
                and ``max_new_tokens`` for ``max_tokens``.

        Returns:
            The whole text and the spans in it: an ``Infill``, or for several texts a list of them.

        Raises:
            TextError: the text is no string or not valid Unicode, has no gap or nothing else, two gaps stand next to
                each other, nothing precedes the first one and the tokenizer has no beginning token, or the text is
                too long for the model's context.
            ConfigError: a setting is impossible, or of no use to the method.
            UnsupportedModelError: the hybrid mask does not reach every layer.

        >>> lm = gerund.load()
        >>> filled = lm.infill("The old man looked at [blank] and went home.", lengths=[1, 2])
        >>> filled.text == "The old man looked at" + filled.spans[0] + " and went home."
        True
        """
        fill = partial(
            infilling.infill,
            self.model,
            self.tokenizer,
            blank=blank,
            max_tokens=max_tokens,
            lengths=lengths,
            sampling=infill_sampling(sampling, options),
            beams=beams,
            samples=samples,
            method=method,
            shots=shots,
            adapter=self.adapters.name("infill"),
        )
        filled = each(fill, text)
        if method == "infill" and self.fills_gaps is False:
            say_once(untrained_to_fill(self.name))
        return filled

    def export(self, folder: str | Path, format: ExportFormat, *, overwrite: bool = False) -> "Export":
        """Write the encoder for other tools, in the type in which its weights are held here.

        Args:
            folder: where to.
            format: ``sentence-transformers``, a folder for ``SentenceTransformer``; ``merged``, a plain
                model, whose scorer is kept only if its plan and pooling equal the encoder's; ``onnx`` or
                ``openvino``, a graph from token ids to vectors in float32, or ``onnx-int8``, with weights in 8 bits.
                Each has the encoder's adapter merged in. Or ``gguf`` or ``gguf-q8_0``, the untouched language model
                for llama.cpp, which generates, in its own type or in 8 bits.
            overwrite: replace what is there.

        Returns:
            Where it lies and how to load it. Plain sentence-transformers reads causal and wholly bidirectional
            encoders; other plans need ``gerund.integrations.sentence_transformers.load``.

        Raises:
            ConfigError: an unknown format, or a plan that it has no place for.
            ModelError: torch cannot export the architecture, the adapter cannot be merged into the weights, or the
                other program computes something else.
            MissingDependencyError: the format needs an extra that is not installed.
            OutputExistsError: there is something already.
            ResourceError: the disk is full; nothing is left behind.
        """
        scorer = None if self.scorer is None or self.scorer.has_own_config else self.scorer
        # Exporters know all formats, which few processes write.
        from gerund.exporting import formats

        return formats.export(self.runtime, folder, format, scorer=scorer, overwrite=overwrite)

    def read(self, prompt: Prompt) -> Session:
        """Read a prompt with the untouched model and keep its keys and values, so that nothing is read twice.

        Args:
            prompt: as in ``generate``: a text, token ids, or the messages of a conversation.

        Returns:
            The session: ``generate`` and ``stream`` continue the prompt, ``read`` reads on, ``save`` keeps it.

        Raises:
            TextError: the prompt is none, or fills the model's context.
            ModelError: it is a conversation, and the model has no chat template.

        >>> lm = gerund.load()
        >>> session = lm.read("The old man looked at")
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        return read_prompt(self.model, self.tokenizer, prompt, lambda: self.weights_hash)

    def encode_and_keep(
        self, text: str, prompt: str | None = None, *, prompt_name: str | None = None
    ) -> tuple[np.ndarray, Session]:
        """Encode one text causally and keep what the pass computed, so that generation continues without reading again.

        Args:
            text: the text.
            prompt: put before the text, as in ``encode``: not pooled, but part of what is continued.
            prompt_name: as in ``encode``.

        Returns:
            The vector ``(dimensions,)`` float32 of ``encode``, computed in the type of the weights; and the
            session, whose ``generate`` gives what this model's ``generate`` gives for prompt and text.

        Raises:
            ConfigError: the plan is not causal or reads the text twice, or an adapter takes part in encoding: the
                pass would not be one that generation can go on from.
            TextError: the text is empty, no string, or too long; it is never cut.

        >>> lm = gerund.load(attention="causal", adapter="none")
        >>> vector, session = lm.encode_and_keep("The old man looked at")
        >>> session.generate(4).text == lm.generate("The old man looked at", 4)[0].text
        True
        """
        if self.runtime.adapter is not None:
            raise ConfigError(
                "this model encodes with an adapter and writes without it, so generation cannot go on from what "
                'encoding computed; load it with adapter="none", or merge the adapter (gerund convert --merge)'
            )
        [checked] = check_texts([text])
        before = self.encoder.prompt_text(prompt, prompt_name)
        return encode_and_keep(self.runtime, before, checked, lambda: self.weights_hash)
