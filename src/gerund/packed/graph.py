"""Build the ONNX graphs of a decoder: its body, whose inputs are masks, positions and the cache, and its head.

Inputs of the body: ``embedded`` (B, T, D); per kind of rotary positions ``cos_i`` and ``sin_i`` (B, T, R); per layer
``mask_l`` (B, 1, T, S), added to the products of queries and keys, and ``keys_l`` and ``values_l`` (B, KV, S, H), the
cache; ``write`` (B,), the slot of the cache that the first of the T tokens takes; ``query_shape``, how attention takes
its queries: (B, heads, T, H), or (B, KV, T * heads / KV, H) with masks repeated accordingly, which reads each key and
value once. Outputs: ``states`` (B, T, D), ``hidden_l`` and the cache as ``new_keys_l`` and ``new_values_l``. The cache
is written with ``TensorScatter``, which copies nothing where a cache's input and output are bound to the same memory.
The head reads ``rows`` (1, N, D), the states where logits are wanted, and gives ``logits`` (1, N, V).

Shapes: B batch, T tokens, S slots of the cache, D width, H size of a head, KV heads of keys and values, V vocabulary.
"""

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper

from gerund.errors import ModelError
from gerund.packed.blocks import Blocks, stacked
from gerund.packed.shape import GROUPS, NetworkShape

if TYPE_CHECKING:
    from gerund.packed.graph_cache import Part

MICROSOFT = "com.microsoft"
_OPSETS = {"": 24, MICROSOFT: 1}
_IR_VERSION = 11
_ALIGNMENT = 4096  # of weights in their file, so that they can be mapped

PIECE = 1 << 23
"""Bytes of a large matrix that is multiplied in pieces, since ONNX Runtime copies a matrix while it opens a graph."""


class Weights(Protocol):
    """Weights by the names that the graph has for them."""

    def matrix(self, name: str, layer: int | None = None) -> Blocks | np.ndarray:
        """Return a matrix (outputs, inputs)."""
        ...

    def vector(self, name: str, layer: int | None = None) -> np.ndarray | None:
        """Return a norm's weights or a bias; None if the model has none."""
        ...

    def embeddings(self, ids_N: np.ndarray) -> np.ndarray:
        """Return the embeddings of tokens (N, D), float32, as they are stored."""
        ...


@dataclass
class GraphBuilder:
    """Nodes, inputs, outputs and weights of a graph to be."""

    accuracy: int = 4
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    sums: dict[tuple[str, int], str] = field(default_factory=dict)

    def node(
        self, operator: str, inputs: Sequence[str], name: str, *more: str, domain: str = "", **details: Any
    ) -> str:
        """Add a node and return its first output."""
        self.nodes.append(helper.make_node(operator, list(inputs), [name, *more], name=name, domain=domain, **details))
        return name

    def constant(self, name: str, value: Any, dtype: Any = None) -> str:
        """Add weights or a constant once."""
        if name not in self.constants:
            self.constants[name] = np.ascontiguousarray(value, dtype)
        return name

    def integers(self, *values: int) -> str:
        """Add a vector of integers."""
        return self.constant("int_" + "_".join(map(str, values)), values, np.int64)

    def input(self, name: str, shape: Sequence[str | int], kind: int = TensorProto.FLOAT) -> str:
        """Add an input of the graph."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, shape: Sequence[str | int]) -> None:
        """Make a value an output of the graph."""
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))

    def linear(self, x: str, weights: Blocks | np.ndarray, name: str, bias: np.ndarray | None = None) -> str:
        """Multiply with a matrix, and add a bias."""
        if isinstance(weights, Blocks):
            y = self._blocks(x, weights, f"{name}_product")
        else:
            y = self.node("MatMul", [x, self.constant(f"{name}_weight", weights.T, np.float32)], f"{name}_product")
        if bias is not None:
            y = self.node("Add", [y, self.constant(f"{name}_bias", bias, np.float32)], f"{name}_biased")
        return y

    def _blocks(self, x: str, weights: Blocks, name: str) -> str:
        n_rows, n_columns = weights.shape
        y = self.node(
            "MatMulNBits",
            [
                x,
                self.constant(f"{name}_codes", weights.codes_NGb),
                self.constant(f"{name}_scales", weights.scales_NG.reshape(-1), np.float32),
            ],
            name,
            domain=MICROSOFT,
            K=n_columns,
            N=n_rows,
            bits=weights.bits,
            block_size=weights.size,
            accuracy_level=self.accuracy,
        )
        if weights.offsets_NG is None:
            return y
        offsets = self.constant(f"{name}_offsets", weights.offsets_NG.T, np.float32)
        remainder = self.node("MatMul", [self._block_sums(x, weights.size, n_columns), offsets], f"{name}_remainder")
        return self.node("Add", [y, remainder], f"{name}_sum")

    def _block_sums(self, x: str, size: int, n_columns: int) -> str:
        """Return the sum of each block of activations, shared by the matrices that they are multiplied with."""
        if (x, size) not in self.sums:
            blocks = self.node("Reshape", [x, self.integers(0, 0, n_columns // size, size)], f"{x}_blocks_{size}")
            self.sums[x, size] = self.node("ReduceSum", [blocks, self.integers(-1)], f"{x}_sums_{size}", keepdims=0)
        return self.sums[x, size]

    def several(
        self, x: str, weights: Sequence[Blocks | np.ndarray], name: str, biases: Sequence[np.ndarray | None] = ()
    ) -> list[str]:
        """Multiply with several matrices, at once where their forms agree; return one output, or one per matrix."""
        biases = biases or [None] * len(weights)
        blocks = [matrix for matrix in weights if isinstance(matrix, Blocks)]
        if len(blocks) == len(weights) and len({matrix.form for matrix in blocks}) == 1:
            weights, biases = [stacked(blocks)], [_joined(weights, biases)]
        elif not blocks:
            plain = [matrix for matrix in weights if not isinstance(matrix, Blocks)]
            weights, biases = [np.concatenate(plain)], [_joined(weights, biases)]
        return [
            self.linear(x, matrix, f"{name}_{index}", bias)
            for index, (matrix, bias) in enumerate(zip(weights, biases, strict=True))
        ]

    def joined(self, parts: Sequence[str], name: str) -> str:
        """Return parts of a row as one."""
        return parts[0] if len(parts) == 1 else self.node("Concat", parts, name, axis=-1)

    def model(self, weights_file: str) -> tuple[onnx.ModelProto, list[np.ndarray]]:
        """Return the model, and the arrays of its weights' file in order; see ``write_weights``."""
        tensors, arrays, place = [], [], 0
        for name, array in self.constants.items():
            if array.nbytes < 1024:
                tensors.append(onnx.numpy_helper.from_array(array, name))
                continue
            place = -(-place // _ALIGNMENT) * _ALIGNMENT
            tensor = TensorProto(name=name, dims=array.shape, data_type=helper.np_dtype_to_tensor_dtype(array.dtype))
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", weights_file), ("offset", place), ("length", array.nbytes)):
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            arrays.append(array)
            place += array.nbytes
        graph = helper.make_graph(self.nodes, "gerund", self.inputs, self.outputs, tensors)
        opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION), arrays


def _joined(weights: Sequence[Blocks | np.ndarray], biases: Sequence[np.ndarray | None]) -> np.ndarray | None:
    if all(bias is None for bias in biases):
        return None
    zeros = [np.zeros(matrix.shape[0], np.float32) for matrix in weights]
    return np.concatenate([zero if bias is None else bias for zero, bias in zip(zeros, biases, strict=True)])


def write_weights(file: Any, arrays: Sequence[np.ndarray]) -> None:
    """Write the arrays of a model's weights to an open file, where the model expects them."""
    for array in arrays:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        file.write(array.data)


def build(
    shape: NetworkShape,
    weights: Weights,
    *,
    accuracy: int = 4,
    attention: bool = False,
    adapted: Collection[tuple[str, int]] = (),
) -> GraphBuilder:
    """Return the graph of a decoder's body.

    Args:
        shape: what the network is.
        weights: its weights.
        accuracy: of ``MatMulNBits``: 4 rounds activations to 8 bits, 0 computes in float32.
        attention: whether attention probabilities are outputs too, ``attention_l`` (B, heads, T, S).
        adapted: the groups and layers of an adapter's products, whose factors are inputs too; see ``adapter``.
    """
    graph = GraphBuilder(accuracy)
    x = graph.input("embedded", ["B", "T", shape.width])
    for index, rope in enumerate(shape.ropes):
        for part in ("cos", "sin"):
            graph.input(f"{part}_{index}", ["B", "T", rope.size // 2])
    graph.input("write", ["B"], TensorProto.INT64)
    graph.input("query_shape", [4], TensorProto.INT64)
    more: str | None = None
    for layer in range(shape.n_layers):
        x, more = _Layer(graph, shape, weights, layer, adapted).add(x, more, attention=attention)
    _added_and_normed(graph, shape, x, more, weights.vector("final_norm"), "states", _hidden(shape.n_layers - 1))
    for layer in range(shape.n_layers):
        graph.output(_hidden(layer), ["B", "T", shape.width])
    graph.output("states", ["B", "T", shape.width])
    return graph


def build_head(shape: NetworkShape, weights: Weights, *, accuracy: int = 4) -> GraphBuilder:
    """Return the graph of a decoder's head; the arguments are those of ``build``."""
    graph = GraphBuilder(accuracy)
    # Rows as (1, N, D): the sums of blocks are taken over three dimensions.
    rows = graph.input("rows", [1, "N", shape.width])
    y = _in_pieces(graph, rows, weights.matrix("head"), "head", weights.vector("head_bias"))
    y = _scaled(graph, y, shape.logit_scale, "scaled_logits")
    if shape.logit_cap:
        y = _scaled(graph, y, 1 / shape.logit_cap, "logits_in_caps")
        y = graph.node("Tanh", [y], "bounded_logits")
        y = _scaled(graph, y, shape.logit_cap, "capped_logits")
    graph.node("Identity", [y], "logits")
    graph.output("logits", [1, "N", shape.vocabulary])
    return graph


def keep_part(model: onnx.ModelProto, part: "Part") -> None:
    """Take everything out of a model that a part of it does not need."""
    graph, nodes = model.graph, []
    given, handed_on = _made_with(graph, part.start), _made_with(graph, part.end)
    ends = {*part.ends, *handed_on}
    wanted = set(ends)
    for node in reversed(graph.node):
        if wanted.intersection(node.output) and not given.intersection(node.output):
            wanted.update(node.input)
            nodes.append(node)
    inputs = [value for value in graph.input if value.name in wanted]
    outputs = [value for value in graph.output if value.name in ends]
    inputs += [_states(name) for name in sorted(given & wanted)]
    outputs += [_states(name) for name in sorted(handed_on - {value.name for value in outputs})]
    for field_, kept in (
        (graph.node, nodes[::-1]),
        (graph.initializer, [tensor for tensor in graph.initializer if tensor.name in wanted]),
        (graph.input, inputs),
        (graph.output, outputs),
        (graph.value_info, []),
    ):
        copies = copy.deepcopy(kept)
        del field_[:]
        field_.extend(copies)


def _made_with(graph: onnx.GraphProto, name: str | None) -> set[str]:
    """Return what is computed in the same node as a state: ONNX Runtime fuses it with the norm of the next layer."""
    return {other for node in graph.node if name in node.output for other in node.output if other}


def _states(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def _in_pieces(graph: GraphBuilder, x: str, weights: Blocks | np.ndarray, name: str, bias: np.ndarray | None) -> str:
    """Multiply with a matrix in pieces of its rows."""
    count = weights.codes_NGb.nbytes // PIECE if isinstance(weights, Blocks) else 0
    if not isinstance(weights, Blocks) or count < 2:
        return graph.linear(x, weights, name, bias)
    size = -(-weights.shape[0] // count)
    rows = [slice(start, start + size) for start in range(0, weights.shape[0], size)]
    parts = [
        graph.linear(x, weights.rows(part), f"{name}_{index}", None if bias is None else bias[part])
        for index, part in enumerate(rows)
    ]
    return graph.joined(parts, f"{name}_joined")


def _norm(graph: GraphBuilder, shape: NetworkShape, x: str, weight: np.ndarray | None, name: str) -> str:
    weights = graph.constant(f"{name}_weight", _present(weight, name), np.float32)
    return graph.node("RMSNormalization", [x, weights], name, axis=-1, epsilon=shape.epsilon)


def _hidden(layer: int) -> str:
    """Return the name of a layer's output."""
    return f"hidden_{layer}"


def _added_and_normed(
    graph: GraphBuilder,
    shape: NetworkShape,
    x: str,
    more: str | None,
    weight: np.ndarray | None,
    name: str,
    name_of_sum: str,
) -> tuple[str, str]:
    """Add ``more``, if it is given, and norm; return the sum and the normed sum."""
    if more is None:
        return x, _norm(graph, shape, x, weight, name)
    weights = graph.constant(f"{name}_weight", _present(weight, name), np.float32)
    operator = "SkipSimplifiedLayerNormalization"
    graph.node(operator, [x, more, weights], name, "", "", name_of_sum, domain=MICROSOFT, epsilon=shape.epsilon)
    return name_of_sum, name


def _present(weight: np.ndarray | None, name: str) -> np.ndarray:
    if weight is None:
        raise ModelError(f"the weights of {name} are missing")
    return weight


def _scaled(graph: GraphBuilder, x: str, factor: float, name: str) -> str:
    if factor == 1:
        return x
    return graph.node("Mul", [x, graph.constant(f"{name}_factor", factor, np.float32)], name)


@dataclass
class _Layer:
    """One layer of a graph."""

    graph: GraphBuilder
    shape: NetworkShape
    weights: Weights
    layer: int
    adapted: Collection[tuple[str, int]]

    def name(self, part: str) -> str:
        return f"{part}_{self.layer}"

    def add(self, x: str, more: str | None, *, attention: bool) -> tuple[str, str]:
        """Add the layer to ``x + more``; return two values whose sum is its output."""
        x, normed = self._before(x, more, "attention_norm", _hidden(self.layer - 1))
        y = self._after(self._attention(normed, attention), "attention_after_norm")
        x, normed = self._before(x, y, "feed_norm", self.name("attention_added"))
        return x, self._after(self._feed_forward(normed), "feed_after_norm")

    def _before(self, x: str, more: str | None, norm: str, name_of_sum: str) -> tuple[str, str]:
        """Return the sum, and what the next part of the layer reads."""
        if not self.shape.norms_before:
            x = x if more is None else self.graph.node("Add", [x, more], name_of_sum)
            return x, x
        weight = self.weights.vector(norm, self.layer)
        return _added_and_normed(self.graph, self.shape, x, more, weight, self.name(norm), name_of_sum)

    def _after(self, y: str, norm: str) -> str:
        if self.shape.norms_after:
            y = _norm(self.graph, self.shape, y, self.weights.vector(norm, self.layer), self.name(norm))
        return _scaled(self.graph, y, self.shape.residual_scale, f"{y}_scaled")

    def _attention(self, x: str, record: bool) -> str:
        graph, shape = self.graph, self.shape
        query, key, value = self._queries_keys_values(x)
        query, key = self._rotated(query, "query"), self._rotated(key, "key")
        cache: list[str | int] = ["B", shape.n_kv_heads, "S", shape.head_dim]
        for part, new in (("keys", key), ("values", value)):
            graph.input(self.name(part), cache)
            graph.node("TensorScatter", [self.name(part), new, "write"], self.name(f"new_{part}"), axis=2)
            graph.output(self.name(f"new_{part}"), cache)
        graph.input(self.name("mask"), ["B", 1, "T_mask", "S"])
        query = graph.node("Reshape", [query, "query_shape"], self.name("shaped_query"))
        more: tuple[str, ...] = ()
        details: dict[str, Any] = {"scale": shape.attention_scale, "softcap": shape.soft_cap}
        if record:
            more = ("", "", self.name("attention"))
            details["qk_matmul_output_mode"] = 3
            graph.output(more[-1], ["B", "heads", "T_mask", "S"])
        y = graph.node(
            "Attention",
            [query, self.name("new_keys"), self.name("new_values"), self.name("mask")],
            self.name("attended"),
            *more,
            **details,
        )
        y = graph.node(
            "Reshape", [y, graph.integers(0, shape.n_heads, -1, shape.head_dim)], self.name("attended_heads")
        )
        y = graph.node("Transpose", [y], self.name("attended_by_token"), perm=[0, 2, 1, 3])
        y = graph.node("Reshape", [y, graph.integers(0, 0, shape.n_heads * shape.head_dim)], self.name("attended_row"))
        bias = self.weights.vector("output_bias", self.layer)
        y_out = graph.linear(y, self.weights.matrix("output", self.layer), self.name("attention_output"), bias)
        return self._adapted(y, y_out, "output")

    def _queries_keys_values(self, x: str) -> list[str]:
        """Return queries, keys and values, (B, heads, T, H) each."""
        graph, shape, names = self.graph, self.shape, ("query", "key", "value")
        matrices = [self.weights.matrix(name, self.layer) for name in names]
        biases = [self.weights.vector(f"{name}_bias", self.layer) for name in names]
        parts = graph.several(x, matrices, self.name("qkv"), biases)
        heads = [shape.n_heads, shape.n_kv_heads, shape.n_kv_heads]
        if ("qkv", self.layer) in self.adapted:
            parts = [self._adapted(x, graph.joined(parts, self.name("qkv_joined")), "qkv")]
        if shape.query_norm == "row":
            parts = self._split(parts, [count * shape.head_dim for count in heads], "qkv_rows", -1)
            parts[:2] = [self._query_norm(parts[index], names[index]) for index in (0, 1)]
        row = graph.joined(parts, self.name("qkv_row"))
        row = graph.node("Reshape", [row, graph.integers(0, 0, sum(heads), shape.head_dim)], self.name("qkv_heads"))
        row = graph.node("Transpose", [row], self.name("qkv_by_head"), perm=[0, 2, 1, 3])
        parts = self._split([row], heads, "qkv_split", 1)
        if shape.query_norm == "head":
            parts[:2] = [self._query_norm(parts[index], names[index]) for index in (0, 1)]
        return parts

    def _query_norm(self, x: str, name: str) -> str:
        weight = self.weights.vector(f"{name}_norm", self.layer)
        return _norm(self.graph, self.shape, x, weight, self.name(f"{name}_norm"))

    def _split(self, parts: list[str], sizes: list[int], name: str, axis: int) -> list[str]:
        """Return a value's parts, if it is one value."""
        if len(parts) > 1:
            return parts
        names = [self.name(f"{name}_{index}") for index in range(len(sizes))]
        self.graph.node("Split", [parts[0], self.graph.integers(*sizes)], *names, axis=axis)
        return names

    def _rotated(self, x: str, name: str) -> str:
        rope = self.shape.rope_of_layer[self.layer]
        if rope is None:
            return x
        partial = self.shape.ropes[rope].size
        details: dict[str, Any] = {"rotary_embedding_dim": partial} if partial < self.shape.head_dim else {}
        return self.graph.node(
            "RotaryEmbedding", [x, f"cos_{rope}", f"sin_{rope}"], self.name(f"rotated_{name}"), **details
        )

    def _adapted(self, x: str, y: str, group: str) -> str:
        """Add an adapter's product with ``x`` to ``y``; its factors may be of rank 0."""
        if (group, self.layer) not in self.adapted:
            return y
        sizes = [self.shape.size_of(name) for name in GROUPS[group]]
        rank, name = self.name(f"rank_{group}"), self.name(group)
        first = self.graph.input(f"adapter_first_{name}", [sizes[0][1], rank])
        second = self.graph.input(f"adapter_second_{name}", [rank, sum(rows for rows, _ in sizes)])
        product = self.graph.node("MatMul", [x, first], f"adapter_{name}_low")
        product = self.graph.node("MatMul", [product, second], f"adapter_{name}_product")
        return self.graph.node("Add", [y, product], f"adapter_{name}_added")

    def _feed_forward(self, x: str) -> str:
        graph, names = self.graph, ("gate", "up")
        matrices = [self.weights.matrix(name, self.layer) for name in names]
        biases = [self.weights.vector(f"{name}_bias", self.layer) for name in names]
        sizes = [matrix.shape[0] for matrix in matrices]
        parts = graph.several(x, matrices, self.name("gate_up"), biases)
        if ("gate_up", self.layer) in self.adapted:
            parts = [self._adapted(x, graph.joined(parts, self.name("gate_up_joined")), "gate_up")]
        gate, up = self._split(parts, sizes, "gate_up_split", -1)
        if self.shape.activation == "silu":
            gate = graph.node("QuickGelu", [gate], self.name("gate_active"), domain=MICROSOFT, alpha=1.0)
        else:
            gate = graph.node("Gelu", [gate], self.name("gate_active"), approximate="tanh")
        y = graph.node("Mul", [gate, up], self.name("gated"))
        bias = self.weights.vector("down_bias", self.layer)
        y_out = graph.linear(y, self.weights.matrix("down", self.layer), self.name("feed_output"), bias)
        return self._adapted(y, y_out, "down")
