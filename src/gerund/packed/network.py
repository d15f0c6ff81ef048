"""A decoder that runs on quantized weights: token ids in, logits and states out.

It knows neither torch nor tokenizers. Masks are additive: 0 where a token sees a slot, ``MASKED`` where it does not.

Shapes: B batch, T tokens, S slots of the cache, D width, H size of a head, KV heads of keys and values, V vocabulary,
L layers, P masks, N places where logits are wanted, R rows.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from gerund.errors import ConfigError
from gerund.gguf_file import read_file
from gerund.jobs.disk_cache import user_cache
from gerund.packed import LEAST_READ
from gerund.packed.adapter import Adapter, inputs_of, places_of, read_adapter
from gerund.packed.graph_cache import Part, open_session, processor
from gerund.packed.shape import NetworkShape, read_folder_shape, read_shape
from gerund.packed.weights import FolderWeights, GgufWeights, Precision

if TYPE_CHECKING:
    from gerund.packed.graph import GraphBuilder, Weights

MASKED = np.float32(-1e9)
"""Value of an additive mask that hides a slot."""

# Up to so many tokens of a text, the queries that share keys and values are multiplied with them at once.
_MOST_GROUPED = 8
_MOST_AT_ONCE = 128  # tokens of a prompt in one run
_MOST_BINDINGS = 8  # that a cache keeps
_INTEGERS = ("write", "query_shape")
# A run of more gives its memory back and keeps no binding: making both anew takes little of its time.
_MANY_TOKENS = 64
_WITH_ATTENTION = "body with attention"

_GIVE_BACK = ort.RunOptions()
_GIVE_BACK.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")

OUTPUTS = ("logits", "states", "hidden_states", "attention")
"""What ``PackedNetwork.run`` can return."""


class KeyValues:
    """The keys and values of some texts, allocated once and written in place.

    Attributes:
        keys: per layer an array (B, KV, S, H), float32. Read and write them freely: ``run`` uses this memory. Slots
            that no token has taken must stay finite, because masks are added.
        values: likewise.
        rows: number of texts.
        capacity: number of slots per text.
    """

    def __init__(self, shape: NetworkShape, rows: int, capacity: int, *, scratch: bool = False) -> None:
        size = (rows, shape.n_kv_heads, capacity, shape.head_dim)
        # What nobody keeps may be overwritten by the next layer.
        count = 1 if scratch else shape.n_layers
        self._take(shape, *([np.zeros(size, np.float32) for _ in range(count)] for _ in range(2)))

    @classmethod
    def over(cls, shape: NetworkShape, keys: list[np.ndarray], values: list[np.ndarray]) -> "KeyValues":
        """Return keys and values that are in memory already: per layer a contiguous array (B, KV, S, H)."""
        network = cls.__new__(cls)
        network._take(shape, keys, values)
        return network

    def _take(self, shape: NetworkShape, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
        self.shape, self.keys, self.values = shape, keys, values
        self.rows, self.capacity = keys[0].shape[0], keys[0].shape[2]
        self._bound = [(_shared(key), _shared(value)) for key, value in zip(self.keys, self.values, strict=True)]
        self._bindings: dict[Any, list[_Binding]] = {}

    def grown(self, capacity: int) -> "KeyValues":
        """Return a copy with more slots."""
        larger = KeyValues(self.shape, self.rows, capacity)
        for mine, other in zip((*self.keys, *self.values), (*larger.keys, *larger.values), strict=True):
            other[:, :, : self.capacity] = mine
        return larger

    def bind(self, binding: Any, layers: Iterable[int]) -> None:
        """Make these the cache of a run of some layers: read and written in the same memory."""
        for layer in layers:
            pair = self._bound[layer if len(self._bound) > 1 else 0]
            for part, memory in zip(("keys", "values"), pair, strict=True):
                binding.bind_ortvalue_input(f"{part}_{layer}", memory)
                binding.bind_ortvalue_output(f"new_{part}_{layer}", memory)


@dataclass(frozen=True)
class _Section:
    """A graph of some successive layers; those of lower sections hand their last state on."""

    session: ort.InferenceSession
    layers: range


class _Binding:
    """The inputs of a run in memory that the next run of the same sizes uses again: binding takes longer than copying.

    Attributes:
        ios: ONNX Runtime's binding for each section.
        inputs: an array per input of the graphs, masks as ``masks_0`` and so on.
        passed: the states that a section hands on, by their name.
    """

    def __init__(
        self,
        sections: Sequence[_Section],
        cache: KeyValues,
        sizes: Mapping[str, tuple[int, ...]],
        of_layer: list[int],
        factors: Mapping[str, Any],
    ) -> None:
        self.inputs = {
            name: np.zeros(size, np.int64 if name in _INTEGERS else np.float32) for name, size in sizes.items()
        }
        made = {value.name for section in sections[:-1] for value in section.session.get_outputs()}
        taken = {value.name for section in sections[1:] for value in section.session.get_inputs()}
        self.passed = {name: np.zeros(sizes["embedded"], np.float32) for name in made & taken}
        given = {**{name: _shared(array) for name, array in (self.inputs | self.passed).items()}, **factors}
        self.ios = []
        for section in sections:
            io = section.session.io_binding()
            for layer in section.layers:
                io.bind_ortvalue_input(f"mask_{layer}", given[f"masks_{of_layer[layer]}"])
            for name in {value.name for value in section.session.get_inputs()} & given.keys():
                io.bind_ortvalue_input(name, given[name])
            for name in {value.name for value in section.session.get_outputs()} & self.passed.keys():
                io.bind_ortvalue_output(name, given[name])
            cache.bind(io, section.layers)
            self.ios.append(io)


def _hidden(layer: int) -> str:
    """Return the name of a layer's output in a graph."""
    return f"hidden_{layer}"


def _shared(array: np.ndarray) -> Any:
    """Return ONNX Runtime's view of an array, which shares its memory."""
    return ort.OrtValue.ortvalue_from_numpy(array)


@dataclass(frozen=True)
class Outputs:
    """What a run returned; None for what it was not asked for.

    Attributes:
        logits: (B, n, V) at the places of ``logits_at``, or (B, T, V).
        states: the last layer's output after the final norm, (B, T, D).
        hidden_states: L + 1 arrays (B, T, D), as transformers has them: the embeddings, each layer's output, and at the
            last place ``states``.
        attention: per layer the attention probabilities, (B, heads, T, S).
    """

    logits: np.ndarray | None = None
    states: np.ndarray | None = None
    hidden_states: tuple[np.ndarray, ...] | None = None
    attention: tuple[np.ndarray, ...] | None = None


class PackedNetwork:
    """A decoder over ONNX Runtime; ``open`` makes one. Runs may come from several threads, each with its own cache.

    Attributes:
        shape: its sizes.
        sources: the files of its weights.
        adapters: the adapters that it was opened with, by name.
    """

    def __init__(
        self,
        shape: NetworkShape,
        weights: "Weights",
        sources: Sequence[Path],
        *,
        variant: str,
        threads: int | None,
        cache: Path | None,
        adapters: Mapping[str, Adapter],
        accuracy: int,
        cut: int | None = None,
    ) -> None:
        self.shape, self.adapters = shape, adapters
        self._weights, self.sources, self._variant = weights, sources, variant
        self._threads, self._accuracy = threads, accuracy
        self._cache = user_cache("packed") if cache is None else cache
        self._places = places_of(adapters.values())
        self._factors: dict[str | None, dict[str, Any]] = {
            name: {key: _shared(factor) for key, factor in inputs_of(adapter, self._places, shape).items()}
            for name, adapter in ((None, None), *adapters.items())
        }
        cut = cut if cut and cut < shape.n_layers else 0
        ranges = [layers for layers in (range(cut), range(cut, shape.n_layers)) if layers]
        self._sections = [self._open_section(layers, hands_on=layers is not ranges[-1]) for layers in ranges]
        self._head = self._open_session("head")
        # Opened when they are used: those with more outputs, and those of other lower layers alone.
        self._more_sections: dict[tuple[frozenset[str], int], _Section] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        threads: int | None = None,
        cache: Path | None = None,
        accuracy: int = 4,
        adapters: Mapping[str, Path] | None = None,
        weights: Precision | None = None,
        files: Sequence[Path] | None = None,
        cut: int | None = None,
    ) -> "PackedNetwork":
        """Open a GGUF file, or a folder in safetensors whose weights are quantized.

        Args:
            path: the file or folder.
            threads: how many threads a run uses; None for one per core.
            cache: the folder of built graphs, with weights; the user's cache by default.
            accuracy: 4 rounds activations to 8 bits, as llama.cpp does; 0 computes in float32, several times as slow
                for few tokens.
            adapters: folders of LoRA adapters by name, of which a run takes one with ``adapted``.
            weights: what unquantized ones become: ``int8``, ``int4``, or ``float32`` to leave them; of a folder int8
                by default.
            files: the files of a folder's weights, if others than are usual.
            cut: a depth that many runs will have: its layers become a graph of their own, so that runs of all layers
                and these runs share them in memory.

        Raises:
            ModelError: the file or folder is damaged, or its architecture cannot be run packed.
            ConfigError: an unknown kind of weights.
        """
        source: Weights
        if path.is_dir():
            shape = read_folder_shape(path)
            weights = weights or "int8"
            source = FolderWeights(path, shape, weights, files)
            files = [path / "config.json", *source.files]
        else:
            file = read_file(path)
            shape = read_shape(file)
            weights = weights or "float32"
            source = GgufWeights(file, shape, weights)
            files = sorted(set(file.tensors.files.values()))
        read = {name: read_adapter(folder, shape) for name, folder in (adapters or {}).items()}
        variant = f"weights {weights}, accuracy {accuracy}, adapted {places_of(read.values())}"
        return cls(
            shape,
            source,
            files,
            variant=variant,
            threads=threads,
            cache=cache,
            adapters=read,
            accuracy=accuracy,
            cut=cut,
        )

    @property
    def arithmetic(self) -> str:
        """What decides, beside the files, which bits a run gives."""
        return f"{self._variant}, {self._threads} threads, ONNX Runtime {ort.__version__}, {processor()}"

    def _open_section(self, layers: range, more: Collection[str] = (), *, hands_on: bool = False) -> _Section:
        """Open the graph of some layers; sections share one file of weights.

        Outputs stay in memory until a run ends, so that hidden states and attention are outputs only with ``more``.
        """
        kind = _WITH_ATTENTION if "attention" in more else "body"
        names = ["new_keys", "new_values", *(["attention"] if "attention" in more else [])]
        ends = [f"{name}_{layer}" for name in names for layer in layers]
        ends.append("states" if layers.stop == self.shape.n_layers else _hidden(layers[-1]))
        if "hidden_states" in more:
            ends += [_hidden(layer) for layer in layers[:-1]]
        start = _hidden(layers.start - 1) if layers.start else None
        end = _hidden(layers[-1]) if hands_on else None
        return _Section(self._open_session(kind, Part(tuple(ends), start, end)), layers)

    def _open_session(self, kind: str, part: Part | None = None) -> ort.InferenceSession:
        def built() -> "GraphBuilder":
            # onnx takes time and memory, and a cached graph needs it not.
            from gerund.packed.graph import build, build_head

            if kind == "head":
                return build_head(self.shape, self._weights, accuracy=self._accuracy)
            attention = kind == _WITH_ATTENTION
            return build(self.shape, self._weights, accuracy=self._accuracy, attention=attention, adapted=self._places)

        # Logits and attention are given away in memory of ONNX Runtime, which an arena would not hand back.
        variant, arena = f"{self._variant}, {kind}", kind == "body"
        return open_session(self.sources, variant, built, self._threads, self._cache, part, arena=arena)

    def embed(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return the embeddings (B, T, D) of tokens, float32, scaled as the first layer expects them."""
        ids_BT = np.asarray(ids_BT)
        values = self._weights.embeddings(ids_BT.reshape(-1)) * np.float32(self.shape.embedding_scale)
        return values.reshape(*ids_BT.shape, self.shape.width)

    def head(self, states_ND: np.ndarray) -> np.ndarray:
        """Return the logits (N, V) of last states, as ``run`` returns them."""
        [logits_1NV] = self._head.run(["logits"], {"rows": np.ascontiguousarray(states_ND, np.float32)[None]})
        return np.asarray(logits_1NV[0])

    def causal_masks(
        self, tokens: int, slots: int, write_B: np.ndarray, real_BS: np.ndarray | None = None
    ) -> tuple[np.ndarray, list[int]]:
        """Return the causal masks (P, B, 1, T, S) of tokens at ``write_B`` onwards, and each layer's mask.

        A layer with a window sees that many slots, its own included. A slot that is not in ``real_BS``, which may have
        fewer slots, is seen by its own token alone.
        """
        place_BT = write_B[:, None] + np.arange(tokens)
        distance_BTS = place_BT[..., None] - np.arange(slots)
        kinds = sorted(set(self.shape.windows), key=lambda window: window or 0)
        masks = [(distance_BTS >= 0) & (distance_BTS < (window or slots + 1)) for window in kinds]
        if real_BS is not None:
            real_B1S = np.pad(real_BS, ((0, 0), (0, slots - real_BS.shape[1])))[:, None]
            masks = [mask & (real_B1S | (distance_BTS == 0)) for mask in masks]
        masks_PB1TS = np.where(np.stack(masks)[:, :, None], np.float32(0), MASKED)
        return masks_PB1TS, [kinds.index(window) for window in self.shape.windows]

    def run(
        self,
        ids_BT: np.ndarray | None,
        position_BT: np.ndarray | None = None,
        *,
        embedded_BTD: np.ndarray | None = None,
        masks_PB1TS: np.ndarray | None = None,
        mask_of_layer_L: Sequence[int] | np.ndarray | None = None,
        real_BS: np.ndarray | None = None,
        cache: KeyValues | None = None,
        write_B: np.ndarray | None = None,
        logits_at: np.ndarray | None = None,
        outputs: Sequence[str] = ("states",),
        adapted: str | None = None,
        depth: int | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> Outputs:
        """Run the network on some tokens of each text.

        Give a long prompt to a cache whole: it is read in parts, and some rotary positions depend on its length.

        Args:
            ids_BT: the tokens; None with ``embedded_BTD``.
            position_BT: their rotary positions; the slots that they take by default.
            embedded_BTD: their embeddings, as ``embed`` returns them.
            masks_PB1TS: additive masks, float32; S is the capacity of the cache, or T without one. Causal by default,
                with the windows of the model's layers, over slots up to a token's own.
            mask_of_layer_L: which of the masks each layer takes; the first by default.
            real_BS: False for the slots of padding, which causal masks then hide.
            cache: keys and values of earlier tokens, written in place; None keeps nothing.
            write_B: the slot of the cache that each text's first token takes, the others following; 0 by default.
            logits_at: (B, n), where logits are wanted among the T tokens of each text; every token by default.
            outputs: of ``OUTPUTS``. Logits take most of the time of a short text: ask only for those needed.
            adapted: the name of the adapter that is used; None for none.
            depth: the number of layers to compute, from the bottom; ``states`` are then those of the last of them after
                the final norm, and ``hidden_states`` have one more array than there are layers, none of them normed.
                The cache is not for a later run.
            between: called before each part of a prompt, of up to 128 tokens.

        Raises:
            ConfigError: shapes that do not fit together.
        """
        embedded_BTD = self._embedded(ids_BT, embedded_BTD)
        rows, tokens, _ = embedded_BTD.shape
        write_B = np.zeros(rows, np.int64) if write_B is None else np.asarray(write_B)
        if position_BT is None:
            position_BT = write_B[:, None] + np.arange(tokens)
        if adapted not in self._factors:
            raise ConfigError(f"this network was opened without an adapter {adapted!r}")
        depth = None if depth == self.shape.n_layers else depth
        # In parts, a long prompt takes a fraction of the memory, and no more time.
        whole = cache is None or masks_PB1TS is not None or set(outputs) & {"hidden_states", "attention"}
        cache = KeyValues(self.shape, rows, tokens, scratch=True) if cache is None else cache
        _check_sizes(embedded_BTD, masks_PB1TS, cache, write_B)
        of_layer = [0] * self.shape.n_layers if mask_of_layer_L is None else [int(which) for which in mask_of_layer_L]
        angles = [rope.angles(position_BT) for rope in self.shape.ropes]
        at_Bn = np.arange(tokens)[None] if logits_at is None else np.asarray(logits_at) % tokens
        at_Bn = np.broadcast_to(at_Bn, (rows, at_Bn.shape[1]))
        picked_BnD = np.empty((*at_Bn.shape, self.shape.width), np.float32)
        states = []
        for first, end in parts_of(0, tokens, tokens if whole else _MOST_AT_ONCE):
            between()
            part, write = slice(first, end), write_B + first
            masks = masks_PB1TS
            if masks is None:
                masks, of_layer = self.causal_masks(end - first, cache.capacity, write, real_BS)
            turned = [(cos_BTR[:, part], sin_BTR[:, part]) for cos_BTR, sin_BTR in angles]
            inputs = self._inputs(embedded_BTD[:, part], turned, masks, write, outputs)
            options = _GIVE_BACK if end == tokens and rows * tokens > _MANY_TOKENS else None
            result = self._run(inputs, cache, of_layer[:depth], outputs, options, adapted=adapted, depth=depth)
            if "logits" in outputs:
                row_N, place_N = np.nonzero((first <= at_Bn) & (at_Bn < end))
                picked_BnD[row_N, place_N] = result["states"][row_N, at_Bn[row_N, place_N] - first]
            if "states" in outputs:
                states.append(result["states"])
        if len(states) > 1:
            result["states"] = np.concatenate(states, axis=1)
        if "logits" in outputs:
            logits_NV = self.head(picked_BnD.reshape(-1, self.shape.width))
            result["logits"] = logits_NV.reshape(*at_Bn.shape, -1)
        return self._outputs(outputs, result, embedded_BTD, depth)

    def _embedded(self, ids_BT: np.ndarray | None, embedded_BTD: np.ndarray | None) -> np.ndarray:
        if embedded_BTD is not None:
            return embedded_BTD
        if ids_BT is None:
            raise ConfigError("give ids or embeddings")
        return self.embed(ids_BT)

    def _inputs(
        self,
        embedded_BTD: np.ndarray,
        angles: Iterable[tuple[np.ndarray, np.ndarray]],
        masks_PB1TS: np.ndarray,
        write_B: np.ndarray,
        outputs: Sequence[str],
    ) -> dict[str, np.ndarray]:
        """Return the inputs of the graphs."""
        rows, tokens, _ = embedded_BTD.shape
        group = self.shape.n_heads // self.shape.n_kv_heads
        if tokens > _MOST_GROUPED or "attention" in outputs:
            group = 1
        inputs: dict[str, np.ndarray] = {
            "embedded": embedded_BTD,
            "write": write_B,
            "query_shape": np.array([rows, self.shape.n_heads // group, tokens * group, self.shape.head_dim]),
        }
        for index, (cos_BTR, sin_BTR) in enumerate(angles):
            inputs[f"cos_{index}"], inputs[f"sin_{index}"] = cos_BTR, sin_BTR
        for index, mask_B1TS in enumerate(masks_PB1TS):
            inputs[f"masks_{index}"] = mask_B1TS if group == 1 else np.tile(mask_B1TS, (1, 1, group, 1))
        return inputs

    def _normed(self, states_BTD: np.ndarray) -> np.ndarray:
        """Return states after the final norm."""
        weights_D = self._weights.vector("final_norm")
        assert weights_D is not None
        mean_BT1 = np.square(states_BTD).mean(axis=-1, keepdims=True)
        return states_BTD / np.sqrt(mean_BT1 + np.float32(self.shape.epsilon)) * weights_D

    def _run(
        self,
        inputs: dict[str, np.ndarray],
        cache: KeyValues,
        of_layer: list[int],
        outputs: Sequence[str],
        options: ort.RunOptions | None,
        *,
        adapted: str | None,
        depth: int | None,
    ) -> dict[str, np.ndarray]:
        """Run the graph, and return its outputs by name."""
        sections = self._sections_for(outputs, depth)
        sizes = {name: array.shape for name, array in inputs.items()}
        # A binding belongs to one run at a time; the cache keeps those that are idle.
        key = (sections[0], tuple(sizes.items()), tuple(of_layer), tuple(sorted(outputs)), adapted, depth)
        is_short = inputs["embedded"].size <= _MANY_TOKENS * self.shape.width
        idle = cache._bindings.setdefault(key, []) if is_short else []
        if not idle and len(cache._bindings) > _MOST_BINDINGS:
            cache._bindings.pop(next(iter(cache._bindings)))
        try:
            binding = idle.pop()
        except IndexError:
            binding = _Binding(sections, cache, sizes, of_layer, self._factors[adapted])
        for name, array in inputs.items():
            binding.inputs[name][...] = array
        results: dict[str, np.ndarray] = {}
        for section, io in zip(sections, binding.ios, strict=True):
            results |= self._bind_outputs(io, section, outputs, inputs["embedded"].shape, binding.passed)
            section.session.run_with_iobinding(io, options)
        if "attention" in outputs:
            attention = binding.ios[-1].get_outputs()[-(depth or self.shape.n_layers) :]
            results |= {f"attention_{layer}": value.numpy() for layer, value in enumerate(attention)}
        else:
            idle.append(binding)
        if depth is not None:
            results["states"] = self._normed(results[_hidden(depth - 1)])
        return results

    def _sections_for(self, outputs: Sequence[str], depth: int | None) -> list[_Section]:
        unknown = set(outputs) - set(OUTPUTS)
        if unknown:
            raise ConfigError(f"outputs are among {', '.join(OUTPUTS)}, not {', '.join(sorted(unknown))}")
        more, layers = frozenset(outputs) & {"attention", "hidden_states"}, range(depth or self.shape.n_layers)
        if not more and depth is None:
            return self._sections
        if not more and self._sections[0].layers == layers:
            return self._sections[:1]
        key = more, len(layers)
        if key not in self._more_sections:
            self._more_sections[key] = self._open_section(layers, more)
        return [self._more_sections[key]]

    def _bind_outputs(
        self,
        io: Any,
        section: _Section,
        outputs: Sequence[str],
        embedded: tuple[int, ...],
        passed: Collection[str],
    ) -> dict[str, np.ndarray]:
        """Allocate what is wanted of a section, and return it by its name in the graph."""
        is_last, layers = _hidden(section.layers[-1]) not in passed, section.layers
        names = []
        if is_last and layers.stop < self.shape.n_layers:
            names.append(_hidden(layers[-1]))
        elif is_last and set(outputs) & {"states", "hidden_states", "logits"}:
            names.append("states")
        if "hidden_states" in outputs:
            names += [_hidden(layer) for layer in layers[:-1]]
        results = {name: np.empty(embedded, np.float32) for name in names}
        for name, array in results.items():
            io.bind_ortvalue_output(name, _shared(array))
        if "attention" in outputs:
            # ONNX infers a wrong last dimension for these, so that memory of the right size is refused.
            for layer in layers:
                io.bind_output(f"attention_{layer}", "cpu")
        return results

    def _outputs(
        self,
        outputs: Sequence[str],
        results: dict[str, np.ndarray],
        embedded_BTD: np.ndarray,
        depth: int | None,
    ) -> Outputs:
        hidden = attention = None
        if "hidden_states" in outputs:
            layers = range(self.shape.n_layers - 1 if depth is None else depth)
            last = (results["states"],) if depth is None else ()
            hidden = (embedded_BTD, *(results[_hidden(layer)] for layer in layers), *last)
        if "attention" in outputs:
            attention = tuple(results[f"attention_{layer}"] for layer in range(depth or self.shape.n_layers))
        states = results["states"] if "states" in outputs else None
        return Outputs(results.get("logits"), states, hidden, attention)


def parts_of(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield where each part of a prompt begins and ends: of 16 to ``most`` tokens, or the whole of a short one.

    >>> list(parts_of(0, 300, 128)), list(parts_of(32, 161, 128)), list(parts_of(0, 3, 128))
    ([(0, 128), (128, 256), (256, 300)], [(32, 144), (144, 161)], [(0, 3)])
    """
    while end - first > most:
        step = most if end - first >= most + LEAST_READ else most - LEAST_READ
        yield first, first + step
        first += step
    yield first, end


def _check_sizes(
    embedded_BTD: np.ndarray, masks_PB1TS: np.ndarray | None, cache: KeyValues, write_B: np.ndarray
) -> None:
    """Refuse what would be written outside the cache, or does not fit together."""
    rows, tokens, _ = embedded_BTD.shape
    if cache.rows != rows:
        raise ConfigError(f"the cache is of {cache.rows} texts, not {rows}")
    first, last = int(write_B.min(initial=0)), int(write_B.max(initial=0))
    if first < 0 or last + tokens > cache.capacity:
        raise ConfigError(f"the cache has {cache.capacity} slots, too few for {tokens} tokens from {last} on")
    if masks_PB1TS is not None and masks_PB1TS.shape[1:] != (rows, 1, tokens, cache.capacity):
        raise ConfigError(f"masks are (P, {rows}, 1, {tokens}, {cache.capacity}), not {masks_PB1TS.shape}")


def moved_by_layer(
    network: PackedNetwork, ids_T: np.ndarray, masks_P1TT: np.ndarray, mask_of_layer_L: Sequence[int]
) -> np.ndarray:
    """Return how far each token is moved in each layer by another token, ``(L, T, T)`` (moved token, other token).

    While one layer is looked at, each token sees but itself in the others. Movements are those of the last states, as
    parts of how far a token moves when it is disturbed itself.
    """
    T, L = len(ids_T), len(mask_of_layer_L)
    alone_TT = np.where(np.eye(T, dtype=bool), np.float32(0), MASKED)
    masks_P1TT = np.concatenate([alone_TT[None, None], masks_P1TT])
    embedded_TD = network.embed(ids_T[None])[0]
    size_T1 = np.sqrt(np.square(embedded_TD).mean(axis=1, keepdims=True))
    rows_RTD = np.repeat(embedded_TD[None], T + 1, axis=0)
    rows_RTD[np.arange(T) + 1, np.arange(T)] = np.random.default_rng(0).standard_normal(embedded_TD.shape) * size_T1
    moved = []
    for layer in range(L):
        chosen = [0] * L
        chosen[layer] = 1 + mask_of_layer_L[layer]
        states = network.run(
            None,
            np.broadcast_to(np.arange(T), (T + 1, T)),
            embedded_BTD=rows_RTD,
            masks_PB1TS=np.repeat(masks_P1TT[:, None], T + 1, axis=1),
            mask_of_layer_L=chosen,
            depth=L,
        ).states
        assert states is not None
        change_KQ = np.sqrt(np.square(states[1:] - states[:1]).mean(axis=-1))
        moved.append((change_KQ / np.diagonal(change_KQ)[:, None]).T)
    return np.stack(moved)
