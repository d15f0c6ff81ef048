"""``TokenEncoder``: texts as tokens, and the vectors of tokens, spans and words; each verb one call into ``inference``.

Knows: which function does what. Does not know: vectors of whole texts.
"""

from collections.abc import Sequence
from typing import Unpack

import numpy as np

from gerund.checks import check_texts, flag, flag_or_none
from gerund.encoder_model import EncoderModel
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode import spans as stretches
from gerund.inference.encode.spans import WordPooling, check_words, word_token_states, word_vectors
from gerund.inference.tokens import Empty, InputFormat, Overflow, Tokens, tokenize
from gerund.models.vectors import unit
from gerund.settings.aliases import TokenAliases, takes_aliases
from gerund.settings.templates import NO_TRANSFORM, PromptText, Template, templates_around


class TokenEncoder(EncoderModel):
    """What a model's encoder says of the parts of a text."""

    def _around(self, prompt: str) -> tuple[tuple[Template, ...], str]:
        """Return the templates that texts are read in under a prompt, and what of it stands before those."""
        return templates_around(prompt, self.encoder.templates, self.encoder.attention.name)

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
        templates, before = self._around(self.encoder.prompt_text(prompt, prompt_name))
        if len(templates) > 1:
            raise ConfigError(
                f"the template {self.encoder.template!r} reads a text {len(templates)} times; only encode can"
            )
        return self._tokens(texts, templates[0], before, empty, overflow, offsets=offsets)

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
            repeat_text=self.runtime.plan.repeats_text and template.between is None,
            max_length=self.max_length,
            empty=empty,
            overflow=overflow,
            follows_sentence_transformers=self.encoder.follows_sentence_transformers,
            normalizes=self.encoder.normalizes_texts,
        )
        return tokenize(self.tokenizer, texts, input_format, offsets=offsets, warn=warn)

    @takes_aliases
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
        batch_size: int | None = None,
        **aliases: Unpack[TokenAliases],
    ) -> list[np.ndarray]:
        """Return the last hidden state, after the final norm, of every token of each text.

        Special tokens are included, as the tokenizer yields them; prompt and padding are not. The arguments
        are those of ``encode``, ``normalize_embeddings`` and ``show_progress_bar`` among them.

        Returns:
            One ``(n_tokens, d)`` float32 array a text.

        >>> lm = gerund.load()
        >>> [states] = lm.encode_tokens(["a cat"])
        >>> len(states) == len(lm.tokenizer("a cat").input_ids)
        True
        """
        del aliases  # replaced by what they stand for
        normalize, show_progress = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        tokens = self.tokens(check_texts(texts), prompt, empty, overflow, prompt_name=prompt_name)
        limits = {"batch_tokens": batch_tokens, "batch_size": batch_size}
        states = encoding.encode_tokens(self.runtime, tokens, **limits, show=show_progress)
        return [unit(item) for item in states] if normalize else states

    @takes_aliases
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
        **aliases: Unpack[TokenAliases],
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
            aliases: ``normalize_embeddings`` and ``show_progress_bar``, as in ``encode``.

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
        del aliases  # replaced by what they stand for
        normalize, show_progress = flag_or_none("normalize", normalize), flag_or_none("show_progress", show_progress)
        if self.encoder.transform != NO_TRANSFORM and self.transform is None:
            raise self._not_fitted()
        checked = check_texts(texts)
        places = stretches.check_spans(spans, checked)
        tokens = self.tokens(checked, prompt, offsets=True, prompt_name=prompt_name)
        vectors = stretches.encode_spans(self.runtime, tokens, places, batch_tokens=batch_tokens, show=show_progress)
        wanted = self.encoder.normalize if normalize is None else normalize
        return [unit(own) for own in vectors] if wanted else vectors

    @takes_aliases
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
        **aliases: Unpack[TokenAliases],
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
            aliases: ``normalize_embeddings`` and ``show_progress_bar``, as in ``encode``.

        Returns:
            One ``(n_words, d)`` float32 array a sentence. A word that an over-long sentence lost to the
            model's limit has a zero vector (and there is a warning).

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_words([["EU", "rejects", "German", "call"]])
        >>> vectors.shape == (4, lm.model.config.hidden_size)
        True
        """
        del aliases  # replaced by what they stand for
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
        >>> one.shape[1] == lm.model.config.hidden_size
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

    def _not_fitted(self) -> ConfigError:
        return ConfigError(
            f"the transform {self.encoder.transform!r} was not fitted for this encoder config; fitted(texts) does it, "
            "or a file of texts as sample"
        )
