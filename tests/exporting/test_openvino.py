"""What OpenVINO makes of an exported graph is what gerund makes of the model."""

import shutil
import sys
from pathlib import Path

import pytest

import gerund
from gerund import LanguageModel
from gerund.errors import ConfigError
from gerund.exporting import onnx
from gerund.exporting.onnx import MODEL_FILE
from gerund.exporting.shared import Export
from tests.exporting.test_onnx import FIND_SPEC, check_finds_mistakes, check_vectors

pytestmark = pytest.mark.skipif(
    any(FIND_SPEC(name) is None for name in ("openvino", "onnx", "onnxscript")), reason="OpenVINO is not installed"
)


@pytest.mark.slow
def test_vectors(
    two_layers: Path, prompted: LanguageModel, onnx_export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The graph that is translated is the one that the export to ONNX wrote for the same model.
    graph = onnx_export.folder / MODEL_FILE
    monkeypatch.setattr(onnx, "write_graph", lambda _, path: shutil.copy(graph, path))
    lm = prompted
    done = lm.export(tmp_path / "out", "openvino")
    assert done.load == f"openvino.Core().compile_model({str(tmp_path / 'out' / 'openvino_model.xml')!r}, 'CPU')"
    # What reports every import over the network was left aside, and nothing stands in its place.
    assert "openvino_telemetry" not in sys.modules
    left = {"openvino_model.xml", "openvino_model.bin", "openvino.json", "README.md"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*left, "tokenizer.json", "tokenizer_config.json"}
    begins = check_vectors(lm, tmp_path / "out", "openvino.json", monkeypatch)
    check_finds_mistakes(onnx.check_openvino, "OpenVINO", two_layers, begins, tmp_path / "out" / "openvino_model.xml")


@pytest.mark.slow
def test_refusals(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads a text twice; OpenVINO is for the other plans"):
        gerund.load(tiny_folder, attention="echo").export(tmp_path / "out", "openvino")
    with pytest.raises(ConfigError, match="integers of 64 bits, which OpenVINO cuts to 32; export as onnx"):
        gerund.load().export(tmp_path / "out", "openvino")
    assert list(tmp_path.iterdir()) == []
