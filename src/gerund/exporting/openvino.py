"""Export an encoder to OpenVINO: the ONNX graph in OpenVINO's own form, verified with its runtime.

Importing ``openvino`` reports itself over the network where ``openvino_telemetry`` is installed, which pip installs
with it; here it is imported without.
"""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gerund.errors import ConfigError
from gerund.exporting import onnx
from gerund.exporting.onnx import VECTORS, Prepared
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.models.sentence_transformers_folder import write_json

# The name that optimum gives such a graph; the weights are in the file of the same name that ends in .bin.
MODEL_FILE = "openvino_model.xml"
SETTINGS_FILE = "openvino.json"
_NEEDED = ("openvino", "onnx", "onnxscript")
_REPORTER = "openvino_telemetry"
# Without it the runtime computes in bfloat16 or float16 wherever the processor has them.
_EXACTLY = {"INFERENCE_PRECISION_HINT": "f32"}


def write(runtime: EncoderRuntime, folder: Path) -> None:
    """Fill ``folder`` with the graph, its tokenizer, ``openvino.json`` and a README, after trying the graph."""
    onnx.demand_installed(_NEEDED, "OpenVINO", "openvino")
    onnx.refuse(runtime, "OpenVINO")
    if runtime.head is not None and runtime.head.words is not None:
        raise ConfigError(
            "this encoder adds vectors of words, found by integers of 64 bits, which OpenVINO cuts to 32; "
            "export as onnx"
        )
    prepared = onnx.prepare(runtime, folder)
    with TemporaryDirectory(dir=folder) as room:
        onnx.write_graph(prepared, Path(room) / onnx.MODEL_FILE)
        onnx.demand(prepared.kind, "OpenVINO", lambda: translate(Path(room) / onnx.MODEL_FILE, folder / MODEL_FILE))
    check(prepared, folder / MODEL_FILE)
    prepared.tokenizer.save_pretrained(folder)
    write_json(folder / SETTINGS_FILE, onnx.settings(prepared))
    text = onnx.readme(
        prepared,
        "A text encoder for OpenVINO, exported by gerund",
        "import openvino",
        f'model = openvino.Core().compile_model("{MODEL_FILE}", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})',
        "vectors, states = model(...).values()",
        SETTINGS_FILE,
    )
    note = (
        "\nWithout the hint, OpenVINO computes in bfloat16 or float16 where the processor has them: faster, and not "
        "quite the same vectors.\n"
    )
    (folder / "README.md").write_text(text + note, encoding="utf-8")


def check(prepared: Prepared, path: Path) -> None:
    """Compare what OpenVINO makes of the graph with gerund's vectors."""
    model = onnx.demand(prepared.kind, "OpenVINO", lambda: compiled(path))

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(model(dict(given))[VECTORS])

    onnx.compare(prepared, run, "OpenVINO")


def translate(source: Path, target: Path) -> None:
    """Write an ONNX graph in OpenVINO's form, in float32."""
    openvino = _openvino()
    openvino.save_model(openvino.Core().read_model(str(source)), str(target), compress_to_fp16=False)


def compiled(path: Path) -> Any:
    """Return a graph, ready to be called with its inputs by name; it computes in float32."""
    return _openvino().Core().compile_model(str(path), "CPU", _EXACTLY)


def _openvino() -> Any:
    """Import OpenVINO, and not what would report that over the network."""
    if "openvino" in sys.modules or _REPORTER in sys.modules:
        return importlib.import_module("openvino")
    # None stands for a module that is not there, for which OpenVINO has a substitute that does nothing.
    sys.modules[_REPORTER] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[_REPORTER]
