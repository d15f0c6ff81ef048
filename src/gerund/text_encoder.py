"""``TextEncoder``: one language model read as an encoder, each verb one call into ``inference``.

Knows: which function does what. Does not know: how any of it is done, or that the model writes.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.attention.plan import ResolvedPlan
from gerund.attention.probe import verify_once
from gerund.attention.streams import attach_streams, decoder_layers
from gerund.checks import flag, flag_or_none, one_of
from gerund.config import EncoderConfig, Job, check_dimensions
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode.precision import choose_autocast
from gerund.inference.encode.words import WordPooling, check_words, word_vectors
from gerund.inference.tokens import Empty, InputFormat, Overflow, Tokens, check_texts, tokenize
from gerund.models.adapters import Adapters, base_state, load_adapters
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.heads import ProjectionHead
from gerund.models.pooling import unit
from gerund.spec import ModelSpec
from gerund.types import EncodeResult

Output = Literal["numpy", "torch"]

_attaching = Lock()  # two encoders that are made of one model must not both register its hooks


class TextEncoder:
    """A decoder-only model that turns texts into vectors; what writes too is built on it."""

    job: Job = "encode"
    """Whose adapter is active while texts are read."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: EncoderConfig | None = None,
        *,
        name: str = "a model in memory",
        adapters: Adapters | None = None,
        autocast: bool = False,
        head: ProjectionHead | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        """Wrap a model that is in memory, after verifying that the attention plan reaches every layer of it.

        Args:
            model: a Hugging Face decoder-only language model.
            tokenizer: its tokenizer.
            encoder: how to read it; None takes the default plan.
            name: what to call it in messages.
            adapters: PEFT adapters, each active for its jobs only; they are put into the model.
            autocast: encode float32 weights in bfloat16 where that is quick and near enough.
            head: projects the pooled states; None leaves them.
            spec: what it was loaded by; None for a model that was made in memory.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder or EncoderConfig()
        self.name = name
        self.adapters = adapters or Adapters()
        self.head = head
        self._spec = spec
        self.n_layers = self._attach()
        plan = self.encoder.attention.resolve(self.n_layers)
        if self.adapters.folders:
            load_adapters(model, self.adapters.by_name)
        self._hashed: tuple[int, str] | None = None
        self._verify(plan)
        self.runtime = self._make_runtime(plan)
        if autocast:
            self.runtime = replace(self.runtime, autocast=choose_autocast(self.runtime))

    def _attach(self) -> int:
        """Make the model ready for attention plans, and return how many layers they have a say in."""
        layers = decoder_layers(self.model)
        with _attaching:
            attach(self.model)
            attach_streams(layers)
        return len(layers)

    def _verify(self, plan: ResolvedPlan) -> None:
        """Verify that the plan reaches every layer."""
        verify_once(self.model, plan)

    def _make_runtime(self, plan: ResolvedPlan) -> encoding.EncoderRuntime:
        return encoding.EncoderRuntime(
            self.model,
            self.tokenizer,
            self.encoder,
            plan,
            # A causal pass needs no plan, so architectures that a plan cannot reach still encode causally.
            sends_plan=not plan.is_causal,
            adapter=self.adapters.name(self.job),
            head=self.head,
        )

    @property
    def spec(self) -> ModelSpec:
        """What loads this model again: where it came from, and every setting of its encoder worked out.

        Raises:
            ConfigError: it was made in memory, so nothing says where it comes from.
        """
        if self._spec is None:
            raise ConfigError(f"{self.name} was not loaded from a folder or the hub, so it has no spec; save it first")
        return self._spec.with_encoder(self.encoder, self.n_layers)

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.runtime.device

    @property
    def dimensions(self) -> int:
        """Size of a whole vector."""
        return self.runtime.width

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens that ``encode`` reads, prompt and special tokens included."""
        return self.runtime.max_length

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that ``encode`` computes in; the weights keep their own."""
        return self.runtime.autocast or self.model.dtype

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
    ) -> Any:
        """Turn texts into vectors.

        Args:
            texts: one text or many.
            prompt: put before every text and not pooled: the name of one of the encoder's prompts, or the
                prompt itself; None takes the encoder's default.
            normalize: whether vectors get length 1; None does as the encoder's settings say.
            dimensions: keep only the first so many numbers of each vector (then normalise again).
            batch_tokens: tokens a batch, padding included; None chooses by device. When memory runs out,
                batches are halved by themselves.
            show_progress: None shows a bar on a terminal.
            output: ``numpy`` or ``torch``.
            empty: ``error``, or ``zeros`` for a zero vector where a text is empty.
            overflow: ``truncate`` cuts an over-long text at its end, with one warning; or ``error``.

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
        tokens = self.tokens(check_texts(texts), prompt, empty, overflow)
        vectors = self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress)
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
    ) -> EncodeResult:
        """Turn texts into vectors, and say how many tokens were read and which texts were cut; as ``encode``."""
        check_dimensions(dimensions, self.dimensions)
        tokens = self.tokens(check_texts(texts), prompt, empty, overflow, warn=False)
        return EncodeResult(
            self._vectors_of(tokens, normalize, dimensions, batch_tokens, show_progress),
            [0 if own is None else len(own) for own in tokens],
            [own is not None and own.is_cut for own in tokens],
        )

    def _vectors_of(
        self,
        tokens: Sequence[Tokens | None],
        normalize: bool | None,
        dimensions: int | None,
        batch_tokens: int | None,
        show: bool | None,
    ) -> np.ndarray:
        vectors = encoding.encode(self.runtime, tokens, batch_tokens=batch_tokens, show=show)
        vectors = np.ascontiguousarray(vectors[:, :dimensions])
        return unit(vectors) if (self.encoder.normalize if normalize is None else normalize) else vectors

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
        tokens = self.tokens(check_texts(texts), prompt, empty, overflow)
        states = encoding.encode_tokens(self.runtime, tokens, batch_tokens=batch_tokens, show=show_progress)
        return [unit(item) for item in states] if normalize else states

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

        Returns:
            One ``(n_words, d)`` float32 array a sentence. A word that an over-long sentence lost to the
            model's limit has a zero vector (and there is a warning).

        >>> lm = gerund.load()
        >>> [vectors] = lm.encode_words([["EU", "rejects", "German", "call"]])
        >>> vectors.shape == (4, lm.dimensions)
        True
        """
        normalize, show_progress = flag("normalize", normalize), flag_or_none("show_progress", show_progress)
        checked = check_words(sentences)
        joined = [" ".join(words) for words in checked]
        tokens = self.tokens(joined, prompt, "error", "truncate", offsets=True)
        states = encoding.encode_tokens(self.runtime, tokens, batch_tokens=batch_tokens, show=show_progress)
        vectors = [
            word_vectors(words, text, state, pooling=pooling, shift=shift)
            for words, text, state in zip(checked, tokens, states, strict=True)
            if text is not None
        ]
        return [unit(item) for item in vectors] if normalize else vectors

    def similarity(self, a: Any, b: Any) -> np.ndarray:
        """Return the cosine of every text (or vector) in ``a`` with every one in ``b``.

        Args:
            a: texts, or vectors ``(n, d)``.
            b: texts, or vectors ``(m, d)``.

        Returns:
            ``(n, m)`` float32.
        """
        left, right = (unit(np.atleast_2d(self._vectors(item))) for item in (a, b))
        if left.shape[1] != right.shape[1]:
            raise ConfigError(f"vectors of {left.shape[1]} and {right.shape[1]} dimensions cannot be compared")
        return left @ right.T

    def with_encoder(self, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, read another way.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        if not isinstance(encoder, EncoderConfig):
            raise ConfigError(f"encoder is an EncoderConfig, such as EncoderConfig(pooling='last'), not {encoder!r}")
        plan = encoder.attention.resolve(self.n_layers)
        self._verify(plan)
        other = copy(self)
        other.encoder = encoder
        sends_plan = self.runtime.sends_plan if plan == self.runtime.plan else not plan.is_causal
        other.runtime = replace(self.runtime, config=encoder, plan=plan, sends_plan=sends_plan)
        return other

    def for_job(self, job: Job, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, read another way and with another job's adapter.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        other = self.with_encoder(encoder)
        other.job, other.head = job, None
        other.runtime = replace(other.runtime, adapter=self.adapters.name(job), head=None)
        return other

    def fingerprint(self, dimensions: int | None = None) -> str:
        """Return what tells this encoder from others: 16 hexadecimal digits.

        Covers weights, adapter, plan, pooling, prompts and ``dimensions``. Store it with embeddings and refuse
        to mix two.
        """
        check_dimensions(dimensions)
        if dimensions == self.dimensions:
            dimensions = None
        return fingerprint(self.weights_hash, self.adapter_hash, self.encoder, self.n_layers, dimensions=dimensions)

    def tokens(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        *,
        offsets: bool = False,
        warn: bool = True,
    ) -> list[Tokens | None]:
        """Return texts as ``encode`` reads them, prompt and special tokens included; None for an empty text."""
        input_format = InputFormat(
            prompt=self.encoder.prompt_text(prompt),
            append_eos=self.encoder.append_eos,
            repeat_text=self.runtime.plan.repeats_text,
            max_length=self.max_length,
            empty=empty,
            overflow=overflow,
        )
        return tokenize(self.tokenizer, texts, input_format, offsets=offsets, warn=warn)

    @property
    def weights_hash(self) -> str:
        """Hash of the base weights: what everything that is written depends on."""
        state = self._hashed_state()
        # Whoever trains the model changes its tensors in place, and each of them counts how often.
        changes = sum(0 if tensor.is_inference() else tensor._version for tensor in state.values())
        if self._hashed is None or self._hashed[0] != changes:
            self._hashed = changes, weights_hash(state)
        return self._hashed[1]

    @property
    def adapter_hash(self) -> str:
        """Hash of the encoder's adapter and projection head; empty for neither."""
        return self.adapters.hash(self.job) + (self.head.fingerprint if self.head is not None else "")

    def _hashed_state(self) -> Mapping[str, Tensor]:
        return base_state(self.model)

    def _vectors(self, item: Any) -> np.ndarray:
        if isinstance(item, torch.Tensor):
            return item.detach().cpu().float().numpy()
        if isinstance(item, np.ndarray) and item.dtype.kind == "f":
            return item.astype(np.float32)
        return self.encode(item)
