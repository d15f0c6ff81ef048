"""A decoder that runs on quantized weights: token ids in, logits and states out.

It knows neither torch nor tokenizers. Masks are additive: 0 where a token sees a slot, ``MASKED`` where it does not.

Shapes: B batch, T tokens, S slots of the cache, D width, H size of a head, KV heads of keys and values, V vocabulary,
L layers, P masks, N places where logits are wanted.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from gerund.errors import ConfigError
from gerund.gguf_file import GgufFile, read_file
from gerund.packed.blocks import Blocks, repack
from gerund.packed.gguf_weights import GgufWeights
from gerund.packed.graph import build, write_weights
from gerund.packed.shape import NetworkShape, read_shape

MASKED = np.float32(-1e9)
"""What a mask adds where a token does not see a slot."""

OUTPUTS = ("logits", "states", "hidden_states", "attention")
"""What ``PackedNetwork.run`` can return."""


class KeyValues:
    """The keys and values of some texts, allocated once and written in place.

    Attributes:
        keys, values: per layer an array (B, KV, S, H), float32. Read and write them freely: ``run`` uses this memory.
    """

    def __init__(self, shape: NetworkShape, rows: int, capacity: int) -> None:
        size = (rows, shape.n_kv_heads, capacity, shape.head_dim)
        self.shape = shape
        self.keys = [np.zeros(size, np.float32) for _ in range(shape.n_layers)]
        self.values = [np.zeros(size, np.float32) for _ in range(shape.n_layers)]
        self._bound = [
            (ort.OrtValue.ortvalue_from_numpy(key), ort.OrtValue.ortvalue_from_numpy(value))
            for key, value in zip(self.keys, self.values, strict=True)
        ]

    @property
    def rows(self) -> int:
        """Number of texts."""
        return int(self.keys[0].shape[0])

    @property
    def capacity(self) -> int:
        """Number of slots per text."""
        return int(self.keys[0].shape[2])

    def grown(self, capacity: int) -> "KeyValues":
        """Return a copy with more slots."""
        larger = KeyValues(self.shape, self.rows, capacity)
        for mine, other in zip((*self.keys, *self.values), (*larger.keys, *larger.values), strict=True):
            other[:, :, : self.capacity] = mine
        return larger

    def bind(self, binding: Any) -> None:
        """Make these the cache of a run: read and written in the same memory."""
        for layer, pair in enumerate(self._bound):
            for part, memory in zip(("keys", "values"), pair, strict=True):
                binding.bind_ortvalue_input(f"{part}_{layer}", memory)
                binding.bind_ortvalue_output(f"new_{part}_{layer}", memory)


class _Scratch(KeyValues):
    """Keys and values that nobody keeps: all layers write to the same memory, one after the other."""

    def __init__(self, shape: NetworkShape, rows: int, capacity: int) -> None:
        size = (rows, shape.n_kv_heads, capacity, shape.head_dim)
        self.shape = shape
        self.keys, self.values = [np.zeros(size, np.float32)], [np.zeros(size, np.float32)]
        pair = (ort.OrtValue.ortvalue_from_numpy(self.keys[0]), ort.OrtValue.ortvalue_from_numpy(self.values[0]))
        self._bound = [pair] * shape.n_layers


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
    """A decoder over ONNX Runtime; ``open`` makes one. Runs may come from several threads.

    Attributes:
        shape: its sizes.
    """

    def __init__(self, shape: NetworkShape, file: GgufFile, *, threads: int | None, accuracy: int = 4) -> None:
        self.shape = shape
        self._file, self._threads, self._accuracy = file, threads, accuracy
        self._session = self._open_session(attention=False)
        self._attention_session: ort.InferenceSession | None = None

    @classmethod
    def open(
        cls, path: Path, *, threads: int | None = None, cache: Path | None = None, accuracy: int = 4
    ) -> "PackedNetwork":
        """Open a GGUF file.

        Args:
            path: the file.
            threads: how many threads a run uses; None for one per core.
            cache: where built graphs are kept.
            accuracy: 4 rounds activations to 8 bits, as llama.cpp does; 0 computes in float32, several times as slow.

        Raises:
            ModelError: the file is damaged, or its architecture cannot be run packed.
        """
        del cache
        file = read_file(path)
        return cls(read_shape(file), file, threads=threads, accuracy=accuracy)

    def _open_session(self, *, attention: bool) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads or 0
        options.log_severity_level = 3
        graph = build(self.shape, GgufWeights(self._file, self.shape), accuracy=self._accuracy, attention=attention)
        model, arrays = graph.model("weights.bin")
        with tempfile.TemporaryDirectory() as folder:
            with Path(folder, "weights.bin").open("wb") as file:
                write_weights(file, arrays)
            path = Path(folder, "graph.onnx")
            path.write_bytes(model.SerializeToString())
            return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def embed(self, ids_BT: np.ndarray) -> np.ndarray:
        """Return the embeddings (B, T, D) of tokens, float32, scaled as the first layer expects them."""
        ids_BT = np.asarray(ids_BT)
        name = "token_embd.weight"
        rows = self._file.tensors.stored(name)[ids_BT.reshape(-1)]
        matrix = repack(np.array(rows), self._file.tensors.infos[name].ggml_type)
        values = matrix.unpack() if isinstance(matrix, Blocks) else matrix
        return (values * np.float32(self.shape.embedding_scale)).reshape(*ids_BT.shape, self.shape.width)

    def causal_masks(self, tokens: int, slots: int, write_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the causal masks (P, B, 1, T, S) of tokens at ``write_B`` onwards, and each layer's mask.

        A layer with a window sees that many slots, its own included.
        """
        place_BT = write_B[:, None] + np.arange(tokens)
        distance_BTS = place_BT[..., None] - np.arange(slots)
        kinds = sorted(set(self.shape.windows), key=lambda window: window or 0)
        masks = [(distance_BTS >= 0) & (distance_BTS < (window or slots + 1)) for window in kinds]
        masks_PB1TS = np.where(np.stack(masks)[:, :, None], np.float32(0), MASKED)
        return masks_PB1TS, np.array([kinds.index(window) for window in self.shape.windows])

    def run(
        self,
        ids_BT: np.ndarray | None,
        position_BT: np.ndarray | None = None,
        *,
        embedded_BTD: np.ndarray | None = None,
        masks_PB1TS: np.ndarray | None = None,
        mask_of_layer_L: Sequence[int] | np.ndarray | None = None,
        cache: KeyValues | None = None,
        write_B: np.ndarray | None = None,
        logits_at: np.ndarray | None = None,
        outputs: Sequence[str] = ("states",),
    ) -> Outputs:
        """Run the network on some tokens of each text.

        Args:
            ids_BT: the tokens; None with ``embedded_BTD``.
            position_BT: their rotary positions; the slots that they take by default.
            embedded_BTD: their embeddings, as ``embed`` returns them.
            masks_PB1TS: additive masks, float32; S is the capacity of the cache, or T without one. Causal by default,
                with the windows of the model's layers, over slots up to a token's own.
            mask_of_layer_L: which of the masks each layer takes; the first by default.
            cache: keys and values of earlier tokens, written in place; None keeps nothing.
            write_B: the slot of the cache that each text's first token takes, the others following; 0 by default.
            logits_at: (B, n), where logits are wanted among the T tokens of each text; every token by default.
            outputs: of ``OUTPUTS``. Logits take most of the time of a short text: ask only for those needed.

        Raises:
            ConfigError: shapes that do not fit together.
        """
        if embedded_BTD is None:
            if ids_BT is None:
                raise ConfigError("give ids or embeddings")
            embedded_BTD = self.embed(ids_BT)
        rows, tokens, _ = embedded_BTD.shape
        write_B = np.zeros(rows, np.int64) if write_B is None else np.ascontiguousarray(write_B, np.int64)
        position_BT = write_B[:, None] + np.arange(tokens) if position_BT is None else position_BT
        slots = tokens if cache is None else cache.capacity
        if cache is not None and cache.rows != rows:
            raise ConfigError(f"the cache is of {cache.rows} texts, not {rows}")
        if int(write_B.max(initial=0)) + tokens > slots:
            raise ConfigError(f"the cache has {slots} slots, too few for {tokens} tokens from {int(write_B.max())} on")
        if masks_PB1TS is None:
            masks_PB1TS, mask_of_layer_L = self.causal_masks(tokens, slots, write_B)
        if masks_PB1TS.shape[1:] != (rows, 1, tokens, slots):
            raise ConfigError(f"masks are (P, {rows}, 1, {tokens}, {slots}), not {masks_PB1TS.shape}")
        if mask_of_layer_L is None:
            mask_of_layer_L = [0] * self.shape.n_layers
        session = self._session_for(outputs)
        binding = session.io_binding()
        self._bind_inputs(binding, embedded_BTD, position_BT, write_B, masks_PB1TS, mask_of_layer_L)
        (cache or _Scratch(self.shape, rows, slots)).bind(binding)
        at_Bn = np.empty((rows, 0), np.int64)
        if "logits" in outputs:
            at_Bn = np.broadcast_to(np.arange(tokens), (rows, tokens)) if logits_at is None else np.asarray(logits_at)
        picked_N = (np.arange(rows)[:, None] * tokens + at_Bn % tokens).reshape(-1)
        _bind(binding, "picked", picked_N, np.int64)
        results = self._bind_outputs(binding, outputs, (rows, tokens), at_Bn.shape)
        session.run_with_iobinding(binding)
        attention = None
        if "attention" in outputs:
            attention = tuple(value.numpy() for value in binding.get_outputs()[-self.shape.n_layers :])
        return self._outputs(outputs, results, embedded_BTD, attention)

    def _session_for(self, outputs: Sequence[str]) -> ort.InferenceSession:
        unknown = set(outputs) - set(OUTPUTS)
        if unknown:
            raise ConfigError(f"outputs are among {', '.join(OUTPUTS)}, not {', '.join(sorted(unknown))}")
        if "attention" not in outputs:
            return self._session
        if self._attention_session is None:
            self._attention_session = self._open_session(attention=True)
        return self._attention_session

    def _bind_inputs(
        self,
        binding: Any,
        embedded_BTD: np.ndarray,
        position_BT: np.ndarray,
        write_B: np.ndarray,
        masks_PB1TS: np.ndarray,
        mask_of_layer_L: Sequence[int] | np.ndarray,
    ) -> None:
        _bind(binding, "embedded", embedded_BTD, np.float32)
        _bind(binding, "write", write_B, np.int64)
        for index, rope in enumerate(self.shape.ropes):
            for part, values in zip(("cos", "sin"), rope.angles(position_BT), strict=True):
                _bind(binding, f"{part}_{index}", values, np.float32)
        masks = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(mask, np.float32)) for mask in masks_PB1TS]
        for layer, which in enumerate(mask_of_layer_L):
            binding.bind_ortvalue_input(f"mask_{layer}", masks[which])

    def _bind_outputs(
        self, binding: Any, outputs: Sequence[str], sizes: tuple[int, int], picked: tuple[int, ...]
    ) -> dict[str, np.ndarray]:
        """Allocate what is wanted, and return it by its name in the graph."""
        shape, (rows, tokens) = self.shape, sizes
        wanted: dict[str, tuple[int, ...]] = {}
        if "logits" in outputs:
            wanted["logits"] = (picked[0] * picked[1], shape.vocabulary)
        if "states" in outputs or "hidden_states" in outputs:
            wanted["states"] = (rows, tokens, shape.width)
        if "hidden_states" in outputs:
            wanted |= {f"hidden_{layer}": (rows, tokens, shape.width) for layer in range(shape.n_layers - 1)}
        results = {name: np.empty(size, np.float32) for name, size in wanted.items()}
        for name, array in results.items():
            binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))
        if "attention" in outputs:
            # ONNX infers a wrong last dimension for these, so that memory of the right size is refused.
            for layer in range(shape.n_layers):
                binding.bind_output(f"attention_{layer}", "cpu")
        if "logits" in results:
            results["logits"] = results["logits"].reshape(*picked, shape.vocabulary)
        return results

    def _outputs(
        self,
        outputs: Sequence[str],
        results: dict[str, np.ndarray],
        embedded_BTD: np.ndarray,
        attention: tuple[np.ndarray, ...] | None,
    ) -> Outputs:
        hidden = None
        if "hidden_states" in outputs:
            layers = range(self.shape.n_layers - 1)
            hidden = (embedded_BTD, *(results[f"hidden_{layer}"] for layer in layers), results["states"])
        return Outputs(results.get("logits"), results.get("states"), hidden, attention)


def _bind(binding: Any, name: str, values: np.ndarray, dtype: Any) -> None:
    binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(values, dtype)))
