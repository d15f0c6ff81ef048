"""Whether a model can be opened without torch: a quantized GGUF file on a processor, read as it is."""

import os
import platform
import sys
from importlib.util import find_spec as installed
from pathlib import Path

from gerund.errors import GerundError
from gerund.gguf_file import read_file
from gerund.models.sources import Source, find_spec
from gerund.packed.shape import read_shape
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.model_spec import ModelSpec

PLAIN = frozenset(("F32", "F16", "BF16"))
"""Types of weights that are not packed."""
# Any other setting is torch's, or says how the model reads.
_SETTINGS = frozenset(("model", "runtime", "device", "adapter"))
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD128")


def light_source(spec: ModelSpec) -> Source | None:
    """Return the source of a spec's model where no torch is needed to generate with it; None leaves it to torch.

    None says nothing about the packed runtime: torch looks closer, and has the errors.
    """
    given = spec.model_dump(exclude_defaults=True)
    usual = set(given) <= _SETTINGS and spec.runtime != "torch" and spec.adapter in (None, NO_ADAPTER)
    on_processor = spec.device == "cpu" or (spec.device == "auto" and not may_have_gpu())
    if not usual or not on_processor or not all(map(installed, ("onnxruntime", "onnx"))):
        return None
    try:
        source = find_spec(spec)
        if source.gguf is None or source.adapted is not None:
            return None
        file = read_file(source.gguf)
        if spec.runtime == "auto" and not set(file.types) - PLAIN:
            return None
        read_shape(file)
    except GerundError:
        return None
    return source


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here; without torch there is none."""
    if installed("torch") is None:
        return False
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    if os.name == "nt":
        return (Path(os.environ.get("SYSTEMROOT", "C:/Windows")) / "System32" / "nvcuda.dll").exists()
    return any(map(os.path.exists, _GPU_FILES))


def usual_threads() -> int | None:
    """Return how many threads a network uses: as many as torch would; None for one per core."""
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(given) if given.isdecimal() and int(given) else None
