"""``PackedWriter``: generate from a GGUF file by its packed network, without torch and transformers.

Prompts, sampling, constraints and stop strings are handled by the same code as for every other model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Self

from gerund.checks import whole_number
from gerund.errors import ConfigError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.packed_decoder import PackedDecoding
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.sequence import Emit
from gerund.inference.generate.writing import Writes
from gerund.inference.tokens import context_length
from gerund.models.light_tokenizer import LightTokenizer, read_light_tokenizer
from gerund.packed.network import PackedNetwork
from gerund.types import Generation


@dataclass(frozen=True)
class Described:
    """What prompts ask of a model of transformers, answered for a packed network."""

    network: PackedNetwork
    model_type: str

    @property
    def config(self) -> Self:
        """Itself: the config has ``model_type`` and the length of the context."""
        return self

    def get_text_config(self, *, decoder: bool) -> Self:
        """Return itself: there is no other modality."""
        del decoder
        return self

    @property
    def max_position_embeddings(self) -> int:
        """The length of the context."""
        return self.network.shape.context

    @property
    def rope_parameters(self) -> dict[str, Any]:
        """From where on a long text is turned otherwise, as ``tokens.rotary_limit`` reads it."""
        limits = [rope.long_from for rope in self.network.shape.ropes if rope.long_divisors is not None]
        return {"rope_type": "longrope", "original_max_position_embeddings": min(limits)} if limits else {}

    def get_input_embeddings(self) -> Self:
        """Return itself: embeddings have a weight."""
        return self

    def get_output_embeddings(self) -> Self:
        """Return itself: a packed network has a head."""
        return self

    def get_memory_footprint(self) -> int:
        """Return the bytes of its files."""
        return sum(path.stat().st_size for path in self.network.sources)

    dtype = "packed"
    weight = property(lambda self: self)
    shape = property(lambda self: (self.network.shape.vocabulary, self.network.shape.width))


class PackedWriter(Writes):
    """A GGUF file that generates.

    Attributes:
        model: what its network is, for prompts.
        tokenizer: its tokenizer.
        name: what it was opened by.
    """

    tokenizer: LightTokenizer

    def __init__(self, network: PackedNetwork, tokenizer: LightTokenizer, model_type: str, name: str) -> None:
        self.network, self.tokenizer, self.name = network, tokenizer, name
        self.model: Any = Described(network, model_type)

    @classmethod
    def open(cls, path: Path, *, name: str, model_type: str, threads: int | None, cache: Path) -> Self:
        """Open a GGUF file.

        Raises:
            ModelError: it is damaged.
        """
        network = PackedNetwork.open(path, threads=threads, cache=cache)
        return cls(network, read_light_tokenizer(path), model_type, name)

    def _write(
        self,
        prompts: Sequence[Prompt],
        settings: GenerationConfig,
        batch_size: int,
        stop: Event,
        emit: Emit | None = None,
    ) -> list[Generation]:
        if whole_number("batch_size", batch_size) < 1:
            raise ConfigError(f"`batch_size` must be at least 1, got {batch_size}.")
        tokenizer: Any = self.tokenizer
        ids = [prompt_ids(self.model, tokenizer, prompt, index=index) for index, prompt in enumerate(prompts)]
        decoding = self.decoding
        sequences = decoding.sequences(ids, settings, emit)
        decoding.decode(sequences, batch_size=batch_size, cancelled=stop)
        return [sequence.result() for sequence in sequences]

    @property
    def decoding(self) -> PackedDecoding:
        """How sequences are decoded together."""
        tokenizer: Any = self.tokenizer
        ends = [*tokenizer.settings.ends, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
        limit = context_length(self.model, tokenizer)
        return PackedDecoding(tokenizer, tuple(dict.fromkeys(ends)), limit, self.network)

    def _search(self, *_: Any) -> Any:
        raise ConfigError("continuations are ranked by runtime torch alone")

    def _search_streamed(self, *_: Any) -> Any:
        return self._search()
