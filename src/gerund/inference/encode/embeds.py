"""``Embeds``: the embedding methods that torch and packed models share; imports no torch."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, get_args

import numpy as np

from gerund.checks import check_dimensions, check_texts, flag, flag_or_none, one_of
from gerund.errors import ConfigError, MissingDependencyError
from gerund.inference.encode import batches
from gerund.inference.encode import spans as text_spans
from gerund.inference.encode.spans import WordPooling, word_vectors
from gerund.inference.encode.texts import (
    demand_fitted,
    final_vectors,
    template_tokens,
    text_tokens,
    with_usage,
    word_states,
)
from gerund.inference.tokens import Empty, Overflow, Tokens
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.models.fingerprint import fingerprint
from gerund.models.vectors import compared, compared_in_pairs, unit
from gerund.quantization import Precision, check_precision, quantize
from gerund.settings.aliases import EncodeAliases, TokenAliases, VectorAliases, same_keywords, takes_aliases
from gerund.settings.encoder import EncoderConfig
from gerund.settings.templates import PromptText
from gerund.types import EncodeResult

Output = Literal["numpy", "torch"]
OutputValue = Literal["sentence_embedding", "token_embeddings"]


class Embeds:
    """What embeds texts.

    Attributes:
        encoder: the encoder settings.
        runtime: model, settings and resolved plan, as the functions of ``inference`` take them.
        n_layers: number of decoder layers.
        weights_hash: hash of the base weights.
        adapter_hash: hash of the encoder's adapter, projection head and transform; empty without any of them.
    """

    encoder: EncoderConfig
    runtime: Any
    n_layers: int
    weights_hash: Any
    adapter_hash: Any

    @property
    def dimensions(self) -> int:
        """Size of a full vector."""
        return self.runtime.width

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens that ``encode`` reads, prompt and special tokens included."""
        return self.runtime.max_length

    @property
    def max_seq_length(self) -> int | None:
        """``max_length`` by sentence-transformers' name; to change it, load the model with ``max_length``."""
        return self.max_length

    def get_embedding_dimension(self) -> int:
        """Return ``dimensions``, by sentence-transformers' name."""
        return self.dimensions

    def get_sentence_embedding_dimension(self) -> int:
        """Return ``dimensions``, by sentence-transformers' older name."""
        return self.dimensions

    def fingerprint(self, dimensions: int | None = None) -> str:
        """Return the fingerprint of the encoder, 16 hexadecimal digits: it changes when the vectors do.

        Covers weights, adapter, plan, pooling, prompts and ``dimensions``. Store it with embeddings, and don't mix
        embeddings of two fingerprints.
        """
        check_dimensions(dimensions)
        if dimensions == self.dimensions:
            dimensions = None
        return fingerprint(self.weights_hash, self.adapter_hash, self.encoder, self.n_layers, dimensions=dimensions)

    @property
    def space(self) -> str:
        """Identifies the space of the vectors; vectors of two encoders with the same space can be compared.

        It is the fingerprint of the teacher that the encoder was trained to agree with, or else its own. The bundled
        model's is that of its teacher, unless you change its encoder settings:

        >>> lm = gerund.load()
        >>> lm.space == lm.fingerprint()
        False
        >>> lm = gerund.load(attention="causal")
        >>> lm.space == lm.fingerprint()
        True
        """
        declared = None if self.runtime.head is None else self.runtime.head.settings.space
        return declared or self.fingerprint()

    @takes_aliases
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
        kept: ShardCheckpoint | None = None,
        prompt_name: str | None = None,
        precision: Precision = "float32",
        ranges: np.ndarray | None = None,
        batch_size: int | None = None,
        output_value: OutputValue = "sentence_embedding",
        **aliases: Unpack[EncodeAliases],
    ) -> Any:
        """Embed texts.

        Args:
            texts: one text or many.
            prompt: a text put before every text and not pooled; None for the encoder's default.
            normalize: whether vectors get length 1; None for the encoder's setting.
            dimensions: keep only the first ``dimensions`` values of each vector (then normalize again).
            batch_tokens: tokens per batch, padding included; None chooses by device. When memory runs out, batches
                are halved automatically.
            show_progress: None shows a bar on a terminal.
            output: ``numpy`` or ``torch``.
            empty: ``error``, or ``zeros`` for a zero vector where a text is empty.
            overflow: ``truncate`` cuts over-long texts at their end, with one warning; or ``error``.
            kept: where finished batches are stored, so that an interrupted run resumes with the same vectors.
            prompt_name: the name of one of the encoder's prompts, used instead of ``prompt``.
            precision: ``float32``, or fewer bits per value: ``int8``, ``uint8``, ``binary``, ``ubinary`` (see
                ``gerund.quantization``, which searches such vectors).
            ranges: for ``int8`` and ``uint8`` the smallest and largest value of each dimension ``(2, dimensions)``,
                from ``ranges_of``; None for those of these texts, of two or more.
            batch_size: texts per batch at most; None leaves it to ``batch_tokens``. Both limits apply.
            output_value: ``token_embeddings`` returns what ``encode_tokens`` does: one array per text.
            aliases: sentence-transformers' names: ``normalize_embeddings`` is ``normalize``, ``truncate_dim`` is
                ``dimensions``, ``show_progress_bar`` is ``show_progress``, ``convert_to_tensor=True`` is
                ``output="torch"`` and ``convert_to_numpy=True`` is ``output="numpy"``.

        Returns:
            ``(n, dimensions)`` float32 in the order of ``texts``; ``(dimensions,)`` for a single string. In bits, an
            eighth of the values.

        Raises:
            TextError: a text is empty, too long, or not a string.
            ConfigError: an unknown setting, an impossible number, or a setting together with its alias.

        >>> lm = gerund.load()
        >>> lm.encode(["a cat", "a dog"]).shape == (2, lm.dimensions)
        True
        """
        del aliases  # takes_aliases has replaced them
        one_of("output", output, get_args(Output))
        one_of("output_value", output_value, get_args(OutputValue))
        if output_value == "token_embeddings":
            only_texts = {
                "dimensions": dimensions is not None,
                "precision": precision != "float32",
                "ranges": ranges is not None,
                "kept": kept is not None,
            }
            if given := next((name for name, is_given in only_texts.items() if is_given), None):
                raise ConfigError(f"{given} is for vectors of texts; leave it out with output_value={output_value!r}")
            settings: dict[str, Any] = {"empty": empty, "overflow": overflow, "prompt_name": prompt_name}
            limits = (bool(flag_or_none("normalize", normalize)), batch_tokens, show_progress)
            states = self.encode_tokens(texts, prompt, *limits, **settings, batch_size=batch_size)
            listed = [_as_output(state, output) for state in states]
            return listed[0] if isinstance(texts, str) else listed
        normalize = flag_or_none("normalize", normalize)
        show_progress = flag_or_none("show_progress", show_progress)
        if check_precision(precision) not in ("int8", "uint8") and ranges is not None:
            raise ConfigError(f"ranges are for int8 and uint8; leave them out with precision={precision!r}")
        check_dimensions(dimensions, self.dimensions)
        tokens = template_tokens(self.runtime, texts, prompt, empty, overflow, prompt_name=prompt_name, warn=True)
        if precision in ("int8", "uint8") and ranges is None and len(tokens) == 1:
            raise ConfigError(f"one vector has no range to divide into steps: precision={precision!r} needs ranges")
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept, batch_size)
        if precision != "float32":
            vectors = quantize(vectors, precision, ranges)
        if isinstance(texts, str):
            vectors = vectors[0]
        return _as_output(vectors, output)

    @same_keywords(encode)
    def encode_query(self, texts: str | Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        """Embed queries: ``encode`` with the encoder's prompt named ``query``, if it has one.

        The arguments are those of ``encode``; a prompt that you pass is used instead.

        >>> lm = gerund.load(prompts={"query": "Question: "})
        >>> vector = lm.encode_query("how do I bake bread?")
        >>> bool((vector == lm.encode("how do I bake bread?", prompt_name="query")).all())
        True
        """
        return self.encode(texts, *arguments, **self._with_prompt_of("query", arguments, keywords))

    @same_keywords(encode)
    def encode_document(self, texts: str | Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        """Embed documents: ``encode`` with the encoder's prompt named ``document``, if it has one."""
        return self.encode(texts, *arguments, **self._with_prompt_of("document", arguments, keywords))

    def _with_prompt_of(self, name: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """Return keywords of ``encode`` with the prompt of this name, unless a prompt was passed."""
        given = (*arguments[:1], keywords.get("prompt"), keywords.get("prompt_name"))
        if name not in self.encoder.prompts or any(prompt is not None for prompt in given):
            return keywords
        return {**keywords, "prompt_name": name}

    @takes_aliases
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
        kept: ShardCheckpoint | None = None,
        prompt_name: str | None = None,
        **aliases: Unpack[VectorAliases],
    ) -> EncodeResult:
        """Embed texts as ``encode`` does, and return how many tokens each had and which were truncated."""
        del aliases  # takes_aliases has replaced them
        check_dimensions(dimensions, self.dimensions)
        tokens = template_tokens(self.runtime, texts, prompt, empty, overflow, prompt_name=prompt_name)
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept)
        return with_usage(vectors, tokens)

    def _vectors_of(
        self,
        tokens: Sequence[Sequence[Tokens | None]],
        normalize: bool | None,
        dimensions: int | None,
        batch_tokens: int | None,
        show: bool | None,
        kept: ShardCheckpoint | None,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Return the vectors of texts from the tokens of each template."""
        passes = []
        for number, texts in enumerate(tokens):
            kept_pass = None if kept is None else kept.encoding_pass(number, len(tokens))
            limits = {"batch_tokens": batch_tokens, "batch_size": batch_size}
            passes.append(batches.encode(self.runtime, texts, **limits, show=show, resume_from=kept_pass))
        return final_vectors(self.encoder, passes, normalize, dimensions)

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

        Includes the special tokens that the tokenizer adds, but not the prompt. The arguments are those of ``encode``.

        Returns:
            One ``(n_tokens, d)`` float32 array per text.

        >>> lm = gerund.load()
        >>> [states] = lm.encode_tokens(["a cat"])
        >>> len(states) == len(lm.tokenizer("a cat").input_ids)
        True
        """
        del aliases  # takes_aliases has replaced them
        normalize, show_progress = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        tokens = text_tokens(self.runtime, check_texts(texts), prompt, empty, overflow, prompt_name=prompt_name)
        limits = {"batch_tokens": batch_tokens, "batch_size": batch_size}
        states = batches.encode_tokens(self.runtime, tokens, **limits, show=show_progress)
        return [unit(state) for state in states] if normalize else states

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
        """Embed spans of texts, each pooled from one pass over its full text (late chunking).

        A span's vector depends on the text around it, as far as the attention plan lets its tokens see it. It can be
        compared with the vectors of ``encode``, and equals them where a span is its full text and no special token is
        pooled. ``spans`` has for each text its spans, each the first character and the one after the last; they may
        overlap. The other arguments are those of ``encode``.

        Returns:
            For each text ``(spans, dimensions)`` float32; zeros for a span that was truncated away (with a warning).

        Raises:
            TextError: a text is empty, or a span is outside its text.
            ConfigError: the encoder reads a text several times, each in another template.

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_spans(["A cat. A dog."], [[(0, 6), (7, 13)]])
        >>> vectors.shape == (2, lm.dimensions)
        True
        """
        del aliases  # takes_aliases has replaced them
        normalize, show_progress = flag_or_none("normalize", normalize), flag_or_none("show_progress", show_progress)
        demand_fitted(self.runtime)
        checked = check_texts(texts)
        places = text_spans.check_spans(spans, checked)
        tokens = text_tokens(self.runtime, checked, prompt, offsets=True, prompt_name=prompt_name)
        vectors = text_spans.encode_spans(self.runtime, tokens, places, batch_tokens=batch_tokens, show=show_progress)
        return (
            [unit(rows) for rows in vectors]
            if (self.encoder.normalize if normalize is None else normalize)
            else vectors
        )

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
        """Return one vector per word, for sentences that are lists of words.

        ``pooling`` is ``mean`` over the word's tokens, or its ``first`` token; ``shift`` uses the outputs that precede
        the word's tokens (MAGNET, section 3.2). The other arguments are those of ``encode``.

        Returns:
            One ``(n_words, d)`` float32 array per sentence; zeros for a word that was truncated away (with a warning).

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_words([["EU", "rejects", "German", "call"]])
        >>> vectors.shape == (4, lm.model.config.hidden_size)
        True
        """
        del aliases  # takes_aliases has replaced them
        normalize, show = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        states = word_states(self.runtime, sentences, prompt, prompt_name, batch_tokens=batch_tokens, show=show)
        vectors = [word_vectors(words, text, state, pooling=pooling, shift=shift) for words, text, state in states]
        return [unit(rows) for rows in vectors] if normalize else vectors

    def similarity(self, a: Any, b: Any, prompt: str | None = None, *, prompt_name: str | None = None) -> np.ndarray:
        """Return the cosine similarity of every text (or vector) in ``a`` with every one in ``b``.

        An encoder whose author compares vectors otherwise (``encoder.similarity``: ``dot``, ``euclidean`` or
        ``manhattan``) does so here too; distances are negative.

        Args:
            a: texts, or vectors ``(n, d)``.
            b: texts, or vectors ``(m, d)``.
            prompt: as in ``encode``, for the texts of both; where they need different ones, encode them first.
            prompt_name: as in ``encode``.

        Returns:
            ``(n, m)`` float32.

        >>> lm = gerund.load(prompts={"topic": "About: "})
        >>> lm.similarity("a cat", ["a dog", "snow"], prompt_name="topic").shape
        (1, 2)
        """
        return compared(*self._both(a, b, prompt, prompt_name), self.encoder.similarity)

    def similarity_pairwise(
        self, a: Any, b: Any, prompt: str | None = None, *, prompt_name: str | None = None
    ) -> np.ndarray:
        """Return the similarity ``(n,)`` float32 of each text (or vector) in ``a`` with that at its position in ``b``.

        The arguments are those of ``similarity``.

        Raises:
            ConfigError: ``a`` and ``b`` have different lengths.

        >>> gerund.load().similarity_pairwise(["a cat", "rain"], ["a dog", "snow"]).shape
        (2,)
        """
        left, right = self._both(a, b, prompt, prompt_name)
        if len(left) != len(right):
            raise ConfigError(f"a and b must have the same length, got {len(left)} and {len(right)}; see similarity")
        return compared_in_pairs(left, right, self.encoder.similarity)

    def _both(self, a: Any, b: Any, prompt: str | None, prompt_name: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of both sides of a comparison."""
        before = PromptText(self.encoder.prompt_text(prompt, prompt_name))

        def vectors(given: Any) -> np.ndarray:
            if type(given).__module__.partition(".")[0] == "torch" and hasattr(given, "detach"):
                return np.asarray(given.detach().cpu().float())
            if isinstance(given, np.ndarray) and given.dtype.kind == "f":
                return given.astype(np.float32)
            return self.encode(given, before)

        left, right = (np.atleast_2d(vectors(given)) for given in (a, b))
        if left.shape[1] != right.shape[1]:
            raise ConfigError(f"vectors of {left.shape[1]} and {right.shape[1]} dimensions cannot be compared")
        return left, right


def _as_output(values: np.ndarray, output: Output) -> Any:
    """Return values as a tensor, where that is asked for."""
    if output == "numpy":
        return values
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("output='torch' needs torch: pip install torch") from error
    return torch.from_numpy(values)
