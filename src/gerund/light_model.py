"""``LightModel``: a GGUF file that generates, embeds and re-ranks without torch, by its packed network.

What it does not do itself is done by the ``LanguageModel`` of the same file, which it loads when that is asked for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Event, Lock
from typing import Any, Self

from gerund.errors import MissingDependencyError
from gerund.gguf_file import parts_of, read_file
from gerund.inference.encode.embeds import Embeds
from gerund.inference.encode.packed_runtime import PackedRuntime, verify
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.packed_decoder import PackedWriter
from gerund.inference.generate.prompts import Prompt
from gerund.inference.generate.sequence import Piece
from gerund.models.bundled import BundledAdapters
from gerund.models.fingerprint import (
    adapter_hash,
    cache_key,
    cache_passed_probe,
    cached_hash,
    describe_files,
    files_hash,
    probe_passed,
    weights_key,
)
from gerund.models.light_head import LightHead
from gerund.models.light_runtime import ARITHMETIC, NEEDS_TORCH, return_freed_memory
from gerund.models.light_tokenizer import LightTokenizer
from gerund.models.vectors import truncation
from gerund.packed.network import PackedNetwork
from gerund.progress import say_once
from gerund.scoring.ranks import Ranks
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import ModelSpec
from gerund.settings.sampling import Rerank
from gerund.types import Generation


class _NeedsTorchError(MissingDependencyError, AttributeError):
    """What only torch computes is asked for without it: ``hasattr`` says no."""


@dataclass(frozen=True)
class Reading:
    """How a packed network reads texts to encode.

    Attributes:
        encoder: the encoder settings.
        adapter: the folder of the adapter; None without one.
        head: projects the pooled states; None without one.
        bundled: the adapters of gerund that it is from; None where it is the file's own.
        fills_gaps: whether the adapter is known to be trained to infill.
        has_scorer: whether they have a scorer of continuations.
    """

    encoder: EncoderConfig
    adapter: Path | None = None
    head: LightHead | None = None
    bundled: BundledAdapters | None = None
    fills_gaps: bool = False
    has_scorer: bool = False


@dataclass(frozen=True)
class LightAdapters:
    """The adapters of a model that has one for encoding, or none."""

    encodes: str

    def hash(self, job: str) -> str:
        """Return the hash of the adapter for a job; empty without one."""
        return self.encodes if job == "encode" else ""


class LightModel(PackedWriter, Embeds, Ranks):
    """A GGUF file that generates, embeds and re-ranks without torch; ``light_entry`` opens it.

    Its texts and vectors are those of the ``LanguageModel`` of the same file, and so are its attributes: those that it
    lacks are that model's, which is then loaded.

    Attributes:
        spec: what loads it again.
    """

    load_again: Callable[[ModelSpec], Any]
    """Loads a model by its spec; set by ``light_entry``."""
    job = "encode"
    reranker = late = None
    """Where its settings have any, ``light_entry`` leaves the file to torch."""
    was_trained_to_embed = False
    device_type = "cpu"
    compute_dtype = "float32"

    def __init__(
        self, path: Path, spec: ModelSpec, network: PackedNetwork, tokenizer: LightTokenizer, name: str, read: Reading
    ) -> None:
        super().__init__(network, tokenizer, "gguf", name)
        self.path, self.encoder, self.n_layers = path, read.encoder, network.shape.n_layers
        self.spec = spec.with_encoder(read.encoder, self.n_layers)
        self.fills_gaps, self.has_scorer = read.fills_gaps, read.has_scorer
        self._adapter_hash = adapter_hash(read.adapter)
        self.adapters = LightAdapters(self._adapter_hash)
        self._full: Any = None
        self._loading = Lock()
        runtime = PackedRuntime(
            network,
            self.model,
            tokenizer,
            read.encoder,
            read.encoder.resolved(self.n_layers),
            next(iter(network.adapters), None),
            read.head,
        )
        self.runtime = replace(runtime, transform=truncation(read.encoder.transform, runtime.width))
        self.transform = self.runtime.transform
        self._verify()

    def _verify(self) -> None:
        """Verify that every layer reads what the plan says, unless that is cached for these files."""
        files = describe_files(parts_of(self.path))
        key = cache_key(files, ARITHMETIC, repr(self.runtime.plan), self._adapter_hash, "light") if files else None
        if key is None or not probe_passed(key):
            verify(self.network, self.runtime.plan)
            if key is not None:
                cache_passed_probe(key)

    def __getattr__(self, name: str) -> Any:
        """Return what only the ``LanguageModel`` of this file has."""
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            from gerund.language_model import LanguageModel
        except ImportError as error:
            raise _NeedsTorchError(f"{self.name}: this needs {NEEDS_TORCH}") from error
        if not hasattr(LanguageModel, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.full, name)

    def __copy__(self) -> Self:
        # Not by __reduce__, which loads the file: a copy is the same model in the same memory.
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __repr__(self) -> str:
        plan = self.encoder.plan_label(self.n_layers)
        return f"<{type(self).__name__} {self.name}: {plan}, {self.encoder.pooling}, {self.dimensions} dimensions>"

    def __reduce__(self) -> tuple[Any, tuple[ModelSpec]]:
        """Pickle the spec, by which another process loads the model."""
        return self.load_again, (self.spec,)

    @property
    def full(self) -> Any:
        """The ``LanguageModel`` of this file.

        Raises:
            MissingDependencyError: torch or transformers is not installed.
        """
        with self._loading:
            if self._full is None:
                try:
                    from gerund.entry import load
                except ImportError as error:
                    raise MissingDependencyError(f"{self.name}: this needs {NEEDS_TORCH}") from error
                return_freed_memory(returns=False)
                say_once(f"{self.name}: this is done by torch, which loads the model a second time")
                self._full = load(self.spec)
            return self._full

    @property
    def scorer(self) -> Any:
        """The scorer of continuations, which torch computes; None without one."""
        return self.full.scorer if self.has_scorer else None

    @property
    def head(self) -> LightHead | None:
        """Projects the pooled states; None without one."""
        head: LightHead | None = self.runtime.head
        return head

    @cached_property
    def n_parameters(self) -> int:
        """Number of parameters, without those of an adapter."""
        return read_file(self.path).n_parameters

    @cached_property
    def weights_hash(self) -> str:
        """Hash of the base weights."""
        files = parts_of(self.path)
        key = weights_key(describe_files(files), "torch.float32", ARITHMETIC)
        return cached_hash(key, lambda: files_hash(files, ARITHMETIC))

    @property
    def adapter_hash(self) -> str:
        """Hash of the encoder's adapter, projection head and transform; empty without any of them."""
        parts = (self.runtime.head, self.runtime.transform)
        return self._adapter_hash + "".join(part.fingerprint for part in parts if part is not None)

    def _search(
        self, prompts: Sequence[Prompt], settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> list[Generation]:
        found: list[Generation] = self.full._search(prompts, settings, rerank, stop)
        return found

    def _search_streamed(
        self, prompt: Prompt, settings: GenerationConfig, rerank: Rerank, stop: Event
    ) -> Iterator[Piece]:
        pieces: Iterator[Piece] = self.full._search_streamed(prompt, settings, rerank, stop)
        return pieces
