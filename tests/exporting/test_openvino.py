"""What OpenVINO makes of an exported graph is what gerund makes of the model."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

import gerund
from gerund import LanguageModel
from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.exporting import onnx
from gerund.exporting.onnx import MODEL_FILE, Prepared
from gerund.exporting.shared import Export, plain_tokenizer
from tests.cli.helpers import run_cli
from tests.exporting.test_onnx import FIND_SPEC, check_vectors

needs_openvino = pytest.mark.skipif(
    any(FIND_SPEC(name) is None for name in ("openvino", "onnx", "onnxscript")), reason="OpenVINO is not installed"
)


@needs_openvino
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
    # Beside a model that is read otherwise, the same graph is found to be wrong.
    other = gerund.load(two_layers, attention="bidir", dtype="float32").runtime
    prepared = Prepared(other, plain_tokenizer(other), {"": begins[""], "Q:": begins["query"]})
    with pytest.raises(ModelError, match="OpenVINO computes other vectors than gerund"):
        onnx.check_openvino(prepared, tmp_path / "out" / "openvino_model.xml")
    (tmp_path / "broken.xml").write_bytes(b"x")
    with pytest.raises(ModelError, match="OpenVINO refuses its graph"):
        onnx.check_openvino(prepared, tmp_path / "broken.xml")


@pytest.mark.slow
@needs_openvino
def test_refusals(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reads a text twice; OpenVINO is for the other plans"):
        gerund.load(tiny_folder, attention="echo").export(tmp_path / "out", "openvino")
    with pytest.raises(ConfigError, match="integers of 64 bits, which OpenVINO cuts to 32; export as onnx"):
        gerund.load().export(tmp_path / "out", "openvino")
    assert list(tmp_path.iterdir()) == []


def test_without_the_libraries(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "openvino" else FIND_SPEC(name))
    with pytest.raises(MissingDependencyError, match=r"needs openvino.*: pip install 'gerund\[openvino\]'"):
        gerund.load(tiny_folder).export(tmp_path / "out", "openvino")
    assert "'gerund[openvino]'" in run_cli("export", tiny_folder, tmp_path / "out", "--format", "openvino").mistake
