"""``TextEncoder``: one language model read as an encoder, each verb one call into ``inference``.

Knows: which function does what. Does not know: how any of it is done, or that the model writes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self, Unpack, get_args

import numpy as np
import torch

from gerund.checks import check_dimensions, check_texts, flag_or_none, one_of
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode.kv_embedding_layers import chosen_layers, layer_dimensions
from gerund.inference.tokens import Empty, Overflow, Tokens
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.models.vectors import compared, compared_in_pairs, fit, unit
from gerund.quantization import Precision, check_precision, quantize
from gerund.settings.aliases import EncodeAliases, VectorAliases, same_keywords, takes_aliases
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NO_TRANSFORM, PromptText
from gerund.token_encoder import TokenEncoder
from gerund.types import EncodeResult

Output = Literal["numpy", "torch"]
OutputValue = Literal["sentence_embedding", "token_embeddings"]


class TextEncoder(TokenEncoder):
    """A decoder-only model that turns texts into vectors; what writes too is built on it."""

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
            precision: ``float32``, or fewer bits a number: ``int8``, ``uint8``, ``binary``, ``ubinary`` (see
                ``gerund.quantization``, which finds the nearest of such vectors).
            ranges: for ``int8`` and ``uint8`` the smallest and the largest value of each number ``(2, dimensions)``,
                as ``ranges_of`` finds them; None takes those of these very texts.
            batch_size: texts per batch at most; None leaves it to ``batch_tokens``. Both limits hold.
            output_value: ``token_embeddings`` returns what ``encode_tokens`` does: one array per text.
            aliases: sentence-transformers' names: ``normalize_embeddings`` is ``normalize``, ``truncate_dim`` is
                ``dimensions``, ``show_progress_bar`` is ``show_progress``, ``convert_to_tensor=True`` is
                ``output="torch"`` and ``convert_to_numpy=True`` is ``output="numpy"``.

        Returns:
            ``(n, dimensions)`` float32 in the order of ``texts``; ``(dimensions,)`` for a single string. In bits, an
            eighth of the numbers.

        Raises:
            TextError: a text is empty, too long, or not a string.
            ConfigError: an unknown setting or impossible number, or a setting and its alias together.

        >>> lm = gerund.load()
        >>> lm.encode(["a cat", "a dog"]).shape == (2, lm.dimensions)
        True
        """
        del aliases  # replaced by what they stand for
        one_of("output", output, ["numpy", "torch"])
        one_of("output_value", output_value, get_args(OutputValue))
        if output_value == "token_embeddings":
            only_whole = {"dimensions": dimensions is not None, "precision": precision != "float32"}
            if refused := next((name for name, is_given in only_whole.items() if is_given), None):
                raise ConfigError(f"{refused} is for vectors of texts; leave it out with output_value={output_value!r}")
            reading: dict[str, Any] = {"empty": empty, "overflow": overflow, "prompt_name": prompt_name}
            limits = (bool(normalize), batch_tokens, show_progress)
            states = self.encode_tokens(texts, prompt, *limits, **reading, batch_size=batch_size)
            listed = [torch.from_numpy(one) for one in states] if output == "torch" else states
            return listed[0] if isinstance(texts, str) else listed
        normalize = flag_or_none("normalize", normalize)
        show_progress = flag_or_none("show_progress", show_progress)
        check_precision(precision)
        check_dimensions(dimensions, self.dimensions)
        tokens = self.tokenize_prompted(texts, prompt, empty, overflow, prompt_name=prompt_name, warn=True)
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept, batch_size)
        if precision != "float32" and len(vectors):
            vectors = quantize(vectors, precision, ranges)
        if isinstance(texts, str):
            vectors = vectors[0]
        return torch.from_numpy(vectors) if output == "torch" else vectors

    @same_keywords(encode)
    def encode_query(self, texts: str | Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        """Turn queries into vectors: ``encode`` with the encoder's prompt named ``query``, where it has one.

        A prompt that you pass is used instead. The arguments are those of ``encode``. Without a prompt of that name,
        this is ``encode``.

        >>> lm = gerund.load(prompts={"query": "Question: "})
        >>> vector = lm.encode_query("how do I bake bread?")
        >>> bool((vector == lm.encode("how do I bake bread?", prompt_name="query")).all())
        True
        """
        return self.encode(texts, *arguments, **self._with_prompt_of("query", arguments, keywords))

    @same_keywords(encode)
    def encode_document(self, texts: str | Sequence[str], *arguments: Any, **keywords: Any) -> Any:
        """Turn documents into vectors: ``encode`` with the encoder's prompt named ``document``, where it has one.

        As ``encode_query`` otherwise.
        """
        return self.encode(texts, *arguments, **self._with_prompt_of("document", arguments, keywords))

    def _with_prompt_of(self, job: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
        """Return keywords of ``encode`` with the prompt for a job, unless they or the arguments have one."""
        given = (*arguments[:1], keywords.get("prompt"), keywords.get("prompt_name"))
        if job not in self.encoder.prompts or any(one is not None for one in given):
            return keywords
        return {**keywords, "prompt_name": job}

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
        """Turn texts into vectors, and say how many tokens were read and which texts were cut; as ``encode``."""
        del aliases  # replaced by what they stand for
        check_dimensions(dimensions, self.dimensions)
        tokens = self.tokenize_prompted(texts, prompt, empty, overflow, prompt_name=prompt_name)
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress, kept)
        return self.with_usage(vectors, tokens)

    def tokenize_prompted(
        self,
        texts: str | Sequence[str],
        prompt: str | None = None,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        *,
        prompt_name: str | None = None,
        warn: bool = False,
    ) -> list[list[Tokens | None]]:
        """Return the tokens of every text as ``encode`` reads them, once for each template that it reads them in.

        Raises:
            TextError: a text is empty, too long, or not a string.
            ConfigError: there is no prompt of that name, or the transform was not fitted.
        """
        if self.encoder.transform != NO_TRANSFORM and self.transform is None:
            raise self._not_fitted()
        checked = check_texts(texts)
        templates, before = self._around(self.encoder.prompt_text(prompt, prompt_name))
        return [self._tokens(checked, one, before, empty, overflow, warn=warn) for one in templates]

    def vectors(
        self, found: Sequence[np.ndarray], normalize: bool | None = None, dimensions: int | None = None
    ) -> np.ndarray:
        """Return the vectors of ``encode`` from what ``encoding.encode`` gave for each of ``tokenize_prompted``."""
        vectors = found[0] if len(found) == 1 else np.mean(found, axis=0)
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
        return unit(vectors) if (self.encoder.normalize if normalize is None else normalize) else vectors

    @staticmethod
    def with_usage(vectors: np.ndarray, tokens: Sequence[Sequence[Tokens | None]]) -> EncodeResult:
        """Return vectors with what was read for them, from ``tokenize_prompted``."""
        return EncodeResult(
            vectors,
            [sum(0 if own is None else len(own) for own in same) for same in zip(*tokens, strict=True)],
            [any(own is not None and own.is_cut for own in same) for same in zip(*tokens, strict=True)],
        )

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
        """Return the vectors of texts that were tokenized once a template: the mean of each over its templates."""
        found = []
        for number, one in enumerate(tokens):
            kept_pass = None if kept is None else kept.encoding_pass(number, len(tokens))
            limits = {"batch_tokens": batch_tokens, "batch_size": batch_size}
            found.append(encoding.encode(self.runtime, one, **limits, show=show, kept=kept_pass))
        return self.vectors(found, normalize, dimensions)

    def similarity(self, a: Any, b: Any, prompt: str | None = None, *, prompt_name: str | None = None) -> np.ndarray:
        """Return how near every text (or vector) in ``a`` is to every one in ``b``: their cosine.

        A ready-made encoder whose author compares vectors in another way (``encoder.similarity``: ``dot``,
        ``euclidean`` or ``manhattan``) does so here too; distances are negative.

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
        return compared(*self._both(a, b, prompt, prompt_name), self.encoder.similarity)

    def similarity_pairwise(
        self, a: Any, b: Any, prompt: str | None = None, *, prompt_name: str | None = None
    ) -> np.ndarray:
        """Return how near each text (or vector) in ``a`` is to the one at the same place in ``b``.

        The arguments are those of ``similarity``.

        Returns:
            ``(n,)`` float32.

        Raises:
            ConfigError: there are not as many in ``a`` as in ``b``.

        >>> gerund.load().similarity_pairwise(["a cat", "rain"], ["a dog", "snow"]).shape
        (2,)
        """
        left, right = self._both(a, b, prompt, prompt_name)
        if len(left) != len(right):
            raise ConfigError(f"pairs need as many on both sides, not {len(left)} and {len(right)}; see similarity")
        return compared_in_pairs(left, right, self.encoder.similarity)

    def _both(self, a: Any, b: Any, prompt: str | None, prompt_name: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors of both sides of a comparison."""
        before = PromptText(self.encoder.prompt_text(prompt, prompt_name))
        left, right = (np.atleast_2d(self._vectors(item, before)) for item in (a, b))
        if left.shape[1] != right.shape[1]:
            raise ConfigError(f"vectors of {left.shape[1]} and {right.shape[1]} dimensions cannot be compared")
        return left, right

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
        sample = [text for text in check_texts(texts) if text.strip()]
        place = {text: index for index, text in enumerate(dict.fromkeys(sample))}
        vectors = np.zeros((0, self.dimensions))
        if sample:
            vectors = plain.encode(list(place), prompt, False, prompt_name=prompt_name)
        vectors = vectors[[place[text] for text in sample]]
        return self.with_transform(fit(self.encoder.transform, vectors))

    def rerouting_layers(self, texts: Sequence[str]) -> str:
        """Return in which layers KV-Embedding would reroute, as ``reroute`` spells them.

        They are chosen by the intrinsic dimension of tokens' states under plain causal attention (Tang and Yang, 2026,
        section 3.2.3).

        Args:
            texts: a sample of what is going to be encoded, some hundred or more.

        Raises:
            DataError: the texts have too few tokens to say anything.

        >>> lm = gerund.load(attention="causal", adapter="none")
        >>> texts = ["The train was late because of the snow.", "A cat sleeps by the fire.", "Rates rose again."]
        >>> layers = lm.rerouting_layers([f"{one} {other}" for one in texts for other in texts])
        >>> lm = gerund.load(attention="causal", adapter="none", template="kv-embedding", reroute=layers)
        """
        plain = self.with_encoder(EncoderConfig(AttentionPlan("causal"), max_length=self.encoder.max_length))
        tokens = [text for text in plain.tokens(check_texts(texts), empty="zeros") if text is not None]
        numbers = chosen_layers(layer_dimensions(plain.runtime, tokens))
        return "+".join(map(str, numbers))

    def _vectors(self, item: Any, prompt: str) -> np.ndarray:
        if isinstance(item, torch.Tensor):
            return item.detach().cpu().float().numpy()
        if isinstance(item, np.ndarray) and item.dtype.kind == "f":
            return item.astype(np.float32)
        return self.encode(item, prompt)
