"""Tokenize texts with their prompts and templates, and turn what the model computes from them into final vectors."""

from collections.abc import Sequence

import numpy as np

from gerund.checks import check_texts
from gerund.errors import ConfigError
from gerund.inference.encode.batches import Encodes, ReadsTexts, encode_tokens
from gerund.inference.encode.spans import check_words, word_token_states
from gerund.inference.tokens import Empty, InputFormat, Overflow, Tokens, tokenize
from gerund.models.vectors import unit
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import NO_TRANSFORM, PromptText, Template, templates_around
from gerund.types import EncodeResult


def text_tokens(
    runtime: ReadsTexts,
    texts: Sequence[str],
    prompt: str | None = None,
    empty: Empty = "error",
    overflow: Overflow = "truncate",
    *,
    offsets: bool = False,
    prompt_name: str | None = None,
    warn: bool = True,
) -> list[Tokens | None]:
    """Return texts as ``encode`` reads them, prompt and special tokens included; None for an empty text.

    Raises:
        ConfigError: the encoder reads a text several times, each in another template.
    """
    templates, before = _around(runtime, prompt, prompt_name)
    if len(templates) > 1:
        raise ConfigError(
            f"the template {runtime.config.template!r} reads a text {len(templates)} times; only encode can do that"
        )
    return _tokens(runtime, texts, templates[0], before, empty, overflow, offsets=offsets, warn=warn)


def template_tokens(
    runtime: ReadsTexts,
    texts: str | Sequence[str],
    prompt: str | None = None,
    empty: Empty = "error",
    overflow: Overflow = "truncate",
    *,
    prompt_name: str | None = None,
    warn: bool = False,
) -> list[list[Tokens | None]]:
    """Return the tokens of every text, once for each template in which ``encode`` reads it.

    Raises:
        TextError: a text is empty, too long, or not a string.
        ConfigError: there is no prompt of that name, or the transform was not fitted.
    """
    demand_fitted(runtime)
    checked = check_texts(texts)
    templates, before = _around(runtime, prompt, prompt_name)
    return [_tokens(runtime, checked, template, before, empty, overflow, warn=warn) for template in templates]


def demand_fitted(runtime: ReadsTexts) -> None:
    """Raise ``ConfigError`` where the encoder's transform was not fitted."""
    if runtime.config.transform != NO_TRANSFORM and runtime.transform is None:
        raise ConfigError(
            f"the transform {runtime.config.transform!r} was not fitted for this encoder config; call fitted(texts), "
            "or load the model with a file of texts as sample"
        )


def _around(runtime: ReadsTexts, prompt: str | None, name: str | None) -> tuple[tuple[Template, ...], str]:
    """Return the templates that texts are read in under a prompt, and what of the prompt precedes them."""
    config = runtime.config
    if runtime.why_no_vectors:
        raise ConfigError(runtime.why_no_vectors)
    return templates_around(config.prompt_text(prompt, name), config.templates, config.attention.name)


def _tokens(
    runtime: ReadsTexts,
    texts: Sequence[str],
    template: Template,
    prompt: str,
    empty: Empty,
    overflow: Overflow,
    *,
    offsets: bool = False,
    warn: bool = True,
) -> list[Tokens | None]:
    config = runtime.config
    input_format = InputFormat(
        prompt=prompt,
        template=template,
        prepends=bool(config.prepend),
        append_eos=config.append_eos,
        repeat_text=runtime.plan.repeats_text and template.between is None,
        max_length=None if runtime.max_length is None else runtime.max_length - runtime.room_behind,
        empty=empty,
        overflow=overflow,
        follows_sentence_transformers=config.follows_sentence_transformers,
        normalizes=config.normalizes_texts,
    )
    return tokenize(runtime.tokenizer, texts, input_format, offsets=offsets, warn=warn)


def final_vectors(
    config: EncoderConfig, passes: Sequence[np.ndarray], normalize: bool | None = None, dimensions: int | None = None
) -> np.ndarray:
    """Return the vectors of ``encode`` from those of each template: their mean, truncated and normalized."""
    vectors = passes[0] if len(passes) == 1 else np.mean(passes, axis=0)
    vectors = np.ascontiguousarray(vectors[:, :dimensions])
    return unit(vectors) if (config.normalize if normalize is None else normalize) else vectors


def with_usage(vectors: np.ndarray, tokens: Sequence[Sequence[Tokens | None]]) -> EncodeResult:
    """Return vectors with the token counts of their texts; ``tokens`` is from ``template_tokens``."""
    by_text = list(zip(*tokens, strict=True))
    return EncodeResult(
        vectors,
        [sum(0 if text is None else len(text) for text in same) for same in by_text],
        [any(text is not None and text.is_cut for text in same) for same in by_text],
    )


def word_states(
    runtime: Encodes,
    sentences: Sequence[Sequence[str]],
    prompt: str | None,
    prompt_name: str | None = None,
    *,
    batch_tokens: int | None = None,
    show: bool | None = None,
) -> list[tuple[list[str], Tokens, np.ndarray]]:
    """Return the words, tokens and states ``(n_tokens, D)`` of sentences that are split into words."""
    before = PromptText(runtime.config.prompt_text(prompt, prompt_name))
    checked = check_words(sentences)
    tokens = text_tokens(runtime, [" ".join(words) for words in checked], before, offsets=True)
    states = encode_tokens(runtime, tokens, batch_tokens=batch_tokens, show=show)
    return [
        (words, text, state) for words, text, state in zip(checked, tokens, states, strict=True) if text is not None
    ]


def encode_word_tokens(
    runtime: Encodes, sentences: Sequence[Sequence[str]], prompt: str | None = None, *, show: bool | None = None
) -> list[list[np.ndarray]]:
    """Return the states ``(n_tokens, D)`` of every word's tokens, for sentences that are split into words.

    A word that was lost because its sentence is too long for the model has no rows.

    >>> lm = gerund.load()
    >>> [[one, other]] = encode_word_tokens(lm.runtime, [["unbelievably", "so"]])
    >>> one.shape[1] == lm.model.config.hidden_size
    True
    """
    return [
        word_token_states(words, text, state)
        for words, text, state in word_states(runtime, sentences, prompt, show=show)
    ]
