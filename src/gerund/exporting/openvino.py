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

from gerund.checks import write_json
from gerund.errors import ConfigError
from gerund.exporting import onnx
from gerund.exporting.onnx import VECTORS, Prepared
from gerund.exporting.shared import Export, require_installed
from gerund.inference.encode.runtime import EncoderRuntime

# The name that optimum gives such a graph; the weights are in the file of the same name that ends in .bin.
MODEL_FILE = "openvino_model.xml"
SETTINGS_FILE = "openvino.json"
_NEEDED = ("openvino", "onnx", "onnxscript")
_REPORTER = "openvino_telemetry"
# Without it the runtime computes in bfloat16 or float16 wherever the processor has them.
_EXACTLY = {"INFERENCE_PRECISION_HINT": "f32"}


def write(runtime: EncoderRuntime, work: Path, folder: Path) -> Export:
    """Fill ``work`` with the graph, its tokenizer, ``openvino.json`` and a README, and verify the graph."""
    require_installed(_NEEDED, "OpenVINO", "openvino")
    onnx.check_exportable(runtime, "OpenVINO")
    if runtime.head is not None and runtime.head.words is not None:
        raise ConfigError(
            "this encoder adds vectors of words, found by integers of 64 bits, which OpenVINO cuts to 32; "
            "export as onnx"
        )
    prepared = onnx.prepare(runtime, work)
    with TemporaryDirectory(dir=work) as temporary:
        graph = Path(temporary) / onnx.MODEL_FILE
        onnx.write_graph(prepared, graph)
        onnx.attempt(prepared.kind, "OpenVINO", lambda: translate(graph, work / MODEL_FILE))
    check(prepared, work / MODEL_FILE)
    prepared.tokenizer.save_pretrained(work)
    write_json(work / SETTINGS_FILE, onnx.settings(prepared))
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
    (work / "README.md").write_text(text + note, encoding="utf-8")
    return Export(folder, f"openvino.Core().compile_model({str(folder / MODEL_FILE)!r}, 'CPU')")


def check(prepared: Prepared, path: Path) -> None:
    """Compare OpenVINO's vectors with gerund's."""
    model = onnx.attempt(prepared.kind, "OpenVINO", lambda: compiled(path))

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(model(dict(given))[VECTORS])

    onnx.compare(prepared, run, "OpenVINO")


def translate(source: Path, target: Path) -> None:
    """Convert an ONNX graph to OpenVINO's form, in float32."""
    openvino = _openvino()
    openvino.save_model(openvino.Core().read_model(str(source)), str(target), compress_to_fp16=False)


def compiled(path: Path) -> Any:
    """Return a compiled graph, which is called with its inputs by name and computes in float32."""
    return _openvino().Core().compile_model(str(path), "CPU", _EXACTLY)


def _openvino() -> Any:
    """Import OpenVINO without its telemetry."""
    if "openvino" in sys.modules or _REPORTER in sys.modules:
        return importlib.import_module("openvino")
    # None makes the import fail, and OpenVINO then does without.
    sys.modules[_REPORTER] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[_REPORTER]
