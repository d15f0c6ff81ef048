"""Whether a model can run without torch: a quantized GGUF file on a CPU, with no setting that needs torch."""

import ctypes
import os
import platform
import sys
from contextlib import suppress
from importlib.util import find_spec as find_module
from pathlib import Path

from gerund.errors import GerundError
from gerund.gguf_file import read_file
from gerund.models.sources import Source, find_spec
from gerund.packed.shape import read_shape
from gerund.settings.encoder import EncoderConfig
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.settings.plan import ResolvedPlan
from gerund.settings.templates import HIDDEN

ARITHMETIC = "packed: activations in 8 bits"
"""The arithmetic of a packed network, a part of its fingerprint."""
PLAIN = frozenset(("F32", "F16", "BF16"))
"""Types of weights that are not packed."""
# Any other setting is torch's, or says how the model reads.
_SETTINGS = frozenset(("model", "runtime", "device", "adapter"))
_READS = frozenset((*EncoderSpec.model_fields, "reranker"))
_GPU_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg", "/dev/dri/renderD128")

NEEDS_TORCH = "torch and transformers, which are not installed: pip install torch transformers peft accelerate"
"""The end of messages about what is missing without torch."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's parameters of mallopt
_memory_returns = [False]  # as it was set last


def return_freed_memory(*, returns: bool = True) -> None:
    """Have the system take back what is freed, in blocks of 128 KiB and more; done with glibc alone.

    glibc comes to keep blocks of up to 32 MiB, so that a process stays as large as its largest batch made it. That is
    faster where torch computes, by a third: ``returns=False``, and nothing is changed where torch is loaded already.
    """
    if returns == _memory_returns[0] or (returns and "torch" in sys.modules):
        return
    _memory_returns[0] = returns
    size = 1 << (17 if returns else 25)
    with suppress(AttributeError, OSError, TypeError):
        set_parameter = ctypes.CDLL(None).mallopt
        set_parameter(_MMAP_THRESHOLD, size)
        set_parameter(_TRIM_THRESHOLD, 2 * size)


def trim_memory() -> None:
    """Hand back to the system what is free between what stays, such as what loading a model left; glibc alone can."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def light_source(spec: ModelSpec, *, encodes: bool = False) -> Source | None:
    """Return the source of a spec's model where no torch is needed to generate with it; None leaves it to torch.

    ``encodes`` asks for a model that may encode too. How it reads texts is then for the caller to look at.

    None says nothing about the packed runtime: torch looks closer, and has the errors.
    """
    given = spec.model_dump(exclude_defaults=True)
    known = _SETTINGS | _READS if encodes else _SETTINGS
    adapters = (None, NO_ADAPTER, AUTO_ADAPTER) if encodes else (None, NO_ADAPTER)
    usual = set(given) <= known and spec.runtime != "torch" and spec.adapter in adapters
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


def installed(module: str) -> bool:
    """Whether a module is there to be imported."""
    try:
        return find_module(module) is not None
    except ImportError:
        return False


def for_many_texts(spec: ModelSpec) -> ModelSpec:
    """Return a spec for the runtime that reads many texts fastest, where it names none.

    A packed network reads about as fast as torch in float32, and starts sooner. Where the processor computes in
    bfloat16, torch reads several times as fast; it writes slower everywhere.
    """
    open_to_choice = spec.runtime == "auto" and spec.weights is None and spec.device in ("auto", "cpu")
    return spec.model_copy(update={"runtime": "torch"}) if open_to_choice and may_have_bfloat16() else spec


def may_have_bfloat16() -> bool:
    """Whether torch may compute in bfloat16 here by instructions of the processor; without torch nothing does."""
    if not installed("torch") or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return sys.platform != "darwin"
    return "avx512_bf16" in flags or "amx_tile" in flags


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here; without torch there is none."""
    if not installed("torch"):
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


def not_packed(plan: ResolvedPlan, encoder: EncoderConfig | None = None) -> str | None:
    """Return why a packed network cannot read a text under a plan; None where it can."""
    what = None
    if plan.stream is not None:
        what = "plans that run layers twice (inter, extra, extend)"
    elif plan.skips:
        what = "plans with skips"
    elif encoder is not None and encoder.prepend:
        what = "a prepended token (prepend)"
    elif encoder is not None and encoder.states != HIDDEN:
        what = f"the attention's parts (states={encoder.states})"
    elif encoder is not None and encoder.generated:
        what = "states of generated tokens (generated)"
    return what and f"{what} are computed by runtime torch alone"
