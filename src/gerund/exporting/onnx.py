"""Encoders as ONNX, read by onnxruntime and compared with gerund before they are put in place.

Knows: torch's exporter, onnxruntime, the files beside a graph. Does not know: what the graph computes, where it goes.
"""

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.exporting import graphs
from gerund.exporting.files import write_json
from gerund.exporting.graphs import INPUTS, LONGEST_DIMENSION, POOLED_FROM, STATES, VECTORS, Prepared
from gerund.inference.encode.precision_check import ENOUGH_IN_INT8
from gerund.inference.encode.runtime import EncoderRuntime

MODEL_FILE = "model.onnx"
SETTINGS_FILE = "onnx.json"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# A file of protobuf holds 2 GB at most; above this the weights lie beside the graph.
_ONE_FILE = 1 << 30


def write(runtime: EncoderRuntime, folder: Path, *, eight_bits: bool = False) -> None:
    """Fill ``folder`` with the graph, its tokenizer, ``onnx.json`` and a README, after trying the graph.

    Args:
        runtime: the encoder.
        folder: where to.
        eight_bits: hold its weights in eight bits, each column scaled by itself; what they are multiplied with is
            rounded to eight bits for each text, by onnxruntime.

    Raises:
        ConfigError: a plan, prompt or tokenizer that another program could not follow; or, with ``eight_bits``, more
            than a gigabyte of weights.
        ModelError: torch cannot export the architecture, or onnxruntime computes something else.
        MissingDependencyError: ONNX is not installed.
    """
    demand_installed(_NEEDED, "ONNX", "onnx")
    graphs.refuse(runtime, "ONNX")
    prepared = graphs.prepare(runtime, folder)
    if eight_bits and prepared.nbytes > _ONE_FILE:
        raise ConfigError("weights of more than a gigabyte are not written in 8 bits; export as onnx")
    write_graph(prepared, folder / MODEL_FILE)
    check(prepared, folder / MODEL_FILE)
    weights, told = "float32", {}
    if eight_bits:
        quantize(folder / MODEL_FILE)
        cosine = round(1 - check(prepared, folder / MODEL_FILE, 1 - ENOUGH_IN_INT8), 5)
        weights, told = f"weights in 8 bits (cosine to gerund's vectors at least {cosine})", {"cosine": cosine}
    prepared.tokenizer.save_pretrained(folder)
    write_json(folder / SETTINGS_FILE, {**graphs.settings(prepared), **told})
    text = graphs.readme(
        prepared,
        "A text encoder in ONNX, exported by gerund",
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession("{MODEL_FILE}")',
        "vectors, states = session.run(None, ...)",
        SETTINGS_FILE,
        weights,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def demand_installed(modules: tuple[str, ...], what: str, extra: str) -> None:
    """Refuse an export that needs what is not installed.

    Raises:
        MissingDependencyError: with what is absent, and the extra that brings it.
    """
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(f"an export to {what} needs {', '.join(absent)}: pip install 'gerund[{extra}]'")


def write_graph(prepared: Prepared, path: Path) -> None:
    """Write the graph, its weights in it or, where these are large, beside it.

    Raises:
        ModelError: torch cannot export the architecture.
    """
    graph = prepared.graph()
    longest = min(prepared.runtime.max_length or LONGEST_DIMENSION, LONGEST_DIMENSION)
    rows, length = torch.export.Dim("texts", min=1), torch.export.Dim("tokens", min=1, max=longest)
    ids_BT = torch.full((2, min(16, longest)), 3, dtype=torch.long)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, ids_BT.shape[1] // 2 :] = 0
    inputs: dict[str, Tensor] = dict(zip(INPUTS, (ids_BT, mask_BT), strict=True))
    shapes: dict[str, dict[int, Any]] = {name: {0: rows, 1: length} for name in inputs}
    if graph.begin is None:
        inputs[POOLED_FROM], shapes[POOLED_FROM] = torch.ones(2, dtype=torch.long), {0: rows}
    try:
        with torch.no_grad(), _silence():
            program = torch.onnx.export(
                graph.eval(),
                kwargs=inputs,
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=[VECTORS, STATES],
                dynamic_shapes=shapes,
            )
            assert program is not None
            program.save(str(path), external_data=prepared.nbytes > _ONE_FILE)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"torch cannot export this {prepared.kind} model to ONNX ({type(error).__name__}: {reason})"
        ) from error


def quantize(path: Path) -> None:
    """Put eight bits in the place of float32 wherever something is multiplied with a weight."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_name("plain.onnx")
    options = onnxruntime.SessionOptions()
    # Weights stand in the graph as torch has them, to be transposed each time, and would not be taken for weights.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(plain)
    options.log_severity_level = 3
    with _silence():
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Seven of the eight bits: products of eight overflow on processors with AVX2 that lack VNNI (cosines of 0.91).
        quantize_dynamic(str(plain), str(path), per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    plain.unlink()


def check(prepared: Prepared, path: Path, near: float = graphs.NEAR) -> float:
    """Compare what onnxruntime makes of the graph with gerund's vectors.

    Returns:
        The largest cosine distance.

    Raises:
        ModelError: it is something else, or nothing.
    """
    import onnxruntime

    def opened() -> Any:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    session = graphs.demand(prepared.kind, "onnxruntime", opened)

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        [vectors_BD] = session.run([VECTORS], dict(given))
        return np.asarray(vectors_BD)

    return graphs.check(prepared, run, "onnxruntime", near)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the exporter: what it says is about operators that are not used here."""
    noisy = [logging.getLogger(name) for name in ("", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [one.level for one in noisy]
    for one in noisy:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(noisy, levels, strict=True):
            one.setLevel(level)
