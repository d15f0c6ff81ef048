"""``TextEncoder``: one language model read as an encoder, each verb one call into ``inference``.

Knows: which function does what. Does not know: how any of it is done, or that the model writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np
import torch

from gerund.checks import check_dimensions, flag, flag_or_none, one_of
from gerund.encoder_model import EncoderModel
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode import spans as stretches
from gerund.inference.encode.words import WordPooling, check_words, word_token_states, word_vectors
from gerund.inference.tokens import Empty, InputFormat, Overflow, Tokens, check_texts, tokenize
from gerund.jobs.unfinished import Unfinished
from gerund.methods import NO_FRAME, NO_TRANSFORM, PromptText, Template
from gerund.models.pooling import unit
from gerund.models.transforms import fit
from gerund.types import EncodeResult

Output = Literal["numpy", "torch"]


class TextEncoder(EncoderModel):
    """A decoder-only model that turns texts into vectors; what writes too is built on it."""

    def encode(
        self,
        texts: str | Sequence[str],
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
        output: Output = "numpy",
        *,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        kept: Unfinished | None = None,
        prompt_name: str | None = None,
    ) -> Any:
        """Turn texts into vectors.

        Args:
            texts: one text or many.
            prompt: a text put before every text and not pooled; None takes the encoder's default.
            normalize: whether vectors get length 1; None does as the encoder's settings say.
            dimensions: keep only the first so many numbers of each vector (then normalise again).
            batch_tokens: tokens a batch, padding included; None chooses by device. When memory runs out,
                batches are halved by themselves.
            show_progress: None shows a bar on a terminal.
            output: ``numpy`` or ``torch``.
            empty: ``error``, or ``zeros`` for a zero vector where a text is empty.
            overflow: ``truncate`` cuts an over-long text at its end, with one warning; or ``error``.
            kept: where finished batches are kept, so that whoever is interrupted goes on with the very same vectors.
            prompt_name: the name of one of the encoder's prompts, which is taken in the place of ``prompt``.

        Returns:
            ``(n, dimensions)`` float32 in the order of ``texts``; ``(dimensions,)`` for a single string.

        Raises:
            TextError: a text is empty, too long, or not a string.
            ConfigError: an unknown setting or impossible number.

        >>> lm = gerund.load()
        >>> lm.encode(["a cat", "a dog"]).shape == (2, lm.dimensions)
        True
        """
        one_of("output", output, ["numpy", "torch"])
        normalize = flag_or_none("normalize", normalize)
        show_progress = flag_or_none("show_progress", show_progress)
        check_dimensions(dimensions, self.dimensions)
        checked, text = check_texts(texts), self.encoder.prompt_text(prompt, prompt_name)
        tokens = [self._tokens(checked, one, text, empty, overflow) for one in self._templates]
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept)
        if isinstance(texts, str):
            vectors = vectors[0]
        return torch.from_numpy(vectors) if output == "torch" else vectors

    def encode_with_usage(
        self,
        texts: str | Sequence[str],
        prompt: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
        *,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        kept: Unfinished | None = None,
        prompt_name: str | None = None,
    ) -> EncodeResult:
        """Turn texts into vectors, and say how many tokens were read and which texts were cut; as ``encode``."""
        check_dimensions(dimensions, self.dimensions)
        checked, text = check_texts(texts), self.encoder.prompt_text(prompt, prompt_name)
        tokens = [self._tokens(checked, one, text, empty, overflow, warn=False) for one in self._templates]
        return EncodeResult(
            self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept),
            [sum(0 if own is None else len(own) for own in same) for same in zip(*tokens, strict=True)],
            [any(own is not None and own.is_cut for own in same) for same in zip(*tokens, strict=True)],
        )

    @property
    def _templates(self) -> tuple[Template, ...]:
        return self.encoder.templates or (NO_FRAME,)

    def _vectors_of(
        self,
        tokens: Sequence[Sequence[Tokens | None]],
        normalize: bool | None,
        dimensions: int | None,
        batch_tokens: int | None,
        show: bool | None,
        kept: Unfinished | None,
    ) -> np.ndarray:
        """Return the vectors of texts that were tokenized once a template: the mean of each over its templates."""
        if self.encoder.transform != NO_TRANSFORM and self.transform is None:
            raise self._not_fitted()
        found = []
        for number, one in enumerate(tokens):
            reading = None if kept is None else kept.reading(number, len(tokens))
            found.append(encoding.encode(self.runtime, one, batch_tokens=batch_tokens, show=show, kept=reading))
        vectors = found[0] if len(found) == 1 else np.mean(found, axis=0)
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
        return unit(vectors) if (self.encoder.normalize if normalize is None else normalize) else vectors

    def _not_fitted(self) -> ConfigError:
        return ConfigError(
            f"the transform {self.encoder.transform!r} was not fitted for this encoder config; fitted(texts) does it, "
            "or a file of texts as sample"
        )

    def encode_tokens(
        self,
        texts: str | Sequence[str],
        prompt: str | None = None,
        normalize: bool = False,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
        *,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        prompt_name: str | None = None,
    ) -> list[np.ndarray]:
        """Return the last hidden state, after the final norm, of every token of each text.

        Special tokens are included, as the tokenizer yields them; prompt and padding are not. The arguments
        are those of ``encode``.

        Returns:
            One ``(n_tokens, d)`` float32 array a text.

        >>> lm = gerund.load()
        >>> [states] = lm.encode_tokens(["a cat"])
        >>> len(states) == len(lm.tokenizer("a cat").input_ids)
        True
        """
        normalize, show_progress = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        tokens = self.tokens(check_texts(texts), prompt, empty, overflow, prompt_name=prompt_name)
        states = encoding.encode_tokens(self.runtime, tokens, batch_tokens=batch_tokens, show=show_progress)
        return [unit(item) for item in states] if normalize else states

    def encode_spans(
        self,
        texts: Sequence[str],
        spans: Sequence[Sequence[tuple[int, int]]],
        prompt: str | None = None,
        normalize: bool | None = None,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
        *,
        prompt_name: str | None = None,
    ) -> list[np.ndarray]:
        """Turn stretches of texts into vectors, each pooled from one pass over its whole text (late chunking).

        So a stretch's vector depends on what stands around it, as far as the attention plan lets its tokens see it. The
        vectors can be compared with those of ``encode``, which they equal where a stretch is its whole text and no
        special token is pooled.

        Args:
            texts: the texts.
            spans: for each text its stretches: first character, and the one behind the last. They may overlap.
            prompt: as in ``encode``.
            normalize: as in ``encode``.
            batch_tokens: as in ``encode``.
            show_progress: as in ``encode``.
            prompt_name: as in ``encode``.

        Returns:
            For each text ``(stretches, dimensions)`` float32; zeros for a stretch that an over-long text lost to the
            model's limit (and there is a warning).

        Raises:
            TextError: a text is empty, or a stretch does not lie in its text.
            ConfigError: the encoder reads a text several times, each in another template.

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_spans(["A cat. A dog."], [[(0, 6), (7, 13)]])
        >>> vectors.shape == (2, lm.dimensions)
        True
        """
        normalize, show_progress = flag_or_none("normalize", normalize), flag_or_none("show_progress", show_progress)
        if self.encoder.transform != NO_TRANSFORM and self.transform is None:
            raise self._not_fitted()
        checked = check_texts(texts)
        places = stretches.check_spans(spans, checked)
        tokens = self.tokens(checked, prompt, offsets=True, prompt_name=prompt_name)
        vectors = stretches.encode_spans(self.runtime, tokens, places, batch_tokens=batch_tokens, show=show_progress)
        wanted = self.encoder.normalize if normalize is None else normalize
        return [unit(own) for own in vectors] if wanted else vectors

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        prompt: str | None = None,
        normalize: bool = False,
        batch_tokens: int | None = None,
        show_progress: bool | None = None,
        *,
        pooling: WordPooling = "mean",
        shift: bool = False,
        prompt_name: str | None = None,
    ) -> list[np.ndarray]:
        """Return one vector a word, for sentences that are split into words already.

        Args:
            sentences: lists of words.
            prompt: as in ``encode``.
            normalize: give every vector length 1.
            batch_tokens: as in ``encode``.
            show_progress: as in ``encode``.
            pooling: ``mean`` over the word's tokens, or its ``first`` token.
            shift: read the outputs that precede the word's tokens (MAGNET, section 3.2).
            prompt_name: as in ``encode``.

        Returns:
            One ``(n_words, d)`` float32 array a sentence. A word that an over-long sentence lost to the
            model's limit has a zero vector (and there is a warning).

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_words([["EU", "rejects", "German", "call"]])
        >>> vectors.shape == (4, lm.dimensions)
        True
        """
        normalize, show_progress = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        text_before = self.encoder.prompt_text(prompt, prompt_name)
        vectors = [
            word_vectors(words, text, state, pooling=pooling, shift=shift)
            for words, text, state in self._word_states(sentences, text_before, batch_tokens, show_progress)
        ]
        return [unit(item) for item in vectors] if normalize else vectors

    def encode_word_tokens(
        self,
        sentences: Sequence[Sequence[str]],
        prompt: str | None = None,
        show_progress: bool | None = None,
        *,
        prompt_name: str | None = None,
    ) -> list[list[np.ndarray]]:
        """Return the states of every word's tokens, for sentences that are split into words already.

        Returns:
            For each sentence one ``(n_tokens, D)`` float32 array a word; without rows for a word that an over-long
            sentence lost to the model's limit.

        >>> lm = gerund.load()
        >>> [[one, other]] = lm.encode_word_tokens([["unbelievably", "so"]])
        >>> one.shape[1] == lm.dimensions
        True
        """
        before = self.encoder.prompt_text(prompt, prompt_name)
        found = self._word_states(sentences, before, None, flag_or_none("show_progress", show_progress))
        return [word_token_states(words, text, state) for words, text, state in found]

    def _word_states(
        self,
        sentences: Sequence[Sequence[str]],
        prompt: str,
        batch_tokens: int | None,
        show: bool | None,
    ) -> list[tuple[list[str], Tokens, np.ndarray]]:
        """Return each sentence's words, tokens and states."""
        checked = check_words(sentences)
        tokens = self.tokens([" ".join(words) for words in checked], PromptText(prompt), offsets=True)
        states = encoding.encode_tokens(self.runtime, tokens, batch_tokens=batch_tokens, show=show)
        return [
            (words, text, state) for words, text, state in zip(checked, tokens, states, strict=True) if text is not None
        ]

    def similarity(self, a: Any, b: Any, prompt: str | None = None, *, prompt_name: str | None = None) -> np.ndarray:
        """Return the cosine of every text (or vector) in ``a`` with every one in ``b``.

        Args:
            a: texts, or vectors ``(n, d)``.
            b: texts, or vectors ``(m, d)``.
            prompt: as in ``encode``, before the texts of both sides; where the sides have different ones, encode them.
            prompt_name: as in ``encode``.

        Returns:
            ``(n, m)`` float32.

        >>> lm = gerund.load(prompts={"topic": "About: "})
        >>> lm.similarity("a cat", ["a dog", "snow"], prompt_name="topic").shape
        (1, 2)
        """
        before = PromptText(self.encoder.prompt_text(prompt, prompt_name))
        left, right = (unit(np.atleast_2d(self._vectors(item, before))) for item in (a, b))
        if left.shape[1] != right.shape[1]:
            raise ConfigError(f"vectors of {left.shape[1]} and {right.shape[1]} dimensions cannot be compared")
        return left @ right.T

    def fitted(self, texts: Sequence[str], prompt: str | None = None, *, prompt_name: str | None = None) -> Self:
        """Return the same model with its ``transform`` fitted on the vectors of texts; they need no labels.

        Args:
            texts: a sample of what is going to be encoded; whitening needs more texts than a vector has numbers.
            prompt: as in ``encode``.
            prompt_name: as in ``encode``.

        Raises:
            ConfigError: the encoder config names no transform, or the sample is too small for it.

        >>> lm = gerund.load(transform="all-but-the-top").fitted(["a cat", "a dog", "a house", "rain", "snow", "hail"])
        >>> lm.transform.name
        'all-but-the-top'
        """
        if self.encoder.transform == NO_TRANSFORM:
            raise ConfigError("there is no transform to fit; set one, such as transform='whitening'")
        plain = self.with_encoder(replace(self.encoder, transform=NO_TRANSFORM))
        sample = [text for text in dict.fromkeys(check_texts(texts)) if text.strip()]
        vectors = np.zeros((0, self.dimensions))
        if sample:
            vectors = plain.encode(sample, prompt, False, prompt_name=prompt_name)
        return self.with_transform(fit(self.encoder.transform, vectors))

    def tokens(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        *,
        offsets: bool = False,
        prompt_name: str | None = None,
    ) -> list[Tokens | None]:
        """Return texts as ``encode`` reads them, prompt and special tokens included; None for an empty text.

        Raises:
            ConfigError: the encoder reads a text several times, each in another template.
        """
        if len(self._templates) > 1:
            raise ConfigError(
                f"the template {self.encoder.template!r} reads a text {len(self._templates)} times; only encode can"
            )
        text = self.encoder.prompt_text(prompt, prompt_name)
        return self._tokens(texts, self._templates[0], text, empty, overflow, offsets=offsets)

    def _tokens(
        self,
        texts: Sequence[str],
        template: Template,
        prompt: str,
        empty: Empty,
        overflow: Overflow,
        *,
        offsets: bool = False,
        warn: bool = True,
    ) -> list[Tokens | None]:
        input_format = InputFormat(
            prompt=prompt,
            template=template,
            prepends=bool(self.encoder.prepend),
            append_eos=self.encoder.append_eos,
            repeat_text=self.runtime.plan.repeats_text,
            max_length=self.max_length,
            empty=empty,
            overflow=overflow,
        )
        return tokenize(self.tokenizer, texts, input_format, offsets=offsets, warn=warn)

    def _vectors(self, item: Any, prompt: str) -> np.ndarray:
        if isinstance(item, torch.Tensor):
            return item.detach().cpu().float().numpy()
        if isinstance(item, np.ndarray) and item.dtype.kind == "f":
            return item.astype(np.float32)
        return self.encode(item, prompt)
