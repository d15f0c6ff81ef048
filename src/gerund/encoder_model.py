"""``EncoderModel``: one language model with the settings by which it is read, verified, hashed and changed.

Knows: plans, adapters, heads, transforms, fingerprints. Does not know: texts.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.probe import verify_once
from gerund.checks import check_dimensions
from gerund.errors import ConfigError
from gerund.inference.encode import runtime as encoding
from gerund.inference.encode.runtime import choose_autocast, in_int8
from gerund.models.adapters import Adapters, base_state, load_adapters
from gerund.models.fingerprint import fingerprint, times_written, weights_hash
from gerund.models.hash_cache import cache_hash, cache_passed_probe, cached_hash, probe_key, probe_passed
from gerund.models.heads import ProjectionHead
from gerund.models.vectors import Transform, truncation
from gerund.settings.encoder import JOBS, EncoderConfig, Job, vectors_alike
from gerund.settings.model_spec import ModelSpec
from gerund.settings.plan import ResolvedPlan
from gerund.settings.templates import NO_TRANSFORM, TRUNCATE, layer_numbers, rerouted_layers

_attaching = Lock()  # two encoders that are made of one model must not both register its hooks


class EncoderModel:
    """A decoder-only model in memory, and how it is read."""

    job: Job = "encode"
    """Whose adapter is active while texts are read."""
    load_again: Callable[[ModelSpec], Any] | None = None
    """Loads a model by its spec; set where it was loaded so."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        encoder: EncoderConfig | None = None,
        *,
        name: str = "a model in memory",
        adapters: Adapters | None = None,
        autocast: bool = False,
        int8: bool = False,
        head: ProjectionHead | None = None,
        transform: Transform | None = None,
        spec: ModelSpec | None = None,
        stamp: str | None = None,
    ) -> None:
        """Wrap a model that is in memory, after verifying that the attention plan reaches every layer of it.

        Args:
            model: a Hugging Face decoder-only language model.
            tokenizer: its tokenizer.
            encoder: how to read it; None takes the default plan.
            name: what to call it in messages.
            adapters: PEFT adapters, each active for its jobs only; they are put into the model.
            autocast: encode float32 weights in bfloat16 where that is quick and near enough.
            int8: encode in 8 bits, on a processor that has instructions for it.
            head: projects the pooled states; None leaves them.
            transform: what ``encoder.transform`` was fitted to; None where it was not fitted yet (see ``fitted``).
            spec: what it was loaded by; None for a model that was made in memory.
            stamp: under what the hash of its files is kept (``hash_cache``), where its tensors are those of the
                files; None works it out.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers, or the transform does not fit 8 bits.
            ModelError: in 8 bits its vectors would be too far from what they are.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder or EncoderConfig()
        self.name = name
        self.adapters = adapters or Adapters()
        self.head = head
        self.transform = transform
        self._spec = spec
        self.n_layers = self._attach()
        plan = self.encoder.attention.resolve(self.n_layers)
        if self.adapters.folders:
            load_adapters(model, self.adapters.by_name)
        self._hashed: tuple[int, str] | None = None
        self._stamp = stamp
        self._loaded_changes = 0 if stamp is None else _changes(self._hashed_state())
        self._verify(plan)
        _check_numbers(self.encoder, self.n_layers)
        self.runtime = self._truncated(self._make_runtime(plan))
        self.transform = self.runtime.transform
        # A fitted transform makes small directions large, and with them rounding.
        is_fitted = self.encoder.transform.split("-")[0] not in (NO_TRANSFORM, TRUNCATE)
        if autocast and not is_fitted:
            self.runtime = replace(self.runtime, autocast=choose_autocast(self.runtime))
        if int8:
            if is_fitted:
                raise _too_coarse(self.encoder.transform)
            self.runtime = in_int8(self.runtime, name)

    @staticmethod
    def _truncated(runtime: encoding.EncoderRuntime) -> encoding.EncoderRuntime:
        """Put in the one transform that is known without a sample, where the encoder config names it."""
        if runtime.transform is not None:
            return runtime
        return replace(runtime, transform=truncation(runtime.config.transform, runtime.width))

    def _attach(self) -> int:
        """Make the model ready for attention plans, and return how many layers they have a say in."""
        layers = decoder_layers(self.model)
        with _attaching:
            attach(self.model)
            attach_streams(layers)
        return len(layers)

    def _verify(self, plan: ResolvedPlan) -> None:
        """Verify that the plan reaches every layer, unless it is known of these very files."""
        key = None
        if self._stamp is not None and _changes(self._hashed_state()) == self._loaded_changes:
            adapters = " ".join(map(self.adapters.hash, JOBS))
            key = probe_key(self._stamp, self.model, plan, adapters=adapters)
        if key is not None and probe_passed(key):
            return
        verify_once(self.model, plan)
        if key is not None:
            cache_passed_probe(key)

    def _make_runtime(self, plan: ResolvedPlan) -> encoding.EncoderRuntime:
        return encoding.EncoderRuntime(
            self.model,
            self.tokenizer,
            self.encoder,
            plan,
            # A causal pass needs no plan, so architectures that a plan cannot reach still encode causally.
            sends_plan=self._sends_plan(plan, self.encoder),
            adapter=self.adapters.name(self.job),
            head=self.head,
            transform=self.transform,
        )

    @staticmethod
    def _sends_plan(plan: ResolvedPlan, encoder: EncoderConfig) -> bool:
        return not plan.is_causal or encoder.reads_beside

    def __reduce__(self) -> tuple[Callable[[ModelSpec], Any], tuple[ModelSpec]]:
        """Go to another process as the spec, by which it is loaded there."""
        if self.load_again is None or self.job != EncoderModel.job:
            raise ConfigError(f"{self.name} is not pickled: only a model that gerund.load gave is, by its spec")
        return self.load_again, (self.spec,)

    def __copy__(self) -> Self:
        # Not by what __reduce__ says: a copy is the same model in the same memory.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

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
    def max_seq_length(self) -> int | None:
        """``max_length`` by sentence-transformers' name; to change it, load the model with ``max_length``."""
        return self.max_length

    def get_embedding_dimension(self) -> int:
        """Return ``dimensions``, by sentence-transformers' name."""
        return self.dimensions

    def get_sentence_embedding_dimension(self) -> int:
        """Return ``dimensions``, by sentence-transformers' older name."""
        return self.dimensions

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type that ``encode`` computes in; the weights keep their own."""
        if self.runtime.int8:
            return torch.int8
        return self.runtime.autocast or self.model.dtype

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
        _check_numbers(encoder, self.n_layers)
        alike = vectors_alike(encoder, self.encoder)
        other.transform = self.transform if alike else None
        other.head = self.head if self.head is None or alike else self.head.without_space()
        runtime = replace(
            self.runtime,
            head=other.head,
            config=encoder,
            plan=plan,
            sends_plan=self._sends_plan(plan, encoder),
            transform=other.transform,
        )
        other.runtime = self._truncated(runtime)
        other.transform = other.runtime.transform
        return other

    def with_transform(self, transform: Transform) -> Self:
        """Return the same model with a transform that was fitted for its encoder config.

        Raises:
            ConfigError: it is for vectors of another size, or encoding computes in 8 bits.
        """
        if self.runtime.int8:
            raise _too_coarse(self.encoder.transform)
        width = replace(self.runtime, transform=None).width
        if len(transform.mean_D) != width:
            raise ConfigError(f"the transform is for vectors of {len(transform.mean_D)} numbers, not {width}")
        other = copy(self)
        other.transform = transform
        other.runtime = replace(self.runtime, transform=transform, autocast=None)
        if self._spec is not None and self._spec.sample is None:
            other._spec = None  # nothing that a spec says would fit it again
        return other

    def for_job(self, job: Job, encoder: EncoderConfig) -> Self:
        """Return the same model, in the same memory, read another way and with another job's adapter.

        Raises:
            UnsupportedModelError: the plan does not reach every layer.
            ConfigError: the plan does not fit the number of layers.
        """
        other = self.with_encoder(encoder)
        other.job, other.head, other.transform = job, None, None
        other.runtime = replace(other.runtime, adapter=self.adapters.name(job), head=None, transform=None)
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

    @property
    def space(self) -> str:
        """What tells the space of its vectors: that of the teacher that it was trained to agree with, or its own.

        Vectors of two encoders can be compared where this is the same. The bundled model's is that of its teacher, and
        its own when it is read otherwise than it was trained:

        >>> lm = gerund.load()
        >>> lm.space == lm.fingerprint()
        False
        >>> lm = gerund.load(attention="causal")
        >>> lm.space == lm.fingerprint()
        True
        """
        declared = None if self.head is None else self.head.settings.space
        return declared or self.fingerprint()

    @property
    def weights_hash(self) -> str:
        """Hash of the base weights: what everything that is written depends on."""
        state = self._hashed_state()
        changes = _changes(state)
        if self._hashed is None or self._hashed[0] != changes:
            self._hashed = changes, self._hash(state, changes)
        return self._hashed[1]

    def _hash(self, state: Mapping[str, Tensor], changes: int) -> str:
        """Return the hash of the weights: the one that is known of their files, while they are what was in these."""
        if self._stamp is None or changes != self._loaded_changes:
            return weights_hash(state)
        known = cached_hash(self._stamp)
        if known is None:
            known = weights_hash(state)
            cache_hash(self._stamp, known)
        return known

    @property
    def adapter_hash(self) -> str:
        """Hash of the encoder's adapter, projection head and transform; empty for none of them."""
        fitted = (one.fingerprint for one in (self.head, self.transform) if one is not None)
        return self.adapters.hash(self.job) + "".join(fitted)

    def _hashed_state(self) -> Mapping[str, Tensor]:
        return base_state(self.model)


def _check_numbers(encoder: EncoderConfig, n_layers: int) -> None:
    """Refuse layers that a model of ``n_layers`` layers does not have."""
    layer_numbers(encoder.layers, n_layers)
    rerouted_layers(encoder.reroute, n_layers)
    if encoder.prepend > n_layers:
        raise ConfigError(f"prepend={encoder.prepend}: the model has {n_layers} layers")


def _too_coarse(transform: str) -> ConfigError:
    return ConfigError(f"{transform} makes small directions large, and with them int8's rounding; take another dtype")


def _changes(state: Mapping[str, Tensor]) -> int:
    """Return how often tensors were changed in place, as whoever trains a model does; each of them counts it."""
    return sum(times_written(tensor) for tensor in state.values())
