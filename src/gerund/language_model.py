"""``LanguageModel``: an encoder that also writes, is saved and exported; each verb one call into the rest.

Knows: which function does what. Does not know: how any of it is done.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self

import numpy as np

from gerund.config import EncoderConfig, Rerank, Sampling, sampling_or
from gerund.errors import ConfigError
from gerund.exporting import formats
from gerund.exporting.folders import write_settings
from gerund.exporting.formats import Export
from gerund.inference.generate import generation
from gerund.inference.generate.reranking import Judge, search, stream_search
from gerund.inference.generate.session import Session, encode_and_keep
from gerund.inference.infill import expansion, infilling
from gerund.inference.infill.infilling import BLANK, Method
from gerund.inference.likelihood.spans import SpanMode, SpannedText, span_logprobs
from gerund.inference.tokens import check_candidates, check_texts
from gerund.jobs.folders import atomic_folder
from gerund.models import loading
from gerund.models.adapters import base_state
from gerund.models.encoder_decoder import is_encoder_decoder
from gerund.scoring.dual import DualScorer
from gerund.scoring.likelihood import LikelihoodScorer
from gerund.scoring.registry import find_scorer
from gerund.text_encoder import TextEncoder
from gerund.types import Generation, Infill, Scorer

# How tokens are sampled where several continuations are ranked and nothing else is said (RankGen, section 3.2).
NUCLEUS = Sampling(temperature=1.0, top_p=0.9)


class LanguageModel(TextEncoder):
    """One language model that writes and encodes with the same weights.

    Made by ``gerund.load``. ``model`` is the Hugging Face module, untouched: without a plan in the call its
    logits are bit-equal to those of plain transformers. Safe to use from several threads at once.

    Attributes:
        model: the Hugging Face causal language model.
        tokenizer: its tokenizer; batches are padded on its ``padding_side``.
        encoder: how the model is read as an encoder.
        name: what it was loaded from.
        runtime: model, settings and resolved plan together, as the functions of ``inference`` take them.
    """

    scorer: DualScorer | None = None
    """The encoder's own scorer of continuations, where it was trained to be one."""

    def __repr__(self) -> str:
        plan = self.encoder.attention.with_defaults(self.n_layers)
        k = "" if plan.k is None else f", k={plan.k}"
        return f"<LanguageModel {self.name}: {plan.name}{k}, {self.encoder.pooling}, {self.dimensions} dimensions>"

    def with_encoder(self, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, read another way.

        The model's own scorer does not go with it where it has no encoder config of its own.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        other = super().with_encoder(encoder)
        if encoder != self.encoder and self.scorer is not None and not self.scorer.has_own_config:
            other.scorer = None
        return other

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
        """Continue each prompt with the untouched model.

        Args:
            prompts: one prompt or many, of any lengths. The empty prompt starts from nothing.
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: how tokens are chosen; None is greedy, or with ``rerank`` nucleus sampling with p 0.9. A
                continuation depends on its prompt and its seed, and on no other prompt of the call.
            rerank: write several continuations and keep what a scorer likes best (RankGen, section 2.3).
            batch_size: continuations in one pass; with ``rerank`` it is chosen by how many there are of a prompt.
            samples: how many continuations of each prompt; above 1 they are sampled. Not with ``rerank``, which has
                its own.

        Returns:
            ``samples`` times a ``Generation`` for each prompt, those of one prompt together, in the order of the
            prompts; with ``rerank`` one ``Ranked`` a prompt, which also has the score and all that competed.

        Raises:
            TextError: a prompt is no string or fills the model's context.
            ConfigError: a setting is impossible, such as ranking greedy continuations, which are all the same.

        >>> from gerund import Rerank, Sampling
        >>> settings = Rerank(samples=2, beams=2, every=4, scorer="overlap")
        >>> [story] = gerund.load().generate("The old man", 8, Sampling(temperature=1.0, seed=0), rerank=settings)
        >>> story.rank_score == story.beams[0].rank_score >= story.beams[1].rank_score
        True
        """
        if rerank is not None:
            if samples != 1:
                raise ConfigError(f"samples={samples} beside rerank: set the samples of Rerank, which keeps the best")
            checked = check_texts(prompts)
            ranked = search(
                self.model,
                self.tokenizer,
                checked,
                self._judge(checked, rerank, sampling),
                rerank,
                max_new_tokens=max_new_tokens,
                sampling=sampling_or(sampling, NUCLEUS),
            )
            return list(ranked)
        return generation.generate(
            self.model,
            self.tokenizer,
            check_texts(prompts),
            max_new_tokens=max_new_tokens,
            sampling=sampling_or(sampling),
            batch_size=batch_size,
            samples=samples,
        )

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 64,
        sampling: Sampling | None = None,
        *,
        rerank: Rerank | None = None,
    ) -> Iterator[str]:
        """Continue one prompt and yield the text piece by piece; the arguments are those of ``generate``.

        With ``rerank`` a piece comes as soon as all continuations that are kept agree on it.
        """
        [checked] = check_texts([prompt])
        if rerank is not None:
            return stream_search(
                self.model,
                self.tokenizer,
                checked,
                self._judge([checked], rerank, sampling),
                rerank,
                max_new_tokens=max_new_tokens,
                sampling=sampling_or(sampling, NUCLEUS),
            )
        return generation.stream(
            self.model, self.tokenizer, checked, max_new_tokens=max_new_tokens, sampling=sampling_or(sampling)
        )

    def score(
        self, prefixes: Sequence[str], continuations: Sequence[Sequence[str]], scorer: str | Scorer | None = None
    ) -> list[list[float]]:
        """Say how well texts continue a prefix (RankGen, appendix C.6).

        Args:
            prefixes: any number of texts.
            continuations: for each prefix its candidates, as they follow it: with the space that begins them.
            scorer: ``pmi``, ``avg_cll``, ``cll``, ``avg_ull``, ``self_certainty``, ``overlap``, ``random``;
                ``own``, this model's, if it was trained to be one; ``default``, the embedded default's; a scorer's
                folder or hub id; or an object with a ``score`` method. None takes its own if it has one, else ``pmi``.

        Returns:
            For each prefix a score for each of its candidates; higher is better. Scores of one prefix by one scorer
            can be compared, others not.

        Raises:
            TextError: a text is no string, a candidate is blank, or there are not as many lists as prefixes.
            ConfigError: there is no such scorer.

        >>> lm = gerund.load()
        >>> [[right, wrong]] = lm.score(["The king of France and his"], [[" queen went to Paris.", " oil was sold."]])
        >>> right > wrong
        True
        """
        checked, texts = check_candidates(prefixes, continuations)
        return find_scorer(scorer, self, own=self.scorer).score(checked, texts)

    def _judge(self, prompts: Sequence[str], rerank: Rerank, sampling: Sampling | None) -> Judge:
        if not isinstance(rerank, Rerank):
            raise ConfigError(f"rerank is a Rerank, such as Rerank(scorer='pmi'), not {rerank!r}")
        seed = sampling_or(sampling).seed
        seed = seed if isinstance(seed, int) else 0
        scorer = find_scorer(rerank.scorer, self, own=self.scorer, seed=seed)
        if isinstance(scorer, DualScorer | LikelihoodScorer) and rerank.every is not None:
            scorer = scorer.growing()
        return lambda numbers, texts: scorer.score([prompts[number] for number in numbers], texts)

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
        """Fill the gaps of a text, seeing both sides of them (MAGNET, sections 3.1 and 3.2.3).

        Where the right side stands depends on how long the gap is, so a gap is filled once for each candidate
        length. Each filling is scored: the sum of the log-probabilities of its tokens under the hybrid mask and of
        the first 16 tokens behind the gap (up to the next gap) under the untouched causal model, divided by how many
        they are. Of each length the filling with the highest score is kept; which length is taken, the text behind
        the gap decides alone, where there is any, since a mean over a long span nearly always looks better. The
        adapter for filling in takes part under the hybrid mask only.

        Several gaps are filled from left to right; each sees the earlier fillings, and the text behind later gaps at
        a distance that leaves room for them. A length above 32 is filled 32 tokens at a time, each chunk becoming
        context of the next while the right side stays where it is (MAGNET, appendix F). A filling never holds a
        special token.

        Args:
            text: the text. Spaces before a gap are written by the model; all else stays as it is.
            blank: what marks a gap in it.
            max_tokens: the longest length that is tried when ``lengths`` is None: 1, 2, 3, 4, 6, 8, 12, ... up to it.
            lengths: the length of a gap in tokens, or several to try.
            sampling: how tokens are chosen; None is greedy.
            beams: follow the so many most probable fillings of each length at a time; not with sampling.
            samples: sample so many fillings of each length; needs a temperature above 0.
            method: ``infill``; or ``left-only``, which continues the left side with the untouched causal model and
                scores with that alone, the paper's baseline; or a prompt to the untouched model (appendix B):
                ``blank``, ``contextual``, ``prefix-suffix`` or ``line-by-line``, which write until they stop, at
                most ``max_tokens``.
            shots: solved examples in the prompt, 0 or 5.

        Returns:
            The whole text and the spans in it.

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
        return infilling.infill(
            self.model,
            self.tokenizer,
            text,
            blank=blank,
            max_tokens=max_tokens,
            lengths=lengths,
            sampling=sampling,
            beams=beams,
            samples=samples,
            method=method,
            shots=shots,
            adapter=self.adapters.name("infill"),
        )

    def expand(
        self,
        query: str,
        count: int = 5,
        *,
        keep: Sequence[str] = (),
        share: float = expansion.SHARE,
        max_tokens: int = expansion.MAX_TOKENS,
        sampling: Sampling | None = None,
    ) -> list[str]:
        """Return other ways to ask, with some of a query's words written anew by ``infill`` (GUR, section V-C).

        Args:
            query: with gaps of its own (``[blank]``) filled as it is; else words are masked at random, anew each time.
            count: how many at most; what says the same as the query or as each other is left out.
            keep: words of the query, or several together, that are never masked.
            share: share of the words that is masked; at least one is.
            max_tokens: tokens of a filling at most.
            sampling: how tokens are chosen; None is nucleus sampling with p 0.9. Its seed determines the masks too.

        Returns:
            The most probable fillings first. A warning says when there are fewer than ``count``.

        Raises:
            InputError: the query has no word, lacks what is to be kept, or is too long; or a setting is impossible.
        """
        return expansion.expand(
            lambda text, own: self.infill(text, max_tokens=max_tokens, sampling=own),
            *(query, count),
            keep=keep,
            share=share,
            blank=BLANK,
            sampling=sampling_or(sampling, NUCLEUS),
            begins=is_encoder_decoder(self.model) or self.tokenizer.bos_token_id is not None,
        )

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save weights, tokenizer and ``gerund.json`` in one step; each adapter goes into a folder of its own.

        The folder opens with ``AutoModelForCausalLM`` as a plain language model with the same weights, in the
        type in which they are held here.

        Args:
            folder: where to.
            overwrite: replace what is there.

        Raises:
            OutputExistsError: there is something already.
            ResourceError: the disk is full; nothing is left behind.
        """
        with atomic_folder(folder, overwrite=overwrite) as work:
            self.save_into(work)

    def save_into(self, folder: Path) -> None:
        """Write the files of ``save`` into a folder that is there."""
        loading.save_model(self.model, self.tokenizer, base_state(self.model), folder)
        write_settings(folder, self.encoder, self.n_layers, self.fingerprint(), adapters=self.adapters)
        if self.scorer is not None:
            self.scorer.save(folder)
        if self.head is not None:
            self.head.save(folder)

    def export(
        self, folder: str | Path, format: Literal["sentence-transformers", "merged"], *, overwrite: bool = False
    ) -> Export:
        """Write the encoder for other tools, in the type in which its weights are held here.

        Args:
            folder: where to.
            format: ``sentence-transformers``, a folder for ``SentenceTransformer``; or ``merged``, a plain
                model with its scorer where that reads as the encoder does. Either has the encoder's adapter merged in.
            overwrite: replace what is there.

        Returns:
            Where it lies and how to load it. Plain sentence-transformers reads causal and wholly bidirectional
            encoders; other plans need ``gerund.integrations.sentence_transformers.load``.

        Raises:
            ConfigError: an unknown format.
            ModelError: the adapter cannot be merged into the weights.
            OutputExistsError: there is something already.
            ResourceError: the disk is full; nothing is left behind.
        """
        scorer = None if self.scorer is None or self.scorer.has_own_config else self.scorer
        return formats.export(self.runtime, folder, format, scorer=scorer, overwrite=overwrite)

    def encode_and_keep(self, text: str, prompt: str | None = None) -> tuple[np.ndarray, Session]:
        """Encode one text causally and keep what the pass computed, so that generation continues without reading again.

        Args:
            text: the text.
            prompt: put before the text, as in ``encode``: not pooled, but part of what is continued.

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
        return encode_and_keep(self.runtime, self.encoder.prompt_text(prompt), *check_texts([text]))
