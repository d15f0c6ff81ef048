"""Generate by a packed network: its sequences are decoded together, in arrays of numpy; imports no torch.

What a row computes does not depend on the others, nor on the size of the cache: MatMulNBits rounds and multiplies each
row by itself, and slots that a token does not see add nothing. But some processors (with AVX2 and nothing newer) have
another kernel for a single row of weights in 4 bits, which rounds otherwise.

Shapes: B rows, H heads of keys and values, T tokens, D size of a head, V vocabulary.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self, get_args
from weakref import WeakKeyDictionary

import numpy as np

from gerund.attention.preemption import pause
from gerund.checks import whole_number
from gerund.errors import ConfigError
from gerund.inference.generate import decoding
from gerund.inference.generate.batch_decoder import BatchDecoder, decode_all
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.decoding import Reproducibility, is_steady, recalls
from gerund.inference.generate.prompts import Prompt, prompt_ids
from gerund.inference.generate.sequence import CancelFlag, Cancelled, Emit, SequenceState
from gerund.inference.generate.writing import Writes
from gerund.inference.tokens import context_length
from gerund.jobs.disk_cache import sha256_of
from gerund.models.fingerprint import cache_key, cache_text, cached_text, describe_files
from gerund.packed import network as packed_network
from gerund.packed.network import KeyValues, PackedNetwork
from gerund.types import Generation, Guarantee

if TYPE_CHECKING:
    from gerund.models.light_tokenizer import LightTokenizer

# Slots of a cache come in multiples of this, and there are so many more at most than are filled.
_SLOTS, _SLOTS_MORE = 64, 256
# Tokens of the sequences that are tried, at most: a graph computes with all slots that there are.
_LONGEST_TRIED = 256
_BITS = "verified at the start: a row's logits are bit-identical to those of a text that is generated alone"
_STEADY = "verified at the start: a row's logits are bit-identical whatever the other rows are"
_UNSTEADY = "what a row computes depends, in its last bits, on the other rows on this machine"


class PackedSlots(decoding.SlotTable):
    """Keys and values of sequences in the rows of one cache, and of the prompt that was read last.

    A step has ``at_least`` so many rows, empty ones included. ``between`` is called before each run of the graph.
    """

    readers = 1
    by_blocks = True
    block = 8

    def __init__(
        self, network: PackedNetwork, count: int, room: int, *, at_least: int = 1, between: Callable[[], None] = pause
    ) -> None:
        self.network, self.count, self.room = network, count, room
        self.at_least, self._between = at_least, between
        self.lengths: list[int] = []
        self._prompt: KeyValues | None = None
        self._rows: KeyValues | None = None
        self._views: dict[int, KeyValues] = {}

    def prefill(self, ids: Sequence[int], cached: int = 0) -> np.ndarray:
        if not self.lengths and self._rows is not None and self._rows.capacity > _SLOTS_MORE:
            self._keep(None)  # what grew for a long sequence costs short ones time
        if not cached:
            self._prompt = None
        self._prompt = self._with_room(self._prompt, 1, len(ids) - 1)
        logits_V: np.ndarray = self._run([ids[cached:]], self._prompt, [cached], logits_at=np.array([[-1]]))[0, 0]
        return logits_V

    def join(self, length: int, reader: int = 0) -> int:
        del reader
        row = len(self.lengths)
        assert self._prompt is not None
        if self.count == 1:
            self._keep(self._prompt)
        else:
            rows = self._demand(length)
            for target, source in zip(_memory(rows), _memory(self._prompt), strict=True):
                target[row, :, :length] = source[0, :, :length]
        self.lengths.append(length)
        return row

    def leave(self, row: int) -> None:
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            assert self._rows is not None
            for array in _memory(self._rows):
                array[row, :, :length] = array[last, :, :length]
            self.lengths[row] = length
        del self.lengths[last]

    def step(self, tokens: Sequence[int]) -> np.ndarray:
        live = len(self.lengths)
        empty = [0] * max(0, self.at_least - live)
        rows = live + len(empty)
        cache = self._demand(max(self.lengths))
        if rows not in self._views:
            keys, values = ([array[:rows] for array in kind] for kind in (cache.keys, cache.values))
            self._views[rows] = KeyValues.over(self.network.shape, keys, values)
        ids = [[token] for token in (*tokens, *empty)]
        logits_B1V = self._run(ids, self._views[rows], [*self.lengths, *empty])
        self.lengths = [length + 1 for length in self.lengths]
        return logits_B1V[:live, 0]

    def copy_out(self, first: int, end: int, reader: int = 0) -> decoding.KeyValues:
        del reader
        assert self._prompt is not None
        both = zip(self._prompt.keys, self._prompt.values, strict=True)
        return [(keys[0, :, first:end].copy(), values[0, :, first:end].copy()) for keys, values in both]

    def copy_in(self, layers: decoding.KeyValues, first: int, reader: int = 0) -> None:
        del reader
        end = first + layers[0][0].shape[1]
        self._prompt = self._with_room(self._prompt if first else None, 1, end - 1)
        new = [keys for keys, _ in layers] + [values for _, values in layers]
        for array, copied in zip(_memory(self._prompt), new, strict=True):
            array[0, :, first:end] = copied

    def fill(self, lengths: Sequence[int], seed: int) -> None:
        self.lengths = list(lengths)
        generator = np.random.default_rng(seed)
        for array in _memory(self._demand(max(lengths))):
            array[: len(lengths)] = generator.standard_normal(array[: len(lengths)].shape, np.float32)

    def _run(
        self, ids: Sequence[Sequence[int]], cache: KeyValues, begin: Sequence[int], logits_at: np.ndarray | None = None
    ) -> np.ndarray:
        """Run the network; return the logits ``(B, N, V)``."""
        outputs = self.network.run(
            np.array(ids),
            cache=cache,
            write_B=np.array(begin),
            outputs=["logits"],
            logits_at=logits_at,
            between=self._between,
        )
        assert outputs.logits is not None
        return outputs.logits

    def _demand(self, length: int) -> KeyValues:
        """Return the rows, with room for one token more in one of ``length`` tokens."""
        rows = self._with_room(self._rows, self.count, length)
        if rows is not self._rows:
            self._keep(rows)
        return rows

    def _with_room(self, cache: KeyValues | None, rows: int, length: int) -> KeyValues:
        if cache is None:
            return KeyValues(self.network.shape, rows, _slots(length))
        return cache if length < cache.capacity else cache.grown(_slots(length))

    def _keep(self, rows: KeyValues | None) -> None:
        self._rows = rows
        self._views.clear()


def _slots(length: int) -> int:
    """Return how many slots a cache gets for rows of ``length`` tokens: a graph computes with all of them."""
    more = min(_SLOTS_MORE, max(_SLOTS, length // 4))
    return -(-(length + more) // _SLOTS) * _SLOTS


def _memory(cache: KeyValues) -> list[np.ndarray]:
    return [*cache.keys, *cache.values]


@dataclass(frozen=True)
class PackedDecoding(decoding.Decoding):
    """Decodes the sequences of a packed network, ``network``."""

    network: PackedNetwork
    reads_alike = True

    @property
    def vocabulary_size(self) -> int:
        return self.network.shape.vocabulary

    def slots(self, way: Reproducibility, count: int, room: int, *, by_blocks: bool = True) -> PackedSlots:
        del by_blocks  # they always do
        return PackedSlots(self.network, count, room, at_least=way.at_least)

    def decode(
        self, sequences: Sequence[SequenceState], *, batch_size: int = 16, cancelled: CancelFlag | None = None
    ) -> None:
        # A sequence that is done makes room for the next.
        stop = cancelled or threading.Event()

        def between() -> None:
            pause()
            if stop.is_set():
                raise Cancelled

        # Beyond some length all positions of such a run are turned otherwise, so each text has runs of its own.
        is_alone = any(rope.long_divisors for rope in self.network.shape.ropes)
        rows = 1 if is_alone else min(batch_size, len(sequences))
        room = max((len(sequence.ids) + sequence.room for sequence in sequences), default=0)
        if rows:
            decode_all(BatchDecoder(PackedSlots(self.network, rows, room, between=between)), sequences, stop)

    def check(self, count: int, room: int) -> Reproducibility:
        # Done once per machine.
        tried = _tried.setdefault(self.network, {})
        if (count, room) not in tried:
            key = self._key(count, room)
            way = None if key is None else _read(cached_text("batching", key))
            if way is None:
                way = self._try(count, room)
                if key is not None and way.guarantee != "none":
                    cache_text("batching", key, f"{way.guarantee}|{way.at_least}|{way.recalls}")
            tried[count, room] = way
        return tried[count, room]

    def _key(self, count: int, room: int) -> str | None:
        """Return what a trial depends on; None where the files are small, and it takes no time."""
        files = describe_files(self.network.sources)
        modules = (__file__, decoding.__file__, packed_network.__file__)
        code = (sha256_of(Path(module)) for module in modules)
        return cache_key(files, self.network.arithmetic, str((count, room)), *code) if files else None

    def _try(self, count: int, room: int) -> Reproducibility:
        size, slots = self.network.shape.vocabulary, PackedSlots(self.network, count, room)
        reads = recalls(slots, size)
        for slots.at_least in (1, min(2, count)):
            if is_steady(slots, size, min(room, _LONGEST_TRIED)):
                guarantee: Guarantee = "bits of generate" if slots.at_least == 1 else "same text under any load"
                return _way(guarantee, slots.at_least, reads)
        return _way("none", 1, reads)


_tried: WeakKeyDictionary[PackedNetwork, dict[tuple[int, int], Reproducibility]] = WeakKeyDictionary()


def _way(guarantee: Guarantee, at_least: int, reads: bool) -> Reproducibility:
    why = {"bits of generate": _BITS, "same text under any load": _STEADY}.get(guarantee, _UNSTEADY)
    return Reproducibility(True, guarantee, why, at_least=at_least, recalls=reads)


def _read(text: str) -> Reproducibility | None:
    """Return what a file of the cache says of a trial; None where it says nothing that can be read."""
    known: dict[str, Guarantee] = {name: name for name in get_args(Guarantee)}
    match text.split("|"):
        case [name, ("1" | "2") as at_least, ("True" | "False") as reads] if name in known:
            return _way(known[name], int(at_least), reads == "True")
    return None


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

    tokenizer: "LightTokenizer"

    def __init__(self, network: PackedNetwork, tokenizer: "LightTokenizer", model_type: str, name: str) -> None:
        self.network, self.tokenizer, self.name = network, tokenizer, name
        self.model: Any = Described(network, model_type)

    @classmethod
    def open(cls, path: Path, *, name: str, model_type: str, threads: int | None, cache: Path) -> Self:
        """Open a GGUF file.

        Raises:
            ModelError: it is damaged.
        """
        from gerund.models.light_tokenizer import read_light_tokenizer

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
